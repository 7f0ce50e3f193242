"""Apply operations to the weights of a checkpoint and write the result as a new checkpoint.

    python -m xformer.surgery CHECKPOINT OUT reverse_layers
    python -m xformer.surgery CHECKPOINT OUT 'keep_layers(first=6)' 'shuffle_embeddings(seed=1)'

An operation is a name, or name(argument=value, ...) in quotes. The operations are applied in the
order given. The history of the new checkpoint records them: `python -m xformer.convert inspect`
shows it.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import chain
from pathlib import Path

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.config import type_and_default, wrapped
from xformer.data.arguments import CommandParser, add_checkpoint, add_out, whole_number
from xformer.data.display import say
from xformer.data.errors import BadInput, typed
from xformer.data.files import PACKAGE
from xformer.data.outputs import check_directory
from xformer.start import run
from xformer.surgery.registry import (
    OPERATIONS,
    Registered,
    apply,
    in_words,
    parse_operation,
    split_docstring,
)

SEED = "Seed of every operation that takes a seed but is not given one (default: 0)."


def main() -> None:
    """`python -m xformer.surgery CHECKPOINT OUT OPERATION ...`"""
    began = time.perf_counter()
    arguments = make_parser().parse_args()
    steps = [parse_operation(text) for text in arguments.operations]
    out = Path(os.path.relpath(arguments.out))
    if out.parent == Path("micro") and (PACKAGE / out).is_dir():
        raise BadInput(
            f"{arguments.out} is the name of a checkpoint that comes with the package, which the "
            "new one would hide; give another output"
        )
    read = [checkpoints.resolve(arguments.checkpoint)]
    read += [Path(step.arguments["source"]) for step in steps if step.op == "transplant"]
    check_directory(arguments.out, arguments.overwrite, ("manifest.json",), *read)
    before = checkpoints.load(read[0])
    after = apply(before, steps, arguments.seed)
    checkpoints.save(after, arguments.out, arguments.overwrite)
    for record in after.history[len(before.history) :]:
        values = [f"{key}={value}" for key, value in record.items() if key != "op"]
        say(f"{' '.join([record['op'], *values])} ({in_words(record['op'])})")
    say(f"{arguments.out}: {summary(before, after)}, {time.perf_counter() - began:.2f} s")


def make_parser() -> CommandParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog=typed("python -m xformer.surgery"),
        description=typed(__doc__ or ""),
        epilog="\n".join(["operations:", *chain(*map(help_lines, OPERATIONS.values()))]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_checkpoint(parser)
    add_out(parser, "The checkpoint to write.")
    parser.add_argument(
        "operations", metavar="OPERATION", nargs="+", help="The operations to apply, in order."
    )
    parser.add_argument(
        "--seed", type=whole_number(0, 2**63 - 1), default=0, metavar="N", help=SEED
    )
    return parser


def summary(before: Checkpoint, after: Checkpoint) -> str:
    """How many parameters and weights a checkpoint has, how many of these weights have values that
    no weight had before, and which parts other than layers were left out, in one line."""
    old = {id(weight) for weight in before.weights.values()}
    new = sum(id(weight) not in old for weight in after.weights.values())
    parameters = sum(weight.numel() for weight in after.weights.values())
    count = f"{new} of them" if new < len(after.weights) else "all of them"
    line = f"{parameters:,} parameters, {len(after.weights)} weights, {count} with new values"
    first, last = ({name.split(".")[0] for name in c.weights} for c in (before, after))
    gone = f", without {' and '.join(sorted(first - last))}" if first - last else ""
    return line + gone


def help_lines(known: Registered) -> list[str]:
    """The help of an operation: its call, its description, then each argument with type, default
    and sentence."""
    fields = dict(known.schema.model_fields)
    name = fields.pop("op").default
    lines = ["", f"  {name}({', '.join(fields)})" if fields else f"  {name}"]
    for paragraph in split_docstring(known.function)[0].split("\n\n"):
        lines += wrapped(paragraph, 6)
    for key, field in fields.items():
        lines += wrapped(f"{key}: {type_and_default(field)}. {field.description}", 6)
    return lines


if __name__ == "__main__":
    run(main)
