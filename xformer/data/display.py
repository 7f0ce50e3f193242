"""All printing: every line of a command goes through here and is escaped."""

from __future__ import annotations

import sys


def one_line(text: str, most: int = 2000) -> str:
    """The text as one escaped line. Of a text above `most` characters the middle is left out."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return escaped(text)


def escaped(text: str) -> str:
    """The text with every character escaped that could steer a terminal or begin another line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(*lines: str, error: bool = False) -> None:
    """Print lines to standard output, or to standard error with `error`.

    All printing goes through here, because names and data of the user may hold anything: each
    argument is escaped and stays one line.
    """
    for line in lines:
        print(escaped(line), file=sys.stderr if error else sys.stdout, flush=True)


def put(text: str) -> None:
    """Write data to standard output. It is escaped only if a terminal shows it."""
    if sys.stdout.isatty():
        lines = text.split("\n")
        text = "\n".join("\t".join(map(escaped, line.split("\t"))) for line in lines)
    sys.stdout.write(text)
    sys.stdout.flush()
