"""Read a study file, or refuse it with a line for each mistake in it; and the help of its keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import partial
from inspect import getdoc
from itertools import chain, product
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from xformer.config import (
    SHORT,
    Settings,
    each_text,
    find_recipe,
    flat,
    merge,
    nearest,
    read_recipe,
    type_and_default,
    validate,
    wrapped,
)
from xformer.data.errors import BadInput, typed
from xformer.recipe import Recipe
from xformer.study import spec
from xformer.study.spec import (
    METRIC,
    PLACE,
    RESERVED,
    SEED,
    STATISTICS,
    Claim,
    Curves,
    Deviation,
    Headline,
    Made,
    Need,
    Picture,
    Published,
    Registration,
    ScoreTable,
    Shown,
    Stage,
    Study,
    Summary,
    duplicate,
    is_safe_filename,
    levels_of_claim,
    replicate_factors,
    seeds_of,
    with_levels,
    within,
)

PARTS: dict[str, type[Settings]] = {
    "needs": Need,
    "made": Made,
    "stages": Stage,
    "tables": ScoreTable,
    "summaries": Summary,
    "curves": Curves,
    "pictures": Picture,
    "headline": Headline,
    "claims": Claim,
    "registration": Registration,
    "deviations": Deviation,
}
NAMED, ALONE = ("needs", "made", "stages"), ("headline", "registration")
SEVERAL = tuple(part for part in PARTS if part not in ALONE)  # named ones, and lists
PART = re.compile(rf"\b(?:({'|'.join(SEVERAL)})\.([\w-]+)|({'|'.join(ALONE)}))\.")


def read_study(path: str | Path, scale: str) -> Study:
    """The study in a file at a scale. Raises BadInput with a line for each mistake in it."""
    path = Path(path)
    values = read_recipe(path, what="study file")
    if not {"stages", "scales"} & values.keys():
        door = typed("train.py")
        raise BadInput(f"{path} is not a study: it has no stages; a recipe is run with {door}")
    scales = values.pop("scales", {})
    if not isinstance(scales, dict) or not all(isinstance(one, dict) for one in scales.values()):
        raise BadInput(f"{path}: scales must be groups of keys: [scales.NAME]")
    if scales and not scale:
        raise BadInput(f"give a scale of {path}: scale={' or scale='.join(scales)}")
    if scale and (scale not in scales or not is_safe_filename(scale)):
        has = f"it has {', '.join(scales)}" if scales else "it has none; leave scale= out"
        raise BadInput(f"{path} has no scale {scale!r}; {has}")
    own = scales.get(scale, {})
    merged = {**merge(values, own), "path": path, "scale": scale}
    lists = [part.get("deviations", []) for part in (values, own)]
    if all(isinstance(one, list) for one in lists):
        merged["deviations"] = [*lists[0], *lists[1]]
    with within(path):
        return _checked(merged)


def _as_in_toml(line: str) -> str:
    """A complaint about a key, which is named as on a command line, in the terms of a study file:
    "claims.0.text must be given: ..." becomes "[[claims]] number 1: text must be given"."""
    line = re.sub(r" must be given: .*", " must be given", line)
    line = re.sub(r"(give a list, such as ).*='(.*)'", r"\1\2", line)
    name = line.partition("=")[0]
    if name in PARTS:
        other = f"[[{name}]]" if name in (*ALONE, *NAMED) else f"[{name}]"
        return f"write {_form(name)}, not {other}"
    if vary := re.match(r"[\w.-]+\.vary\.([^.=]+)(\.[^.=]+)?=(\[?)", line):
        what = "give a list of values, or a group of levels"
        if vary[2]:
            what = "give a group of settings"
            what += f', or write vary."{vary[1]}{vary[2]}" = [...]' if vary[3] else ""
        return f"{line.partition(': ')[0]}: {what}"
    if not (part := PART.search(line)):
        return line
    kind, one = part[1] or part[3], part[2] or ""
    place = f"[{kind}]" if kind in ALONE else f"[{kind}.{one}]"
    if kind not in (*ALONE, *NAMED):
        place = f"[[{kind}]] number {int(one) + 1}"
    line = line.replace(part[0], "").removesuffix("; --help lists the keys")
    if (key := line.removeprefix("unknown key ")) != line:
        key, keys = key.partition(";")[0], [*PARTS[kind].model_fields]
        keys += [f"published.{name}" for name in Published.model_fields if "published" in keys]
        line = f"unknown key {key}{nearest(key, keys)}"
    return f"{place}: {line}"


def _form(name: str) -> str:
    """How the heading of a part is written."""
    return f"[{name}]" if name in ALONE else f"[{name}.NAME]" if name in NAMED else f"[[{name}]]"


def _checked(values: dict[str, Any]) -> Study:
    """The study with these values. If one part cannot be parsed, the others are still checked, so
    that the user sees all mistakes at once."""
    mistakes: list[str] = []
    readable = set(Study.model_fields) - {"title", "question", "paper"}
    for parts in (set(values), readable, {"needs", "made", "stages", "path", "scale"}):
        some = {key: value for key, value in values.items() if key in parts}
        try:
            whole = validate(Study, {"title": "-", **some} if mistakes else some)
        except BadInput as error:
            mistakes = mistakes or [_as_in_toml(line) for line in error.lines]
            continue
        study = _at_scale(whole)
        mistakes += _mistakes(study, whole)
        break
    if mistakes:
        raise BadInput(*dict.fromkeys(mistakes))
    return study


def _at_scale(study: Study) -> Study:
    """The study without the tables and figures whose `where` names a level that `levels` leaves
    out, and without the summaries of those tables."""

    def there(shown: Shown) -> bool:
        vary = study.stages[shown.stage].vary if shown.stage in study.stages else {}
        return all(
            level in study.levels.get(factor, (level,))
            or level not in map(str, vary.get(factor, ()))
            for factor, level in shown.where.items()
        )

    kinds = ("tables", "curves", "pictures")
    kept: dict[str, Any] = {kind: tuple(filter(there, getattr(study, kind))) for kind in kinds}
    gone = {table.name for table in study.tables if table not in kept["tables"]}
    kept["summaries"] = tuple(one for one in study.summaries if one.table not in gone)
    return study.model_copy(update=kept)


# ------------------------------------------------------------------ do its parts fit together?


def _mistakes(study: Study, whole: Study) -> Iterator[str]:
    """A line for each part of a study that does not fit the others. `whole` has the parts that the
    scale leaves out, too."""
    yield from _bad_file_names(study)
    yield from _bad_names(study, whole)
    yield from _bad_like(whole)
    levels = {factor: (*_bad_levels(study, factor),) for factor in study.levels}
    yield from (f"levels.{factor}: {line}" for factor in levels for line in levels[factor])
    # a wrong level must not cause further errors in the tables that show it
    right = {factor: kept for factor, kept in study.levels.items() if not levels[factor]}
    study = study.model_copy(update={"levels": right})
    for name in study.stages:
        yield from (f"stages.{name}: {line}" for line in _bad_stage(study, name))
    for shown in study.shows():
        lines = _bad_shown(study, shown)
        yield from (f"{shown.kind} {shown.name}: {line}" for line in lines)
    for summary in study.summaries:
        yield from (f"summary {summary.title!r}: {line}" for line in _bad_summary(study, summary))
    if study.headline is not None:
        yield from (f"headline: {line}" for line in _bad_headline(study, study.headline))
    if twice := duplicate(claim.text for claim in study.claims):
        yield f"two claims have the text {twice!r}; give each its own, which overviews know it by"
    for claim in study.claims:
        yield from (f"claim {claim.text!r}: {line}" for line in _bad_claim(study, claim))


def _unknown(names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """A line for each of the names that is not known."""
    for name in names:
        if name not in known:
            number = _number(name)
            equal = [one for one in known if number is not None and _number(one) == number]
            near = f"; did you mean {equal[0]}?" if equal else nearest(name, sorted(known))
            yield f"there is no {name!r}{near}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bad_levels(study: Study, factor: str) -> Iterator[str]:
    """The wrong names in levels.FACTOR."""
    stages = study.stages.values()
    lines = [*_unknown([factor], {name for stage in stages for name in stage.vary})]
    known = {str(level) for stage in stages for level in stage.vary.get(factor, ())}
    yield from lines or _unknown(study.levels[factor], known)


def _bad_names(study: Study, whole: Study) -> Iterator[str]:
    """The wrong names in deviations and in places such as {made.X}."""
    # a deviation that comes from the base of a study may name a table that only the base shows
    own = not study.extends
    for one, kind in product(study.deviations if own else (), ("tables", "curves", "pictures")):
        lines = [*_unknown(getattr(one, kind), {shown.name for shown in getattr(whole, kind)})]
        yield from (f"deviation {one.what!r}: {kind}: {line}" for line in lines)
    sources: dict[str, Collection[str]]
    sources = {"need": study.needs, "made": study.made, "stage": study.stages}
    for kind, name, *_ in PLACE.findall(study.model_dump_json()):
        other = [f"{{{k}.{name}}}" for k, names in sources.items() if k != kind and name in names]
        lines = [*_unknown([name], sources[kind])]
        if lines and other:
            lines = [f"there is no {name!r}; did you mean {' or '.join(other)}?"]
        yield from (f"{{{kind}.{name}}}: {line}" for line in lines)


def _bad_like(whole: Study) -> Iterator[str]:
    """The wrong levels in `like`. Their published numbers would be missing from the report."""
    known = {(f, str(one)) for s in whole.stages.values() for f in s.vary for one in s.vary[f]}
    for table in whole.tables:
        metrics = () if isinstance(table.metric, str) else tuple(table.metric)
        known |= {(table.columns, name) for name in (*metrics, *table.means)}
    names = {level for _, level in known} | {"=".join(pair) for pair in known}
    yield from (f"like: {line}" for line in _unknown(whole.like, names))


def _bad_headline(study: Study, shown: Headline) -> Iterator[str]:
    """What is wrong with the names in a headline."""
    tables = {table.name: table for table in study.tables}
    yield from _unknown([shown.table], tables)
    yield from _unknown(filter(None, [shown.curves]), {one.name for one in study.curves})
    if shown.table in tables:
        table = tables[shown.table]
        rows = study.levels_of(table).get(table.rows, ())
        yield from (f"labels: {line}" for line in _unknown(shown.labels, rows))


def _bad_file_names(study: Study) -> Iterator[str]:
    """Names that would put a file outside the study's directories, and names that are used
    twice."""
    names = {"stages": list(study.stages), "made": list(study.made)}
    names |= {k: [s.name for s in getattr(study, k)] for k in ("tables", "curves", "pictures")}
    for kind, every in names.items():
        if twice := duplicate(every):
            yield f"two of the {kind} are named {twice!r}; give one another name"
        for name in every:
            if not is_safe_filename(name):
                good = "give letters, digits, - and _"
                yield f"{kind}: the name {name!r} is not a plain file name; {good}"
    written = [f"{one.name}.svg" for one in (*study.curves, *study.pictures)]
    written += [f"table-{table.name}.svg" for table in study.tables]
    written += [f"claim-{number}.svg" for number, _ in enumerate(study.claims, start=1)]
    written += [f"{study.headline.name}.svg"] if study.headline else []
    if (twice := duplicate(written)) and not any(map(duplicate, names.values())):
        yield f"two figures of the report are written to {twice!r}; give one another name"
    files = {f"stages.{name}: result": stage.result for name, stage in study.stages.items()}
    files |= {f"pictures: {picture.name}: file": picture.file for picture in study.pictures}
    for place, file in files.items():
        if not all(map(is_safe_filename, file.split("/"))):
            yield f"{place}={file!r} does not lie inside {{out}}"


def _bad_stage(study: Study, name: str) -> Iterator[str]:
    stage, owner = study.stages[name], dict[str, str]()
    if bool(stage.recipe) == bool(stage.command):
        others = [other for other in study.stages if other != name]
        near = "" if stage.recipe or stage.command else nearest(name, others)
        yield f"give either a recipe or a command{near}"
    written = stage.model_dump_json(include={"command", "settings", "vary"})
    if stage.command and "{out}" not in written:
        yield f"its command needs {{out}}, the directory in which it writes {stage.result}"
    for some in stage.without:
        for factor, level in some.items():
            known = map(str, stage.vary.get(factor, [level]))
            lines = [*_unknown([factor], stage.vary), *_unknown([level], [*known])]
            yield from (f"without: {line}" for line in lines)
    listed = [factor for factor, levels in stage.vary.items() if isinstance(levels, list)]
    names = [f for f in listed if "." not in f and f not in {*Recipe.model_fields, *RESERVED}]
    for factor in names if stage.recipe else ():
        yield (
            f"vary.{factor}: a list has values of a key, and recipes have no {factor!r}; levels "
            "without settings are written { 0 = {}, 20 = {} }"
        )
    factors = study.factors(name)
    for factor, levels in factors.items():
        if not levels and name in study.shown_stages():
            yield f"vary.{factor} has no level left"
        if twice := duplicate(map(str, stage.vary[factor])):
            yield f"vary.{factor} has the level {twice!r} twice; give each level once"
        if factor in RESERVED:
            why = "give the factor another name: results.csv has a column of this one"
            yield f"vary.{factor}: {why}"
        keys = {key for settings in levels.values() for key in flat(settings)}
        for key in sorted(f"{key}.{SHORT[key]}" if key in SHORT else key for key in keys):
            if key in owner:  # one of them would overrule the other
                yield f"the factors {owner[key]} and {factor} both set {key}; let one of them do it"
            owner[key] = factor
    try:
        if stage.recipe and not factors.keys() & {*RESERVED, *names}:
            yield from _bad_settings(study, name)
    except BadInput as error:
        yield from error.lines


def _bad_settings(study: Study, name: str) -> Iterator[str]:
    """What is wrong in the settings of a stage's runs. Only enough runs are checked to cover each
    level once."""
    recipe = read_recipe(find_recipe(study.stages[name].recipe, study.path.parent))
    needed, seen = {"data": "-", "run": "-", "head": "mlm"}, set[tuple[str, str]]()
    for levels in study.combinations(name):
        if not seen or not levels.items() <= seen:
            seen |= levels.items()
            settings = needed | merge(recipe, study.settings(name, levels))
            try:
                validate(Recipe, each_text(settings, partial(with_levels, levels=levels)))
            except BadInput as error:
                yield from error.lines


def _bad_shown(study: Study, shown: Shown) -> Iterator[str]:
    """What is wrong in a table, a figure or a picture."""
    if lines := [*_unknown([shown.stage], study.stages)]:
        yield from lines
        return
    factors = study.factors(shown.stage)
    lines = [*_unknown((*shown.factors(), *shown.where), factors)]
    for factor, level in shown.where.items():
        lines += _unknown([level], factors.get(factor, {level}))
        if factor in shown.factors():
            what = f"all levels of {factor} are shown; levels.{factor} chooses some for the study"
            lines.append(f"where.{factor}: {what}")
    if isinstance(shown, Curves) and study.stages[shown.stage].command:
        lines.append(f"stages.{shown.stage} runs a command, and commands write no log")
    yield from lines
    if isinstance(shown, ScoreTable) and not lines:
        yield from _bad_table(study, shown)
    if isinstance(shown, Curves) and isinstance(shown.validation, dict) and not lines:
        panels = [*map(str, study.stages[shown.stage].vary[shown.panels])]
        yield from (f"validation: {line}" for line in _unknown(shown.validation, panels))
        if shown.panels == shown.lines:
            yield f"validation: all levels of {shown.lines} share one panel; give one name for all"


def _bad_table(study: Study, table: ScoreTable) -> Iterator[str]:
    stage = study.stages[table.stage]
    every = set(map(str, stage.vary.get(table.columns, table.metric)))
    yield from (f"chance: {line}" for line in _unknown(table.chance, every))
    for name, columns in table.means.items():
        yield from (f"means.{name}: {line}" for line in _unknown(columns, every))
        if twice := duplicate(columns):
            yield f"means.{name} names {twice!r} twice; leave one out"
        if name in every:
            yield f"means.{name}: a column has this name, which the mean would replace; rename it"
    for column, chance in table.chance.items():
        if table.percent and abs(chance) >= 1:
            fraction = f"{chance:g} points are {chance / 100:g}"
            yield f"chance.{column}={chance:g} must be a fraction: {fraction}"
    if table.minus:
        lines = [*_unknown([table.minus], study.stages)]
        yield from lines or _unknown(study.stages[table.minus].vary, stage.vary)
    if table.rows == table.columns:
        yield f"rows and columns are both {table.rows!r}"
    if table.metric == {}:
        yield "metric is empty; give metric.NAME=METRIC"
    if table.columns == METRIC and isinstance(table.metric, str):
        yield f'columns="{METRIC}" needs metric.NAME=METRIC'
    elif isinstance(table.metric, dict):
        for column in study.columns(table):
            if column not in table.metric:
                yield f"metric.{column} must be given"
    for splits in (table.split_of(metric).split("+") for metric in table.metrics):
        if "train" in splits and len(splits) > 1:
            yield (
                f"split {'+'.join(splits)!r}: train is the last training line of the log and "
                "cannot be averaged with a split; give it a table of its own"
            )
    if table.minus and table.best != "none":
        yield "a table of differences (minus) has no best; leave one of them out"


def doubts(study: Study) -> Iterator[str]:
    """A line for each published name that no cell shows, although a cell has nearly this name, and
    for each published table that may be in another unit."""
    for table in study.tables:
        if table.published is not None:
            lines = _doubts(study, table, table.published)
            yield from (f"table {table.name}: {line}" for line in lines)


def _doubts(study: Study, table: ScoreTable, published: Published) -> Iterator[str]:
    vary = study.stages[table.stage].vary
    every = {table.columns: [*table.means, *vary.get(table.columns, table.metric)]}
    every |= {table.rows: [*vary.get(table.rows, ())]}
    for factor, names in ((table.rows, published.rows), (table.columns, published.columns)):
        ours = {study.stands_for(factor, str(level)): str(level) for level in every[factor]}
        left = [name for name in ours if name not in names]
        for name in names:
            own = [one for one in left if not name.startswith(one)]
            if name not in ours and (near := get_close_matches(name, own, 1, cutoff=0.8)):
                level = ours[near[0]]
                yield (
                    f"no cell shows the published {name!r}; if it belongs to {level}, say "
                    f'like."{level}" = "{name}"'
                )
    numbers = [abs(n) for row in published.rows.values() for n in row if isinstance(n, float)]
    of_scores = table.percent and table.show == "mean" and not table.minus
    if of_scores and len(numbers) > 1 and 0.2 < max(numbers) <= 1:
        yield f"no published number is above {max(numbers):g}, but the table shows percent"


def _bad_summary(study: Study, summary: Summary) -> Iterator[str]:
    tables = {table.name: {table.rows, table.columns} for table in study.tables}
    lines = [*_unknown([summary.table], tables)]
    yield from lines or _unknown([summary.by], tables[summary.table])
    if summary.published is not None:
        lines = [*_unknown(summary.published.columns, STATISTICS)]
        yield from (f"published.columns: {line}" for line in lines)


def _bad_claim(study: Study, claim: Claim) -> Iterator[str]:
    """What is wrong in a claim, such as that it compares nothing, or has fewer seeds at this scale
    than its registration says."""
    tables = {table.name: table for table in study.tables}
    table = tables.get(claim.table)
    if table is None or [*_bad_shown(study, table)]:  # the table's own mistakes have lines already
        yield from _unknown([claim.table], tables)
        return
    sides, levels = (claim.better, claim.than), study.levels_of(table)
    each = [claim.each] if claim.each else []
    lines = [*_unknown(dict.fromkeys((*claim.better, *claim.than, *each)), levels)]
    for factor, level in (pair for side in sides for pair in side.items()):
        means = study.means(table) if factor == table.columns else {}
        unknown = [*_unknown([level], (*levels.get(factor, (level,)), *means))]
        varied = [stage.vary.get(factor, ()) for stage in study.stages.values()]
        if unknown and factor in study.levels and level in {str(v) for v in chain(*varied)}:
            unknown = [f"levels.{factor} leaves out {level!r}"]
        lines += unknown
    needed = study.registration.seeds if study.registration is not None else {}
    factors = study.factors(table.stage)
    wrong = [f"registration.seeds: {line}" for line in _unknown(needed, factors)]
    lines += wrong
    if study.registration is not None and SEED not in needed and not wrong:
        lines.append(f"registration.seeds must say how many levels the factor {SEED!r} has")
    yield from lines
    if lines:
        return
    if table.columns == METRIC and not all(METRIC in (*side, claim.each) for side in sides):
        yield f"say which {METRIC} of table {table.name}"
    if claim.tie and claim.margin <= 0:
        yield f"a tie needs a margin above 0, not {claim.margin:g}: how far apart the sides may be"
    if table.percent and abs(margin := claim.margin) >= 1:
        yield f"margin={margin:g} must be a fraction: {margin:g} points are {margin / 100:g}"
    over = [side.get(table.columns) for side in sides]
    if over[0] != over[1] and any(name in table.means for name in over):
        yield f"both sides must name the same mean of columns, not {over[0]} and {over[1]}"
    if one_sided := claim.better.keys() ^ claim.than.keys():
        factor = min(one_sided)
        yield (
            f"only one of better and than names {factor}; the other would be the mean over all its "
            f"levels: name one of {', '.join(levels[factor])}"
        )
    elif alone := _unpaired(study, table, claim):
        yield (
            f"only one of better and than has runs at {alone}, so their means would be over "
            "different runs: leave these levels out of both sides, or name others"
        )
    if claim.better == claim.than or claim.each in {**claim.better, **claim.than}:
        yield "it compares a level with itself"
    elif needed and SEED in (table.rows, table.columns, claim.each):
        yield f"its scores are paired by {SEED}, which therefore cannot be rows, columns or each"
    else:
        yield from _bad_seeds(study, table, claim, needed)


def _bad_seeds(
    study: Study, table: ScoreTable, claim: Claim, needed: dict[str, int]
) -> Iterator[str]:
    """The first factor that has too few levels: fewer than registered on one side, or fewer on both
    sides at once, where scores are paired by it. Without a registration some level of `each` must
    have a pair."""
    paired = replicate_factors(study, table, (*claim.better, claim.each))
    levels = levels_of_claim(study, table, claim)
    pairs = dict.fromkeys(paired, 0)
    for level, factor in product(levels, dict.fromkeys((*needed, *paired))):
        number, sides = needed.get(factor, 0), claim.sides(level)
        have = [seeds_of(study, table, side, factor) for side in sides]
        for side, some in zip(sides, have, strict=True):
            if len(some) < number:
                at = ", ".join(one for name, one in side.items() if name != METRIC) or "one side"
                yield f"registration.seeds.{factor}={number}, but {at} has {len(some)} levels of it"
                return
        if factor in paired:
            both = len(have[0] & have[1])
            pairs[factor] = max(pairs[factor], both)
            if both < number:
                at = f"at {level} " if level else ""
                yield (
                    f"registration.seeds.{factor}={number}, but {at}only {both} levels of it have "
                    "both sides"
                )
                return
    for factor in (factor for factor, both in pairs.items() if not both):
        yield f"no {factor} has both sides, so no two scores can be compared"


def _unpaired(study: Study, table: ScoreTable, claim: Claim) -> str:
    """Levels over which only one side of a claim is averaged, or "". A replicate, or a level of
    `each`, that only one side has does not count, because it is not compared."""
    over: list[dict[tuple[object, ...], set[str]]] = []  # by part, replicate, level of `each`
    for side in (claim.better, claim.than):
        own = replicate_factors(study, table, (*side, claim.each))
        own += [claim.each] if claim.each not in ("", METRIC) else []
        over.append({})
        for number, part in enumerate(study.parts(table, side)):
            fixed = table.at(part)
            for levels in study.combinations(table.stage, fixed):
                rest = [f"{f}={v}" for f, v in levels.items() if f not in (*own, *fixed)]
                key = (number, *(levels[factor] for factor in own))
                over[-1].setdefault(key, set()).add(", ".join(rest))
    ours, theirs = over
    alone = (ours[key] ^ theirs[key] for key in ours.keys() & theirs.keys())
    return min(set().union(*alone), default="")


# --------------------------------------------------------------------------------------- help


def keys_text() -> str:
    """What `python -m xformer.study keys` prints: every key of a study file."""
    lines = [(spec.__doc__ or "").strip(), ""]
    own = [name for name, field in Study.model_fields.items() if field.description]
    for name in own:
        lines += key_lines(name, Study.model_fields[name])
    parts: dict[str, type[Settings]] = {_form(name): part for name, part in PARTS.items()}
    parts["[tables.published]"] = Published
    for place, part in parts.items():
        lines += ["", *wrapped(f"{place}: {getdoc(part)}", 0), ""]
        for name in part.model_fields:
            lines += key_lines(name, part.model_fields[name])
    return "\n".join(lines)


def key_lines(name: str, field: FieldInfo) -> list[str]:
    """The lines of help for one key."""
    return [f"    {name}: {type_and_default(field)}", *wrapped(field.description, 8)]
