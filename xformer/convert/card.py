"""The model card of an exported checkpoint: README.md with the front matter that the Hugging Face
hub reads.

A card states only what the checkpoint and its run have recorded, and leaves out the rest. It shows
only the last name of a path, because the folders above may be private.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from xformer.checkpoint import Checkpoint
from xformer.config import each_text, flat, toml_text
from xformer.convert import hf
from xformer.convert.describe import kind_of
from xformer.convert.recorded import Training
from xformer.data.store import Store
from xformer.model.config import DROPOUT

EXAMPLE = 'outputs = model(**tokenizer("one text", return_tensors="pt"))'  # without a head
SYMBOLS = 256  # a larger alphabet is not written into a card
PACKAGES = ("xformer", "torch", "numpy", "python")  # whose versions are shown


@dataclass(frozen=True)
class Card:
    """A model card. `name` is the name of the exported directory, `revisions` are the names of all
    revisions if there are several, and `revision` is this one."""

    checkpoint: Checkpoint
    name: str
    license: str = ""
    training: Training | None = None
    revision: str = ""
    revisions: Sequence[str] = ()

    def text(self) -> str:
        """The content of README.md."""
        checkpoint = self.checkpoint
        family = hf.family_of(checkpoint)
        architecture = hf.architecture_of(checkpoint, family)
        head = architecture.partition("For")[2]
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            undefined=StrictUndefined,
        )
        environment.filters |= FILTERS
        return environment.get_template("card.md").render(
            card=self,
            checkpoint=checkpoint,
            metadata=_metadata(self),
            family=family.name,
            architecture=architecture,
            parameters=sum(weight.numel() for weight in checkpoint.weights.values()),
            auto=f"AutoModelFor{head}" if head else "AutoModel",
            example=_example(checkpoint),
            training=self.training and _training(self.training, checkpoint),
        )


def _example(checkpoint: Checkpoint) -> str:
    """Python that calls the model: on a text, or on ids if the model reads mapped ids."""
    if checkpoint.source is None or checkpoint.mapping is None:
        return checkpoint.task.hf_example if checkpoint.task else EXAMPLE
    source, special = checkpoint.source, checkpoint.tokenizer.special
    around = " and ".join(checkpoint.tokenizer.pieces[special[role]] for role in ("cls", "sep"))
    ids = {
        piece: int(checkpoint.mapping[i])
        for i, piece in enumerate(source.pieces)
        if i not in source.special.values()
    }
    if source.kind == "symbols" and len(ids) <= SYMBOLS:
        text = (" " if source.meta["separated"] else "").join([*ids][:8])
        symbols = json.dumps(text, ensure_ascii=False) + ".split()" * source.meta["separated"]
        lines = [f"ids = {json.dumps(ids, ensure_ascii=False)}  # of each symbol"]
        between, why = f"*(ids[symbol] for symbol in {symbols}), ", f"between {around}"
    else:
        lines, between, why = [], "", f"{around}; put the mapped ids between them"
    lines.append(f"row = [{special['cls']}, {between}{special['sep']}]  # {why}")
    return "\n".join([*lines, "outputs = model(input_ids=torch.tensor([row]))"])


def _metadata(card: Card) -> dict[str, Any]:
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
        data, args = " and ".join(card.training.data), {"seed": card.training.config["seed"]}
        results = [
            {
                "task": {"type": values["pipeline_tag"]},
                "dataset": {"name": data, "type": data, "split": split},
                "metrics": [{"type": n, "value": v, "args": args} for n, v in _rounded(scores)],
            }
            for split, scores in card.training.scores.items()
        ]
        values["model-index"] = [{"name": card.name, "results": results}]
    return values


def _training(training: Training, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the card says about the last training."""
    recipe = _recipe(training, checkpoint.config.model_dump())
    every = [record for record in checkpoint.history if record.get("op") == "train"]
    store = training.store
    return {
        "data": training.data,
        "key": training.key,
        "scores": {split: _rounded(scores) for split, scores in training.scores.items()},
        "splits": None if store is None else [store.split(name) for name in store.splits],
        "sources": _sources(store),
        "last": every[-1] if every else {},
        "seed": training.config["seed"],
        "settings": flat(recipe),
        "masked": checkpoint.task is not None and checkpoint.task.predicts_masked,
        "environments": _environments(training),
        "recipe": toml_text(recipe).rstrip(),
    }


def _sources(store: Store | None) -> list[dict[str, str]]:
    """The files that a store was made from, if they are known."""
    parts = [] if store is None else store.parts
    origins = [part.meta.get("origin", {}).get("sources") for part in parts]
    return [source for origin in origins if isinstance(origin, list) for source in origin]


def _environments(training: Training) -> list[str]:
    """A line with the versions and the processor. If the run was resumed in another environment,
    that environment gets a line too."""
    lines: list[str] = []
    for start in training.starts:  # early versions recorded less
        environment = start["environment"]
        names = [f"{name} {environment[name]}" for name in PACKAGES if name in environment]
        device = environment.get("processor") or environment.get("device")
        count = environment.get("world_size", 1)
        where = f"{count} process{'es' * (count > 1)} on {device}"
        code = f", code {_code(environment['git'])}" if "git" in environment else ""
        line = f"{', '.join(names)}{code}; {where}"
        if not lines or not lines[-1].endswith(line):
            lines.append(f"- from step {start['step']:,}: {line}")
    return lines


def _recipe(training: Training, model: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run as a recipe, without the run's directory. A path is shortened to its
    last name.

    A run with `init` has the shape of that checkpoint, so its recipe keeps only the dropout
    settings of model.*.
    """
    recipe = {k: v for k, v in training.config.items() if k not in ("run", "overwrite")}
    data = training.data
    recipe["data"] = data[0] if len(data) == 1 else data
    if recipe.get("init"):
        recipe["init"] = Path(recipe["init"]).name
        model = {name: model[name] for name in DROPOUT}
    recipe["model"] = model
    return _without_paths(recipe)


# ---------------------------------------------------------------------------------------- helpers


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


def _printable(text: str) -> str:
    """A text with a space for every character that is not printable; YAML refuses some of these
    characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def _without_paths(value: Any) -> Any:
    """A value without the entries that are None. An absolute path is shortened to its last name."""
    if isinstance(value, dict):
        return {key: _without_paths(v) for key, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_paths(v) for v in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


FILTERS = {
    "code": _code,
    "heading": _code_free,
    "commas": "{:,}".format,
    "kind": kind_of,
    "show": show,
    "number": lambda value: f"{value:g}" if abs(value) >= 1e6 else f"{value}",
    "without_paths": _without_paths,
    "json": lambda value: json.dumps(each_text(value, _printable), ensure_ascii=False),
}
