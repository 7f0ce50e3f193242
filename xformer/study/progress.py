"""What the user sees while a study runs: the jobs that ended, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from xformer.data.display import Progress, duration, say
from xformer.monitor import events
from xformer.study.costs import Costs
from xformer.study.forecast import Forecast
from xformer.study.launch import Outcome, warnings_of
from xformer.study.plan import Job, Plan, to_do

MINUTE = 60.0  # seconds between two progress lines in a log
AGAIN = 30.0  # seconds after which the end of a job lets the time left be estimated again
LATER = 300.0  # seconds after which it is estimated again in any case; while unknown, each minute


def newest_numbers(jobs: Iterable[Job]) -> dict[str, float]:
    """Step, loss and speed of the training that logged last among jobs that are not done."""
    try:
        runs = [job.path for job in jobs if (job.path / "log.jsonl").is_file()]
        newest = max(runs, key=lambda run: (run / "log.jsonl").stat().st_mtime)
        record = events(newest, "train")[-1]
        speed = record["real_tokens_per_second"]
        return {"step": record["step"], "loss": record["loss"], "tokens/s": speed}
    except (OSError, IndexError, KeyError, ValueError):  # no log yet, or a half-written line
        return {}


class StudyProgress(Progress):
    """The progress of a study: a line for each job that ends and one per minute, with the time
    left; on a terminal also a bar. Nobody knows how long a cluster will take (`slots` is 0)."""

    def __init__(
        self,
        plan: Plan,
        slots: int,
        keep: Callable[[Job, bool], str],
        rates: Mapping[str, float] | None = None,
    ):
        self.plan, self.slots, self.keep, self.rates = plan, slots, keep, rates or {}
        self.open = to_do(plan.jobs.values(), plan.wanted)
        self.said: set[str] = set()
        self.warned: set[str] = set()  # each warning is printed once
        self.looked = self.ended = time.monotonic()
        self._estimate()
        super().__init__("study", len(plan.jobs), "jobs", lines=False, stay=True)

    def show(self, outcomes: dict[str, Outcome]) -> None:
        """Say what has ended since the last time."""
        for key in [key for key in outcomes if key not in self.said]:
            self.said.add(key)
            self._ended(key, outcomes[key])
        now = time.monotonic()
        if now - self.looked > MINUTE:
            self.looked = now
            # a run of unknown cost may have logged its speed, and more stores may exist
            if self.left() is None or now - self.estimated > LATER:
                self._estimate()
            self.numbers = newest_numbers(self.open.values())
            if self.bar is None and self.open:
                say(self._line(), error=True)
        self.advance(0)  # the time left has changed

    def _ended(self, key: str, outcome: Outcome) -> None:
        if outcome.state == "not needed":
            self.total -= 1
            return
        if self.open.pop(key, None):
            if time.monotonic() > self.estimated + AGAIN:  # more stores exist now
                self._estimate()
            self.seconds.pop(key, None)
            self.ended = time.monotonic()
        else:
            self.before += 1  # done before: it says nothing about the speed
        self.advance(1)
        line = f"[{self.done:.0f}/{self.total:.0f}] {outcome.job.name}: {outcome.state}"
        if outcome.state == "done":
            left = self.left() if self.seconds else None
            took = f", {outcome.seconds:.0f} s" if self.slots else ""  # with the time in a queue
            after = "" if left is None else f"; about {duration(left)} left"
            warnings = [text for text in warnings_of(outcome.job) if text not in self.warned]
            self.warned.update(warnings)
            said = (f"    {text}" for text in warnings)
            say(f"{line}{took}{after}", *said, error=True)
        elif outcome.state != "there":
            say(line, *(f"    {text}" for text in outcome.why.splitlines()), error=True)
        if outcome.state in ("done", "there"):
            say(*filter(None, [self.keep(outcome.job, outcome.state == "done")]), error=True)

    def left(self) -> float | None:
        """Estimated seconds left: the cost of the open jobs, minus the time since one ended, which
        counts for one job at most. None if the cost of a run is not known yet, or on a cluster."""
        costs = [seconds for seconds in self.seconds.values() if seconds is not None]
        if len(costs) < len(self.seconds) or not self.slots:
            return None
        rest = sum(costs) / max(1, min(self.slots, len(costs)))
        spent = min(time.monotonic() - self.ended, max(costs, default=0.0))
        return max(0.0, rest - spent)

    def _estimate(self) -> None:
        costs = Costs(Forecast(self.plan))
        costs.rates = {**self.rates, **costs.rates}
        self.seconds = {key: costs.guess(job) for key, job in self.open.items()}
        self.estimated = time.monotonic()
