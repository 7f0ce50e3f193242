"""Dynamical isometry: singular values of d(last hidden states) / d(input word embeddings).

    python -m xformer.analysis jacobian CHECKPOINT [CHECKPOINT ...] data=STORE out=DIR
    python -m xformer.analysis jacobian ckpt/bert ckpt/bert-clean data=stores/rte token=0 \\
      examples=20 whole=true probes=8 out=figures

A model is dynamically isometric if all singular values are 1 (Saxe et al. 2014; Kao & Lee 2021,
section 4.4.3, F.1 and figure 10). The Jacobian of one output token is computed exactly, with one
vector-Jacobian product for each hidden unit. With `whole=true` the spectrum of all output tokens
together is also estimated, by Golub-Kahan-Lanczos quadrature from random probes. The result
includes the standard error of this estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import jvp

from xformer.analysis import drawing
from xformer.analysis.examples import ExamplesConfig, LoadedModel, check_finite, open_examples
from xformer.analysis.subcommand import Subcommand, publish, with_progress
from xformer.data import style
from xformer.data.batch import Batch
from xformer.data.display import many
from xformer.data.errors import BadInput
from xformer.ops.native import only_plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shapes: L tokens of an example, C hidden size, E embedding size, n = L E, B copies of the example,
# P probes, m steps.

Function = Callable[[Tensor], Tensor]  # (B, L, E) -> (B, L, C), each of the B independently
COPY_TOKENS = 2048  # tokens in the copies of an example that are differentiated together
HISTOGRAM_BINS = 40
DEFAULT_TOKENS = 64  # default of max_tokens
SUMMARY = ("median", "largest", "rms", "near_one")  # statistics of an example's singular values
SMALLEST_SHARE = 1e-6  # the logarithmic axis begins at this share of the largest singular value


class JacobianConfig(ExamplesConfig):
    """Which Jacobian is computed, and for which examples."""

    max_tokens: int | None = Field(None, ge=3)
    """Longer rows are truncated to this many tokens, special tokens included. Default: 64, or less
    if a model accepts less."""
    examples: int = Field(8, ge=1)
    """Number of rows, drawn at random with `seed`, or all rows if the split has fewer."""
    token: int = Field(0, ge=0)
    """Position of the output token. 0 is the first special token, such as [CLS]."""
    whole: bool = False
    """Also estimate the spectrum of all output tokens together."""
    steps: int = Field(40, ge=2)
    """With whole=true: number of Lanczos steps of the estimate."""
    probes: int = Field(4, ge=2)
    """With whole=true: number of random starting vectors of the estimate for each example."""


SUBCOMMAND = Subcommand("jacobian", JacobianConfig, __doc__ or "", 1, None)


def last_hidden_from_words(loaded: LoadedModel, batch: Batch) -> tuple[Function, Tensor]:
    """The function from the word embeddings of one example to its last hidden states, and these
    word embeddings (L, E).

    The function replaces the output of the word embeddings by its argument. The tokens themselves
    stay, because the embeddings of an ESM-2 are scaled by the number of its mask tokens. It takes a
    batch of copies of the example, so one backward pass gives the products of all copies; `vmap`
    would loop over LayerNorm, GELU and softmax. It uses the reference implementation of every op,
    because only plain PyTorch has forward-mode derivatives.
    """
    encoder, device = loaded.model.encoder, loaded.device
    L = len(batch.tokens)
    tokens, positions, segments = (
        torch.from_numpy(a).to(device) for a in (batch.tokens, batch.positions, batch.segments)
    )

    def last_hidden(words: Tensor) -> Tensor:
        B = len(words)
        ends = torch.arange(B + 1, dtype=torch.int32, device=device) * L
        packed = Batch(tokens.repeat(B), positions.repeat(B), segments.repeat(B), ends, L)

        def replaced(_: nn.Module, inputs: object, looked_up: Tensor) -> Tensor:
            rows = words.flatten(0, 1)  # the encoder may have added tokens of padding
            return F.pad(rows, (0, 0, 0, len(looked_up) - len(rows)))

        hook = encoder.embeddings.word.register_forward_hook(replaced)
        try:
            with only_plain():
                hidden: Tensor = encoder(packed)
        finally:
            hook.remove()
        return hidden.unflatten(0, (B, L))

    return last_hidden, encoder.embeddings.word.weight.detach()[tokens]


def jacobian_of_token(function: Function, x: Tensor, token: int) -> Tensor:
    """The exact Jacobian of one output token of a function at x (L, E): (C, L E).

    One forward pass of B copies serves all C products, which are computed B at a time.
    """
    C = function(x[None]).size(2)
    B = min(C, max(1, COPY_TOKENS // len(x)))
    copies = x.detach().expand(B, -1, -1).clone().requires_grad_()
    y = function(copies)[:, token]  # (B, C)
    units = torch.eye(C, dtype=y.dtype, device=y.device)
    rows = []
    for some in units.split(B):
        weights = torch.cat([some, some.new_zeros(B - len(some), C)])
        products = torch.autograd.grad(y, copies, weights, retain_graph=True)[0]
        rows.append(products[: len(some)])
    return torch.cat(rows).flatten(1)


def singular_values(matrix: Tensor) -> Tensor:
    """All singular values, largest first, float64: (a, b) -> (min(a, b),)."""
    matrix = matrix.to(torch.float64)
    if matrix.size(0) < matrix.size(1):
        matrix = matrix.T
    return torch.linalg.svdvals(torch.linalg.qr(matrix, mode="r").R)


def estimate(
    function: Function, x: Tensor, steps: int, probes: int, seed: int
) -> dict[str, Tensor]:
    """Estimate the spectrum of the whole Jacobian J (L C, n) of a function at x (L, E).

    The method is Golub-Kahan-Lanczos bidiagonalisation from `probes` random unit vectors, with full
    re-orthogonalisation (Golub & Meurant 2010, chapter 7).

    Returns `nodes` (P, m), the singular values of each probe's bidiagonal matrix, and their
    `weights` (P, m), which sum to 1. For a smooth f, the mean over probes of sum w f(s) estimates
    the mean of f over J's n singular values, which include zeros if n > L C. `largest` is the
    largest node. J has a singular value within `residual` of it. `residual` is the method's error
    bound plus the rounding error of products in the dtype of x.
    """
    alphas, betas = _bidiagonalise(function, x, min(steps, x.numel()), probes, seed)
    nodes, weights, largest, residual = [], [], [], []
    for p in range(probes):
        bidiagonal = torch.diag(alphas[:, p]) + torch.diag(betas[:-1, p], 1)
        left, s, right = torch.linalg.svd(bidiagonal)
        nodes.append(s)
        weights.append(right[:, 0] ** 2)
        largest.append(s[0])
        residual.append(betas[-1, p] * left[-1, 0].abs())
    best = int(torch.stack(largest).argmax())
    return {
        "nodes": torch.stack(nodes),
        "weights": torch.stack(weights),
        "largest": largest[best],
        "residual": residual[best] + torch.finfo(x.dtype).eps * largest[best],
    }


def _bidiagonalise(
    function: Function, x: Tensor, m: int, probes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The diagonals and the superdiagonals of the probes' bidiagonal matrices, (m, P) each.

    The last entry of a superdiagonal is outside its matrix, and bounds the error.
    """
    copies = x.detach().expand(probes, -1, -1).clone().requires_grad_()
    y = function(copies)

    def times(v: Tensor) -> Tensor:  # J v for each probe
        moved: Tensor = jvp(function, (copies.detach(),), (v.view_as(copies).to(x.dtype),))[1]
        return moved.flatten(1).double()

    def transposed_times(u: Tensor) -> Tensor:  # J^T u for each probe
        weights = u.view_as(y).to(y.dtype)
        return torch.autograd.grad(y, copies, weights, retain_graph=True)[0].flatten(1).double()

    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(probes, x.numel(), generator=generator, dtype=torch.float64).to(x.device)
    v = v / v.norm(dim=1, keepdim=True)
    vs: list[Tensor] = [v]
    us: list[Tensor] = []
    alphas, betas = [], []
    for step in range(m):
        u, alpha = _orthogonalised(times(vs[-1]), us)
        us.append(u)
        alphas.append(alpha)
        w, beta = _orthogonalised(transposed_times(u), vs)
        betas.append(beta)
        if step + 1 < m:
            vs.append(w)
    return torch.stack(alphas), torch.stack(betas)


def _orthogonalised(x: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Orthogonalise x (P, n) against `others`. Returns the normalised vectors and their lengths
    before normalisation, (P,).

    If nothing is left of a vector, its result and its length are zero, and its probe ends early.
    """
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
    if not config.whole and (unused := sorted(config.model_fields_set & {"steps", "probes"})):
        raise BadInput(f"{unused[0]}= applies only with whole=true: give that too, or leave it out")
    examples = open_examples(config, paths, DEFAULT_TOKENS)
    if config.token >= examples.sizes.min():
        raise BadInput(
            f"token={config.token}: the shortest of the drawn rows has {examples.sizes.min()} "
            f"tokens; give a number from 0 to {examples.sizes.min() - 1}"
        )
    check_finite(examples)
    for loaded in examples.models:
        loaded.model.requires_grad_(False)
    work = [(loaded, int(row)) for loaded in examples.models for row in examples.rows]
    spectra: dict[str, list[dict[str, Any]]] = {}
    for loaded, row in with_progress(work, len(work), "Jacobians"):
        spectra.setdefault(loaded.path, []).append(_of_example(loaded, row, config))
    summaries = [{"name": m.name, **_summary(spectra[m.path])} for m in examples.models]
    result = {
        "analysis": "jacobian",
        "token": config.token,
        **examples.describe(),
        "spectra": summaries,
    }
    line = "jacobian " + "; ".join(
        f"{s['name']}: median {_in_line(s['median'])}, largest {s['largest']['mean']:.3g}, "
        f"{100 * s['near_one']['mean']:.1f} % between 1/2 and 2"
        for s in summaries
    )
    line += f" on {many(len(examples.rows), 'example')}, output token {config.token}"
    metrics = {s["name"]: {name: s[name]["mean"] for name in SUMMARY} for s in summaries}
    publish(config, result, draw, line, metrics)


def _in_line(spread: dict[str, float]) -> str:
    """A mean and, if there is one, its deviation: 1.04 ± 0.12."""
    text = f"{spread['mean']:.3g}"
    return f"{text} ± {spread['deviation']:.2g}" if "deviation" in spread else text


def _of_example(loaded: LoadedModel, row: int, config: JacobianConfig) -> dict[str, Any]:
    """The singular values for one row, and under "whole" the estimate for all output tokens."""
    batch = loaded.assembler.batch(np.array([row]))
    function, x = last_hidden_from_words(loaded, batch)
    exact = singular_values(jacobian_of_token(function, x, config.token))
    result: dict[str, Any] = {"row": row, "tokens": len(x), "values": exact.tolist()}
    if config.whole:
        whole = estimate(function, x, config.steps, config.probes, config.seed)
        squares = (whole["weights"] * whole["nodes"] ** 2).sum(1)  # each |J v|^2
        result["whole"] = {
            "nodes": whole["nodes"].tolist(),
            "weights": whole["weights"].tolist(),
            "largest": float(whole["largest"]),
            "largest_error": float(whole["residual"]),
            "mean_square": float(squares.mean()),
            "mean_square_error": float(squares.std() / len(squares) ** 0.5),
            "singular_values": x.numel(),
        }
    return result


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and deviations over examples, and the examples' own singular values."""
    values = [np.array(row["values"]) for row in rows]
    return {
        "median": drawing.spread([float(np.median(v)) for v in values]),
        "largest": drawing.spread([float(v.max()) for v in values]),
        "rms": drawing.spread([float(np.sqrt((v**2).mean())) for v in values]),
        "near_one": drawing.spread([float(((v > 0.5) & (v < 2)).mean()) for v in values]),
        "examples": rows,
    }


# ----------------------------------------------------------------------------------- drawing


def draw(result: dict[str, Any]) -> Figure:
    """Histograms on a linear axis (Kao & Lee 2021, figure 10) and on a logarithmic one."""
    spectra = result["spectra"]
    whole = all("whole" in row for s in spectra for row in s["examples"])
    figure = style.new_figure(9.6, 6.8 if whole else 3.6)
    axes = figure.subplots(2 if whole else 1, 2, squeeze=False)
    _draw_one_token(axes[0], spectra, f"output token {result['token']}")
    if whole:
        _draw_whole(axes[1], spectra)
    store = drawing.of_stores(result["data"]["store"])
    figure.suptitle(
        "Singular values of d(last hidden state) / d(word embeddings), "
        f"{many(result['data']['examples'], 'example')} of {store}"
        + (" (mean ± sd over them)" if result["data"]["examples"] > 1 else ""),
        fontsize=10.5,
    )
    return figure


def _draw_one_token(axes: Any, spectra: list[dict[str, Any]], title: str) -> None:
    """Histograms of exact singular values, as means and deviations over examples."""
    of_models = [[np.array(row["values"]) for row in s["examples"]] for s in spectra]
    # if all values are 0, any axis will do
    largest = max(float(values.max()) for examples in of_models for values in examples) or 1.0
    smallest = min(float(values.min()) for examples in of_models for values in examples)
    low = max(smallest, SMALLEST_SHARE * largest)
    edges = (
        np.linspace(0, max(largest, 1.05), HISTOGRAM_BINS + 1),
        np.geomspace(low, largest, HISTOGRAM_BINS + 1),
    )
    for panel, bounds, kind in zip(axes, edges, ("linear", "log"), strict=True):
        middle = (bounds[1:] + bounds[:-1]) / 2
        if kind == "log":
            middle = np.sqrt(bounds[1:] * bounds[:-1])
            panel.set_xscale("log")
            style.plain_ticks(panel.xaxis)
        for i, (spectrum, examples) in enumerate(zip(spectra, of_models, strict=True)):
            shares = np.array([_shares(values, bounds) for values in examples])
            mean, colour, name = shares.mean(0), f"C{i}", drawing.short(spectrum["name"])
            panel.stairs(mean, bounds, color=colour, lw=1.6, label=name)
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
        rest = "; first bar: all smaller values" if kind == "log" and smallest < low else ""
        panel.set(xlabel=f"singular value{rest}", title=f"{title} ({kind} axis)")
        panel.set_ylim(bottom=0)
    axes[0].set_ylabel("share of singular values")
    axes[0].legend(fontsize=8)
    axes[1].text(1, axes[1].get_ylim()[1], " isometry", fontsize=8, color=style.FAINT, va="top")


def _draw_whole(axes: Any, spectra: list[dict[str, Any]]) -> None:
    """The estimate for all output tokens, with a thin line for each example.

    The nodes resolve the few large singular values, but only one or two nodes represent the many
    small ones. A histogram would be misleading, so the share above each value is drawn.
    """
    every = [row["whole"] for s in spectra for row in s["examples"]]
    low = SMALLEST_SHARE * (max(row["largest"] for row in every) or 1.0)
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
                share = np.cumsum(mass[order]) / (mass.sum() or 1.0)
                panel.step(np.maximum(nodes[order], low), share, where="post", **look)
    for panel, what in zip(axes, ("singular values", "all their squares"), strict=True):
        panel.set(
            xscale="log",
            xlabel="singular value s",
            ylabel=f"share of {what}, s and above",
            title="all output tokens, estimated",
        )
        panel.axvline(1, color=style.FAINT, ls="--", lw=1.2)
    axes[0].set_yscale("log")
    most = max(row["singular_values"] for row in every)
    axes[0].set_ylim(bottom=0.5 / most)  # half of one singular value
    for axis in (axes[0].xaxis, axes[0].yaxis, axes[1].xaxis):
        style.plain_ticks(axis)
    axes[1].set_ylim(0, 1.02)
    axes[0].legend(fontsize=8)


def _shares(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The share of the values in each bin. Values outside are counted in the first or last bin."""
    return np.histogram(np.clip(values, bounds[0], bounds[-1]), bounds)[0] / len(values)
