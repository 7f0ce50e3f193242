"""`join`: make one store of several without copying their tokens.

The new store has the tokenizer, and a `store.json` with the key of each store and its path relative
to the new store. Readers open the stores in this order. They refuse a store that is missing, or
that holds other rows than when it was joined.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import atomic_directory, write_json
from xformer.data.joined import open_stores
from xformer.data.outputs import check_directory
from xformer.data.store import JOINED, Store
from xformer.data.writing import write_sums

from .arguments import add_output, command_origin

ABOUT = "Make one store of several without copying their tokens."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `join`."""
    parser.add_argument(
        "stores",
        type=Path,
        nargs="+",
        metavar="STORE",
        help="The stores, in the order of their rows. Those that `text --part` made may be in any "
        "order, but none may be missing. The new store refers to them by their relative paths, so "
        "keep them, and move all of them together.",
    )
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Join stores."""
    check_directory(arguments.output, arguments.overwrite, ("store.json",))
    opened = [open_stores(path) for path in arguments.stores]
    alone = iter(in_order([store for store in opened if store.parts == [store]]))
    # what was joined before, perhaps a single store, stays together
    listed = [[next(alone)] if store.parts == [store] else store.parts for store in opened]
    stores = [part for parts in listed for part in parts]
    output = arguments.output.resolve()
    for path in [store.path.resolve() for store in (*opened, *stores)]:
        if output.is_relative_to(path):
            where = "is one of the stores" if output == path else f"lies inside the store {path}"
            raise BadInput(f"--output {arguments.output} {where}; give another")
    joined = open_stores([store.path for store in stores])
    splits = [joined.split(name) for name in joined.splits]
    meta = {
        "format": JOINED,
        "parts": [
            {"path": relative(store.path, arguments.output), "key": store.key} for store in stores
        ],
        "kind": joined.kind,
        "metric": joined.metric,
        "splits": {s.name: {"rows": s.rows, "tokens": s.tokens} for s in splits},
        "origin": command_origin(),
    }
    with atomic_directory(arguments.output, arguments.overwrite) as directory:
        joined.tokenizer().save(directory)
        write_json(directory / "store.json", meta)
        write_sums(directory)
    sizes = "; ".join(f"{s.name} {s.rows:,} rows, {s.tokens:,} tokens" for s in splits)
    say(f"{arguments.output}: {len(stores)} stores; {sizes}")


def relative(path: Path, start: Path) -> str:
    """The relative path from the directory `start` to a path. Symbolic links are followed only if
    `start` lies behind one, so that ".." would lead elsewhere."""
    text, origin = os.path.relpath(path, start), start.resolve()
    if (origin / text).resolve() == path.resolve():
        return text
    return os.path.relpath(path.resolve(), origin)


def in_order(stores: Sequence[Store]) -> list[Store]:
    """Stores that `text --part` made, in the order of their numbers; other stores as given. Raises
    BadInput if a part is missing or given twice, or if some are not parts of the same store."""
    records: list[dict[str, Any] | None] = [store.meta["origin"].get("part") for store in stores]
    if not any(records):
        return list(stores)
    numbered: dict[int, Store] = {}
    sums: dict[str, str] = {}  # of the input files, by their number in the whole input
    first, its_input = next((s, r["input"]) for s, r in zip(stores, records, strict=True) if r)
    for store, record in zip(stores, records, strict=True):
        if record is None:
            raise BadInput(
                f"{first.name} was made with --part, {store.name} was not: join the parts alone, "
                'or read both in training with data=["A", "B"]'
            )
        if record["input"] != its_input:
            raise BadInput(
                f"{first.name} and {store.name} are not parts of one store: they differ in their "
                "input files, tokenizer, options, number of parts or version of xformer"
            )
        # earlier versions recorded no `sums`
        for (number, expected), source in zip(
            record.get("sums", {}).items(), store.meta["origin"]["sources"], strict=False
        ):
            if sums.setdefault(number, expected) != expected:
                raise BadInput(
                    f"{source['file']} has changed between the parts; make all of them again"
                )
        other = numbered.setdefault(record["number"], store)
        if other is not store:
            raise BadInput(f"{other.name} and {store.name} are the same part; give one of them")
    wanted = next(record["of"] for record in records if record)
    if missing := [str(n) for n in range(1, wanted + 1) if n not in numbered]:
        raise BadInput(
            f"of the {wanted} parts, these are missing: {', '.join(missing)}; give all of them"
        )
    return [numbered[number] for number in sorted(numbered)]
