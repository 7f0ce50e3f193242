"""Training steps of every task, optimizer and shape, to find where the host waits for CUDA.

    benchmarks.fake_cuda.start("benchmarks.steps", FOLDER)

prints, as lines of JSON, the operations at which the host would wait for a fake device. On a real
one, benchmarks/first_hour.py makes PyTorch raise an error at every wait.
"""

from __future__ import annotations

import json
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from benchmarks import bare, fake_cuda
from xformer import optim
from xformer.data.batch import Batch
from xformer.model.config import ModelConfig
from xformer.tasks.classify import Classify
from xformer.tasks.known import task_of
from xformer.tasks.task import Head, Loss, Model, Task

ROWS, LENGTH, STEPS = 8, 16, 2
VOCABULARY = 1000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "intermediate": 96,
}
BF16, FP32 = "system.precision=bf16", "system.precision=fp32"


class Waiting(Classify):
    """A task whose loss makes the host wait in four ways."""

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        assert batch.labels is not None
        if batch.labels[0] > 1:
            raise AssertionError
        batch.labels.cpu()
        batch.labels + torch.ones(ROWS, dtype=torch.int64).to("cuda")
        with suppress(DynamicOutputShapeException):  # its size depends on the content
            batch.labels[batch.labels > 0]
        return super().loss(model, batch)


class Mixing(Classify):
    """A task whose loss mixes devices."""

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        assert batch.labels is not None
        return super().loss(model, replace(batch, labels=batch.labels + torch.ones(ROWS)))


@dataclass(frozen=True)
class Case:
    """A task, a model, and the settings of a recipe."""

    task: Task
    settings: tuple[str, ...] = (FP32,)
    model: dict[str, Any] = field(default_factory=lambda: SHAPE)

    def trainer(self, device: str = "cuda", *more: str) -> bare.Trainer:
        """A trainer of the model, with random weights, and with `more` settings."""
        with torch.device(device):
            model = Model(ModelConfig(**self.model), self.task).train()
            for weight in model.parameters():
                nn.init.normal_(weight, 0.0, 0.02)
        return bare.Trainer(model, *self.settings, *more)

    def batches(self, device: str = "cuda") -> list[Batch[Tensor]]:
        """The micro-batches of a step."""
        batch = bare.full_rows(ROWS, LENGTH, 0.25, VOCABULARY, device)
        if self.task.name == "span":
            batch = replace(batch, labels=torch.ones(ROWS, 2, dtype=torch.int64, device=device))
        if self.task.name == "regress":
            batch = replace(batch, labels=torch.ones(ROWS, device=device))
        if self.task.name == "tag":
            assert batch.targets is not None
            batch = replace(batch, targets=batch.targets % self.task.outputs)
        if self.task.name == "choice":
            batch = replace(batch, labels=torch.zeros_like(batch.cu_seqlens[1:]).long(), together=2)
        return [batch] * (2 if "batch.accumulate=2" in self.settings else 1)

    def waits(self) -> dict[str, int]:
        """How often the host waits for a fake device in STEPS steps, by operation."""
        with fake_cuda.device():
            trainer, batches = self.trainer(), self.batches()
            with fake_cuda.Recorder() as seen:
                trainer.train([batches] * STEPS)
        return seen.waits


@dataclass(frozen=True)
class Counting(Case):
    """An optimizer that counts its steps on the device, so that the host must read the count for
    each weight."""

    def trainer(self, device: str = "cuda", *more: str) -> bare.Trainer:
        trainer = super().trainer(device, *more)
        for state in trainer.optimizer.state.values():
            state["step"] = state["step"].to(device)
        return trainer


CLASSES = ("a", "b", "c")
HEADS = {
    "mlm": Head("mlm"),
    "pairs": Head("mlm", pair_scale=2.0),
    "classify": Head("classify", CLASSES),
    "regress": Head("regress"),
    "span": Head("span"),
    "tag": Head("tag", CLASSES),
    "choice": Head("choice"),
}
TASKS = {name: task_of(head) for name, head in HEADS.items()}
MLM = TASKS["mlm"]
CNN = {
    "architecture": "hilbert_cnn",
    "vocab_size": VOCABULARY,
    "kmer": 2,
    "letters": (5, 6, 7, 8),
    "max_positions": 62,
}
MODERN = {"positions": "rotary", "window": 4, "global_every": 2, "norm": "pre", "gated": True}
MODERN |= {"first_norm": False, "bias": False, "dropout": 0.0, "attention_dropout": 0.0}
CASES = {
    **{f"{name}, fp32": Case(task) for name, task in TASKS.items()},
    **{f"{name}, bf16": Case(task, (BF16,)) for name, task in TASKS.items()},
    **{name: Case(MLM, (f"optim.name={name}", "optim.weight_decay=0.1")) for name in optim.KINDS},
    "accumulated gradients": Case(MLM, ("batch.accumulate=2",)),
    "spikes": Case(MLM, ("train.spike=6",)),
    "a probe": Case(Classify(Head("classify", CLASSES, layer=1))),
    "means over tokens": Case(TASKS["classify"], (BF16,), SHAPE | {"pooling": "mean"}),
    "label smoothing": Case(Classify(Head("classify", CLASSES, smoothing=0.1))),
    "class weights": Case(Classify(Head("classify", CLASSES, class_weights=(1.0, 2.0, 0.5)))),
    "heads of 160": Case(MLM, (BF16,), SHAPE | {"heads": 2, "hidden": 320}),
    "heads of 30": Case(MLM, (BF16,), SHAPE | {"heads": 2, "hidden": 60}),
    "pre-norm": Case(MLM, (BF16,), SHAPE | {"norm": "pre"}),
    "windows": Case(MLM, (BF16,), SHAPE | MODERN),
    "windows, fp32": Case(MLM, (FP32,), SHAPE | MODERN),
    "zeroed masks": Case(MLM, (BF16,), SHAPE | {"positions": "rotary", "zeroed_token": 4}),
    "shared layers": Case(MLM, (BF16,), SHAPE | {"shared_layers": True, "embedding": 32}),
    "Hilbert-CNN": Case(TASKS["classify"], (FP32,), CNN),
    "no dropout": Case(MLM, (FP32,), SHAPE | {"dropout": 0.0, "attention_dropout": 0.0}),
    "heads of 30, no dropout": Case(
        MLM, (FP32,), SHAPE | {"heads": 2, "hidden": 60, "dropout": 0.0, "attention_dropout": 0.0}
    ),
}
WRONG = {
    "a step that waits": Case(Waiting(Head("classify", CLASSES))),
    "an optimizer that waits": Counting(MLM, ("optim.name=adagrad",)),
    "a step that mixes devices": Case(Mixing(Head("classify", CLASSES))),
}


def main() -> None:
    """Print the waits of each case, or its traceback, as a line of JSON."""
    for name, case in {**CASES, **WRONG}.items():
        try:
            told: Any = case.waits()
        except Exception:
            told = traceback.format_exc()[-3000:]
        print(json.dumps([name, told]), flush=True)


if __name__ == "__main__":
    main()
