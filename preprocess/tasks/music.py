"""Music -> pitches (Kao & Lee 2021, section 2.2 and appendix G.4): who composed a piece?

A piece is the pitches of its notes (0 to 127) in order of onset, without drums. Notes that begin
together are ordered from low to high. A piece is cut into segments of 128 notes; the last may be
shorter. Each segment is a row. The rows of a piece are one `group`: evaluation takes a vote of
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.data import vocabularies
from xformer.data.arguments import whole_number
from xformer.data.errors import BadInput, lacks

from ..bad import BadRows
from ..binarize import check_files
from . import splits
from .source import Row, TaskSource
from .split_files import refuse_splits
from .tables import RowTable, extension

ABOUT = "Composers of MIDI pieces: MAESTRO's csv or json, or one directory per composer."
MIDI = (".mid", ".midi")
TABLES = (".csv", ".json")
COMPOSER_COLUMN, MIDI_COLUMN = "canonical_composer", "midi_filename"


class Piece(NamedTuple):
    """A MIDI file. `file` and `line` are where a table names it, for messages."""

    path: Path
    name: str
    composer: str
    split: str
    file: Path
    line: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `music/maestro`."""
    for option, name, holds in (
        ("--composer", COMPOSER_COLUMN, "composer"),
        ("--midi", MIDI_COLUMN, "MIDI file, relative to the table"),
    ):
        parser.add_argument(
            option,
            metavar="COLUMN",
            default=argparse.SUPPRESS,  # so that a store records it only if it is given
            help=f"The column of a table that names the {holds} (default: {name}).",
        )
    parser.add_argument(
        "--segment",
        type=whole_number(1),
        default=128,
        metavar="N",
        help="The maximum number of notes per row (default: %(default)s).",
    )


def read(arguments: argparse.Namespace) -> TaskSource:
    """The pieces of MAESTRO's directory or table, or of a directory with one per composer.

    Raises BadInput if --input is none of these. Its rows raise BadInput naming a file that is
    missing or not MIDI, unless bad rows are skipped.
    """
    source: Path | None = arguments.input
    if source is None or arguments.train or arguments.valid or arguments.test:
        raise BadInput(
            "the table of pieces names the splits; give --input FILE|DIR and none of --train, "
            "--valid and --test"
        )
    bad = BadRows(arguments.skip_bad)
    table = table_of(source) if source.is_dir() else source
    if table is not None and extension(table) not in TABLES:
        raise BadInput(
            f"{table} is not a table of pieces; give maestro*.csv or .json, or a directory"
        )
    used = set[str]()
    if table is None:
        splits.refuse_columns(arguments.split_column, source)
        pieces = _by_directory(source)
    else:
        given = vars(arguments)
        columns = [given.get("composer", COMPOSER_COLUMN), given.get("midi", MIDI_COLUMN)]
        pieces = _maestro(table, columns, arguments.split_column, bad, used)
    if not pieces:
        bad.report()
        raise BadInput(f"{source} names no piece")
    return TaskSource(
        rows=lambda: segment_rows(pieces, arguments.segment, bad),
        files=[*([table] if table else []), *(p.path for p in pieces if p.path.is_file())],
        kind="class",
        metric="accuracy",
        columns={"text": "pitches", "text_b": None, "label": "composer"},
        bad=bad,
        tokenizer=vocabularies.symbols(map(str, range(128)), separated=True),
        split_columns=used,
    )


def table_of(directory: Path) -> Path | None:
    """MAESTRO's table of pieces in a directory; None if there is none."""
    files = [path for path in sorted(directory.glob("maestro*")) if extension(path) in TABLES]
    return min(files, key=extension, default=None)  # csv before json


def _maestro(
    path: Path, columns: list[str], split_column: str | None, bad: BadRows, used: set[str]
) -> list[Piece]:
    """The pieces of MAESTRO's table: csv, or json (a list of pieces in version 1, an object of
    columns in later versions). `columns` name the composer and the MIDI file. `used` gathers the
    columns that name splits.
    """
    check_files([path])
    table = RowTable(path)
    for name, option in zip(columns, ("--composer", "--midi"), strict=True):
        if name not in table.columns:
            raise BadInput(f"{table.missing(name)}; {option} names another")
    pieces = []
    marks = splits.find(table, split_column, columns, "", used)
    for split, line, values in marks.rows(table, columns, bad):
        composer, name = (value or "" for value in values)
        composer = composer.strip()
        if not composer or not name:
            bad(path, line, "the composer or the name of the MIDI file is empty")
        else:
            pieces.append(Piece(path.parent / name, name, composer, split, path, line))
    return pieces


def refuse_foreign_names(names: Sequence[Path]) -> None:
    """Raise BadInput if the name of a file is not UTF-8, as in old archives."""
    for name in names:
        try:
            str(name).encode()
        except UnicodeEncodeError:
            raise BadInput(f"the file name {str(name)!a} is not UTF-8; rename the file") from None


def _by_directory(directory: Path) -> list[Piece]:
    """The pieces of a directory that holds one directory per composer. They have no split."""
    files = sorted(
        p
        for p in directory.glob("*/**/*")
        if p.suffix.lower() in MIDI and not p.name.startswith(".")
    )
    if not files:
        raise BadInput(
            f"{directory} holds neither maestro*.csv or .json nor a directory per composer with "
            "MIDI files"
        )
    names = [path.relative_to(directory) for path in files]
    refuse_foreign_names(names)
    refuse_splits(directory, dict.fromkeys(name.parts[0] for name in names))
    return [
        Piece(path, str(name), name.parts[0], "", path, 1)
        for path, name in zip(files, names, strict=True)
    ]


def segment_rows(pieces: list[Piece], segment: int, bad: BadRows) -> Iterator[Row]:
    """A row for each segment of each piece. A piece that cannot be read goes to `bad`."""
    for piece in pieces:
        try:
            notes = pitches(piece.path)
        except ValueError as error:
            name = "" if piece.file == piece.path else f"{piece.name}: "
            bad(piece.file, piece.line, f"{name}{error}")
            continue
        whole = " ".join(map(str, notes))  # the key: copies of a piece stay in one split
        for start in range(0, len(notes), segment):
            text = " ".join(map(str, notes[start : start + segment]))
            name = f"{piece.name}:{start // segment}"
            yield Row(
                piece.split,
                (text,),
                piece.composer,
                piece.file,
                piece.line,
                name,
                piece.name,
                whole,
            )


def pitches(path: Path) -> list[int]:
    """The pitches of a MIDI file's notes, in order of onset, then pitch, without drums.

    Raises ValueError that says what is wrong with the file.
    """
    try:
        from symusic import Score
    except ImportError:
        raise lacks("MIDI", "symusic", "formats") from None
    if not path.is_file():
        raise ValueError("there is no such file")
    try:
        # bytes, because for a path the library also looks at the ending
        score: Any = Score.from_midi(path.read_bytes(), ttype="tick")
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"not a MIDI file ({str(error).splitlines()[0]})") from None
    notes = [track.notes.numpy() for track in score.tracks if not track.is_drum and track.notes]
    if not notes:
        raise ValueError("it has no notes other than drums")
    onset = np.concatenate([track["time"] for track in notes])
    pitch = np.concatenate([track["pitch"] for track in notes])
    return pitch[np.lexsort((pitch, onset))].tolist()
