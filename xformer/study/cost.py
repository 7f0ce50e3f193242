"""What the runs of a study will cost, before they run: their operations over a measured rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from xformer import cost
from xformer.config import each, validate
from xformer.data.batch import Workload
from xformer.data.errors import BadInput
from xformer.data.files import read_json, read_run_json
from xformer.recipe import Recipe
from xformer.study.plan import Plan, Work
from xformer.study.shapes import Shapes
from xformer.tasks.known import task_of
from xformer.tasks.task import Head

RATE = 40e9  # operations a second of one CPU core, where no run has been measured yet
OTHER = 20.0  # seconds that any other work is taken for
START = 1.0  # seconds that a run needs before and after its steps; imports are paid before


class Costs:
    """Expected seconds of a plan's works, at the rate of its finished runs: those that are there,
    and those of which `kept` has the results, by key. Raises BadInput where Shapes does."""

    def __init__(self, plan: Plan, kept: Mapping[str, Any] | None = None):
        self.plan, self.shapes = plan, Shapes(plan)
        self.operations = {w.key: self._operations(w) for w in plan.works.values() if w.recipe}
        rates = []
        spent: dict[str, list[float]] = {}  # by stage
        for work in plan.works.values():
            if not work.recipe:
                continue
            if work.done:
                seconds = _seconds(work.proof, read_run_json(work.proof))
            elif kept and work.key in kept:
                seconds = _seconds(work.proof, kept[work.key])
            else:
                continue
            spent.setdefault(work.stage, []).append(seconds)
            if operations := self.operations[work.key]:
                rates.append(operations / max(seconds, 1e-3))
        self.measured, self.rate = bool(rates), median(rates) if rates else RATE
        # also of stages whose finished runs have no store here
        self.usual = {stage: median(found) for stage, found in spent.items()}

    def known(self, work: Work) -> bool:
        """Whether the seconds are more than a guess."""
        return self.operations.get(work.key) is not None or work.stage in self.usual

    def seconds(self, work: Work) -> float:
        """Expected seconds of a work; of a run whose store is not made yet those of its stage's
        finished runs, or else a guess."""
        operations = self.operations.get(work.key)
        usual = self.usual.get(work.stage)
        if operations is not None and (self.measured or usual is None):
            return START + operations / self.rate
        return OTHER if usual is None else START + usual

    def _operations(self, work: Work) -> float | None:
        assert work.recipe is not None
        recipe = validate(Recipe, work.recipe)
        model = self.shapes.of(work)
        sizes = [size for path in each(recipe.data) if (size := _store_size(Path(path)))]
        if model is None or len(sizes) < len(each(recipe.data)):
            return None
        rows, tokens = map(sum, zip(*sizes, strict=True))
        length = min(-(-tokens // rows) + 2, recipe.batch.max_tokens)
        if recipe.train.steps:
            total = recipe.train.steps * (recipe.batch.tokens / length or recipe.batch.rows)
        else:
            total = recipe.train.epochs * rows * recipe.fraction
        done = Workload.even(max(1, round(total)), length, recipe.masking.probability)
        task = task_of(Head(recipe.head))
        return float(cost.training_flops(model, task, done))


def _seconds(result: Path, content: Any) -> float:
    seconds = content.get("seconds") if isinstance(content, dict) else None
    if not isinstance(seconds, int | float):
        raise BadInput(f"{result} is damaged: it does not say how many seconds the run took")
    return seconds


def _store_size(path: Path) -> tuple[int, int] | None:
    """Rows and tokens of a store's training split; None where there is no store yet."""
    try:
        split = read_json(path / "store.json")["splits"]["train"]
        return max(1, split["rows"]), split["tokens"]
    except (BadInput, KeyError, TypeError, OSError):
        return None
