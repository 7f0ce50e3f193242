"""The errors that end a command. The user sees the message of each as one line."""

from __future__ import annotations

import errno
import os
import re
import sys

# error numbers that are caused by the disk, a path or its permissions, not by a bug
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
# how the commands are typed in a checkout -> how they are typed with the command `xformer`
SPELLINGS = (
    (r"\b(torchrun [^\n]*?)(?<![\w/.])(train|evaluate)\.py\b", r"\1-m xformer.\2"),
    (r"(?<![\w/.])(?:python )?(preprocess|train|evaluate)\.py\b", r"xformer \1"),
    (r"\bpython -m xformer\.analysis(?![\w.])", "xformer analyze"),
    (r"\bpython -m xformer\.(convert|encode|runs|surgery|study)(?![\w.])", r"xformer \1"),
    (r"\brecipes/([\w-]+/[\w-]+)\.toml\b", r"\1"),
)
# the name for `pip`; on the package index the name `xformer` belongs to another project
DISTRIBUTION = "xformer-transfer"


def typed(text: str) -> str:
    """A help text or a hint, with the project's commands spelt as this user types them.

    The code spells commands as in a checkout: `python train.py`, `python -m xformer.convert`. A
    user of the command `xformer` sees `xformer train` and `xformer convert` instead. That command
    puts "xformer NAME" into sys.argv[0].
    """
    if sys.argv[0].startswith("xformer "):
        for checkout, command in SPELLINGS:
            text = re.sub(checkout, command, text)
    return text


class _Told(Exception):
    """An error whose message says everything."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class BadInput(_Told):
    """The user's input is wrong; the message says what is wrong and how to correct it, in a line
    for each mistake. Exit status 2."""

    status = 2

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))
        self.lines = lines


class Failure(_Told):
    """The input is right but the work failed (no space left, a process died). Exit status 1."""

    status = 1


class Interrupted(_Told):
    """A signal stopped the work after everything was saved. Exit status 128 + signal number."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.status = 128 + signal_number


def lacks(what: str, package: str, extra: str) -> BadInput:
    """The error for a feature, `what`, whose optional package is not installed."""
    return BadInput(
        f"{what} needs the package {package}, which is in {DISTRIBUTION}[{extra}]: "
        f"pip install {package}"
    )


def reason(error: Exception) -> str:
    """An error's text for a message: for a system error, its description and file, without its
    number."""
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    return f"{os.strerror(error.errno)}{where}"
