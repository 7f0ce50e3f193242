"""Run a whole study, and report its results next to the published numbers.

    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=mini
    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=mini --dry-run
    python -m xformer.study recipes/studies/kao2021-figure2.toml scale=paper executor=slurm \\
        needs.bert=ckpt/bert slurm.partition=gpu slurm.gpus_per_node=1 slurm.timeout_min=600
    python -m xformer.study sweep finetune/classify data=stores/cola init=runs/english \\
        optim.lr=1e-4,5e-5 seed=0..4                        # a study in one line
    python -m xformer.study verify runs/english steps=20    # repeat a run's first steps and compare
    python -m xformer.study reproduce                       # does everything work on this machine?
    python -m xformer.study keys                            # what a study file can say

The same command again runs only what is not done yet. A killed run resumes, and a failed run is
retried. If you add a seed, only its runs are new. Studies share the runs that they have in common.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Literal

from pydantic import Field

from xformer import reproduce, verify
from xformer.config import Settings, find_recipe, load
from xformer.data.display import duration, escaped, many, say
from xformer.data.errors import OF_THE_DISK, BadInput, Failure, typed
from xformer.data.files import installed, make_directory, write_json
from xformer.parallel.precision import first_device, speed_note
from xformer.start import run
from xformer.study import pool, sweep, timing
from xformer.study.claims import registration_lines
from xformer.study.costs import Costs
from xformer.study.forecast import Forecast
from xformer.study.launch import BAD, Outcome, is_own
from xformer.study.local import Local, this_machine
from xformer.study.notes import Notes
from xformer.study.plan import Job, Plan, to_do
from xformer.study.reading import keys_text, read_study
from xformer.study.report import build_report, printed, write_report
from xformer.study.results import Ledger, Results, again_files, made_again, reruns
from xformer.study.sides import Sides
from xformer.study.slurm import QUEUED, Slurm, check_slurm

UNTIMED = {
    "command": "the time of a command is not estimated",
    "no input": "the time is known once the store and the initial model of the run exist",
    "untimed": "no run like it has been timed on this machine",
}
Level = str | int | float | bool  # of a factor, as TOML has it


class Execution(Settings):
    """Where and how the runs of a study are executed."""

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
    jobs: int = Field(0, ge=0)
    """How many jobs run at once. 0: one for each GPU or, without GPUs, one for each core. With more
    jobs than GPUs, several jobs share a GPU. On Slurm: how many are queued or run at once (0:
    1,000)."""
    dry_run: bool = False
    """Only list the runs, how long they will take, and what is missing (also written --dry-run).
    If no run of a kind has been timed, the first steps of one are timed on this machine. All
    timings together take 20 seconds at most."""
    slurm: dict[str, bool | int | float | str] = Field({})
    """Options of the jobs. slurm.timeout_min=600 is their time limit, which is required; a run that
    reaches it continues in the next job. slurm.gpus_per_node=1, slurm.cpus_per_task=8 and
    slurm.mem_gb=32 are of each process. All others are sbatch's: slurm.partition=gpu,
    slurm.account=me."""


class Arguments(Execution):
    """How to run a study."""

    scale: str = ""
    """A scale of the study file, if it has scales. mini: minutes to hours on two CPU cores. small:
    small encoders (2 or 4 layers) on full fine-tuning sets, hours to days. full: published
    weights of a small encoder on one to three full sets, about an hour. short: small modern
    encoders that the study pre-trains first, one to three hours. paper: exactly as published."""
    needs: dict[str, str] = Field({})
    """The paths of what the study needs: needs.NAME=PATH. dry_run=true lists the names."""
    only: dict[str, Level | tuple[Level, ...]] = Field({})
    """Run only the jobs with these levels of the study's factors, and what they depend on:
    only.corpus=english, only.seed=[0,1], or 'only.corpus=["english", "none"]'. The report still
    shows everything that is there."""


class SweepArguments(Execution):
    """How to run a sweep."""

    out: str = ""
    """The study file to write. Empty: OUTPUT/RECIPE-KEYS.toml, named after the recipe and the keys
    that vary. A file that holds another study is not overwritten."""


def main() -> None:
    """`python -m xformer.study STUDY key=value ...`, `sweep RECIPE key=a,b ...`, `verify RUN`,
    `reproduce` or `keys`"""
    match ["dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv[1:]]:
        case ["verify", *rest]:
            verify.main(rest)
        case ["reproduce", *rest]:
            reproduce.main(rest)
        case ["sweep", *rest]:
            sweep_main(rest)
        case ["keys", *_]:
            say(*keys_text().split("\n"))
        case arguments:
            run_study(*planned(arguments))


def sweep_main(arguments: list[str]) -> None:
    """`python -m xformer.study sweep RECIPE key=a,b ...`: write a study file, and run it."""
    mine, others = list[str](), list[str]()  # what says how to run it, and what the runs are
    for argument in arguments:
        of_ours = argument.partition("=")[0].partition(".")[0] in SweepArguments.model_fields
        (mine if of_ours or argument in ("-h", "--help") else others).append(argument)
    settings = load(SweepArguments, mine, recipe=False, title=sweep.__doc__)
    study = sweep.read(others)
    study.check_paths()
    root = _root(settings)
    with tempfile.TemporaryDirectory() as scratch:  # a bad value leaves no study file behind
        draft = Path(scratch) / f"{study.name}.toml"
        study.write(draft)
        try:
            plan = _plan(draft, "", {}, settings)
            Forecast(plan).check()
        except BadInput as error:
            lines = (line.removeprefix(f"{draft}: ") for line in error.lines)
            raise BadInput(*lines) from None
        if settings.dry_run and not settings.out:
            say("study   not written (--dry-run); out=FILE writes it")
            run_study(plan, settings, with_cost=True)
            return
    path = Path(settings.out or root / f"{study.name}.toml")
    study.write(path)
    say(f"study   {path}")
    run_study(_plan(path, "", {}, settings), settings, with_cost=True)


def planned(arguments: list[str]) -> tuple[Plan, Arguments]:
    """The plan that a command line asks for, and its settings."""
    files = [a for a in arguments if "=" not in a and not a.startswith("-")]
    settings = load(Arguments, [a for a in arguments if a not in files], recipe=False)
    if len(files) != 1:
        such = typed("recipes/studies/kao2021-figure2.toml")
        raise BadInput(f"give one study, such as {such}; given: {' '.join(files) or 'none'}")
    path = find_recipe(files[0], kind="studies")
    plan = _plan(path, settings.scale, settings.needs, settings)
    for name, given in settings.needs.items():  # the study would go on without it
        if given and not settings.dry_run and not installed(given).exists():
            raise BadInput(f"needs.{name}={given}: there is no such file or directory")
    only = {k: v if isinstance(v, tuple) else (v,) for k, v in settings.only.items()}
    plan.restrict({factor: [str(level) for level in levels] for factor, levels in only.items()})
    return plan, settings


def _plan(path: Path, scale: str, needs: dict[str, str], settings: Execution) -> Plan:
    """The plan of a study file."""
    kept = Path(settings.kept) if settings.kept else None
    return Plan(read_study(path, scale), _root(settings), needs, kept)


def _root(settings: Execution) -> Path:
    """The directory of all studies. Raises BadInput if it is a file, or if settings of the other
    executor are given."""
    if settings.slurm and settings.executor != "slurm":
        raise BadInput(f"slurm.{next(iter(settings.slurm))} needs executor=slurm")
    if settings.executor == "slurm":
        check_slurm(settings.slurm)
    root = Path(settings.output)
    if root.exists() and not root.is_dir():
        raise BadInput(f"output={root} is a file; give a directory")
    return root


def run_study(plan: Plan, settings: Execution, with_cost: bool = False) -> None:
    """Run what is not done, and write and print the report. With `dry_run` only list it. Raises
    Failure if a job fails."""
    forecast = Forecast(plan)
    forecast.check()
    Notes(forecast)  # refuses a wrong placeholder now, not when the runs are done
    ledger = Ledger(plan.kept, plan)
    Results(plan).check()
    lacking = plan.missing() and not any(j.stage and not j.missing for j in plan.jobs.values())
    if lacking and not settings.dry_run:
        raise BadInput(f"{plan.study.path}: nothing can run: {'; '.join(_lacking(plan))}")
    here, slurm = this_machine(settings.jobs), settings.executor == "slurm"
    todo = to_do(plan.jobs.values(), plan.wanted, ledger.results)
    if settings.dry_run or with_cost:
        costs = Costs(forecast, ledger.results)
        if not slurm:
            timing.measure(plan, costs, todo.values(), here)
        slots = 1 if slurm else here.slots
        if settings.dry_run:
            say(*listing(plan, costs, ledger.results, slots).split("\n"))
            return
        say(*cost_lines(costs, todo, slots))
    elif not slurm:
        say(*slow_lines(forecast, todo))
    queue = Slurm(plan.root, settings.slurm, settings.jobs or QUEUED) if slurm else here
    execute(plan, queue, ledger)


def execute(plan: Plan, executor: pool.Executor, ledger: Ledger) -> None:
    """Run what is not done, and write and print the report. Raises Failure if a job fails."""
    directory = _directory(plan)
    make_directory(directory, "output=")
    if plan.kept is not None:
        make_directory(plan.kept, "kept=")
    todo = to_do(plan.jobs.values(), plan.wanted, ledger.results)
    if again := reruns(todo.values(), directory):
        for why, number in Counter(again.values()).items():
            say(f"{many(number, 'run')} again, {why}")
        again = {**made_again(plan, directory), **again}
        for file in again_files(plan, directory):
            write_json(file, again)
    plan.digests.save()
    own = _other_report(plan, directory), plan.remarks(), Sides(Forecast(plan)).remarks()
    for line in chain(*own):
        say(f"note: {line}")
    for line in _lacking(plan):
        say(f"missing: {line}", error=True)
    if waiting := sum(bool(job.missing) for job in todo.values()):
        say(f"{len(todo) - waiting} of {many(len(todo), 'job')} can run now", error=True)
    for job in plan.jobs.values():
        if job.done:  # perhaps by a call without kept=
            ledger.keep(job, again=False)
    ledger.unpack()
    rates = timing.measured(plan, executor) if isinstance(executor, Local) else {}

    def ended(job: Job, now: bool) -> str:
        """Keep the result of a job. What one of them shows to be wrong is refused at once."""
        line = ledger.keep(job, now)
        if not now:
            return line
        if job.stage:
            Results(plan, [job]).check()
        else:  # the first look at a store that did not exist when the study began
            Forecast(plan).check()
        return line

    outcomes = pool.run_plan(plan, executor, ended, rates)
    _report(plan, outcomes, directory)
    names = ["report.html", "report.md", "results.csv"]
    names += ["headline.png"] if (directory / "headline.png").exists() else []
    say("report   " + "   ".join(str(directory / name) for name in names))
    bad = [o for o in outcomes.values() if o.state in BAD]
    if bad:
        first = next((o for o in bad if o.state == "failed"), bad[0])
        count = f"{len(bad)} of {len(outcomes)} jobs did not succeed"
        raise Failure(f"{count}; {first.job.name}: {first.why.splitlines()[-1]}")


def _report(plan: Plan, outcomes: dict[str, Outcome], directory: Path) -> None:
    """Write and print the report. If it cannot be written, it is printed, and this raises
    Failure."""
    results = Results(plan)
    try:
        text = write_report(results, outcomes, directory)
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        say(*printed(results, build_report(results, outcomes, directory)).split("\n"))
        remedy = f"copy {plan.root} to a directory of your own, and give that as output="
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space, and give the same command again"
        why = os.strerror(error.errno)
        raise Failure(
            f"the report cannot be written into {directory} ({why}), it is only printed; {remedy}"
        ) from None
    say(*text.split("\n"))


def _directory(plan: Plan) -> Path:
    """The directory of a study's report."""
    stem, scale = plan.study.path.stem, plan.study.scale
    return plan.root / (f"{stem}-{scale}" if scale else stem)


def _other_report(plan: Plan, directory: Path) -> list[str]:
    """A line if the directory has the report of a study with another title."""
    report = directory / "report.md"
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    title = text.partition("\n")[0]
    if title in ("", f"# {plan.study.title}".partition("\n")[0]):
        return []
    return [f"{directory} holds the report {title[2:]!r}, which this one replaces"]


def _lacking(plan: Plan) -> list[str]:
    """A line for each need that is missing: what it is, and how to get it."""
    lines = []
    for name, need in plan.missing().items():
        absent = f"{plan.absent[name].absolute()} does not exist" if plan.paths[name] else ""
        parts = filter(None, (absent, need.about, typed(need.get)))
        give = "then" if need.get else "give"
        lines.append(f"{name}: {'; '.join(parts)}; {give} needs.{name}=PATH")
    return lines


def listing(plan: Plan, costs: Costs, kept: Collection[str] = (), slots: int = 1) -> str:
    """What --dry-run prints: every job, its state and cost; what is missing; the sum, and how long
    `slots` jobs at once would take. `kept` are the keys of jobs whose results are kept."""
    todo = to_do(plan.jobs.values(), plan.wanted, kept)
    again = reruns(todo.values(), _directory(plan))
    lines = []
    for key, job in plan.jobs.items():
        state, cost = "not needed", ""
        if key in todo:
            state = "missing" if job.missing else "to do"
            seconds = costs.seconds(job)
            cost = _untimed(costs, job) if seconds is None else duration(max(1, seconds))
        elif job.done or key in kept:
            state = "there"
        why = f"  ({again[key]})" if key in again else ""
        lines.append(f"{key}  {state:<10} {cost:>9}  {job.name}{why}")
    lines += cost_lines(costs, todo, slots)
    if number := costs.forecast.unchecked(todo.values()):
        lines.append(
            f"not checked yet, because the model to start from is missing: {many(number, 'run')}"
        )
    sides = Sides(costs.forecast)
    lines += [f"note: {line}" for line in (*plan.remarks(), *sides.remarks())]
    lines += registration_lines(plan) + sides.lines() + _programs(todo)
    lines += [f"missing: {line}" for line in _lacking(plan)]
    return "\n".join(lines)


def _programs(todo: dict[str, Job]) -> list[str]:
    """A header, and a line for each job that runs a program other than xformer or another study,
    if there are any. Line ends within a command are escaped."""
    lines = []
    for job in todo.values():
        study = "study" in " ".join(job.command[1:3]).replace(".", " ").split()
        if study or not is_own(job):
            lines.append(f"  {job.name}: {escaped(shlex.join(('python', *job.command)))}")
    return ["programs that are not xformer's, and other studies", *lines, ""] if lines else []


def cost_lines(costs: Costs, todo: dict[str, Job], slots: int) -> list[str]:
    """How long the jobs will take, `slots` at once, and why this is not known of some."""
    known = [seconds for job in todo.values() if (seconds := costs.seconds(job)) is not None]
    untimed = [_untimed(costs, job) for job in todo.values() if costs.seconds(job) is None]
    estimate = "no time estimate" if todo else "everything is done"
    if known:
        of = f" for {len(known)} of them" if untimed else ""
        estimate = f"about {duration(max(1, sum(known)))} of work{of}"
        if slots > 1:
            seconds = max(1, sum(known) / min(slots, len(known)))
            estimate += f", {duration(seconds)} with {slots} at once"
    lines = [f"{len(costs.forecast.plan.jobs)} jobs, {len(todo)} to do, {estimate}"]
    if known:
        lines.append("measured by finished runs, or by a run's first steps on this machine")
    lines += slow_lines(costs.forecast, todo)
    if todo:
        lines += timing.other_work()
    for word in filter(untimed.count, UNTIMED):
        lines.append(f"{word}: {UNTIMED[word]} ({many(untimed.count(word), 'job')})")
    return lines


def slow_lines(forecast: Forecast, todo: dict[str, Job]) -> list[str]:
    """A line if runs that are to be done are in bf16, which this machine would emulate."""
    trained = [job for job in todo.values() if job.recipe is not None]
    halves = [job for job in trained if forecast.recipe(job).system.precision == "bf16"]
    if not halves or not (slow := speed_note(first_device(), "bf16")):
        return []
    return [
        f"note: bf16 is set for {many(len(halves), 'run')}, but {slow}. A step in bf16 may take "
        "ten times as long as estimated. In fp32 they are other runs, with results of their own"
    ]


def _untimed(costs: Costs, job: Job) -> str:
    """Why the cost of a job is not known, as a key of UNTIMED."""
    if job.recipe is None:
        return "command"
    return "no input" if costs.work[job.key] is None else "untimed"


if __name__ == "__main__":
    run(main)
