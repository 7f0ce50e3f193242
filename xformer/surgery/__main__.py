"""Operations on the weights of a checkpoint.

python -m xformer.surgery CHECKPOINT OUT reverse_layers
python -m xformer.surgery CHECKPOINT OUT 'keep_layers(first=6)' 'shuffle_embeddings(seed=1)'
"""

from __future__ import annotations

import argparse
import time
from inspect import getdoc
from pathlib import Path
from typing import NoReturn

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.config import show, type_name, wrapped
from xformer.data.display import say
from xformer.data.errors import BadInput, typed
from xformer.start import run
from xformer.surgery.operations import CLASSES, Transplant, apply, parse

PROGRAM = "python -m xformer.surgery"
ABOUT = """Operate on the weights of a checkpoint and write another. The operations are done in the
order given and kept in the new checkpoint's history, which `python -m xformer.convert inspect`
shows. An operation is its name, or name(argument=value, ...) in quotes."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {typed(PROGRAM)} --help")


def main() -> None:
    """`python -m xformer.surgery CHECKPOINT OUT OPERATION ...`"""
    began = time.perf_counter()
    parser = Parser(
        prog=typed(PROGRAM),
        description=typed(ABOUT),
        epilog="\n".join(["operations:", *(line for name in CLASSES for line in explain(name))]),
        formatter_class=_Help,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="A checkpoint, or a finished run, of which the selected checkpoint is "
        "taken. It stays as it is.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="The checkpoint to write.")
    parser.add_argument("operations", metavar="OPERATION", nargs="+", help="What to do, in order.")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="The seed of operations that draw and name none, from 0 (default: 0).",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="Replace OUT if it is a checkpoint (default: refuse).",
    )
    arguments = parser.parse_args()
    if not 0 <= arguments.seed < 2**63:
        raise BadInput(f"--seed {arguments.seed} is not allowed; give 0 or more")
    operations = [parse(text) for text in arguments.operations]
    read = [checkpoints.resolve(arguments.checkpoint)]
    read += [Path(o.source) for o in operations if isinstance(o, Transplant)]
    checkpoints.check_output(arguments.out, arguments.overwrite, *read)
    with checkpoints.opened(read[0]) as (before, check):
        after = apply(before, operations, arguments.seed)
        checkpoints.save(after, arguments.out, arguments.overwrite, check=check)
    for record in after.history[len(before.history) :]:
        say(" ".join(f"{k}={v}" if k != "op" else str(v) for k, v in record.items()))
    say(f"{arguments.out}: {account(before, after)}, {time.perf_counter() - began:.2f} s")


def account(before: Checkpoint, after: Checkpoint) -> str:
    """What became of the weights, in a line."""
    kept = {id(weight) for weight in before.weights.values()}
    new = sum(id(weight) not in kept for weight in after.weights.values())
    parameters = sum(weight.numel() for weight in after.weights.values())
    count = len(after.weights)
    return f"{parameters:,} parameters, {new} of {count} weights new"


def explain(name: str) -> list[str]:
    """An operation, then each of its arguments with type, default and sentence."""
    fields = {key: field for key, field in CLASSES[name].model_fields.items() if key != "op"}
    lines = ["", f"  {name}({', '.join(fields)})" if fields else f"  {name}"]
    lines += wrapped(getdoc(CLASSES[name]), 6)
    for key, field in fields.items():
        default = " (required)"
        if not field.is_required():
            default = " (optional)" if field.default is None else f" = {show(field.default)}"
        lines += wrapped(f"{key}: {type_name(field.annotation)}{default}. {field.description}", 6)
    return lines


class _Help(argparse.HelpFormatter):
    """Wraps all but the epilog, whose lines are made."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("operations:") else super()._fill_text(text, width, indent)


if __name__ == "__main__":
    run(main)
