"""Gradient confusion: do the gradients of different examples point in the same direction?

    python -m xformer.analysis gradients CHECKPOINT [CHECKPOINT ...] data=STORE out=DIR
    python -m xformer.analysis gradients ckpt/bert ckpt/bert-clean data=stores/rte \\
      mapping=shift:1000 examples=64 out=figures

For every pair of examples it computes the cosine between their gradients, over all parameters. The
result is the distribution of these cosines, with its mean, median and minimum (Sankararaman et al.
2020; Kao & Lee 2021, F.2 and figure 11). The store decides the loss: masked language modelling for
texts, otherwise the task of its labels. If a checkpoint has no head for that loss, it gets a new
one, initialised with `seed`. A checkpoint that was pre-trained with a pair head keeps its own loss
on a store of such pairs.

One packed backward pass serves all examples. The gradient of the whole model is never stored per
example. For a weight matrix, the inner product of two examples' gradients is the sum over their
tokens s and t of (a_s . a_t) (g_s . g_t), where a is a token's input and g the gradient of its
output. If that takes more operations than forming the matrix's gradients, they are formed instead,
block by block.
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
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from xformer.analysis import drawing
from xformer.analysis.examples import (
    Examples,
    ExamplesConfig,
    LoadedModel,
    check_finite,
    open_examples,
)
from xformer.analysis.subcommand import Subcommand, publish
from xformer.checkpoint import changed_weights
from xformer.data import style
from xformer.data.batch import Batch
from xformer.data.display import many, say
from xformer.data.errors import BadInput, Failure
from xformer.data.store import Store
from xformer.model.encoder import Encoder
from xformer.ops.native import only_plain
from xformer.tasks.known import TASKS
from xformer.tasks.task import Head, Model, Task, to_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shapes: N examples, R rows of a matrix product, V rows and E columns of a weight.

STRIP = 1024  # rows of the token-by-token matrix in memory at a time
FORMED = 2**22  # gradient entries in memory at a time, few enough for the cache
# A task may train on several kinds of store. The first kind is made for it. If several tasks have
# the same first kind, the first of these tasks counts.
TASK_OF_STORE = {task.stores[0]: task for task in reversed(TASKS.values())}


class GradientsConfig(ExamplesConfig):
    """Which gradients are compared."""

    examples: int = Field(64, ge=2)
    """Number of rows, drawn at random with `seed`, or all rows if the split has fewer."""
    masking: float = Field(0.15, gt=0, lt=1)
    """For masked language modelling: the share of tokens to predict."""


SUBCOMMAND = Subcommand("gradients", GradientsConfig, __doc__ or "", 1, None)


@dataclass(frozen=True)
class Use:
    """One use of a weight matrix (V, E) in the forward pass.

    It adds the sum over r of left_r right_r^T to the weight's gradient.
    """

    left: Tensor  # (R, V), or (R,) integers: left_r is then the unit vector with this index
    right: Tensor  # (R, E)
    owner: Tensor  # (R,) the example that a row belongs to


def gram(uses: list[Use], count: int) -> Tensor:
    """Inner products of the per-example gradients of one weight, (N, N) float64; N is `count`.

    It either sums over pairs of tokens, or forms the gradients of a few rows of the weight at a
    time, whichever takes fewer operations.
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
    """`gram` by sums over pairs of tokens."""
    products = torch.zeros(count, count, dtype=torch.float64)
    for i, a in enumerate(uses):
        for start in range(0, len(a.owner), STRIP):
            end = min(start + STRIP, len(a.owner))
            strip = Use(a.left[start:end], a.right[start:end], a.owner[start:end])
            products += _products(strip, strip, count)
            rest = Use(a.left[end:], a.right[end:], a.owner[end:])
            for other in (rest, *uses[i + 1 :]):
                if len(other.owner):
                    between = _products(strip, other, count)
                    products += between + between.T
    return products


def _products(a: Use, b: Use, count: int) -> Tensor:
    """(N, N): the sums of (left_s . left_t) (right_s . right_t).

    Entry (i, j) is over the rows s of example i in `a` and the rows t of example j in `b`.
    """
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
    """`gram` by forming the per-example gradients, a block of the weight's rows at a time."""
    products = torch.zeros(count, count, dtype=torch.float64)
    out, width = uses[0].left.size(1), uses[0].right.size(1)
    block = max(1, FORMED // (count * width))
    pieces = [(use, _bounds(use.owner, count)) for use in uses]
    for start in range(0, out, block):
        some = uses[0].right.new_empty(count, min(block, out - start), width)
        for number, (use, bounds) in enumerate(pieces):
            for i in range(count):
                here = slice(bounds[i], bounds[i + 1])
                left, right = use.left[here, start : start + block].T, use.right[here]
                some[i].addmm_(left, right, beta=float(number > 0))  # 0: ignore what is there
        flat = some.flatten(1)
        products += (flat @ flat.T).double().cpu()
    return products


def _bounds(owner: Tensor, count: int) -> list[int]:
    """Where the rows of each example begin and end. The rows are sorted by example."""
    steps = torch.arange(count + 1, device=owner.device)
    return torch.searchsorted(owner, steps).tolist()


class PerExample(TorchFunctionMode):
    """Sums the inner products of per-example gradients over all parameters.

    While it is active, it intercepts every torch function that is called with a parameter, and puts
    a hook on the result. During the backward pass the hooks add to `products` (N, N). It handles
    linear layers, embeddings, LayerNorm, and addition of or multiplication by a vector. Any other
    use of a parameter raises Failure, because leaving it out would give wrong cosines.
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
        # the heads that read what the task's head reads; that of pairs reads through a pooler
        own = model.task_head is not None
        self.heads = ("task_head", "mlm_head", "pooler") if own else ("mlm_head",)
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.parameters = dict(model.named_parameters())
        self.products = torch.zeros(self.count, self.count, dtype=torch.float64)
        self.waiting: dict[str, int] = {}  # by name: uses whose gradient has not arrived yet
        self.uses: dict[str, list[Use]] = {}  # by name: uses whose gradient has arrived
        self.vectors: dict[str, Tensor] = {}  # by name: each example's gradient so far, (N, d)
        self.rows: dict[int, tuple[Tensor, Tensor, int]] = {}  # rows that `take_row` returned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = [a for a in (*args, *kwargs.values()) if id(a) in self.names or id(a) in self.rows]
        if not known:
            return func(*args, **kwargs)
        rule = RULES.get(resolve_name(func) or "")
        if rule is not None:
            return rule(self, *args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result is not known[0]:  # as a cast to its own type is
            name = self.names.get(id(known[0]), "a row of a parameter")
            raise Failure(
                f"{name} is used by {func}, which this analysis does not know; add a rule to RULES"
            )
        return result  # such as a size or a type

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
        return self._use(y, y, [name], lambda g, owner: self._matrix(name, Use(tokens, g, owner)))

    def layer_norm(
        self, x: Tensor, shape: Any, weight: Tensor, bias: Tensor | None, eps: float, *rest: Any
    ) -> Tensor:
        y = F.layer_norm(x, shape, weight.detach(), None if bias is None else bias.detach(), eps)
        names = [self.names[id(p)] for p in (weight, bias) if p is not None]

        def gather(g: Tensor, owner: Tensor) -> None:
            self._vector(names[0], g * F.layer_norm(x.detach(), shape, None, None, eps), owner)
            for name in names[1:]:
                self._vector(name, g, owner)

        return self._use(y, x, names, gather)

    def take_row(self, weight: Tensor, row: int) -> Tensor:
        """A row of an embedding table that is added to every token (RoBERTa's only token type)."""
        taken = weight.detach()[row]
        self.rows[id(taken)] = (taken, weight, row)
        return taken

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        x, vector = (b, a) if id(a) in self.names or id(a) in self.rows else (a, b)
        y = x + vector.detach()
        if id(vector) in self.rows:
            _, weight, row = self.rows[id(vector)]
            name = self.names[id(weight)]

            def gather(g: Tensor, owner: Tensor) -> None:
                self._matrix(name, Use(torch.full_like(owner, row), g, owner))

            return self._use(y, x, [name], gather)
        name = self.names[id(vector)]
        return self._use(y, x, [name], lambda g, owner: self._vector(name, g, owner))

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        x, vector = (b, a) if id(a) in self.names else (a, b)
        y = x * vector.detach()
        name = self.names[id(vector)]
        return self._use(y, x, [name], lambda g, owner: self._vector(name, g * x.detach(), owner))

    # ------------------------------------------------------------------------- what is gathered

    def _use(
        self, y: Tensor, x: Tensor, names: list[str], gather: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        """Return `y`, which parameters compute from `x`. In the backward pass call `gather` with
        the gradient of `y` and the example that each row belongs to."""
        owner = self._owner(names[0], x)
        for name in names:
            self._expect(name)
        _on_gradient(y, lambda g: gather(g, owner))
        return y

    def _owner(self, name: str, x: Tensor) -> Tensor:
        """For each row of `x` (R, d), the example it belongs to. Parameter `name` reads `x`."""
        kind = "examples"
        if name.startswith("encoder."):
            kind = "tokens"
        elif self.task is not None and name.startswith(self.heads):
            kind = self.task.head_reads
        owner = self.owners[kind]
        if x.dim() != 2 or len(x) != len(owner):
            raise Failure(
                f"{name} reads a tensor of shape {tuple(x.shape)}, but this analysis expects one "
                f"row for each of {len(owner)} {kind}"
            )
        return owner

    def _expect(self, name: str) -> None:
        """Register a use whose gradient must arrive in the backward pass."""
        self.waiting[name] = self.waiting.get(name, 0) + 1

    def _matrix(self, name: str, use: Use) -> None:
        """Record a use of a weight matrix. The last one adds the weight's share to `products`."""
        self.uses.setdefault(name, []).append(use)
        self.waiting[name] -= 1
        if not self.waiting[name]:  # a shared weight has several uses
            self.products += gram(self.uses.pop(name), self.count)

    def _vector(self, name: str, each: Tensor, owner: Tensor) -> None:
        """Record a use of a vector. `each` (R, d) are its gradients, one for each row."""
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
            raise Failure(
                f"{missed[0]} is used in a way that this analysis does not know; add a rule to "
                "RULES"
            )


def _on_gradient(y: Tensor, gather: Callable[[Tensor], None]) -> None:
    """Call `gather` with the gradient of `y` when the backward pass has computed it."""
    if not y.requires_grad:  # so this is inside an autograd.Function, which runs without gradients
        raise Failure(
            "a parameter is used inside an autograd.Function, which this analysis cannot look into"
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
    """Inner products of per-example gradients over all parameters, (N, N) float64 on the CPU.

    It takes one forward and one backward pass of the packed batch. Gradients that the parameters
    have already are kept. Raises ValueError if the model is not in evaluation mode, and Failure if
    a parameter is used in a way that `PerExample` does not know.
    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    parameters = list(model.parameters())
    before = [(parameter.requires_grad, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True).grad = None
    try:
        watch = PerExample(model, batch)
        with _every_token(model.encoder), only_plain(), watch:
            loss = model.loss(batch)
        if loss.total.requires_grad:
            loss.total.backward()
        watch.check()
        return watch.products
    finally:
        for parameter, (wanted, gradient) in zip(parameters, before, strict=True):
            parameter.requires_grad_(wanted).grad = gradient


@contextmanager
def _every_token(encoder: Encoder) -> Iterator[None]:
    """Make the last layer compute every token, not only those that the head reads.

    `PerExample` assumes that each row of an encoder layer's input is a token of the batch.
    """
    wanted: list[Tensor | None] = []  # the places that the head reads

    def before(_: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        wanted.append(named.pop("places", None))
        return given, named

    def after(_: nn.Module, given: Any, x: Tensor) -> Tensor:
        places = wanted.pop()
        return x if places is None else x.index_select(0, places)

    hooks = (
        encoder.register_forward_pre_hook(before, with_kwargs=True),
        encoder.register_forward_hook(after),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def cosines(products: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The cosines of all pairs i < j, and the norms (N,), from inner products (N, N).

    An example without a masked token has a gradient of zero; its cosines are NaN.
    """
    norms = products.diagonal().clamp(min=0).sqrt()
    matrix = (products / norms[:, None] / norms).numpy()
    matrix = np.where((norms[:, None] * norms).numpy() > 0, matrix, np.nan)
    return matrix[np.triu_indices(len(matrix), 1)], norms.numpy()


# ------------------------------------------------------------------------------ the command


def run(paths: list[str], config: GradientsConfig) -> None:
    """`python -m xformer.analysis gradients CHECKPOINT ... key=value ...`"""
    examples = open_examples(config, paths)
    rows = _labelled(examples)
    store = examples.store
    masked = TASK_OF_STORE[store.kind].predicts_masked
    masked |= any(_reads_pairs(loaded.checkpoint.task, store) for loaded in examples.models)
    if not masked and "masking" in config.model_fields_set:
        raise BadInput(
            f"masking= applies only to masked language modelling, but {store.name} is of kind "
            f"{store.kind!r}, so its labels are predicted: leave it out"
        )
    check_finite(examples)
    summaries: list[dict[str, Any]] = []
    for loaded in examples.models:
        model, fresh = _with_head(loaded, examples, config)
        batch = to_device(_batch(loaded, rows, config, model), loaded.device)
        values, norms = cosines(inner_products(model, batch))
        summaries.append(
            {
                "name": loaded.name,
                "head": _head_in_words(model),
                "fresh_head": fresh,
                **_summary(values, norms, loaded),
            }
        )
    result = {
        "analysis": "gradients",
        **examples.describe(),
        "rows": rows.tolist(),
        "gradients": summaries,
    }
    line = "gradients " + "; ".join(
        f"{s['name']}: cosine mean {s['mean']:.4f}, median {s['median']:.4f}, "
        f"minimum {s['minimum']:.4f}, {100 * s['negative']:.1f} % negative"
        for s in summaries
    )
    line += f" over {summaries[0]['pairs']:,} pairs of examples"
    metrics = {
        s["name"]: {name: s[name] for name in ("mean", "median", "minimum", "negative")}
        for s in summaries
    }
    publish(config, result, draw, line, metrics)


def _labelled(examples: Examples) -> np.ndarray:
    """The drawn rows, without those that lack the label that the task needs."""
    rows = examples.rows
    columns = examples.store.split(examples.split).columns
    if examples.store.kind in ("class", "score"):
        labels = np.asarray(columns["label"])[rows]
        known = labels >= 0 if examples.store.kind == "class" else ~np.isnan(labels)
        rows = rows[known]
    if len(rows) < 2:
        without = len(examples.rows) - len(rows)
        unlabelled = f" ({many(without, 'drawn row')} without a label left out)" if without else ""
        raise BadInput(
            f"the split {examples.split!r} gives {many(len(rows), 'example')}{unlabelled}, but a "
            "cosine needs two: give more examples=, or another split="
        )
    return rows


def _with_head(
    loaded: LoadedModel, examples: Examples, config: GradientsConfig
) -> tuple[Model, bool]:
    """The model with the head of the store's task, and whether the head is new."""
    store, checkpoint = examples.store, loaded.checkpoint
    if store.split(examples.split).together > 1:
        raise BadInput(
            f"{store.name} is of kind {store.kind!r}: the loss of a row depends on other "
            "rows, so a single row does not have a gradient; give another store"
        )
    task, own = TASK_OF_STORE[store.kind], checkpoint.task
    if _reads_pairs(own, store):
        return loaded.model, False
    labels = tuple(store.labels) if task.named_classes else ()
    if type(own) is task and (not task.named_classes or own.head.labels == labels):
        return loaded.model, False
    made = checkpoint.with_head(Head(task.name, labels, store.metric), config.seed)
    new, _ = changed_weights(checkpoint, made)
    if not new:  # an MLM head that was trained with a pair head
        return made.model().to(loaded.device), False
    say(
        f"{loaded.path} has no head for {drawing.of_stores(store.name)}; it gets a new one "
        f"({task.name}, seed {config.seed})",
        error=True,
    )
    return made.model().to(loaded.device), True


def _reads_pairs(task: Task | None, store: Store) -> bool:
    """Whether a checkpoint's own task is MLM with a pair head, for the classes of this store."""
    if task is None or store.kind != "class":
        return False
    return task.head.pair_scale > 0 and task.head.labels == tuple(store.labels)


def _head_in_words(model: Model) -> str:
    """What a model's head predicts, as the result and the figure name it."""
    if model.task is None:
        return "none"
    return f"{model.task.name} + pair" if model.task.head.pair_scale else model.task.name


def _batch(
    loaded: LoadedModel, rows: np.ndarray, config: GradientsConfig, model: Model
) -> Batch[np.ndarray]:
    """The packed batch of these rows, with masked tokens if the task predicts them."""
    if model.task is not None and model.task.predicts_masked:
        epochs = np.zeros_like(rows)
        return loaded.assembler.masked_batch(rows, epochs, config.seed, config.masking)
    return loaded.assembler.batch(rows)


def _summary(values: np.ndarray, norms: np.ndarray, loaded: LoadedModel) -> dict[str, Any]:
    if not np.isfinite(norms).all():
        raise BadInput(
            f"{loaded.path}: the gradient of an example is not finite (NaN or infinite); give "
            "another checkpoint"
        )
    if without := int((norms == 0).sum()):
        say(
            f"{loaded.path}: {many(without, 'example')} left out, whose gradient is zero: no token "
            "is masked or labelled",
            error=True,
        )
    values = values[np.isfinite(values)]
    if not len(values):
        raise BadInput(
            "no two examples have a gradient: give a larger max_tokens= or masking=, or other data="
        )
    return {
        "pairs": len(values),
        **drawing.spread(values),
        "median": float(np.median(values)),
        "minimum": float(values.min()),
        "negative": float((values < 0).mean()),
        "without_gradient": without,
        "cosines": np.round(values, 7).tolist(),
        "norms": norms.tolist(),
    }


def draw(result: dict[str, Any]) -> Figure:
    """The distribution of each checkpoint's cosines, with its mean, median and minimum."""
    from matplotlib import rcParams

    summaries = result["gradients"]
    figure = style.new_figure(2.4 + 1.7 * len(summaries), 4.2)
    axes = figure.subplots()
    ink, paper = rcParams["text.color"], rcParams["axes.facecolor"]
    for i, summary in enumerate(summaries):
        colour = f"C{i}"
        parts: Any = axes.violinplot([summary["cosines"]], [i], widths=0.75, showextrema=False)
        for body in parts["bodies"]:
            body.set(facecolor=colour, alpha=0.35, edgecolor=colour)
        axes.boxplot(
            [summary["cosines"]],
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
        axes.plot(i, summary["minimum"], "v", color=colour, ms=6)
        axes.text(
            i + 0.12,
            summary["minimum"],
            f"{summary['minimum']:.3f}",
            fontsize=8,
            va="center",
            color=colour,
        )
    axes.axhline(0, color=style.FAINT, ls=":", lw=1.2)
    axes.set_xticks(
        range(len(summaries)), [drawing.short(summary["name"]) for summary in summaries]
    )
    axes.set_xlim(-0.6, len(summaries) - 0.4)
    store = drawing.of_stores(result["data"]["store"])
    axes.set_ylabel("cosine of two examples' gradients")
    heads = [f"{s['head']} (new)" if s.get("fresh_head") else s["head"] for s in summaries]
    different = ", ".join(dict.fromkeys(heads))
    axes.set_title(f"{many(len(result['rows']), 'example')} of {store}\nhead: {different}")
    figure.supxlabel(
        "line median, dashes mean,\ntriangle minimum, whiskers the range",
        fontsize=8,
        color=style.FAINT,
    )
    return figure
