"""What the sub-commands of `preprocess.py` share: argument types, options, checks made up front,
the record of the command line, and the summary at the end."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from xformer.data.display import say


def expression(text: str) -> re.Pattern[str]:
    """An argument type: a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def length_range(text: str) -> tuple[int, int]:
    """An argument type: LEAST:MOST, or a single length."""
    first, _, last = text.partition(":")
    try:
        least, most = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LEAST:MOST, such as 90:120") from None
    if not 1 <= least <= most <= 2**14:
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 <= LEAST <= MOST <= {2**14}")
    return least, most


def fraction(text: str) -> float:
    """An argument type: a number above 0 and below 1."""
    value = _number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def covered_share(text: str) -> float:
    """An argument type: a share of the characters of a text, as SentencePiece takes it."""
    value = _number(text)
    if not 0.98 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.98 and 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def part_number(text: str) -> tuple[int, int]:
    """An argument type: the number of a part and how many there are, such as 3/16."""
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second) <= 9999):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give PART/PARTS, such as 3/16, with PART from 1 to PARTS"
        )
    return int(first), int(second)


def no_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing, for a task without options of its own."""


def add_output(parser: argparse.ArgumentParser, placeholder: str) -> None:
    """Add `--output` and `--overwrite`. The help shows `placeholder` for the directory."""
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar=placeholder,
        help="The directory to write. It appears only once it is complete.",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="Replace the output if it exists (default: refuse).",
    )


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add --tokenizer."""
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="TOK",
        help="The directory of a tokenizer, a store or a checkpoint.",
    )


def add_skip_lines(parser: argparse.ArgumentParser) -> None:
    """Add --skip-lines."""
    parser.add_argument(
        "--skip-lines",
        type=expression,
        metavar="REGEX",
        help="Leave out lines that match this regular expression anywhere, such as "
        r"'^\[\d+\]' for footnotes. In plain text, only about the first 32,768 characters of a "
        "line are searched (default: keep all lines).",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="Also write the numbers to this file (default: only print them).",
    )


def command_origin() -> dict[str, Any]:
    """The record of where a store comes from: the command line as it was typed."""
    return {"command": ["preprocess.py", *sys.argv[1:]]}


def say_written(
    output: Path, splits: dict[str, dict[str, Any]], started: float, size: int = 0
) -> None:
    """Print one line that says what was written to `output`, and how fast.

    `started` is time.monotonic() at the start. The speed is in MB/s if `size`,
    the number of bytes read, is given, and otherwise in tokens a second.
    """
    seconds = max(time.monotonic() - started, 1e-9)
    parts = [
        f"{name} {split['rows']:,} rows, {split['tokens']:,} tokens"
        for name, split in splits.items()
    ]
    tokens = sum(split["tokens"] for split in splits.values())
    rate = (
        f"{size / 1e6 / seconds:.1f} MB/s" if size else f"{tokens / 1e6 / seconds:.1f} M tokens/s"
    )
    say(f"{output}: {'; '.join(parts)}; {seconds:.1f} s, {rate}")
