"""The plans of the studies in recipes/, which many tests read and none changes. A process makes
each of them once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from helpers import ROOT

from xformer.config import read_recipe
from xformer.study.forecast import Forecast
from xformer.study.plan import Plan
from xformer.study.reading import read_study

STUDIES = sorted((ROOT / "recipes/studies").glob("*.toml"))
SCALES = [(path, scale) for path in STUDIES for scale in read_recipe(path)["scales"]]
NOWHERE = ROOT / "nowhere"  # no plan is run


@cache
def planned(path: Path, scale: str) -> Plan:
    """The plan of a study for a user who has none of its needs."""
    return Plan(read_study(path, scale), NOWHERE, {})


@cache
def foreseen(path: Path, scale: str) -> Forecast:
    """What is known of that plan."""
    return Forecast(planned(path, scale))
