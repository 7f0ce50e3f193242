"""The model card of an exported checkpoint: README.md with the front matter that the Hugging Face
hub reads.

A card states only what the checkpoint and its run have recorded, and leaves out the rest. Of paths
it shows the last name, because the others may be private.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.checkpoint import Checkpoint
from xformer.config import flat, toml_text
from xformer.convert import hf
from xformer.data.errors import BadInput
from xformer.data.files import read_run_json
from xformer.data.joined import open_stores
from xformer.data.store import Store

Scores = dict[str, dict[str, float]]  # metric values by split
FOLDERS = ("checkpoints", "trajectory")  # where a run keeps its checkpoints
SOURCES = 8  # source files of a store that are listed at most
# the settings of a run that are shown first; all others follow
SHOWN = (
    "init",
    "fraction",
    "mapping",
    "optim.name",
    "optim.lr",
    "optim.schedule",
    "optim.warmup",
    "optim.weight_decay",
    "optim.clip",
    "batch.max_tokens",
    "system.precision",
)
EXAMPLE = 'outputs = model(**tokenizer("one text", return_tensors="pt"))'  # without a head


@dataclass(frozen=True)
class Training:
    """What a run recorded about one of its checkpoints. `starts` are the settings and environments
    up to its step; the last one made it. `key` is the SHA-256 of the store's content, and `store`
    is None if the store is not there any more."""

    starts: list[dict[str, Any]]
    key: str
    scores: Scores
    store: Store | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        return dict(self.starts[-1]["config"])

    @property
    def data(self) -> list[str]:
        """The names of the stores."""
        return [Path(path).name for path in _stores(self.config)]

    @property
    def seed(self) -> str:
        """The seed of the run, or its seeds by purpose."""
        return show(self.config["seed"])


@dataclass(frozen=True)
class Card:
    """A model card. `name` is the name of the exported directory, `revisions` are the names of all
    revisions if there are several, and `revision` is this one."""

    checkpoint: Checkpoint
    name: str
    license: str = ""
    training: Training | None = None
    revision: str = ""
    revisions: Sequence[str] = field(default_factory=tuple)

    def text(self) -> str:
        """The content of README.md."""
        title = _code_free(self.name) + (f", {self.revision}" if self.revision else "")
        sections = [
            _front_matter(self),
            f"# {title}\n\n{_summary(self)}",
            _usage(self),
            _revisions(self),
            _scores(self),
            _training(self),
            _history(self.checkpoint),
        ]
        return "\n\n".join(filter(None, sections)) + "\n"


# ---------------------------------------------------------------------------- what a run recorded


def training_of(path: Path) -> Training | None:
    """What the run of a checkpoint recorded. None if the checkpoint is not in a run's directory.

    Raises BadInput if a file of the run is damaged.
    """
    run = path.parent.parent
    step = step_of(path)
    if path.parent.name not in FOLDERS or step is None or not (run / "config.json").is_file():
        return None
    content = read_run_json(run / "config.json")
    try:
        first = {"step": 0, "config": content["config"], "environment": content["environment"]}
        every = content.get("starts") or [first]
        starts = [start for start in every if start["step"] < step] or every[:1]
        key = str(content["identity"]["data"])
        store = _open(_stores(starts[-1]["config"]), key)
        return Training(starts, key, _recorded_scores(run, path, step), store)
    except (KeyError, TypeError) as error:
        raise BadInput(f"{run / 'config.json'} is damaged: {error!r}") from None


def step_of(path: Path) -> int | None:
    """The step of a checkpoint in a run's directory; None if the name is not that of a step."""
    step = path.name.removeprefix("step_")
    return int(step) if step.isdecimal() and step != path.name else None


def _stores(config: dict[str, Any]) -> list[str]:
    data = config["data"]
    data = data["store"] if isinstance(data, dict) else data  # in early versions
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
    if (run / "result.json").is_file():
        result = read_run_json(run / "result.json")
        if (run / result["selected"]).resolve() == path.resolve():
            return dict(result["metrics"])
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


# ------------------------------------------------------------------------------------ the sections


def _front_matter(card: Card) -> str:
    """The metadata that the hub reads: YAML, with every value written as JSON."""
    task, checkpoint = card.checkpoint.task, card.checkpoint
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": task.hf_pipeline if task else "feature-extraction",
        "tags": ["xformer"],
    }
    if card.license:
        values["license"] = card.license
    if base := next((r["repository"] for r in checkpoint.history if "repository" in r), None):
        values["base_model"] = base
    if card.training is not None and card.training.scores:
        data = " and ".join(card.training.data)
        values["model-index"] = [
            {
                "name": card.name,
                "results": [
                    {
                        "task": {"type": values["pipeline_tag"]},
                        "dataset": {"name": data, "type": data, "split": split},
                        "metrics": [
                            {
                                "type": name,
                                "value": value,
                                "args": {"seed": card.training.config["seed"]},
                            }
                            for name, value in _rounded(scores)
                        ],
                    }
                    for split, scores in card.training.scores.items()
                ],
            }
        ]
    lines = [f"{key}: {json.dumps(_printable(v), ensure_ascii=False)}" for key, v in values.items()]
    return "\n".join(["---", *lines, "---"])


def _summary(card: Card) -> str:
    """What the model is."""
    checkpoint = card.checkpoint
    config, family, tokenizer = checkpoint.config, hf.family_of(checkpoint), checkpoint.tokenizer
    parameters = sum(weight.numel() for weight in checkpoint.weights.values())
    lines = [
        f"A model of the family {family.name} (`{hf.architecture_of(checkpoint, family)}`) with "
        f"{parameters:,} parameters, made with xformer.",
        "",
        f"- {config.layers} layers of width {config.hidden}, {config.heads} attention heads",
        f"- rows of up to {config.max_positions} tokens",
        f"- vocabulary: {tokenizer.kind}, {len(tokenizer):,} pieces",
    ]
    if checkpoint.head is not None:
        lines.append(f"- head: {checkpoint.head.kind}")
        if checkpoint.head.labels:
            lines.append(f"- classes: {', '.join(map(_code, checkpoint.head.labels))}")
    if checkpoint.source is not None:
        lines += [
            "",
            f"The model was trained on ids of another tokenizer ({checkpoint.source.kind}, "
            f"{len(checkpoint.source):,} pieces), which xformer maps to the model's ids. This "
            "mapping is not part of the export: the tokenizer here is the model's own.",
        ]
    return "\n".join(lines)


def _usage(card: Card) -> str:
    """How to load the model."""
    checkpoint = card.checkpoint
    architecture = hf.architecture_of(checkpoint, hf.family_of(checkpoint))
    head = architecture.partition("For")[2]
    auto = f"AutoModelFor{head}" if head else "AutoModel"
    example = checkpoint.task.hf_example if checkpoint.task else EXAMPLE
    return f"""## How to load it

```python
from transformers import {auto}, AutoTokenizer

name = "."  # this directory, or the name of its repository on the hub
tokenizer = AutoTokenizer.from_pretrained(name)
model = {auto}.from_pretrained(name)
{example}
```"""


def _revisions(card: Card) -> str:
    """The other checkpoints of the run, and how to load them."""
    if not card.revisions:
        return ""
    names = ", ".join(f"`{name}`" for name in card.revisions)
    main = " `main` is the checkpoint that the run selected." if "main" in card.revisions else ""
    return (
        f"## Revisions\n\nThe training run kept these checkpoints: {names}. The number is that of "
        f"the optimizer step.{main} To load one of them from the hub, add "
        f'`revision="{card.revisions[0]}"` to both calls of `from_pretrained`. On a disk each of '
        "them is a directory of its own: give its path instead."
    )


def _training(card: Card) -> str:
    """The data, the settings and the versions of the last training."""
    training = card.training
    if training is None:
        return ""
    recipe = _recipe(training, card.checkpoint.config.model_dump())
    return "\n".join(
        [
            "## Training",
            "",
            *_data(training),
            "",
            *_table(("setting", "value"), _settings(card.checkpoint, training, flat(recipe))),
            "",
            *_environments(training),
            "",
            "<details><summary>All settings, as a recipe of xformer</summary>",
            "",
            "```toml",
            toml_text(recipe).rstrip(),
            "```",
            "",
            "</details>",
        ]
    )


def _settings(
    checkpoint: Checkpoint, training: Training, recipe: dict[str, Any]
) -> list[tuple[str, str]]:
    """The length of the last training, its seed, and its main settings by dotted key."""
    trained = [record for record in checkpoint.history if record.get("op") == "train"]
    last = trained[-1] if trained else {}
    names = {"steps": "step of these weights", "tokens": "tokens seen, without padding"}
    rows = [(called, f"{last[name]:,}") for name, called in names.items() if name in last]
    keys = list(SHOWN)
    # the second of each pair applies only if the first is 0
    for first, second in (("train.steps", "train.epochs"), ("batch.tokens", "batch.rows")):
        keys.append(first if recipe.get(first) else second)
    if checkpoint.task is not None and checkpoint.task.predicts_masked:
        keys.append("masking.probability")
    cells = [(_code(key), _code(show(recipe[key]))) for key in keys if key in recipe]
    return [*rows, ("seed", training.seed), *cells]


def _data(training: Training) -> list[str]:
    """The stores with their checksum and, if they are still there, their splits and sources."""
    names = ", ".join(map(_code, training.data))
    lines = [
        f"Data: {names}. SHA-256 over the checksums of its token ids and labels: "
        f"{_code(training.key)}"
    ]
    if training.store is None:
        return lines
    splits = [training.store.split(name) for name in training.store.splits]
    cells = [(split.name, f"{split.rows:,}", f"{split.tokens:,}") for split in splits]
    lines += ["", *_table(("split", "rows", "tokens"), cells)]
    parts: Iterable[Store] = getattr(training.store, "stores", [training.store])
    origins = [part.meta.get("origin", {}).get("sources") for part in parts]
    files = [source for origin in origins if isinstance(origin, list) for source in origin]
    if files:
        shown = [(_code(each["file"]), _code(each["sha256"])) for each in files[:SOURCES]]
        lines += ["", *_table(("made from", "SHA-256"), shown)]
    if len(files) > SOURCES:
        lines.append(f"| {len(files) - SOURCES} more | |")
    return lines


def _environments(training: Training) -> list[str]:
    """The versions and the processor. If the run was resumed in another environment, each one."""
    lines: list[str] = []
    for start in training.starts:  # early versions recorded less
        environment = start["environment"]
        packages = ("xformer", "torch", "numpy", "python")
        names = [f"{name} {environment[name]}" for name in packages if name in environment]
        device = environment.get("processor") or environment.get("device")
        count = environment.get("world_size", 1)
        where = f"{count} process{'es' * (count > 1)} on {device}"
        code = f", code {_code(environment['git'])}" if "git" in environment else ""
        line = f"{', '.join(names)}{code}; {where}"
        if not lines or not lines[-1].endswith(line):
            lines.append(f"- from step {start['step']:,}: {line}")
    return ["Versions:", "", *lines]


def _recipe(training: Training, model: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run as a recipe: without the run's directory, and with names for paths.

    A run with `init` has the shape of that checkpoint. Of model.* its recipe has only dropout.
    """
    recipe = {k: v for k, v in training.config.items() if k not in ("run", "overwrite")}
    data = training.data
    recipe["data"] = data[0] if len(data) == 1 else data
    if recipe.get("init"):
        recipe["init"] = Path(recipe["init"]).name
        model = {key: value for key, value in model.items() if "dropout" in key}
    recipe["model"] = model
    cleaned: dict[str, Any] = _without_paths(recipe)
    return cleaned


def _history(checkpoint: Checkpoint) -> str:
    """Everything that was done to the weights, in order."""
    if not checkpoint.history:
        return ""
    lines = []
    for number, record in enumerate(checkpoint.history, 1):
        values = {
            key: value
            for key, value in _without_paths(record).items()
            if key not in ("op", "sentence", "other_dtypes")
        }
        shown = ", ".join(f"{key} {_code(show(value))}" for key, value in values.items())
        lines.append(f"{number}. **{record['op']}**{': ' if shown else ''}{shown}")
    return "\n".join(["## How the weights were made", "", *lines])


def _scores(card: Card) -> str:
    """The scores by split and metric."""
    if card.training is None or not card.training.scores:
        return ""
    seed = card.training.seed
    cells = [
        (split, name, f"{value:g}" if abs(value) >= 1e6 else f"{value}", seed)
        for split, scores in card.training.scores.items()
        for name, value in _rounded(scores)
    ]
    return "\n".join(["## Scores", "", *_table(("split", "metric", "score", "seed"), cells)])


# ---------------------------------------------------------------------------------------- helpers


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _rounded(scores: dict[str, float]) -> list[tuple[str, float]]:
    """The scores with four digits. A score that is not finite is left out."""
    return [(name, round(value, 4)) for name, value in scores.items() if math.isfinite(value)]


def show(value: Any) -> str:
    """A recorded value as text."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    return str(value)


def _code(text: str) -> str:
    """A text as inline code, also within a table."""
    return "`" + _printable(text).replace("`", "'").replace("|", "\\|") + "`"


def _code_free(text: str) -> str:
    """A text for a heading."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in _printable(text))


def _printable(value: Any) -> Any:
    """A value whose texts have a space for every character that is not printable; YAML refuses
    some of these characters."""
    if isinstance(value, dict):
        return {key: _printable(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_printable(v) for v in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)
    return value


def _without_paths(value: Any) -> Any:
    """A value without its entries that are None, and with the last name of every absolute path."""
    if isinstance(value, dict):
        return {key: _without_paths(v) for key, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_paths(v) for v in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value
