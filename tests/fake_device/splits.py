"""Evaluation of every task on a split, to find where the host waits for CUDA.

    benchmarks.fake_cuda.start("fake_device.splits", FOLDER)

prints, for each case as a line of JSON, the operations at which the host would wait for a fake
device, and for each batch how many had been made ahead of it. Scoring and prediction share the
evaluation.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks import fake_cuda
from benchmarks.steps import CLASSES, CNN, SHAPE, TASKS
from xformer import scoring
from xformer.data import vocabularies
from xformer.data.batch import Assembler, Batch
from xformer.data.store import Ragged, Split
from xformer.model.config import ModelConfig
from xformer.parallel import feed
from xformer.parallel.processes import Ranks
from xformer.tasks.classify import Classify
from xformer.tasks.task import Head, Model, Task

ROWS, LENGTH, LONGEST = 600, 40, 64  # more than two batches
TOKENIZER = vocabularies.symbols(map(str, range(100)), separated=True)


def ragged(rows: int, values: np.ndarray) -> Ragged:
    """A column in which every row has the same values."""
    return Ragged(np.tile(values, rows), np.arange(rows + 1) * len(values))


def texts(rows: int, text: str) -> Ragged:
    """A column in which every row has the same text."""
    return ragged(rows, np.frombuffer(text.encode(), np.uint8))


def split_for(task: Task) -> Split:
    """A split that the task can be trained and scored on."""
    tokens = ragged(ROWS, np.arange(5, 5 + LENGTH, dtype=np.uint16))
    label: Any = np.arange(ROWS) % 2
    columns: dict[str, Any] = {"tokens": tokens, "label": label}
    if task.name in ("span", "mlm"):
        columns["tokens_b"] = tokens
    if task.name == "regress":
        columns["label"] = label.astype(np.float32)
    if task.name == "choice":
        columns["label"] = label // 2
    if task.name == "tag":
        columns["labels"] = ragged(ROWS, np.arange(LENGTH) % len(CLASSES))
    if task.name == "span":
        places = np.arange(LENGTH)
        columns |= {
            "label": np.ones((ROWS, 2), np.int64),
            "group": np.arange(ROWS),
            "window": np.zeros(ROWS, np.int64),
            "question.id": texts(ROWS, "q"),
            "question.answers": texts(ROWS, '["b"]'),
            "question.context": np.zeros(ROWS, np.int64),
            "context.text": texts(1, "ab" * LENGTH),
            "context.starts": ragged(1, places),
            "context.ends": ragged(1, places + 1),
        }
    return Split("valid", ROWS, ROWS * LENGTH, columns, together=2 if task.name == "choice" else 1)


class Reading(Classify):
    """A task whose evaluation reads a number from the device in every batch."""

    def evaluate(
        self, model: Model, batch: Batch[Tensor], host: Batch[np.ndarray], assembler: Assembler
    ) -> tuple[np.ndarray, Tensor]:
        places, outputs = super().evaluate(model, batch, host, assembler)
        outputs.sum().item()
        return places, outputs


class Pageable(Classify):
    """A task whose evaluation copies a tensor that is not pinned to the device."""

    def evaluate(
        self, model: Model, batch: Batch[Tensor], host: Batch[np.ndarray], assembler: Assembler
    ) -> tuple[np.ndarray, Tensor]:
        places, outputs = super().evaluate(model, batch, host, assembler)
        added = torch.ones(len(outputs), 1).to(outputs.device, non_blocking=True)
        return places, outputs + added


class Apart(Classify):
    """A task whose evaluation mixes devices."""

    def evaluate(
        self, model: Model, batch: Batch[Tensor], host: Batch[np.ndarray], assembler: Assembler
    ) -> tuple[np.ndarray, Tensor]:
        places, outputs = super().evaluate(model, batch, host, assembler)
        return places, outputs + torch.ones(len(outputs), 1)


@dataclass(frozen=True)
class Scored:
    """A task and a model, which are scored on a split. `instead` is (module, name, what replaces
    it) of a part that is wrong on purpose."""

    task: Task
    precision: str = "fp32"
    model: dict[str, Any] = field(default_factory=lambda: SHAPE)
    instead: tuple[Any, str, Any] = (scoring, "to_device", feed.to_device)  # nothing

    def seen(self) -> dict[str, Any]:
        """What happens on a fake device."""
        with fake_cuda.device(), mock.patch.object(*self.instead):
            device = torch.device("cuda", 0)
            with torch.device(device):
                model = Model(ModelConfig(**self.model), self.task)
            assembler = Assembler(split_for(self.task), TOKENIZER, LONGEST)
            with counted(self.task) as ahead, fake_cuda.Recorder() as recorder:
                scores = scoring.score(model, assembler, Ranks(0, 1, device), self.precision)
        assert scores.metrics.keys() <= self.task.metrics.keys()
        return {"waits": recorder.waits, "ahead": ahead}


@contextmanager
def counted(task: Task) -> Iterator[list[int]]:
    """A list to which each evaluation of a batch adds how many batches were made ahead of it."""
    made = [0]
    ahead: list[int] = []
    make, evaluate = scoring.to_device, task.evaluate

    def to_device(*given: Any) -> Any:
        made[0] += 1
        return make(*given)

    def evaluated(*given: Any) -> Any:
        ahead.append(made[0] - len(ahead) - 1)
        return evaluate(*given)

    with (
        mock.patch.object(scoring, "to_device", to_device),
        mock.patch.object(task, "evaluate", evaluated),
    ):
        yield ahead


def one_by_one(items: Iterator[Any], device: object) -> Iterator[Any]:
    """Batches that are made when they are needed."""
    return items


def any_device(device: object) -> ThreadPoolExecutor:
    """A thread that does not choose its device."""
    return ThreadPoolExecutor(1)


SCORED = {
    **{f"{name}, bf16": Scored(task, "bf16") for name, task in TASKS.items()},
    **{f"{name}, fp32": Scored(TASKS[name]) for name in ("mlm", "classify")},
    "Hilbert-CNN": Scored(TASKS["classify"], "fp32", CNN),
}
HEAD = Head("classify", CLASSES)
WRONG = {
    "an evaluation that reads": Scored(Reading(HEAD)),
    "an evaluation that copies": Scored(Pageable(HEAD)),
    "an evaluation that mixes devices": Scored(Apart(HEAD)),
    "batches one by one": Scored(Classify(HEAD), instead=(scoring, "made_ahead", one_by_one)),
    "a thread on any device": Scored(Classify(HEAD), instead=(feed, "one_thread", any_device)),
}


def main() -> None:
    """Print what is seen of each case, or its traceback, as a line of JSON."""
    for name, case in {**SCORED, **WRONG}.items():
        try:
            told: Any = case.seen()
        except Exception:
            told = traceback.format_exc()[-3000:]
        print(json.dumps([name, told]), flush=True)


if __name__ == "__main__":
    main()
