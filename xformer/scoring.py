"""Score a model on a split: its outputs for every row, and the metrics computed from them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from xformer.data.batch import Assembler, Batch, chunks
from xformer.data.display import Progress
from xformer.data.errors import BadInput, typed
from xformer.data.store import Store
from xformer.parallel.compiled import not_compiled
from xformer.parallel.feed import made_ahead
from xformer.parallel.processes import Ranks
from xformer.tasks.task import (
    Head,
    Model,
    Predictions,
    Task,
    check_finite,
    evaluating,
    tensor_on,
    to_device,
)

MASKING_SEED = 0  # all runs validate with the same masks, so that their losses are comparable


@dataclass(frozen=True)
class Scores:
    """Metrics by name, the task's `outputs` for every row (see Task.evaluate), and the
    `predictions` from which the metrics are computed, in the form that is written to files."""

    metrics: dict[str, float]
    outputs: np.ndarray = field(repr=False)
    predictions: Predictions = field(repr=False)


def score(
    model: Model,
    assembler: Assembler,
    ranks: Ranks,
    precision: str,
    threshold: float | None = None,
) -> Scores:
    """Score a model on a split. Every rank computes a part and returns the whole result. Rows with
    a label of -1 or NaN are not scored. If no row has a label, there are no metrics.

    Raises Failure that names the split and the rows if outputs or losses are not finite.
    """
    split, task = assembler.split, model.task
    assert task is not None
    outputs = outputs_of(model, assembler, ranks, precision, f"the split {split.name!r}: outputs")
    predictions = task.predictions(outputs, split, threshold)
    return Scores(predictions.metrics() if task.has_labels(split) else {}, outputs, predictions)


@torch.no_grad()
def outputs_of(
    model: Model, assembler: Assembler, ranks: Ranks, precision: str, what: str
) -> np.ndarray:
    """A model's outputs for every row of a split (see Task.evaluate). Labels may be missing. Every
    rank computes a part of the outputs and returns all of them.

    The chunks of rows are the same for any number of ranks. If outputs are not finite, raises
    Failure that names their rows; `what` describes the outputs in the message.
    """
    task, split = model.task, assembler.split
    assert task is not None

    def batches(examples: np.ndarray) -> tuple[Batch[np.ndarray], Batch[Tensor]]:
        """A batch in host memory and on the device."""
        host = task.evaluation_batch(assembler, examples, MASKING_SEED)
        return host, to_device(host, ranks.device)

    outputs = torch.zeros(task.size(split), task.width, device=ranks.device)  # 0: other ranks' rows
    parts = list(chunks(assembler, assembler.examples))
    mine, begun, tokens = parts[ranks.rank :: ranks.world_size], time.monotonic(), 0
    total, unit = sum(map(len, mine)), "rows" if split.together == 1 else "questions"
    line = Progress(f"scoring {split.name}", total, unit, active=ranks.rank == 0)
    with evaluating(model), line as progress:
        for host, batch in made_ahead(map(batches, mine), ranks.device):
            with ranks.autocast(precision), not_compiled():
                places, values = task.evaluate(model, batch, host, assembler)
            outputs[tensor_on(places, ranks.device)] = values.float()
            tokens += len(host.tokens)
            speed = tokens / max(time.monotonic() - begun, 1e-9)
            progress.advance(len(host.rows) // split.together, **{"tokens/s": speed})
    every = ranks.sum(outputs).cpu().numpy()
    check_finite(np.where(task.broken(every, split), np.nan, 0.0), what)
    return every


def longest_remedy(head: Head, most: int) -> str:
    """What else can be done about truncated rows, for stores of DNA or proteins; "" for others.
    `most` is the number of letters that fit into a row."""
    if "longest" not in (head.columns or {}):
        return ""
    door = typed("preprocess.py task")
    return f"; a store that {door} makes with --longest {most} keeps both ends of each sequence"


# kind of store -> the sub-command of preprocess.py that makes one
MAKERS = {
    "text": "text",
    "class": "task tsv",
    "score": "task tsv --kind score",
    "span": "task squad",
    "tag": "task conll",
    "choice": "task choice",
}


def check_kind(kind: str, task: Task | type[Task], store: object) -> None:
    """Raise BadInput unless the task can use stores of this kind. `store` names the store in the
    message."""
    if kind not in task.stores:
        needed = " or ".join(task.stores)
        makes = typed(f"preprocess.py {MAKERS[task.stores[0]]}")
        raise BadInput(
            f"head={task.name} needs a store of kind {needed}, which {makes} makes; {store} is of "
            f"kind {kind}"
        )


def long_windows(task: Task, rows: Assembler, store: Store) -> str:
    """A line if windows of contexts would be truncated, else "". A row would lose its answer, and
    the end of the context would be in no row."""
    if not task.has_questions or (longest := rows.longest()) <= rows.max_tokens:
        return ""
    return (
        f"{store.name}: the longest window of {rows.split.name} has {longest} tokens, but rows "
        f"have {rows.max_tokens} here; make the store again with --max-tokens {rows.max_tokens}"
    )
