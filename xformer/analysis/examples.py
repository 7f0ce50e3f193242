"""The examples that an analysis reads from a store, and the models that it runs on them.

T tokens of a batch, N rows, L tokens of a row, H heads, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from xformer import checkpoint as checkpoints
from xformer.analysis.subcommand import NameList, Output
from xformer.checkpoint import Checkpoint
from xformer.config import Paths
from xformer.data.batch import Assembler, Batch
from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.joined import open_stores
from xformer.data.mapping import build_mapping
from xformer.data.sampler import Samples
from xformer.data.store import Store
from xformer.model.encoder import Encoder
from xformer.ops.attention import probabilities
from xformer.ops.rotary import rotary
from xformer.parallel import processes
from xformer.parallel.processes import SystemConfig
from xformer.tasks.task import Model, to_device

FORWARD_TOKENS = 4096  # tokens in one forward pass
DEFAULT_TOKENS = 128  # default of max_tokens


class ExamplesConfig(Output):
    """Which examples are read, and how."""

    names: NameList = ()
    """Names of the checkpoints in the result, in order, such as names=bert,scratch. Default: the
    shortest endings of their paths that are all different."""
    data: Paths
    """The store that the examples come from, or a list of stores to join."""
    split: str = "valid"
    """The split of the store."""
    examples: int = Field(256, ge=1)
    """Number of rows, drawn at random with `seed`, or all rows if the split has fewer."""
    max_tokens: int | None = Field(None, ge=3)
    """Longer rows are truncated to this many tokens, special tokens included. Default: 128, or less
    if a model accepts less."""
    mapping: str | None = None
    """How store ids become the checkpoint's ids (see train.py --help). Default: the mapping of its
    training."""
    mapping_b: str | None = None
    """The mapping of all checkpoints but the first. Default: the mapping of their training if they
    have one, or else the same as `mapping`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random choices."""


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint with its model on the device, and the assembler that reads rows for it."""

    name: str
    path: str
    key: str  # SHA-256 of the weights
    checkpoint: Checkpoint
    model: Model
    assembler: Assembler
    device: torch.device

    @property
    def layers(self) -> int:
        return self.checkpoint.config.layers


@dataclass(frozen=True)
class Examples:
    """Rows of a split, sorted by length, and the models that read them."""

    store: Store
    split: str
    rows: np.ndarray  # (N,) int64
    sizes: np.ndarray  # (N,) tokens of each row
    models: list[LoadedModel]
    max_tokens: int

    @property
    def tokens(self) -> int:
        return int(self.sizes.sum())

    def parts(self, tokens: int = FORWARD_TOKENS) -> Iterator[np.ndarray]:
        """The rows in pieces of about this many tokens."""
        ends = np.cumsum(self.sizes)
        cuts = np.unique(np.searchsorted(ends, np.arange(tokens, int(ends[-1]), tokens)))
        yield from (part for part in np.split(self.rows, cuts) if len(part))

    def describe(self) -> dict[str, Any]:
        """The checkpoints and the data, in the form of the result's JSON."""
        return {
            "checkpoints": [
                {
                    "name": m.name,
                    "path": m.path,
                    "weights": m.key,
                    "history": list(m.checkpoint.history),
                }
                for m in self.models
            ],
            "data": {
                "store": self.store.name,
                "key": self.store.key,
                "split": self.split,
                "examples": len(self.rows),
                "tokens": self.tokens,
                "max_tokens": self.max_tokens,
            },
        }


def names_of(paths: list[str], chosen: tuple[str, ...], repeated: bool = False) -> list[str]:
    """The `chosen` names. If there are none, the shortest path endings that are all different.

    Raises BadInput unless there is one chosen name for each path, and all are different or may be
    `repeated`.
    """
    if chosen:
        alike = len(set(chosen)) != len(chosen) and not repeated
        if len(chosen) != len(paths) or alike or "" in chosen:
            raise BadInput(
                f"names={','.join(chosen)}: give {len(paths)} {'' if repeated else 'different '}"
                "names, one for each checkpoint, with commas between them"
            )
        return list(chosen)
    parts = [Path(path).absolute().parts for path in paths]
    names: list[str] = []
    for i, own in enumerate(parts):
        others = [p for j, p in enumerate(parts) if j != i and p != own]
        length = 1
        while length < len(own) and any(o[-length:] == own[-length:] for o in others):
            length += 1
        names.append("/".join(own[-length:]).lstrip("/"))
    return names


def open_examples(config: ExamplesConfig, paths: list[str], most: int = DEFAULT_TOKENS) -> Examples:
    """Load the checkpoints and draw the rows. `most` is the default of max_tokens.

    Raises BadInput if a checkpoint is not a transformer or cannot read the store, or if the tokens
    of two checkpoints do not correspond one to one.
    """
    names = names_of(paths, config.names)
    store = open_stores(config.data)
    # each row is an example, even if several rows belong to one question
    split = replace(store.split(config.split), together=1)
    if split.rows == 0:
        raise BadInput(
            f"the split {config.split!r} of {store.name} has no rows; give another split="
        )
    device = processes.start(SystemConfig(threads=config.threads)).device
    loaded = [checkpoints.load(path) for path in paths]
    longest = _max_tokens(config, paths, loaded, most)
    models = []
    for i, (path, name, checkpoint) in enumerate(zip(paths, names, loaded, strict=True)):
        spec = config.mapping if i == 0 or config.mapping_b is None else config.mapping_b
        if i > 0 and config.mapping_b is None and checkpoint.source is not None:
            spec = None
        trained = checkpoint.head.mapping if checkpoint.head else "none"
        if spec not in (None, trained) and trained != "none":
            say(f"warning: {path} was trained with mapping={trained}, not {spec}", error=True)
        try:
            array = _mapping(checkpoint, store, spec)
        except BadInput as error:
            others = "; mapping_b= is the mapping of all checkpoints but the first"
            raise BadInput(f"{path}: {error}{others if len(paths) > 1 else ''}") from None
        assembler = Assembler(split, checkpoint.tokenizer, longest, array)
        model = checkpoint.model().to(device)
        models.append(LoadedModel(name, path, key_of(path), checkpoint, model, assembler, device))
    _check_aligned(models)
    if config.max_tokens is None:
        limit, accepted = f"max_tokens={longest}", min(c.config.max_positions for c in loaded)
        remedy = "; give max_tokens=" if longest < accepted else ""
        if note := models[0].assembler.truncation(limit, accepted, remedy):
            say(note, error=True)
    count = min(config.examples, split.rows)
    rows, _ = Samples(split.rows, config.seed).at(np.arange(count))
    sizes = models[0].assembler.sizes(rows)
    order = np.argsort(sizes, kind="stable")
    return Examples(store, config.split, rows[order], sizes[order], models, longest)


def key_of(path: str) -> str:
    """SHA-256 of a checkpoint's weights."""
    manifest = read_json(checkpoints.resolve(path) / "manifest.json")
    return str(manifest["sha256"]["model.safetensors"])


def check_length(max_tokens: int, path: str, most: int) -> None:
    """Raise BadInput if `max_tokens` is more than the `most` that the model at `path` accepts."""
    if max_tokens > most:
        raise BadInput(f"max_tokens={max_tokens}: {path} takes rows of at most {most} tokens")


def _max_tokens(
    config: ExamplesConfig, paths: list[str], loaded: list[Checkpoint], most: int
) -> int:
    """The length to which rows are truncated, in tokens: at most what every model accepts."""
    for path, checkpoint in zip(paths, loaded, strict=True):
        if checkpoint.config.architecture != "transformer":
            raise BadInput(
                f"{path} is a {checkpoint.config.architecture}; give a transformer, whose layers "
                "have a hidden state for each token"
            )
        if config.max_tokens is not None:
            check_length(config.max_tokens, path, checkpoint.config.max_positions)
    return config.max_tokens or min(most, *(c.config.max_positions for c in loaded))


def _mapping(checkpoint: Checkpoint, store: Store, spec: str | None) -> np.ndarray | None:
    """The model's id for each id of the store, or None if they are the same."""
    source = checkpoint.source
    if spec is None and source is not None and source.fingerprint == store.fingerprint:
        return checkpoint.mapping  # the same array as in training
    trained = checkpoint.head.mapping if checkpoint.head else "none"
    size = checkpoint.config.vocab_size
    return build_mapping(spec or trained, store, checkpoint.tokenizer, size)


def _check_aligned(models: list[LoadedModel]) -> None:
    first = models[0]
    for other in models[1:]:
        if other.assembler.extra != first.assembler.extra:
            raise BadInput(
                f"the tokens of {first.path} and {other.path} cannot be aligned: they add "
                f"{first.assembler.extra} and {other.assembler.extra} special tokens to a pair of "
                "texts; give checkpoints of one family, or a store without pairs"
            )


@dataclass(frozen=True)
class Inside:
    """Hidden states and attention maps of a batch.

    `hidden[0]` is the output of the embeddings, and `hidden[i]` that of layer i, each (T, C).
    `maps[i - 1][k]` (H, L, L) are the attention maps of layer i for sequence k.
    """

    hidden: list[Tensor]
    maps: list[list[Tensor]]


@torch.no_grad()
def inside(encoder: Encoder, batch: Batch[Tensor], maps: bool = False) -> Inside:
    """Run the encoder and keep every hidden state, and with `maps` every attention map, without
    gradients. The sequences are in the order of the batch. Maps are those before dropout.

    Forward hooks collect the tensors, so the encoder itself needs no code for this. Do not use one
    encoder in several threads at once.
    """
    hidden: list[Tensor] = []
    kept: list[list[Tensor]] = []
    given: list[tuple[Any, ...]] = []  # the inputs of the attention that runs
    sizes = batch.cu_seqlens.diff().tolist()

    def keep_hidden(module: nn.Module, inputs: object, x: Tensor) -> None:
        hidden.append(x[: len(batch.tokens)])  # without rows of padding

    def note_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        given[:] = [inputs]

    def keep_maps(module: nn.Module, inputs: object, qkv: Tensor) -> None:
        (_, layout, _, turn) = given[0]
        qkv = qkv.view(len(qkv), 3, encoder.config.heads, -1)
        padded, _ = probabilities(qkv if turn is None else rotary(qkv, *turn), layout)
        kept.append([x[:, :n, :n] for x, n in zip(padded, sizes, strict=True)])

    with ExitStack() as hooks:
        for module in (encoder.embeddings, *encoder.layers):
            hooks.callback(module.register_forward_hook(keep_hidden).remove)
        for layer in encoder.layers if maps else ():
            attention = layer.get_submodule("attention")
            hooks.callback(attention.register_forward_pre_hook(note_inputs).remove)
            hooks.callback(attention.get_submodule("qkv").register_forward_hook(keep_maps).remove)
        last = encoder(batch)
    return Inside([*hidden[:-1], last], kept)


def look_inside(
    loaded: LoadedModel, rows: np.ndarray, maps: bool = False
) -> tuple[Batch[np.ndarray], Inside]:
    """The packed batch of these rows, and the encoder's hidden states and maps (see `inside`).

    Raises BadInput that names the layer and the row if a hidden state is not finite.
    """
    batch = loaded.assembler.batch(rows)
    result = inside(loaded.model.encoder, to_device(batch, loaded.device), maps)
    for layer, hidden in enumerate(result.hidden):
        check_hidden_finite(hidden, batch, loaded, f"layer {layer}")
    return batch, result


def check_finite(examples: Examples) -> None:
    """Raise BadInput, as `look_inside` does, if a hidden state of any model is not finite.

    Analyses call this before long work on the first model.
    """
    for loaded in examples.models:
        for part in examples.parts():
            look_inside(loaded, part)


def check_hidden_finite(
    x: Tensor, batch: Batch[np.ndarray], loaded: LoadedModel, what: str
) -> None:
    """Raise BadInput if `x` (T, C) is not finite. The message names `what` and the first bad
    row."""
    bad = (~torch.isfinite(x)).any(1)
    if bad.any():
        token = int(bad.nonzero()[0])
        row = int(batch.rows[np.searchsorted(batch.cu_seqlens, token, side="right") - 1])
        raise BadInput(
            f"{loaded.path}: {what} is not finite (NaN or infinite) in row {row} of the split "
            f"{loaded.assembler.split.name!r}: the weights are damaged, or training diverged; give "
            "another checkpoint"
        )


def parse_layers(text: str, most: int, path: str, key: str = "layers") -> list[int]:
    """The layer numbers, from 0 (the embeddings) to `most`, for "all", "last" or "0,6,12".

    Raises BadInput for any other text, naming the setting `key` and the `path` of the model.
    """
    if text == "all":
        return list(range(most + 1))
    if text == "last":
        return [most]
    numbers = text.strip("[] ").split(",")
    if not all(n.strip().isdecimal() and int(n) <= most for n in numbers):
        raise BadInput(
            f"{key}={text}: {path} has the layers 0 to {most}; give all, last, or numbers such as "
            f"0,{most}"
        )
    return sorted({int(n) for n in numbers})
