"""The commands as a user types them, in this process: an import costs more than the work here."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

MAINS = {
    "preprocess": "xformer.preprocess.cli",
    "convert": "xformer.convert.__main__",
    "surgery": "xformer.surgery.__main__",
}


def run(command: str, *words: str | Path) -> str:
    """Run a command; what it prints. Raises BadInput and Failure as it does."""
    out, handler = io.StringIO(), signal.getsignal(signal.SIGTERM)
    arguments = [command, *map(str, words)]
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.dict(os.environ),
        mock.patch("os.fsync"),  # half the time of small files; nothing here outlives a crash
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            import_module(MAINS[command]).main()
        except SystemExit as end:
            if end.code:  # --help has none
                raise
        finally:
            signal.signal(signal.SIGTERM, handler)
    return out.getvalue()
