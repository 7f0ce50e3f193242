"""How long the jobs of a plan will take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from xformer import cost
from xformer.data.batch import Workload
from xformer.data.errors import BadInput
from xformer.data.files import read_run_json
from xformer.monitor import events
from xformer.study.forecast import Forecast
from xformer.study.plan import Job, content_key

COMMAND = 20.0  # seconds assumed for a command that was never timed
START = 1.0  # seconds that a run needs before and after its steps; the fork server has the imports


@dataclass(frozen=True)
class Work:
    """The work of a run: the FLOPs of training and of scoring, and the number of training tokens.
    Runs of one `kind` have the same model, batches and rows, and so the same speed."""

    kind: str
    operations: float
    scoring: float
    tokens: int


def logged_speed(run: Path, warm_up: int = 0) -> float | None:
    """The tokens per second in the log of a run, without its first lines if there are others. None
    if it has no line of training."""
    steps = list[dict[str, Any]]()
    with suppress(OSError):  # the run is deleted meanwhile
        steps = [step for step in events(run, "train") if "real_tokens_per_second" in step]
    speeds = [step["real_tokens_per_second"] for step in steps[warm_up:] or steps[-1:]]
    return median(speeds) if speeds else None


class Costs:
    """Expected seconds of a plan's jobs, from the FLOP/s of finished runs: those on disk, and those
    in `kept`, which has results by key. A kind of which no run has finished has the speed
    in the log of one that is training. xformer.study.timing adds the `rates` of other kinds.
    Raises BadInput naming a result that does not say how many seconds its run took."""

    def __init__(self, forecast: Forecast, kept: Mapping[str, Any] | None = None):
        self.forecast, kept = forecast, kept or {}
        runs = [job for job in forecast.plan.jobs.values() if job.recipe is not None]
        self.work = {job.key: self._work(job) for job in runs}
        rates, spent = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for job in runs:
            if job.done or job.key in kept:
                content = read_run_json(job.proof) if job.done else kept[job.key]
                seconds = content.get("seconds") if isinstance(content, dict) else None
                if not isinstance(seconds, int | float):
                    why = "it does not say how many seconds it took"
                    raise BadInput(f"{job.proof} is damaged: {why}")
                spent[job.stage].append(seconds)
                if work := self.work[job.key]:
                    rates[work.kind].append(work.operations / max(seconds, 1e-3))
        self.rates = {kind: median(some) for kind, some in rates.items()}
        for job in runs:
            work = self.work[job.key]
            if work and work.kind not in self.rates and (speed := logged_speed(job.path)):
                self.rates[work.kind] = work.operations / work.tokens * speed
        # stages have one even if the stores of their finished runs are not here
        self.usual = {stage: median(seconds) for stage, seconds in spent.items()}

    def seconds(self, job: Job) -> float | None:
        """Expected seconds of a job. If its store is not made yet, this is the median of its
        stage's finished runs. None for a command, and if no such run was timed."""
        work, usual = self.work.get(job.key), self.usual.get(job.stage)
        if work is not None and self.rates:
            rate = self.rates.get(work.kind) or median(self.rates.values())
            return START + (work.operations + work.scoring) / rate
        return None if usual is None else START + usual

    def guess(self, job: Job) -> float | None:
        """Expected seconds, or a guess for a command. None for a run of which nothing is known."""
        known = self.seconds(job)
        return COMMAND if known is None and job.recipe is None else known

    def _work(self, job: Job) -> Work | None:
        recipe, shape = self.forecast.recipe(job), self.forecast.made(job).shape
        sizes = self.forecast.sizes(recipe.data) or {}
        if shape is None or "train" not in sizes:
            return None
        rows, tokens = sizes["train"]
        length = min(-(-tokens // rows) + 2, recipe.batch.max_tokens or shape.max_positions)
        batch = recipe.batch.tokens / length or recipe.batch.rows  # rows of a step
        total = recipe.train.steps * batch or recipe.train.epochs * rows * recipe.fraction
        steps = total / batch
        every = recipe.train.validate_every
        validations = steps // every if every else total // (rows * recipe.fraction)
        valid, test = (sizes.get(split, (0, 0))[1] for split in ("valid", "test"))
        scored = (validations + 1) * valid + test
        amount = Workload.even(max(1, round(total)), length, recipe.masking.probability)
        operations = float(cost.training_flops(shape, self.forecast.task(job), amount))
        same = (shape.model_dump(), recipe.head, recipe.batch.model_dump(), length, job.processes)
        system = recipe.system.model_dump(mode="json")
        # a probe takes less time than these operations, so each layer has a kind of its own
        probed = () if recipe.probe.layer is None else (recipe.probe.layer,)
        kind = content_key([*same, recipe.train.only, system, *probed])
        scoring = operations / (1 + cost.BACKWARD) * scored / amount.tokens
        return Work(kind, operations, scoring, amount.tokens)
