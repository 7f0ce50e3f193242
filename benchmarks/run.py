"""Compare the speed of xformer with the Trainer of `transformers`: `make bench DATA=DIR`.

    python -m benchmarks.run --data DIR                     # all parts; prints the table
    python -m benchmarks.run --data DIR --output docs       # and writes it
    python -m benchmarks.run mixed tasks --data DIR --rounds 1
    python -m benchmarks.run --quick                        # smoke test: tiny model, random data

DIR holds english_wikipedia/train.txt, vocabs/bert-base-uncased.vocab.txt, glue/MRPC and glue/CoLA.

Ours is train.py as a user runs it; its speed is read from its log. Theirs is the Trainer, timed by
a callback. The ceiling is a step of nothing but matrix products and attention. Each of the three is
a separate process with all cores. They take turns: ours, theirs, the ceiling, and again. Only real
tokens are counted, and warm-up steps are left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import machine, parts, prepare, report
from benchmarks.bench import (
    FULL,
    PEERS,
    QUICK,
    Bench,
    Row,
    cores,
    directory,
    require,
    require_data,
    say,
)
from benchmarks.quick import make_data
from benchmarks.report import Measured
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.errors import BadInput
from xformer.data.files import read_json, write_json
from xformer.start import run

TABLE: dict[str, Callable[[Bench], list[Row]]] = {
    "mixed": parts.mixed,
    "full": parts.full,
    "tasks": parts.tasks,
    "evaluation": parts.evaluation,
    "whole": parts.whole,
    "batches": parts.batches,
    "start": parts.start,
}
FOOTNOTES: dict[str, Callable[[Bench], list[Row]]] = {"settings": parts.settings}
# also measured in bf16 if the processor has bf16 instructions
IN_BF16 = ("mixed", "full", "tasks", "evaluation", "whole", "settings")
# the page of a run with --quick starts with this
MADE_UP = "A smoke test with --quick, whose numbers mean nothing, on "


def main() -> None:
    """`python -m benchmarks.run [PART ...] --data DIR`"""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as place:
        folder = Path(place)
        if arguments.quick:
            arguments.data = make_data(folder / "data")
        size, threads = (QUICK, 1) if arguments.quick else (FULL, cores())
        bench = Bench(arguments.data.resolve(), folder, size, arguments.rounds, threads=threads)
        page = arguments.output / "benchmarks.json" if arguments.output else folder / "page.json"
        about = f"{MADE_UP if arguments.quick else ''}{machine.words()}"
        setup = {"machine": about, "versions": machine.versions()}
        kept = _kept(page, setup) if arguments.parts else []
        new = []
        for name in arguments.parts or [*TABLE, *FOOTNOTES]:
            new.append(measure(name, bench))
            kept = [*(part for part in kept if part.part != name), new[-1]]
            _write(page, setup, kept)  # so an interrupted run keeps its finished parts
        print("\n".join([*report.HEAD, *(report.line(row) for part in new for row in part.rows)]))


def _arguments() -> argparse.Namespace:
    """The command line. Raises BadInput if an argument is wrong, or a package is not installed."""
    arguments = _parser().parse_args()
    known = [*TABLE, *FOOTNOTES]
    if unknown := [part for part in arguments.parts if part not in known]:
        raise BadInput(f"unknown part {unknown[0]!r}; the parts are {', '.join(known)}")
    require(*PEERS)
    if arguments.data is None and not arguments.quick:
        wanted = f"a directory with {prepare.TEXT} and more, see --help"
        raise BadInput(f"--data DIR must be given: {wanted}")
    if not arguments.quick:
        require_data(arguments.data, prepare.TEXT, prepare.VOCABULARY, *prepare.TASKS.values())
    if arguments.output:
        _check_output(arguments.output, arguments.quick)
    return arguments


def _check_output(folder: Path, quick: bool) -> None:
    """Raise BadInput if the page has no place for the table, or has measured rows that `--quick`
    would replace."""
    page, rows = folder / "benchmarks.md", folder / "benchmarks.json"
    if page.exists():
        report.check_marks(page)
    if quick and rows.is_file() and not read_json(rows)["machine"].startswith(MADE_UP):
        raise BadInput(f"{rows} has measured rows, which --quick would replace; change --output")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"What to measure (default: all): {', '.join([*TABLE, *FOOTNOTES])}.",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="The directory of the raw data.")
    parser.add_argument(
        "--rounds",
        type=whole_number(1),
        default=3,
        metavar="N",
        help="How many times ours, theirs and the ceiling each run (default: %(default)s).",
    )
    parser.add_argument(
        "--output",
        type=directory,
        metavar="DIR",
        help="Write DIR/benchmarks.json and DIR/figures/, and replace the text between the two "
        "marks (HTML comments) in DIR/benchmarks.md (default: only print the table). If you name "
        "parts, the rows of the other parts stay.",
    )
    parser.add_argument(
        "--scratch",
        type=directory,
        metavar="DIR",
        help="The working directory; the part start needs 11 GB (default: a temporary directory).",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="A smoke test with random data and a tiny model. Its numbers mean nothing.",
    )
    return parser


def measure(name: str, bench: Bench) -> Measured:
    """The rows of a part, in every precision that the processor supports natively."""
    load, started = machine.load(), time.perf_counter()
    say(f"{name} (load {load:.1f})")
    part = {**TABLE, **FOOTNOTES}[name]
    rows = part(bench)
    if name in IN_BF16 and machine.has_bf16():
        folder = bench.folder / "bf16"
        folder.mkdir(exist_ok=True)
        rows += part(replace(bench, precision="bf16", folder=folder))
    say(f"{name}: {time.perf_counter() - started:.0f} s")
    return Measured(name, time.strftime("%Y-%m-%d"), load, rows)


def _kept(page: Path, setup: dict[str, str]) -> list[Measured]:
    """The parts that an earlier run measured."""
    return [
        Measured(part["part"], part["date"], part["load"], [Row(**row) for row in part["rows"]])
        for part in machine.earlier(page, setup)
    ]


def _write(page: Path, setup: dict[str, str], measured: list[Measured]) -> None:
    write_json(page, {**setup, "measured": [asdict(part) for part in measured]})
    order = [*TABLE, *FOOTNOTES]
    measured = sorted(measured, key=lambda part: order.index(part.part))
    table, footnotes = (
        [part for part in measured if part.part in names] for names in (TABLE, FOOTNOTES)
    )
    done = {part.part for part in measured}
    missing = [name for name in (*TABLE, *FOOTNOTES) if name not in done]
    text = report.section(**setup, measured=table, footnotes=footnotes, missing=missing)
    rows = [row for part in table for row in part.rows]
    if report.drawable(rows):
        report.draw(rows, page.parent / report.FIGURE)
    report.write(page.with_suffix(".md"), text)


if __name__ == "__main__":
    run(main)
