"""Similarity of representations: PWCCA, SVCCA, CCA and linear CKA between layers of two models.

    python -m xformer.analysis pwcca CHECKPOINT CHECKPOINT data=STORE out=DIR
    python -m xformer.analysis pwcca ckpt/bert ckpt/plus data=stores/protein layers=last \\
      mapping=symbols:0 mapping_b=none out=figures
    python -m xformer.analysis pwcca a.h5 b.h5 out=DIR        # files that `capture` wrote

Both checkpoints read the same examples. Every token is a sample, and every hidden unit is a neuron.
Layer 0 is the output of the embeddings. Give the same checkpoint twice to compare its layers with
each other. Comparing one layer with one layer takes one pass over the examples (two with
variant=anatome); comparing several layers takes two.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xformer.analysis import capture, drawing
from xformer.analysis.examples import ExamplesConfig, look_inside, open_examples, parse_layers
from xformer.analysis.factor import Basis, Factor, basis
from xformer.analysis.subcommand import Subcommand, publish
from xformer.config import Paths
from xformer.data import style
from xformer.data.display import many, say
from xformer.data.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shapes: n samples (tokens), d neurons of a network, r its rank, k = min(r, r'). U (n, r) is the
# orthonormal basis of a network's samples (see `Basis`). A prime means the second network.

Variant = Literal["definition", "svcca", "anatome"]
LayerStream = Callable[[], Iterator[tuple[list[Tensor], list[Tensor]]]]
KEPT_VARIANCE = 0.99  # by SVCCA (Raghu et al. 2017, section 2)
EQUAL = 1 - 1e-6  # different networks rarely have a `cca` above this
MEASURES = ("pwcca", "svcca", "cca", "cka")


@dataclass(frozen=True)
class Similarity:
    """Measures of how similar the representations of two networks are; 1 means equal.

    `pwcca` takes its weights from the first network, `pwcca_reversed` from the second.
    `correlations` (k,) are the canonical correlations, largest first, and `weights` (k,) are the
    weights that `pwcca` gives them. `ranks` are the numbers of directions of the two networks;
    directions whose singular value is below 1e-6 of a network's largest do not count. `chance` is
    the mean correlation of independent Gaussian samples of the same size and ranks.
    """

    pwcca: float
    pwcca_reversed: float
    svcca: float
    cca: float
    cka: float
    correlations: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    ranks: tuple[int, int]
    widths: tuple[int, int]
    samples: int
    chance: float


def pwcca(x: Any, y: Any, variant: Variant = "definition") -> float:
    """Projection-weighted CCA similarity of two networks, 0 to 1 (Morcos et al. 2018, section 2).

    x (n, d) and y (n, d') are arrays or tensors with a row for each sample. With h_i (n,) the i-th
    canonical vector of x, rho_i its correlation and x_j (n,) the j-th centred neuron of x:

        alpha_i = sum over j of |<h_i, x_j>|,      PWCCA = sum of alpha_i rho_i / sum of alpha_i

    Two implementations compute something else: google/svcca and anatome. The variants "svcca" and
    "anatome" reproduce their values (see docs/analysis.md). Raises ValueError if the variant
    is unknown, or if the arrays do not match, are constant, or are not finite. Warns if there are
    too few samples.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"variant={variant!r} must be one of {', '.join(get_args(Variant))}")
    x, y = _matrices(x, y)
    pair = factor_together(iter([(x, y)]))
    measures = _measured(pair)
    if variant == "definition":
        return measures.pwcca
    return _as_in_google_svcca(pair) if variant == "svcca" else _as_in_anatome(pair, iter([x]))


def compare_networks(x: Any, y: Any) -> Similarity:
    """All measures of two networks, from arrays (n, d) and (n, d').

    Raises ValueError and warns as `pwcca` does.
    """
    return _measured(factor_together(iter([_matrices(x, y)])))


def _measured(pair: NetworkPair) -> Similarity:
    """All measures of a pair. Warns the caller's caller if there are too few samples."""
    measures = similarity(pair.x, pair.y, pair.inner)
    if message := too_few(measures.samples, measures.ranks):
        warnings.warn(message, stacklevel=3)
    return measures


def _matrices(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Both arrays as float64 tensors. Raises ValueError if they are not samples of two networks."""
    x, y = (
        array.detach().double()
        if isinstance(array, Tensor)
        else torch.from_numpy(np.array(array, np.float64))
        for array in (x, y)
    )
    for name, array in (("x", x), ("y", y)):
        if array.dim() != 2 or len(array) < 2:
            raise ValueError(
                f"{name} has the shape {tuple(array.shape)}; it must be (samples, neurons), with "
                "at least 2 samples"
            )
        if not torch.isfinite(array).all():
            raise ValueError(f"{name} has numbers that are not finite (NaN or infinite)")
    if len(x) != len(y):
        raise ValueError(
            f"x has {len(x)} samples and y has {len(y)}: row i of both must be the same sample"
        )
    return x, y


def too_few(samples: int, ranks: tuple[int, int]) -> str:
    """A warning if there are so few samples that some correlations must be 1, otherwise ""."""
    if samples > sum(ranks):
        return ""
    return (
        f"{samples:,} tokens are too few for {ranks[0]} and {ranks[1]} directions: some "
        f"correlations are 1 for any data; use more than {sum(ranks):,} tokens, and ideally "
        f"{10 * max(ranks):,}"
    )


def too_similar(similarities: list[list[dict[str, Any]]], layers: list[list[int]]) -> str:
    """A warning if `cca` is 1 for a layer of one network and a layer of another, otherwise "".
    `similarities` has a row for each layer of the first network. `layers` are the layers' numbers.
    """
    equal = [
        f"{first} and {second}"
        for first, row in zip(layers[0], similarities, strict=True)
        for second, cell in zip(layers[1], row, strict=True)
        if cell["cca"] > EQUAL
    ]
    if not equal:
        return ""
    more = f" (and {many(len(equal) - 1, 'other pair')})" if equal[1:] else ""
    return (
        f"cca is 1 for the layers {equal[0]}{more}: unless they compute the same, they depend on "
        "too few distinct inputs for CCA; look at cka, or give more distinct text"
    )


# ------------------------------------------------------------------------------- the measures


@dataclass(frozen=True)
class NetworkPair:
    """The bases of two networks over the same samples."""

    x: Basis
    y: Basis
    inner: Tensor  # (r, r') U^T U' of the bases


def factor_together(chunks: Iterator[tuple[Tensor, Tensor]]) -> NetworkPair:
    """The bases of two matrices that arrive in chunks of rows, in one pass and constant memory.

    Both are factored as one matrix [X Y], so no second pass is needed for U^T U'.
    """
    factor: Factor | None = None
    for x, y in chunks:
        width = x.size(1)
        factor = factor or Factor(width + y.size(1))
        factor.add(torch.cat([x, y], 1))
    if factor is None:
        raise ValueError("there are no samples")
    r, mean = factor.result()
    x_basis, u = basis(r[:, :width], mean[:width], factor.rows)
    y_basis, v = basis(r[:, width:], mean[width:], factor.rows)
    return NetworkPair(x_basis, y_basis, u.T @ v)


def similarity(x: Basis, y: Basis, inner: Tensor) -> Similarity:
    """All measures, from two bases and `inner` = U^T U' (r, r')."""
    p, rho, q = torch.linalg.svd(inner, full_matrices=False)  # (r, k), (k,), (k, r')
    rho = rho.clamp(max=1.0)
    # <h_i, x_j> for h_i = U p_i and x_j = U diag(scale) directions[:, j]
    weights = (p.T @ (x.scale[:, None] * x.directions)).abs().sum(1)
    reverse = (q @ (y.scale[:, None] * y.directions)).abs().sum(1)
    a, b = _svcca_rank(x), _svcca_rank(y)
    cross = x.scale[:, None] * inner * y.scale
    return Similarity(
        pwcca=float(weights @ rho / weights.sum()),
        pwcca_reversed=float(reverse @ rho / reverse.sum()),
        svcca=float(torch.linalg.svdvals(inner[:a, :b]).clamp(max=1.0).mean()),
        cca=float(rho.mean()),
        cka=float(cross.square().sum() / (x.scale**2).norm() / (y.scale**2).norm()),
        correlations=rho.cpu().numpy(),
        weights=(weights / weights.sum()).cpu().numpy(),
        ranks=(x.rank, y.rank),
        widths=(x.width, y.width),
        samples=x.rows,
        chance=chance(x.rows, x.rank, y.rank),
    )


def _svcca_rank(network: Basis) -> int:
    """The number of directions that SVCCA keeps: as many as explain 99 % of the variance."""
    share = torch.cumsum(network.scale**2, 0) / (network.scale**2).sum()
    return int((share < KEPT_VARIANCE).sum()) + 1


def chance(samples: int, rank_x: int, rank_y: int) -> float:
    """Mean canonical correlation of independent Gaussian data, in the limit of many directions.

    (Wachter 1980.) A similarity is meaningful only if it is well above this.
    """
    from scipy.integrate import quad

    free = samples - 1
    a, b = sorted((rank_x / free, rank_y / free))
    if a + b >= 1 and a >= 1:
        return 1.0
    low = (math.sqrt(a * (1 - b)) - math.sqrt(b * (1 - a))) ** 2 if b < 1 else 1.0
    high = (math.sqrt(a * (1 - b)) + math.sqrt(b * (1 - a))) ** 2 if b < 1 else 1.0
    ones = max(0.0, a + b - 1) / a  # share of correlations that are 1 for any data

    # Rho times the density of rho^2 (`value`). As a function of t this integrand has no poles.
    def density(t: float) -> float:
        value = (high + low) / 2 - (high - low) / 2 * math.cos(t)
        root = ((high - low) / 2 * math.sin(t)) ** 2
        return math.sqrt(value) * root / (2 * math.pi * a * value * (1 - value))

    middle = quad(density, 0, math.pi)[0] if high > low else 0.0
    return min(1.0, middle + ones)


def _as_in_google_svcca(pair: NetworkPair) -> float:
    """The value that compute_pwcca of google/svcca computes.

    The weights come from the network with fewer neurons. That code applies the canonical
    coefficients to unwhitened neurons, adds the neurons' means, orthonormalises the directions in
    order, and projects the uncentred neurons onto them. Because means are added, the sign of a
    coefficient vector matters. It is arbitrary in that code; here the largest entry is positive.
    """
    x, y, inner = pair.x, pair.y, pair.inner
    if x.width > y.width:
        x, y, inner = y, x, inner.T
    # With the symmetric root of the covariance the coefficients are directions^T p.
    p, rho, _ = torch.linalg.svd(inner, full_matrices=False)
    coefficients = x.directions.T @ p  # (d, k)
    largest = coefficients.abs().argmax(0, keepdim=True)
    p = p * coefficients.gather(0, largest).sign()
    constant = math.sqrt(x.rows)  # norm of the vector of ones, which is orthogonal to U
    centred = x.scale[:, None] * x.directions  # U^T X
    directions = torch.cat([x.scale[:, None] * p, constant * x.mean[None, : len(rho)]])
    neurons = torch.cat([centred, constant * x.mean[None]])
    orthonormal = torch.linalg.qr(directions).Q  # (r + 1, k)
    weights = (orthonormal.T @ neurons).abs().sum(1)
    return float(weights @ rho / weights.sum())


def _as_in_anatome(pair: NetworkPair, chunks: Iterator[Tensor]) -> float:
    """The value that pwcca_distance of anatome computes.

    That code orthonormalises the coefficients of the canonical vectors of x and projects x onto
    them. A weight is the sum over samples of the absolute values. `chunks` are the rows of x again.
    """
    x = pair.x
    p, rho, _ = torch.linalg.svd(pair.inner, full_matrices=False)
    coefficients = x.directions.T @ (p / x.scale[:, None])  # (d, k)
    orthonormal = torch.linalg.qr(coefficients).Q
    weights = torch.zeros_like(rho)
    for chunk in chunks:
        weights += ((chunk.to(torch.float64) - x.mean) @ orthonormal).abs().sum(0)
    return float(weights @ rho / weights.sum())


# ------------------------------------------------------------------------------ many layers


def grid(
    stream: LayerStream, layers: Sequence[Sequence[int]] | None = None
) -> list[list[Similarity]]:
    """The similarity of every layer of one network with every layer of another, in two passes.

    `stream()` starts a pass, which yields chunks of samples: for each network, a list of layers (n,
    d). The first pass computes the basis of each layer, the second the inner products of the bases.
    Raises ValueError if the second pass has other samples than the first, or if a layer is
    constant. The message has the layer's number, which `layers` may give.
    """
    factors: list[list[Factor]] = []
    for chunk in stream():
        factors = factors or [[Factor(x.size(1)) for x in side] for side in chunk]
        for side, values in zip(factors, chunk, strict=True):
            for factor, x in zip(side, values, strict=True):
                factor.add(x)
    bases: list[list[Basis]] = []
    for number, side in enumerate(factors):
        bases.append([])
        for i, factor in enumerate(side):
            try:
                bases[-1].append(basis(*factor.result(), factor.rows)[0])
            except ValueError as error:
                layer = layers[number][i] if layers else i
                which = ("first", "second")[number]
                raise ValueError(f"layer {layer} of the {which} network: {error}") from None
    inner = [
        [torch.zeros(a.rank, b.rank, dtype=torch.float64, device=a.scale.device) for b in bases[1]]
        for a in bases[0]
    ]
    rows = 0
    for chunk in stream():
        rows += len(chunk[0][0])
        ours, theirs = (
            [b.coordinates(x) for b, x in zip(side, values, strict=True)]
            for side, values in zip(bases, chunk, strict=True)
        )
        for i, u in enumerate(ours):
            for j, v in enumerate(theirs):
                inner[i][j].addmm_(u.T, v)
    if rows != bases[0][0].rows:
        raise ValueError(
            f"the first pass had {bases[0][0].rows} samples and the second {rows}: `stream` must "
            "start anew at each call"
        )
    return [
        [similarity(a, b, inner[i][j]) for j, b in enumerate(bases[1])]
        for i, a in enumerate(bases[0])
    ]


# ------------------------------------------------------------------------------ the command


class PwccaConfig(ExamplesConfig):
    """Which layers are compared, and by which measure."""

    data: Paths = ""
    """The store that the examples come from, or a list of stores to join. Leave it out for captures
    (.h5)."""
    layers: str = "all"
    """Layers of the first network: all, last, or numbers such as 0,6,12."""
    layers_b: str | None = None
    """Layers of the second network. Default: the same as `layers`."""
    variant: Variant = "definition"
    """PWCCA as Morcos et al. 2018 define it, or as google/svcca or anatome compute it."""
    examples: int = Field(512, ge=1)
    """Number of rows, drawn at random with `seed`, or all rows if the split has fewer."""
    trust: bool = False
    """Read captures whose checksums are missing or wrong. A damaged or malicious HDF5 file can
    make the HDF5 library crash or hang."""


SUBCOMMAND = Subcommand("pwcca", PwccaConfig, __doc__ or "", 2, 2, "checkpoint")


def run(paths: list[str], config: PwccaConfig) -> None:
    """`python -m xformer.analysis pwcca A B key=value ...`"""
    described, layers, stream_of = _open_source(paths, config)
    chosen = [
        parse_layers(config.layers, layers[0], paths[0]),
        parse_layers(config.layers_b or config.layers, layers[1], paths[1], "layers_b"),
    ]
    try:
        similarities = _compare_layers(lambda: stream_of(chosen), chosen, config.variant)
    except ValueError as error:
        raise BadInput(str(error)) from None
    weights = {checkpoint["weights"] for checkpoint in described["checkpoints"]}
    if len(weights) > 1 and (message := too_similar(similarities, chosen)):
        say(f"warning: {message}", error=True)
    result = {
        "analysis": "pwcca",
        "variant": config.variant,
        **described,
        "layers": chosen,
        "similarity": similarities,
    }
    _publish(config, result)


Source = Callable[[list[list[int]]], Iterator[tuple[list[Tensor], list[Tensor]]]]


def _open_source(paths: list[str], config: PwccaConfig) -> tuple[dict[str, Any], list[int], Source]:
    """Open two checkpoints or two captures.

    Returns their description in the result, their numbers of layers, and a function that starts a
    pass over the chosen layers of both.
    """
    if all(path.endswith(".h5") for path in paths):
        pair = capture.open_pair(paths, config.trust)
        chosen_before = {"data", "split", "examples", "max_tokens", "mapping", "mapping_b", "seed"}
        if fixed := sorted(config.model_fields_set & chosen_before):
            raise BadInput(f"{fixed[0]}= was chosen when the captures were made: leave it out")
        if coarse := [str(c.path) for c in pair.captures if c.attributes["dtype"] == "float16"]:
            say(
                f"warning: {' and '.join(coarse)}: float16 adds directions of rounding errors, "
                "which change ranks, and can make cca far too low; the other measures hardly "
                "change; for cca, capture with dtype=float32",
                error=True,
            )
        return pair.describe(config.names), pair.layers, pair.stream
    if any(path.endswith(".h5") for path in paths):
        raise BadInput(
            f"{paths[0]} and {paths[1]}: give two checkpoints, or two captures (.h5), because the "
            "examples must be the same"
        )
    if config.trust:
        raise BadInput("trust= applies only to captures (.h5): leave it out")
    if not config.data:
        raise BadInput("data= is missing: checkpoints read a store; give data=STORE")
    examples = open_examples(config, paths)

    def stream(chosen: list[list[int]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        for part in examples.parts():
            both = []
            for loaded, numbers in zip(examples.models, chosen, strict=True):
                hidden = look_inside(loaded, part)[1].hidden
                both.append([hidden[number] for number in numbers])
            yield both[0], both[1]

    return examples.describe(), [loaded.layers for loaded in examples.models], stream


def _compare_layers(
    stream: LayerStream, chosen: list[list[int]], variant: Variant
) -> list[list[dict[str, Any]]]:
    """The similarity of each chosen layer of the first network with each of the second."""
    pair = None
    if len(chosen[0]) == len(chosen[1]) == 1:
        pair = factor_together((x[0], y[0]) for x, y in stream())
        rows = [[similarity(pair.x, pair.y, pair.inner)]]
    elif variant != "definition":
        raise BadInput(f"variant={variant} compares only one pair of layers: give layers=last")
    else:
        rows = grid(stream, chosen)
    widest = max((s for row in rows for s in row), key=lambda s: sum(s.ranks))
    if message := too_few(widest.samples, widest.ranks):
        say(f"warning: {message}", error=True)
    shown = [[_as_json(s, whole=len(rows) == len(row) == 1) for s in row] for row in rows]
    if pair is not None and variant == "svcca":
        shown[0][0]["pwcca"] = _as_in_google_svcca(pair)
    elif pair is not None and variant == "anatome":
        shown[0][0]["pwcca"] = _as_in_anatome(pair, (x[0] for x, _ in stream()))
    return shown


def _as_json(s: Similarity, whole: bool) -> dict[str, Any]:
    """The numbers of a similarity; with `whole` also those of every canonical direction."""
    numbers: dict[str, Any] = {name: getattr(s, name) for name in MEASURES}
    numbers |= {
        "pwcca_reversed": s.pwcca_reversed,
        "chance": s.chance,
        "ranks": list(s.ranks),
        "widths": list(s.widths),
        "samples": s.samples,
    }
    if whole:
        numbers |= {"correlations": s.correlations.tolist(), "weights": s.weights.tolist()}
    return numbers


def _publish(config: PwccaConfig, result: dict[str, Any]) -> None:
    last = result["similarity"][-1][-1]
    names = [c["name"] for c in result["checkpoints"]]
    layers = [numbers[-1] for numbers in result["layers"]]
    line = (
        f"pwcca {names[0]} layer {layers[0]} - {names[1]} layer {layers[1]}: "
        f"{last['pwcca']:.4f} (svcca {last['svcca']:.4f}, cca {last['cca']:.4f}, "
        f"cka {last['cka']:.4f}; chance {last['chance']:.4f}) on {last['samples']:,} tokens, "
        f"ranks {last['ranks'][0]} and {last['ranks'][1]}"
    )
    metrics = {name: last[name] for name in (*MEASURES, "pwcca_reversed", "chance")}
    publish(config, result, draw, line, {"last": metrics})


def draw(result: dict[str, Any]) -> Figure:
    """Heat maps of every measure over layers, or the correlations of a single pair of layers."""
    names = [drawing.short(c["name"]) for c in result["checkpoints"]]
    if len(result["similarity"]) == len(result["similarity"][0]) == 1:
        return _draw_pair(result, names)
    titles = {"pwcca": "PWCCA", "svcca": "SVCCA", "cca": "mean CCA", "cka": "linear CKA"}
    figure = style.new_figure(12.4, 3.7)
    axes = figure.subplots(1, 4, sharey=True)
    for panel, (measure, title) in zip(axes, titles.items(), strict=True):
        values = [[cell[measure] for cell in row] for row in result["similarity"]]
        image = drawing.heat_map(panel, values, title)
        panel.set_xticks(range(len(result["layers"][1])), result["layers"][1])
        panel.set_yticks(range(len(result["layers"][0])), result["layers"][0])
        panel.set_xlabel(f"layer of {names[1]}")
    axes[0].set_ylabel(f"layer of {names[0]}")
    bar = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01)
    bar.set_label("similarity (1: equal)")
    tokens = result["similarity"][0][0]["samples"]
    store = drawing.of_stores(result["data"]["store"])
    levels = sorted(f"{cell['chance']:.3f}" for row in result["similarity"] for cell in row)
    chance = levels[0] if levels[0] == levels[-1] else f"{levels[0]} to {levels[-1]}"
    figure.suptitle(
        f"{names[0]} and {names[1]} on {tokens:,} tokens of {store} (chance of CCA: {chance})",
        fontsize=10.5,
    )
    return figure


def _draw_pair(result: dict[str, Any], names: list[str]) -> Any:
    cell = result["similarity"][0][0]
    figure = style.new_figure(6.2, 3.8)
    axes = figure.subplots()
    axes.plot(
        range(1, len(cell["correlations"]) + 1),
        cell["correlations"],
        color="C0",
        lw=2,
        label="canonical correlations",
    )
    axes.plot(
        range(1, len(cell["weights"]) + 1),
        np.array(cell["weights"]) / max(cell["weights"]),
        color="C4",
        lw=1.2,
        label="their weights in PWCCA (largest: 1)",
    )
    for i, measure in enumerate(("pwcca", "cka")):
        axes.axhline(
            cell[measure],
            color=f"C{i + 1}",
            ls="--",
            lw=1.4,
            label=f"{measure.upper()} {cell[measure]:.3f}",
        )
    axes.axhline(
        cell["chance"], color=style.FAINT, ls=":", lw=1.4, label=f"chance {cell['chance']:.3f}"
    )
    axes.set(
        xlabel="canonical direction",
        ylabel="correlation",
        title=f"{names[0]} layer {result['layers'][0][0]}, {names[1]} layer "
        f"{result['layers'][1][0]}, {cell['samples']:,} tokens",
    )
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)
    return figure
