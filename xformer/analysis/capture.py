"""Representations on disk: every hidden state and attention map as HDF5.

    python -m xformer.analysis capture CHECKPOINT data=STORE out=F.h5
    python -m xformer.analysis capture ckpt/bert data=stores/rte layers=0,6,12 \\
      what=hidden,attention examples=1000 dtype=float32 out=bert.h5

F.h5 joins the files of F.h5.parts/, which are written one after the other and renamed when they
are whole: the same command again goes on after a kill. Memory does not grow with the examples.
F.h5.parts/capture.json holds the settings and, once F.h5 is whole, the SHA-256 of every file.

T tokens of all examples, N examples, C hidden size, H heads, L length of an example.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xformer.analysis.drawing import many
from xformer.analysis.examples import (
    Examples,
    ExamplesConfig,
    look_inside,
    names_of,
    open_examples,
    parse_layers,
)
from xformer.analysis.subcommand import Subcommand, with_progress
from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum, read_json, read_own_json, sync, write_json

FORMAT = 1
PART = 16384  # tokens of one file of F.h5.parts
READ = 4096  # tokens read at once
ROWS = 256  # of a compressed chunk
NOTE = "capture.json"  # in the directory of parts
JOINED = "joined"  # what NOTE calls F.h5, beside the parts' own names
# what h5py raises on a file that is cut off, damaged, or not a capture
DAMAGE = (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError)


class CaptureConfig(ExamplesConfig):
    """What is written."""

    out: str
    """The HDF5 file to write, F.h5; its parts lie in F.h5.parts beside it."""
    layers: str = "all"
    """all, last, or numbers such as 0,6,12: 0 is the embeddings' output, i that of layer i."""
    what: str = "hidden"
    """hidden, attention, or hidden,attention."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the numbers."""
    examples: int = Field(256, ge=1)
    """How many rows, drawn by `seed`; all of them if the split has no more."""


SUBCOMMAND = Subcommand("capture", CaptureConfig, __doc__ or "", directory=False)


def run(paths: list[str], config: CaptureConfig) -> None:
    """`python -m xformer.analysis capture CHECKPOINT key=value ...`"""
    out, parts = Path(config.out), Path(f"{config.out}.parts")
    if config.run is not None:
        raise BadInput("capture draws nothing that a run could show: leave run= away")
    if out.suffix != ".h5" or out.is_dir() or not out.absolute().parent.is_dir():
        raise BadInput(f"out={out}: give a file F.h5 in a directory that exists")
    kinds = [kind.strip() for kind in config.what.split(",")]
    if not kinds or not set(kinds) <= {"hidden", "attention"}:
        raise BadInput(f"what={config.what}: give hidden, attention, or hidden,attention")
    examples = open_examples(config, paths)
    layers = parse_layers(config.layers, examples.models[0].layers)
    if "attention" in kinds and not any(layers):
        raise BadInput(f"layers={config.layers}: the embeddings (0) have no attention")
    identity = _identity(examples, config, kinds, layers)
    if out.exists() and not config.overwrite:
        _refuse_other(open_capture(out).attributes, identity, out)
        say(f"{out} is whole already")
        return
    with _locked(parts, identity, out, config.overwrite):
        files = _write_parts(examples, parts, kinds, layers, config.dtype)
        _join(out, files, examples, identity)
    size = sum(file.stat().st_size for file in files) / 2**20
    say(
        f"{out}: {many(len(examples.rows), 'example')}, {examples.tokens:,} tokens, "
        f"layers {', '.join(map(str, layers))}, {size:,.1f} MiB in {many(len(files), 'part')}"
    )


def _identity(
    examples: Examples, config: CaptureConfig, kinds: list[str], layers: list[int]
) -> dict[str, Any]:
    """What two captures must agree on to be one; the attributes of the file."""
    loaded = examples.models[0]
    return {
        "format": FORMAT,
        "checkpoint": loaded.path,
        "weights": loaded.key,
        "tokenizer": loaded.checkpoint.tokenizer.fingerprint,
        "store": examples.store.name,
        "store_key": examples.store.key,
        "split": examples.split,
        "examples": len(examples.rows),
        "seed": config.seed,
        "max_tokens": examples.max_tokens,
        "mapping": config.mapping or "as trained",
        "what": ",".join(kinds),
        "layers": layers,
        "model_layers": loaded.layers,
        "dtype": config.dtype,
    }


def _refuse_other(found: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raise BadInput naming the settings in which a capture on disk is another one."""
    paths = ("checkpoint", "store")  # told apart by what is in them
    other = [
        f"{key}={found.get(key)} is now {value}"
        for key, value in wanted.items()
        if found.get(key) != value and key not in paths
    ]
    if other:
        raise BadInput(
            f"{where} holds another capture ({'; '.join(other[:3])}); give another out=, or "
            "overwrite=true to replace it"
        )


class _locked:
    """The directory of parts, made for this capture or left by a killed one, for this process."""

    def __init__(self, parts: Path, identity: dict[str, Any], out: Path, overwrite: bool):
        self.parts, self.identity, self.out, self.overwrite = parts, identity, out, overwrite

    def __enter__(self) -> None:
        fresh = not self.parts.exists()
        self.parts.mkdir(exist_ok=True)
        self.lock = (self.parts / ".lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"out={self.out}: another process is writing it") from None
        note = self.parts / NOTE
        if self.overwrite:
            self.out.unlink(missing_ok=True)
            for old in [note, *self.parts.glob("*.h5")]:
                old.unlink(missing_ok=True)
        if not fresh and note.exists():
            _refuse_other(read_json(note), self.identity, self.parts)
        for leftover in self.parts.glob(".*.h5.*"):
            leftover.unlink()
        write_json(note, self.identity)

    def __exit__(self, *_: object) -> None:
        for leftover in self.parts.glob(".*.h5.*"):
            leftover.unlink()
        if not list(self.parts.glob("*.h5")):  # it ended before the first part
            shutil.rmtree(self.parts, ignore_errors=True)
        self.lock.close()


def _write_parts(
    examples: Examples, parts: Path, kinds: list[str], layers: list[int], dtype: str
) -> list[Path]:
    """Every part that is not there yet; the files of all."""
    files = []
    size = dict(zip(examples.rows.tolist(), examples.sizes.tolist(), strict=True))
    pieces = list(examples.parts(PART))
    shown = with_progress(
        pieces, examples.tokens, "tokens", lambda rows: sum(size[r] for r in rows)
    )
    for number, rows in enumerate(shown):
        file = parts / f"{number:05}.h5"
        files.append(file)
        if file.exists() and _is_whole(file):
            continue
        temporary = parts / f".{file.name}.{os.getpid()}"
        with h5py.File(temporary, "w") as h5:
            some = Examples(
                examples.store,
                examples.split,
                rows,
                np.array([size[r] for r in rows]),
                examples.models,
                examples.max_tokens,
            )
            for part in some.parts():
                _append(h5, some, part, kinds, layers, dtype)
        sync(temporary)
        temporary.replace(file)
        sync(parts)
    return files


def _is_whole(file: Path) -> bool:
    try:
        with h5py.File(file) as h5:
            return "tokens" in h5
    except DAMAGE:
        return False


def _append(
    h5: Any, examples: Examples, part: np.ndarray, kinds: list[str], layers: list[int], dtype: str
) -> None:
    """Look into one batch and add it to a part."""
    loaded = examples.models[0]
    batch, inside = look_inside(loaded, part, maps="attention" in kinds)
    _extend(h5, "tokens", batch.tokens.astype(np.int32))
    _extend(h5, "positions", batch.positions.astype(np.int32))
    _extend(h5, "rows", batch.rows)
    _extend(h5, "sizes", np.diff(batch.cu_seqlens).astype(np.int32))
    if "hidden" in kinds:
        for layer in layers:
            _extend(h5, f"hidden/{layer}", _as(inside.hidden[layer], dtype, loaded.path, layer))
    if "attention" in kinds:
        for layer in filter(None, layers):
            maps = [m.permute(1, 2, 0).flatten(0, 1) for m in inside.maps[layer - 1]]  # (L L, H)
            _extend(h5, f"attention/{layer}", _as(torch.cat(maps), dtype, loaded.path, layer))


def _as(x: Tensor, dtype: str, path: str, layer: int) -> np.ndarray:
    if dtype == "float16" and x.abs().max() > torch.finfo(torch.float16).max:
        raise BadInput(f"{path}: layer {layer} has numbers too large for float16: dtype=float32")
    return x.cpu().numpy().astype(dtype)


def _extend(h5: Any, name: str, values: np.ndarray) -> None:
    """Add rows to a growing dataset."""
    if name not in h5:
        h5.create_dataset(
            name,
            (0, *values.shape[1:]),
            values.dtype,
            compression="gzip",
            compression_opts=1,
            shuffle=True,
            chunks=(ROWS, *values.shape[1:]),
            maxshape=(None, *values.shape[1:]),
        )
    data = h5[name]
    data.resize(len(data) + len(values), 0)
    data[-len(values) :] = values


def _join(out: Path, files: list[Path], examples: Examples, identity: dict[str, Any]) -> None:
    """One file in which each dataset is those of the parts end to end, and the checksums of all."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with h5py.File(temporary, "w", libver="latest") as h5:
            for name, pieces in _datasets(files).items():
                _, (_, *shape), dtype = pieces[0]
                length = sum(size for _, (size, *_), _ in pieces)
                joined = h5py.VirtualLayout((length, *shape), dtype)
                start = 0
                for file, its_shape, _ in pieces:
                    place = f"{out.name}.parts/{file.name}"  # relative: both may be moved
                    end = start + its_shape[0]
                    joined[start:end] = h5py.VirtualSource(place, name, its_shape)
                    start = end
                h5.create_virtual_dataset(name, joined, fillvalue=_missing(dtype))
            lengths = examples.sizes.astype(np.int64)
            h5["offsets"] = np.concatenate([[0], np.cumsum(lengths)])
            h5["attention_offsets"] = np.concatenate([[0], np.cumsum(lengths**2)])
            h5.attrs.update(
                {k: json.dumps(v) if isinstance(v, list) else v for k, v in identity.items()}
            )
            h5.attrs["parts"] = json.dumps({file.name: file.stat().st_size for file in files})
        sync(temporary)
        sums = {JOINED: file_checksum(temporary)}
        sums |= {file.name: file_checksum(file) for file in files}
        write_json(_parts_of(out) / NOTE, {**identity, "sha256": sums})
        temporary.replace(out)
        sync(out.absolute().parent)
    finally:
        temporary.unlink(missing_ok=True)


def _parts_of(path: Path) -> Path:
    """The directory that holds the parts of a capture."""
    return path.with_name(f"{path.name}.parts")


def _missing(dtype: np.dtype) -> Any:
    """What a program reads where a part is gone: NaN, or -1."""
    return np.nan if dtype.kind == "f" else -1


def _datasets(files: list[Path]) -> dict[str, list[tuple[Path, tuple[int, ...], np.dtype]]]:
    """For each dataset by name, the files that hold a piece of it, and the pieces' shapes and
    types."""
    found: dict[str, list[tuple[Path, tuple[int, ...], np.dtype]]] = {}
    for file in files:

        def note(name: str, node: Any, file: Path = file) -> None:
            if isinstance(node, h5py.Dataset):
                found.setdefault(name, []).append((file, node.shape, node.dtype))

        with h5py.File(file) as h5:
            h5.visititems(note)
    return found


# ------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Capture:
    """A file of captured representations that was checked to be whole."""

    path: Path
    attributes: dict[str, Any]
    rows: np.ndarray  # (N,)
    offsets: np.ndarray  # (N + 1,)

    @property
    def layers(self) -> list[int]:
        return list(self.attributes["layers"])

    def hidden(self, layers: list[int]) -> Iterator[list[Tensor]]:
        """These layers' states, some tokens at a time: lists of (tokens, C)."""
        try:
            with h5py.File(self.path) as h5:
                for start in range(0, int(self.offsets[-1]), READ):
                    parts = [h5[f"hidden/{layer}"][start : start + READ] for layer in layers]
                    yield [torch.from_numpy(values) for values in parts]
        except DAMAGE as error:
            raise BadInput(f"{self.path} or a part of it is damaged: {error}") from None


def open_capture(path: str | Path, trust: bool = False) -> Capture:
    """Open F.h5 after its checksums and those of its parts were compared.

    `trust`: a capture without checksums, or with others, is opened too. Raises BadInput if it is
    absent, cut off, not a capture, renamed, or a part is not whole.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path} does not exist")
    sums = {} if trust else _sums(path)
    if not trust:
        _check(path, sums[JOINED])
    try:
        with h5py.File(path) as h5:
            attributes = {
                k: v.item() if isinstance(v, np.generic) else v for k, v in h5.attrs.items()
            }
            if attributes.get("format") != FORMAT:
                raise BadInput(f"{path} was not written by `capture` of this version")
            attributes |= {k: json.loads(attributes[k]) for k in ("layers", "parts")}
            made = Path(h5["tokens"].virtual_sources()[0].file_name).parent.name
            if made != _parts_of(path).name:
                raise BadInput(
                    f"{path} was renamed, and finds its parts as {made} alone: rename "
                    f"it {made.removesuffix('.parts')} again"
                )
            for name, size in attributes["parts"].items():  # before they are read
                part = _parts_of(path) / name
                if not part.is_file() or part.stat().st_size != size:
                    raise BadInput(
                        f"{part} is missing or cut off: {path} is not whole; capture it "
                        "anew with overwrite=true"
                    )
                if not trust:
                    _check(part, sums.get(name))
            rows, offsets = h5["rows"][:], h5["offsets"][:]
    except DAMAGE as error:
        raise BadInput(
            f"{path} is cut off or no HDF5 file ({str(error)[:60]}); capture it anew"
        ) from None
    return Capture(path, attributes, rows, offsets)


def _sums(path: Path) -> dict[str, Any]:
    """The checksums of a capture's files. Raises BadInput where it has none."""
    note = _parts_of(path) / NOTE
    content = read_own_json(note) if note.is_file() else {}
    sums = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(sums, dict) or JOINED not in sums:
        raise BadInput(
            f"{path} has no checksums in {note}: another program or an earlier version wrote it. "
            "Capture it anew with overwrite=true, or, if you trust its author, let pwcca read it "
            "with trust=true"
        )
    return sums


def _check(file: Path, expected: Any) -> None:
    if file_checksum(file) != expected:
        raise BadInput(
            f"{file} is not what `capture` wrote: its checksum is not the one in {NOTE}. Capture "
            "it anew with overwrite=true, or, if you trust its author, let pwcca read it with "
            "trust=true"
        )


@dataclass(frozen=True)
class CapturedPair:
    """Two captures of the same tokens."""

    captures: list[Capture]

    @property
    def layers(self) -> list[int]:
        return [int(c.attributes["model_layers"]) for c in self.captures]

    def describe(self, names: tuple[str, ...] = ()) -> dict[str, Any]:
        """What a result says of the data and the checkpoints, which `names` call otherwise."""
        own = [c.attributes for c in self.captures]
        names_shown = names_of([a["checkpoint"] for a in own], names)
        first = own[0]
        return {
            "checkpoints": [
                {
                    "name": n,
                    "path": a["checkpoint"],
                    "weights": a["weights"],
                    "capture": str(c.path),
                }
                for n, a, c in zip(names_shown, own, self.captures, strict=True)
            ],
            "data": {
                "store": first["store"],
                "key": first["store_key"],
                "split": first["split"],
                "examples": first["examples"],
                "tokens": int(self.captures[0].offsets[-1]),
                "max_tokens": first["max_tokens"],
            },
        }

    def stream(self, chosen: list[list[int]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The chosen layers of both, some tokens at a time. Raises BadInput for one not there."""
        for capture, layers in zip(self.captures, chosen, strict=True):
            lacking = sorted(set(layers) - set(capture.layers))
            if lacking or "hidden" not in capture.attributes["what"]:
                has = ", ".join(map(str, capture.layers))
                raise BadInput(
                    f"{capture.path} holds {capture.attributes['what']} of the layers {has}; "
                    f"wanted: hidden of {', '.join(map(str, layers))}"
                )
        first, second = self.captures
        yield from zip(first.hidden(chosen[0]), second.hidden(chosen[1]), strict=True)


def open_pair(paths: list[str], trust: bool = False) -> CapturedPair:
    """Two captures, opened as `open_capture` does. Raises BadInput unless they are of the same
    tokens of the same rows."""
    first, second = (open_capture(path, trust) for path in paths)
    same = all(first.attributes[k] == second.attributes[k] for k in ("store_key", "split"))
    if not (
        same
        and np.array_equal(first.rows, second.rows)
        and np.array_equal(first.offsets, second.offsets)
    ):
        raise BadInput(
            f"the tokens of {paths[0]} and {paths[1]} cannot be aligned: they are of other rows, "
            "another split or another store; capture both with the same data=, split=, examples=, "
            "seed= and max_tokens="
        )
    return CapturedPair([first, second])
