"""The errors a command may end with, each one clear line for the user."""

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


def reason(error: Exception) -> str:
    """What went wrong, for a line of ours: the system's words and the file, without a number."""
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    return f"{os.strerror(error.errno)}{where}"
