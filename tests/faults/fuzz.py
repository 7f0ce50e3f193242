"""Hostile files for every reader (tests/faults/readers.py), for a given time.

    PYTHONPATH=tests python -m faults.fuzz --seconds 3600 --findings fuzz
    PYTHONPATH=tests python -m faults.fuzz --seconds 60 --only parquet,midi --findings fuzz
    PYTHONPATH=tests python -m faults.fuzz --replay fuzz/parquet/0123abcd

Inputs come from `atheris` if it is installed. It is guided by the lines of this project that run,
and keeps inputs that reach new lines for the next time. Without it, inputs are mutations of valid
files. A finding is a traceback, an empty message, a read that takes more than HANG seconds or more
than MEMORY above what the process began with, or the death of the process. The input and the
traceback are kept, one for each kind of finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from helpers import ROOT

from xformer.data.display import one_line
from xformer.data.errors import OF_THE_DISK

HANG = 20  # seconds
DEATHS = 20  # a reader whose process died so often is not tried any more
PATIENCE = 300  # a worker hangs if it takes so many seconds of CPU more than it was given
MEMORY = 2**30  # bytes
LARGEST = 2**15  # bytes of a hostile file, unless the valid one is larger
# readers of formats with many states get three times as much time as the others
WIDE = {
    "csv",
    "jsonl",
    "parquet",
    "squad",
    "conll",
    "fasta",
    "midi",
    "java",
    "archive a.zip",
    "archive a.tar",
    "from vocab.txt",
    "from tokenizer.json",
    "from spiece.model",
    "tok tokenizer.json",
    "store.json",
    "store train/tokens.npy",
    "store train/tokens.offsets.npy",
    "checkpoint model.safetensors",
    "import config.json",
    "import pytorch_model.bin",
    "PLUS",
    "recipe",
    "study",
    "command line",
    "run log.jsonl",
}
ODD = (
    b"\0",
    b"\xff" * 4,
    b"\x80",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"'",
    b"\n",
    b"\r",
    b"\t",
    b",",
    b"../",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    "\u2028".encode(),
    b"9" * 30,
    b"[" * 10_000,
    b'{"a":' * 10_000,
    b"\x7f\xff\xff\xff",
    b"true",
    b"a = [[",
)


class Hang(BaseException):
    """The reader took too long."""


def mutated(draw: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with a few small changes."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 2, 3, 8, 30))):
        place, kind = draw.randrange(len(data) + 1), draw.randrange(8)
        end = min(len(data), place + draw.choice((1, 2, 4, 16, 200)))
        if kind == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[place:end] = draw.randbytes(end - place)
        elif kind == 2:
            data[place:place] = draw.choice(ODD)
        elif kind == 3:
            data[place:end] = draw.choice(ODD)
        elif kind == 4:
            del data[place:end]
        elif kind == 5:
            data[place:place] = data[place:end] * draw.choice((1, 2, 100))
        elif kind == 6:
            other = draw.choice(seeds)
            start = draw.randrange(len(other) + 1)
            data[place:end] = other[start : start + draw.choice((4, 40, 400))]
        elif draw.randrange(4) == 0:
            del data[place:]
        else:  # replace a number by another
            numbers = list(re.finditer(rb"-?\d+", bytes(data)))
            if numbers:
                number = draw.choice(numbers)
                new = draw.choice(
                    (b"0", b"-1", b"1", b"4294967296", b"9223372036854775808", b"1.5")
                )
                data[number.start() : number.end()] = new
    return bytes(data)


class Trial:
    """One reader, and a directory in which it reads one hostile file after another."""

    def __init__(self, name: str, ground: Path, place: Path):
        from faults.readers import READERS

        self.reader = next(r for r in READERS if r.name == name)
        self.source, self.place = place / "valid", place
        place.mkdir(parents=True)
        (place / "ground").symlink_to(ground)
        valid = ground / self.reader.base / self.reader.file
        self.seeds = list(self.reader.seeds) or [valid.read_bytes()]
        if self.reader.base == "raw":  # these files do not refer to each other
            self.source.mkdir()
        else:
            shutil.copytree(ground / self.reader.base, self.source)

    def __call__(self, data: bytes) -> str:
        """Read the file. Returns what was wrong with the reaction, or "". Raises Hang."""
        from faults.readers import CLEAN

        path = self.place / "work"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.source, path, copy_function=_linked(self.reader))
        file = path / self.reader.file
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        # CPU time, because the machine may be busy or the process may be stopped
        signal.signal(signal.SIGPROF, _hang)
        signal.setitimer(signal.ITIMER_PROF, HANG)
        try:
            if self.reader.mend is not None:
                self.reader.mend(path, self.reader.file)
            self.reader.read(path)
        except (*CLEAN, OSError) as error:
            if isinstance(error, OSError) and error.errno not in OF_THE_DISK:
                return traceback.format_exc()
            if not one_line(str(error)).strip():
                return f"an empty message: {error!r}"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            return traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return ""


def _linked(reader: Any) -> Callable[[str, str], Any]:
    """Link a file instead of copying it, because it is never changed."""
    written = ("store.json", "manifest.json", "tokenizer_meta.json", "log.jsonl")

    def copy(source: str, target: str) -> Any:
        if Path(source).name in written or reader.base == "run":
            return shutil.copy(source, target)
        return os.link(source, target)

    return copy


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def kind_of(fault: str) -> str:
    """The key of a finding: the error, and the last line of this project in its traceback."""
    ours = re.findall(r'File ".*/((?:xformer|preprocess)/[^"]+)", line (\d+)', fault)
    last = fault.strip().rpartition("\n")[2].partition(":")[0]
    return f"{last} at {':'.join(ours[-1])}" if ours else last[:80]


def memory() -> int:
    """The peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Findings:
    """Keeps the first input of each kind of fault, and counts."""

    def __init__(self, directory: Path, trial: Trial):
        self.directory, self.trial, self.inputs = directory, trial, 0
        self.peak = memory()

    def test(self, data: bytes) -> None:
        """Try one input, and keep it if it shows a new fault."""
        self.inputs += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        last = self.directory / "last"
        last.write_bytes(data)  # it is the input if the process dies
        fault = self.trial(data)
        grown, self.peak = memory() - self.peak, max(self.peak, memory())
        if grown > MEMORY:
            fault = fault or f"memory of {grown >> 20} MiB more"
        if fault:
            name = hashlib.sha256(kind_of(fault).encode()).hexdigest()[:12]
            file = self.directory / name
            if not file.exists():
                file.write_bytes(data)
                file.with_suffix(".txt").write_text(f"{kind_of(fault)}\n{fault}")


def worker(name: str, ground: Path, findings: Path, seconds: float, seed: int) -> None:
    """Try inputs on one reader until so many seconds of CPU are used. Notes the seconds and the
    inputs.
    """
    import gc

    setattr(os, "fsync", lambda fd: None)  # noqa: B010 - no file must survive a crash
    guided = _atheris()
    from xformer.preprocess import cli

    parser = cli.make_parser()
    cli.make_parser = lambda: parser
    with tempfile.TemporaryDirectory(dir=_shared_memory()) as place:
        tester = Findings(findings / name, Trial(name, ground, Path(place) / "trial"))
        began, before, noted = time.process_time(), counted(findings / name), 0.0
        for data in tester.trial.seeds:
            tester.test(data)

        def one(data: bytes) -> None:
            nonlocal noted
            tester.test(data)
            used = time.process_time() - began
            if used > noted + 1 or used > seconds:
                noted = used
                total = [before[0] + tester.inputs, round(before[1] + used, 1)]
                (findings / name / "counted.json").write_text(json.dumps(total))
            if used > seconds:
                shutil.rmtree(place, ignore_errors=True)
                os._exit(0)

        draw = random.Random(seed)
        if guided is None:
            while True:
                one(mutated(draw, tester.trial.seeds))
        gc.collect()
        corpus = findings / name / "corpus"
        corpus.mkdir(exist_ok=True)
        for i, data in enumerate(tester.trial.seeds):
            (corpus / f"valid{i}").write_bytes(data)
        largest = max(LARGEST, *(2 * len(data) for data in tester.trial.seeds))

        def custom(data: bytes, most: int, number: int) -> bytes:
            chance = random.Random(number)
            if chance.randrange(3) == 0:
                return mutated(chance, [data, *tester.trial.seeds])[:most]
            return bytes(guided.Mutate(data, most))

        options = [
            f"-max_len={largest}",
            "-timeout=900",
            "-rss_limit_mb=0",
            f"-seed={seed + 1}",
            f"-artifact_prefix={place}/",
            "-close_fd_mask=0",
            "-verbosity=0",
        ]
        guided.Setup(["fuzz", *options, str(corpus)], one, custom_mutator=custom)
        guided.Fuzz()


def counted(directory: Path) -> tuple[int, float]:
    """The inputs that a reader was given so far, and the seconds of CPU that it took."""
    note = directory / "counted.json"
    inputs, seconds = json.loads(note.read_text()) if note.exists() else (0, 0.0)
    return inputs, seconds


def _atheris() -> Any:
    try:
        import atheris  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return None
    return atheris


def _shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() and os.access("/dev/shm", os.W_OK) else None


def make_ground(path: Path) -> Path:
    """The directories that the readers start from. They are made once, in a process of their
    own.
    """
    code = "import pathlib, sys; from faults.readers import make_ground as make; "
    code += "make(pathlib.Path(sys.argv[1]))"
    if not path.exists():
        part = path.with_name(f"{path.name}.partial")
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run([sys.executable, "-c", code, str(part)], check=True, cwd=ROOT)
        part.rename(path)
    return path


def fuzz(names: list[str], ground: Path, findings: Path, seconds: float) -> Iterator[str]:
    """Give each reader its share of the seconds of CPU; a line about each."""
    shares = {name: 3 if name in WIDE else 1 for name in names}
    for name in names:
        directory, seed = findings / name, 0
        start = counted(directory)[1]
        end = start + seconds * shares[name] / sum(shares.values())
        while (left := end - counted(directory)[1]) > 1 and seed < DEATHS:
            log = findings / "worker.txt"
            if (pid := os.fork()) == 0:
                limit = int(left) + PATIENCE
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
                with log.open("w") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                try:
                    worker(name, ground, findings, left, int(start) + seed)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = log.read_text(errors="replace")
            seed += 1
            if status == 0:
                break
            kind = hashlib.sha256(said[-200:].encode()).hexdigest()[:8]
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / "last").exists():
                shutil.copy(directory / "last", directory / f"death-{kind}")
            (directory / f"death-{kind}.txt").write_text(f"died with {status}\n{said[-4000:]}")
        yield f"{name:<32} {told(directory)}"


def told(directory: Path) -> str:
    """What was tried on a reader so far, and the result."""
    inputs, seconds = counted(directory)
    faults = sorted(file.read_text().partition("\n")[0] for file in directory.glob("*.txt"))
    return f"{inputs:>9,} inputs {seconds:7.0f} s of CPU  {len(faults)} faults" + "".join(
        f"\n    {fault}" for fault in faults
    )


def main() -> None:
    """Parse the command line, and fuzz or replay."""
    if (guided := _atheris()) is not None:
        guided.instrument_imports(include=["xformer", "preprocess"]).__enter__()
    from faults.readers import READERS

    parser = argparse.ArgumentParser(
        prog="python -m faults.fuzz", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        default=600,
        help="Seconds of CPU for all readers together (default: 600).",
    )
    add("--only", metavar="A,B", help="Readers to try (default: all).")
    add(
        "--findings",
        type=Path,
        default=Path("fuzz-findings"),
        metavar="DIR",
        help="Where inputs that show a fault are kept (default: fuzz-findings).",
    )
    add(
        "--ground",
        type=Path,
        metavar="DIR",
        help="Where the valid files lie; made there if it "
        "does not exist (default: a temporary directory).",
    )
    add("--replay", type=Path, metavar="FILE", help="Try one input that was kept, and show all.")
    add("--list", action="store_true", help="Name the readers.")
    given = parser.parse_args()
    names = [reader.name for reader in READERS]
    if given.list:
        print("\n".join(names))
        return
    chosen = given.only.split(",") if given.only else names
    if unknown := set(chosen) - set(names):
        parser.error(f"no reader is called {unknown.pop()!r}; see --list")
    with tempfile.TemporaryDirectory() as temporary:
        ground = make_ground((given.ground or Path(temporary) / "ground").absolute())
        if given.replay is not None:
            trial = Trial(given.replay.parent.name, ground, Path(temporary) / "trial")
            print(trial(given.replay.read_bytes()) or "no fault")
            return
        given.findings.mkdir(parents=True, exist_ok=True)
        for line in fuzz(chosen, ground, given.findings.absolute(), given.seconds):
            print(line, flush=True)
        both = [counted(given.findings / name) for name in chosen]
        inputs, seconds = (sum(numbers) for numbers in zip(*both, strict=True))
        print(f"in all {inputs:,} inputs in {seconds / 60:.1f} minutes of CPU")


if __name__ == "__main__":
    main()
