"""Apply operations to the weights of a checkpoint and write the result as a new checkpoint.

    python -m xformer.surgery CHECKPOINT OUT reverse_layers
    python -m xformer.surgery CHECKPOINT OUT 'keep_layers(first=6)' 'shuffle_embeddings(seed=1)'

An operation is a name, or name(argument=value, ...) in quotes. The operations are applied in the
order given and recorded in the history of the new checkpoint, which `python -m xformer.convert
inspect` shows.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NoReturn

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.config import show, type_name, wrapped
from xformer.data.display import say
from xformer.data.errors import BadInput, typed
from xformer.start import run
from xformer.surgery.registry import FUNCTIONS, SCHEMAS, apply, parse_operation, split_docstring

PROGRAM = "python -m xformer.surgery"
CHECKPOINT = "The checkpoint to read, or a finished run, whose selected checkpoint is read."
SEED = "Seed of the operations that take a seed and are given none (default: 0)."


class SurgeryParser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {typed(PROGRAM)} --help")


def main() -> None:
    """`python -m xformer.surgery CHECKPOINT OUT OPERATION ...`"""
    began = time.perf_counter()
    parser = SurgeryParser(
        prog=typed(PROGRAM),
        description=typed(__doc__ or ""),
        epilog="\n".join(["operations:", *(line for name in SCHEMAS for line in help_lines(name))]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument("out", metavar="OUT", type=Path, help="The checkpoint to write.")
    parser.add_argument(
        "operations", metavar="OPERATION", nargs="+", help="The operations to apply, in order."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=SEED)
    about = "Replace OUT if it is a checkpoint (default: refuse)."
    parser.add_argument("--overwrite", action="store_true", help=about)
    arguments = parser.parse_args()
    if not 0 <= arguments.seed < 2**63:
        raise BadInput(f"--seed {arguments.seed} is not allowed; give a number from 0 to 2**63 - 1")
    steps = [parse_operation(text) for text in arguments.operations]
    read = [checkpoints.resolve(arguments.checkpoint)]
    read += [Path(step.arguments["source"]) for step in steps if step.op == "transplant"]
    checkpoints.check_output(arguments.out, arguments.overwrite, *read)
    with checkpoints.opened(read[0]) as (before, check):
        after = apply(before, steps, arguments.seed)
        checkpoints.save(after, arguments.out, arguments.overwrite, check=check)
    for record in after.history[len(before.history) :]:
        values = [f"{key}={value}" for key, value in record.items() if key != "op"]
        say(" ".join([record["op"], *values]))
    say(f"{arguments.out}: {summary(before, after)}, {time.perf_counter() - began:.2f} s")


def summary(before: Checkpoint, after: Checkpoint) -> str:
    """How many parameters and new weights a checkpoint has, in one line."""
    old = {id(weight) for weight in before.weights.values()}
    new = sum(id(weight) not in old for weight in after.weights.values())
    parameters = sum(weight.numel() for weight in after.weights.values())
    return f"{parameters:,} parameters, {new} of {len(after.weights)} weights new"


def help_lines(name: str) -> list[str]:
    """The help of an operation: its call, its description, then each argument with type, default
    and sentence."""
    fields = {key: field for key, field in SCHEMAS[name].model_fields.items() if key != "op"}
    lines = ["", f"  {name}({', '.join(fields)})" if fields else f"  {name}"]
    for paragraph in split_docstring(FUNCTIONS[name])[0].split("\n\n"):
        lines += wrapped(paragraph, 6)
    for key, field in fields.items():
        default = " (required)"
        if not field.is_required():
            default = " (optional)" if field.default is None else f" = {show(field.default)}"
        lines += wrapped(f"{key}: {type_name(field.annotation)}{default}. {field.description}", 6)
    return lines


if __name__ == "__main__":
    run(main)
