"""All settings of a run, in groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from xformer import trajectory
from xformer.config import Paths, Settings, each
from xformer.data import mapping
from xformer.model.config import NEWER, ModelConfig
from xformer.optim import OptimConfig
from xformer.parallel.processes import TrainingSystem
from xformer.surgery.registry import OPERATIONS, Operation, Seed
from xformer.tasks.known import TASKS

if TYPE_CHECKING:
    TaskName = str
    AnyOperation = Operation
else:
    TaskName = Literal[tuple(TASKS)]
    # importing xformer.surgery has registered all operations
    schemas = tuple(known.schema for known in OPERATIONS.values())
    # the key `op` selects the schema
    AnyOperation = Annotated[Union[schemas], Field(discriminator="op")]  # noqa: UP007
# Fields that were added after the first results. Runs of earlier versions are treated as if these
# had their defaults. Such a field enters the key of a study's run only if it differs from its
# default, so earlier results keep their keys. Add each new field here.
ADDED_LATER = (
    "loss.standardize",  # before its group, which has no such key then
    "loss",
    "mixture",
    "masking.final",
    "masking.spans",
    "optim.decay",
    "probe",
    "train.branch_from",
    "train.spike",
    "train.trouble",
    *(f"model.{name}" for name in NEWER),
)
# a setting that is not used if the other is not 0
UNUSED_IF_SET = {"train.epochs": "train.steps", "batch.rows": "batch.tokens"}


class Seeds(Settings):
    """The seeds of everything random in a run. `seed=N` is short for `seed.all=N`. Each of the
    others overrides it for one purpose, so that two runs can differ in a single seed."""

    all: Seed = 0
    """Seed of everything that has no seed of its own."""
    weights: Seed | None = None
    """Seed of fresh weights: of a model without `init`, of a new head, and of surgery operations
    that are given no seed."""
    order: Seed | None = None
    """Seed of the order of the rows, and of which rows `fraction` keeps."""
    masks: Seed | None = None
    """Seed of the choice of masked tokens, and of what replaces them."""
    dropout: Seed | None = None
    """Seed of dropout."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return value if isinstance(value, dict | Seeds) else {"all": value}

    @model_serializer(mode="wrap")
    def _shortest(self, plain: SerializerFunctionWrapHandler) -> Any:
        """Only the number of `all` if nothing overrides it. Runs from before `seed.weights` existed
        have this form."""
        seeds = {name: value for name, value in plain(self).items() if value is not None}
        return self.all if seeds.keys() == {"all"} else seeds

    def of(self, what: Literal["weights", "order", "masks", "dropout"]) -> int:
        """The seed of one thing: its own, or else `all`."""
        own: int | None = getattr(self, what)
        return self.all if own is None else own


class BatchConfig(Settings):
    """The batch size of an optimizer step, summed over all ranks and micro-batches."""

    rows: int = Field(32, ge=1, le=2**20)
    """Rows per step, or questions with head=choice. The last step of a run may have fewer."""
    tokens: int = Field(0, ge=0, le=2**28)
    """Tokens per step, special tokens included: a step takes as many rows as fit. 0 uses
    batch.rows."""
    max_tokens: int = Field(128, ge=0)
    """Maximum length of a row in tokens, special tokens included. Longer rows are truncated. 0
    takes the longest rows that the model accepts, and refuses a store with longer ones."""
    accumulate: int = Field(1, ge=1, le=2**20)
    """Gradient accumulation: micro-batches per rank and step. More of them need less memory."""

    @field_validator("max_tokens")
    @classmethod
    def _room_for_a_token(cls, value: int) -> int:
        if value in (1, 2):
            raise ValueError(
                f"batch.max_tokens={value} leaves no room for text beside two special tokens; give "
                "3 or more, or 0 for the longest rows that the model accepts"
            )
        return value


class MixtureConfig(Settings):
    """How often a training step reads each store of `data`. By default the rows of all stores are
    joined, and an epoch reads each row once. In a mixture, a small store may be read several times
    while a large one is read once."""

    weights: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = ()
    """The share of the rows that each store gives, in the order of `data`, such as [0.7, 0.3]. The
    weights are divided by their sum."""
    final: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = ()
    """The weights at the end of the run. They change linearly from mixture.weights. With
    train.steps and batch.tokens the end is an estimate. The length of a run with mixture.final
    cannot be changed when it continues. Empty: the weights stay constant."""
    temperature: float = Field(0.0, ge=0)
    """Instead of weights: the weight of a store is its number of rows to the power 1/temperature. 1
    keeps the proportions of the stores, and a higher number makes them more equal. 0 turns this
    off."""

    @property
    def given(self) -> bool:
        """Whether the run has a mixture."""
        return bool(self.weights or self.temperature)

    @model_validator(mode="after")
    def _one_spelling(self) -> MixtureConfig:
        if self.weights and self.temperature:
            raise ValueError(
                f"mixture.weights={list(self.weights)} and mixture.temperature={self.temperature:g}"
                " contradict each other; give one of them"
            )
        if 0 < self.temperature < 0.1:
            raise ValueError(
                f"mixture.temperature={self.temperature:g}: give at least 0.1, or 0 to turn it off"
            )
        if self.final and not self.weights:
            raise ValueError("mixture.final needs mixture.weights, with which the run begins")
        for name in ("weights", "final"):
            if getattr(self, name) and not sum(getattr(self, name)):
                raise ValueError(f"mixture.{name}: give at least one weight above 0")
        return self

    def check(self, stores: int) -> None:
        """Raise ValueError if there is only one store, or if there is not a weight for each."""
        if self.given and stores < 2:
            raise ValueError('mixture needs several stores: give data=["A", "B"]')
        for name in ("weights", "final"):
            if (weights := getattr(self, name)) and len(weights) != stores:
                raise ValueError(
                    f"mixture.{name}={list(weights)}: data names {stores} stores; give one weight "
                    "for each"
                )


class MaskingConfig(Settings):
    """BERT's masking: of the tokens to predict, 80 % become the mask token, 10 % a random token,
    and 10 % stay unchanged."""

    probability: float = Field(0.15, gt=0, lt=1)
    """Probability that a token is chosen for prediction. Special tokens are never chosen."""
    final: float | None = Field(None, gt=0, lt=1)
    """The probability at the last planned sample, where mixture.final is reached too. It changes
    linearly from masking.probability, which validation always uses. The length of such a run
    cannot be changed when it continues. Without this key the probability stays constant."""
    spans: bool = False
    """true chooses spans of 1 to 10 neighbouring tokens (3.8 on average) instead of single tokens,
    and replaces the tokens of a span alike (Joshi et al. 2020, SpanBERT). Validation masks single
    tokens, so that its loss can be compared."""
    pair_weight: float = Field(0.0, ge=0)
    """Weight of the pair loss relative to the MLM loss, for stores of pairs. 0 trains no pair head.
    The papers use 1 (BERT's next sentence, ALBERT's sentence order) and 0.43 (PLUS's protein
    families)."""

    @model_validator(mode="after")
    def _pairs_have_one_weight(self) -> MaskingConfig:
        if self.pair_weight and self.final is not None:
            raise ValueError(
                f"masking.final={self.final:g} cannot be combined with masking.pair_weight, which "
                "is relative to a constant number of masked tokens; leave one of them out"
            )
        return self


class LossConfig(Settings):
    """Changes to the loss. Those of head=classify change only the training loss."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each label's probability that is spread evenly over all classes (Szegedy et al.
    2016)."""
    class_weights: Literal["balanced"] | tuple[float, ...] = ()
    """Weight of each class, in the order of the store's labels. "balanced" makes them inversely
    proportional to the number of training rows of each class, with a mean of 1 over the rows.
    Empty: all classes weigh 1. It is for head=classify, as is label_smoothing."""
    standardize: bool = False
    """Let head=regress learn scores in units of their standard deviation from their mean, both over
    the training rows. The predicted scores have the unit of the labels."""

    @field_validator("class_weights", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        listed = isinstance(value, list | tuple) and all(
            isinstance(weight, int | float) and 0 <= weight < math.inf for weight in value
        )
        if value != "balanced" and (not listed or (value and not any(value))):
            raise ValueError(
                f"loss.class_weights={value}: give balanced, or a list with one number per class, "
                "none below 0 and not all 0, such as [1, 2.5]"
            )
        return value


class ProbeConfig(Settings):
    """Probing: what can be read off a frozen encoder."""

    layer: int | None = Field(None, ge=0)
    """Train only a linear head on the hidden states after this layer; everything else is frozen. 0
    is the output of the embeddings. A head for classes or scores reads the mean over all tokens of
    a row, a head for words the first token of each word; there is no pooler. The layers above are
    not computed."""


class TrainConfig(Settings):
    """How long to train, and what to keep."""

    steps: int = Field(0, ge=0)
    """Optimizer steps; 0 trains for train.epochs."""
    epochs: float = Field(3.0, gt=0)
    """Passes over the training rows if train.steps is 0."""
    validate_every: int = Field(0, ge=0)
    """Steps between validations; 0 validates after every epoch. The last step is always
    validated."""
    checkpoint_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 writes none at fixed steps. One is also written after each
    validation that is the best so far, and one at the end."""
    keep_last: int = Field(2, ge=1)
    """How many of the newest checkpoints to keep, besides the best."""
    keep_every: int = Field(0, ge=0)
    """Steps between checkpoints that are written and never pruned; 0 writes none of these."""
    keep_at: str | tuple[int | str, ...] = ()
    """When to keep a copy of the weights in RUN/trajectory. "log": at step 0, at powers of two,
    then at every twentieth of the run. "log:500": at step 0, at powers of two, then every 500
    steps. "10K words": when this much was read; the units are steps, tokens (special tokens
    included) and words of the raw text. A list: at several of these, such as [0, 100, "5M tokens",
    "1M words"]; a bare number counts steps."""
    keep_state: bool = True
    """true keeps what a finished run needs to be extended. false keeps only the weights of the
    selected checkpoint, a third of the size or less."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of the log; each line is a mean over the steps since the last."""
    select: Literal["best", "last"] = "best"
    """The checkpoint that a finished run stands for: the best on validation, or the last."""
    metric: str = ""
    """The metric by which validations are compared. Empty: the loss for MLM, else the store's
    metric."""
    branch_from: str | None = None
    """Begin a new run at this checkpoint of another run, RUN/checkpoints/step_N, with its weights,
    moments and progress. Both runs must take the same steps up to this checkpoint, so both need
    optim.schedule=wsd. They may differ only in their length, their decay, what they log, validate
    and keep, how the best checkpoint is chosen, and what is done at numerical trouble."""
    patience: int = Field(0, ge=0)
    """Stop after this many validations in a row that are not the best so far; 0 never stops
    early."""
    trouble: Literal["stop", "skip"] = "stop"
    """What to do if a loss or a gradient is not finite, or is a spike: stop, or skip the update of
    that step. The log names the layer where it arose, and the rows of the store."""
    spike: float = Field(0.0, ge=0)
    """A loss or gradient norm that lies more than this many standard deviations above its mean over
    the last 100 steps is a spike; 0 turns this check off."""
    only: tuple[str, ...] = ()
    """Train only these weights, such as ["embeddings.word", "mlm_head"]: names or prefixes, with
    the wildcards * and ?. All others are frozen. Empty: train all."""

    @field_validator("branch_from")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        return value or None

    @field_validator("keep_at", mode="before")
    @classmethod
    def _marks(cls, value: Any) -> Any:
        trajectory.parse(value)
        return (value,) if isinstance(value, int) else value


class Recipe(Settings):
    """All settings of a run."""

    data: Paths
    """The store to train on, made by preprocess.py, or a list of stores, whose rows are joined."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the training rows to use; seed.order decides which."""
    run: str = Field(min_length=1)
    """Directory of the run. Repeat the command to resume a stopped run."""
    init: str | None = None
    """The checkpoint or finished run to start from. Without it, a model with the shape in model.*
    is initialised at random. In a recipe, init = "" means that the command must give one."""
    head: TaskName
    """What to predict: masked tokens (mlm), a class (classify), a score (regress), the span of an
    answer (span), the class of each word (tag), or the right one of several endings (choice)."""
    seed: Seeds = Seeds()
    mapping: str = "none"
    """How token ids of the store become those of the model. none: unchanged. ids: unchanged,
    although the store has another tokenizer. shift:K: add K, modulo the vocabulary size.
    random:SEED: permute the vocabulary. symbols:SEED: give each symbol of the store a random
    ordinary piece. unused:SEED: give each symbol a random unused piece."""
    surgery: tuple[AnyOperation, ...] = ()
    """Operations to apply to the initial weights, in this order, such as [{op = "clean"}]."""
    overwrite: bool = False
    """Delete the contents of the run's directory, and start from scratch."""
    model: ModelConfig = ModelConfig()
    batch: BatchConfig = BatchConfig()
    mixture: MixtureConfig = MixtureConfig()
    masking: MaskingConfig = MaskingConfig()
    loss: LossConfig = LossConfig()
    probe: ProbeConfig = ProbeConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    system: TrainingSystem = TrainingSystem()

    @field_validator("mapping")
    @classmethod
    def _form(cls, value: str) -> str:
        mapping.parse(value)
        return value

    @model_validator(mode="after")
    def _weights_for_stores(self) -> Recipe:
        self.mixture.check(len(each(self.data)))
        return self
