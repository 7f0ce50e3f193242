"""The environment of processes that run this copy of the package."""

from __future__ import annotations

import os

from xformer import provenance


def first_on_path() -> str:
    """PYTHONPATH for a child process, in which this copy of the package comes first. It may lie in
    a directory that only this process searches, such as its working directory."""
    return os.pathsep.join(filter(None, (str(provenance.ROOT), os.environ.get("PYTHONPATH", ""))))


def same_code() -> dict[str, str]:
    """Environment variables with which a child process, and its children, import this copy of the
    package. `python -m` and `python -c` search the working directory first, which may hold another
    copy, such as a checkout; with PYTHONSAFEPATH they do not search it."""
    return {"PYTHONPATH": first_on_path(), "PYTHONSAFEPATH": "1"}
