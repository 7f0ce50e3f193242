"""Run commands as a user types them, but in this process: importing takes longer than their
work.
"""

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
    """Run a command and return what it prints. Raises BadInput and Failure as the command does."""
    out, handler = io.StringIO(), signal.getsignal(signal.SIGTERM)
    arguments = [command, *map(str, words)]
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.dict(os.environ),
        # with small files it takes half the time, and no file here must survive a crash
        mock.patch("os.fsync"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            import_module(MAINS[command]).main()
        except SystemExit as end:
            if end.code:  # --help sets no code
                raise
        finally:
            signal.signal(signal.SIGTERM, handler)
    return out.getvalue()
