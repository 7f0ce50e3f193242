"""The operations as settings: what a recipe's `surgery` list, the command line and Python name.

Each stands for the plain function of its name, whose arguments are its fields.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint, Distribution
from xformer.config import Settings, nearest, validate
from xformer.data.errors import BadInput
from xformer.data.store import open_store
from xformer.model.config import ModelConfig
from xformer.surgery import everything, layers, words


class Seeded(Settings):
    """An operation that draws: its numbers depend on its seed, not on what went before."""

    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of what is drawn; absent: the run's, or --seed."""


class Clean(Seeded):
    """Re-initialise every weight: the from-scratch twin (Zhang et al. 2021, 4)."""

    op: Literal["clean"] = "clean"
    distribution: Distribution = "normal"
    """Normal (Kao & Lee 2021), or truncated at two standard deviations (Devlin et al. 2019)."""


class CleanEmbeddings(Seeded):
    """Re-initialise the word embeddings alone (Zhang et al. 2021, 4; Kao & Lee 2021, 3.2:
    re-emb)."""

    op: Literal["clean_embeddings"] = "clean_embeddings"
    distribution: Distribution = "normal"
    """As in clean."""


class ShuffleEmbeddings(Seeded):
    """Deal the word embeddings out anew among the pieces (Zhang et al. 2021, 4.2)."""

    op: Literal["shuffle_embeddings"] = "shuffle_embeddings"
    keep_special: bool = True
    """Special tokens keep theirs."""
    english_only: bool = True
    """English-like pieces exchange theirs among themselves, and all others keep theirs."""

    @model_validator(mode="after")
    def _consistent(self) -> ShuffleEmbeddings:
        words.check_shuffle(self.keep_special, self.english_only)
        return self


class Transplant(Settings):
    """Take over another checkpoint's tokenizer and word embeddings (Zhang et al. 2021, 4.3)."""

    op: Literal["transplant"] = "transplant"
    source: str
    """The other checkpoint, as of an English model."""


class ReverseLayers(Settings):
    """Put the layers in the opposite order (Zhang et al. 2021, 3)."""

    op: Literal["reverse_layers"] = "reverse_layers"


class ReinitScaled(Seeded):
    """Re-initialise every weight, and scale each matrix to the size it had (Zhang et al. 2021,
    5.1)."""

    op: Literal["reinit_scaled"] = "reinit_scaled"
    match: everything.Scale
    """What a matrix keeps: the root of its sum of squares, or its variance."""
    distribution: Distribution = "normal"
    """As in clean."""


class OracleShuffle(Seeded):
    """Shuffle the elements within each weight (Zhang et al. 2021, 5.2)."""

    op: Literal["oracle_shuffle"] = "oracle_shuffle"


class KeepLayers(Settings):
    """Leave out all layers but some; they are numbered from 1 (Zhang et al. 2021, 6)."""

    op: Literal["keep_layers"] = "keep_layers"
    first: int | None = None
    """Keep so many at the beginning."""
    every: int | None = None
    """Keep the first of every so many: 2 keeps the 1st, 3rd and so on."""
    layers: tuple[int, ...] | None = None
    """Keep those with these numbers."""

    @model_validator(mode="after")
    def _one(self) -> KeepLayers:
        layers.check_choice(self.first, self.every, self.layers)
        return self


class ReinitLastLayers(Seeded):
    """Re-initialise the layers from one to the last (Huang et al. 2021, 4.2)."""

    op: Literal["reinit_last_layers"] = "reinit_last_layers"
    from_layer: int
    """The first of them, from 1; one more than there are layers re-initialises none."""
    distribution: Distribution = "truncated"
    """As in clean."""


class ReinitHead(Seeded):
    """Re-initialise one attention head (Huang et al. 2021, 4.3)."""

    op: Literal["reinit_head"] = "reinit_head"
    layer: int
    """Its layer, from 1."""
    head: int
    """Its number within the layer, from 1."""
    distribution: Distribution = "truncated"
    """As in clean."""


class SubstituteUnused(Seeded):
    """Replace embeddings that pre-training never used by copies of used ones (Chiang & Lee 2020,
    4.3)."""

    op: Literal["substitute_unused"] = "substitute_unused"
    store: str
    """What the model was pre-trained on."""
    split: str = "train"
    """The part of it that was used."""


Operation = Annotated[
    Clean
    | CleanEmbeddings
    | ShuffleEmbeddings
    | Transplant
    | ReverseLayers
    | ReinitScaled
    | OracleShuffle
    | KeepLayers
    | ReinitLastLayers
    | ReinitHead
    | SubstituteUnused,
    Field(discriminator="op"),
]

CLASSES: dict[str, Any] = {
    kind.model_fields["op"].default: kind for kind in get_args(get_args(Operation)[0])
}
FUNCTIONS: dict[str, Callable[..., Checkpoint]] = {
    "clean": everything.clean,
    "clean_embeddings": words.clean_embeddings,
    "shuffle_embeddings": words.shuffle_embeddings,
    "transplant": words.transplant,
    "reverse_layers": layers.reverse_layers,
    "reinit_scaled": everything.reinit_scaled,
    "oracle_shuffle": everything.oracle_shuffle,
    "keep_layers": layers.keep_layers,
    "reinit_last_layers": layers.reinit_last_layers,
    "reinit_head": layers.reinit_head,
    "substitute_unused": words.substitute_unused,
}


def apply(checkpoint: Checkpoint, operations: Sequence[Operation], seed: int = 0) -> Checkpoint:
    """The operations in order, each recorded in the checkpoint's history.

    `seed` serves the operations that name none. Weights that no operation touches are the very
    tensors of the checkpoint, which stays as it is. Raises BadInput naming the operation that the
    checkpoint cannot bear.
    """
    for operation in operations:
        arguments = operation.model_dump(mode="json", exclude={"op"})
        if "seed" in arguments and arguments["seed"] is None:
            arguments["seed"] = seed
        try:
            checkpoint = FUNCTIONS[operation.op](checkpoint, **arguments)
        except BadInput as error:
            raise _named(operation.op, error) from None
        given = {name: value for name, value in arguments.items() if value is not None}
        record = {"op": operation.op, **given, **content(operation)}
        checkpoint = replace(checkpoint, history=(*checkpoint.history, record))
    return checkpoint


def shape_after(config: ModelConfig, operations: Sequence[Operation]) -> ModelConfig:
    """The shape of a model after the operations, as far as layers and heads go. Raises BadInput
    naming the first operation on one that it does not have."""
    for operation in operations:
        try:
            match operation:
                case KeepLayers():
                    arguments = operation.model_dump(exclude={"op"})
                    count = len(layers.kept(config, **arguments))
                    config = config.model_copy(update={"layers": count})
                case ReverseLayers():
                    layers.separate(config)
                case ReinitLastLayers():
                    layers.check_last(config, operation.from_layer)
                case ReinitHead():
                    layers.check_head(config, operation.layer, operation.head)
        except BadInput as error:
            raise _named(operation.op, error) from None
    return config


def content(operation: Operation) -> dict[str, str]:
    """The content key of what an operation reads beside the checkpoint, as `sha256`."""
    if isinstance(operation, Transplant):
        return {"sha256": checkpoints.content_key(checkpoints.resolve(operation.source))}
    if isinstance(operation, SubstituteUnused):
        return {"sha256": open_store(operation.store).key}
    return {}


def parse(text: str) -> Operation:
    """The operation that "shuffle_embeddings(seed=1, english_only=true)" spells.

    Values are TOML, else bare strings. Raises BadInput naming the operation, the argument, and the
    nearest there is.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\)\s*)?", text, re.DOTALL)
    if match is None:
        raise BadInput(f"{text!r} is not of the form name or name(argument=value, ...)")
    name, inside = match[1], match[2] or ""
    if inside.count("[") != inside.count("]"):
        raise BadInput(f"{text!r} has a bracket that is not closed, or not opened")
    if name not in CLASSES:
        hint = nearest(name, list(CLASSES)) or f"; there are {', '.join(CLASSES)}"
        raise BadInput(f"unknown operation {name!r}{hint}")
    fields = CLASSES[name].model_fields
    values: dict[str, Any] = {}
    for argument in _split(inside):
        key, equals, value = (part.strip() for part in argument.partition("="))
        if not equals or not key:
            names = ", ".join(f"{field}=..." for field in fields if field != "op")
            raise BadInput(
                f"{name}: {argument.strip()!r} is not argument=value; it takes "
                f"{names or 'no arguments'}"
            )
        if key in values:
            raise BadInput(f"{name}: {key} is given twice")
        values[key] = _value(value, fields[key].annotation if key in fields else None)
    try:
        operation: Operation = validate(CLASSES[name], values)
    except BadInput as error:
        raise _named(name, error) from None
    return operation


def _split(inside: str) -> list[str]:
    """ "a=1, b=[2, 3]" at the commas that are in no bracket and no quotes."""
    parts = re.findall(r"""(?:\[[^\]]*\]|"[^"]*"|'[^']*'|[^,])+""", inside)
    return [part for part in parts if part.strip()]


def _value(text: str, wanted: Any) -> Any:
    """A value as TOML, else as the bare string it is; where a string is wanted, 2026 is one too,
    and where no truth is wanted, true is no 1."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    other = wanted is str and not isinstance(value, str)
    return text if other or (isinstance(value, bool) and wanted is not bool) else value


def _named(name: str, error: BadInput) -> BadInput:
    """The complaint with the operation's name before it."""
    text = str(error)
    return BadInput(text if text.startswith(name) else f"{name}: {text}")
