"""FASTA records: a line with ">" and a name, then the lines of a sequence."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path

from xformer.data.errors import BadInput

from ..bad import STRICT, BadRows
from ..binarize import not_utf8, open_binary

FASTA = (".fasta", ".fas", ".fa", ".faa", ".fna", ".ffn")  # the endings of its files' names
FASTA_LETTERS = string.ascii_uppercase + "*"  # amino acids, ambiguity codes, and * for stop

_SPACE = string.whitespace.encode()


def read_fasta(
    path: Path,
    bad: BadRows = STRICT,
    advance: Callable[[int], None] = lambda _: None,
    letters: str = FASTA_LETTERS,
) -> Iterator[tuple[int, str, str]]:
    """Yield (line number of the header, header without ">", sequence) of every record.

    White space is dropped from sequences, and letters are made upper case. The file may be
    compressed (see `open_binary`). Memory holds one record. A record goes to `bad` (default: raises
    BadInput) if it has no sequence, bytes that are not UTF-8, or characters other than `letters`.
    (Chiang and Lee 2020, section 3, use A to Z.) Raises BadInput naming file and line if there is
    text before the first header. `advance` is called with the size of each block read from the
    disk.
    """
    start, header, good, parts = 0, "", True, list[bytes]()
    with open_binary(path, advance) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.startswith(b">"):
                if start and _has_sequence(path, start, good, parts, bad):
                    yield start, header, b"".join(parts).decode()
                start, good, parts = number, True, []
                try:
                    header = line[1:].decode().strip()
                except UnicodeDecodeError as error:
                    bad(path, number, not_utf8(error))
                    good = False
            elif start == 0 and line.strip():
                raise BadInput(
                    f"{path}:{number}: text before the first header; begin each record with a line "
                    "`>name`, or give a file that is not FASTA another ending"
                )
            elif good:
                parts.append(line.translate(None, _SPACE).upper())
                good = _is_sequence(path, number, parts[-1], letters, bad)
    if start == 0:
        raise BadInput(f"{path} holds no FASTA record (a line `>name`, then a sequence)")
    if _has_sequence(path, start, good, parts, bad):
        yield start, header, b"".join(parts).decode()


def _has_sequence(path: Path, line: int, good: bool, parts: list[bytes], bad: BadRows) -> bool:
    if good and not any(parts):
        bad(path, line, "a record without a sequence")
        return False
    return good


def _is_sequence(path: Path, line: int, part: bytes, letters: str, bad: BadRows) -> bool:
    wrong = part.translate(None, letters.encode())
    if not wrong:
        return True
    try:
        shown = letters.replace(string.ascii_uppercase, "A to Z ").replace(string.digits, " 0 to 9")
        bad(path, line, f"{wrong.decode()[0]!r} is not a letter of a sequence ({shown})")
    except UnicodeDecodeError as error:
        bad(path, line, not_utf8(error))
    return False
