"""Dynamical isometry: singular values of d(last hidden states) / d(input word embeddings).

    python -m xformer.analysis jacobian CHECKPOINT [CHECKPOINT ...] data=STORE out=DIR
    python -m xformer.analysis jacobian ckpt/bert ckpt/bert-clean data=stores/rte token=0 \\
      examples=20 whole=true probes=8 out=figures

Of one output token the Jacobian is computed exactly, a product a hidden unit. Of all output tokens
together (`whole=true`) the spectrum is estimated: Golub-Kahan-Lanczos quadrature over random
probes, whose standard error is reported. Kao & Lee 2021, section 4.4.3, F.1 and figure 10; a model
whose singular values are all 1 is dynamically isometric (Saxe et al. 2014).

L length of an example, C hidden size, E embedding size, n = L E, B copies of the example, P
probes, m steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call, jvp

from xformer.analysis import drawing
from xformer.analysis.examples import ExamplesConfig, LoadedModel, look_inside, open_examples
from xformer.analysis.subcommand import Subcommand, publish, with_progress
from xformer.data import style
from xformer.data.batch import Batch
from xformer.data.errors import BadInput
from xformer.ops.native import only_plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Function = Callable[[Tensor], Tensor]  # (B, L, E) -> (B, L, C), each of the B by itself
TOKENS = 2048  # of all copies of an example whose products are taken at once
BINS = 40  # of a histogram
LONGEST = 64  # tokens of an example, where nothing else is said
SUMMARY = ("median", "largest", "rms", "near_one")  # of the singular values of an example
LEAST = 1e-6  # singular values drawn on the logarithmic axis, of the largest


class JacobianConfig(ExamplesConfig):
    """Which Jacobian."""

    max_tokens: int | None = Field(None, ge=3)
    """Tokens of a row with its special ones; what is longer is truncated. Absent: 64, or what the
    models take."""
    examples: int = Field(8, ge=1)
    """How many rows, drawn by `seed`; all of them if the split has no more."""
    token: int = Field(0, ge=0)
    """Position of the output token, 0 the first special one."""
    whole: bool = False
    """Estimate the spectrum of all output tokens together too."""
    steps: int = Field(40, ge=2)
    """Lanczos steps of that estimate."""
    probes: int = Field(4, ge=2)
    """Random starting vectors of that estimate for each example."""


SUBCOMMAND = Subcommand("jacobian", JacobianConfig, __doc__ or "", 1, None)


def from_words(loaded: LoadedModel, batch: Batch) -> tuple[Function, Tensor]:
    """The last hidden states of one example as a function of its word vectors, and these, (L, E).

    Each position of each copy gets a row of its own in place of the embedding table. Copies are
    packed as a batch: so many products are taken at once by the operations' own derivatives, while
    those of `vmap` fall back to loops. Operations take their plain way, which has a forward
    derivative.
    """
    encoder, device = loaded.model.encoder, loaded.device
    L = len(batch.tokens)
    tokens, positions, segments = (
        torch.from_numpy(a).to(device) for a in (batch.tokens, batch.positions, batch.segments)
    )

    def last_hidden(words: Tensor) -> Tensor:
        B = len(words)
        ends = torch.arange(B + 1, dtype=torch.int32, device=device) * L
        packed = Batch(
            torch.arange(B * L, device=device), positions.repeat(B), segments.repeat(B), ends, L
        )
        table = {"embeddings.word.weight": words.flatten(0, 1)}
        with only_plain():
            hidden: Tensor = functional_call(encoder, table, (packed,))
        return hidden.unflatten(0, (B, L))

    return last_hidden, encoder.embeddings.word.weight.detach()[tokens]


def of_token(function: Function, x: Tensor, token: int) -> Tensor:
    """The exact Jacobian of one output token of a function at x (L, E): (C, L E).

    One forward pass of as many copies as are differentiated at once serves all products.
    """
    C = function(x[None]).size(2)
    B = min(C, max(1, TOKENS // len(x)))
    copies = x.detach().expand(B, -1, -1).clone().requires_grad_()
    y = function(copies)[:, token]  # (B, C)
    each = torch.eye(C, dtype=y.dtype, device=y.device)
    rows = []
    for some in each.split(B):
        weights = torch.cat([some, some.new_zeros(B - len(some), C)])
        products = torch.autograd.grad(y, copies, weights, retain_graph=True)[0]
        rows.append(products[: len(some)])
    return torch.cat(rows).flatten(1)


def singular_values(matrix: Tensor) -> Tensor:
    """All singular values, falling, float64: (a, b) -> (min(a, b),)."""
    matrix = matrix.to(torch.float64)
    if matrix.size(0) < matrix.size(1):
        matrix = matrix.T
    return torch.linalg.svdvals(torch.linalg.qr(matrix, mode="r").R)


def estimate(
    function: Function,
    x: Tensor,
    steps: int,
    probes: int,
    seed: int,
) -> dict[str, Tensor]:
    """The spectrum of the whole Jacobian J (L C, n) of a function at x (L, E) by
    Golub-Kahan-Lanczos bidiagonalisation from `probes` random unit vectors, fully re-orthogonalised
    (Golub & Meurant 2010, chapter 7).

    Returns `nodes` (P, m), singular values of each probe's bidiagonal matrix, and their `weights`
    (P, m), which sum to 1: for smooth f, the mean over probes of sum w f(s) is the mean of f over
    J's n singular values (zeros included where n > L C). `largest` is the largest singular value
    and `residual` how far from it one of J's may be: the method's bound, and the rounding of
    products in the type of x.
    """
    copies = x.detach().expand(probes, -1, -1).clone().requires_grad_()
    y = function(copies)

    def forward_all(v: Tensor) -> Tensor:
        moved: Tensor = jvp(function, (copies.detach(),), (v.view_as(copies).to(x.dtype),))[1]
        return moved.flatten(1).double()

    def back_all(u: Tensor) -> Tensor:
        weights = u.view_as(y).to(y.dtype)
        return torch.autograd.grad(y, copies, weights, retain_graph=True)[0].flatten(1).double()

    generator = torch.Generator().manual_seed(seed)
    n = x.numel()
    m = min(steps, n)
    v = torch.randn(probes, n, generator=generator, dtype=torch.float64).to(x.device)
    v = v / v.norm(dim=1, keepdim=True)
    vs: list[Tensor] = [v]
    us: list[Tensor] = []
    alphas, betas = [], []
    for step in range(m):
        u, alpha = _orthogonalised(forward_all(vs[-1]), us)
        us.append(u)
        alphas.append(alpha)
        w, beta = _orthogonalised(back_all(u), vs)
        betas.append(beta)
        if step + 1 < m:
            vs.append(w)
    nodes, weights, largest, residual = [], [], [], []
    for p in range(probes):
        above = torch.stack(betas)[:-1, p]
        upper = torch.diag(torch.stack(alphas)[:, p]) + torch.diag(above, 1)
        left, s, right = torch.linalg.svd(upper)
        nodes.append(s)
        weights.append(right[:, 0] ** 2)
        largest.append(s[0])
        residual.append(betas[-1][p] * left[-1, 0].abs())
    best = int(torch.stack(largest).argmax())
    return {
        "nodes": torch.stack(nodes),
        "weights": torch.stack(weights),
        "largest": largest[best],
        "residual": residual[best] + torch.finfo(x.dtype).eps * largest[best],
    }


def _orthogonalised(x: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Unit vectors along what is left of x (P, n) without `others`, and the length of that; zeros
    where nothing is left, which ends a probe early."""
    before = x.norm(dim=1)
    for _ in range(2):  # twice is enough (Kahan)
        for other in others:
            x = x - (x * other).sum(1, keepdim=True) * other
    length = x.norm(dim=1)
    length = torch.where(length > 1e-7 * before, length, torch.zeros_like(length))
    safe = torch.where(length > 0, length, torch.ones_like(length))
    return torch.where(length[:, None] > 0, x / safe[:, None], torch.zeros_like(x)), length


# ------------------------------------------------------------------------------ the command


def run(paths: list[str], config: JacobianConfig) -> None:
    """`python -m xformer.analysis jacobian CHECKPOINT ... key=value ...`"""
    examples = open_examples(config, paths, LONGEST)
    if config.token >= examples.sizes.min():
        raise BadInput(
            f"token={config.token}: the shortest of the drawn rows has {examples.sizes.min()} "
            "tokens, counted from 0"
        )
    for loaded in examples.models:
        loaded.model.requires_grad_(False)
    work = [(loaded, int(row)) for loaded in examples.models for row in examples.rows]
    spectra: dict[str, list[dict[str, Any]]] = {}
    for loaded, row in with_progress(work, len(work), "Jacobians"):
        spectra.setdefault(loaded.path, []).append(_of_example(loaded, row, config))
    found = [{"name": r.name, **_summary(spectra[r.path])} for r in examples.models]
    result = {
        "analysis": "jacobian",
        "token": config.token,
        **examples.describe(),
        "spectra": found,
    }
    line = "jacobian " + "; ".join(
        f"{f['name']}: median {f['median']['mean']:.3g} ± {f['median']['deviation']:.2g}, largest "
        f"{f['largest']['mean']:.3g}, {100 * f['near_one']['mean']:.1f} % between 1/2 and 2"
        for f in found
    )
    line += f" on {drawing.many(len(examples.rows), 'example')}, output token {config.token}"
    metrics = {f["name"]: {name: f[name]["mean"] for name in SUMMARY} for f in found}
    publish(config, result, draw, line, metrics)


def _of_example(loaded: LoadedModel, row: int, config: JacobianConfig) -> dict[str, Any]:
    batch, _ = look_inside(loaded, np.array([row]))  # which says where a number is not finite
    function, x = from_words(loaded, batch)
    exact = singular_values(of_token(function, x, config.token))
    found: dict[str, Any] = {"row": row, "tokens": len(x), "values": exact.tolist()}
    if config.whole:
        whole = estimate(function, x, config.steps, config.probes, config.seed)
        squares = (whole["weights"] * whole["nodes"] ** 2).sum(1)  # each |J v|^2
        found["whole"] = {
            "nodes": whole["nodes"].tolist(),
            "weights": whole["weights"].tolist(),
            "largest": float(whole["largest"]),
            "largest_error": float(whole["residual"]),
            "mean_square": float(squares.mean()),
            "mean_square_error": float(squares.std() / len(squares) ** 0.5),
            "singular_values": x.numel(),
        }
    return found


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and deviations over examples, beside every singular value."""

    def over(values: list[float]) -> dict[str, float]:
        return {
            "mean": float(np.mean(values)),
            "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
        }

    values = [np.array(row["values"]) for row in rows]
    return {
        "median": over([float(np.median(v)) for v in values]),
        "largest": over([float(v.max()) for v in values]),
        "rms": over([float(np.sqrt((v**2).mean())) for v in values]),
        "near_one": over([float(((v > 0.5) & (v < 2)).mean()) for v in values]),
        "examples": rows,
    }


# ----------------------------------------------------------------------------------- drawing


def draw(result: dict[str, Any]) -> Figure:
    """Histograms on a linear axis (as in figure 10 of the paper) and on a logarithmic one."""
    spectra = result["spectra"]
    whole = all("whole" in row for s in spectra for row in s["examples"])
    figure = style.new_figure(9.6, 6.8 if whole else 3.6)
    axes = figure.subplots(2 if whole else 1, 2, squeeze=False)
    one = [[np.array(row["values"]) for row in s["examples"]] for s in spectra]
    _draw_row(axes[0], one, spectra, f"output token {result['token']}")
    if whole:
        _draw_whole(axes[1], spectra)
    store = drawing.of_stores(result["data"]["store"])
    figure.suptitle(
        "Singular values of d(last hidden state) / d(word embeddings), "
        f"{drawing.many(result['data']['examples'], 'example')} of {store}"
        + (" (mean ± sd over them)" if result["data"]["examples"] > 1 else ""),
        fontsize=10.5,
    )
    return figure


def _draw_row(axes: Any, spectra: list[Any], named: list[dict[str, Any]], title: str) -> None:
    largest = max(float(values.max()) for s in spectra for values in s)
    smallest = min(float(values.min()) for s in spectra for values in s)
    low = max(smallest, LEAST * largest)
    edges = (np.linspace(0, max(largest, 1.05), BINS + 1), np.geomspace(low, largest, BINS + 1))
    for panel, bounds, kind in zip(axes, edges, ("linear", "log"), strict=True):
        middle = (bounds[1:] + bounds[:-1]) / 2
        if kind == "log":
            middle = np.sqrt(bounds[1:] * bounds[:-1])
            panel.set_xscale("log")
            style.plain_ticks(panel.xaxis)
        for i, s in enumerate(spectra):
            shares = np.array([_shares(values, bounds) for values in s])
            mean, colour = shares.mean(0), f"C{i}"
            panel.stairs(mean, bounds, color=colour, lw=1.6, label=drawing.short(named[i]["name"]))
            panel.stairs(mean, bounds, color=colour, alpha=0.15, fill=True)
            if len(shares) > 1:
                panel.errorbar(
                    middle,
                    mean,
                    shares.std(0, ddof=1),
                    fmt="none",
                    ecolor=colour,
                    elinewidth=0.8,
                    alpha=0.7,
                )
        panel.axvline(1, color=style.FAINT, ls="--", lw=1.2)
        rest = "; the first bar: all below" if kind == "log" and smallest < low else ""
        panel.set(xlabel=f"singular value{rest}", title=f"{title} ({kind} axis)")
        panel.set_ylim(bottom=0)
    axes[0].set_ylabel("share of singular values")
    axes[0].legend(fontsize=8)
    axes[1].text(1, axes[1].get_ylim()[1], " isometry", fontsize=8, color=style.FAINT, va="top")


def _draw_whole(axes: Any, spectra: list[dict[str, Any]]) -> None:
    """The estimate for all output tokens, a thin line an example: some 40 nodes resolve the few
    large singular values and stand in lumps for the many small ones, so sums are drawn, no bins."""
    for i, spectrum in enumerate(spectra):
        for number, row in enumerate(spectrum["examples"]):
            nodes, weights = (np.array(row["whole"][key]).ravel() for key in ("nodes", "weights"))
            order = np.argsort(nodes)[::-1]
            look = {
                "color": f"C{i}",
                "lw": 1.0,
                "alpha": 0.8,
                "label": drawing.short(spectrum["name"]) if number == 0 else None,
            }
            for panel, mass in zip(axes, (weights, weights * nodes**2), strict=True):
                panel.step(nodes[order], np.cumsum(mass[order]) / mass.sum(), where="post", **look)
    for panel, what in zip(axes, ("singular values", "all their squares"), strict=True):
        panel.set(
            xscale="log",
            xlabel="singular value s",
            ylabel=f"share of {what} from s up",
            title="all output tokens, estimated",
        )
        panel.axvline(1, color=style.FAINT, ls="--", lw=1.2)
    axes[0].set_yscale("log")
    every = [row["whole"]["singular_values"] for s in spectra for row in s["examples"]]
    axes[0].set_ylim(bottom=0.5 / max(every))  # half of one singular value
    for axis in (axes[0].xaxis, axes[0].yaxis, axes[1].xaxis):
        style.plain_ticks(axis)
    axes[1].set_ylim(0, 1.02)
    axes[0].legend(fontsize=8)


def _shares(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    return np.histogram(np.clip(values, bounds[0], bounds[-1]), bounds)[0] / len(values)
