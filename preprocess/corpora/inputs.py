"""The input files of a corpus: found in files, directories and globs, each with its format."""

from __future__ import annotations

import argparse
import glob
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from xformer.data.display import say
from xformer.data.errors import BadInput

from ..binarize import PACKED, check_files, unpacked_name
from .fasta import FASTA

FORMATS = ("text", "jsonl", "table", "java", "fasta")
# .json, .csv, .tsv and .parquet often hold no text, so they are not taken from a directory.
CORPUS_ENDINGS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".java": "java",
    **dict.fromkeys(FASTA, "fasta"),
}
TABLES = {".csv": "table", ".tsv": "table", ".parquet": "table"}
FORMAT_OF_ENDING = {**CORPUS_ENDINGS, ".json": "jsonl", **TABLES}


def format_of(path: Path) -> str:
    """The format given by the ending of a file's name: plain text if the ending is unknown."""
    return FORMAT_OF_ENDING.get(unpacked_name(path).suffix.lower(), "text")


def find_files(arguments: Sequence[str], form: str | None = None) -> list[Path]:
    """The files named by command-line arguments, in the order of the arguments, sorted within each.

    An argument is a file, a directory or a glob, in which `**` matches any folders. A directory
    gives all its files with known extensions, or all its files if their format `form` is given. It
    is searched recursively, without hidden files and links to folders. Empty files from directories
    and globs are left out. The number of files left out is printed on standard error. Raises
    BadInput for an argument that gives no file.
    """
    files: list[Path] = []
    for argument in arguments:
        if os.path.isdir(argument):
            files += _in_directory(Path(argument), form)
        elif not os.path.exists(argument) and glob.has_magic(argument):
            matches = [Path(name) for name in sorted(glob.glob(argument, recursive=True))]
            matches = _with_content(argument, [path for path in matches if path.is_file()])
            if not matches:
                raise BadInput(f"{argument} matches no non-empty file; check the pattern")
            files += matches
        else:
            files.append(Path(argument))
    check_files(files)
    return files


def _in_directory(directory: Path, form: str | None) -> list[Path]:
    files: list[Path] = []
    skipped: Counter[str] = Counter()
    for folder, folders, names in os.walk(directory, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # not followed: they may lead back, or to files that are found without them
        skipped.update("linked folder" for name in folders if Path(folder, name).is_symlink())
        for path in (Path(folder, name) for name in names):
            ending = unpacked_name(path).suffix.lower()
            if path.name.startswith(".") or not path.is_file():
                skipped["hidden" if path.name.startswith(".") else "not a file"] += 1
            elif form or ending in CORPUS_ENDINGS:
                files.append(path)
            else:
                skipped[ending or "no ending"] += 1
    kinds = [f"{count} {ending}" for ending, count in skipped.most_common(5)]
    if skipped:
        more = ", ..." if len(skipped) > 5 else ""
        note = f"{directory}: {skipped.total():,} entries left out ({', '.join(kinds)}{more})"
        say(note, error=True)
    files = _with_content(str(directory), sorted(files))
    if not files:
        endings = " ".join(CORPUS_ENDINGS)
        raise BadInput(
            f"{directory} holds no non-empty file with a known extension ({endings}, each also "
            f"with {' or '.join(PACKED)}); name other files by a glob, such as "
            f"'{directory}/**/*.md'"
        )
    return files


def _unreadable(error: OSError) -> None:
    raise error


def _with_content(argument: str, paths: list[Path]) -> list[Path]:
    full = [path for path in paths if path.stat().st_size]
    if len(full) < len(paths):
        empty = len(paths) - len(full)
        say(f"{argument}: {empty:,} empty files left out", error=True)
    return full


def check_distinct(splits: dict[str, list[Path]]) -> None:
    """Raise BadInput naming a file that is given twice, in one split or in two."""
    seen: dict[tuple[int, int], tuple[str, Path]] = {}
    plain: dict[Path, Path] = {}
    for split, paths in splits.items():
        for path in paths:
            status = path.stat()
            known = seen.setdefault((status.st_dev, status.st_ino), (split, path))
            if known[0] != split:
                raise BadInput(
                    f"{path} is in both {known[0]} and {split}: a held-out file must not be "
                    "trained on; give different files"
                )
            if known[1] is not path:
                raise BadInput(f"{path} is given twice for {split}; give it once")
            twin = plain.setdefault(unpacked_name(path), path)
            if twin is not path:
                raise BadInput(
                    f"{twin} and {path} have the same name apart from compression; give only one"
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how files are read."""
    add = parser.add_argument
    add(
        "--format",
        choices=FORMATS,
        help="The format of all files. text: plain text. jsonl: a document is the text in one "
        "field of an object; there is one object a line, or one object or array in a .json file. "
        "table: a document is the text in one column of a row; the first line names the columns. "
        "java: a document is a file without its comments. fasta: a document is the sequence of a "
        "record. (Default: by each file's extension; plain text unless it is .jsonl, .ndjson, "
        ".json, .csv, .tsv, .parquet, .java, "
        f"{', '.join(FASTA[:-1])} or {FASTA[-1]}. Any file but .parquet may be compressed: .gz, "
        ".zst.)",
    )
    add(
        "--field",
        default="text",
        metavar="NAME",
        help="The field of a JSON object, or the column of a table, that holds the text. `a.b` is "
        "the field `b` inside the field `a`, which holds an object or a list of objects "
        "(default: %(default)s).",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="Leave out and count JSON lines, FASTA records, Java files and lines of text that "
        "cannot be read (default: stop at the first one).",
    )


def first_names(paths: Iterable[Path]) -> str:
    """The first three paths for a message, and how many more there are."""
    paths = list(paths)
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more
