"""Damage on the disk: a flipped bit, or a cut, in every file of a store and of a checkpoint."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.works import Bench, Row
from xformer import checkpoint as checkpoints
from xformer.data.errors import BadInput, Failure
from xformer.preprocess import stats

SUMMED = ("manifest.json", "sums.json")  # where the checksums themselves are kept


def damaged(content: bytes, draw: random.Random, flips: int) -> Iterator[tuple[str, bytes]]:
    """The content with one bit flipped, at several places, and the content cut at several
    lengths.
    """
    for place in [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(flips))]:
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        yield f"bit {place}", bytes(changed)
    for length in {0, 1, len(content) // 2, len(content) - 1} - {len(content)}:
        yield f"cut to {length}", content[:length]


def verify_store(path: Path) -> None:
    """Check a store as `preprocess.py verify` does."""
    with contextlib.redirect_stdout(io.StringIO()):
        stats.verify_store(path)


def verify_checkpoint(path: Path) -> None:
    """Check a checkpoint as loading does, with the optimizer's file of a run."""
    checkpoints.load(path)


def every_file(bench: Bench, what: str, flips: int = 20) -> list[Row]:
    """Damage every file of a store or a checkpoint in turn. The damage must be noticed and
    named."""
    verify: Callable[[Path], None]
    if what == "store":
        source, verify = bench.toys.pairs, verify_store
    else:
        source = checkpoints.resolve(bench.reference("training") / "run")
        verify = verify_checkpoint
    flip = Row(f"{what}: one bit flipped, in every file")
    cut = Row(f"{what}: cut short, every file")
    draw = random.Random(0)
    with bench.place() as place:
        copy = place / what
        shutil.copytree(source, copy)
        verify(copy)
        for file in sorted(path for path in copy.rglob("*") if path.is_file()):
            content = file.read_bytes()
            for how, changed in damaged(content, draw, flips):
                file.write_bytes(changed)
                row = flip if how.startswith("bit") else cut
                row.count(noticed(verify, copy, file, how))
            file.write_bytes(content)
        verify(copy)
    return [flip, cut]


def noticed(verify: Callable[[Path], None], copy: Path, file: Path, how: str) -> str:
    """What is wrong with the reaction to damage; "" if it names the damaged file."""
    name = str(file.relative_to(copy))
    try:
        verify(copy)
    except (BadInput, Failure) as error:
        said = str(error)
        # a flipped bit in values is reported with its block; a wrong header is noticed on opening
        block = file.suffix != ".npy" or not how.startswith("bit")
        if name in said and (block or re.search(r"block 0|\.npy (is|contradicts|has)", said)):
            return ""
        if file.name in SUMMED and ("manifest" in said or file.name in said):
            return ""
        if file.name == "store.json" and "is not a store" in said:
            return ""
        return f"wrong: {how} of {name} was noticed but not named: {said[:150]}"
    return f"lost: {how} of {name} was not noticed"
