"""What the process that forks a study's works imports before it forks; nothing else imports this.

It must have one thread and no state of a device when it forks, so nothing here computes anything.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from importlib import import_module

from xformer.start import share_cores

# by name: a study builds on none of them, its works do
WANTED = (
    "xformer.train",
    "xformer.evaluate",
    "xformer.analysis.subcommand",
    "xformer.convert.hf",
    "xformer.preprocess.cli",
    "xformer.preprocess.tasks.predict",
    # what these import late
    "scipy.stats",
    "sklearn.metrics",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
    "torch._dynamo",  # by the first optimizer, 1.5 s
)

# a signal to all processes of a study is not for this one: it ends with the last of its works
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
share_cores()
for name in WANTED:
    with suppress(Exception):  # a work that needs it says in its log what is wrong
        import_module(name)
