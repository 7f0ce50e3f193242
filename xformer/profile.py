"""Profile a few steps of a run: a trace, and a summary of where the time goes.

RUN/profile/steps_A-B.pt.trace.json.gz    for https://ui.perfetto.dev, chrome://tracing, or
                                          TensorBoard's profiler plugin
RUN/profile/steps_A-B.txt                 percent of the time by kind of work, and by operation of
                                          xformer.ops
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

SKIP = 10  # steps before the trace, in which kernels are chosen and compiled
STEPS = 5  # steps of the trace
# Kinds of work, by patterns for the names of operators and kernels. The first match counts.
WORDS = {
    "waiting for data": "^waiting for data$",
    "communication": "nccl|gloo|c10d|all_?reduce|all_?gather",
    "activations and loss": "gelu|relu|tanh|log_?softmax|nll_?loss|cross_entropy|vocabulary_loss",
    "attention": "attention|attn|softmax|bmm|rotary|flash|fmha",
    "LayerNorm": "layer_?norm|batch_?norm|add_norm|gamma_?beta",
    "dropout": "dropout|bernoulli|random_|fill_mask|masked_scale|aten::ge$",
    "optimizer": "^optimizer$|adam|vector_norm|foreach_norm",
    "matrix products": "mm|matmul|linear|gemm|cublas|cutlass|nvjet|mkldnn|conv(?!ert)",
    "embeddings and copies": "embedding|index|copy|memcpy|memset|aten::to$|cat$",
}
KINDS = {kind: re.compile(words, re.IGNORECASE) for kind, words in WORDS.items()}
OTHER = "everything else"
OURS = "xformer::"  # begins the names of the operations in xformer.ops
BACKWARD = 1  # the scope of an event of the backward pass
HEADING = "of this, in xformer.ops with the backward passes:"


class Profiler:
    """Traces the steps SKIP + 1 to SKIP + STEPS of a process; a context manager. Call `step` after
    every step. Unless `active`, it does nothing."""

    def __init__(self, run: Path, active: bool, device: torch.device, say: Callable[..., None]):
        self.run, self.active, self.device, self.say = run, active, device, say
        self.steps, self.begin = 0, 0.0
        self.trace: torch.profiler.profile | None = None

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.trace is not None:
            self.trace.stop()
        if self.active and error is None and self.steps < SKIP + STEPS:
            self.say(f"no profile: it needs {SKIP + STEPS} steps, and this run made {self.steps}")

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A named range of the trace: "waiting for data" or "optimizer"."""
        if self.trace is None:
            return nullcontext()
        return torch.profiler.record_function(name)

    def step(self, step: int) -> float:
        """Call this when `step` is done. Returns the seconds spent on the trace itself, which the
        run's clock should not count."""
        self.steps += 1
        if not self.active or self.steps not in (SKIP, SKIP + STEPS):
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        if self.trace is None:
            self.trace = torch.profiler.profile()  # CPU, and CUDA if there is a device
            self.trace.start()
        else:
            self._write(begin - self.begin, step)
            self.trace = None
        self.begin = time.perf_counter()
        return self.begin - begin

    def _write(self, seconds: float, step: int) -> None:
        assert self.trace is not None
        self.trace.stop()
        (self.run / "profile").mkdir(exist_ok=True)
        path = self.run / "profile" / f"steps_{step - STEPS + 1}-{step}.pt.trace.json.gz"
        self.trace.export_chrome_trace(str(path))
        lines = summary(self.trace.events() or [], seconds, self.device.type == "cuda")
        title = f"steps {step - STEPS + 1} to {step}: {1000 * seconds / STEPS:,.1f} ms a step"
        text = path.with_name(path.name.replace(".pt.trace.json.gz", ".txt"))
        text.write_text("\n".join([title, *lines]) + "\n")
        self.say(title, *lines, f"trace: {path}")


def summary(events: Iterable[Any], seconds: float, cuda: bool) -> list[str]:
    """Lines with the share of `seconds`, in percent, that each kind of work took, and then the
    share of each operation of xformer.ops that was called.

    On CUDA these are the times of kernels, the time without any kernel, and, for information, the
    time that the host waited for data. On the CPU they are the operators' own times on the main
    thread.
    """
    # on CUDA a named range is also a device event, which spans the kernels of the range
    events = [e for e in events if e.device_type == DeviceType.CPU or not e.is_user_annotation]
    times = _kernel_times(events) if cuda else _operator_times(events)
    whole = 1e6 * max(seconds, 1e-9)  # events are in microseconds
    lines = []
    if cuda:
        busy = _union([e for e in events if e.device_type != DeviceType.CPU])
        lines.append(_line("GPU idle", whole - busy, whole))
        waited = _operator_times(events).get("waiting for data", 0.0)
        times["waiting for data"] = waited
    else:
        times[OTHER] = times.get(OTHER, 0.0) + whole - sum(times.values())
    order = sorted(KINDS, key=lambda kind: -times.get(kind, 0.0))
    lines += [_line(kind, times.get(kind, 0.0), whole) for kind in (*order, OTHER)]
    ours = sorted(_times_of_ours(events, cuda).items(), key=lambda pair: -pair[1])
    return [*lines, *([HEADING] if ours else []), *(_line(*pair, whole) for pair in ours)]


def _line(kind: str, seconds: float, whole: float) -> str:
    return f"  {kind:<22} {100 * seconds / whole:5.1f} %"


def _operator_times(events: list[Any]) -> dict[str, float]:
    """Microseconds of operators by kind, without the operators that they call."""
    times: dict[str, float] = {}
    for event in events:
        if event.device_type == DeviceType.CPU:
            kind = _kind_of(event)
            times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
    return times


def _kernel_times(events: list[Any]) -> dict[str, float]:
    """Microseconds of CUDA kernels by kind. The operator that launched a kernel decides its kind;
    if that is not known, the kernel's own name does."""
    started: dict[tuple[str, float], list[str]] = {}
    for event in events:
        for kernel in event.kernels if event.device_type == DeviceType.CPU else ():
            kind = _kind_of(event)
            if kind != OTHER:
                started.setdefault((kernel.name, kernel.duration), []).append(kind)
    times: dict[str, float] = {}
    for event in events:
        if event.device_type != DeviceType.CPU:
            duration = event.time_range.elapsed_us()
            kinds = started.get((event.name, duration))
            kind = kinds.pop() if kinds else kind_of_name(event.name)
            times[kind] = times.get(kind, 0.0) + duration
    return times


def _times_of_ours(events: list[Any], cuda: bool) -> dict[str, float]:
    """Microseconds in each of our operations, backward passes included: of kernels on CUDA, else of
    operators. If one of our operations calls another, the time of the call counts only for the
    other."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    owners = {
        (event.thread, event.sequence_nr): _ours(event, {})
        for event in sorted(on_host, key=lambda event: event.time_range.start)
        if event.sequence_nr >= 0 and not event.fwd_thread  # it is of a forward pass
    }
    times: dict[str, float] = {}
    for event in on_host:
        if name := _ours(event, owners):
            kernels = sum(k.duration for k in event.kernels if k.name != event.name)  # no range
            spent = kernels if cuda else event.self_cpu_time_total
            times[name] = times.get(name, 0.0) + spent
    return times


def _ours(event: Any, owners: dict[tuple[int, int], str]) -> str:
    """The operation of ours that an operator belongs to, or "".

    An operator of the backward pass has the thread and the number of the operator whose gradient it
    computes. `owners` says which operation of ours that one belongs to.
    """
    while event is not None:
        if event.name.startswith(OURS):
            return str(event.name).removeprefix(OURS).removesuffix("_backward")
        if event.scope == BACKWARD and event.sequence_nr >= 0:
            return owners.get((event.fwd_thread, event.sequence_nr), "")
        event = event.cpu_parent
    return ""


def _kind_of(event: Any) -> str:
    """The kind of an operator, or else of the nearest of its callers that has one."""
    while event is not None:
        if (kind := kind_of_name(event.name)) != OTHER:
            return kind
        event = event.cpu_parent
    return OTHER


def kind_of_name(name: str) -> str:
    """The kind of work of an operator or kernel, by its name."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHER)


def _union(events: list[Any]) -> float:
    """Microseconds in which at least one event ran."""
    total, reached = 0.0, -1.0
    for begin, end in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
