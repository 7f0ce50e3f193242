"""What the exact net holds, by name, and how it is compared with what was recorded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from helpers import Forks

from golden.exact import arrays, kept, sources, stores, weights
from golden.exact.sources import HERE, unpack


def _published(place: Path) -> Path:
    return unpack(sources.ARCHIVE, place / "sources")


def _stores(place: Path) -> Any:
    return stores.found(stores.make(place, _published(place)))


def _arrays(place: Path) -> Any:
    names = [*arrays.STORES, *arrays.TOKENIZERS]
    return arrays.found(stores.make(place, _published(place), names))


def _weights(place: Path) -> Any:
    published = _published(place)
    made = stores.make(place, published, ["text-bert"])
    return weights.found(weights.make(place, published, made / "text-bert"))


# Each part is recorded in a file NAME.json beside this one. These are what the code makes,
MADE: dict[str, Callable[[Path], Any]] = {
    "stores": _stores,
    "arrays": _arrays,
    "weights": _weights,
}
# and these are what it does with the artefacts.
KEPT: dict[str, Callable[[Forks, Path], Any]] = {
    "continued-adamw": partial(kept.continued, name="adamw"),
    "continued-novograd": partial(kept.continued, name="novograd"),
    "finished": kept.evaluated,
    "started": kept.started,
    "study": kept.reported,
}
# For losses and scores, which differ by rounding between kernels: relative, and absolute below 1.
# Integers, digests and texts must be equal.
TOLERANCE = 1e-5


def measure(name: str, place: Path, forks: Forks | None = None) -> Any:
    """One part of the net, made by the present code. `place` is an empty directory. KEPT needs
    `forks`.
    """
    if name in MADE:
        found = MADE[name](place)
    else:
        assert forks is not None
        found = KEPT[name](forks, unpack(kept.ARCHIVE, place))
    return json.loads(json.dumps(found))


def recorded(name: str) -> Any:
    """One part of the net as it was recorded; an empty dictionary if it never was."""
    file = HERE / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(name: str, value: Any) -> None:
    """Record one part of the net in a readable form. A list of numbers is on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    (HERE / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """A line for each place at which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line
            for key in keys
            for line in differences(
                old.get(key, "absent"), new.get(key, "absent"), f"{where}/{key}"
            )
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}/{i}")]
    if isinstance(old, float) and isinstance(new, float):
        same = math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    else:
        same = type(old) is type(new) and old == new
    return [] if same else [f"{where}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
