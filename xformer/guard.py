"""Numerical trouble: detected on the device without waiting for it, then traced to its layer.

A step is in trouble if its loss or gradient norm is not finite, or lies more than `train.spike`
standard deviations above the running mean. The second test needs WINDOW good steps before it, and
`train.spike=0` turns it off. The device drops the update of such a step, so that no weight is
corrupted. The host learns of it when it next reads from the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xformer.data.errors import Failure
from xformer.parallel.replicas import Sums
from xformer.run import ON_DEVICE, State
from xformer.session import Session
from xformer.tasks.task import Model, some_rows
from xformer.tracing import WEIGHT, trace

WINDOW = 100  # steps; the time constant of the running mean and variance
LEAST = 1e-3  # the standard deviation counts as at least this share of the mean
LIMIT = 10  # a run ends after this many dropped updates in a row


class Guard:
    """Detects steps in trouble, and sums the values that the log needs.

    `sums` (4,) holds three sums over the steps since the last line of the log: the loss, the number
    of predictions, and the number of right ones. Its last element is the norm of the newest
    gradient. Dropped steps are left out. `seen` (5,) holds the number of good steps so far, the
    means of their loss and norm, and the two variances.
    """

    def __init__(self, spike: float, state: State, device: torch.device):
        self.spike, self.state = spike, state
        sums = [state.since_log[name] for name in ON_DEVICE]
        self.sums = torch.tensor(sums, dtype=torch.float64, device=device)
        seen = state.statistics or [0.0] * 5
        self.seen = torch.tensor(seen, dtype=torch.float64, device=device)
        # 1 for the elements of `sums` that are sums, 0 for the norm, which is replaced
        self.adds = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64, device=device)
        self.unread: list[tuple[int, int, Tensor, Tensor]] = []

    def judge(self, sums: Sums, norm: Tensor) -> Tensor:
        """Count the current step. Returns a scalar: 1 if its update must be dropped, else 0. `norm`
        () is that of its gradient."""
        values = torch.stack([sums.loss, sums.count, sums.correct, norm]).double()
        good = values.isfinite().all()
        if self.spike:
            loss_and_norm = torch.stack([values[0] / values[1].clamp(min=1.0), values[3]])
            good &= (loss_and_norm <= self._limits()).all()
            self.seen = torch.where(good, self._updated(loss_and_norm), self.seen)
        self.sums = torch.where(good, self.sums * self.adds + values, self.sums)
        self.unread.append((self.state.step, self.state.position, good, values))
        return 1.0 - good.float()

    def _limits(self) -> Tensor:
        """The largest loss and norm that are not spikes, (2,)."""
        n, mean, variance = self.seen[0], self.seen[1:3], self.seen[3:]
        deviation = torch.maximum(variance.sqrt(), LEAST * mean.abs())
        return torch.where(n < WINDOW, torch.inf, mean + self.spike * deviation)

    def _updated(self, values: Tensor) -> Tensor:
        """`seen` after a good step with this loss and norm, (5,)."""
        n, mean, variance = self.seen[:1] + 1, self.seen[1:3], self.seen[3:]
        weight = 1 / n.clamp(max=WINDOW)
        change = values - mean
        variance = (1 - weight) * (variance + weight * change.square())
        return torch.cat([n, mean + weight * change, variance])

    def settle(self, session: Session, model: Model) -> None:
        """Bring the state up to date; trace, log and count the steps dropped since the last call.
        Waits for the device. All ranks call it together. Raises Failure if the run must stop."""
        setup, state, monitor = session.setup, self.state, session.monitor
        policy = setup.recipe.train.trouble
        for step, position, trouble in self.read():
            state.in_a_row = state.in_a_row + 1 if trouble else 0
            if not trouble:
                continue
            state.dropped += 1
            stage, place = trace(setup, model, step, position)
            record = {"what": trouble, **place, "action": policy, "dropped": state.dropped}
            monitor.event("trouble", step + 1, **record)
            line = f"{trouble} at step {step + 1}: {place['where']}"
            if stage != WEIGHT:  # a bad weight is not the fault of any row
                line += f", rows {some_rows(place['rows'])} of the store"
            if policy == "stop" or stage == WEIGHT:
                session.writer.free()  # finish a checkpoint that is being written
                raise Failure(f"{line}; {_remedy(session, stage)}")
            monitor.say(f"{line}; its update is dropped")
            if state.in_a_row >= LIMIT:
                spike = f", or raise train.spike, now {self.spike:g}" if self.spike else ""
                raise Failure(
                    f"{line}: {LIMIT} updates in a row were dropped; if the rows are good, lower "
                    f"optim.lr, now {setup.recipe.optim.lr:g}{spike}"
                )
        state.since_log |= dict(zip(ON_DEVICE, self.sums.tolist(), strict=True))
        state.statistics = self.seen.tolist() if self.spike else []

    def read(self) -> list[tuple[int, int, str]]:
        """Each step since the last call, its first sample, and its trouble or "". Waits for the
        device."""
        steps, self.unread = self.unread, []
        flags = torch.stack([good for *_, good, _ in steps]).tolist() if steps else []
        return [
            (step, position, "" if good else self._describe(values.tolist()))
            for (step, position, _, values), good in zip(steps, flags, strict=True)
        ]

    def _describe(self, values: list[float]) -> str:
        """What is wrong with the values of a step, in words."""
        step = {"loss": values[0] / max(values[1], 1.0), "norm of the gradient": values[3]}
        if bad := [name for name, value in step.items() if not math.isfinite(value)]:
            return f"the {bad[0]} is not finite"
        limits = dict(zip(step, self._limits().tolist(), strict=True))
        worst = max(step, key=lambda name: step[name] / max(limits[name], 1e-30))
        mean = float(self.seen[1 + list(step).index(worst)])
        return f"the {worst}, {step[worst]:.4g}, is far above its mean, {mean:.4g},"


def _remedy(session: Session, stage: int) -> str:
    """Where a run that stops at trouble can continue from, and how."""
    newest, remedy = "is from an earlier step", "train.trouble=skip drops such updates"
    if stage == WEIGHT:
        newest, remedy = "may hold the same bad value", "dropping updates cannot repair a weight"
    if session.run.has_checkpoints():
        return f"the newest checkpoint {newest}; {remedy}"
    return f"there is no checkpoint; {remedy}"
