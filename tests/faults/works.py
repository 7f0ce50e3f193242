"""The commands that are killed (a training run, a preprocess run and an operation on weights), and
how to check whether anything was lost. The last two replace an older output.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from helpers import SMOKE, Done, Forks, training
from tensorboard.backend.event_processing.directory_watcher import DirectoryDeletedError
from test_train import drawn_once, same
from toys import Toys

from faults.inject import COUNT, OPERATIONS, armed
from xformer import checkpoint as checkpoints
from xformer.data import tokenizers
from xformer.data.errors import BadInput
from xformer.data.store import open_store
from xformer.model.config import ModelConfig

# at each restart it would warn that a curve begins again
logging.getLogger("tensorboard").setLevel(logging.ERROR)
# with a checkpoint at every step, many are written and most are deleted again
STEPS = ["train.steps=4", "train.checkpoint_every=1", "train.validate_every=2", "train.log_every=1"]


@dataclass
class Row:
    """A line of the table: how often a fault was made, and how often the work was lost or wrong.

    Lost: something that had been written is gone, or the work cannot go on. Wrong: it ends in
    another way than without the fault.
    """

    fault: str
    times: int = 0
    lost: int = 0
    wrong: int = 0
    notes: list[str] = field(default_factory=list)

    def count(self, bad: str) -> None:
        """Count one more trial. `bad` begins with "lost" or "wrong", or is empty."""
        self.times += 1
        self.lost += bad.startswith("lost")
        self.wrong += bad.startswith("wrong")
        if bad:
            self.notes.append(bad)


@dataclass(frozen=True)
class Work:
    """A command line that writes below `place`, and what must be true when it is done."""

    name: str
    line: Callable[[Path], list[str]]
    check: Callable[[Path, Path], None]  # raises AssertionError if `place` differs from `reference`
    ranks: int = 1
    prepare: Callable[[Path], object] = lambda place: None  # make what is in `place` at the start
    opened: Callable[[Path], object] = lambda place: None  # raises BadInput if that is lost

    def finish(self, forks: Forks, place: Path, reference: Path) -> str:
        """Continue the work to its end. Returns what is lost or wrong then."""
        try:
            self.opened(place)
        except BadInput as error:
            return f"lost: the older output: {error}"
        before = newest(place)
        done = forks.run(*self.line(place), ranks=self.ranks)
        if done.status != 0:
            return f"lost: it does not go on: {done.err.strip().rpartition(chr(10))[2]}"
        if before and f"from step {before}\n" not in done.err and "is finished" not in done.err:
            return f"lost: the checkpoint of step {before}: {done.err.splitlines()[:1]}"
        return wrong(self.check, place, reference)


def wrong(check: Callable[..., object], *given: object) -> str:
    """What a check of a result complains about, or ""."""
    try:
        check(*given)
    except (AssertionError, OSError, DirectoryDeletedError) as error:
        return f"wrong: {str(error)[:200]}"
    return ""


def ending(done: Done, check: Callable[..., object], *given: object) -> str:
    """How a process failed that should have succeeded, or ""."""
    return f"lost: {done.err[-300:]}" if done.status else wrong(check, *given)


def newest(place: Path) -> int:
    """The step of the newest checkpoint below a place; 0 if there is none."""
    manifests = (place / "run/checkpoints").glob("step_*/manifest.json")
    return max((int(path.parent.name.removeprefix("step_")) for path in manifests), default=0)


def check_run(place: Path, reference: Path) -> None:
    """Weights, moments, state, scores, log and TensorBoard are equal to those of the reference."""
    same(place / "run", reference / "run")
    drawn_once(place / "run")
    left = [p.name for p in (place / "run").rglob(".*")]
    assert left == [".lock"], f"left behind: {left}"


def check_store(place: Path, reference: Path, name: str = "store") -> None:
    """Every byte is equal to the reference, except for the output's name in the command line."""
    assert [p.name for p in place.iterdir()] == [name], [p.name for p in place.iterdir()]
    actual, wanted = (files(p / name, p) for p in (place, reference))
    assert actual.keys() == wanted.keys()
    for name in actual:
        assert actual[name] == wanted[name], f"{name} differs"


def files(directory: Path, place: Path) -> dict[str, bytes]:
    """The content of every file below a directory, without the command line that made it."""
    own = {}
    for path in directory.rglob("*"):
        if path.is_file() and path.name != "sums.json":
            content = path.read_bytes().replace(bytes(place), b"")
            if path.name == "store.json":
                meta = json.loads(content)
                del meta["origin"]["command"]
                content = json.dumps(meta).encode()
            own[str(path.relative_to(directory))] = content
    return own


def works(toys: Toys, scratch: Path) -> dict[str, Work]:
    """All works by name."""
    base = scratch / "base"
    shape = ModelConfig(layers=2, hidden=64, heads=2, intermediate=128)
    checkpoints.save(checkpoints.fresh(shape, tokenizers.load_tokenizer(toys.tokenizer), 0), base)
    text = [
        "preprocess.py",
        "text",
        "--input",
        str(toys.raw / "train.txt"),
        "--valid",
        str(toys.raw / "valid.txt"),
        "--tokenizer",
        str(toys.tokenizer),
    ]
    made = [
        Work(
            "training",
            lambda place: training(SMOKE, toys.text, place / "run", *STEPS),
            check_run,
        ),
        Work(
            "training on two ranks",
            lambda place: training(SMOKE, toys.text, place / "run", *STEPS),
            check_run,
            ranks=2,
        ),
        Work(
            "preprocessing",
            lambda place: [*text, "--output", str(place / "store"), "--overwrite"],
            check_store,
            prepare=lambda place: shutil.copytree(toys.classes, place / "store"),
            opened=lambda place: open_store(place / "store"),
        ),
        Work(
            "surgery",
            lambda place: [
                "-m",
                "xformer.surgery",
                str(base),
                str(place / "out"),
                "reverse_layers",
                "--overwrite",
            ],
            partial(check_store, name="out"),
            prepare=lambda place: shutil.copytree(base, place / "out"),
            opened=lambda place: checkpoints.load(place / "out"),
        ),
    ]
    return {work.name: work for work in made}


class Bench:
    """Servers that start commands quickly, a directory for their output, and a reference for each
    work.
    """

    def __init__(self, toys: Toys, scratch: Path, servers: list[Forks]):
        self.toys, self.scratch = toys, scratch
        self.works = works(toys, scratch)
        self.servers: SimpleQueue[Forks] = SimpleQueue()
        for server in servers:
            self.servers.put(server)
        self.numbers = iter(range(10**9))
        self.references: dict[str, Path] = {}

    @contextmanager
    def forks(self) -> Iterator[Forks]:
        """A server for one caller at a time."""
        server = self.servers.get()
        try:
            yield server
        finally:
            self.servers.put(server)

    @contextmanager
    def place(self, work: Work | None = None) -> Iterator[Path]:
        """A directory for a work. It is deleted if all is well."""
        path = self.scratch / f"place-{next(self.numbers)}"
        path.mkdir(parents=True)
        if work is not None:
            work.prepare(path)
        yield path
        shutil.rmtree(path)

    def reference(self, name: str) -> Path:
        """The directory of a work that was never stopped."""
        if name not in self.references:
            path = self.scratch / f"reference-{name.replace(' ', '-')}"
            path.mkdir(parents=True)
            self.works[name].prepare(path)
            done = self.run(name, path)
            assert done.status == 0, done.err
            self.references[name] = path
        return self.references[name]

    def run(self, name: str, place: Path, before: str = "") -> Done:
        """Run a work from its beginning to its end."""
        work = self.works[name]
        with self.forks() as forks:
            return forks.run(*work.line(place), ranks=work.ranks, before=before)

    def operations(self, name: str) -> list[str]:
        """The operations on files that a work does, in order."""
        self.reference(name)
        with self.place(self.works[name]) as place:
            said = self.run(name, place, armed(place, COUNT)).out
        kinds = r"(?:begin|" + "|".join(("write", *OPERATIONS)) + r") /"
        return [line for line in said.splitlines() if re.match(kinds, line)]


def clear_line(done: Done) -> str:
    """What is wrong with the message of a command that failed; "" if it is one line."""
    if "Traceback" in done.err:
        return f"wrong: a traceback: {done.err.strip().rpartition(chr(10))[2]}"
    last = done.err.strip().rpartition("\n")[2]
    if done.status == 1 and not last.startswith("error: "):
        return f"wrong: it failed without a word: {last[:100]}"
    if done.status not in (0, 1):
        return f"wrong: status {done.status}: {last[:100]}"
    return ""


def as_json(rows: list[Row]) -> str:
    """The rows for a program."""
    return json.dumps([vars(row) for row in rows], indent=1)
