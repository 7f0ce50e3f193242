"""The errors with which a command may end; each is one clear line for the user."""

from __future__ import annotations

import errno
import os
import re
import sys

# errors that come from the disk, a path or its permissions, not from a bug
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
    (r"\bpython -m xformer\.(convert|surgery|study)(?![\w.])", r"xformer \1"),
    (r"\brecipes/([\w-]+/[\w-]+)\.toml\b", r"\1"),
)
# the name for `pip`; on the package index the name `xformer` belongs to another project
DISTRIBUTION = "xformer-transfer"


def typed(text: str) -> str:
    """A help text or a hint, with the project's commands as this user types them.

    Such texts are written for a checkout: `python train.py`, `python -m xformer.convert`. A user of
    the command `xformer` is shown `xformer train`, `xformer convert` instead. That command puts
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
    """The input is right but the work failed (no space left, a process died). Exit status 1."""

    status = 1


class Interrupted(Exception):
    """A signal stopped the work after everything was saved. Exit status 128 + signal number."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.status = 128 + signal_number


def lacks(what: str, package: str, extra: str) -> BadInput:
    """The error for `what`, which cannot be done without an optional package."""
    return BadInput(
        f"{what} needs the package {package}, which is in {DISTRIBUTION}[{extra}]: "
        f"pip install {package}"
    )


def reason(error: Exception) -> str:
    """What went wrong, for a message: the system's words and the file, without an error number."""
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    return f"{os.strerror(error.errno)}{where}"
