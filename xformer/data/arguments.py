"""Command lines made with argparse: one parser for all of them, and the arguments they share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from xformer.data.errors import BadInput

# an option -> the names that other programs use for it
SYNONYMS = {
    "--field": "column json_field text_column text_field",
    "--input": "corpus data file files train_file",
    "--label": "label_col label_column target target_column",
    "--max-question": "max_query_length max_question_length",
    "--max-tokens": "block_size length max_len max_length max_seq_length",
    "--output": "out output_dir",
    "--stride": "doc_stride",
    "--text": "column sentence text_col text_column",
    "--tokenizer": "model vocab vocabulary",
    "--workers": "jobs num_proc num_workers",
}


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line and suggests the nearest valid choice.

    A wrong command line raises BadInput. Options cannot be abbreviated. The parsed attribute
    `parser` is the parser of the sub-command.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self.set_defaults(parser=self)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            arguments.parser.error(f"unrecognized arguments: {unknown[0]}")
        return arguments

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in sys.argv if args is None else args:
            if "\0" in word:
                raise BadInput(f"{word!r} holds a NUL character; remove it")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            valid = re.sub(r"'", "", wrong[2])
            near = get_close_matches(wrong[1], valid.split(", "), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            where = message[: wrong.start()].removeprefix("argument ")
            raise BadInput(f"{where}{wrong[1]!r} is not one of {valid}{hint}")
        if wrong := re.match(r"unrecognized arguments: (\S+)", message):
            options = [option for action in self._actions for option in action.option_strings]
            typed = wrong[1].split("=")[0]
            own = typed.lstrip("-").replace("-", "_")
            same = [o for o, names in SYNONYMS.items() if o in options and own in names.split()]
            if near := same or get_close_matches(typed, options, 1, 0.5):
                raise BadInput(f"{message}; did you mean {near[0]}?")
        raise BadInput(f"{message}; see {self.prog} --help")


def whole_number(least: int, most: int = 2**62) -> Callable[[str], int]:
    """An argument type: a whole number from `least` to `most`. Digits may be grouped by `_` or
    `,`."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"{value} is not allowed; it must be {bound}")
        return value

    return parse


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the argument CHECKPOINT."""
    about = "The checkpoint to read, or a finished run, whose selected checkpoint is read."
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=about)


def add_out(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the argument OUT, a directory to write, and `--overwrite`."""
    parser.add_argument("out", metavar="OUT", type=Path, help=about)
    about = "Replace OUT if it exists (default: refuse)."
    parser.add_argument("--overwrite", action="store_true", help=about)
