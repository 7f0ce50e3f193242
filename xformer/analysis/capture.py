"""Representations on disk: hidden states and attention maps, written to an HDF5 file.

    python -m xformer.analysis capture CHECKPOINT data=STORE out=F.h5
    python -m xformer.analysis capture ckpt/bert data=stores/rte layers=0,6,12 \\
      what=hidden,attention examples=1000 dtype=float32 out=bert.h5

The numbers are stored in part files in F.h5.parts/. F.h5 presents the parts as a single file. A
part gets its final name only when it is complete; if the command is killed, run it again to
continue. Memory does not grow with the number of examples. F.h5.parts/capture.json holds the
settings and, once F.h5 is complete, the SHA-256 of every file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xformer.analysis.examples import (
    Examples,
    ExamplesConfig,
    look_inside,
    names_of,
    open_examples,
    parse_layers,
)
from xformer.analysis.subcommand import NameList, Subcommand, check_place, with_progress
from xformer.config import HIDDEN
from xformer.data.display import many, say
from xformer.data.errors import BadInput
from xformer.data.files import (
    file_checksum,
    locks,
    make_directory,
    owner,
    read_json,
    read_own_json,
    sync,
    write_bytes,
    write_json,
)

# Shapes: N examples, C hidden size, H heads, L tokens of an example.

FORMAT = 1
PART_TOKENS = 16384  # tokens in a file of F.h5.parts
READ_TOKENS = 4096  # tokens that are read at a time
CHUNK_ROWS = 256  # rows of a dataset that are compressed together
KINDS = ("hidden", "attention")  # what can be captured
NOTE = "capture.json"  # in F.h5.parts
JOINED = "joined"  # the name of F.h5 in NOTE; the parts have their own names
# what h5py raises if a file is truncated, damaged, or not a capture
DAMAGE = (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError)


class CaptureConfig(ExamplesConfig):
    """What a capture contains, and where it is written."""

    out: str
    """The HDF5 file to write, F.h5. Its parts are in F.h5.parts, next to it. The directory is
    created if necessary."""
    run: str | None = Field(None, json_schema_extra=HIDDEN)
    """Not allowed here, because a capture has no figure that TensorBoard could show."""
    names: NameList = Field((), json_schema_extra=HIDDEN)
    """Not allowed here, because a capture does not store a name."""
    mapping_b: str | None = Field(None, json_schema_extra=HIDDEN)
    """Not allowed here, because a capture reads only one checkpoint."""
    overwrite: bool = False
    """Replace an earlier capture of the same name."""
    layers: str = "all"
    """all, last, or numbers such as 0,6,12. Layer 0 is the output of the embeddings."""
    what: str = "hidden"
    """hidden, attention, or hidden,attention."""
    dtype: Literal["float16", "float32"] = "float16"
    """Data type of the numbers."""
    examples: int = Field(256, ge=1)
    """Number of rows, drawn at random with `seed`, or all rows if the split has fewer."""


SUBCOMMAND = Subcommand("capture", CaptureConfig, __doc__ or "", directory=False)


def run(paths: list[str], config: CaptureConfig) -> None:
    """`python -m xformer.analysis capture CHECKPOINT key=value ...`"""
    out = Path(config.out)
    parts = _parts_of(out)
    if unused := sorted(config.model_fields_set & {"run", "names", "mapping_b"}):
        raise BadInput(f"capture draws nothing and reads one checkpoint: leave {unused[0]}= out")
    if out.suffix != ".h5" or out.is_dir():
        raise BadInput(f"out={out}: give a file whose name ends in .h5, such as F.h5")
    check_place(parts)
    wanted = {kind.strip() for kind in config.what.split(",")}
    kinds = [kind for kind in KINDS if kind in wanted]
    if not wanted <= {*KINDS}:
        raise BadInput(f"what={config.what}: give hidden, attention, or hidden,attention")
    examples = open_examples(config, paths)
    layers = parse_layers(config.layers, examples.models[0].layers, paths[0])
    if "attention" in kinds and not any(layers):
        raise BadInput(
            f"layers={config.layers}: the embeddings (0) have no attention; give other layers, or "
            "what=hidden"
        )
    identity = _identity(examples, config, kinds, layers)
    if out.exists() and not config.overwrite:
        _refuse_other(open_capture(out).attributes, identity, out)
        say(f"{out} is already complete")
        return
    with _locked(parts, identity, out, config.overwrite):
        files = _write_parts(examples, parts, kinds, layers, config.dtype)
        _join(out, files, examples, identity)
    size = sum(file.stat().st_size for file in files) / 2**20
    say(
        f"{out}: {many(len(examples.rows), 'example')}, {examples.tokens:,} tokens, "
        f"layers {', '.join(map(str, layers))}, {size:,.1f} MiB in {many(len(files), 'part')}"
    )


# ------------------------------------------------------------------------------------ writing


def _identity(
    examples: Examples, config: CaptureConfig, kinds: list[str], layers: list[int]
) -> dict[str, Any]:
    """The settings that decide what a capture holds. They become the attributes of the file."""
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


def _refuse_other(on_disk: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raise BadInput that lists the different settings if the capture on disk is another one."""
    # Paths may have changed. The hashes `weights` and `store_key` are compared instead.
    paths = ("checkpoint", "store")
    differing = [
        f"{key}={on_disk.get(key)} is now {value}"
        for key, value in wanted.items()
        if on_disk.get(key) != value and key not in paths
    ]
    if differing:
        raise BadInput(
            f"{where} holds another capture ({'; '.join(differing[:3])}); give another out=, or "
            "overwrite=true to replace it"
        )


@contextmanager
def _locked(parts: Path, identity: dict[str, Any], out: Path, overwrite: bool) -> Iterator[None]:
    """Lock the directory of parts, which is created if necessary.

    Parts of the same capture that a killed process left are kept. Raises BadInput if the directory
    is in use, or holds another capture.
    """
    make_directory(parts, "out=")
    note = parts / NOTE
    with (parts / ".lock").open("w") as lock:
        if not locks(lock):
            raise BadInput(
                f"out={out}: another process is writing it; wait for it, or give another out="
            )
        if overwrite:
            out.unlink(missing_ok=True)
            for old in [note, *parts.glob("*.h5")]:
                old.unlink(missing_ok=True)
        if note.exists():
            on_disk = read_json(note)
            _refuse_other(on_disk if isinstance(on_disk, dict) else {}, identity, parts)
        try:
            _remove_temporary(parts)
            write_json(note, identity)
            yield
        finally:
            _remove_temporary(parts)
            if not list(parts.glob("*.h5")):  # stopped before the first part
                shutil.rmtree(parts, ignore_errors=True)


def _remove_temporary(parts: Path) -> None:
    for leftover in parts.glob(".*.h5.*"):
        leftover.unlink()


class _Disk(FileIO):
    """A file for HDF5 to write; messages call it `shown`.

    HDF5 crashes if it cannot write a file while it closes it. An error of the disk is therefore
    hidden from HDF5, and raised by `check` and at the end of the `with` block. Parts are not made
    in memory, because attention maps of long rows take gigabytes.
    """

    def __init__(self, path: Path, shown: Path):
        super().__init__(path, "w+")
        self.shown = shown
        self.error: OSError | None = None

    def write(self, values: Any) -> int:
        left = memoryview(values).cast("B")
        size = len(left)
        try:
            while self.error is None and len(left):
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0

    def check(self) -> None:
        """Raise the first error of the disk, if there was one."""
        if self.error is not None:
            self.error.filename = str(self.shown)
            raise self.error from None

    def __exit__(self, *_: object) -> None:
        self.close()
        self.check()


def _write_parts(
    examples: Examples, parts: Path, kinds: list[str], layers: list[int], dtype: str
) -> list[Path]:
    """Write the parts that do not exist yet. Returns the files of all parts."""
    files = []
    size_of = dict(zip(examples.rows.tolist(), examples.sizes.tolist(), strict=True))
    pieces = [(rows, [size_of[row] for row in rows]) for rows in examples.parts(PART_TOKENS)]
    shown = with_progress(pieces, examples.tokens, "tokens", lambda piece: sum(piece[1]))
    for number, (rows, sizes) in enumerate(shown):
        file = parts / f"{number:05}.h5"
        files.append(file)
        if file.exists() and _is_complete(file):
            continue
        temporary = parts / f".{file.name}.{owner()}"
        of_part = replace(examples, rows=rows, sizes=np.array(sizes))
        with _Disk(temporary, file) as disk, h5py.File(disk, "w") as h5:
            for batch_rows in of_part.parts():
                _append(h5, of_part, batch_rows, kinds, layers, dtype)
                disk.check()
        sync(temporary)
        temporary.replace(file)
        sync(parts)
    return files


def _is_complete(file: Path) -> bool:
    """Whether HDF5 can open a part."""
    try:
        with h5py.File(file) as h5:
            return "tokens" in h5
    except DAMAGE:
        return False


def _append(
    h5: Any, examples: Examples, rows: np.ndarray, kinds: list[str], layers: list[int], dtype: str
) -> None:
    """Run the model on one batch of rows, and add the result to a part."""
    loaded = examples.models[0]
    batch, inside = look_inside(loaded, rows, maps="attention" in kinds)
    _extend(h5, "tokens", batch.tokens.astype(np.int32))
    _extend(h5, "positions", batch.positions.astype(np.int32))
    _extend(h5, "rows", batch.rows)
    _extend(h5, "sizes", np.diff(batch.cu_seqlens).astype(np.int32))
    if "hidden" in kinds:
        for layer in layers:
            _extend(
                h5, f"hidden/{layer}", _to_array(inside.hidden[layer], dtype, loaded.path, layer)
            )
    if "attention" in kinds:
        for layer in layers:
            if layer == 0:  # the embeddings have no attention
                continue
            maps = [m.permute(1, 2, 0).flatten(0, 1) for m in inside.maps[layer - 1]]  # (L L, H)
            _extend(h5, f"attention/{layer}", _to_array(torch.cat(maps), dtype, loaded.path, layer))


def _to_array(x: Tensor, dtype: str, path: str, layer: int) -> np.ndarray:
    """A tensor as an array. Raises BadInput if a number would overflow in float16."""
    if dtype == "float16" and x.abs().max() > torch.finfo(torch.float16).max:
        raise BadInput(
            f"{path}: layer {layer} has numbers too large for float16; give dtype=float32"
        )
    return x.cpu().numpy().astype(dtype)


def _extend(h5: Any, name: str, values: np.ndarray) -> None:
    """Append rows to a dataset, which is created by the first call."""
    if name not in h5:
        h5.create_dataset(
            name,
            (0, *values.shape[1:]),
            values.dtype,
            compression="gzip",
            compression_opts=1,
            shuffle=True,
            chunks=(CHUNK_ROWS, *values.shape[1:]),
            maxshape=(None, *values.shape[1:]),
        )
    data = h5[name]
    data.resize(len(data) + len(values), 0)
    data[-len(values) :] = values


def _join(out: Path, files: list[Path], examples: Examples, identity: dict[str, Any]) -> None:
    """Write F.h5, which concatenates the datasets of the parts, and the checksums of all files."""
    content = BytesIO()
    with h5py.File(content, "w", libver="latest") as h5:
        for name, pieces in _datasets(files).items():
            _, (_, *shape), dtype = pieces[0]
            length = sum(size for _, (size, *_), _ in pieces)
            joined = h5py.VirtualLayout((length, *shape), dtype)
            start = 0
            for file, its_shape, _ in pieces:
                place = f"{out.name}.parts/{file.name}"  # relative, so both can be moved
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
    sums = {JOINED: sha256(content.getbuffer()).hexdigest()}
    sums |= {file.name: file_checksum(file) for file in files}
    write_json(_parts_of(out) / NOTE, {**identity, "sha256": sums})
    write_bytes(out, content.getbuffer())


def _parts_of(path: Path) -> Path:
    """The directory that holds the parts of a capture."""
    return path.with_name(f"{path.name}.parts")


def _missing(dtype: np.dtype) -> Any:
    """The value that HDF5 returns for the numbers of a missing part: NaN or -1."""
    return np.nan if dtype.kind == "f" else -1


def _datasets(files: list[Path]) -> dict[str, list[tuple[Path, tuple[int, ...], np.dtype]]]:
    """For each dataset, its pieces: the file, shape and type of each."""
    pieces: dict[str, list[tuple[Path, tuple[int, ...], np.dtype]]] = {}
    for file in files:

        def note(name: str, node: Any, file: Path = file) -> None:
            if isinstance(node, h5py.Dataset):
                pieces.setdefault(name, []).append((file, node.shape, node.dtype))

        with h5py.File(file) as h5:
            h5.visititems(note)
    return pieces


# ------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Capture:
    """A capture on disk that is known to be complete."""

    path: Path
    attributes: dict[str, Any]
    rows: np.ndarray  # (N,)
    offsets: np.ndarray  # (N + 1,)

    @property
    def layers(self) -> list[int]:
        return list(self.attributes["layers"])

    def hidden(self, layers: list[int]) -> Iterator[list[Tensor]]:
        """The hidden states of these layers, some tokens at a time: lists of (tokens, C).

        Raises BadInput if a file is damaged.
        """
        try:
            with h5py.File(self.path) as h5:
                for start in range(0, int(self.offsets[-1]), READ_TOKENS):
                    parts = [h5[f"hidden/{layer}"][start : start + READ_TOKENS] for layer in layers]
                    yield [torch.from_numpy(values) for values in parts]
        except DAMAGE as error:
            raise BadInput(
                f"{self.path} or one of its parts is damaged ({error}); capture it again"
            ) from None


def open_capture(path: str | Path, trust: bool = False) -> Capture:
    """Open F.h5 after its checksum and those of its parts have been verified.

    With `trust` no checksums are verified. Raises BadInput if the file does not exist, is damaged,
    was renamed, or is not a capture, or if a part is missing or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path} does not exist; give the file that `capture` wrote")
    sums = {} if trust else _sums(path)
    if not trust:
        _check_sum(path, sums[JOINED])
    try:
        with h5py.File(path) as h5:
            attributes = {
                k: v.item() if isinstance(v, np.generic) else v for k, v in h5.attrs.items()
            }
            if attributes.get("format") != FORMAT:
                raise BadInput(
                    f"{path} was not written by this version of `capture`; capture it again with "
                    "overwrite=true"
                )
            attributes |= {k: json.loads(attributes[k]) for k in ("layers", "parts")}
            made = Path(h5["tokens"].virtual_sources()[0].file_name).parent.name
            if made != _parts_of(path).name:
                raise BadInput(
                    f"{path} was renamed, but it refers to its parts as {made}: rename "
                    f"it back to {made.removesuffix('.parts')}"
                )
            for name, size in attributes["parts"].items():  # HDF5 itself does not check this
                part = _parts_of(path) / name
                if not part.is_file() or part.stat().st_size != size:
                    raise BadInput(
                        f"{part} is missing or truncated: {path} is not complete; capture it again "
                        "with overwrite=true"
                    )
                if not trust:
                    _check_sum(part, sums.get(name))
            rows, offsets = h5["rows"][:], h5["offsets"][:]
    except DAMAGE as error:
        raise BadInput(
            f"{path} is truncated or not an HDF5 file ({str(error)[:60]}); capture it again"
        ) from None
    return Capture(path, attributes, rows, offsets)


def _sums(path: Path) -> dict[str, Any]:
    """The checksums of a capture's files. Raises BadInput if there are none."""
    note = _parts_of(path) / NOTE
    content = read_own_json(note) if note.is_file() else {}
    sums = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(sums, dict) or JOINED not in sums:
        raise BadInput(
            f"{path} has no checksums in {note}: another program or an earlier version wrote it. "
            "Capture it again with overwrite=true, or, if you trust its author, let pwcca read it "
            "with trust=true"
        )
    return sums


def _check_sum(file: Path, expected: Any) -> None:
    """Raise BadInput if a file's checksum is not the expected one."""
    if file_checksum(file) != expected:
        raise BadInput(
            f"{file} is not what `capture` wrote: its checksum is not the one in {NOTE}. Capture "
            "it again with overwrite=true, or, if you trust its author, let pwcca read it with "
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
        """The checkpoints and the data, in the form of the result's JSON (see `Examples`)."""
        attributes = [capture.attributes for capture in self.captures]
        shown = names_of([a["checkpoint"] for a in attributes], names)
        first = attributes[0]
        return {
            "checkpoints": [
                {
                    "name": n,
                    "path": a["checkpoint"],
                    "weights": a["weights"],
                    "capture": str(c.path),
                }
                for n, a, c in zip(shown, attributes, self.captures, strict=True)
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
        """The hidden states of both captures in the chosen layers, some tokens at a time.

        Raises BadInput if a layer was not captured.
        """
        for capture, layers in zip(self.captures, chosen, strict=True):
            lacking = sorted(set(layers) - set(capture.layers))
            if lacking or "hidden" not in capture.attributes["what"]:
                has = ", ".join(map(str, capture.layers))
                raise BadInput(
                    f"{capture.path} holds {capture.attributes['what']} of the layers {has}, but "
                    f"hidden of the layers {', '.join(map(str, layers))} is needed; capture it, or "
                    "give other layers="
                )
        first, second = self.captures
        yield from zip(first.hidden(chosen[0]), second.hidden(chosen[1]), strict=True)


def open_pair(paths: list[str], trust: bool = False) -> CapturedPair:
    """Open two captures (see `open_capture`).

    Raises BadInput unless both hold the same rows of the same split, with the same lengths.
    """
    first, second = (open_capture(path, trust) for path in paths)
    same = all(first.attributes[k] == second.attributes[k] for k in ("store_key", "split"))
    if not (
        same
        and np.array_equal(first.rows, second.rows)
        and np.array_equal(first.offsets, second.offsets)
    ):
        raise BadInput(
            f"the tokens of {paths[0]} and {paths[1]} cannot be aligned: their rows, splits or "
            "stores differ; capture both with the same data=, split=, examples=, "
            "seed= and max_tokens="
        )
    return CapturedPair([first, second])
