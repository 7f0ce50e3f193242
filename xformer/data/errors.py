"""One clear line for the user: the errors a command may end with."""

from __future__ import annotations

import errno

# what a disk, a path or the rights to it may be at fault for, and no bug
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EFBIG,
               errno.ENAMETOOLONG)  # fmt: skip


# what `pip` calls this project; the name `xformer` on the package index is another project's
DISTRIBUTION = "xformer-transfer"


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
    """The text as one line of at most `most` characters that does nothing to a terminal: what
    names and data hold beside letters and signs is escaped, and a long middle is left out."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
