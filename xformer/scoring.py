"""A model on a split: its outputs for every row, and the scores that follow from them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from xformer.checkpoint import Checkpoint
from xformer.data import mapping
from xformer.data.batch import Assembler, chunks
from xformer.data.display import Progress
from xformer.data.errors import BadInput, typed
from xformer.data.store import Store
from xformer.parallel.feed import to_device
from xformer.parallel.processes import Ranks
from xformer.tasks.task import Model, Predictions, Task, check_finite

MASKING_SEED = 0  # one set of validation masks for all runs, so that their losses compare


@dataclass(frozen=True)
class Scores:
    """`metrics` by name; `outputs` as the task has them (see Task.evaluate); `predictions` as they
    are kept in files, from which the metrics are computed."""

    metrics: dict[str, float]
    outputs: np.ndarray
    predictions: Predictions


def score(
    model: Model,
    assembler: Assembler,
    ranks: Ranks,
    precision: str,
    threshold: float | None = None,
) -> Scores:
    """Metrics of a model with a task on a split. Every rank takes its share and gets the whole
    result. Labels of -1 or NaN are not scored.

    Raises BadInput if no row has a label, and Failure that names split and rows if the model's
    outputs or its loss are not finite.
    """
    split, task = assembler.split, model.task
    assert task is not None
    outputs = outputs_of(model, assembler, ranks, precision, f"the split {split.name!r}: outputs")
    predictions = task.predictions(outputs, split, threshold)
    return Scores(predictions.metrics(), outputs, predictions)


@torch.no_grad()
def outputs_of(
    model: Model, assembler: Assembler, ranks: Ranks, precision: str, what: str = "the outputs"
) -> np.ndarray:
    """What a model with a task says of a split, which may lack labels: the task's numbers of each
    row (see Task.evaluate). Every rank takes its share and gets all of them.

    Rows are cut into the same chunks on any number of ranks. Raises Failure that names the rows
    whose outputs are not finite; `what` says what these are.
    """
    was_training, task, split = model.training, model.task, assembler.split
    assert task is not None
    model.eval()
    outputs = torch.zeros(task.size(split), task.width, device=ranks.device)  # of other ranks 0
    parts = list(chunks(assembler, assembler.examples))
    mine, begun, tokens = parts[ranks.rank :: ranks.world_size], time.monotonic(), 0
    total, unit = sum(map(len, mine)), "rows" if split.together == 1 else "questions"
    with Progress(f"scoring {split.name}", total, unit, active=ranks.rank == 0) as progress:
        for part in mine:
            host = task.evaluation_batch(assembler, part, MASKING_SEED)
            with ranks.autocast(precision):
                batch = to_device(host, ranks.device)
                places, values = task.evaluate(model, batch, host, assembler)
            outputs[torch.from_numpy(places).to(ranks.device)] = values.float()
            tokens += len(host.tokens)
            speed = tokens / max(time.monotonic() - begun, 1e-9)
            progress.advance(len(part), **{"tokens/s": speed})
    model.train(was_training)
    every = ranks.sum(outputs).cpu().numpy()
    check_finite(np.where(task.broken(every, split), np.nan, 0.0), what)
    return every


def assembler_for(checkpoint: Checkpoint, store: Store, split: str, spec: str | None) -> Assembler:
    """The assembler that feeds a store's split to a trained checkpoint.

    `spec` overrides the mapping the checkpoint was trained with. Raises BadInput where the store
    does not fit the checkpoint's head or tokenizer.
    """
    task = checkpoint.task
    if task is None:
        door = typed("train.py")
        raise BadInput(f"this checkpoint has no head to score: fine-tune it with {door} first")
    head = task.head
    check_task(store, task)
    if spec is None and checkpoint.source is not None:  # the very array of training
        if store.fingerprint != checkpoint.source.fingerprint:
            raise BadInput(
                f"{store.name} was made with a different tokenizer from the data this checkpoint "
                "was trained on; make it anew with that one, or give mapping="
            )
        array = checkpoint.mapping
    else:
        size = checkpoint.config.vocab_size
        array = mapping.build(spec or head.mapping, store, checkpoint.tokenizer, size)
    return Assembler(store.split(split), checkpoint.tokenizer, head.max_tokens, array)


def check_kind(kind: str, task: Task | type[Task], store: object) -> None:
    """Raise BadInput unless a store of a kind holds what a task predicts; `store` names it."""
    if kind not in task.stores:
        wants = " or ".join(task.stores)
        raise BadInput(f"head={task.name} needs a store of kind {wants}; {store} is {kind}")


def check_task(store: Store, task: Task) -> None:
    """Raise BadInput unless the store holds what the task predicts."""
    check_kind(store.kind, task, store.name)
    if not task.named_classes or tuple(store.labels) == task.head.labels:
        return
    unknown = sorted(set(store.labels) - set(task.head.labels))
    what = f"other classes than the checkpoint's: {', '.join(store.labels)}"
    if unknown:
        what = f"labels outside the checkpoint's classes: {', '.join(unknown)}"
    raise BadInput(f"{store.name} has {what}; the checkpoint knows {', '.join(task.head.labels)}")
