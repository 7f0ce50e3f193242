"""Since when the claims of a study are registered, looked up in the repository's history.

The report names the commit that held a claim first. That is the oldest commit since which the study
file, with its bases, has always held the same claim, registration and deciding table. A claim that
is not committed, or is younger than the first result of its table's stages, is exploratory. The
settings of the runs (stages, what is made, levels, recipes) are looked up in the same way, since
they too could be changed once results are known.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from xformer.config import find_recipe, merge, read_recipe
from xformer.data.errors import BadInput
from xformer.monitor import records
from xformer.study.plan import INTERVALS, Plan
from xformer.study.results import kept_ends
from xformer.study.spec import PLACE, SEED, ScoreTable

PATIENCE = 20  # seconds for git
# what of a table decides its claims
DECIDES = ("stage", "rows", "columns", "metric", "split", "where", "minus", "means", "chance")
Content = tuple[list[dict[str, Any]], dict[str, Any]]  # claims, and settings of runs
Held = tuple[int, str]  # the number of a claim, and "claim" or "runs"


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
        means, columns = (claim["decided by"].get(part) for part in ("means", "columns"))
        if claim["better"].get(columns) in (means or {}):  # a new column would be a part of it
            free -= {columns}
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
