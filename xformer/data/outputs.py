"""Where commands may write, and what they never replace."""

from __future__ import annotations

import os
from pathlib import Path

from xformer.data.errors import BadInput
from xformer.data.files import (
    RUN_FILES,
    RUN_FOLDERS,
    is_run,
    read_json,
    refuse_existing,
    refuse_tilde,
    what_is,
)

OWN = {*RUN_FOLDERS, *RUN_FILES}  # only the run itself writes these
# the files that mark a store, a checkpoint and a tokenizer, and their keys that list other files
LISTS = {"store.json": "splits", "manifest.json": "sha256", "tokenizer_meta.json": ""}
TOKENIZER = ("tokenizer.json", "tokenizer_meta.json", "spiece.model", "sums.json")


def check_writable(output: Path) -> None:
    """Raise BadInput if an output file cannot be written, or if it would replace a file of a run, a
    store, a checkpoint or a tokenizer."""
    refuse_tilde(output)
    folder = output.parent.resolve()
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise BadInput(
            f"{output} cannot be written: you may not write into {folder}; give another file"
        )
    if not folder.is_dir():
        raise BadInput(
            f"{output} cannot be written: {output.parent} is not a directory; make it first, or "
            "give another file"
        )
    refuse_owned(output)
    if output.is_dir():
        raise BadInput(f"{output} cannot be written: it is a directory; give a file")


def check_directory(out: Path, overwrite: bool, marks: tuple[str, ...], *read: Path) -> None:
    """Raise BadInput unless a command that reads the paths `read` may write the directory `out`.

    If `out` exists, `overwrite` must be true, and it must hold the files `marks`, which the command
    writes. It may be neither part of a run, a store or a checkpoint, nor contain what the command
    reads.
    """
    refuse_existing(out, overwrite)
    refuse_owned(out)
    if not out.exists():
        return
    if not all((out / name).is_file() for name in marks):
        raise BadInput(
            f"{out} was not written by this command, so it is not overwritten; give another output"
        )
    for path in read:
        if path.exists() and path.resolve().is_relative_to(out.resolve()):
            raise BadInput(f"{out} is or contains the input {path}; give another output")


def refuse_owned(output: Path) -> None:
    """Raise BadInput if this file or directory, or one that contains it, belongs to a run, a store,
    a checkpoint or a tokenizer. Other files may lie beside theirs. A link is followed."""
    output = output.resolve()
    for path, owner in zip((output, *output.parents), output.parents[:3], strict=False):
        if path.name in OWN and is_run(owner / "config.json"):
            raise BadInput(
                f"{output} cannot be written: only the run itself writes {path}; give another "
                "output"
            )
        if path.name in _names(owner):
            raise BadInput(
                f"{output} cannot be written: {path} belongs to {what_is(owner)}; give another "
                "output"
            )


def _names(folder: Path) -> set[str]:
    """What a store, a checkpoint or a tokenizer has in its directory."""
    names = set[str]()
    for mark, key in LISTS.items():
        if (folder / mark).is_file():
            content = read_json(folder / mark)
            listed = content.get(key) if isinstance(content, dict) else None
            names |= {mark, *TOKENIZER, *(listed if isinstance(listed, dict) else ())}
    return names
