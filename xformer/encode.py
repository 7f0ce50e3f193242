"""Compute one vector per text with a checkpoint, and write the vectors to a file."""

from __future__ import annotations

if __name__ == "__main__":  # `python -m xformer.encode`: before torch is imported
    from xformer.start import as_command

    as_command("encode")

import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from pydantic import Field, field_validator

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.config import Settings, help_text, parse_overrides, validate
from xformer.convert.hf import vector_arguments
from xformer.data.batch import CHUNK
from xformer.data.display import many, say
from xformer.data.errors import BadInput, typed
from xformer.data.files import what_is, write_bytes
from xformer.data.outputs import check_writable
from xformer.parallel import processes
from xformer.parallel.processes import SystemConfig
from xformer.texts import Pooling, check_pooling

# A function that reads the texts of a file; its arguments are the file, and a column or None. The
# command passes one of preprocess/, which this module may not import.
ReadTexts = Callable[[Path, str | None], list[str]]
FORMATS = (".npy", ".h5", ".tsv")


class EncodeConfig(Settings):
    """Which texts to encode, and how."""

    input: str
    """The file of texts: one text per line; FASTA, whose sequences become upper case; or csv, tsv,
    JSON lines or parquet with a column of texts. It may be compressed with gzip or zstd. An empty
    line of a text file is an empty text."""
    out: str
    """The file to write, with one vector per text, in the order of the input. Its extension decides
    the format. .npy: an array (texts, width) of float32. .h5: the same array, as the dataset
    `vectors`. .tsv: a line of numbers per text, for the projector of TensorBoard."""
    column: str | None = None
    """The column of the texts, if the input is a table. Default: text."""
    pooling: Pooling = "mean"
    """A vector is the mean of the last hidden states of all tokens of a text, special tokens
    included (mean), or the hidden state of the first token (first)."""
    normalize: bool = False
    """Divide each vector by its Euclidean length, so that products of vectors are cosines."""
    max_tokens: int | None = Field(None, ge=2)
    """Texts are cut to this many tokens, special tokens included. Default: as many as the model
    accepts."""
    batch_tokens: int = Field(CHUNK, ge=1)
    """Texts are encoded in batches of about this many tokens."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the matrix products."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads. 0 takes OMP_NUM_THREADS, or else all cores."""

    @field_validator("pooling", mode="before")
    @classmethod
    def _pooling(cls, value: object) -> object:
        check_pooling(value)
        return value


def main(read_texts: ReadTexts) -> None:
    """`python -m xformer.encode CHECKPOINT input=FILE out=FILE key=value ...`"""
    arguments = sys.argv[1:]
    if any(a in ("-h", "--help") for a in arguments):
        say(*help_text(EncodeConfig).split("\n"))
        return
    with processes.group():
        config = parse_arguments(arguments)
        checkpoint = checkpoints.load(arguments[0])
        if not any(a.startswith(("pooling=", "normalize=", "max_tokens=")) for a in arguments):
            _say_published(checkpoint)
        texts = read_texts(Path(config.input), config.column)
        if empty := sum(not text.strip() for text in texts):
            say(f"warning: {empty:,} of {many(len(texts), 'text')} are empty", error=True)
        ranks = processes.start(SystemConfig(threads=config.threads))
        if ranks.world_size > 1:
            raise BadInput("this command runs as a single process; start it without torchrun")
        with ranks.autocast(config.precision):
            vectors = checkpoint.encode(
                texts,
                pooling=config.pooling,
                normalize=config.normalize,
                max_tokens=config.max_tokens,
                batch_tokens=config.batch_tokens,
                device=ranks.device,
            )
    record = {"checkpoint": arguments[0], **config.model_dump(exclude_none=True)}
    write_vectors(Path(config.out), vectors, record)
    say(f"{config.out}: {len(vectors):,} vectors of {vectors.shape[1]} numbers")


def _say_published(checkpoint: Checkpoint) -> None:
    """Say which settings the vectors of sentence-transformers have, if the checkpoint was imported
    with them."""
    records = (record["sentence"] for record in checkpoint.history if "sentence" in record)
    if sentence := next(records, None):
        given = vector_arguments(sentence) or "a pooling that this command does not have"
        say(f"note: sentence-transformers makes this model's vectors with {given}", error=True)


def parse_arguments(arguments: list[str]) -> EncodeConfig:
    """The settings of a command line. Raises BadInput if one is wrong, or `out` cannot be
    written."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        raise BadInput("the first argument must be a checkpoint or a run, such as micro/english")
    config = validate(EncodeConfig, parse_overrides(EncodeConfig, arguments[1:]))
    if stores := [p for p in (arguments[0], config.input) if what_is(Path(p)) == "a store"]:
        line = typed("python -m xformer.encode CHECKPOINT input=FILE out=FILE")
        raise BadInput(f"{stores[0]} is a store, but this command encodes a file of texts: {line}")
    out = Path(config.out)
    if out.suffix not in FORMATS:
        raise BadInput(f"out={out}: give a name that ends in {', '.join(FORMATS)}")
    if out.exists() and Path(config.input).exists() and out.samefile(config.input):
        raise BadInput(f"out= and input= are both {out}; give two different files")
    check_writable(out)
    return config


def write_vectors(out: str | Path, vectors: np.ndarray, record: dict[str, object]) -> None:
    """Write vectors atomically, in the format of the file's extension. In HDF5, `record` becomes
    the attributes of the dataset."""
    content, out = BytesIO(), Path(out)
    if out.suffix == ".npy":
        np.save(content, vectors)
    elif out.suffix == ".h5":
        with h5py.File(content, "w") as h5:
            h5.create_dataset("vectors", data=vectors).attrs.update(record)
    else:  # nine digits are enough to read the same numbers back
        np.savetxt(content, vectors, fmt="%.9g", delimiter="\t")
    write_bytes(out, content.getbuffer())
