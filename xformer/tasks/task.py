"""The interface of a task, such as MLM or classification, and the model with its heads.

T tokens in the batch, N sequences, M masked or labelled tokens, C hidden size, V vocabulary, K
outputs of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from xformer.data.batch import Assembler, Batch, Workload
from xformer.data.errors import BadInput, Failure
from xformer.data.store import IGNORED, Ragged, Split
from xformer.model.config import ModelConfig
from xformer.model.encoder import Encoder, Norm, activate
from xformer.model.hilbert import FEATURES, HilbertCNN
from xformer.model.packing import packed
from xformer.ops.dropout import dropout
from xformer.tasks.weighted import Weighted

# in the order of a model's weights
HEADS = ("mlm_head", "pooler", "pair_head", "contact_head", "task_head")
HIGHER, LOWER = 1, -1  # which values of a metric are better
Table = dict[str, list[str]]  # column name -> one text per row


@dataclass(frozen=True)
class Head:
    """What a checkpoint was trained to predict, and how its input was preprocessed.

    `kind` is the name of the task, `labels` are the class names, and `columns` the names of the raw
    columns. `mapping`, `max_tokens` and `masking` (the share of tokens to predict) are the run's
    settings. `pair` says whether the input is two texts. A pair weighs as much in the loss as
    `pair_scale` masked tokens (0: there is no pair head). `smoothing` and `class_weights` change
    the training loss of classification. A predicted score is scale[0] + scale[1] times what the
    head computes. A probe reads the hidden states after `layer`; every other head has None and
    reads the last ones.
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
    scale: tuple[float, float] = (0.0, 1.0)
    layer: int | None = None


@dataclass(frozen=True)
class Loss:
    """A loss summed over `count` predictions, and the number of correct ones among them."""

    total: Tensor  # ()
    count: int | Tensor  # ()
    correct: Tensor  # (), float

    @property
    def mean(self) -> Tensor:
        """The mean loss of a prediction, (); 0 if there is none, as in a batch without a masked
        token."""
        count = self.count
        return self.total / (max(count, 1) if isinstance(count, int) else count.clamp(min=1))


@dataclass(frozen=True)
class Questions:
    """The Q questions of a split, in the order of the numbers in its column `group`."""

    id: list[str]
    answer: list[str]  # the text of the best span over a question's windows
    right: list[list[str] | None]  # all correct answers; []: unanswerable; None: not known


@dataclass(frozen=True)
class Predictions:
    """A task's predictions for a split. `arrays` has the task's arrays and `row`, the row number in
    the split. `store` is the key of the store. `threshold` is the no-answer threshold of `Span`, if
    the user gave one."""

    task: Task
    split: str
    arrays: dict[str, np.ndarray]
    questions: Questions | None = None
    threshold: float | None = None
    store: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.task.head.labels

    def metrics(self) -> dict[str, float]:
        """All metrics of these predictions, by name.

        Rows with a label of -1 or NaN are not scored. Raises BadInput if no row has a label.
        """
        return self.task.score(self)


class Task(ABC):
    """A kind of output, such as one class per sequence. A subclass contains everything that depends
    on the kind, so the model, the training loop and the evaluation treat all kinds alike. Its
    methods take and return arrays and tensors, never ranks or files.

    A subclass sets the first four attributes below, and others that differ from their defaults. It
    defines the abstract methods, `outputs` if it has a task head, and `table` if its predictions
    can be written as a table. Once it is listed in xformer.tasks.known, it can be used in recipes,
    training, scoring, prediction, checkpoints and studies. If it needs a new kind of rows,
    docs/howto/extend.md lists what else to change.

    Evaluation keeps `width` numbers for each row of a split, or for each token if `size` says so.
    """

    name: ClassVar[str]
    """Its name in recipes (`head=`) and checkpoints."""
    stores: ClassVar[tuple[str, ...]]
    """The kinds of stores that it can learn from. The first kind is made for this task."""
    metrics: ClassVar[dict[str, int]]
    """Its metrics: the loss, then the one that selects the best checkpoint by default, then others.
    HIGHER or LOWER says which values are better."""
    arrays: ClassVar[set[str]]
    """The arrays of its predictions, besides `row`."""
    optional_arrays: ClassVar[set[str]] = set()
    """Further arrays, which its predictions have only for some stores."""
    named_classes: ClassVar[bool] = False
    """Whether its outputs are classes, whose names are the labels of the store."""
    predicts_masked: ClassVar[bool] = False
    """Whether it predicts masked tokens. It can then learn from any text."""
    head_reads: ClassVar[Literal["tokens", "places", "examples"]] = "examples"
    """What its own head reads. tokens: every token of the batch. places: the tokens at its
    `places`. examples: one vector for each row (see `ModelConfig.pooling`)."""
    reads_pooled: ClassVar[bool] = False
    """Whether its head reads one vector for each row, pooled from its tokens. A HilbertCNN can then
    replace the encoder."""
    loss_in_nats: ClassVar[bool] = True
    """Whether its loss is a cross-entropy, not a squared error."""
    counts_correct: ClassVar[bool] = True
    """Whether each prediction is either correct or wrong. The training log then has the
    accuracy."""
    loss_settings: ClassVar[tuple[str, ...]] = ()
    """The settings `loss.*` that it takes."""
    takes_probe: ClassVar[bool] = False
    """Whether its head can read another layer than the last; see `Head.layer`."""
    has_questions: ClassVar[bool] = False
    """Whether its rows are windows of questions. Its predictions then have `questions`, and a
    threshold decides if a question is left unanswered."""
    hf_class: ClassVar[str] = ""
    """The name of its class in transformers, after "BertFor"."""
    hf_table: ClassVar[str] = ""
    """The table of xformer.convert.names.Family that names the weights of its head."""
    hf_config: ClassVar[dict[str, Any]] = {}
    """Further entries of its config.json in transformers, besides the usual ones."""
    hf_pipeline: ClassVar[str] = ""
    """The name of its pipeline on the Hugging Face hub."""

    def __init__(self, head: Head):
        self.head = head

    @property
    def hf_example(self) -> str:
        """Python that calls its model and tokenizer of transformers, for model cards."""
        texts = '"one text", "another text"' if self.head.pair else '"one text"'
        return f'outputs = model(**tokenizer({texts}, return_tensors="pt"))'

    # -------------------------------------------------------------------------------- the model

    @property
    def outputs(self) -> int:
        """K, the number of outputs of the task head, or 0 if there is none."""
        return 0

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        """The heads that the task adds to an encoder; the names are from HEADS."""
        heads: dict[str, nn.Module] = {"task_head": nn.Linear(features(config), self.outputs)}
        return heads | ({"pooler": Pooler(config)} if self.has_pooler(config) else {})

    def has_pooler(self, config: ModelConfig) -> bool:
        """Whether the task's own head reads hidden states through the pooler. In ModernBERT every
        head does. A probe does not."""
        if config.architecture == "hilbert_cnn" or self.head.layer is not None:
            return False
        return config.pooler == "norm" or (self.reads_pooled and config.pooler != "none")

    @abstractmethod
    def logits(self, model: Model, batch: Batch[Tensor]) -> Tensor:
        """The outputs of the head for a batch."""

    @abstractmethod
    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        """The summed loss of a batch."""

    def tokens_read(self, config: ModelConfig, work: Workload) -> int:
        """The number of tokens whose last hidden state the task reads."""
        counts = {"tokens": work.tokens, "places": work.masked, "examples": work.rows}
        return counts[self.head_reads]

    def head_flops(self, config: ModelConfig, work: Workload) -> int:
        """Floating-point operations of the task's heads in a forward pass; matrix products only."""
        C = config.hidden
        return 2 * C * (self.outputs + C * self.has_pooler(config)) * self.tokens_read(config, work)

    # ---------------------------------------------------------------------------------- outputs

    @property
    def width(self) -> int:
        """How many numbers evaluation keeps for each row."""
        return self.outputs

    def size(self, split: Split) -> int:
        """The number of items of a split for which evaluation keeps numbers; by default, its
        number of rows."""
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
        """The positions of a batch's outputs among those of the split, (n,), and the outputs, (n,
        `width`). `host` is the same batch in host memory. Labels may be missing."""
        return host.rows, self.logits(model, batch).float()

    def broken(self, outputs: np.ndarray, split: Split) -> np.ndarray:
        """Whether each row of a split has outputs that are not finite, (rows,) bool."""
        return ~np.isfinite(outputs).all(1)

    # -------------------------------------------------------------------------------- the labels

    def has_unlabelled(self, split: Split) -> bool:
        """Whether some rows of a split have no label, so that training cannot use them."""
        return False

    def has_labels(self, split: Split) -> bool:
        """Whether a split has labels to score against."""
        return True

    def label_note(self, split: Split) -> str:
        """A warning about a split's labels; "" if there is none."""
        return ""

    def gold(self, split: Split) -> list[str] | None:
        """The label of each line of `table` as text, or "" for a line without a label. None if the
        split has no labels or the table cannot show them."""
        return None

    # --------------------------------------------------------------------------------- the scores

    @property
    def metric_note(self) -> str:
        """A line that explains a metric, such as which class f1 is about; "" if none needs it."""
        return ""

    def prediction_note(self, predictions: Predictions) -> str:
        """A line about predictions that say little, whatever their score; "" if there is none."""
        return ""

    def default_metric(self, of_store: str | None) -> str:
        """The metric that decides which checkpoint is best. `of_store` is the one that the store
        names, if any."""
        return of_store or list(self.metrics)[1]

    def metrics_on(self, split: Split) -> list[str]:
        """The names of the metrics that `score` returns for a split."""
        return list(self.metrics)

    @abstractmethod
    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        """The outputs of a split as the task's arrays, by name; see `arrays`."""

    def predictions(
        self, outputs: np.ndarray, split: Split, threshold: float | None = None
    ) -> Predictions:
        """The outputs of a split in the form in which they are written to files."""
        arrays = {"row": np.arange(split.rows), **self.as_arrays(outputs, split)}
        arrays = {name: small(values) for name, values in arrays.items()}
        return Predictions(self, split.name, arrays, self.questions(outputs, split), threshold)

    def questions(self, outputs: np.ndarray, split: Split) -> Questions | None:
        """The questions of a split, if its rows belong to questions."""
        return None

    @abstractmethod
    def score(self, predictions: Predictions) -> dict[str, float]:
        """All metrics of the predictions for a split. Raises BadInput if no row has a label."""

    def weighted(self, predictions: Predictions) -> dict[str, Weighted]:
        """Metrics as functions of how often each test example counts, to resample the examples.
        Metrics without such a function are left out. Raises BadInput if no row has a label."""
        return {}

    # ------------------------------------------------------------------------- predictions as text

    def table(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> Table:
        """The outputs as columns, one line per row: the prediction, the row's texts as they were
        read (or its number if the store has none), and its id if it has one."""
        raise NotImplementedError  # only MLM has no table

    def lines(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> str:
        """The outputs as a text file that other programs read: a tab-separated table."""
        table, gold = self.table(outputs, split, threshold), self.gold(split)
        return as_table(table if gold is None else table | {"gold": gold})


class Pooler(nn.Linear):
    """A dense layer and its activation, below a head (see `ModelConfig.pooler`)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.hidden, config.hidden, config.bias)
        self.kind, self.activation = config.pooler, config.activation
        self.norm = Norm(config, config.hidden) if config.pooler == "norm" else None

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C) -> (N, C)."""
        y = super().forward(x)
        if self.norm is not None:
            return self.norm(activate(y, self.activation))
        return torch.relu(y) if self.kind == "relu" else torch.tanh(y)


class Model(nn.Module):
    """An encoder, or a HilbertCNN (`cnn`) in its place, with the heads of a task.

    `model(batch)` is the loss of a packed batch. `model(ids, mask)` are the hidden states of padded
    tensors, for programs with loops of their own; see `hidden`.

    `parts` names further heads that a checkpoint keeps: "pooler", "pair_head", which predicts
    whether the second of two texts follows the first, and "contact_head", which ESM-2 has to
    predict contacts from attention maps (it is kept for export, and nothing here uses it).
    """

    # each is a module, or None if neither the task nor `parts` has it
    mlm_head: Any
    pooler: Any
    pair_head: Any
    contact_head: Any
    task_head: Any

    def __init__(self, config: ModelConfig, task: Task | None = None, parts: Collection[str] = ()):
        super().__init__()
        self.config, self.task = config, task
        self.cnn = HilbertCNN(config) if config.architecture == "hilbert_cnn" else None
        if self.cnn is None:
            self.encoder = Encoder(config)
        heads = {} if task is None else task.modules(config)
        if {"pooler", "pair_head"} & set(parts) and config.pooler != "none":
            heads.setdefault("pooler", Pooler(config))
        if "pair_head" in parts:
            heads.setdefault("pair_head", nn.Linear(features(config), 2))
        if "contact_head" in parts:
            heads["contact_head"] = nn.Linear(config.layers * config.heads, 1)
        for name in HEADS:
            setattr(self, name, heads.get(name))

    def forward(
        self,
        batch: Batch[Tensor] | Tensor | None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Loss | Tensor:
        """The loss of a packed batch; or the hidden states of padded ids (see `hidden`).

        A rank without rows passes None and gets a loss of 0 with a zero gradient for every weight,
        because DistributedDataParallel waits for every gradient on every rank.
        """
        if isinstance(batch, Tensor):
            return self.hidden(batch, mask, segments)
        if batch is not None:
            return self.loss(batch)
        total = torch.stack([weight.sum() for weight in self.parameters()]).sum() * 0.0
        return Loss(total, 0, torch.zeros_like(total.detach()))

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Padded ids (N, L) -> the last hidden states, (N, L, C), which are 0 at padding.

        `mask` (N, L) is 0 or false at padding; without it no token is padding. `segments` (N, L) is
        1 for the second text of a pair; without it every segment is 0. The ids include the special
        tokens. Positions count the real tokens of a row, so padding may be on either side.
        `self.pooled` takes the states of the first tokens. Raises ValueError if the tensors differ
        in shape, if a row is longer than the model accepts, or if the model is a HilbertCNN.
        """
        if self.cnn is not None:
            raise ValueError("a HilbertCNN has no hidden states of tokens")
        batch, places = packed(ids, mask, segments, self.config.max_positions)
        x = self.encoder(batch)  # (T, C)
        padded = x.new_zeros(ids.numel(), x.size(1)).index_copy(0, places, x)
        return padded.view(*ids.shape, x.size(1))

    def loss(self, batch: Batch[Tensor]) -> Loss:
        """The summed loss of a batch. Raises ValueError if the model has no task."""
        return self._task().loss(self, batch)

    def logits(self, batch: Batch[Tensor]) -> Tensor:
        """The outputs of the task's head for a batch. Raises ValueError if the model has no
        task."""
        return self._task().logits(self, batch)

    def _task(self) -> Task:
        if self.task is None:
            raise ValueError("this model has no head: give it one with Checkpoint.with_head")
        return self.task

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout, in training only."""
        return dropout(x, rate if self.training else 0.0)

    def pooled(self, x: Tensor, rate: float = 0.0) -> Tensor:
        """One hidden state of each sequence (N, C), as `row_states` gives it -> pooled states
        (N, C). `rate` is the dropout before the pooler.

        Raises ValueError if the model has no pooler and its config asks for one.
        """
        if self.config.pooler == "none":
            return x
        if self.pooler is None:
            raise ValueError("this model has no pooler: give it one with Checkpoint.with_head")
        y: Tensor = self.pooler(self.drop(x, rate))
        return y

    def states(self, x: Tensor) -> Tensor:
        """What a head reads of every token: x (T, C) itself, or in ModernBERT the pooled x."""
        return self.pooled(x) if self.config.pooler == "norm" else x


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode at the
    end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def n_labels(labels: Tensor) -> Tensor:
    """How many labels count, (). Filler has the label IGNORED; see xformer.data.capacity."""
    return (labels != IGNORED).sum()


def needed(values: Tensor | None, what: str) -> Tensor:
    """What the loss needs of a batch. Raises ValueError if the batch lacks it."""
    if values is None:
        raise ValueError(f"the batch has no {what}, which the loss of this head needs")
    return values


def in_full(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def row_states(model: Model, batch: Batch[Tensor], pooling: Literal["first", "mean"]) -> Tensor:
    """The last hidden state of each row's first token, or the mean over its tokens, (N, C)."""
    if pooling == "first":
        return model.encoder(batch, places=batch.first)
    return row_means(model.encoder(batch), batch.cu_seqlens)


def row_means(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean hidden state of each row, x (T, C) -> (N, C) in float32, or float64 if x is. Of an
    empty row it is 0."""
    sizes = cu_seqlens.diff().long()
    sums = torch.segment_reduce(in_full(x), "sum", lengths=sizes, axis=0, unsafe=True)
    return sums / sizes.clamp(min=1)[:, None]


def tensor_on(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor on a device. On CUDA the host does not wait for the copy."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device(batch: Batch[np.ndarray], device: torch.device) -> Batch[Tensor]:
    """The batch as tensors on a device. On CUDA it is copied from pinned memory without waiting.
    Row numbers stay an array on the host."""
    values: dict[str, Any] = vars(batch)
    arrays = {k: v for k, v in values.items() if isinstance(v, np.ndarray) and k != "rows"}
    return Batch(**values | {name: tensor_on(array, device) for name, array in arrays.items()})


def features(config: ModelConfig) -> int:
    """C, the width of a head's input."""
    return FEATURES if config.architecture == "hilbert_cnn" else config.hidden


# ------------------------------------------------------------------------------------ small helpers


def small(values: np.ndarray) -> np.ndarray:
    """The values in a smaller type: integers in the smallest type that holds them, floats in
    float32."""
    values = np.asarray(values)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    # a signed type that holds -m - 1 also holds m
    return values.astype(np.min_scalar_type(min(least, -most - 1) if least < 0 else most))


def no_labels(split: str) -> BadInput:
    """The error for a split that cannot be scored because it has no labels."""
    return BadInput(f"the split {split!r} has no labels to score against; give another split=")


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise Failure if `values`, (N,) or (N, K), are not all finite. The message begins with `what`
    and names the rows."""
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
    if len(bad):
        count = f"{len(bad):,} of {len(values):,} rows"
        raise Failure(f"{what} are not finite in {count}: {some_rows(bad)}")


def some_rows(rows: Sequence[int] | np.ndarray) -> str:
    """The first eight row numbers, and how many more there are."""
    shown = ", ".join(str(row) for row in rows[:8])
    return f"{shown} and {len(rows) - 8:,} more" if len(rows) > 8 else shown


def texts(column: Ragged) -> list[str]:
    """All texts of a column."""
    return [column.text(row) for row in range(len(column))]


def of_rows(split: Split) -> Table:
    """Columns that identify each row: its texts as they were read (or its number), and its id."""
    known = [name for name in ("input", "input_b", "id") if name in split.columns]
    number = {} if "input" in known else {"row": [str(row) for row in range(split.rows)]}
    return number | {name: texts(split.columns[name]) for name in known}


def as_table(columns: Table) -> str:
    """Columns as tab-separated lines under a header, which csv and pandas read back unchanged."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return "".join("\t".join(map(_cell, row)) + "\n" for row in rows)


def _cell(text: str) -> str:
    """A text as one cell, in quotes if it is empty or holds a tab, a line end or a quote."""
    if text and not any(mark in text for mark in '\t\n\r"'):
        return text
    return '"' + text.replace('"', '""') + '"'
