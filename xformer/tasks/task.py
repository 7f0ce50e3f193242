"""A task is one kind of output and all that belongs to it. A model is trained for one task.

T tokens in the batch, N sequences, M masked or labelled tokens, C hidden size, V vocabulary, K
outputs of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from xformer.data.batch import Assembler, Batch, Workload
from xformer.data.errors import BadInput, Failure
from xformer.data.store import Ragged, Split
from xformer.model.config import ModelConfig
from xformer.model.encoder import Encoder
from xformer.model.hilbert import FEATURES, HilbertCNN
from xformer.ops.dropout import dropout

HEADS = ("mlm_head", "pooler", "pair_head", "task_head")  # of a model, in the order of its weights
HIGHER, LOWER = 1, -1  # which values of a metric are the better ones
Table = dict[str, list[str]]  # columns of texts by name


@dataclass(frozen=True)
class Head:
    """What a checkpoint was trained to predict, and how its input was read.

    `labels` are the class names, `columns` the names of the raw columns. `mapping`, `max_tokens`
    and `masking` (the share of tokens an MLM head is asked for) are those of the run. `pair`: the
    input is two texts. `pair_scale`: as how many masked tokens a pair counts, where a pair head
    trains too. `smoothing` and `class_weights` change the training loss of classes.
    """

    kind: str
    labels: tuple[str, ...] = ()
    metric: str | None = None
    mapping: str = "none"
    max_tokens: int = 512
    masking: float = 0.15
    pair: bool = False
    pair_scale: float = 0.0
    columns: dict[str, Any] | None = None
    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Loss:
    """A loss as its sum and what it is a sum over; `correct` counts right predictions."""

    total: Tensor  # ()
    count: int
    correct: Tensor  # (), float


@dataclass(frozen=True)
class Questions:
    """Questions about a context, by the number in `group`: lists of Q."""

    id: list[str]
    answer: list[str]  # the text of the best span over a question's windows
    right: list[list[str] | None]  # all right answers; none of them: [], not known: None


@dataclass(frozen=True)
class Predictions:
    """What a task said of a split. `arrays` are the task's, with `row`, the row number in the
    store's split. `store` is the key of the store. `threshold` is that of `Span`."""

    task: Task
    split: str
    arrays: dict[str, np.ndarray]
    questions: Questions | None = None
    threshold: float | None = None
    store: str = ""

    @property
    def head(self) -> str:
        """The name of the task."""
        return self.task.name

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.task.head.labels

    def metrics(self) -> dict[str, float]:
        """Every metric that evaluation gives for these outputs, by name.

        Labels of -1 or NaN are not scored. Raises BadInput if no row has a label.
        """
        return self.task.score(self)


class Task:
    """One kind of output. A subclass answers every question about its kind, so that no other code
    of the model, the loop or the evaluation asks which kind it has. It takes and gives arrays and
    tensors, never ranks or files.

    A subclass sets the first four attributes below, and those others that differ from their
    defaults. It must define `outputs`, `logits`, `loss`, `tokens_read`, `as_arrays`, `score` and
    `table`. It must be listed in xformer.tasks.known. Then recipes, training, scoring, prediction,
    checkpoints and studies know it. If it needs rows of a new kind, preprocess/ needs a reader, and
    xformer.data.store a name for that kind.

    Evaluation keeps numbers of each row of a split, (N, `width`); a subclass may choose other
    things than rows (`size`).
    """

    name: ClassVar[str]
    """What recipes (`head=`) and checkpoints call it."""
    stores: ClassVar[tuple[str, ...]]
    """The kinds of stores that it learns from. The first one is made for it."""
    metrics: ClassVar[dict[str, int]]
    """What it is scored by: the loss, then the usual choice for "best", then others. HIGHER or
    LOWER says which values are better."""
    arrays: ClassVar[set[str]]
    """What its predictions hold beside `row`."""
    optional_arrays: ClassVar[set[str]] = set()
    """What they hold for some stores alone."""
    named_classes: ClassVar[bool] = False
    """Its outputs are classes with names, which are the labels of the store."""
    predicts_masked: ClassVar[bool] = False
    """It predicts masked tokens, so that any text will do."""
    head_reads: ClassVar[Literal["tokens", "places", "examples"]] = "examples"
    """The rows of what its own head reads: all tokens of the batch, its `places`, or the first
    token of each row."""
    reads_pooled: ClassVar[bool] = False
    """Its head reads the pooled first token, so that a HilbertCNN can stand in for the encoder."""
    loss_in_nats: ClassVar[bool] = True
    """Its loss is a cross-entropy, not a squared error."""
    counts_correct: ClassVar[bool] = True
    """An output is right or wrong, and the log tells the accuracy in training."""
    takes_class_weights: ClassVar[bool] = False
    """Its training loss takes class weights and label smoothing."""
    has_questions: ClassVar[bool] = False
    """Several rows are about one question; its predictions hold Questions."""
    takes_threshold: ClassVar[bool] = False
    """A threshold decides whether it answers at all."""
    hf_class: ClassVar[str] = ""
    """How transformers' class is called: the part after "BertFor"."""
    hf_table: ClassVar[str] = ""
    """Which table of xformer.convert.names.Family names the weights of its head there."""
    hf_config: ClassVar[dict[str, Any]] = {}
    """What its config.json holds there besides."""

    def __init__(self, head: Head):
        self.head = head

    # -------------------------------------------------------------------------------- the model

    @property
    def outputs(self) -> int:
        """K, the outputs of the task head; 0 without one."""
        return 0

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        """The heads that the task adds to an encoder, by their names among HEADS."""
        return {"task_head": nn.Linear(features(config), self.outputs)}

    def logits(self, model: Model, batch: Batch[Tensor]) -> Tensor:
        """What the head says of a batch."""
        raise NotImplementedError

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        """The summed loss of a batch."""
        raise NotImplementedError

    def tokens_read(self, work: Workload) -> int:
        """How many tokens' last hidden states the task reads."""
        raise NotImplementedError

    def head_flops(self, config: ModelConfig, work: Workload) -> int:
        """Operations of the matrix products of the task's heads in a forward pass."""
        return 2 * config.hidden * self.outputs * self.tokens_read(work)

    # ---------------------------------------------------------------------------------- outputs

    @property
    def width(self) -> int:
        """How many numbers evaluation keeps of each row."""
        return self.outputs

    def size(self, split: Split) -> int:
        """Of how many things evaluation keeps numbers: the rows of a split."""
        return split.rows

    def evaluation_batch(
        self, assembler: Assembler, examples: np.ndarray, seed: int
    ) -> Batch[np.ndarray]:
        """The batch on which these examples are evaluated."""
        return assembler.batch(examples)

    def evaluate(
        self,
        model: Model,
        batch: Batch[Tensor],
        host: Batch[np.ndarray],
        assembler: Assembler,
    ) -> tuple[np.ndarray, Tensor]:
        """The places of a batch's outputs among those of the split, (n,), and the outputs, (n,
        `width`). `host` is the same batch on the host. Labels may be missing."""
        return host.rows, self.logits(model, batch).float()

    def broken(self, outputs: np.ndarray, split: Split) -> np.ndarray:
        """Which rows of a split have outputs that are not finite, (rows,)."""
        return ~np.isfinite(outputs).all(1)

    # -------------------------------------------------------------------------------- the labels

    def has_unlabelled(self, split: Split) -> bool:
        """Whether a split has rows without a label, from which nothing can be learnt."""
        return False

    def has_labels(self, split: Split) -> bool:
        """Whether a split has labels to score against."""
        return True

    def note(self, split: Split) -> str:
        """What the user should know of a split's labels; "" if there is nothing to say."""
        return ""

    # --------------------------------------------------------------------------------- the scores

    def default_metric(self, of_store: str | None) -> str:
        """What decides which checkpoint is the best. `of_store` is the store's wish."""
        return of_store or list(self.metrics)[1]

    def metrics_on(self, split: Split) -> list[str]:
        """The metrics that scoring a split will give."""
        return list(self.metrics)

    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        """The arrays of predictions from the outputs of a split; see `arrays`."""
        raise NotImplementedError

    def predictions(
        self, outputs: np.ndarray, split: Split, threshold: float | None = None
    ) -> Predictions:
        """The outputs of a split as they are kept in files."""
        arrays = {"row": np.arange(split.rows), **self.as_arrays(outputs, split)}
        arrays = {name: small(values) for name, values in arrays.items()}
        return Predictions(self, split.name, arrays, self.questions(outputs, split), threshold)

    def questions(self, outputs: np.ndarray, split: Split) -> Questions | None:
        """The questions of a split, if its rows are about questions."""
        return None

    def score(self, kept: Predictions) -> dict[str, float]:
        """Every metric of some predictions. Raises BadInput if there is no label."""
        raise NotImplementedError

    # ------------------------------------------------------------------------- predictions as text

    def table(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> Table:
        """The outputs for a reader, one line a row: what is predicted, then what of the row is
        known: its texts as they were read, or its number, and its id."""
        raise NotImplementedError

    def lines(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> str:
        """The outputs as a file that other programs read: a tab-separated table."""
        return as_table(self.table(outputs, split, threshold))

    def check_lines(self, wanted: str) -> None:
        """Raise BadInput if the task has no such file as the user asked for with `wanted`."""


class Model(nn.Module):
    """An encoder with the heads of a task; or a HilbertCNN, `cnn`, in place of the encoder.

    `parts` are further heads that a checkpoint keeps: "pooler", and "pair_head", which predicts
    whether the second of two texts follows the first.
    """

    # None or a module; the task knows which ones are there
    mlm_head: Any
    pooler: Any
    pair_head: Any
    task_head: Any

    def __init__(self, config: ModelConfig, task: Task | None = None, parts: Collection[str] = ()):
        super().__init__()
        self.config, self.task = config, task
        self.cnn = HilbertCNN(config) if config.architecture == "hilbert_cnn" else None
        if self.cnn is None:
            self.encoder = Encoder(config)
        heads = {} if task is None else task.modules(config)
        if parts and config.pooler != "none":
            heads.setdefault("pooler", nn.Linear(features(config), features(config)))
        if "pair_head" in parts:
            heads.setdefault("pair_head", nn.Linear(features(config), 2))
        for name in HEADS:
            setattr(self, name, heads.get(name))

    def forward(self, batch: Batch[Tensor] | None) -> Loss:
        """The loss of a batch; of None a loss of 0 over nothing, with a gradient of zero for every
        weight. That is what a rank without rows adds to a step (DistributedDataParallel waits for
        the gradient of every weight on every rank)."""
        if batch is not None:
            return self.loss(batch)
        total = torch.stack([weight.sum() for weight in self.parameters()]).sum() * 0.0
        return Loss(total, 0, torch.zeros_like(total.detach()))

    def loss(self, batch: Batch[Tensor]) -> Loss:
        """The summed loss of a batch. Raises ValueError without a task."""
        return self._task().loss(self, batch)

    def logits(self, batch: Batch[Tensor]) -> Tensor:
        """What the task's head says of a batch. Raises ValueError without a task."""
        return self._task().logits(self, batch)

    def _task(self) -> Task:
        if self.task is None:
            raise ValueError("this model has no head: give it one with Checkpoint.with_head")
        return self.task

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout, in training alone."""
        return dropout(x, rate if self.training else 0.0)

    def pooled(self, x: Tensor, rate: float = 0.0) -> Tensor:
        """The hidden states of each sequence's first token, (N, C), -> the pooled ones, (N, C).
        `rate` is that of a dropout before the pooler.

        Raises ValueError if the model has no pooler and its config asks for one.
        """
        if self.config.pooler == "none":
            return x
        if self.pooler is None:
            raise ValueError("this model has no pooler: give it one with Checkpoint.with_head")
        y: Tensor = self.pooler(self.drop(x, rate))
        return torch.relu(y) if self.config.pooler == "relu" else torch.tanh(y)


def features(config: ModelConfig) -> int:
    """C, the width of what a head reads."""
    return FEATURES if config.architecture == "hilbert_cnn" else config.hidden


# ------------------------------------------------------------------------------------ small helpers


def small(values: np.ndarray) -> np.ndarray:
    """Integers in the smallest type that holds them all; floats as float32."""
    values = np.asarray(values)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    return values.astype(np.min_scalar_type(min(least, ~most) if least < 0 else most))


def no_labels(split: str) -> BadInput:
    """The error for a split that cannot be scored."""
    return BadInput(f"the split {split!r} has no labels to score against; give another split")


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise Failure that names the rows of values (N,) or (N, K) which are not finite numbers."""
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
    if len(bad):
        count = f"{len(bad):,} of {len(values):,} rows"
        raise Failure(f"{what} are not finite in {count}: {some_rows(bad)}")


def some_rows(rows: Sequence[int] | np.ndarray) -> str:
    """The first row numbers of a list, and how many more there are."""
    shown = ", ".join(str(row) for row in rows[:8])
    return f"{shown} and {len(rows) - 8:,} more" if len(rows) > 8 else shown


def texts(column: Ragged) -> list[str]:
    """All rows of a column of texts."""
    return [column.text(row) for row in range(len(column))]


def of_rows(split: Split) -> Table:
    """What is known of each row: its texts as they were read, or else its number, and its id."""
    known = [name for name in ("input", "input_b", "id") if name in split.columns]
    number = {} if "input" in known else {"row": [str(row) for row in range(split.rows)]}
    return number | {name: texts(split.columns[name]) for name in known}


def as_table(columns: Table) -> str:
    """Columns as tab-separated lines under a header, which csv and pandas read back unchanged."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return "".join("\t".join(map(_cell, row)) + "\n" for row in rows)


def _cell(text: str) -> str:
    """A text as one cell: in quotes if it is empty, or holds a tab, a line end or a quote."""
    if text and not any(mark in text for mark in '\t\n\r"'):
        return text
    return '"' + text.replace('"', '""') + '"'
