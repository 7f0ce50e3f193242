"""Java source without its comments, as Chiang and Lee 2020, section 3, pre-train on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ..bad import BadRows
from ..binarize import not_utf8, open_binary

# One token that may contain quotes or slashes. Everything between two such tokens is plain code.
_TOKEN = re.compile(
    r'''
    """[ \t\f]*[\r\n] (?: [^"\\]++ | \\. | "(?!"") )*+ """     # a text block
    | "(?!""[ \t\f]*[\r\n]) (?: [^"\\\r\n]++ | \\[^\r\n] )*+ "  # a string
    | ' (?: [^'\\\r\n]++ | \\[^\r\n] )*+ '                      # a character
    | (?P<comment> //[^\r\n]* | /\*.*?\*/ )
    | (?P<open> """ | ["'] | /\* )                              # a start whose end is missing
    ''',
    re.VERBOSE | re.DOTALL,
)
_OPEN = {"/*": "a comment", '"""': "a text block", '"': "a string", "'": "a character"}

# Java reads \u0022 as a quote, but not after another backslash.
_ESCAPE = re.compile(r"\\(?:\\|u+([0-9a-fA-F]{4}))")
_MATTERS = re.compile(r"\\u+00(?:2[27aAfF]|5[cC]|0[aAdD])")  # " ' * / \ and line ends


class Unterminated(Exception):
    """A comment, string or character literal is never closed.

    `what` names its kind, and `start` is the index of the character at which it begins.
    """

    def __init__(self, what: str, start: int):
        super().__init__(what)
        self.what, self.start = what, start


def remove_comments(text: str) -> str:
    r"""Remove the comments from Java source and change nothing else.

    Text that looks like a comment stays if it is within a string, a text block or a character
    literal. Lines that held only comments are removed. A block comment between code becomes a
    space, so that the words on both sides stay separate. Unicode escapes are interpreted (a comment
    may begin with \u002f) and kept as they are written. Raises Unterminated.
    """
    # Marks the place of a removed comment: one of Unicode's noncharacters.
    mark = next(m for m in map(chr, range(0xFDD0, 0xFDF0)) if m not in text)
    parts, end = [], 0
    for start, stop in _comments(text):
        parts.append(text[end:start])
        end = stop
    if not end:
        return text
    marked = mark.join([*parts, text[end:]])
    marked = re.sub(rf"(?m)^[ \t\f{mark}]*{mark}[ \t\f{mark}]*(?:\r?\n|\Z)", "", marked)
    marked = re.sub(rf"[ \t\f{mark}]*{mark}[ \t\f{mark}]*(?=[\r\n]|\Z)", "", marked)
    return marked.replace(mark, " ")


def _comments(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of every comment."""
    place: Callable[[int], int] = int
    if _MATTERS.search(text):
        text, places = _unescape(text)
        place = places.__getitem__
    for match in _TOKEN.finditer(text):
        if match["open"]:
            raise Unterminated(_OPEN[match["open"]], place(match.start()))
        if match["comment"]:
            yield place(match.start()), place(match.end())


def _unescape(text: str) -> tuple[str, list[int]]:
    """The text as Java reads it, and the index in the file of each of its characters."""
    parts: list[str] = []
    places: list[int] = []
    end = 0
    for match in _ESCAPE.finditer(text):
        if match[1]:
            parts += [text[end : match.start()], chr(int(match[1], 16))]
            places += range(end, match.start() + 1)
            end = match.end()
    return "".join([*parts, text[end:]]), [*places, *range(end, len(text) + 1)]


def read_java(path: Path, bad: BadRows, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield a Java file, without its comments, as one document. Memory holds one file.

    A file that is not UTF-8, or leaves a comment or string unclosed, goes to `bad`. `advance`
    is called with the size of each block read from the disk.
    """
    with open_binary(path, advance) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
        yield remove_comments(text)
    except UnicodeDecodeError as error:
        bad(path, data.count(b"\n", 0, error.start) + 1, not_utf8(error))
    except Unterminated as error:
        line = text.count("\n", 0, error.start) + 1
        bad(path, line, f"{error.what} that begins here is never closed")
