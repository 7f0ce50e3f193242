"""The report of a study in Markdown: verdicts, each table beside the published one, every score."""

from __future__ import annotations

import shlex
from collections import Counter

from xformer.study.pool import Outcome
from xformer.study.results import Cell, Results, Verdict
from xformer.study.spec import Table
from xformer.study.statistics import LEVEL, Summary


def markdown(results: Results, outcomes: dict[str, Outcome]) -> str:
    """The whole report."""
    study = results.study
    parts = [f"# {study.title}", study.question, f"*{study.paper}*", *study.notes]
    verdicts = results.verdicts()
    if verdicts:
        parts += ["## What the paper claims, and what holds here", _claims(verdicts)]
    for table in study.tables:
        cells = results.cells(table)
        parts += [f"## {table.title}", legend(table), _table(results, table, cells)]
        parts += ["Every score:", _scores(cells)]
    parts += _not_done(outcomes)
    parts += ["## How it was made", _commands(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _not_done(outcomes: dict[str, Outcome]) -> list[str]:
    """What failed, with the end of its log, and how many works wait for what."""
    bad = [o for o in outcomes.values() if o.state == "failed"]
    waiting = Counter(o.why for o in outcomes.values() if o.state == "not run")
    if not bad and not waiting:
        return []
    lines = [f"- {o.work.name} failed:\n\n{_quoted(o.why)}\n" for o in bad]
    lines += [f"- {number} not run: {why}" for why, number in waiting.items()]
    return ["## Not done", "\n".join(lines)]


def _claims(verdicts: list[Verdict]) -> str:
    lines = ["| claim | here | ground |", "|---|---|---|"]
    for verdict in verdicts:
        lines.append(f"| {_cell(verdict.claim.text)} | **{verdict.state}** | {ground(verdict)} |")
    return "\n".join(lines)


def ground(verdict: Verdict) -> str:
    """The differences that decided a claim, in words."""
    said = []
    for level, difference, p in verdict.parts:
        text = f"{level} " if level else ""
        text += f"{difference.mean:+.1f}"
        if difference.half is not None:
            text += f" ± {difference.half:.1f}"
        said.append(text + (f" (p {p:.3f})" if p is not None else " (one pair)"))
    return "; ".join(said) or "no runs to compare"


def legend(table: Table) -> str:
    """What the numbers of a table are, in words."""
    unit = "100 times the " if table.percent else ""
    metric = table.metric if isinstance(table.metric, str) else "metric named in each column"
    text = f"{unit}{metric} on the split `{table.split}`: mean ± standard deviation (runs)"
    if table.published is not None:
        text += f"; then what {table.published.source} prints, and ours less theirs"
    return f"{text}."


def _table(results: Results, table: Table, cells: list[list[Cell]]) -> str:
    heads = [head(table, cell.column) for cell in cells[0]]
    lines = [f"| {table.rows} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in cells:
        lines.append(f"| {_cell(row[0].row)} | " + " | ".join(map(_shown, row)) + " |")
    return "\n".join(lines)


def head(table: Table, column: str) -> str:
    """The name of a column, with its metric where each has its own."""
    named = isinstance(table.metric, dict)
    return f"{column} ({table.metric[column]})" if named else column  # type: ignore[index]


def _shown(cell: Cell) -> str:
    text = "-" if cell.summary is None else spread(cell.summary)
    if cell.published is not None:
        text += f"<br>{cell.published:g}"
        if cell.difference is not None:
            text += f" ({cell.difference:+.1f})"
    return text


def spread(summary: Summary) -> str:
    """ "83.6 ± 1.3 (6)"."""
    text = f"{summary.mean:.1f}"
    if summary.deviation is not None:
        text += f" ± {summary.deviation:.1f}"
    return f"{text} ({len(summary.scores)})"


def _scores(cells: list[list[Cell]]) -> str:
    lines = [f"| cell | scores | median | {LEVEL:.0%} bootstrap interval of the mean |",
             "|---|---|---|---|"]  # fmt: skip
    for cell in (cell for row in cells for cell in row):
        if cell.summary is not None:
            scores = ", ".join(f"{score:.1f}" for score in cell.summary.scores)
            interval = cell.summary.interval
            low = "-" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"
            lines.append(f"| {_cell(cell.row)}, {_cell(cell.column)} | {scores} "
                         f"| {cell.summary.median:.1f} | {low} |")  # fmt: skip
    return "\n".join(lines)


def _commands(results: Results) -> str:
    lines = [
        shlex.join(["python", *work.command]) + f"   # {work.name}"
        for work in results.plan.works.values()
    ]
    return "```\n" + "\n".join(lines) + "\n```"


def _quoted(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.splitlines())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
