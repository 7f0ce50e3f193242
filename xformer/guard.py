"""Numerical trouble: noticed on the device without waiting for it, and traced to its layer.

A step is in trouble if its loss or the norm of its gradient is not finite, or lies more than
`train.spike` deviations above the mean of the steps before. Its update is dropped on the device, so
that no weight takes harm. The host learns of it when it reads the device anyway.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xformer.data.errors import Failure
from xformer.parallel.replicas import Sums
from xformer.run import SINCE_LOG, State
from xformer.session import Session
from xformer.tasks.task import Model, some_rows
from xformer.tracing import WEIGHT, LossOf, trace

WINDOW = 100  # steps over which mean and deviation are taken; the weight of older steps fades
LEAST = 1e-3  # of the mean: a smaller deviation counts as this one
LIMIT = 10  # dropped updates in a row that end a run


class Guard:
    """Sums over the steps since the last line of the log, and which of these steps are in trouble.

    `sums` (4,) holds the loss, the count it is a sum over, the count of right predictions, and the
    norm of the newest gradient. Dropped steps are left out. `seen` (5,) holds the number of steps
    seen, the means of loss and norm, and their variances.
    """

    def __init__(self, spike: float, state: State, device: torch.device):
        self.spike, self.state = spike, state
        sums = [state.since_log[name] for name in SINCE_LOG[:4]]
        self.sums = torch.tensor(sums, dtype=torch.float64, device=device)
        seen = state.statistics or [0.0] * 5
        self.seen = torch.tensor(seen, dtype=torch.float64, device=device)
        self.adds = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64, device=device)
        self.unread: list[tuple[int, int, Tensor, Tensor]] = []

    def judge(self, sums: Sums, norm: Tensor) -> Tensor:
        """Count the current step, whose gradient has this `norm` (). Returns 1 if its update must
        be dropped, else 0, ()."""
        values = torch.stack([sums.loss, sums.count, sums.correct, norm]).double()
        good = values.isfinite().all()
        if self.spike:
            seen = torch.stack([values[0] / values[1].clamp(min=1.0), values[3]])
            good &= (seen <= self._limits()).all()
            self.seen = torch.where(good, self._with(seen), self.seen)
        self.sums = torch.where(good, self.sums * self.adds + values, self.sums)
        self.unread.append((self.state.step, self.state.position, good, values))
        return 1.0 - good.float()

    def _limits(self) -> Tensor:
        """Above what loss and norm are a spike, (2,)."""
        n, mean, variance = self.seen[0], self.seen[1:3], self.seen[3:]
        spread = torch.maximum(variance.sqrt(), LEAST * mean.abs())
        return torch.where(n < WINDOW, torch.inf, mean + self.spike * spread)

    def _with(self, values: Tensor) -> Tensor:
        n, mean, variance = self.seen[:1] + 1, self.seen[1:3], self.seen[3:]
        weight = 1 / n.clamp(max=WINDOW)
        change = values - mean
        spread = (1 - weight) * (variance + weight * change.square())
        return torch.cat([n, mean + weight * change, spread])

    def settle(self, session: Session, model: Model, loss_of: LossOf) -> None:
        """Bring the state up to date. Trace, log and count the steps that were dropped since the
        last call. All ranks call it together. It waits for the device. Raises Failure if the run
        must stop."""
        job, state, monitor = session.job, self.state, session.monitor
        policy = job.recipe.train.trouble
        for step, position, what in self.read():
            state.in_a_row = state.in_a_row + 1 if what else 0
            if not what:
                continue
            state.dropped += 1
            stage, place = trace(job, model, step, position, loss_of)
            record = {"what": what, **place, "action": policy, "dropped": state.dropped}
            monitor.event("trouble", step + 1, **record)
            line = f"{what} at step {step + 1}: {place['where']}"
            if stage != WEIGHT:  # then all rows of the step are in question
                line += f", rows {some_rows(place['rows'])} of the store"
            if policy == "stop" or stage == WEIGHT:
                session.writer.free()  # a checkpoint may be on its way to the disk
                raise Failure(f"{line}; {_way_out(session, stage)}")
            monitor.say(f"{line}; its update is dropped")
            if state.in_a_row >= LIMIT:
                raise Failure(
                    f"{line}: {LIMIT} updates in a row were dropped; if the rows are good, lower "
                    f"optim.lr, now {job.recipe.optim.lr:g}"
                )
        state.since_log |= dict(zip(SINCE_LOG[:4], self.sums.tolist(), strict=True))
        state.statistics = self.seen.tolist() if self.spike else []

    def read(self) -> list[tuple[int, int, str]]:
        """(step, sample, what was wrong or "") of the steps since the last call. Waits for the
        device."""
        steps, self.unread = self.unread, []
        flags = torch.stack([good for *_, good, _ in steps]).tolist() if steps else []
        return [
            (step, position, "" if good else self._complaint(values.tolist()))
            for (step, position, _, values), good in zip(steps, flags, strict=True)
        ]

    def _complaint(self, values: list[float]) -> str:
        found = values[0] / max(values[1], 1.0), values[3]
        names = "loss", "norm of the gradient"
        for name, value in zip(names, found, strict=True):
            if not math.isfinite(value):
                return f"the {name} is not finite"
        means, limits = self.seen[1:3].tolist(), self._limits().tolist()
        every = zip(names, found, means, limits, strict=True)
        name, value, mean, _ = max(every, key=lambda each: each[1] / max(each[3], 1e-30))
        return f"the {name}, {value:.4g}, is far above its mean, {mean:.4g},"


def _way_out(session: Session, stage: int) -> str:
    """What a run that stops at trouble can go on from, and how."""
    kept = any((session.run.path / "checkpoints").glob("step_*"))
    if stage == WEIGHT:
        older = "the newest checkpoint may hold it too" if kept else "no checkpoint is there"
        return f"{older}; dropping updates does not mend a weight"
    older = "the newest checkpoint is from before" if kept else "no checkpoint is there"
    return f"{older}; train.trouble=skip drops such updates"
