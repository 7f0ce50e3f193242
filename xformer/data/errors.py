"""One clear line for the user: the errors a command may end with, and all printing."""

from __future__ import annotations

import errno
import os
import re
import sys

# what a disk, a path or the rights to it may be at fault for, and no bug
OF_THE_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.EFBIG,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
)
# how a checkout writes our commands, and how the command `xformer` does
SPELLINGS = (
    (r"\b(torchrun [^\n]*?)(?<![\w/.])(train|evaluate)\.py\b", r"\1-m xformer.\2"),
    (r"(?<![\w/.])(?:python )?(preprocess|train|evaluate)\.py\b", r"xformer \1"),
    (r"\bpython -m xformer\.analysis(?![\w.])", "xformer analyze"),
    (r"\bpython -m xformer\.(convert|surgery|study)(?![\w.])", r"xformer \1"),
    (r"\brecipes/([\w-]+/[\w-]+)\.toml\b", r"\1"),
)
# what `pip` calls this project; the name `xformer` on the package index is another project's
DISTRIBUTION = "xformer-transfer"


def typed(text: str) -> str:
    """A help text or a hint, with our commands as this user types them.

    Such texts are written for a checkout: `python train.py`, `python -m xformer.convert`. Whoever
    started the command `xformer` reads `xformer train`, `xformer convert`. The command has put
    "xformer NAME" into sys.argv[0].
    """
    if sys.argv[0].startswith("xformer "):
        for checkout, command in SPELLINGS:
            text = re.sub(checkout, command, text)
    return text


class BadInput(Exception):
    """The user's input is wrong: the message names it and what would be right. Exit status 2."""

    status = 2


class Failure(Exception):
    """The input was right and the work failed (no space left, a process died). Exit status 1."""

    status = 1


class Interrupted(Exception):
    """Stopped by a signal after everything was saved. Exit status 128 + the signal's number."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.status = 128 + signal_number


def lacks(what: str, package: str, extra: str) -> BadInput:
    """The error for `what` that cannot be done without an optional package."""
    return BadInput(
        f"{what} needs the package {package}, which is in {DISTRIBUTION}[{extra}]: "
        f"pip install {package}"
    )


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


def reason(error: Exception) -> str:
    """What went wrong, for a line of ours: the system's words and the file, without a number."""
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    return f"{os.strerror(error.errno)}{where}"
