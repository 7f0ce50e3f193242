"""Import checkpoints of other libraries.

python -m xformer.convert from-hf HF_DIR OUT
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import NoReturn

from xformer.data.errors import BadInput, run


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see python -m xformer.convert --help")


def main() -> None:
    """`python -m xformer.convert COMMAND ...`"""
    parser = Parser(
        prog="python -m xformer.convert",
        description="Import checkpoints of other libraries.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    command = commands.add_parser(
        "from-hf",
        help="Import a Hugging Face BERT checkpoint.",
        description="Import a Hugging Face BERT: config.json, model.safetensors (or "
        "pytorch_model.bin, of which only tensors are read) and the WordPiece vocabulary. Every "
        "tensor is accounted for by name.",
    )
    command.add_argument("source", metavar="HF_DIR", type=Path, help="The directory to import.")
    command.add_argument("out", metavar="OUT", type=Path, help="The checkpoint to write.")
    command.add_argument("--overwrite", action="store_true", help="Replace OUT if it exists.")
    known = ["from-hf"]
    first = next((a for a in sys.argv[1:] if not a.startswith("-")), None)
    if first is not None and first not in known:
        near = difflib.get_close_matches(first, known, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there is {', '.join(known)}"
        raise BadInput(f"unknown command {first!r}{hint}")
    arguments = parser.parse_args()

    from xformer import checkpoint as checkpoints
    from xformer.convert import hf
    from xformer.data.files import refuse_existing

    refuse_existing(arguments.out, arguments.overwrite)
    imported = hf.from_hf(arguments.source)
    checkpoints.save(imported.checkpoint, arguments.out, arguments.overwrite)
    print(hf.account(imported))


if __name__ == "__main__":
    run(main)
