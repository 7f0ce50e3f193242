"""The reports of a run: `log.jsonl`, TensorBoard, and a progress bar on a terminal or plain lines
elsewhere. TensorBoard's curves show the numbers in log.jsonl. Only rank 0 reports.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xformer.config import flat, show
from xformer.data.display import Progress, format_number, say
from xformer.data.errors import BadInput, Failure, Interrupted, reason
from xformer.data.files import write_bytes

# The events at the end of a log. A run that continues removes them.
ENDS = ("end", "stopped", "failed")
# the events with curves, and the split of their losses and scores
SPLITS = {"train": "train", "validation": "valid"}
# The names of curves. TensorBoard sorts them, so that the losses come first. All other numbers of
# these events are scores.
CURVES = {
    "loss": "loss/{split}",
    "real_tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "memory_gib": "system/memory_gib",
    "grad_norm": "training/grad_norm",
    "lr": "training/lr",
    "dropped": "training/dropped_updates",
}
SILENT = {"event", "step", "time", "epoch"}  # fields without a curve


class Monitor:
    """Logs the events of a run; a context manager. The run continues from `step` (see cut_log).

    The progress bar shows `done` of `total` units, which are steps or samples. If `active` is
    false, all methods do nothing.
    """

    def __init__(self, run: Path, active: bool, step: int, done: int, total: int, unit: str):
        self.run, self.active = run, active
        self.refused, self.drawing = False, True  # used to report a full disk only once
        self.first, self.step = step + 1, max(step, 0)  # `step` is the newest finished step
        self.starts: list[dict[str, Any]] = []
        if not active:
            return
        self.path = run / "log.jsonl"
        self.file = self.path.open("ab", buffering=0)
        self.unwritten = b""
        self.board = Board(run / "tensorboard", self.first)
        if self.board.empty:
            for record in records(run):
                self._on_board(partial(self._draw, record))
        # until the first line of the log, a slow run prints its own lines of progress
        self.progress = Progress("training", total, f"{unit}s", done, stay=True)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self.active:
            return
        if isinstance(error, Interrupted):
            self.event("stopped", self.step)
        elif error is not None:
            why = reason(error) if isinstance(error, Exception) else ""
            self.event("failed", self.step, why=why or type(error).__name__)
        self.progress.close()
        self._on_board(self.board.close)
        self._write()
        self.file.close()
        if not self.drawing and error is None:  # the run may never be started again
            self.drawing = True
            self._on_board(self._draw_anew)
        if self.unwritten and error is None:
            raise Failure(f"the end of {self.path} could not be written; make room on the disk")

    def describe(self, starts: list[dict[str, Any]]) -> None:
        """Show the sizes, settings and versions of a run on TensorBoard's text page. `starts` is
        the entry `starts` of config.json. Each start that changed something has a text, at its
        first step. Call this after the event "start"."""
        if self.active:
            self.starts = starts
            self._on_board(lambda: self._draw_starts(0 if self.board.empty else self.first))

    def advance(self, done: int) -> None:
        """Move the bar to `done`."""
        if self.active:
            self.progress.advance(done - self.progress.done)

    def say(self, *lines: str) -> None:
        """Print lines on standard error. They are not part of the log."""
        if self.active:
            say(*lines, error=True)

    def event(self, event: str, step: int, **values: Any) -> None:
        """Log an event, and show it on the progress bar or print it as a line. The numbers of
        training and validation also become points on TensorBoard's curves."""
        if not self.active:
            return
        record = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        self.unwritten += json.dumps(record).encode() + b"\n"
        self._write()
        self._on_board(lambda: self._draw(record))
        short = {
            "tokens/s" if name == "real_tokens_per_second" else name: value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        self.progress.lines = self.progress.lines and event != "train"
        if event == "train" and self.progress.bar is not None:
            self.progress.advance(0, **{name: short[name] for name in ("loss", "tokens/s", "lr")})
        elif short:
            line = "  ".join(f"{name} {format_number(value)}" for name, value in short.items())
            split = values.get("split", "valid" if event == "validation" else "")
            split = f"{split}  " if split else ""
            state = f"  {self.progress.state()}" if event == "train" else ""
            self.say(f"{event:<10} step {step:>6}  {split}{line}{state}")

    def _write(self) -> None:
        """Write the pending lines of the log. If writing fails, they stay pending."""
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) or 0 :]
            self.refused = False
        except OSError as error:
            if not self.refused:
                self.say(f"{reason(error)}: {self.path} will be written later")
            self.refused = True

    def _on_board(self, draw: Callable[[], None]) -> None:
        """Call `draw`. After a failure nothing more is drawn. At the end of the run, or when it is
        started again, all curves are drawn again from the log."""
        if not self.drawing:
            return
        try:
            draw()
        except (OSError, BadInput) as error:  # BadInput if the log is gone
            self.drawing = False
            shutil.rmtree(self.run / "tensorboard", ignore_errors=True)
            self.say(
                f"{reason(error)}: TensorBoard's curves end here; they will be redrawn from the log"
            )

    def _draw_anew(self) -> None:
        """Draw all curves from the log."""
        self.board = Board(self.run / "tensorboard", 0)
        for record in records(self.run):
            self._draw(record)
        self._draw_starts(0)
        self.board.close()

    def _draw(self, record: dict[str, Any]) -> None:
        if points := curves(record):
            self.board.numbers(record["step"], record["time"], points)

    def _draw_starts(self, least: int) -> None:
        """Show the starts whose first step is at least `least`. The first start of a run counts as
        step 0."""
        steps = [start["step"] and start["step"] + 1 for start in self.starts]
        if max(steps, default=-1) >= least:
            begun = next((r for r in records(self.run) if r["event"] == "start"), {})
            for step, start in zip(steps, self.starts, strict=True):
                if step >= least:
                    self.board.text("start", _start_text(start, begun), step)


def curves(record: dict[str, Any]) -> dict[str, int | float]:
    """The points that an event of the log adds to TensorBoard's curves, by the name of the
    curve."""
    if record["event"] == "trouble":
        record = {"event": "train", "dropped": record.get("dropped")}
    if record["event"] not in SPLITS:
        return {}
    return {
        CURVES.get(name, f"score/{name}/{{split}}").format(split=SPLITS[record["event"]]): value
        for name, value in record.items()
        if name not in SILENT and isinstance(value, int | float)
    }


def _start_text(start: dict[str, Any], begun: dict[str, Any]) -> str:
    """A start in Markdown: the numbers of the event "start", all settings, and the versions."""
    numbers = [
        f"{name} {value:,}"
        for name, value in begun.items()
        if name not in SILENT and isinstance(value, int)
    ]
    config = flat(start["config"])
    if config.get("init"):  # the shape is the checkpoint's, and the recipe may not know it
        config = {k: v for k, v in config.items() if not k.startswith("model.") or "dropout" in k}
    settings, versions = (
        "\n".join(f"{name} = {show(value)}" for name, value in part.items() if value is not None)
        for part in (config, flat(start["environment"]))
    )
    return f"{', '.join(numbers)}\n\n```\n{settings}\n```\n\n```\n{versions}\n```"


class Board:
    """A new file of TensorBoard events in a directory, for the steps from `step` on. The file tells
    TensorBoard to discard these steps from older files.

    It contains one event for each line of the log that has curves. torch's SummaryWriter would
    write one event for each number, would need ten times as long for each event, and takes seconds
    to import.
    """

    def __init__(self, directory: Path, step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        names = re.compile(r"events\.out\.tfevents\.(\d+)\.curves")  # not those of older versions
        files = [int(n[1]) for p in directory.glob("*") if (n := names.fullmatch(p.name))]
        self.empty = not files
        if self.empty:
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(exist_ok=True)
        number = max(time.time_ns(), max(files, default=0) + 1)  # TensorBoard reads files by name
        name = f"events.out.tfevents.{number}.curves"
        self.writer, self.event = RecordWriter((directory / name).open("wb")), Event
        self._write(file_version="brain.Event:2")
        if files:
            self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        fields = {"wall_time": time.time(), **fields}
        self.writer.write(self.event(**fields).SerializeToString())
        self.writer.flush()

    def numbers(self, step: int, clock: float, numbers: dict[str, int | float]) -> None:
        """Add a point to the curve of each name. `clock` is the time in seconds since 1970."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(step=step, wall_time=clock, summary=Summary(value=values))

    def text(self, name: str, content: str, step: int) -> None:
        """Add a text in Markdown to TensorBoard's text page."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        tensor = TensorProto(dtype="DT_STRING", string_val=[content.encode()])
        value = Summary.Value(
            tag=f"{name}/text_summary", tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin)
        )
        self._write(step=step, summary=Summary(value=[value]))

    def close(self) -> None:
        self.writer.close()


def records(run: str | Path) -> list[dict[str, Any]]:
    """The events of a run's log, in order. Lines that are not events are left out, such as an
    incomplete last line of a run that was killed. Raises BadInput if there is no log."""
    path = Path(run) / "log.jsonl"
    if not path.is_file():
        raise BadInput(f"{path} does not exist; give the directory of a run")
    lines = path.read_bytes().split(b"\n")
    return [record for line in lines if (record := _record(line)) is not None]


def events(run: str | Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run's log, in order; none if there is no log yet."""
    every = records(run) if (Path(run) / "log.jsonl").is_file() else []
    return [record for record in every if record["event"] == kind]


def _record(line: bytes) -> dict[str, Any] | None:
    """The event in a line of a log, or None if the line is not an event."""
    try:
        record = json.loads(line)
        whole = isinstance(record["event"], str) and isinstance(record["step"], int)
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return record if whole else None


def cut_log(run: Path, step: int, logged: int = 0) -> str:
    """Remove the events after `step`, and those in ENDS, from the log of a run that restarts.

    Returns a line about damage, or "". If lines up to `step` cannot be read, a copy of the damaged
    log is kept. An incomplete last line does not count as damage, because a killed run can leave
    one. The log is flushed before a checkpoint is written. So an incomplete line belongs to a step
    after the checkpoint, and this step will be repeated, unless the log has lost the line of the
    step `logged`.
    """
    path = run / "log.jsonl"
    content = path.read_bytes() if path.exists() else b""
    *lines, torn = content.split(b"\n")
    good, broken, last = [], [], 0
    for number, line in enumerate([*lines, torn] if _record(torn) else lines, 1):
        record = _record(line)
        if record is None:
            broken.append(str(number))
        elif record["step"] > step:
            break
        elif record["event"] not in ENDS:
            last = max(last, record["step"] if record["event"] == "train" else 0)
            good.append(json.dumps(record) + "\n")
    damage = ""
    if broken:
        copy = _copy_aside(path, content)
        more = f" and {len(broken) - 10} more" if broken[10:] else ""
        what = f"line {broken[0]} cannot be read and is"
        if broken[1:]:
            what = f"lines {', '.join(broken[:10])}{more} cannot be read and are"
        damage = f"{path} is damaged: {what} left out; the damaged log is kept as {copy}"
    elif last < logged:
        damage = f"{path} is incomplete: its lines after step {last} up to step {logged} are lost"
    write_bytes(path, "".join(good).encode())
    return damage


def _copy_aside(path: Path, content: bytes) -> str:
    """Write the content of a damaged log to a file next to it, and return the name of the copy."""
    for number in range(1, 1000):
        copy = path.with_name(f"{path.name}.damaged{f'.{number}' if number > 1 else ''}")
        if copy.exists() and copy.read_bytes() == content:  # an earlier start wrote this copy
            return copy.name
        if not copy.exists():
            write_bytes(copy, content)
            return copy.name
    raise Failure(f"{path} is damaged, and there are 999 damaged logs next to it: delete some")


def peak_memory(device: torch.device) -> float:
    """The peak memory in GiB: that of CUDA's allocator, or on a CPU the resident memory of this
    process (0 if the system does not tell)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
    # Here getrusage would also count the memory of the process that started this one. VmHWM is the
    # peak; a system that lacks it tells the present value, VmRSS.
    told = re.search(r"Vm(?:HWM|RSS):\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(told[1]) / 2**20 if told else 0.0
