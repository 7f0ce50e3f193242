"""Run a whole study, and report its results next to the published numbers.

    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=mini
    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=mini --dry-run
    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=paper executor=slurm \\
        needs.bert=ckpt/bert slurm.partition=gpu slurm.gpus_per_node=1
    python -m xformer.study verify runs/english steps=20    # repeat a run's first steps and compare
    python -m xformer.study reproduce                       # does everything work on this machine?

The same command again runs only what is not done yet. A killed run resumes, a failed one is
retried, a further seed adds its own runs, and studies share the runs that they have in common.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import Field

from xformer.config import Settings, find_recipe, load
from xformer.data.display import duration, say
from xformer.data.errors import BadInput, Failure, typed
from xformer.data.files import make_directory, read_json, write_json
from xformer.start import run
from xformer.study import pool, reproduce, verify
from xformer.study.claims import registration_lines
from xformer.study.forecast import Costs, Forecast, Notes
from xformer.study.plan import RESULTS, Plan, to_do
from xformer.study.report import write_report
from xformer.study.results import Ledger, Results
from xformer.study.spec import read_study

Level = str | int | float | bool  # of a factor, as TOML has it


class Arguments(Settings):
    """How to run a study."""

    scale: str = ""
    """A scale of the study file. mini: minutes to hours on two CPU cores. small: small encoders (4
    layers, 256 wide) on full fine-tuning sets, hours to days. paper: exactly as published."""
    executor: Literal["local", "slurm"] = "local"
    """Where to run: as processes on this machine, or as jobs on a Slurm cluster."""
    output: str = "runs/studies"
    """Directory of all studies: their reports, and the runs they share. While it holds a file named
    PAUSE nothing runs: running jobs stop (training writes a checkpoint first), and resume once the
    file is gone."""
    kept: str = ""
    """A directory with one small file for each finished run. A run that has a file here counts as
    done, and each newly finished run adds its file. If you commit the directory, the results do not
    depend on the run directories."""
    needs: dict[str, str] = Field({})
    """The paths of what the study needs: needs.NAME=PATH. dry_run=true lists the names."""
    only: dict[str, Level | tuple[Level, ...]] = Field({})
    """Run only the jobs with these levels of the study's factors, and what they depend on:
    only.corpus=english, or only.seed=[0,1]. The report still shows everything that is there."""
    jobs: int = Field(0, ge=0)
    """How many jobs run at once. 0: `per_device` per GPU, or one per core without a GPU."""
    per_device: int = Field(1, ge=1)
    """How many runs share a GPU if jobs=0."""
    dry_run: bool = False
    """Only list the runs, their estimated cost, and what is missing (also written --dry-run)."""
    slurm: dict[str, str | int] = Field({})
    """Parameters of the jobs, named as in submitit: slurm.partition=gpu, slurm.timeout_min=600."""


def main() -> None:
    """`python -m xformer.study STUDY key=value ...`, or `verify RUN`, or `reproduce`"""
    others = {"verify": verify.main, "reproduce": reproduce.main}
    if sys.argv[1:2] and sys.argv[1] in others:
        others[sys.argv[1]](sys.argv[2:])
        return
    plan, settings = planned(sys.argv[1:])
    forecast = Forecast(plan)
    forecast.check()
    Notes(forecast)  # refuses a wrong placeholder now, not when the runs are done
    ledger = Ledger(plan.kept, plan)
    if settings.dry_run:
        slots = 1 if settings.executor == "slurm" else executor_of(settings).slots
        costs = Costs(forecast, ledger.results)
        say(*listing(plan, costs, ledger.results, slots).split("\n"))
        return
    if plan.missing() and not any(job.stage and not job.missing for job in plan.jobs.values()):
        raise BadInput(f"{plan.study.path}: nothing can run: {'; '.join(_lacking(plan))}")
    run_study(plan, executor_of(settings), ledger)


def planned(arguments: list[str]) -> tuple[Plan, Arguments]:
    """The plan that a command line asks for, and its settings."""
    arguments = ["dry_run=true" if a == "--dry-run" else a for a in arguments]
    files = [a for a in arguments if "=" not in a and not a.startswith("-")]
    settings = load(Arguments, [a for a in arguments if a not in files], recipe=False)
    if len(files) != 1:
        such = typed("recipes/studies/kao2021-figure2.toml")
        raise BadInput(f"give one study, such as {such}; given: {' '.join(files) or 'none'}")
    study = read_study(find_recipe(files[0], kind="studies"), settings.scale)
    check_version(Path(settings.output))
    kept = Path(settings.kept) if settings.kept else None
    plan = Plan(study, Path(settings.output), settings.needs, kept)
    only = {k: v if isinstance(v, tuple) else (v,) for k, v in settings.only.items()}
    plan.restrict({factor: [str(level) for level in levels] for factor, levels in only.items()})
    return plan, settings


def run_study(plan: Plan, executor: pool.Executor, ledger: Ledger) -> None:
    """Run what is not done, and write and print the report. Raises Failure if a job fails."""
    directory = plan.root / f"{plan.study.path.stem}-{plan.study.scale}"
    make_directory(directory, "output=")
    plan.digests.save()
    write_json(plan.root / "version.json", {"results": RESULTS})
    for line in _lacking(plan):
        say(f"missing: {line}", error=True)
    ledger.unpack()
    outcomes = pool.run_plan(plan, executor, ledger.keep)
    say(*write_report(Results(plan), outcomes, directory).split("\n"))
    names = ["report.html", "report.md", "results.csv"]
    names += ["headline.png"] if plan.study.headline else []
    say("report   " + "   ".join(str(directory / name) for name in names))
    bad = [o for o in outcomes.values() if o.state in ("failed", "not run")]
    if bad:
        first = next((o for o in bad if o.state == "failed"), bad[0])
        why = first.why.splitlines()[-1] if first.why else "no reason given"
        count = f"{len(bad)} of {len(outcomes)} jobs did not succeed"
        raise Failure(f"{count}; {first.job.name}: {why}")


def executor_of(settings: Arguments) -> pool.Executor:
    """The executor that the settings ask for."""
    if settings.executor == "slurm":
        return pool.Slurm(Path(settings.output), settings.slurm)
    return pool.local(settings.jobs, settings.per_device)


def check_version(root: Path) -> None:
    """Refuse a directory whose runs another version of the code made."""
    file = root / "version.json"
    if root.exists() and not root.is_dir():
        raise BadInput(f"output={root} is a file; give a directory")
    if file.exists():
        content = read_json(file)
        version = content.get("results") if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise BadInput(f"{file} is damaged: it says no version of results")
        if version != RESULTS:
            raise BadInput(
                f"{root} holds results of version {version}, this code makes version {RESULTS}; "
                "give another output="
            )


def _lacking(plan: Plan) -> list[str]:
    """A line for each need that is missing: what it is, and how to get it."""
    lines = []
    for name, need in plan.missing().items():
        absent = f"{plan.absent[name]} does not exist; " if plan.paths[name] else ""
        lines.append(f"{name}: {absent}{need.about}; {typed(need.get)}; then needs.{name}=PATH")
    return lines


def listing(plan: Plan, costs: Costs, kept: Collection[str] = (), slots: int = 1) -> str:
    """What --dry-run prints: every job, its state and cost; what is missing; the sum, and how long
    `slots` jobs at once would take. `kept` are the keys of jobs whose results are kept."""
    todo = to_do(plan.jobs.values(), plan.wanted, kept)
    lines = []
    for key, job in plan.jobs.items():
        state, cost = "not needed", ""
        if key in todo:
            state = "missing" if job.missing else "to do"
            seconds = costs.seconds(job)
            cost = "?" if seconds is None else duration(seconds)
        elif job.done or key in kept:
            state = "there"
        lines.append(f"{key}  {state:<10} {cost:>9}  {job.name}")
    known = [s for job in todo.values() if (s := costs.seconds(job)) is not None]
    estimate = "no time estimate"
    if known:
        total = sum(known)
        estimate = f"about {duration(total)} of work for {len(known)} of them"
        if slots > 1:
            estimate += f", {duration(total / min(slots, len(known)))} with {slots} at once"
    rest = estimate if todo else "everything is done"
    lines.append(f"{len(plan.jobs)} jobs, {len(todo)} to do, {rest}")
    if number := costs.forecast.unchecked(todo.values()):
        lines.append(
            f"{number} runs are not checked yet: the model that they start from is missing"
        )
    lines += [f"note: {line}" for line in plan.mixed()]
    lines += registration_lines(plan.study)
    lines += [f"missing: {line}" for line in _lacking(plan)]
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
