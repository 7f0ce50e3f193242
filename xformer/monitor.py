"""What a run tells the world: `log.jsonl` (the truth), TensorBoard drawn from it, one progress bar
on a terminal, plain lines in a log. Only rank 0 speaks.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

SILENT = {"event", "step", "time", "epoch"}  # fields that are no curve


class Monitor:
    """Writes events of one run. The bar shows steps, or samples: `done` of `total` so far."""

    def __init__(self, run: Path, active: bool, done: int, total: int, unit: str):
        self.run, self.active = run, active
        if not active:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.path = run / "log.jsonl"
        self.file = self.path.open("a", encoding="utf-8")
        # drawn anew from the log, so that a restarted run has one clean curve
        shutil.rmtree(run / "tensorboard", ignore_errors=True)
        self.board = SummaryWriter(str(run / "tensorboard"))
        for line in self.path.read_text(encoding="utf-8").splitlines():
            self._draw(json.loads(line))
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(
            initial=done, total=total, unit=unit, disable=not self.terminal, dynamic_ncols=True
        )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        if self.active:
            self.bar.close()
            self.board.close()
            self.file.close()

    def text(self, name: str, content: str) -> None:
        """A text for TensorBoard's text page."""
        if self.active:
            self.board.add_text(name, f"```\n{content}\n```", 0)

    def advance(self, done: int) -> None:
        """Move the bar to `done`."""
        if self.active:
            self.bar.update(done - self.bar.n)

    def say(self, line: str) -> None:
        """A line for the person watching; not part of the log."""
        if not self.active:
            return
        if self.terminal:
            self.bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def event(self, event: str, step: int, **values: Any) -> None:
        """Log one event; numbers become TensorBoard curves under their event's name."""
        if not self.active:
            return
        record = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        self._draw(record)
        short = {k: v for k, v in values.items() if isinstance(v, int | float)}
        line = "  ".join(f"{k} {_show(v)}" for k, v in short.items())
        if self.terminal and event == "train":
            shown = {"loss": "loss", "lr": "lr", "tokens/s": "real_tokens_per_second"}
            self.bar.set_postfix({k: _show(short[v]) for k, v in shown.items()})
        elif short:
            self.say(f"{event:<10} step {step:>6}  {line}")

    def _draw(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name not in SILENT and isinstance(value, int | float):
                tag = f"{record['event']}/{name}"
                self.board.add_scalar(tag, value, record["step"], walltime=record["time"])


def _show(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def cut_log(run: Path, step: int) -> None:
    """Drop the events after `step`, and an end, so that a restarted run's log is one run's."""
    path = run / "log.jsonl"
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if record["step"] <= step and record["event"] != "end":
            kept.append(line + "\n")
    temporary = path.with_suffix(".jsonl.partial")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def peak_memory(device: torch.device) -> float:
    """GiB: the peak of CUDA's allocator, else of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
