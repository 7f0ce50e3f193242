"""The same examples of a store, as one or several checkpoints read them.

T tokens in a batch, N rows, C hidden size.
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
from xformer.analysis.command import Names, Output
from xformer.checkpoint import Checkpoint
from xformer.config import Paths
from xformer.data import mapping
from xformer.data.batch import Assembler, Batch
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.joined import open_stores
from xformer.data.sampler import Samples
from xformer.data.store import Store
from xformer.model.encoder import Encoder
from xformer.ops.attention import Layout, probabilities
from xformer.parallel import processes
from xformer.parallel.feed import to_device
from xformer.parallel.processes import SystemConfig
from xformer.tasks.task import Model

TOKENS = 4096  # of one forward pass
LONGEST = 128  # most tokens of a row by default


class ExamplesConfig(Output):
    """Which examples, and how they are read."""

    names: Names = ()
    """What to call the checkpoints in the result, in their order, such as names=bert,scratch;
    absent: the ends of their paths."""
    data: Paths
    """The store that the examples come from, or a list of stores, whose rows are joined."""
    split: str = "valid"
    """Which split of it."""
    examples: int = Field(256, ge=1)
    """How many rows, drawn by `seed`; all of them if the split has no more."""
    max_tokens: int | None = Field(None, ge=3)
    """Tokens of a row with its special ones; what is longer is truncated. Absent: 128, or what the
    models take."""
    mapping: str | None = None
    """What the store's ids mean to the checkpoint (see train.py --help); absent: as in its
    training."""
    mapping_b: str | None = None
    """The same for the second checkpoint and those after it; absent: as `mapping`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of every random choice."""


@dataclass(frozen=True)
class Reader:
    """A checkpoint and how it reads the examples; `key` is the SHA-256 of its weights."""

    name: str
    path: str
    key: str
    checkpoint: Checkpoint
    model: Model
    assembler: Assembler
    device: torch.device

    @property
    def layers(self) -> int:
        return self.checkpoint.config.layers


@dataclass(frozen=True)
class Examples:
    """Rows of a split in order of length, and those who read them."""

    store: Store
    split: str
    rows: np.ndarray  # (N,) int64
    sizes: np.ndarray  # (N,) tokens of each
    readers: list[Reader]
    max_tokens: int

    @property
    def tokens(self) -> int:
        return int(self.sizes.sum())

    def parts(self, tokens: int = TOKENS) -> Iterator[np.ndarray]:
        """The rows in pieces of about so many tokens."""
        ends = np.cumsum(self.sizes)
        cuts = np.unique(np.searchsorted(ends, np.arange(tokens, int(ends[-1]), tokens)))
        yield from (part for part in np.split(self.rows, cuts) if len(part))

    def describe(self) -> dict[str, Any]:
        """What a result says of the data and the checkpoints."""
        return {
            "checkpoints": [
                {
                    "name": r.name,
                    "path": r.path,
                    "weights": r.key,
                    "history": list(r.checkpoint.history),
                }
                for r in self.readers
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


def names_of(paths: list[str], given: tuple[str, ...]) -> list[str]:
    """The names given, or the shortest endings of the paths that tell them apart. Raises BadInput
    unless there is one for each, no two the same."""
    if given:
        if len(given) != len(paths) or len(set(given)) != len(given) or "" in given:
            raise BadInput(
                f"names={','.join(given)}: give {len(paths)} different names, one for each "
                "checkpoint, with commas between them"
            )
        return list(given)
    parts = [Path(path).absolute().parts for path in paths]
    names: list[str] = []
    for i, own in enumerate(parts):
        others = [p for j, p in enumerate(parts) if j != i and p != own]
        length = 1
        while length < len(own) and any(o[-length:] == own[-length:] for o in others):
            length += 1
        names.append("/".join(own[-length:]).lstrip("/"))
    return names


def open_examples(config: ExamplesConfig, paths: list[str], most: int = LONGEST) -> Examples:
    """Load the checkpoints and draw the rows. By default a row has at most `most` tokens.

    Raises BadInput if a checkpoint has no layers to look into or cannot read the store, or if the
    tokens of two checkpoints do not correspond one to one.
    """
    names = names_of(paths, config.names)
    store = open_stores(config.data)
    split = replace(store.split(config.split), together=1)  # each row is looked into by itself
    if split.rows == 0:
        raise BadInput(f"the split {config.split!r} of {store.name} has no rows")
    device = processes.start(SystemConfig(threads=config.threads)).device
    loaded = [checkpoints.load(path) for path in paths]
    longest = _longest(config, paths, loaded, most)
    readers = []
    for i, (path, name, checkpoint) in enumerate(zip(paths, names, loaded, strict=True)):
        spec = config.mapping if i == 0 or config.mapping_b is None else config.mapping_b
        try:
            array = _mapping(checkpoint, store, spec)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        assembler = Assembler(split, checkpoint.tokenizer, longest, array)
        model = checkpoint.model().to(device)
        readers.append(Reader(name, path, key_of(path), checkpoint, model, assembler, device))
    _check_aligned(readers)
    count = min(config.examples, split.rows)
    rows, _ = Samples(split.rows, config.seed).at(np.arange(count))
    sizes = readers[0].assembler.sizes(rows)
    order = np.argsort(sizes, kind="stable")
    return Examples(store, config.split, rows[order], sizes[order], readers, longest)


def key_of(path: str) -> str:
    """SHA-256 of a checkpoint's weights."""
    manifest = read_json(checkpoints.resolve(path) / "manifest.json")
    return str(manifest["sha256"]["model.safetensors"])


def check_length(max_tokens: int, path: str, most: int) -> None:
    """Raise BadInput unless the model at a path takes rows of so many tokens."""
    if max_tokens > most:
        raise BadInput(f"max_tokens={max_tokens}: {path} takes rows of {most} at most")


def _longest(
    config: ExamplesConfig, paths: list[str], loaded: list[Checkpoint], longest: int
) -> int:
    """Tokens of a row that every model takes."""
    for path, checkpoint in zip(paths, loaded, strict=True):
        if checkpoint.config.architecture != "transformer":
            raise BadInput(
                f"{path} is a {checkpoint.config.architecture}: only a transformer has layers of "
                "tokens to look into"
            )
        if config.max_tokens is not None:
            check_length(config.max_tokens, path, checkpoint.config.max_positions)
    return config.max_tokens or min(longest, *(c.config.max_positions for c in loaded))


def _mapping(checkpoint: Checkpoint, store: Store, spec: str | None) -> np.ndarray | None:
    """The array from the store's ids to the model's."""
    source = checkpoint.source
    if spec is None and source is not None and source.fingerprint == store.fingerprint:
        return checkpoint.mapping  # the very array of training
    trained = checkpoint.head.mapping if checkpoint.head else "none"
    size = checkpoint.config.vocab_size
    return mapping.build_mapping(spec or trained, store, checkpoint.tokenizer, size)


def _check_aligned(readers: list[Reader]) -> None:
    first = readers[0]
    for other in readers[1:]:
        if other.assembler.extra != first.assembler.extra:
            raise BadInput(
                f"the tokens of {first.path} and {other.path} cannot be aligned: they put "
                f"{first.assembler.extra} and {other.assembler.extra} special tokens into a row of "
                "pairs; give checkpoints of one family, or a store without pairs"
            )


@dataclass(frozen=True)
class Inside:
    """What an encoder computed on the way: `hidden[0]` the embeddings, then one a layer, (T, C);
    `maps[layer][sequence]` is (H, L, L)."""

    hidden: list[Tensor]
    maps: list[list[Tensor]]


@torch.no_grad()
def inside(encoder: Encoder, batch: Batch[Tensor], maps: bool = False) -> Inside:
    """Every hidden state of a batch, and with `maps` every attention map. Hooks take them from the
    embeddings, the layers, and the queries, keys and values."""
    hidden: list[Tensor] = []
    found: list[list[Tensor]] = []
    layout = Layout(batch.cu_seqlens, batch.longest)
    sizes = batch.cu_seqlens.diff().tolist()

    def keep_hidden(module: nn.Module, given: object, x: Tensor) -> None:
        hidden.append(x[: len(batch.tokens)])

    def keep_maps(module: nn.Module, given: object, qkv: Tensor) -> None:
        each = probabilities(qkv.view(len(qkv), 3, encoder.config.heads, -1), layout)
        found.append([x[:, :n, :n] for x, n in zip(each, sizes, strict=True)])

    with ExitStack() as hooks:
        for module in (encoder.embeddings, *encoder.layers):
            hooks.callback(module.register_forward_hook(keep_hidden).remove)
        for layer in encoder.layers if maps else ():
            hooks.callback(
                layer.get_submodule("attention.qkv").register_forward_hook(keep_maps).remove
            )
        last = encoder(batch)
    return Inside([*hidden[:-1], last], found)


def look_inside(
    reader: Reader, rows: np.ndarray, maps: bool = False
) -> tuple[Batch[np.ndarray], Inside]:
    """The packed batch of these rows, and what the encoder computed on the way.

    Raises BadInput naming the layer and the row where a number is not finite.
    """
    batch = reader.assembler.batch(rows)
    found = inside(reader.model.encoder, to_device(batch, reader.device), maps)
    for layer, hidden in enumerate(found.hidden):
        check_finite(hidden, batch, reader, f"layer {layer}")
    return batch, found


def check_finite(x: Tensor, batch: Batch[np.ndarray], reader: Reader, what: str) -> None:
    """Raise BadInput that names the first row of the store for which `x` (T, C) is not finite."""
    bad = (~torch.isfinite(x)).any(1)
    if bad.any():
        token = int(bad.nonzero()[0])
        row = int(batch.rows[np.searchsorted(batch.cu_seqlens, token, side="right") - 1])
        raise BadInput(
            f"{reader.path}: {what} is not finite (NaN or infinite) in row {row} of the split "
            f"{reader.assembler.split.name!r}: the checkpoint's weights are damaged or diverged"
        )


def parse_layers(text: str, most: int) -> list[int]:
    """ "all", "last" or "0,6,12" as layer numbers from 0 (the embeddings) to `most`.

    Raises BadInput for any other text.
    """
    if text == "all":
        return list(range(most + 1))
    if text == "last":
        return [most]
    numbers = text.strip("[] ").split(",")
    if not all(n.strip().isdigit() and int(n) <= most for n in numbers):
        raise BadInput(
            f"layers={text}: give all, last, or numbers from 0 to {most} such as 0,{most}"
        )
    return sorted({int(n) for n in numbers})
