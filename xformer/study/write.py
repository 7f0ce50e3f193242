"""The report of a study in Markdown: verdicts, each table beside the published one, every score."""

from __future__ import annotations

import shlex
from collections import Counter

from xformer.analysis.drawing import plus_minus
from xformer.study.curves import Panel, averaged
from xformer.study.pool import Outcome
from xformer.study.results import Cell, Described, Results, Verdict, drawn
from xformer.study.spec import METRIC, SEED, STATISTICS, Curves, Picture, Study, Summary, Table
from xformer.study.statistics import LEVEL

REGISTERED = ("margin", "detected with power 0.8", "registered")  # further heads of the claims
DEVIATION = ("where we differ", "the paper", "here", "why")  # heads of the table below a table


def markdown(results: Results, outcomes: dict[str, Outcome]) -> str:
    """The whole report."""
    study = results.study
    parts = [f"# {study.title}", study.question, f"*{study.paper}*", *results.notes]
    verdicts = results.verdicts()
    if verdicts:
        parts += ["## What the paper claims, and what holds here", _claims(study, verdicts)]
    for table in study.tables:
        cells = results.cells(table)
        parts += [f"## {table.title}", legend(results, table), _table(table, cells)]
        parts += [_deviations(results, table)]
        parts += ["Every score:", _scores(table, cells)]
    for summary in study.summaries:
        parts += [f"## {summary.title}", summary_legend(results, summary)]
        parts += [_summary(results, summary), _deviations(results, table_of(results, summary))]
    for curves in study.curves:
        found = averaged(results, curves)
        if found:
            parts += [f"## {curves.title}", f"![{curves.title}]({curves.name}.svg)", _ends(found)]
            parts += [_deviations(results, curves)]
    for picture in study.pictures:
        if found_picture := drawn(results, picture):
            parts += [f"## {picture.title}", f"![{picture.title}]({picture.name}.svg)"]
            parts += [f"Of the run {found_picture[0].name}.", _deviations(results, picture)]
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


def _claims(study: Study, verdicts: list[Verdict]) -> str:
    heads = ["claim", "here", "ground", *(REGISTERED if verdicts[0].registered else ())]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for verdict in verdicts:
        row = [_cell(verdict.claim.text), f"**{verdict.state}**", ground(verdict)]
        row += registration(verdict)
        lines.append(f"| {' | '.join(row)} |")
    if study.registration is not None:
        lines += ["", f"Registered: {study.registration.words()}."]
    return "\n".join(lines)


def registration(verdict: Verdict) -> list[str]:
    """Margin, what the seeds detect, and the commit of a registered claim; else nothing."""
    if not verdict.registered:
        return []
    found = [difference.detectable for _, difference, _ in verdict.parts]
    shown = [f"{number:.{verdict.digits}f}" for number in found if number is not None]
    scale = 100 if verdict.digits == 1 else 1
    margin = f"{scale * verdict.claim.margin:g}"
    return [margin, ", ".join(shown) or "-", verdict.registered]


def ground(verdict: Verdict) -> str:
    """The differences that decided a claim, in words."""
    said = []
    for level, difference, p in verdict.parts:
        text = f"{level} " if level else ""
        text += f"{difference.mean:+.{verdict.digits}f}"
        if difference.half is not None:
            text += f" ± {difference.half:.{verdict.digits}f}"
        scale = 100 if verdict.digits == 1 else 1
        against = f"p that it is {scale * margin:g}:" if (margin := verdict.claim.margin) else "p"
        small = "" if p is None else f"{against} {p:.3f}" if p >= 0.0005 else f"{against} < 0.001"
        said.append(f"{text} ({small or 'one pair, or no spread'})")
    floor = "" if verdict.learnt else "no run leaves chance: "
    return floor + "; ".join(said) if said else "no runs to compare"


def legend(results: Results, table: Table) -> str:
    """What the numbers of a table are, in words."""
    unit = "100 times the " if table.percent else ""
    metric = table.metric if isinstance(table.metric, str) else "metric named in each column"
    text = f"{unit}{metric} on the split `{table.split}`"
    if table.where:
        text += ", " + ", ".join(f"{factor} {level}" for factor, level in table.where.items())
    if table.minus:
        text += f", less that of the stage {table.minus}"
    text += ": standard deviation" if table.show == "deviation" else ": mean ± standard deviation"
    text += " (seeds)" if SEED in results.study.factors(table.stage) else " (runs)"
    if table.best != "none":
        text += ", best " + ("run" if table.best == "run" else "validation of any run")
    if table.published is not None:
        text += f"; then what {table.published.source} prints, and ours less theirs"
    for name, parts in results.means(table).items():
        text += f". {name}: mean of {', '.join(parts)}"
    return f"{text}."


def _deviations(results: Results, shown: Table | Curves | Picture) -> str:
    """Where the runs of a table or figure leave the paper; empty where they do not."""
    found = [one for one in results.deviations if one.concerns(shown)]
    if not found:
        return ""
    lines = [f"| {' | '.join(DEVIATION)} |", "|---" * len(DEVIATION) + "|"]
    for one in found:
        lines.append(f"| {' | '.join(map(_cell, one.cells()))} |")
    return "\n".join(lines)


def table_of(results: Results, summary: Summary) -> Table:
    """The table that a summary describes."""
    return next(table for table in results.study.tables if table.name == summary.table)


def summary_legend(results: Results, summary: Summary) -> str:
    """What the numbers of a summary are, in words."""
    table = table_of(results, summary)
    text = f"Of the cells of the table above, {table.title!r}, by {summary.by}"
    if summary.published is not None:
        text += f"; then what {summary.published.source} prints"
    return f"{text}."


def _table(table: Table, cells: list[list[Cell]]) -> str:
    heads = [head(table, cell.column) for cell in cells[0]]
    lines = [f"| {table.rows} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in cells:
        shown = [_shown(cell, table.digits) for cell in row]
        lines.append(f"| {_cell(row[0].row)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def head(table: Table, column: str) -> str:
    """The name of a column, with its metric where each has its own."""
    if table.columns == METRIC or isinstance(table.metric, str):
        return column
    return f"{column} ({table.metric[column]})" if column in table.metric else column


def _shown(cell: Cell, digits: int) -> str:
    text = "-" if cell.summary is None else spread(cell, digits)
    if cell.published is not None:
        text += f"<br>{cell.published:g}"
        if cell.difference is not None:
            text += f" ({cell.difference:+.{digits}f})"
    return text


def spread(cell: Cell, digits: int) -> str:
    """ "83.6 ± 1.3 (6)", or "1.3 (6)" where the deviation is what is shown."""
    summary = cell.summary
    assert summary is not None
    if cell.show == "deviation":
        text = "-" if summary.deviation is None else f"{summary.deviation:.{digits}f}"
        return f"{text} ({len(summary.scores)})"
    text = f"{summary.mean:.{digits}f}"
    if summary.deviation is not None:
        text += f" ± {summary.deviation:.{digits}f}"
    best = "" if cell.best is None else f", best {cell.best:.{digits}f}"
    failed = f", {cell.at_chance} of {len(cell.runs)} at chance" if cell.at_chance else ""
    return f"{text} ({len(summary.scores)}){best}{failed}"


def _scores(table: Table, cells: list[list[Cell]]) -> str:
    lines = [f"| cell | scores | median | {LEVEL:.0%} interval of the mean |", "|---|---|---|---|"]
    d = table.digits
    for cell in (cell for row in cells for cell in row):
        if cell.summary is not None:
            scores = ", ".join(f"{score:.{d}f}" for score in cell.summary.scores)
            interval = cell.summary.interval
            low = "-" if interval is None else f"{interval[0]:.{d}f} to {interval[1]:.{d}f}"
            lines.append(
                f"| {_cell(cell.row)}, {_cell(cell.column)} | {scores} "
                f"| {cell.summary.median:.{d}f} | {low} |"
            )
    return "\n".join(lines)


def _summary(results: Results, summary: Summary) -> str:
    rows = results.described(summary)
    lines = [
        f"| {summary.by} | " + " | ".join(STATISTICS) + " |",
        "|---" * (len(STATISTICS) + 1) + "|",
    ]
    for row in rows:
        lines.append(f"| {_cell(row[0].row)} | " + " | ".join(map(_statistic, row)) + " |")
    return "\n".join(lines)


def _statistic(one: Described) -> str:
    return statistic(one) + (f"<br>{one.published:g}" if one.published is not None else "")


def statistic(one: Described) -> str:
    """ "12" for a count, "-0.008" for all else."""
    if one.value is None:
        return "-"
    return f"{one.value:.0f}" if one.column == "count" else f"{one.value:.3f}"


def _ends(panels: list[Panel]) -> str:
    """Where each curve ends."""
    lines = ["| panel | line | runs | number | last point |", "|---|---|---|---|---|"]
    for panel in panels:
        for line in panel.lines:
            end = plus_minus(line.mean[-1], line.deviation[-1], line.runs)
            lines.append(
                f"| {_cell(panel.name)} | {_cell(line.name)} | {line.runs} "
                f"| {_cell(panel.value)} | {end} "
                f"at step {line.x[-1]:g} |"
            )
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
