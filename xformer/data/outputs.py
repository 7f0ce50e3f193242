"""Where commands may write, and what they never replace."""

from __future__ import annotations

from pathlib import Path

from xformer.data.errors import BadInput
from xformer.data.files import RUN_MANIFEST, read_json, refuse_existing, what_is

FOLDERS = ("checkpoints", "trajectory", "predictions", "tensorboard", "profile")
# the last one marks the directory as a run; earlier versions wrote dropped.json
FILES = (RUN_MANIFEST, "result.json", "log.jsonl", "dropped.json", "code.diff", "config.json")
OWN = {*FOLDERS, *FILES}  # what only a run itself writes into its directory


def is_run(config: Path) -> bool:
    """Whether this config.json belongs to a run. Checkpoints and other libraries also have files of
    this name."""
    if not config.exists():
        return False
    content = read_json(config)
    return isinstance(content, dict) and "identity" in content


def check_writable(output: Path) -> None:
    """Raise BadInput if an output file cannot be written, or would be a file of a run, or lie in a
    store, a checkpoint or a tokenizer."""
    folder = output.parent.resolve()
    if not folder.is_dir():
        raise BadInput(
            f"{output} cannot be written: {output.parent} is not a directory; make it first, or "
            "give another file"
        )
    _refuse_part_of_run(output)
    if (what := what_is(folder)) not in ("", "a run"):
        raise BadInput(f"{output} cannot be written: {folder} is {what}; give another file")
    if output.is_dir():
        raise BadInput(f"{output} cannot be written: it is a directory; give a file")


def check_directory(out: Path, overwrite: bool, marks: tuple[str, ...], *read: Path) -> None:
    """Raise BadInput unless a command that reads the paths `read` may write the directory `out`.

    If `out` exists, `overwrite` must be true, and it must hold the files `marks`, which the command
    writes. It may be neither part of a run nor contain what the command reads.
    """
    refuse_existing(out, overwrite)
    _refuse_part_of_run(out)
    if not out.exists():
        return
    if not all((out / name).is_file() for name in marks):
        raise BadInput(f"{out} was not written by this command, so it is not overwritten")
    for path in read:
        if path.exists() and path.resolve().is_relative_to(out.resolve()):
            raise BadInput(f"{out} contains the input {path}: give another output")


def _refuse_part_of_run(output: Path) -> None:
    """Raise BadInput if only a run itself writes this file or directory."""
    folder = output.parent.resolve()
    for run in (folder, *folder.parents[:2]):
        first = output.name if run == folder else folder.relative_to(run).parts[0]
        if first in OWN and is_run(run / "config.json"):
            raise BadInput(
                f"{output} cannot be written: only the run itself writes {run / first}; give "
                "another output"
            )
