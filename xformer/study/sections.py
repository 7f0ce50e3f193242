"""The sections of a report as plain values: the claims, the tables, the figures."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xformer.analysis.drawing import plus_minus
from xformer.data import style
from xformer.study import dotplot, headline
from xformer.study.claims import Verdict, words_of
from xformer.study.figures import curves_figure, table_figure
from xformer.study.notes import Notes
from xformer.study.plan import Job
from xformer.study.resampling import EXAMPLES, Shares, random_factors, variances
from xformer.study.results import (
    Cell,
    Panel,
    Results,
    Sample,
    drawn_first,
)
from xformer.study.sides import Sides
from xformer.study.spec import (
    METRIC,
    SEED,
    STATISTICS,
    Curves,
    Picture,
    ScoreTable,
    Shown,
    Study,
    Summary,
    averaged_factors,
)
from xformer.study.statistics import LEVEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 12  # settings in the figure of a sweep
VERDICTS = (
    "A claim holds if its test shows that the difference is on its side of the margin (for a tie, "
    "between the margins), and fails if it shows the opposite. Otherwise it is undecided, which "
    "does not mean equal. "
)
# what the overview says of a claim
PUBLISHED = "published difference"
GLANCE = ("difference ± 95 % interval", PUBLISHED, "seeds", "hours", "registered")
# settings that decide on what masked language modelling is validated
OF_VALIDATION = {"masking.probability", "masking.spans", "data", "batch.max_tokens", "mapping"}
DIFFERS = ("where we differ", "the paper", "here", "why")  # headers of the table of deviations


@dataclass(frozen=True)
class Entry:
    """The content of one cell of a grid."""

    text: str
    published: str = ""  # the paper's number, and ours minus theirs
    value: float | None = None  # what rows are sorted by
    run: str = ""  # key of the run that it links to
    prose: bool = False  # words rather than a number or a name
    bold: bool = False


@dataclass(frozen=True)
class Grid:
    """Rows of entries below their column headers."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Entry]]


@dataclass(frozen=True)
class Drawing:
    """A figure: drawn for the report, or files that a run has drawn. Those are shown as images, so
    that nothing within them can act on the page."""

    file: str  # the name of its SVG beside the report
    svg: str = ""
    draw: Callable[[], Figure] | None = None  # draws it once more, for a PDF beside the SVG
    source: Path | None = None  # the file that a run has drawn
    light: str = ""  # as a data URI
    dark: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Tested:
    """A claim as a sentence: its verdict, its picture, and what is known of it, by name."""

    text: str
    state: str
    figure: Drawing | None
    facts: dict[str, str]


@dataclass(frozen=True)
class Section:
    """A heading and what follows it, in the order of the fields."""

    title: str
    about: str = ""
    table: str = ""  # the name of its table, which is also written as table-NAME.tex
    figure: Drawing | None = None
    run: Job | None = None  # the job that drew the figure
    claims: Sequence[Tested] = ()
    grid: Grid | None = None
    note: str = ""
    deviations: Grid | None = None
    scores: Grid | None = None


def _grid(headers: Sequence[str], rows: Iterable[Iterable[str]], prose: bool = False) -> Grid:
    """A grid of plain texts."""
    return Grid(headers, [[Entry(text, prose=prose) for text in row] for row in rows])


def drawing(name: str, draw: Callable[[], Figure], caption: str = "") -> Drawing:
    """A figure that the report draws, readable on light and on dark pages."""
    with style.colours(style.BOTH):
        return Drawing(f"{name}.svg", style.svg(draw(), name), draw, caption=caption)


def of_headline(results: Results) -> Iterator[Section]:
    shown = results.study.headline
    if shown is not None and headline.rows(results, shown):
        figure = drawing(shown.name, partial(headline.draw, results, shown))
        yield Section("In one picture", figure=figure)


def of_claims(
    study: Study,
    every: Sequence[Verdict],
    records: list[list[dict[str, Any]]],
    shares: Shares,
    sides: Sides,
) -> Iterator[Section]:
    """The claims at a glance, and then each of them with its picture and its tests."""
    if not every:
        return
    note, rows, claims = _undecided(every), [], []
    published = any(part["published"] is not None for parts in records for part in parts)
    shown = [published or name != PUBLISHED for name in GLANCE]
    if study.registration is not None:
        note = f"{note} Registered: {study.registration.words()}.".lstrip()
    for number, (verdict, parts) in enumerate(zip(every, records, strict=True), start=1):
        text, state = verdict.claim.text, verdict.state
        others = (Entry(one, prose=True) for one in compress(at_a_glance(parts), shown))
        rows.append([Entry(text, prose=True), Entry(state, bold=True), *others])
        svg = dotplot.draw(verdict, [part["published"] for part in parts]) if parts else ""
        figure = Drawing(f"claim-{number}.svg", svg) if svg else None
        claims.append(Tested(text, state, figure, _facts(verdict, shares, sides)))
    title = "The claims, and whether they hold here" if study.paper else "Claims"
    headers = ("claim", "verdict", *compress(GLANCE, shown))
    legend = VERDICTS + dotplot.LEGEND + (dotplot.LEGEND_THEIRS if published else "")
    yield Section(title, grid=Grid(headers, rows), note=note)
    yield Section("How each claim was tested", legend, claims=claims)


def at_a_glance(parts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What the overview of a report and of docs/findings.md says of a claim in the columns GLANCE,
    from the records of its parts."""
    if not parts:
        return ("-",) * len(GLANCE)
    effects, published = [], []
    for part in parts:
        effects.append(f"{part['part']} {part['shown']}".lstrip())
        if part["published"] is not None:
            theirs = f"{part['published']:+.{part['digits']}f}"
            published.append(f"{part['part']} {theirs}".lstrip())
    seeds = ", ".join(dict.fromkeys(str(len(part["pairs"])) for part in parts))
    hours = f"{parts[0]['hours']:.1f}" if parts[0]["hours"] >= 0.05 else "< 0.1"
    differences = ("; ".join(effects), "; ".join(published) or "-")
    return (*differences, seeds, hours, parts[0]["registered"])


def _facts(verdict: Verdict, shares: Shares, sides: Sides) -> dict[str, str]:
    """What is known of a claim besides its verdict, by name."""
    facts = {
        "difference": verdict.evidence(),
        "over seeds and test examples (multi-bootstrap)": _bootstrap(verdict, shares),
        "p corrected over all claims (Holm)": _over_study(verdict),
        "seeds that would decide it": verdict.needed,
        "its sides differ in": sides.words(verdict.claim),
    }
    if shares.study.registration is not None:
        facts["margin"] = f"{verdict.margin:g}"
        facts["distance from the margin that its seeds detect (power 0.8)"] = _detectable(verdict)
    return {name: text for name, text in facts.items() if text}


def _detectable(verdict: Verdict) -> str:
    """The differences that the seeds of a registered claim detect with power 0.8."""
    every = [part.difference.detectable(verdict.claim.tie) for part in verdict.parts]
    texts = [f"{number:.{verdict.table.digits}f}" for number in every if number is not None]
    return ", ".join(texts) or "-"


def _bootstrap(verdict: Verdict, shares: Shares) -> str:
    """The multi-bootstrap of each part of a claim, "1.2 to 3.4 (p 0.012)", or why it has none.
    Without spread there is no p."""
    digits, texts = verdict.table.digits, []
    against = f"p against {verdict.margin:g}:" if verdict.margin else "p"
    for level, *_ in verdict.parts:
        pairs = shares.pairs(verdict.table, *verdict.claim.sides(level))
        drawn = shares.bootstrap([*pairs.values()], verdict.margin)
        if isinstance(drawn, str):
            texts.append(f"{level} no interval, {drawn}".lstrip())
            continue
        low, high = (f"{end:+.{digits}f}" for end in drawn.interval)
        spread = drawn.interval[0] < drawn.interval[1]
        p = f" ({words_of(drawn.p, against)})" if spread and not verdict.claim.tie else ""
        texts.append(f"{level} {low} to {high}{p}".lstrip())
    return "; ".join(texts)


def _over_study(verdict: Verdict) -> str:
    """The p of each part of a claim, adjusted over all tests of the study, and the verdict if it
    would be another."""
    texts = [words_of(p) for p in verdict.overall if p is not None]
    if texts and verdict.state_overall != verdict.state:
        texts[-1] += f" ({verdict.state_overall})"
    return "; ".join(texts)


def _undecided(every: Sequence[Verdict]) -> str:
    """The share of undecided claims, also if p is adjusted over the study."""
    tested = [verdict for verdict in every if verdict.parts]
    if not tested:
        return ""
    once = sum(verdict.state == "undecided" for verdict in tested)
    overall = sum(verdict.state_overall == "undecided" for verdict in tested)
    tests = sum(p is not None for verdict in tested for p in verdict.overall)
    text = f"Undecided: {once} of {len(tested)} claims that have data ({once / len(tested):.0%})."
    if tests > 1:
        text += f" With Holm's correction over all {tests} tests of the study: {overall}."
    return text


def of_table(results: Results, table: ScoreTable, notes: Notes, shares: Shares) -> Section:
    cells = results.cells(table)
    headers = [_column(table, cell.column) for cell in cells[0]]
    rows = [[Entry(row[0].row), *(_cell(cell, table.digits) for cell in row)] for row in cells]
    figure, flat = None, [cell for row in cells for cell in row]
    if table.show == "mean" and any(cell.sample for cell in flat):
        figure = drawing(f"table-{table.name}", partial(_scores_figure, table, cells, headers))
    return Section(
        table.title,
        _legend(results, table),
        table.name,
        figure,
        grid=Grid([table.rows, *headers], rows),
        deviations=_deviations(notes, table),
        scores=_scores(cells, table.digits, [_resampled(results, table, shares, c) for c in flat]),
    )


def _scores_figure(table: ScoreTable, cells: list[list[Cell]], headers: Sequence[str]) -> Figure:
    """The figure of a table. If its rows are numbers, such as steps, they become the horizontal
    axis, and a line joins the scores of each column."""
    rows = [row[0].row for row in cells]
    if table.rows.split(".")[0] == SEED or not _numeric(rows) or _numeric(headers):
        return table_figure(table, cells, headers)
    cells = sorted(cells, key=lambda row: float(row[0].row))
    lines = [
        [replace(cell, row=header, column=cell.row) for cell in column]
        for header, column in zip(headers, zip(*cells, strict=True), strict=True)
    ]
    turned = table.model_copy(update={"columns": table.rows})
    return table_figure(turned, lines, [row[0].row for row in cells], joined=True)


def of_variances(results: Results, table: ScoreTable, shares: Shares) -> Iterator[Section]:
    """How much of the variance of a score is due to seeds and to test examples; for tables in which
    this is known of two or more of them."""
    if table.show != "mean":
        return
    factors, rows = random_factors(results.study, table.stage), []
    names = [*factors, EXAMPLES]
    every = [
        (f"{row}, {column}", variances(results, shares, table, row, column))
        for row in results.study.levels_of(table)[table.rows]
        for column in results.study.columns(table)
    ]
    names = [name for name in names if any(name in parts for _, parts in every)]
    for cell, parts in every:
        total = sum(max(0.0, part) for part in parts.values())
        if total:
            shown = [_part(parts.get(name), total, table.digits) for name in names]
            rows.append((cell, f"{total**0.5:.{table.digits + 1}f}", *shown))
    if len(names) < 2 or not rows:
        return
    headers = [
        f"{name} ({factors[name]})" if factors.get(name, name) != name else name for name in names
    ]
    about = (
        "The standard deviation of one run's score; then of each source its share of the variance "
        "and, in brackets, the standard deviation that it causes by itself. A dash means that the "
        "predictions cannot be resampled. The part of the test examples is what resampling them "
        "changes in all runs alike. "
    )
    if len(factors) > 1:
        about += "A seed is drawn anew for every seed to its left. "
    about += "With few seeds these shares are rough."
    grid = _grid(("cell", "standard deviation", *headers), rows)
    yield Section(f"Where the variance comes from: {table.title}", about, grid=grid)


def _part(variance: float | None, total: float, digits: int) -> str:
    """ "62 % (1.31)": the share of a part, and the standard deviation that it adds by itself."""
    if variance is None:
        return "-"
    part = max(0.0, variance)
    return f"{100 * part / total:.0f} % ({part**0.5:.{digits + 1}f})"


def of_settings(results: Results, stage: str, notes: Notes) -> Iterator[Section]:
    """The settings of a stage's runs with their scores, best first; for a study that says nothing
    of tables and figures."""
    jobs = [job for job in results.plan.runs(stage) if job.recipe is not None]
    if not jobs or not results.plan.wanted & {job.key for job in jobs}:
        return
    metric, sign = notes.forecast.metric(jobs[0])
    cells = results.settings(stage, metric, sign)
    if not cells[0]:
        return
    table = ScoreTable(
        name=stage,
        title=f"Settings of {stage}",
        stage=stage,
        rows="split",
        columns="settings",
        metric=metric,
        split=" and ".join(cell.column for cell in cells[0]),
        percent=sign > 0,
    )
    digits, unit = table.digits, "100 times the " if table.percent else ""
    about = f"{unit}{metric}: mean over seeds and {LEVEL:.0%} interval of the mean; of fewer than"
    about += " three seeds, all scores."
    best = cells[0][0]
    own = [f for f in results.study.factors(stage) if set(f.split("+")) & OF_VALIDATION]
    if own and metric in ("loss", "perplexity"):
        which = " and ".join(own)
        about = f"These losses cannot be compared between levels of {which}. {about}"
    elif best.column == "valid" and best.sample is not None:
        scores = ", ".join(f"{cell.column} {_interval(cell, digits)}" for cell in cells[0])
        tied = [row[0].row for row in cells[1:] if row[0].value == best.value]
        also = f"; tied with {'; '.join(tied)}" if tied else ""
        about = f"Best on valid: {best.row} ({scores}){also}. {about}"
    rows = [
        [Entry(row[0].row), *(Entry(_interval(c, digits), "", c.value, _link(c)) for c in row)]
        for row in cells
    ]
    if along := _numeric_factor(results.study, stage):
        figure = _along(results.study, table, along, cells)
    else:
        figure = _side_by_side(table, cells)
    grid = Grid(["settings", *(cell.column for cell in cells[0])], rows)
    yield Section(table.title, about, stage, figure, grid=grid, scores=_scores(cells, digits))


def _side_by_side(table: ScoreTable, cells: list[list[Cell]]) -> Drawing:
    """The figure of a sweep: the scores of the best settings, a colour for each split."""
    drawn = [row for row in cells if row[0].sample is not None][:SHOWN]
    names = [row[0].row.replace(", ", "\n") for row in drawn]
    columns = [list(column) for column in zip(*drawn, strict=True)]
    columns = [[replace(cell, row=cell.column) for cell in column] for column in columns]
    caption = "Bars show ± one standard deviation of three seeds or more."
    caption += f" Only the best {SHOWN} settings are drawn." if len(drawn) < len(cells) else ""
    return drawing(table.stage, partial(table_figure, table, columns, names), caption)


def _numeric_factor(study: Study, stage: str) -> str:
    """The first factor of a stage, besides the seeds, that has three levels or more, all of them
    numbers; "" if there is none."""
    random = study.random_factors(stage)
    factors = study.factors(stage).items()
    return next((f for f, levels in factors if f not in random and _numeric(levels)), "")


def _numeric(levels: Iterable[str]) -> bool:
    """Whether levels are at least three numbers, so that a line may join their scores."""
    try:
        numbers = [float(level) for level in levels]
    except ValueError:
        return False
    return len(numbers) > 2 and all(map(math.isfinite, numbers))


def _along(study: Study, table: ScoreTable, factor: str, cells: list[list[Cell]]) -> Drawing:
    """The figure of a sweep over a number, such as the layer of a probe: the scores on the first
    split by this number, with a line for each combination of the other settings."""
    levels = sorted(study.factors(table.stage)[factor], key=float)
    random = study.random_factors(table.stage)
    lines: dict[str, dict[str, Cell]] = {}
    for cell in (row[0] for row in cells if row[0].runs):
        own = cell.runs[0].levels
        others = [f"{f}={v}" for f, v in own.items() if f not in (factor, *random)]
        name = ", ".join(others) or "all runs"
        lines.setdefault(name, {})[own[factor]] = replace(cell, row=name, column=own[factor])
    split = cells[0][0].column
    shown = table.model_copy(update={"columns": factor, "split": split})
    rows = [
        [line.get(level, Cell(name, level, (), None, None)) for level in levels]
        for name, line in list(lines.items())[:SHOWN]
    ]
    caption = f"Bars show ± one standard deviation of three seeds or more, on {split}."
    caption += f" Only the best {SHOWN} settings are drawn." if len(lines) > SHOWN else ""
    return drawing(table.stage, partial(table_figure, shown, rows, levels, joined=True), caption)


def _link(cell: Cell) -> str:
    return cell.runs[0].key if cell.runs else ""


def _interval(cell: Cell, digits: int) -> str:
    """ "83.6 [82.0, 85.2] (6)", with the interval of the mean; without one "83.6 (82.1, 85.1)"."""
    if cell.sample is None:
        return "-"
    if cell.sample.interval is None:
        return cell.sample.words(digits)
    low, high = cell.sample.interval
    number = len(cell.sample.scores)
    return f"{cell.sample.mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] ({number})"


def _column(table: ScoreTable, column: str) -> str:
    """The name of a column, with its metric if each column has its own."""
    if table.columns == METRIC or isinstance(table.metric, str) or column not in table.metric:
        return column
    return f"{column} ({table.metric[column]})"


def _legend(results: Results, table: ScoreTable) -> str:
    """What the numbers of a table are, in words."""
    unit = "100 times the " if table.percent else ""
    one = isinstance(table.metric, str)
    metric = table.metrics[0].rpartition(".")[2] if one else "metric named in each column"
    text = f"{unit}{metric} on the split `{table.place or table.split}`"
    text += "" if table.place else ", unless the metric names another"
    if table.where:
        text += ", " + ", ".join(f"{factor} {level}" for factor, level in table.where.items())
    if table.minus:
        text += f", minus that of the stage {table.minus}"
    text += ": standard deviation" if table.show == "deviation" else ": mean ± standard deviation"
    many = "seeds" if SEED in results.study.factors(table.stage) else "runs"
    text += f" (number of {many})"
    if averaged := averaged_factors(results.study, table):
        text += f"; each score is a mean over {' and '.join(averaged)}"
    if table.best != "none":
        text += ", best " + ("run" if table.best == "run" else "validation of any run")
    if table.published is not None:
        text += f"; then the number in {table.published.source}, and ours minus theirs"
    for name, parts in results.study.means(table).items():
        text += f". {name}: mean of {', '.join(parts)}"
    if table.show != "deviation":
        text += f". Of two {many} a cell has the mean and both scores"
    if table.chance:
        text += ". At chance: the score is not above that of guessing. If predictions are kept, an "
        text += "accuracy must be above it by more than 1.64 standard errors of the test examples"
    return f"{text}."


def _cell(cell: Cell, digits: int) -> Entry:
    published = "" if cell.published is None else f"{cell.published:g}"
    if cell.difference is not None:
        published += f" ({cell.difference:+.{digits}f})"
    text = "-" if cell.sample is None else _spread(cell, cell.sample, digits)
    return Entry(text, published, cell.value, _link(cell))


def _spread(cell: Cell, sample: Sample, digits: int) -> str:
    """What a cell says of its scores, or "1.3 (6)" if the deviation is what is shown."""
    if cell.show == "deviation":
        deviation = "-" if sample.deviation is None else f"{sample.deviation:.{digits}f}"
        return f"{deviation} ({len(sample.scores)})"
    best = "" if cell.best is None else f", best {cell.best:.{digits}f}"
    failed = f", {cell.at_chance} of {len(cell.runs)} at chance" if cell.at_chance else ""
    return f"{sample.words(digits)}{best}{failed}"


def _resampled(results: Results, table: ScoreTable, shares: Shares, cell: Cell) -> str:
    """The interval of a cell's mean under resampled seeds and test examples, or why it has none. A
    mean of columns has the examples of each column resampled by themselves."""
    every = shares.replicates(table, {table.rows: cell.row, table.columns: cell.column})
    drawn = shares.bootstrap([*every.values()])
    if isinstance(drawn, str):
        return drawn
    return " to ".join(f"{x:.{table.digits}f}" for x in drawn.interval)


def _scores(cells: list[list[Cell]], digits: int, resampled: Sequence[str] = ()) -> Grid:
    """Every score of every cell, with the intervals `resampled` of the cells if there are any."""
    rows, headers = [], ["cell", "scores", "median", f"{LEVEL:.0%} interval of the mean"]
    headers += ["interval over seeds and test examples"] if resampled else []
    for number, cell in enumerate(cell for row in cells for cell in row):
        if cell.sample is not None:
            scores = ", ".join(f"{score:.{digits}f}" for score in cell.sample.scores)
            ends = [f"{end:.{digits}f}" for end in cell.sample.interval or ()]
            median = f"{cell.sample.median:.{digits}f}"
            texts = (f"{cell.row}, {cell.column}", scores, median, " to ".join(ends) or "-")
            rows.append((*texts, *resampled[number : number + 1]))
    return _grid(headers, rows)


def of_summary(results: Results, summary: Summary, notes: Notes) -> Section:
    table = results.study.table(summary.table)
    about = f"Over the cells of the table above, {table.title!r}, by {summary.by}"
    if summary.published is not None:
        about += f"; then the number in {summary.published.source}"
    rows = []
    for level, values in results.statistics(summary).items():
        name = results.study.stands_for(summary.by, level)
        entries = [_statistic(summary, name, what, value) for what, value in values.items()]
        rows.append([Entry(level), *entries])
    grid = Grid((summary.by, *STATISTICS), rows)
    return Section(summary.title, f"{about}.", grid=grid, deviations=_deviations(notes, table))


def _statistic(summary: Summary, level: str, what: str, value: float | None) -> Entry:
    """ "12" for a count, "-0.008" for all else; with the published number of a level."""
    published = summary.published.number(level, what) if summary.published else None
    text = "-" if value is None else f"{value:.0f}" if what == "count" else f"{value:.3f}"
    return Entry(text, "" if published is None else f"{published:g}", value)


def of_curves(curves: Curves, panels: list[Panel], notes: Notes) -> Section:
    rows = []
    for panel in panels:
        for line in panel.lines:
            end = plus_minus(line.mean[-1], line.deviation[-1], line.runs)
            last = f"{end} at step {line.x[-1]:g}"
            place = panel.name or f"by {curves.lines}"
            rows.append((place, line.name, str(line.runs), panel.value, last))
    caption = "Mean over runs; bands show ± one standard deviation, or both runs if there are two."
    figure = drawing(curves.name, partial(curves_figure, panels), caption)
    grid = _grid(("panel", "line", "runs", "number", "last point"), rows)
    return Section(curves.title, figure=figure, grid=grid, deviations=_deviations(notes, curves))


def of_picture(results: Results, picture: Picture, notes: Notes) -> Iterator[Section]:
    if drawn := drawn_first(results.plan, picture):
        job, path = drawn
        dark = path.with_name(f"{path.stem}-dark.svg")
        images = (_data(path), _data(dark) if dark.is_file() else "")
        figure = Drawing(f"{picture.name}.svg", "", None, path, *images)
        deviations = _deviations(notes, picture)
        yield Section(picture.title, figure=figure, run=job, deviations=deviations)
    elif any(job.done for job in results.plan.runs(picture.stage, picture.where)):
        yield Section(picture.title, f"No finished run has drawn {picture.file}.")


def _data(path: Path) -> str:
    return f"data:image/svg+xml;base64,{b64encode(path.read_bytes()).decode()}"


def _deviations(notes: Notes, shown: Shown) -> Grid | None:
    """Where the runs of a table or figure differ from the paper's."""
    every = [one for one in notes.deviations if one.concerns(shown)]
    return _grid(DIFFERS, (one.cells() for one in every), prose=True) if every else None
