"""Gradient confusion: do the gradients of different examples point the same way?

    python -m xformer.analysis gradients CHECKPOINT [CHECKPOINT ...] data=STORE out=DIR
    python -m xformer.analysis gradients ckpt/bert ckpt/bert-clean data=stores/rte \\
      mapping=shift:1000 examples=64 out=figures

Cosines between the gradients of the loss of every two examples, over all parameters: their
distribution, mean, median and minimum (Sankararaman et al. 2020; Kao & Lee 2021, F.2 and figure
11). A store of texts gives the loss of masked language modelling, one of classes, scores or answers
that of the task. If a checkpoint lacks the head for it, it gets a fresh one, drawn by `seed`.

All gradients come from one packed backward pass, and no example's gradient is ever kept: the inner
product of two examples' gradients of a weight matrix is the sum over their tokens s and t of
(a_s . a_t) (g_s . g_t), with a token's input a and the gradient g of its output.

N examples, T tokens, R rows of a matrix product, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from xformer.analysis import drawing
from xformer.analysis.examples import (
    Examples,
    ExamplesConfig,
    LoadedModel,
    look_inside,
    open_examples,
)
from xformer.analysis.subcommand import Subcommand, publish
from xformer.data import style
from xformer.data.batch import Batch
from xformer.data.display import say
from xformer.data.errors import BadInput, Failure
from xformer.model.encoder import Encoder
from xformer.ops.native import only_plain
from xformer.parallel.feed import to_device
from xformer.tasks.known import TASKS
from xformer.tasks.task import Head, Model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRIP = 1024  # rows of a matrix of token by token products that exist at once
FORMED = 2**22  # numbers of formed gradients that exist at once: more leave the cache
# the first kind of store that a task learns from is its own
TASK_OF_STORE = {task.stores[0]: task for task in TASKS.values()}


class GradientsConfig(ExamplesConfig):
    """Whose gradients."""

    examples: int = Field(64, ge=2)
    """How many rows, drawn by `seed`; all of them if the split has no more."""
    masking: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens that a masked-language-modelling loss asks for."""


SUBCOMMAND = Subcommand("gradients", GradientsConfig, __doc__ or "", 1, None)


@dataclass(frozen=True)
class Use:
    """One use of a weight matrix (V, E): its gradient is the sum over rows of left_r right_r^T.

    `left` is (R, V), or (R,) where row r is all zero but a one at that place; `right` is (R, E).
    `owner` (R,) says to which example a row belongs.
    """

    left: Tensor
    right: Tensor
    owner: Tensor


def gram(uses: list[Use], count: int) -> Tensor:
    """Inner products of the examples' gradients of one weight, (N, N) float64.

    Either the tokens' products are multiplied and summed, or the gradients of a few of the weight's
    rows at a time are formed; whichever takes fewer operations.
    """
    rows = sum(len(use.owner) for use in uses)
    if all(use.left.dim() == 2 for use in uses):
        out, width = uses[0].left.size(1), uses[0].right.size(1)
        by_tokens = rows**2 * (out + width)
        by_forming = 2 * (rows + count**2) * out * width
        if by_forming < by_tokens:
            return _by_forming(uses, count)
    return _by_tokens(uses, count)


def _by_tokens(uses: list[Use], count: int) -> Tensor:
    found = torch.zeros(count, count, dtype=torch.float64)
    for i, a in enumerate(uses):
        for start in range(0, len(a.owner), STRIP):
            end = min(start + STRIP, len(a.owner))
            strip = Use(a.left[start:end], a.right[start:end], a.owner[start:end])
            found += _products(strip, strip, count)
            rest = Use(a.left[end:], a.right[end:], a.owner[end:])
            for other in (rest, *uses[i + 1 :]):
                if len(other.owner):
                    between = _products(strip, other, count)
                    found += between + between.T
    return found


def _products(a: Use, b: Use, count: int) -> Tensor:
    """(N, N): the sum over rows s of example i in `a` and t of j in `b` of the two products."""
    if a.left.dim() == 1 and b.left.dim() == 1:
        left = (a.left[:, None] == b.left).to(a.right.dtype)
    elif a.left.dim() == 1:
        left = b.left[:, a.left].T
    else:
        left = a.left[:, b.left] if b.left.dim() == 1 else a.left @ b.left.T
    both = left * (a.right @ b.right.T)  # (R, R')
    summed = both.new_zeros(count, len(b.owner)).index_add_(0, a.owner, both)
    return both.new_zeros(count, count).index_add_(1, b.owner, summed).double().cpu()


def _by_forming(uses: list[Use], count: int) -> Tensor:
    found = torch.zeros(count, count, dtype=torch.float64)
    out, width = uses[0].left.size(1), uses[0].right.size(1)
    block = max(1, FORMED // (count * width))
    pieces = [(use, _bounds(use.owner, count)) for use in uses]
    for start in range(0, out, block):
        some = uses[0].right.new_empty(count, min(block, out - start), width)
        for number, (use, bounds) in enumerate(pieces):
            for i in range(count):
                here = slice(bounds[i], bounds[i + 1])
                left, right = use.left[here, start : start + block].T, use.right[here]
                some[i].addmm_(left, right, beta=float(number > 0))  # 0: whatever was there
        flat = some.flatten(1)
        found += (flat @ flat.T).double().cpu()
    return found


def _bounds(owner: Tensor, count: int) -> list[int]:
    """Where the rows of each example begin and end; rows of one example are neighbours."""
    steps = torch.arange(count + 1, device=owner.device)
    return torch.searchsorted(owner, steps).tolist()


class PerExample(TorchFunctionMode):
    """Watches a model's forward pass and gathers, during its backward pass, the inner products of
    the examples' gradients of every parameter, `products` (N, N).

    It knows how parameters are used in this project (linear maps, embeddings, LayerNorm, sums and
    products with a vector) and raises Failure where one is used in another way.
    """

    def __init__(self, model: Model, batch: Batch[Tensor]):
        super().__init__()
        sizes = batch.cu_seqlens.diff()
        examples = torch.arange(len(sizes), device=sizes.device)
        tokens = torch.repeat_interleave(examples, sizes)
        self.count = len(sizes)
        self.owners = {"tokens": tokens, "examples": examples}
        if batch.places is not None:
            self.owners["places"] = tokens[batch.places]
        self.task = model.task
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.parameters = dict(model.named_parameters())
        self.products = torch.zeros(self.count, self.count, dtype=torch.float64)
        self.waiting: dict[str, int] = {}  # uses whose gradient has not come yet
        self.uses: dict[str, list[Use]] = {}
        self.vectors: dict[str, Tensor] = {}  # (N, d)
        self.rows: dict[int, tuple[Tensor, Tensor, int]] = {}  # a row taken out of a parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = [a for a in (*args, *kwargs.values()) if id(a) in self.names or id(a) in self.rows]
        if not known:
            return func(*args, **kwargs)
        rule = RULES.get(resolve_name(func) or "")
        if rule is not None:
            return rule(self, *args, **kwargs)
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            name = self.names.get(id(known[0]), "a row of a parameter")
            raise Failure(f"{name} is used by {func}, which this analysis does not know")
        return found  # a size, a type

    # ------------------------------------------------------------------ how parameters are used

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self.names[id(weight)]
        y = F.linear(x, weight.detach(), None if bias is None else bias.detach())
        decoder = name == "encoder.embeddings.word.weight"
        owner = self._owner("mlm_head" if decoder else name, x)
        self._expect(name)
        if bias is not None:
            self._expect(self.names[id(bias)])

        def gather(g: Tensor) -> None:
            self._matrix(name, Use(g, x.detach(), owner))
            if bias is not None:
                self._vector(self.names[id(bias)], g, owner)

        _on_gradient(y, gather)
        return y

    def embedding(self, tokens: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
        y = F.embedding(tokens, weight.detach()).requires_grad_()
        name = self.names[id(weight)]
        owner = self._owner(name, y)
        self._expect(name)
        _on_gradient(y, lambda g: self._matrix(name, Use(tokens, g, owner)))
        return y

    def layer_norm(
        self, x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float, *rest: Any
    ) -> Tensor:
        y = F.layer_norm(x, shape, weight.detach(), bias.detach(), eps)
        names = self.names[id(weight)], self.names[id(bias)]
        owner = self._owner(names[0], x)
        for name in names:
            self._expect(name)

        def gather(g: Tensor) -> None:
            self._vector(names[0], g * F.layer_norm(x.detach(), shape, None, None, eps), owner)
            self._vector(names[1], g, owner)

        _on_gradient(y, gather)
        return y

    def take_row(self, weight: Tensor, row: int) -> Tensor:
        """A row of an embedding table that is added to every token (RoBERTa's one segment)."""
        taken = weight.detach()[row]
        self.rows[id(taken)] = (taken, weight, row)
        return taken

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        x, vector = (b, a) if id(a) in self.names or id(a) in self.rows else (a, b)
        y = x + vector.detach()
        if id(vector) in self.rows:
            _, weight, row = self.rows[id(vector)]
            name = self.names[id(weight)]
            owner = self._owner(name, x)
            self._expect(name)
            index = torch.full_like(owner, row)
            _on_gradient(y, lambda g: self._matrix(name, Use(index, g, owner)))
            return y
        name = self.names[id(vector)]
        owner = self._owner(name, x)
        self._expect(name)
        _on_gradient(y, lambda g: self._vector(name, g, owner))
        return y

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        x, vector = (b, a) if id(a) in self.names else (a, b)
        y = x * vector.detach()
        name = self.names[id(vector)]
        owner = self._owner(name, x)
        self._expect(name)
        _on_gradient(y, lambda g: self._vector(name, g * x.detach(), owner))
        return y

    # ------------------------------------------------------------------------- what is gathered

    def _owner(self, name: str, x: Tensor) -> Tensor:
        """To which example each row of `x` (R, d) belongs, by the part that reads it."""
        kind = "examples"
        if name.startswith("encoder."):
            kind = "tokens"
        elif self.task is not None and name.startswith(("task_head", "mlm_head")):
            kind = self.task.head_reads
        owner = self.owners[kind]
        if x.dim() != 2 or len(x) != len(owner):
            raise Failure(
                f"{name} reads rows {tuple(x.shape)}, not one for each of {len(owner)} "
                f"{kind}, which this analysis does not know"
            )
        return owner

    def _expect(self, name: str) -> None:
        self.waiting[name] = self.waiting.get(name, 0) + 1

    def _matrix(self, name: str, use: Use) -> None:
        self.uses.setdefault(name, []).append(use)
        self.waiting[name] -= 1
        if not self.waiting[name]:  # all uses of a shared weight are there
            self.products += gram(self.uses.pop(name), self.count)

    def _vector(self, name: str, each: Tensor, owner: Tensor) -> None:
        """`each` (R, d) summed to the examples' gradients of a vector, (N, d)."""
        summed = each.new_zeros(self.count, each.size(1)).index_add_(0, owner, each)
        self.vectors[name] = self.vectors[name] + summed if name in self.vectors else summed
        self.waiting[name] -= 1
        if not self.waiting[name]:
            flat = self.vectors.pop(name).double()
            self.products += (flat @ flat.T).cpu()

    def check(self) -> None:
        """Raise Failure unless every use of every parameter was seen."""
        missed = [name for name, p in self.parameters.items() if p.grad is not None]
        missed += [name for name, count in self.waiting.items() if count]
        if missed:
            raise Failure(f"the use of {missed[0]} is unknown to this analysis")


def _on_gradient(y: Tensor, gather: Callable[[Tensor], None]) -> None:
    """Call `gather` with the gradient of `y` when the backward pass has it."""
    if not y.requires_grad:  # within a function that has a backward pass of its own
        raise Failure(
            "a parameter is used inside an autograd function, which this analysis does not know"
        )
    y.register_hook(gather)


RULES: dict[str, Callable[..., Tensor]] = {
    "torch.nn.functional.linear": PerExample.linear,
    "torch.nn.functional.embedding": PerExample.embedding,
    "torch.nn.functional.layer_norm": PerExample.layer_norm,
    "torch.Tensor.__getitem__": PerExample.take_row,
    "torch.Tensor.add": PerExample.add,
    "torch.Tensor.__add__": PerExample.add,
    "torch.Tensor.mul": PerExample.multiply,
    "torch.Tensor.__mul__": PerExample.multiply,
}


def inner_products(model: Model, batch: Batch[Tensor]) -> Tensor:
    """<gradient of example i's loss, of j's> over all parameters, (N, N) float64 on the CPU, from
    one forward and one backward pass of the packed batch. The model is in evaluation mode.

    Raises Failure where a parameter is used in a way that is not known here.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    watch = PerExample(model, batch)
    with _every_token(model.encoder), only_plain(), watch:
        loss = model.loss(batch)
    if loss.total.requires_grad:
        loss.total.backward()
    watch.check()
    return watch.products


@contextmanager
def _every_token(encoder: Encoder) -> Iterator[None]:
    """Within it the last layer works on every token, of each of which the example is known, and not
    on those alone whose hidden states are asked for."""
    every = encoder.forward

    def forward(batch: Batch[Tensor], places: Tensor | None = None) -> Tensor:
        x = every(batch)
        return x if places is None else x.index_select(0, places)

    encoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del encoder.forward


def cosines(products: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(cosines of all pairs i < j, norms (N,)) of inner products (N, N). A gradient that is zero
    (an example without a masked token) has no cosine: NaN."""
    norms = products.diagonal().clamp(min=0).sqrt()
    matrix = (products / norms[:, None] / norms).numpy()
    matrix = np.where((norms[:, None] * norms).numpy() > 0, matrix, np.nan)
    return matrix[np.triu_indices(len(matrix), 1)], norms.numpy()


# ------------------------------------------------------------------------------ the command


def run(paths: list[str], config: GradientsConfig) -> None:
    """`python -m xformer.analysis gradients CHECKPOINT ... key=value ...`"""
    examples = open_examples(config, paths)
    rows = _labelled(examples)
    found = []
    for loaded in examples.models:
        model, fresh = _with_head(loaded, examples, config)
        batch = to_device(_batch(loaded, rows, config, model), loaded.device)
        values, norms = cosines(inner_products(model, batch))
        if not np.isfinite(norms).all():
            for row in rows:
                look_inside(loaded, np.array([row]))  # which says where a number is not finite
        found.append(
            {
                "name": loaded.name,
                "head": model.task.name if model.task else "none",
                "fresh_head": fresh,
                **_summary(values, norms, loaded),
            }
        )
    result = {
        "analysis": "gradients",
        **examples.describe(),
        "rows": rows.tolist(),
        "gradients": found,
    }
    line = "gradients " + "; ".join(
        f"{f['name']}: cosine mean {f['mean']:.4f}, median {f['median']:.4f}, "
        f"minimum {f['minimum']:.4f}, {100 * f['negative']:.1f} % negative"
        for f in found
    )
    line += f" over {found[0]['pairs']:,} pairs of examples"
    metrics = {
        f["name"]: {name: f[name] for name in ("mean", "median", "minimum", "negative")}
        for f in found
    }
    publish(config, result, draw, line, metrics)


def _labelled(examples: Examples) -> np.ndarray:
    """The drawn rows that have a label, where the task has labels."""
    rows = examples.rows
    columns = examples.store.split(examples.split).columns
    if examples.store.kind in ("class", "score"):
        labels = np.asarray(columns["label"])[rows]
        known = labels >= 0 if examples.store.kind == "class" else ~np.isnan(labels)
        rows = rows[known]
    if len(rows) < 2:
        raise BadInput(f"the split {examples.split!r} has fewer than 2 drawn rows with a label")
    return rows


def _with_head(
    loaded: LoadedModel, examples: Examples, config: GradientsConfig
) -> tuple[Model, bool]:
    """The model with the head that the store's task takes, and whether that is fresh."""
    store, checkpoint = examples.store, loaded.checkpoint
    if store.split(examples.split).together > 1:
        raise BadInput(f"{store.name} is {store.kind}: the loss of a row depends on other rows")
    task, own = TASK_OF_STORE[store.kind], checkpoint.task
    labels = tuple(store.labels) if task.named_classes else ()
    if type(own) is task and (not task.named_classes or own.head.labels == labels):
        return loaded.model, False
    made, fresh, _ = checkpoint.with_head(Head(task.name, labels, store.metric), config.seed)
    if not fresh:  # an MLM head that trained beside a pair head
        return made.model().to(loaded.device), False
    say(
        f"{loaded.path} has no head for {drawing.of_stores(store.name)}: a fresh one ({task.name}, "
        f"seed {config.seed})",
        error=True,
    )
    return made.model().to(loaded.device), True


def _batch(
    loaded: LoadedModel, rows: np.ndarray, config: GradientsConfig, model: Model
) -> Batch[np.ndarray]:
    if model.task is not None and model.task.predicts_masked:
        epochs = np.zeros_like(rows)
        return loaded.assembler.masked_batch(rows, epochs, config.seed, config.masking)
    return loaded.assembler.batch(rows)


def _summary(values: np.ndarray, norms: np.ndarray, loaded: LoadedModel) -> dict[str, Any]:
    if not np.isfinite(norms).all():
        raise BadInput(f"{loaded.path}: the gradient of an example is not finite (NaN or infinite)")
    if without := int((norms == 0).sum()):
        say(f"{loaded.path}: {without} examples have no gradient (no masked token)", error=True)
    values = values[np.isfinite(values)]
    if not len(values):
        raise BadInput("no two examples have a gradient: take longer rows or more masking")
    return {
        "pairs": len(values),
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "minimum": float(values.min()),
        "deviation": float(values.std()),
        "negative": float((values < 0).mean()),
        "without_gradient": without,
        "cosines": np.round(values, 7).tolist(),
        "norms": norms.tolist(),
    }


def draw(result: dict[str, Any]) -> Figure:
    """The distribution of the cosines of each checkpoint, its mean, median and minimum."""
    from matplotlib import rcParams

    every = result["gradients"]
    figure = style.new_figure(2.4 + 1.7 * len(every), 4.2)
    axes = figure.subplots()
    ink, paper = rcParams["text.color"], rcParams["axes.facecolor"]
    for i, one in enumerate(every):
        colour = f"C{i}"
        parts: Any = axes.violinplot([one["cosines"]], [i], widths=0.75, showextrema=False)
        for body in parts["bodies"]:
            body.set(facecolor=colour, alpha=0.35, edgecolor=colour)
        axes.boxplot(
            [one["cosines"]],
            positions=[i],
            widths=0.16,
            whis=(0, 100),
            meanline=True,
            showmeans=True,
            patch_artist=True,
            boxprops={"facecolor": paper, "edgecolor": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
            medianprops={"color": colour, "lw": 1.6},
            meanprops={"color": ink, "ls": "--", "lw": 1.3},
        )
        axes.plot(i, one["minimum"], "v", color=colour, ms=6)
        axes.text(
            i + 0.12, one["minimum"], f"{one['minimum']:.3f}", fontsize=8, va="center", color=colour
        )
    axes.axhline(0, color=style.FAINT, ls=":", lw=1.2)
    axes.set_xticks(range(len(every)), [drawing.short(one["name"]) for one in every])
    axes.set_xlim(-0.6, len(every) - 0.4)
    store = drawing.of_stores(result["data"]["store"])
    axes.set_ylabel("cosine of two examples' gradients")
    axes.set_title(f"{len(result['rows'])} examples of {store}\nhead: {every[0]['head']}")
    figure.supxlabel(
        "line median, dashes mean,\ntriangle minimum, whiskers the range",
        fontsize=8,
        color=style.FAINT,
    )
    return figure
