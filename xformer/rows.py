"""The rows of a training step, computed again from the recipe.

They are exactly those that the run read, because the order of the rows and the masks depend only on
the seeds and the step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from xformer.config import MaybePaths, Settings, each, show, validate
from xformer.data.batch import Batch
from xformer.data.display import put, say
from xformer.data.errors import BadInput
from xformer.data.files import is_run, read_run_json
from xformer.data.joined import Joined, open_stores
from xformer.data.sampler import Stream
from xformer.data.tokenizers import Tokenizer
from xformer.parallel.processes import ALONE
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.setup import Setup
from xformer.tasks.task import Table, as_table


class RowsConfig(Settings):
    """Which step to print."""

    step: int = Field(ge=1)
    """The step whose rows are printed, in the order in which the ranks read them."""
    data: MaybePaths = None
    """Where the run's store is now, if it was moved. Default: the path in the run's recipe."""


def print_rows(run: Path, config: RowsConfig) -> None:
    """Print the rows of a step as a tab-separated table, and a line about the step."""
    setup, begin, end, batches = batches_of(run, config.step, config.data)
    rows = [row for part in batches for row in _rows(setup, *part)]
    tokens = sum(len(batch.tokens) for *_, batch in batches)
    epoch = begin // setup.samples.per_epoch
    say(
        f"step {config.step}: samples {begin:,} to {end - 1:,} (the first is in epoch {epoch}, "
        f"counted from 0); {len(rows):,} rows with {tokens:,} tokens in all, on "
        f"{setup.ranks.world_size} rank{'s' * (setup.ranks.world_size > 1)}",
        error=True,
    )
    columns: Table = {name: [row[name] for row in rows] for name in rows[0]}
    put(as_table(columns))


def batches_of(
    run: Path, step: int, data: Any = None
) -> tuple[Setup, int, int, list[tuple[int, int, Batch[np.ndarray]]]]:
    """Compute the micro-batches of a run's step again. Returns the setup, the first sample of the
    step and the first one after it, and each micro-batch with its rank and its number.

    `data` replaces the path of the store. Raises BadInput if the run has no such step, or if the
    store or the initial checkpoint has changed since the run was made.
    """
    if not is_run(run / "config.json"):
        raise BadInput(f"{run} is not a run: it lacks the config.json that training writes")
    content = read_run_json(run / "config.json")
    starts = content["starts"]
    if data and open_stores(data).key != content["identity"]["data"]:
        given, known = (", ".join(each(paths)) for paths in (data, starts[0]["config"]["data"]))
        raise BadInput(
            f"data={given} is not the store that {run} was trained on, which was {known}; data= is "
            "only for a store that was moved"
        )
    setup = prepare(_recipe(starts[0], data), ALONE)
    identity = setup.identity
    for name in ("data", "init", "surgery"):
        if identity.get(name) != content["identity"].get(name):
            raise BadInput(
                f"{name}={show(getattr(setup.recipe, name))} differs from what {run} was trained "
                "with, so its rows cannot be computed again"
            )
    position = done = 0
    for start, following in zip_longest(starts, starts[1:]):
        ranks = replace(ALONE, world_size=start["environment"]["world_size"])
        setup = replace(setup, recipe=_recipe(start, data), ranks=ranks)
        until = min(step - 1, following["step"]) if following else step - 1
        stream = setup.feed().stream
        position, done = _advance(stream, position, done, until)
        if following is None or step <= following["step"]:
            break
    planned = setup.recipe.train.steps or sys.maxsize
    if position >= stream.end or step > planned:
        raise BadInput(f"step={step}: {run} ends at step {min(done, planned)}")
    batches = []
    for rank in range(setup.ranks.world_size):
        feed = replace(setup, ranks=replace(setup.ranks, rank=rank)).feed()
        made = feed.take(position)
        batches += [(rank, number, batch) for number, batch in enumerate(made.batches)]
    return setup, position, made.end, batches


def _recipe(start: dict[str, Any], data: Any) -> Recipe:
    """The recipe with which a run was started or resumed, without settings that its rows do not
    need."""
    config = {**start["config"], "train": {**start["config"]["train"], "keep_at": []}}
    if config["init"] is not None:
        del config["model"]  # the shape is that of the initial checkpoint
    return validate(Recipe, {**config, "data": data or config["data"]})


def _advance(stream: Stream, position: int, done: int, until: int) -> tuple[int, int]:
    """Go from step `done` to step `until`. `position` is the first sample after step `done`.
    Returns the first sample that has not been read, and the step that was reached. This step is
    below `until` if the stream ends earlier."""
    if not stream.tokens:
        left = -(-(stream.end - position) // stream.per_step)
        steps = min(until - done, left)
        return min(stream.end, position + steps * stream.per_step), done + steps
    while done < until and position < stream.end:
        position, done = position + len(stream.take(position)[0]), done + 1
    return position, done


def _rows(
    setup: Setup, rank: int, number: int, batch: Batch[np.ndarray]
) -> Iterator[dict[str, str]]:
    """The lines of the table for a micro-batch."""
    split, tokenizer, store = setup.training_rows.split, setup.start.tokenizer, setup.store
    stores = store.stores if isinstance(store, Joined) else [store]
    bounds = np.cumsum(
        [0, *(part.split("train").rows for part in stores if "train" in part.splits)]
    )
    names = [part.name for part in stores if "train" in part.splits]
    for i, row in enumerate(batch.rows.tolist()):
        begin, end = batch.cu_seqlens[i : i + 2].tolist()
        ids = batch.tokens[begin:end]
        line = {"rank": str(rank), "micro_batch": str(number), "row": str(row)}
        if len(stores) > 1:
            owner = int(bounds.searchsorted(row, "right")) - 1
            line |= {"store": names[owner], "row_in_store": str(row - bounds[owner])}
        if "id" in split.columns:
            line["id"] = split.columns["id"].text(row)
        line["input"] = tokenizer.decode(ids)
        if setup.start.source is not None:  # the model's pieces are not those of the text
            texts = [split.columns[n][row] for n in ("tokens", "tokens_b") if n in split.columns]
            line["text"] = " ".join(setup.start.source.decode(text) for text in texts)
        if batch.places is not None and batch.targets is not None:
            first, last = batch.places.searchsorted([begin, end])
            named = tokenizer.pieces if setup.task.predicts_masked else store.labels
            pairs = zip(batch.places[first:last] - begin, batch.targets[first:last], strict=True)
            what = "masked" if setup.task.predicts_masked else "labels"
            line[what] = " ".join(f"{place}:{named[target]}" for place, target in pairs)
        if batch.labels is not None:
            line["label"] = _label(batch.labels[i], store.labels, ids, tokenizer)
        yield line


def _label(label: Any, names: Sequence[str], ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """The label of a row as text: a class, a score, or the tokens of an answer."""
    if np.ndim(label):
        first, last = label.tolist()
        return tokenizer.decode(ids[first : last + 1]) if first else ""
    if isinstance(label, np.floating):
        return f"{label:g}"
    return names[label] if 0 <= label < len(names) else str(label) if label >= 0 else ""
