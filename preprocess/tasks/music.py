"""Music -> pitches (Kao & Lee 2021, section 2.2 and appendix G.4): who composed a piece?

A piece is the pitches of its notes (0 to 127) in order of their onset, the lower first where notes
begin together, without drums. It is cut into segments of 128 (the last may be shorter); each is a
row, and the rows of a piece are one `group`, over which evaluation votes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.data import vocabularies
from xformer.data.errors import BadInput, lacks

from ..arguments import whole_number as number
from ..bad import BadRows
from ..binarize import check_files
from . import splits
from .labelled import Row, Task
from .tables import Table, ending

ABOUT = "Composers of MIDI pieces: MAESTRO's csv or json with its files, or a directory a composer."
MIDI = (".mid", ".midi")
TABLES = (".csv", ".json")
COLUMNS = ["canonical_composer", "midi_filename"]


class Piece(NamedTuple):
    """One MIDI file; `file` and `line` say where it is named."""

    path: Path
    name: str
    composer: str
    split: str
    file: Path
    line: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `music/maestro`."""
    parser.add_argument(
        "--segment",
        type=number(1),
        default=128,
        metavar="N",
        help="Notes in a row at most (default: %(default)s).",
    )


def read(arguments: argparse.Namespace) -> Task:
    """The task of a MAESTRO directory or its table, or of a directory with one a composer.

    Raises BadInput where there is no such thing, or a piece is missing or is no MIDI file.
    """
    source: Path | None = arguments.input
    if source is None or arguments.train or arguments.valid or arguments.test:
        raise BadInput("the table of pieces names the splits; give --input FILE|DIR alone")
    bad = BadRows(arguments.skip_bad)
    table = table_of(source) if source.is_dir() else source
    if table is not None and ending(table) not in TABLES:
        raise BadInput(f"{table} is no table of pieces; give maestro*.csv or .json, or a directory")
    used = set[str]()
    if table is None:
        splits.refuse_columns(arguments.split_column, source)
        pieces = _by_directory(source)
    else:
        pieces = _maestro(table, arguments.split_column, bad, used)
    if not pieces:
        raise BadInput(f"{source} names no piece")
    return Task(
        rows=lambda: rows(pieces, arguments.segment, bad),
        files=[*([table] if table else []), *(p.path for p in pieces if p.path.is_file())],
        kind="class",
        metric="accuracy",
        columns={"text": "pitches", "text_b": None, "label": "composer"},
        bad=bad,
        tokenizer=vocabularies.symbols(map(str, range(128)), separated=True),
        split_columns=used,
    )


def table_of(directory: Path) -> Path | None:
    """MAESTRO's table of pieces in its directory."""
    files = [path for path in sorted(directory.glob("maestro*")) if ending(path) in TABLES]
    return min(files, key=ending, default=None)  # csv before json


def _maestro(path: Path, given: str | None, bad: BadRows, used: set[str]) -> list[Piece]:
    """The pieces of MAESTRO's csv, or json (a list of pieces in v1, an object of columns later)."""
    check_files([path])
    table = Table(path)
    for name in COLUMNS:
        if name not in table.columns:
            raise table.missing(name)
    pieces = []
    marks = splits.find(table, given, COLUMNS, "", used)
    for split, line, values in marks.rows(table, COLUMNS, bad):
        composer, name = (value or "" for value in values)
        if not composer or not name:
            bad(path, line, "the composer or the MIDI file is not named")
        else:
            pieces.append(Piece(path.parent / name, name, composer, split, path, line))
    return pieces


def _by_directory(directory: Path) -> list[Piece]:
    """The pieces of a directory with one for each composer; they have no split."""
    files = sorted(
        p
        for p in directory.glob("*/**/*")
        if p.suffix.lower() in MIDI and not p.name.startswith(".")
    )
    if not files:
        raise BadInput(
            f"{directory} holds neither maestro*.csv or .json nor a directory a composer with MIDI"
        )
    names = [path.relative_to(directory) for path in files]
    return [
        Piece(path, str(name), name.parts[0], "", path, 1)
        for path, name in zip(files, names, strict=True)
    ]


def rows(pieces: list[Piece], segment: int, bad: BadRows) -> Iterator[Row]:
    """The segments of every piece, each a row."""
    for piece in pieces:
        try:
            notes = pitches(piece.path)
        except ValueError as error:
            named = "" if piece.file == piece.path else f"{piece.name}: "
            bad(piece.file, piece.line, f"{named}{error}")
            continue
        whole = " ".join(map(str, notes))
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
    """The pitches of a MIDI file's notes in order of onset, then pitch; drums are left out.

    Raises ValueError saying what is wrong with the file.
    """
    try:
        from symusic import Score
    except ImportError:
        raise lacks("MIDI", "symusic", "formats") from None
    if not path.is_file():
        raise ValueError("there is no such file")
    try:
        score: Any = Score.from_midi(path.read_bytes(), ttype="tick")  # whatever its ending
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"not a MIDI file ({str(error).splitlines()[0]})") from None
    notes = [track.notes.numpy() for track in score.tracks if not track.is_drum and track.notes]
    if not notes:
        raise ValueError("there is no note in it")
    onset = np.concatenate([track["time"] for track in notes])
    pitch = np.concatenate([track["pitch"] for track in notes])
    return pitch[np.lexsort((pitch, onset))].tolist()
