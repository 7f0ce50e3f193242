"""What a run is: every group of its settings, and nothing else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from xformer import trajectory
from xformer.config import Paths, Settings
from xformer.model.config import ModelConfig
from xformer.optim import OptimConfig
from xformer.parallel.processes import TrainingSystem
from xformer.surgery.operations import AnyOperation
from xformer.tasks.known import TASKS

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[tuple(TASKS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Seeds(Settings):
    """The seeds of what a run draws. `seed=N` is short for `seed.all=N`; the others override it for
    one thing each, so that runs can differ in that thing alone."""

    all: Seed = 0
    """Seed of everything that has no seed of its own."""
    weights: Seed | None = None
    """Fresh weights: those of a model without `init`, and those of a new head."""
    order: Seed | None = None
    """The order of the rows, and which of them `fraction` keeps."""
    masks: Seed | None = None
    """Which tokens are masked, and by what."""
    dropout: Seed | None = None
    """What dropout drops."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return value if isinstance(value, dict | Seeds) else {"all": value}

    @model_serializer(mode="wrap")
    def _shortest(self, plain: SerializerFunctionWrapHandler) -> Any:
        """One number if nothing overrides it, which is what runs before `seed.weights` wrote."""
        given = {name: value for name, value in plain(self).items() if value is not None}
        return self.all if given.keys() == {"all"} else given

    def of(self, what: Literal["weights", "order", "masks", "dropout"]) -> int:
        """The seed of one thing."""
        own: int | None = getattr(self, what)
        return self.all if own is None else own


class BatchConfig(Settings):
    """How many rows make a step, over all ranks and micro-batches."""

    rows: int = Field(32, ge=1, le=2**20)
    """Rows a step (of head=choice: questions); the last step of a run may have fewer."""
    tokens: int = Field(0, ge=0, le=2**28)
    """Tokens a step, special ones included: as many rows as fit; 0 counts rows instead."""
    max_tokens: int = Field(128, ge=3)
    """Longest row in tokens, special ones included; longer ones are truncated."""
    accumulate: int = Field(1, ge=1, le=2**20)
    """Micro-batches a rank makes of its share, to save memory."""


class MaskingConfig(Settings):
    """BERT's masking: of the chosen tokens 80 % become the mask token, 10 % a random one."""

    probability: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens to predict."""
    pair_weight: float = Field(0.0, ge=0)
    """Weight of the pairs' loss beside that of masked tokens, for stores of pairs; 0: none (BERT's
    next sentence and ALBERT's order: 1; PLUS's families: 0.43)."""


class LossConfig(Settings):
    """Changes of the training loss of classes (head=classify). Validation has the plain loss."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each label that is spread evenly over all classes (Szegedy et al. 2016)."""
    class_weights: Literal["balanced"] | tuple[float, ...] = ()
    """Weight of each class, in the order of the store's labels; "balanced": inversely proportional
    to the class's rows among those that the run trains on, with a mean of 1 over these rows; empty:
    all weigh 1."""

    @field_validator("class_weights", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        listed = isinstance(value, list | tuple) and all(
            isinstance(weight, int | float) and 0 <= weight < math.inf for weight in value
        )
        if value != "balanced" and (not listed or (value and not any(value))):
            raise ValueError(
                f"loss.class_weights={value}: give balanced, or a list of numbers from 0 on, one a "
                "class and not all 0, such as [1, 2.5]"
            )
        return value


class TrainConfig(Settings):
    """How long to train, and what to keep."""

    steps: int = Field(0, ge=0)
    """Optimizer steps; 0 trains for `epochs`."""
    epochs: float = Field(3.0, gt=0)
    """Passes over the training rows, where `steps` is 0."""
    validate_every: int = Field(0, ge=0)
    """Steps between validations; 0 validates after every epoch. The end is always validated."""
    checkpoint_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 writes one at each validation that is the best so far, and at
    the end."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep, beside the best."""
    keep_every: int = Field(0, ge=0)
    """Keep also those of a step that is a multiple of this; 0: none."""
    keep_at: str | tuple[int | str, ...] = ()
    """Where to keep the weights alone, in RUN/trajectory: "log" (step 0, the powers of two, then
    every twentieth of the run), "log:500" (then every 500 steps), or a list of steps, tokens
    (special ones included) and words of the raw text, such as [0, 100, "5M tokens", "1M words"]."""
    keep_state: bool = True
    """Whether a finished run can be made longer; false keeps the weights of the selected checkpoint
    alone, a third of its size or less."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of the log; a line is the mean since the last."""
    select: Literal["best", "last"] = "best"
    """The checkpoint that a finished run stands for: the best on validation, or the last."""
    metric: str = ""
    """What "best" means; empty: the loss for MLM, else the store's metric."""
    patience: int = Field(0, ge=0)
    """Stop after this many validations without a better one; 0 never stops early."""
    trouble: Literal["stop", "skip"] = "stop"
    """At a loss or gradient that is not finite, or a spike: stop, or skip the step's update. Each
    is logged with the rows of the store and the layer where it arose."""
    spike: float = Field(0.0, ge=0)
    """Deviations above its mean over the last 100 steps at which a loss or norm of the gradient is
    a spike; 0: none is."""
    only: tuple[str, ...] = ()
    """The weights to train, such as ["embeddings.word", "mlm_head"]: names or their beginnings,
    with * and ?; all others stay as they are. Empty: all."""

    @field_validator("trouble", mode="before")
    @classmethod
    def _no_rollback(cls, value: Any) -> Any:
        if value == "rollback":
            raise ValueError(
                "train.trouble=rollback is gone: write train.trouble=skip, which drops the update "
                "and goes on"
            )
        return value

    @field_validator("keep_at", mode="before")
    @classmethod
    def _marks(cls, value: Any) -> Any:
        trajectory.parse(value)
        return value


class Recipe(Settings):
    """Everything a run is."""

    data: Paths
    """What to train on: a store made by preprocess.py, or a list of stores, whose rows are
    joined."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the training rows to use, chosen by `seed.order`."""
    run: str = Field(min_length=1)
    """Directory of the run; started again with the same settings, it goes on where it was."""
    init: str | None = None
    """A checkpoint or finished run to start from; absent: `model.*`, freshly initialised."""
    head: TaskName
    """What to predict: masked tokens, a class, a score, the span of an answer, the class of each
    word, or the right one of several endings."""
    seed: Seeds = Seeds()
    mapping: str = "none"
    """What the store's ids mean to the model: none, ids, shift:K, random:SEED, symbols:SEED,
    unused:SEED."""
    surgery: tuple[AnyOperation, ...] = ()
    """Operations on the initial weights, in order, such as [{op = "clean"}]."""
    overwrite: bool = False
    """Start the run anew, deleting what its directory holds."""
    model: ModelConfig = ModelConfig()
    batch: BatchConfig = BatchConfig()
    masking: MaskingConfig = MaskingConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    system: TrainingSystem = TrainingSystem()
