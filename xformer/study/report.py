"""The report of a study: built once as plain values, and written as HTML and as Markdown.

The HTML page opens from disk without a network, on a phone too. Its template escapes everything
that comes from a study file, a run or a log.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, select_autoescape

from xformer.config import toml_text
from xformer.data import style
from xformer.data.display import many, say
from xformer.data.errors import typed
from xformer.data.files import make_directory, write_text
from xformer.study import headline, sections
from xformer.study.claims import Verdict, verdicts
from xformer.study.forecast import Forecast
from xformer.study.launch import Outcome, warnings_of
from xformer.study.notes import Notes
from xformer.study.plan import Job, Plan
from xformer.study.resampling import Shares, claim_records
from xformer.study.results import (
    Line,
    Results,
    made_again,
    mean_line,
    state_of,
    with_scores,
    write_csv,
)
from xformer.study.sections import Section
from xformer.study.sides import Sides
from xformer.study.spec import ScoreTable

TEMPLATES = Path(__file__).parent / "templates"
CLAIMS = "claims.json"  # the numbers of the claims, with their sources
PRINT = {"axes.prop_cycle": style.BOTH["axes.prop_cycle"]}  # of a PDF: twelve colours on white
TEX = {character: f"\\{character}" for character in "#$%&_{}"}  # what LaTeX needs for characters
TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
TEX |= {"±": r"$\pm$", "<": "$<$", ">": "$>$", "|": r"\textbar{}"}


@dataclass(frozen=True)
class RunEntry:
    """A job of the study: its state, its scores, and the command that runs it."""

    job: Job
    state: str
    again: str  # why it was made again
    scores: str
    loss: Line | None  # of training, by step
    recipe: str
    config: str  # path of the resolved settings, relative to the report
    command: str


@dataclass(frozen=True)
class Report:
    """Everything that a report shows."""

    title: str
    question: str
    paper: str
    notes: Sequence[str]
    sections: Sequence[Section]
    verdicts: Sequence[Verdict]
    claims: Sequence[dict[str, Any]]  # a record of each part of each claim
    failed: Sequence[Outcome]
    waiting: dict[str, int]  # why jobs were not run, and how many
    runs: Sequence[RunEntry]


def build_report(results: Results, outcomes: dict[str, Outcome], directory: Path) -> Report:
    """The report of a study as far as it is finished, to be written into a directory."""
    study, plan = results.study, results.plan
    forecast = Forecast(plan)
    notes, sides, shares = Notes(forecast), Sides(forecast), Shares(results)
    again = made_again(plan, directory)
    every = verdicts(results)
    if study.registration is not None:
        every = [replace(v, registered=v.registered + _again(plan, v.table, again)) for v in every]
    records = [claim_records(shares, verdict) for verdict in every]
    parts = [*sections.of_headline(results)]
    parts += sections.of_claims(study, every, records, shares, sides)
    if not study.shows():
        for stage in study.stages:
            parts += sections.of_settings(results, stage, notes)
    parts += [sections.of_table(results, table, notes, shares) for table in study.tables]
    for table in study.tables:
        parts += sections.of_variances(results, table, shares)
    parts += [sections.of_summary(results, summary, notes) for summary in study.summaries]
    for curves in study.curves:
        if panels := results.panels(curves):
            parts.append(sections.of_curves(curves, panels, notes))
    for picture in study.pictures:
        parts += sections.of_picture(results, picture, notes)
    waiting = Counter(o.why for o in outcomes.values() if o.state == "not run")
    remarks = [*plan.remarks(), *sides.remarks()]
    return Report(
        study.title,
        study.question,
        study.paper,
        (*map(typed, notes.notes), *(f"{line}." for line in remarks), *_warnings(plan)),
        parts,
        every,
        [part for claim in records for part in claim],
        [outcome for outcome in outcomes.values() if outcome.state == "failed"],
        dict(waiting),
        [_run(job, results, outcomes, directory, again) for job in plan.jobs.values()],
    )


def _again(plan: Plan, table: ScoreTable, again: dict[str, str]) -> str:
    """How many runs of a table's stages were made again; "" if none were."""
    keys = {job.key for stage in (table.stage, table.minus) for job in plan.runs(stage)}
    count = len(keys & again.keys())
    return f"; runs that were made again because their key changed: {count}" if count else ""


def _warnings(plan: Plan) -> Iterator[str]:
    """What the jobs of a study warned of: commands each with the jobs that read its result, runs
    of a stage together."""
    warned: dict[tuple[str, str], list[Job]] = {}  # by stage and line
    for job in plan.jobs.values():
        lines = warnings_of(job)
        if job.recipe is not None:
            for line in lines:
                warned.setdefault((job.stage, line), []).append(job)
        elif lines:
            readers = [other.name for other in plan.jobs.values() if job.key in other.waits]
            more = f" and {len(readers) - 1} other jobs" if len(readers) > 1 else ""
            verb = "read" if more else "reads"
            which = f", which {readers[0]}{more} {verb}" if readers else ""
            yield from (f"{job.name}{which}: {line}." for line in lines)
    for (stage, line), jobs in warned.items():
        several = f"{len(jobs)} of {len(plan.runs(stage))} runs of {stage}, such as "
        yield f"{several if len(jobs) > 1 else ''}{jobs[0].name}: {line}."


def write_report(results: Results, outcomes: dict[str, Outcome], directory: Path) -> str:
    """Write report.html, report.md, results.csv, the figures as SVG and PDF, and the tables as
    LaTeX into a directory. Returns what to print: the headline, or without one the Markdown."""
    write_csv(directory / "results.csv", results, outcomes)
    report = build_report(results, outcomes, directory)
    _keep(report, results.plan.kept, directory)
    figures = [section.figure for section in report.sections]
    figures += [claim.figure for section in report.sections for claim in section.claims]
    for figure in filter(None, figures):
        if figure.source is not None:
            shutil.copyfile(figure.source, directory / figure.file)
        else:
            (directory / figure.file).write_text(figure.svg, encoding="utf-8")
        if figure.draw is not None:
            with style.colours(PRINT):
                style.write(figure.draw(), (directory / figure.file).with_suffix(".pdf"))
    for section in report.sections:
        if section.table:
            path = directory / f"table-{section.table}.tex"
            path.write_text(latex(section), encoding="utf-8")
    for ending in ("html", "md"):
        text = render(report, ending)
        (directory / f"report.{ending}").write_text(text, encoding="utf-8")
    if (shown := results.study.headline) is not None:
        picture = directory / f"{shown.name}.png"
        if headline.rows(results, shown):
            with style.colours(style.LIGHT):
                style.write(headline.draw(results, shown), picture)
        else:  # those of earlier runs
            for ending in (".png", ".svg", ".pdf"):
                picture.with_suffix(ending).unlink(missing_ok=True)
    return printed(results, report)


def printed(results: Results, report: Report) -> str:
    """What a command prints of a report: the headline, or without one the Markdown."""
    shown = results.study.headline
    if shown is None:
        return render(report, "md")
    return "\n".join(headline.lines(results, shown, report.verdicts))


def _keep(report: Report, kept: Path | None, directory: Path) -> None:
    """Write the numbers of the claims with their sources into the directory of the report. Copy
    them and results.csv to the kept results if there are any, unless the kept ones have scores of
    runs that this report lacks. A report without numbers of claims removes those of an earlier
    report."""
    if report.claims:
        text = ",\n".join(map(json.dumps, report.claims))
        write_text(directory / CLAIMS, f'{{"claims": [\n{text}\n]}}\n')
    else:
        (directory / CLAIMS).unlink(missing_ok=True)
    if kept is not None:
        make_directory(kept, "kept=")
        table = kept / f"{directory.name}.results.csv"
        known, now = with_scores(table), with_scores(directory / "results.csv")
        lost = [run for run, scored in known.items() if scored and not now.get(run)]
        if lost and not all(now.values()):
            say(
                f"note: {table} and the claims beside it stay as they are: they have the scores of "
                f"{many(len(lost), 'run')} that this report lacks, such as {lost[0]}; delete the "
                "table to replace it"
            )
            return
        for name in ("results.csv", CLAIMS):
            copy = kept / f"{directory.name}.{name}"
            if (directory / name).is_file():
                write_text(copy, (directory / name).read_text("utf-8"))
            else:
                copy.unlink(missing_ok=True)


def render(report: Report, ending: str) -> str:
    """A report as "html" or "md"."""
    return _template(f"report.{ending}").render(report=report)


def latex(section: Section) -> str:
    """The table of a section as a `tabular` of LaTeX. Published numbers have rows of their own."""
    return _template("table.tex").render(section=section)


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["tex"] = _tex
    return environment.get_template(name)


def _tex(text: str) -> str:
    """A text for a cell in LaTeX. A hyphen before a number becomes a minus. A bracket or a star at
    the beginning would count as an option of the line before."""
    text = "".join(TEX.get(character, character) for character in " ".join(text.split()))
    if text.startswith(("[", "*")):
        text = f"{{{text[0]}}}{text[1:]}"
    return re.sub(r"(?<![\w.])-(?=[\d.])", "$-$", text)


def _run(
    job: Job, results: Results, outcomes: dict[str, Outcome], directory: Path, again: dict[str, str]
) -> RunEntry:
    metrics = results.metrics.get(job.key, {})
    named = 2 if job.command[0] == "-m" else 1  # the words that name the program
    program, rest = " ".join(job.command[:named]), job.command[named:]
    scores = [
        f"{s} {m} {value:.4g}" for s, values in metrics.items() for m, value in values.items()
    ]
    config = ""
    if job.recipe is not None and (job.path / "config.json").exists():
        config = str(Path("..") / job.path.relative_to(directory.parent) / "config.json")
    return RunEntry(
        job,
        state_of(job, outcomes),
        again.get(job.key, ""),
        "; ".join(scores),
        None if job.recipe is None else mean_line(job.name, [job], "train", "loss"),
        "" if job.recipe is None else toml_text(job.recipe),
        config,
        " ".join([typed(f"python {program}"), shlex.join(rest)]),
    )
