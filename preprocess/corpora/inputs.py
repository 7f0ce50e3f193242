"""Which files a corpus is made of: files, directories and globs, each with a format."""

from __future__ import annotations

import argparse
import glob
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from xformer.data.display import say
from xformer.data.errors import BadInput

from ..binarize import PACKED, check_files, plain_name

FORMATS = ("text", "jsonl", "java", "fasta")
# .json is often something else than text, so a directory's .json files are not taken
ENDINGS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".java": "java",
    ".fasta": "fasta",
    ".fa": "fasta",
    ".faa": "fasta",
}
NAMED = {**ENDINGS, ".json": "jsonl"}


def format_of(path: Path) -> str:
    """The format that a file's name tells: plain text unless its ending is another's."""
    return NAMED.get(plain_name(path).suffix.lower(), "text")


def find_files(given: Sequence[str], form: str | None = None) -> list[Path]:
    """The files that arguments stand for: in the order of the arguments, sorted within each.

    A directory gives its files with known endings, those of its folders included, hidden ones not
    (with a format `form`, files of any ending); a glob (`**` stands for folders) gives the files it
    matches. Empty files found so are left out. What is left out is counted on standard error.
    Raises BadInput for an argument that stands for no file.
    """
    files: list[Path] = []
    for argument in given:
        if os.path.isdir(argument):
            files += _in_directory(Path(argument), form)
        elif not os.path.exists(argument) and glob.has_magic(argument):
            found = [Path(name) for name in sorted(glob.glob(argument, recursive=True))]
            found = _with_content(argument, [path for path in found if path.is_file()])
            if not found:
                raise BadInput(f"{argument} matches no file with content")
            files += found
        else:
            check_files([Path(argument)])
            files.append(Path(argument))
    return files


def _in_directory(directory: Path, form: str | None) -> list[Path]:
    found: list[Path] = []
    skipped: Counter[str] = Counter()
    for folder, folders, names in os.walk(directory, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in names):
            ending = plain_name(path).suffix.lower()
            if path.name.startswith(".") or not path.is_file():
                skipped["hidden" if path.name.startswith(".") else "not a file"] += 1
            elif form or ending in ENDINGS:
                found.append(path)
            else:
                skipped[ending or "no ending"] += 1
    kinds = [f"{count} {ending}" for ending, count in skipped.most_common(5)]
    if skipped:
        more = ", ..." if len(skipped) > 5 else ""
        note = f"{directory}: {skipped.total():,} files left out ({', '.join(kinds)}{more})"
        say(note, error=True)
    found = _with_content(str(directory), sorted(found))
    if not found:
        endings = " ".join(ENDINGS)
        raise BadInput(
            f"{directory} holds no file with content and a known ending ({endings}, each also with "
            f"{' or '.join(PACKED)}); name other files by a glob, such as '{directory}/**/*.md'"
        )
    return found


def _unreadable(error: OSError) -> None:
    raise error


def _with_content(argument: str, paths: list[Path]) -> list[Path]:
    found = [path for path in paths if path.stat().st_size]
    if len(found) < len(paths):
        empty = len(paths) - len(found)
        say(f"{argument}: {empty:,} empty files left out", error=True)
    return found


def check_distinct(splits: dict[str, list[Path]]) -> None:
    """Raise BadInput naming a file that stands twice in a split, or in two of them."""
    seen: dict[tuple[int, int], tuple[str, Path]] = {}
    plain: dict[Path, Path] = {}
    for split, paths in splits.items():
        for path in paths:
            status = path.stat()
            known = seen.setdefault((status.st_dev, status.st_ino), (split, path))
            if known[0] != split:
                raise BadInput(
                    f"{path} is in both {known[0]} and {split}: what is held out must "
                    "not be trained on"
                )
            if known[1] is not path:
                raise BadInput(f"{path} is given twice for {split}")
            twin = plain.setdefault(plain_name(path), path)
            if twin is not path:
                raise BadInput(f"{twin} and {path} are one file, packed and not: give one of them")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how files are read."""
    add = parser.add_argument
    add(
        "--format",
        choices=FORMATS,
        help="How all files are read. jsonl: a document is the text "
        "in a field of an object, one object a line, or one array of them in a .json file. java: a "
        "document is a file without its comments. fasta: a document is a record's sequence. "
        "(Default: by each file's ending; plain text unless it is .jsonl, .ndjson, .json, .java, "
        ".fasta, .fa or .faa. Any file may be packed: .gz, .zst.)",
    )
    add(
        "--field",
        default="text",
        metavar="NAME",
        help="The field of a JSON object that holds the text (default: %(default)s).",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="Leave out and count JSON lines, FASTA records, "
        "Java files and lines of text that cannot be read (default: the first one ends the "
        "work).",
    )


def names(paths: Iterable[Path]) -> str:
    """The first paths, and how many more there are."""
    paths = list(paths)
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more
