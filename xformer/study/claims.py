"""The paper's claims: tested on our scores, and looked up in the repository's history.

A claim is a paired t test over seeds. If it is registered, the report also names the commit that
held it first. That is the oldest commit since which the study file, with its bases, has always held
the same claim, registration and deciding table. A claim that is not committed, or is younger than
the first result of its table's stages, is exploratory. The settings of the runs (stages, what is
made, levels, recipes) are looked up in the same way, since they too could be changed once results
are known.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from xformer.config import find_recipe, merge, read_recipe
from xformer.data.errors import BadInput
from xformer.monitor import records
from xformer.study.plan import INTERVALS, Plan
from xformer.study.results import Results, half_width, kept_ends
from xformer.study.spec import PLACE, SEED, Claim, ScoreTable, Study, levels_of_claim, seeds_of
from xformer.study.statistics import (
    LEVEL,
    MOST,
    POWER,
    detectable,
    holm,
    pairs_for_tie,
    pairs_needed,
    tie_test,
)

PATIENCE = 20  # seconds for git
DECIDES = ("stage", "rows", "columns", "metric", "split", "where", "minus", "means", "chance")


# -------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Difference:
    """The differences a - b of paired scores, and the p of a test of their mean; see `paired_test`
    and `tied_test`.

    With one pair there is no p. The same holds if all pairs differ by the same amount: zero
    variance, as with two models at chance, says nothing about another seed.
    """

    each: tuple[float, ...]
    p: float | None
    tests: int = 1  # that p must be corrected for

    @property
    def mean(self) -> float:
        return statistics.mean(self.each)

    @property
    def half(self) -> float | None:
        """Half the width of the t interval; None for fewer than three pairs, or without spread."""
        if self.p is None or len(self.each) < 3:
            return None
        return half_width(len(self.each)) * statistics.stdev(self.each)

    def detectable(self, tie: bool) -> float | None:
        """The distance from the margin that this many pairs with this spread detect with power 0.8.
        The tests of a tie are one-sided."""
        if self.p is None:
            return None
        tests = self.tests / 2 if tie else self.tests
        return detectable(len(self.each), tests) * statistics.stdev(self.each)

    def words(self, digits: int) -> str:
        """ "+4.2 ± 8.1"; of two pairs, which have no interval, "+4.2 (seeds: +3.1, +5.3)"."""
        text = f"{self.mean:+z.{digits}f}"
        if self.half is not None:
            return f"{text} ± {self.half:.{digits}f}"
        two = ", ".join(f"{one:+z.{digits}f}" for one in self.each)
        return f"{text} (seeds: {two})" if len(self.each) == 2 else text

    def needed(self, margin: float, tie: bool) -> int | None:
        """How many pairs would decide a claim with probability 0.8, if the true mean and spread are
        those of these pairs. None if there is no spread, or if not even 1,000 would."""
        if self.p is None:
            return None
        deviation = statistics.stdev(self.each)
        mean, margin = self.mean / deviation, margin / deviation
        if tie and abs(mean) < margin:
            return pairs_for_tie(mean, margin, self.tests)
        return pairs_needed(abs(mean) - margin if tie else mean - margin, self.tests)


def paired_test(a: Sequence[float], b: Sequence[float], margin: float = 0.0) -> Difference:
    """The paired t test (Student 1908) of a - b against `margin`. Raises ValueError if the two
    differ in length."""
    differences = tuple(x - y for x, y in zip(a, b, strict=True))
    deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
    if deviation < 1e-9 * max(1e-9, *map(abs, a), *map(abs, b)):  # one pair, or only rounding
        return Difference(differences, None)
    return Difference(differences, float(stats.ttest_1samp(differences, margin).pvalue))


def tied_test(a: Sequence[float], b: Sequence[float], margin: float) -> Difference:
    """The test of "a and b tie within ± margin". If the mean difference lies inside the margins,
    two one-sided tests can show a tie. If it lies outside, a t test against the nearer margin can
    refute it."""
    mean = statistics.mean(x - y for x, y in zip(a, b, strict=True))
    difference = paired_test(a, b, math.copysign(margin, mean))
    if difference.p is None or abs(mean) >= margin:
        return difference
    return replace(difference, p=tie_test(difference.each, margin))


# ---------------------------------------------------------------------------------- the verdicts


class ClaimPart(NamedTuple):
    """One test of a claim: at a level of `each`, or on average ("")."""

    level: str
    difference: Difference
    p: float | None  # that of the difference, corrected for the parts of the claim


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, "holds", "fails", "undecided" or "no data", and its evidence."""

    claim: Claim
    table: ScoreTable
    levels: tuple[str, ...]  # at each of which the claim is tested; one if on average
    parts: tuple[ClaimPart, ...]  # those that have scores
    learnt: bool = True  # whether any of its runs is above chance
    registered: str = ""  # the commit that held the claim first, or "exploratory"
    overall: tuple[float | None, ...] = ()  # Holm's p of each part over all tests of the study
    seeds: int = 0  # that its registration, or a planned extension that has begun, asks for

    @property
    def margin(self) -> float:
        """The claim's margin in the units of its table."""
        return self.claim.margin * self.table.scale

    @property
    def scored(self) -> int:
        """How many seeds have all scores that the claim needs."""
        short = len(self.parts) < len(self.levels)
        return 0 if short else min(len(part.difference.each) for part in self.parts)

    @property
    def early(self) -> bool:
        """Whether scores of `seeds` are missing. Testing without them would be a test that nobody
        planned."""
        return bool(self.parts) and self.scored < self.seeds

    @property
    def state(self) -> str:
        """The verdict of the study's test."""
        return self._state([part.p for part in self.parts])

    @property
    def state_overall(self) -> str:
        """What it would be with the p-values that are adjusted over the study."""
        return self._state(self.overall)

    def _state(self, ps: Sequence[float | None]) -> str:
        states = []
        for part, p in zip(self.parts, ps, strict=True):
            mean = part.difference.mean
            ahead = abs(mean) < self.margin if self.claim.tie else mean > self.margin
            decided = p is not None and p <= 1 - LEVEL
            states.append(("holds" if ahead else "fails") if decided else "undecided")
        if not states:
            return "no data"
        if self.early or not self.learnt or len(states) < len(self.levels):
            return "undecided"
        return next((state for state in ("fails", "undecided") if state in states), "holds")

    @property
    def needed(self) -> str:
        """How many seeds would decide an undecided claim, in words; else nothing."""
        if self.state != "undecided" or not self.learnt:
            return ""
        if self.early:
            return f"{self.seeds}, as planned"
        left = [one.difference for one in self.parts if one.p is None or one.p > 1 - LEVEL]
        if not left:  # a level of `each` has no scores yet
            return ""
        if any(difference.p is None for difference in left):
            return "-"
        numbers = [one.needed(self.margin, self.claim.tie) or math.inf for one in left]
        return f"more than {MOST:,}" if math.inf in numbers else f"{max(numbers)}"

    def evidence(self) -> str:
        """The differences that decided the claim, in words."""
        margin, parts = self.margin, []
        for level, difference, p in self.parts:
            against = f"p against {margin:g}:" if margin else "p"
            if self.claim.tie and abs(difference.mean) < margin:
                against = f"p of a tie within {margin:g}:"
            elif self.claim.tie:  # it is tested against the nearer margin
                against = f"p against {math.copysign(margin, difference.mean):g}:"
            unknown = "one pair" if len(difference.each) == 1 else "no spread"
            small = unknown if p is None else words_of(p, against)
            parts.append(f"{level} {difference.words(self.table.digits)} ({small})".lstrip())
        floor = "" if self.learnt else "no run is above chance: "
        if self.early:
            floor += f"{self.scored} of {self.seeds} planned seeds have all their scores: "
        return floor + "; ".join(parts) if parts else "no runs to compare"


def words_of(p: float, name: str = "p") -> str:
    """ "p 0.012", or "p < 0.001"."""
    return f"{name} {p:.3f}" if p >= 0.0005 else f"{name} < 0.001"


def verdicts(results: Results) -> list[Verdict]:
    """Every claim of a study, tested. The p-values of one claim are Holm-corrected, and beside that
    those of all claims together."""
    study = results.study
    tested = [_verdict(results, claim, study.table(claim.table)) for claim in study.claims]
    every = _over_study(tested, _looks(study))
    if study.registration is None:
        return every
    return [
        replace(verdict, registered=origin.words(first_result(results.plan, verdict.table), runs))
        for verdict, (origin, runs) in zip(every, origins(study.path, study.scale), strict=True)
    ]


def _verdict(results: Results, claim: Claim, table: ScoreTable) -> Verdict:
    levels = levels_of_claim(results.study, table, claim)
    margin = claim.margin * table.scale
    test = tied_test if claim.tie else paired_test
    differences = {}
    for level in levels:
        a, b = (results.replicates(table, side) for side in claim.sides(level))
        if shared := [seed for seed in a if seed in b]:
            pairs = [a[seed] for seed in shared], [b[seed] for seed in shared]
            differences[level] = test(*pairs, margin)
    ps, looks = [difference.p for difference in differences.values()], _looks(results.study)
    tests = looks * sum(p is not None for p in ps)
    parts = [
        ClaimPart(level, replace(difference, tests=tests), p)
        for (level, difference), p in zip(differences.items(), _adjusted(ps, looks), strict=True)
    ]
    verdict = Verdict(claim, table, levels, tuple(parts), _learnt(results, claim, table))
    return replace(verdict, seeds=_seeds_due(results.study, verdict))


def _over_study(verdicts: Sequence[Verdict], looks: int) -> list[Verdict]:
    """The verdicts, each with the p-values that are Holm-adjusted over all tests of the study."""
    ps = [part.difference.p for verdict in verdicts for part in verdict.parts]
    every = iter(_adjusted(ps, looks))
    return [replace(one, overall=tuple(next(every) for _ in one.parts)) for one in verdicts]


def _adjusted(ps: Sequence[float | None], looks: int) -> list[float | None]:
    """The p-values corrected for the number of tests (Holm) and of looks. Those that are missing
    stay missing, and do not count."""
    adjusted = iter(holm([p for p in ps if p is not None]))
    return [None if p is None else min(1.0, looks * next(adjusted)) for p in ps]


def published_difference(results: Results, verdict: Verdict, level: str) -> float | None:
    """What the paper's table says of a part of a claim: the mean difference of its numbers over all
    rows and columns that both sides cover. None if the paper lacks a number, or if the claim
    compares something that the table does not show."""
    study, table, means = results.study, verdict.table, []
    for side in verdict.claim.sides(level):
        others = side.keys() - {table.rows, table.columns}
        if table.published is None or table.show != "mean":
            return None
        if any(table.where.get(f) != side[f] for f in others):
            return None
        rows, columns = (
            [side[factor]] if factor in side else study.levels_of(table)[factor]
            for factor in (table.rows, table.columns)
        )
        numbers = [results.published(table, row, column) for row in rows for column in columns]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return None
        means.append(statistics.mean(known))
    return means[0] - means[1]


def _looks(study: Study) -> int:
    """How often each claim may be tested."""
    return study.registration.looks if study.registration else 1


def _seeds_due(study: Study, verdict: Verdict) -> int:
    """How many seeds the next test of a claim needs: those of the registration or, if a planned
    extension has begun, all that the claim has at this scale."""
    if study.registration is None:
        return 0
    registered = study.registration.seeds[SEED]
    most = max((len(part.difference.each) for part in verdict.parts), default=0)
    begun = study.registration.looks > 1 and most > registered
    return _pairs(study, verdict.claim) if begun else registered


def _pairs(study: Study, claim: Claim) -> int:
    """The number of seeds that both sides of a claim have at this scale."""
    table = study.table(claim.table)
    return min(
        len(set.intersection(*(seeds_of(study, table, side, SEED) for side in claim.sides(level))))
        for level in levels_of_claim(study, table, claim)
    )


def _learnt(results: Results, claim: Claim, table: ScoreTable) -> bool:
    """Whether any run of a claim is above chance. True if some column of the table has no chance
    level. Models that are all at chance say nothing about the claim."""
    if not set(results.study.columns(table)) <= set(table.chance):
        return True
    scores = [score for side in (claim.better, claim.than) for score in results.scores(table, side)]
    return any(score.learnt for score in scores if score.value is not None)


# ---------------------------------------------------------------------------------- registration


@dataclass(frozen=True)
class Origin:
    """The commit that held something first, and its time; neither if it was never committed.
    `cut`: a shallow clone does not show whether it is older."""

    commit: str = ""
    time: datetime | None = None
    cut: bool = False

    def words(self, first: datetime | None, runs: Origin | None = None) -> str:
        """What a report says of a claim: the commit and its time, or why it is exploratory.
        `first` is the time of the first result, `runs` the origin of the runs' settings."""
        if self.time is None:
            return "exploratory: not committed"
        when = f"{self.commit[:9]} of {self.time:%Y-%m-%d %H:%M}"
        if self.cut:
            when = f"at the latest {when}"
        if first is not None and self.time > first:
            return f"exploratory: {when}, the first result is of {first:%Y-%m-%d %H:%M}"
        if runs is not None and first is not None and (runs.time is None or runs.time > first):
            changed = f"in {runs.commit[:9]}" if runs.time else "and are not committed"
            return f"{when}; the settings of the runs changed after the first result, {changed}"
        return when


def origins(path: Path, scale: str) -> list[tuple[Origin, Origin]]:
    """For each claim of a study file at a scale, in order: its origin, and that of the settings of
    the runs that decide it (`_same_runs`). Times are in UTC."""
    now = _content(path, scale)
    every = _held(now, now)
    oldest = dict.fromkeys(every, Origin())
    top = _git(path.resolve().parent, "rev-parse", "--show-toplevel")
    if top is None:
        return [(Origin(), Origin())] * len(now[0])
    root = Path(top.decode().strip()).resolve()
    folders = _folders(path, now[1], root)
    # parents are those in a history of these folders alone; children come before parents
    log = _git(root, "rev-list", "--topo-order", "--timestamp", "--parents", "HEAD", "--", *folders)
    shallow = (_git(root, "rev-parse", "--is-shallow-repository") or b"").strip() == b"true"
    left = dict[str, set[Held]]()  # by commit: what all commits on some path to it hold
    for number, line in enumerate((log or b"").decode().splitlines()):
        seconds, commit, *parents = line.split()
        still = every if number == 0 else left.get(commit, set())
        if still:
            then = _at(root, commit, folders, path.resolve().relative_to(root), scale)
            still = still & _held(now, then) if then is not None else set()
        time = datetime.fromtimestamp(int(seconds), UTC)
        for one in still:
            known = oldest[one].time
            if known is None or time <= known:
                oldest[one] = Origin(commit, time, shallow and not parents)
        for parent in parents:
            left[parent] = left.get(parent, set()) | still
    return [(oldest[i, "claim"], oldest[i, "runs"]) for i in range(len(now[0]))]


def registration_lines(plan: Plan) -> list[str]:
    """What --dry-run says of registered claims: margin, seeds, power and commit of each."""
    study = plan.study
    if study.registration is None:
        return []
    lines = ["", f"registered: {study.registration.words()}"]
    every = origins(study.path, study.scale)
    for claim, (origin, runs) in zip(study.claims, every, strict=True):
        since = origin.words(first_result(plan, study.table(claim.table)), runs)
        lines.append(f"  {claim.text} ({_power(study, claim)}): {since}")
    return [*lines, ""]


def _power(study: Study, claim: Claim) -> str:
    """The size of the difference that a registered claim's seeds find with probability 0.8, in
    words."""
    assert study.registration is not None
    table, pairs = study.table(claim.table), _pairs(study, claim)
    tests = len(levels_of_claim(study, table, claim)) * study.registration.looks
    distance = detectable(pairs, tests / 2 if claim.tie else tests)  # those of a tie are one-sided
    return (
        f"margin {claim.margin * table.scale:g}; with power {POWER:g}, {pairs} pairs detect a "
        f"difference {distance:.2f} standard deviations from the margin"
    )


def first_result(plan: Plan, table: ScoreTable) -> datetime | None:
    """When the first run of a table's stages ended, in UTC; None if none has. For a command it is
    the time of its result's file.

    All levels of these stages count, also those that the table does not show, and kept results. The
    stages that they start from do not: a pre-training shared with an older study says nothing about
    the scores.
    """
    ends = []
    for job in (*plan.runs(table.stage), *plan.runs(table.minus)):
        if job.done:
            has_log = (job.path / "log.jsonl").is_file()
            logged = [float(record["time"]) for record in records(job.path)] if has_log else []
            ends.append(max(logged, default=job.proof.stat().st_mtime))
        if plan.kept and (kept := plan.kept / f"{job.key}.zip").is_file():
            ends += kept_ends(kept)  # it may be older than a run that was made again
    return datetime.fromtimestamp(min(ends), UTC) if ends else None


Content = tuple[list[dict[str, Any]], dict[str, Any]]  # claims, and settings of runs
Held = tuple[int, str]  # the number of a claim, and "claim" or "runs"


def _content(path: Path, scale: str) -> Content:
    """Each claim with all that decides it, and the settings of the runs, as the file has them."""
    values = read_recipe(path)
    scales = values.pop("scales", {})
    values = merge(values, scales.get(scale, {}) if isinstance(scales, dict) else {})
    tables = {table["name"]: table for table in values.get("tables", [])}
    claims = [
        {
            **claim,
            "registration": values.get("registration"),
            "decided by": {k: v for k, v in tables.get(claim["table"], {}).items() if k in DECIDES},
        }
        for claim in values.get("claims", [])
    ]
    names = {stage["recipe"] for stage in values["stages"].values() if "recipe" in stage}
    recipes = {name: read_recipe(find_recipe(name, path.parent)) for name in sorted(names)}
    settings = {part: values.get(part, {}) for part in ("stages", "made", "levels")}
    settings["needs"] = {name: one.get("path") for name, one in values.get("needs", {}).items()}
    return claims, _deciding({**settings, "recipes": recipes})


def _deciding(settings: Any) -> Any:
    """Settings without those that do not change a result, such as `train.log_every`."""
    if isinstance(settings, list):
        return [_deciding(one) for one in settings]
    if not isinstance(settings, dict):
        return settings
    kept = {key: _deciding(value) for key, value in settings.items()}
    for group in ("train", "system"):
        if isinstance(values := kept.get(group), dict):
            decide = [k for k in values if k not in INTERVALS]
            if group == "system":
                decide = [k for k in values if k in ("precision", "tf32")]
            kept[group] = {k: values[k] for k in decide}
            if not decide:
                del kept[group]
    return kept


def _held(now: Content, then: Content) -> set[Held]:
    """The claims that an earlier commit holds, and those whose runs had the same settings."""
    claims = list(enumerate(now[0]))
    held = {(i, "claim") for i, claim in claims if claim in then[0]}
    return held | {(i, "runs") for i, claim in claims if _same_runs(now[1], then[1], claim)}


def _same_runs(now: dict[str, Any], then: dict[str, Any], claim: dict[str, Any]) -> bool:
    """Whether the runs that decide a claim had the same settings in an earlier commit: those of its
    table's stages, and all that these wait for. It does not count as a change to add stages,
    stores, the seeds of a planned extension, or a level of a factor whose level the claim names on
    both sides."""
    names = _places(now, claim)
    now, then = deepcopy(_part(now, names)), _part(then, names)
    extended = (claim["registration"] or {}).get("extension", "none") != "none"
    with suppress(AttributeError, TypeError, KeyError):  # it had another form then
        for part in ("stages", "made", "needs", "recipes"):
            _drop(now[part], then[part])
        free = claim["better"].keys() & claim["than"].keys() | ({SEED} if extended else set())
        new = set[tuple[str, str]]()  # levels that `levels` has added
        for factor in free & now["levels"].keys() & then["levels"].keys():
            gone = _drop(now["levels"][factor], then["levels"][factor])
            new |= {(factor, str(level)) for level in gone}
        for name, stage in now["stages"].items():
            before, added = then["stages"][name], set(new)
            for factor in free & stage.get("vary", {}).keys() & before.get("vary", {}).keys():
                gone = _drop(stage["vary"][factor], before["vary"][factor])
                added |= {(factor, str(level)) for level in gone}
            if "without" in stage:  # what leaves out an added level left out nothing then
                left = [
                    one
                    for one in stage["without"]
                    if not added & {(factor, str(level)) for factor, level in one.items()}
                ]
                stage["without"] = left
                if not left and "without" not in before:
                    del stage["without"]
    return now == then


def _places(settings: dict[str, Any], claim: dict[str, Any]) -> dict[str, set[str]]:
    """The names of the stages, made things, needs, recipes and factors that decide a claim."""
    decided = claim["decided by"]
    names: dict[str, set[str]] = {part: set() for part in settings}
    left = [("stages", decided.get(part)) for part in ("stage", "minus")]
    while left:
        part, name = left.pop()
        if name in names[part] or name not in settings[part]:
            continue
        names[part].add(name)
        content = settings[part][name]
        if part == "stages":
            names["recipes"].add(content.get("recipe", ""))
            names["levels"] |= set(content.get("vary", {}))
        if part == "made" and "same" in content:
            left.append(("made", content["same"]))
        places = PLACE.findall(json.dumps(content))
        left += [({"stage": "stages", "need": "needs"}.get(k, k), of) for k, of, *_ in places]
    return names


def _part(settings: dict[str, Any], names: dict[str, set[str]]) -> dict[str, Any]:
    """The settings under these names; a part that once had another form stays whole."""
    return {
        part: {name: own[name] for name in own if name in names[part]}
        if isinstance(own, dict)
        else own
        for part, own in settings.items()
    }


def _drop(now: Any, then: Any) -> list[Any]:
    """Remove the keys of a dict, or the items of a list, that were not there then. Returns them.
    Raises TypeError if they are neither two dicts nor two lists."""
    if type(now) is not type(then):
        raise TypeError
    gone = [key for key in now if key not in then]
    for key in gone:
        now.remove(key) if isinstance(now, list) else now.pop(key)
    return gone


def _folders(path: Path, runs: dict[str, Any], root: Path) -> list[str]:
    """The folders of the repository that hold the study and the recipes of its stages."""
    folder = path.resolve().parent
    every = {folder, *(find_recipe(name, folder).resolve().parent for name in runs["recipes"])}
    return sorted(str(one.relative_to(root)) for one in every if one.is_relative_to(root))


def _at(root: Path, commit: str, folders: list[str], path: Path, scale: str) -> Content | None:
    """What a commit holds: the claims, and the settings of the runs. None if the study is not
    there, or is in a form that is not read any more."""
    archive = _git(root, "archive", commit, *folders)
    if archive is None:
        return None
    with tempfile.TemporaryDirectory(prefix="xformer-") as directory:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            recipes = [one for one in files if one.isfile() and one.name.endswith(".toml")]
            files.extractall(directory, recipes, filter="data")
        try:
            return _content(Path(directory) / path, scale)
        except (BadInput, OSError, ValueError, LookupError, TypeError, AttributeError):
            return None


def _git(directory: Path, *arguments: str) -> bytes | None:
    """What git prints in a directory; None if it fails or is not there."""
    try:
        command = ["git", "-C", str(directory), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
