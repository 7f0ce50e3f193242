"""The files of each split of a labelled task: as the options name them, or by their names in a
directory."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.store import SPLIT_NAMES

from ..binarize import check_files
from .tables import extension, stem


def input_files(arguments: argparse.Namespace, endings: Sequence[str]) -> dict[str, list[Path]]:
    """split -> files, from the options --input, --train, --valid and --test.

    --train, --valid and --test replace what the directory --input holds. If --input is a file, its
    split is "". It can then be combined only with --test, and is divided into train and valid.

    Raises BadInput if a file is missing or empty, or there is none for training.
    """
    source: Path | None = arguments.input
    by_option = {name: getattr(arguments, name) for name in ("train", "valid", "test")}
    by_option = {name: paths for name, paths in by_option.items() if paths}
    if source is None and "train" not in by_option:
        raise BadInput("give --input FILE|DIR, or --train FILE")
    if source is None:
        files = by_option
    elif source.is_dir():
        files = find_splits(source, endings) | by_option
        used = [path for paths in files.values() for path in paths]
        others = (path for path in source.iterdir() if extension(path) in endings)
        if unread := sorted(path.name for path in others if path not in used):
            shown = ", ".join(unread[:5]) + (", ..." if len(unread) > 5 else "")
            say(f"note: not read, because they name no split: {shown}", error=True)
        if "train" not in files:
            raise BadInput(f"{source} holds no training file (train{', train'.join(endings)})")
    elif other := next((name for name in by_option if name != "test"), ""):
        raise BadInput(
            f"--{other} cannot be combined with --input {source}, which is a file; "
            f"give it as --train {source}"
        )
    else:
        files = {"": [source]} | by_option
    for paths in files.values():
        check_files(paths)
    return {name: files[name] for name in ("", "train", "valid", "test") if name in files}


def refuse_splits(source: Path, names: Iterable[str]) -> None:
    """Raise BadInput if a class, which a file or directory is named after, is a split's name."""
    for name in names:
        if SPLIT_NAMES.keys() & re.split(r"[-_. ]", name.lower()):
            raise BadInput(
                f"{source}: {name} would be a class, but it is named after a split; give the files "
                "of each split by themselves, or rename it"
            )


def find_splits(
    directory: Path, endings: Sequence[str], names: dict[str, str] = SPLIT_NAMES
) -> dict[str, list[Path]]:
    """split -> its files in a directory. `names` says which split a word stands for.

    The files are those named after a split (`train.tsv`, `dev.tsv`). If there is no such training
    file, they are those whose names end in a split (`sts-train.csv`), or in the number of a part
    (`validation-00000-of-00001.parquet`). Hidden files are ignored.

    Raises BadInput if two files could be the same split, a part is missing, or the files have
    several formats.
    """
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory")
    files = [
        p
        for p in sorted(directory.iterdir())
        if p.is_file() and extension(p) in endings and not p.name.startswith(".")
    ]
    words = "|".join(names)
    by_name = rf"({words})"
    by_last_word = rf"(?:.*[-_.])?({words})(?:-\d+-of-(\d+)(?:-[0-9a-f]+)?)?"
    splits = _match_splits(directory, files, by_name, names)
    splits = splits or _match_splits(directory, files, by_last_word, names)
    every = [path for paths in splits.values() for path in paths]
    if len({extension(path) for path in every}) > 1:
        shown = ", ".join(path.name for path in every)
        raise BadInput(f"{directory} holds files in several formats, {shown}; keep one format")
    return splits


def _match_splits(
    directory: Path, files: Sequence[Path], pattern: str, names: dict[str, str]
) -> dict[str, list[Path]]:
    """split -> the files whose names match `pattern`. Empty if none of them is for training.

    The first group of the regular expression is the split. A second group, if there is one, is the
    number of parts. Raises BadInput if two files could be the same split, or a part is missing.
    """
    splits: dict[str, list[Path]] = {}
    parts: dict[str, int] = {}  # split -> files that it should have; 0 if its name does not say
    for path in files:
        match = re.fullmatch(pattern, stem(path), re.IGNORECASE)
        if match is None:
            continue
        split = names[match[1].lower()]
        total = int(match[2]) if match.lastindex == 2 else 0
        earlier = splits.setdefault(split, [])
        if earlier and not (total and total == parts[split]):
            raise BadInput(
                f"{directory} holds both {earlier[0].name} and {path.name}: which is {split}? "
                "Keep one of them"
            )
        parts[split] = total
        earlier.append(path)
    if "train" not in splits:
        return {}
    for split, paths in splits.items():
        if parts[split] not in (0, len(paths)):
            raise BadInput(f"{directory} holds {len(paths)} of the {parts[split]} files of {split}")
    return splits
