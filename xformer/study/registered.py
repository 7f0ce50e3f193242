"""Which commit holds each claim of a study, and whether that was before the first result.

A claim counts as registered in the oldest commit from which on the study file, with its bases, has
held the same claim, the same registration and the same table to decide it. What is not committed,
or younger than the first result, is exploration. The settings of the runs (stages, what is made,
levels, recipes) are looked up in the same way, as they too could be changed after a look.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from xformer.config import find_recipe, merge, read_recipe
from xformer.data.errors import BadInput
from xformer.monitor import records
from xformer.study.plan import Plan
from xformer.study.spec import METRIC, SEED, Claim, Levels, Study
from xformer.study.statistics import detectable

PATIENCE = 20  # seconds for git
DECIDES = ("stage", "rows", "columns", "metric", "split", "where", "minus", "means", "chance")


@dataclass(frozen=True)
class Origin:
    """Where something was written down first: the commit and its time; neither if it never was.
    `cut`: a shallow clone does not show whether it is older."""

    commit: str = ""
    time: datetime | None = None
    cut: bool = False

    def words(self, first: datetime | None, runs: Origin | None = None) -> str:
        """What a report says of a claim: the commit and its time, or why it is exploration.
        `first` is the time of the first result, `runs` the origin of the runs' settings."""
        if self.time is None:
            return "exploration: not committed"
        when = f"{'at the latest ' * self.cut}{self.commit[:9]} of {self.time:%Y-%m-%d %H:%M}"
        if first is not None and self.time > first:
            return f"exploration: {when}, the first result is of {first:%Y-%m-%d %H:%M}"
        if runs is not None and first is not None and (runs.time is None or runs.time > first):
            changed = f"in {runs.commit[:9]}" if runs.time else "and are not committed"
            return f"{when}; the settings of the runs changed after the first result, {changed}"
        return when


def origins(path: Path, scale: str) -> tuple[list[Origin], Origin]:
    """The origin of each claim of a study file at a scale, in order, and that of the settings of
    its runs. Times are in UTC."""
    claims, runs = _content(path, scale)
    wanted = [*claims, runs]
    found = [Origin() for _ in wanted]
    top = _git(path.resolve().parent, "rev-parse", "--show-toplevel")
    if top is None:
        return found[:-1], found[-1]
    root = Path(top.decode().strip()).resolve()
    folders = _folders(path, runs, root)
    # with parents as they are when only these folders count; children come before parents
    log = _git(root, "rev-list", "--topo-order", "--timestamp", "--parents", "HEAD", "--", *folders)
    shallow = (_git(root, "rev-parse", "--is-shallow-repository") or b"").strip() == b"true"
    left: dict[str, set[int]] = {}  # of each commit, what all commits on some way to it hold
    for number, line in enumerate((log or b"").decode().splitlines()):
        seconds, commit, *parents = line.split()
        still = set(range(len(wanted))) if number == 0 else left.get(commit, set())
        if still:
            had = _at(root, commit, folders, path.resolve().relative_to(root), scale)
            still = {i for i in still if wanted[i] in had}
        time = datetime.fromtimestamp(int(seconds), UTC)
        for i in still:
            known = found[i].time
            if known is None or time <= known:
                found[i] = Origin(commit, time, shallow and not parents)
        for parent in parents:
            left[parent] = left.get(parent, set()) | still
    return found[:-1], found[-1]


def lines(study: Study) -> list[str]:
    """What --dry-run says of the registered claims: each with margin, seeds, power and commit."""
    if study.registration is None:
        return []
    found = ["", f"registered: {study.registration.words()}"]
    for claim, origin in zip(study.claims, origins(study.path, study.scale)[0], strict=True):
        found.append(f"  {claim.text} ({power(study, claim)}): {origin.words(None)}")
    return [*found, ""]


def power(study: Study, claim: Claim) -> str:
    """How large a difference a registered claim's seeds find with probability 0.8, in words."""
    table = next(table for table in study.tables if table.name == claim.table)
    both = [_seeds(study, table.stage, side) for side in (claim.better, claim.than)]
    pairs, parts = len(both[0] & both[1]), 1
    if claim.each:
        levels = (
            study.columns(table) if claim.each == METRIC else study.factors(table.stage)[claim.each]
        )
        parts = len(levels)
    assert study.registration is not None
    found = detectable(pairs, tests=parts * study.registration.looks)
    return (
        f"margin {claim.margin:g}; {pairs} pairs find a difference {found:.2f} standard deviations "
        "from the margin"
    )


def _seeds(study: Study, stage: str, side: Levels) -> set[str]:
    """The levels of `seed` that a side of a claim has."""
    wanted = {name: level for name, level in side.items() if name != METRIC}
    levels = study.combinations(stage)
    return {one.get(SEED, "") for one in levels if wanted.items() <= one.items()}


def first_result(plan: Plan) -> datetime | None:
    """When the first of the study's runs ended, in UTC; None if none has. Of a command it is the
    time of its result's file."""
    ends = []
    for work in plan.works.values():
        if not work.stage or not work.done:
            continue
        logged = []
        if (work.path / "log.jsonl").is_file():
            logged = [float(record["time"]) for record in records(work.path)]
        ends.append(max(logged, default=work.proof.stat().st_mtime))
    return datetime.fromtimestamp(min(ends), UTC) if ends else None


def _content(path: Path, scale: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
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
    return claims, {**{k: values.get(k) for k in ("stages", "made", "levels")}, "recipes": recipes}


def _folders(path: Path, runs: dict[str, Any], root: Path) -> list[str]:
    """The folders of the repository that hold the study and the recipes of its stages."""
    folder = path.resolve().parent
    every = {folder, *(find_recipe(name, folder).resolve().parent for name in runs["recipes"])}
    return sorted(str(one.relative_to(root)) for one in every if one.is_relative_to(root))


def _at(root: Path, commit: str, folders: list[str], path: Path, scale: str) -> list[Any]:
    """What a commit holds: the claims, and the settings of the runs. Nothing if the study is not
    there, or is of a form that is not read any more."""
    archive = _git(root, "archive", commit, *folders)
    if archive is None:
        return []
    with tempfile.TemporaryDirectory(prefix="xformer-") as directory:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(directory, filter="data")
        try:
            claims, runs = _content(Path(directory) / path, scale)
        except (BadInput, tomllib.TOMLDecodeError, LookupError, TypeError, AttributeError):
            return []
    return [*claims, runs]


def _git(directory: Path, *arguments: str) -> bytes | None:
    """What git prints in a directory; None if it fails or is not there."""
    try:
        command = ["git", "-C", str(directory), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
