"""What a run recorded about one of its checkpoints: settings, environments, scores and data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer import checkpoint as checkpoints
from xformer.data.errors import BadInput
from xformer.data.files import read_run_json, selected
from xformer.data.joined import open_stores
from xformer.data.store import Store

Scores = dict[str, dict[str, float]]  # metric values by split
FOLDERS = ("checkpoints", "trajectory")  # where a run keeps its checkpoints


@dataclass(frozen=True)
class Training:
    """What a run recorded about one of its checkpoints. `starts` has the settings and environment
    of each start of the run before that checkpoint. The last of these starts made the checkpoint.
    `key` is the SHA-256 of the store's content. `store` is None if the store is gone or has
    changed."""

    starts: list[dict[str, Any]]
    key: str
    scores: Scores
    store: Store | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        return dict(self.starts[-1]["config"])

    def remade(self, store: Store) -> bool:
        """Whether a store lies where the run's only store was, but has another content."""
        paths = [Path(path).resolve() for path in _stores(self.config)]
        return self.key != store.key and paths == [Path(store.name).resolve()]

    @property
    def data(self) -> list[str]:
        """The names of the stores."""
        return [Path(path).name for path in _stores(self.config)]


def training_of(path: Path) -> Training | None:
    """What the run of a checkpoint recorded. None if the checkpoint is not in a run's directory.

    Raises BadInput if a file of the run is damaged.
    """
    path = path.absolute()
    run = path.parent.parent
    step = checkpoints.step_of(path)
    if path.parent.name not in FOLDERS or step is None or not (run / "config.json").is_file():
        return None
    content = read_run_json(run / "config.json")
    try:
        every = content["starts"]
        starts = [start for start in every if start["step"] < step] or every[:1]
        key = str(content["identity"]["data"])
        store = _open(_stores(starts[-1]["config"]), key)
        return Training(starts, key, _recorded_scores(run, path, step), store)
    except (LookupError, TypeError) as error:
        raise BadInput(f"{run / 'config.json'} is damaged: {error!r}") from None


def _stores(config: dict[str, Any]) -> list[str]:
    data = config["data"]
    return [data] if isinstance(data, str) else list(data)


def _open(paths: list[str], key: str) -> Store | None:
    """The store that a run was trained on, if it is still there and has the same content."""
    try:
        store = open_stores(paths)
    except (BadInput, OSError):
        return None
    return store if store.key == key else None


def _recorded_scores(run: Path, path: Path, step: int) -> Scores:
    """The scores in result.json if the run selected this checkpoint, else those of the validation
    after this step, if there was one."""
    if (run / "result.json").is_file() and selected(run).resolve() == path.resolve():
        return dict(read_run_json(run / "result.json")["metrics"])
    scores, wanted = Scores(), ("validation", step)
    log = run / "log.jsonl"
    for line in log.read_bytes().splitlines() if log.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if isinstance(record, dict) and (record.get("event"), record.get("step")) == wanted:
            values = {k: v for k, v in record.items() if isinstance(v, float) and k != "time"}
            scores = {"valid": values}
    return scores
