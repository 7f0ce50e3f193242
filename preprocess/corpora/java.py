"""Java source without its comments (Chiang and Lee 2020, section 3, pre-train on such code)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ..bad import BadRows
from ..binarize import not_utf8, open_binary

# one token that may hold quotes or slashes; what stands between two of them is plain code
_TOKEN = re.compile(
    r'''
    """[ \t\f]*[\r\n] (?: [^"\\]++ | \\. | "(?!"") )*+ """     # a text block
    | "(?!""[ \t\f]*[\r\n]) (?: [^"\\\r\n]++ | \\[^\r\n] )*+ "  # a string
    | ' (?: [^'\\\r\n]++ | \\[^\r\n] )*+ '                      # a character
    | (?P<comment> //[^\r\n]* | /\*.*?\*/ )
    | (?P<open> """ | ["'] | /\* )                              # one of them without its end
    ''',
    re.VERBOSE | re.DOTALL,
)
_OPEN = {"/*": "a comment", '"""': "a text block", '"': "a string", "'": "a character"}

# Java reads \u0022 as a quote; two backslashes are none of it
_ESCAPE = re.compile(r"\\(?:\\|u+([0-9a-fA-F]{4}))")
_MATTERS = re.compile(r"\\u+00(?:2[27aAfF]|5[cC]|0[aAdD])")  # " ' * / \ and line ends


class Unterminated(Exception):
    """A comment, string or character without its end: what, and the character it begins at."""

    def __init__(self, what: str, start: int):
        super().__init__(what)
        self.what, self.start = what, start


def remove_comments(text: str) -> str:
    r"""Java source without comments, all else as it was.

    What looks like a comment within a string, a text block or a character stays. Lines on which
    there was nothing but comments are gone; a block comment between code leaves a space, as two
    words it parts must stay two. Unicode escapes count as the characters they stand for (a comment
    may begin with \u002f) and stay as they are written. Raises Unterminated.
    """
    mark = next(m for m in map(chr, range(0xFDD0, 0xFDF0)) if m not in text)  # no character
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
    """(start, end) of every comment."""
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
    """The text as Java reads it, and for each of its places the place in the file."""
    parts: list[str] = []
    places: list[int] = []
    end = 0
    for match in _ESCAPE.finditer(text):
        if match[1]:
            parts += [text[end : match.start()], chr(int(match[1], 16))]
            places += range(end, match.start() + 1)
            end = match.end()
    return "".join([*parts, text[end:]]), [*places, *range(end, len(text) + 1)]


def read_java(
    path: Path, bad: BadRows, read: Callable[[int], None] = lambda _: None
) -> Iterator[str]:
    """The one document that a Java file is; none if it goes to `bad` (not UTF-8, a comment or
    string without its end). Memory holds one file."""
    with open_binary(path, read) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
        yield remove_comments(text)
    except UnicodeDecodeError as error:
        bad(path, data.count(b"\n", 0, error.start) + 1, not_utf8(error))
    except Unterminated as error:
        line = text.count("\n", 0, error.start) + 1
        bad(path, line, f"{error.what} that begins here has no end")
