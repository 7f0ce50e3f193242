"""Everything that may go wrong around a run is made to go wrong.

    make faults
    PYTHONPATH=tests python -m faults --only kills,damage --json part1.json
    PYTHONPATH=tests python -m faults --only ranks --add part1.json --output docs/reliability.md

Each fault is made many times in a small real training run and a small real preprocess run. Then the
same command is started again, and its result must be the same, bit for bit, as without the fault.
Prints a table. With --output, the table is also written into a document between its two marks.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import toys
from helpers import Forks

from benchmarks import report
from benchmarks.bench import directory, new_file
from faults import damage, deaths, haul, many, ranks
from faults.inject import ERRORS, KILL, POWER
from faults.works import Bench, Row, as_json
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.files import read_json
from xformer.start import run

BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"


def kills(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    for fault in (KILL, POWER):
        for name in ("preprocessing", "surgery", "training"):
            yield deaths.killed_at_operations(bench, name, fault, given.most, given.jobs)


def moments(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    shares = {"preprocessing": 0.4, "surgery": 0.1, "training": 0.46, "training on two ranks": 0.04}
    for name, share in shares.items():
        yield deaths.killed_at_random(bench, name, round(share * given.kills), given.jobs)


def disk(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    for name in ("preprocessing", "surgery", "training"):
        for kind in ERRORS:
            yield deaths.refused_by_the_disk(bench, name, kind, given.most, given.jobs)
        yield deaths.short_writes(bench, name)


def files(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    for what in ("store", "checkpoint"):
        yield from damage.every_file(bench, what)


def gone(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for rank in (1, 0):
            yield ranks.one_of_two(bench, number, rank)
        yield ranks.restarted_by_torchrun(bench, number, given.jobs)


def told(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    yield from deaths.told_to_stop(bench, "training")


def at_once(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    yield many.same_run(bench)
    yield many.same_output(bench)
    yield many.ten_readers(bench)
    yield from many.replaced_while_read(bench)


def long(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    yield haul.long_haul(bench, given.steps)[0]


CASES: dict[str, Callable[[Bench, argparse.Namespace], Iterator[Row]]] = {
    "kills": kills,
    "moments": moments,
    "disk": disk,
    "damage": files,
    "ranks": gone,
    "sigterm": told,
    "many": at_once,
    "haul": long,
}


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| fault | times | lost | wrong |", "|---|---:|---:|---:|"]
    lines += [f"| {row.fault} | {row.times:,} | {row.lost} | {row.wrong} |" for row in rows]
    notes = [f"- {row.fault}: {note}" for row in rows for note in row.notes[:3]]
    return "\n".join([*lines, "", *notes]).rstrip("\n") + "\n"


def main() -> None:
    """Parse the command line, and make the faults."""
    given = _arguments()
    rows = [Row(**row) for file in given.add for row in read_json(file)]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.scratch)))
        (scratch / "toys").mkdir()
        servers = []
        for i in range(given.jobs):
            (scratch / f"forks{i}").mkdir()
            servers.append(stack.enter_context(Forks(scratch / f"forks{i}")))
        made = toys.make(servers[0], scratch / "toys")
        bench = Bench(made, scratch, servers)
        for name in given.only:
            began = time.monotonic()
            for row in CASES[name](bench, given):
                seconds, began = time.monotonic() - began, time.monotonic()
                print(
                    f"{row.fault}: {row.times:,} times, {row.lost} lost, {row.wrong} wrong "
                    f"({seconds:.0f} s)",
                    flush=True,
                )
                for note in row.notes[:20]:
                    print(f"    {note}", flush=True)
                rows.append(row)
                if given.json is not None:
                    given.json.write_text(as_json(rows) + "\n")
    print(f"\n{table(rows)}")
    if given.output is not None:
        report.write(given.output, f"{BEGIN}\n{table(rows)}{END}", BEGIN, END)
    raise SystemExit(any(row.lost or row.wrong for row in rows))


def _arguments() -> argparse.Namespace:
    """The command line. `only` is a list of cases."""
    parser = CommandParser(prog="python -m faults", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--only", metavar="A,B", help=f"Some of {', '.join(CASES)} (default: all).")
    for name, least, default, about in (
        ("--kills", 1, 500, "Kills at random moments (default: %(default)s)."),
        (
            "--most",
            2,
            10**6,
            "Try N operations on files of each work at most, spread evenly (default: all).",
        ),
        ("--steps", 2000, 20_000, "Steps of the long run (default: %(default)s)."),
        ("--jobs", 1, 2, "How many at a time (default: %(default)s)."),
    ):
        add(name, type=whole_number(least), default=default, metavar="N", help=about)
    add("--json", type=new_file, metavar="FILE", help="Also write all to this file.")
    add(
        "--add",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="Rows of parts that ran before, as --json wrote them.",
    )
    add("--output", type=Path, metavar="FILE", help=f"Write the table between {BEGIN} and {END}.")
    about = "The working directory (default: a temporary directory)."
    add("--scratch", type=directory, metavar="DIR", help=about)
    given = parser.parse_args()
    given.only = given.only.split(",") if given.only else list(CASES)
    if unknown := set(given.only) - set(CASES):
        parser.error(f"{unknown.pop()!r} is none of {', '.join(CASES)}")
    if given.output is not None:
        report.check_marks(given.output, BEGIN, END)
    return given


if __name__ == "__main__":
    run(main)
