"""Run a whole study, and report it beside the published numbers.

    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=mini
    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=mini --dry-run
    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=paper executor=slurm \\
        needs.bert=ckpt/bert slurm.partition=gpu slurm.gpus_per_node=1
    python -m xformer.study verify runs/english steps=20    # make a run's first steps again

The same command again runs only what is not done: a run that was killed goes on, one that failed
is tried again, another seed adds its own runs, and studies share the runs that they have in common.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from xformer.config import Settings, find_recipe, load, toml_text
from xformer.data.display import Progress, duration, say
from xformer.data.errors import BadInput, Failure, Interrupted, typed
from xformer.data.files import make_directory, read_json, write_json
from xformer.start import run
from xformer.study import pool, registered, verify
from xformer.study.cost import Costs
from xformer.study.curves import averaged, curves_figure
from xformer.study.fit import check_plan, unchecked
from xformer.study.ledger import Ledger
from xformer.study.notes import Notes
from xformer.study.page import html
from xformer.study.plan import RESULTS, Plan, Work, to_do
from xformer.study.results import Results, drawn, write_csv
from xformer.study.shapes import Shapes
from xformer.study.spec import read_study
from xformer.study.write import markdown

Level = str | int | float | bool  # of a factor, as TOML has it
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # they end a study between two looks at its works
MINUTE = 60.0  # seconds between two lines in a log while a work runs
AGAIN = 30.0  # seconds after which the time left is estimated anew


class Arguments(Settings):
    """How to run a study."""

    scale: str = ""
    """A scale of the study file: mini, minutes to hours of two CPU cores; small, full fine-tuning
    sets with the micro family, hours to days; paper, exactly as published."""
    executor: Literal["local", "slurm"] = "local"
    """Where to run: processes of this machine, or jobs of a Slurm cluster."""
    output: str = "runs/studies"
    """Directory of all studies: their reports, and the runs they share. While it holds a file PAUSE
    no work runs: those that run stop, training at a checkpoint, and go on when the file is gone."""
    kept: str = ""
    """Directory of finished results, a small file each, that are taken as done and added to; commit
    it, and no result depends on a directory of runs."""
    needs: dict[str, str] = Field({})
    """Where a thing is that the study needs: needs.NAME=PATH."""
    only: dict[str, Level | tuple[Level, ...]] = Field({})
    """Run only works at these levels, and what they wait for: only.corpus=english, or
    only.seed=[0,1]. The report still shows all that is there."""
    jobs: int = Field(0, ge=0)
    """Runs at once; 0: one a GPU, or one a core."""
    per_device: int = Field(1, ge=1)
    """Runs that share a GPU."""
    dry_run: bool = False
    """Only list the runs, what they would cost, and what is missing (also written --dry-run)."""
    slurm: dict[str, str | int] = Field({})
    """What sbatch is told: slurm.partition=gpu, slurm.timeout_min=600."""


def main() -> None:
    """`python -m xformer.study STUDY key=value ...`, or `verify RUN`"""
    if sys.argv[1:2] == ["verify"]:
        verify.main(sys.argv[2:])
        return
    arguments = ["dry_run=true" if a == "--dry-run" else a for a in sys.argv[1:]]
    files = [a for a in arguments if "=" not in a and not a.startswith("-")]
    settings = load(Arguments, [a for a in arguments if a not in files], recipe=False)
    if len(files) != 1:
        such = typed("recipes/studies/kao2021-figure2.toml")
        raise BadInput(f"give one study, such as {such}; given: {' '.join(files) or 'none'}")
    study = read_study(find_recipe(files[0], kind="studies"), settings.scale)
    root = Path(settings.output)
    check_version(root)
    plan = Plan(study, root, settings.needs)
    plan.restrict(
        {
            factor: [str(level) for level in (levels if isinstance(levels, tuple) else (levels,))]
            for factor, levels in settings.only.items()
        }
    )
    shapes = Shapes(plan)
    check_plan(plan, shapes)
    Notes(plan, shapes)  # refuses a wrong placeholder now, not when the runs are done
    ledger = Ledger(Path(settings.kept) if settings.kept else None, plan)
    if settings.dry_run:
        slots = 1 if settings.executor == "slurm" else executor_of(settings).slots
        say(*listing(plan, Costs(plan, ledger.results), ledger.results, slots).split("\n"))
        return
    if plan.missing() and not any(not w.missing and w.stage for w in plan.works.values()):
        raise BadInput(f"{study.path}: nothing can run: {'; '.join(_lacking(plan).splitlines())}")
    directory = root / f"{study.path.stem}-{settings.scale}"
    executor = executor_of(settings)
    make_directory(directory, "output=")
    plan.digests.save()
    write_json(root / "version.json", {"results": RESULTS})
    for line in _lacking(plan).splitlines():
        say(f"missing: {line}", error=True)
    ledger.unpack()
    outcomes = work_off(plan, executor, Costs(plan), ledger)
    report(plan, outcomes, directory)
    bad = [o for o in outcomes.values() if o.state in ("failed", "not run")]
    if bad:
        first = next((o for o in bad if o.state == "failed"), bad[0])
        why = first.why.splitlines()[-1] if first.why else "no word"
        count = f"{len(bad)} of {len(outcomes)} works did not succeed"
        raise Failure(f"{count}; {first.work.name}: {why}")


def executor_of(settings: Arguments) -> pool.Executor:
    """Where the works are to run."""
    if settings.executor == "slurm":
        return pool.Slurm(Path(settings.output), settings.slurm)
    return pool.local(settings.jobs, settings.per_device)


def report(plan: Plan, outcomes: dict[str, pool.Outcome], directory: Path) -> None:
    """Write and say what the runs of a study show."""
    study, results = plan.study, Results(plan.study, plan)
    write_csv(directory / "results.csv", results, outcomes)
    text = markdown(results, outcomes)
    (directory / "report.md").write_text(text, encoding="utf-8")
    for curves in study.curves:
        if panels := averaged(results, curves):
            (directory / f"{curves.name}.svg").write_text(curves_figure(panels), encoding="utf-8")
    for picture in study.pictures:
        if found := drawn(results, picture):
            shutil.copyfile(found[1], directory / f"{picture.name}.svg")
    page = html(results, outcomes, directory)
    (directory / "report.html").write_text(page, encoding="utf-8")
    say(*text.split("\n"))
    names = ("report.html", "report.md", "results.csv")
    say("report   " + "   ".join(str(directory / name) for name in names))


def check_version(root: Path) -> None:
    """Refuse a directory whose runs another version of the code made."""
    file = root / "version.json"
    if root.exists() and not root.is_dir():
        raise BadInput(f"output={root} is a file; give a directory")
    if file.exists():
        content = read_json(file)
        found = content.get("results") if isinstance(content, dict) else None
        if not isinstance(found, int):
            raise BadInput(f"{file} is damaged: it says no version of results")
        if found != RESULTS:
            raise BadInput(
                f"{root} holds results of version {found}, this code makes version {RESULTS}; "
                "give another output="
            )


def prepare(work: Work) -> None:
    """Write the recipe that a run is started with, or make the directory of a command's result. A
    work that is done and made again, because it is not whole, begins in an empty directory."""
    if work.done and not work.whole:
        aside = work.path.with_name(f".{work.path.name}.{os.getpid()}.partial")
        work.path.rename(aside)
        shutil.rmtree(aside)
    if work.stage and work.recipe is None:
        work.path.mkdir(parents=True, exist_ok=True)
    if work.recipe is not None:
        work.path.parent.mkdir(parents=True, exist_ok=True)
        text = f"# {work.name}\n{toml_text(work.recipe)}"
        work.path.with_suffix(".toml").write_text(text, encoding="utf-8")


def work_off(
    plan: Plan, executor: pool.Executor, costs: Costs, ledger: Ledger
) -> dict[str, pool.Outcome]:
    """Run what is to be done of a plan, showing how far it is and when it will be done."""
    signals: list[int] = []
    old = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in SIGNALS}
    try:
        with Progressing(plan, costs, ledger, executor.slots) as progress:

            def changed(outcomes: dict[str, pool.Outcome]) -> None:
                progress.show(outcomes)
                if signals:
                    raise Interrupted(signals[0], "stopped; the same command goes on")

            works = list(plan.works.values())
            return pool.execute(
                works,
                executor,
                changed,
                prepare,
                wanted=plan.wanted,
                pause=plan.root / "PAUSE",
                tell=partial(say, error=True),
            )
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def newest_numbers(works: Iterable[Work]) -> dict[str, float]:
    """Step, loss and speed of the training that logged last among works that are not done."""
    try:
        logs = [file for work in works if (file := work.path / "log.jsonl").is_file()]
        newest = max(logs, key=lambda file: file.stat().st_mtime)
        lines = newest.read_text(encoding="utf-8").splitlines()
        record = json.loads(next(line for line in reversed(lines) if '"train"' in line))
        speed = record["real_tokens_per_second"]
        return {"step": record["step"], "loss": record["loss"], "tokens/s": speed}
    except (OSError, StopIteration, KeyError, ValueError):  # nothing is logged, or just being so
        return {}


class Progressing(Progress):
    """What is said while a study runs: a line for each work that ends and one a minute in a log,
    with the time left, and a bar on a terminal. It puts finished works into the ledger."""

    def __init__(self, plan: Plan, costs: Costs, ledger: Ledger, slots: int):
        self.plan, self.ledger, self.slots = plan, ledger, slots
        self.open = to_do(plan.works.values(), plan.wanted)
        self.said: set[str] = set()
        self.looked = time.monotonic()
        self._estimate(costs)
        super().__init__("study", len(plan.works), "works", lines=False, stay=True)

    def show(self, outcomes: dict[str, pool.Outcome]) -> None:
        """Say what has ended since the last time."""
        for key in [key for key in outcomes if key not in self.said]:
            outcome = outcomes[key]
            self.said.add(key)
            if outcome.state == "not needed":
                self.total -= 1
                continue
            if self.open.pop(key, None):
                if time.monotonic() > self.estimated + AGAIN:  # by now more stores are there
                    self._estimate(Costs(self.plan))
                self.seconds.pop(key, None)
                self.ended = time.monotonic()
            else:
                self.before += 1  # it was there: it tells nothing about the speed
            self.advance(1)
            say(*self._lines(outcome), error=True)
            if outcome.state in ("done", "there"):
                line = self.ledger.keep(outcome.work, again=outcome.state == "done")
                if line:
                    say(line, error=True)
        now = time.monotonic()
        if now - self.looked > MINUTE:
            self.looked = now
            self.numbers = newest_numbers(self.open.values())
            if self.bar is None and self.open:
                say(self._line(), error=True)
        self.advance(0)  # the time left is another one now

    def left(self) -> float:
        """Seconds to the end: what the open works will cost, less the time since one ended."""
        rest = sum(self.seconds.values()) / max(1, min(self.slots, len(self.seconds)))
        return max(0.0, rest - (time.monotonic() - self.ended))

    def _estimate(self, costs: Costs) -> None:
        self.seconds = {key: costs.seconds(work) for key, work in self.open.items()}
        self.estimated = time.monotonic()
        self.ended = self.estimated

    def _lines(self, outcome: pool.Outcome) -> list[str]:
        """The lines on a work that has ended."""
        if outcome.state in ("there", "not needed"):
            return []
        line = f"[{self.done:.0f}/{self.total:.0f}] {outcome.work.name}: {outcome.state}"
        if outcome.state != "done":
            return [line, *(f"    {text}" for text in outcome.why.splitlines())]
        after = f"; about {duration(self.left())} left" if self.seconds else ""
        return [f"{line}, {outcome.seconds:.0f} s{after}"]


def _lacking(plan: Plan) -> str:
    lines = []
    for name, need in plan.missing().items():
        absent = f"{plan.absent[name]} does not exist; " if plan.paths[name] else ""
        lines.append(f"{name}: {absent}{need.about}; {typed(need.get)}; then needs.{name}=PATH")
    return "\n".join(lines)


def listing(plan: Plan, costs: Costs, kept: Collection[str] = (), slots: int = 1) -> str:
    """What --dry-run prints: every work, its state and cost; what is missing; the sum, and how long
    `slots` works at once would take. `kept` are the keys of works whose results are kept."""
    todo = to_do(plan.works.values(), plan.wanted, kept)
    lines = []
    for key, work in plan.works.items():
        state, cost = "not needed", ""
        if key in todo:
            state = "missing" if work.missing else "to do"
            cost = duration(costs.seconds(work)) if costs.known(work) else "?"
        elif work.done or key in kept:
            state = "there"
        lines.append(f"{key}  {state:<10} {cost:>9}  {work.name}")
    known = [w for w in todo.values() if costs.known(w)]
    estimate = "no estimate of their time"
    if known:
        total = sum(costs.seconds(work) for work in known)
        estimate = f"about {duration(total)} of work for {len(known)} of them"
        if slots > 1:
            estimate += f", {duration(total / min(slots, len(known)))} with {slots} at once"
    lines.append(
        f"{len(plan.works)} works, {len(todo)} to do, {estimate if todo else 'all is there'}"
    )
    if number := unchecked(list(todo.values()), costs.shapes):
        lines.append(
            f"{number} runs are not checked yet: the model that they start from is missing"
        )
    lines += registered.lines(plan.study)
    lines += [f"missing: {line}" for line in _lacking(plan).splitlines()]
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
