"""The side of `transformers`: its Trainer with its own collators, on the job of a JSON object.

    python -m benchmarks.theirs '{"model": "mlm/theirs", "table": "trial-lines/table", ...}'

Prints its measurements as one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments


@dataclass(frozen=True)
class Job:
    """The settings of a job; all other settings of the Trainer are its defaults."""

    model: str
    table: str
    output: str
    task: Literal["mlm", "classify"]
    rows: int
    steps: int = 0
    warmup: int = 0  # steps before the clock starts
    lr: float = 1e-4
    decay: float = 0.0  # weight decay
    rise: float = 0.0  # share of the steps in which the rate rises
    seed: int = 42
    sampling: Literal["random", "sequential", "group_by_length"] = "random"
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int = 1
    attention: str = "sdpa"
    workers: int = 0  # processes that build batches
    compile: bool = False
    save: bool = False  # a checkpoint with the optimizer's state at the end
    evaluations: int = 0  # if not 0: forward passes over the table instead of training


class CountingTrainer(Trainer):
    """The Trainer, extended to count the real tokens and all positions of its batches."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.real: list[torch.Tensor] = []
        self.fed: list[int] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        self.real.append(inputs["attention_mask"].sum())
        self.fed.append(inputs["attention_mask"].numel())
        return super().training_step(model, inputs, *args, **settings)


class Clock(TrainerCallback):
    """The time at which each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())


def load(job: Job) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    kinds = {"mlm": "AutoModelForMaskedLM", "classify": "AutoModelForSequenceClassification"}
    kind = getattr(transformers, kinds[job.task])
    words = transformers.AutoTokenizer.from_pretrained(job.model)
    return kind.from_pretrained(job.model, attn_implementation=job.attention), words


def trainer(job: Job, clock: Clock) -> CountingTrainer:
    """The Trainer of a job."""
    model, words = load(job)
    collators = {
        "mlm": transformers.DataCollatorForLanguageModeling,
        "classify": transformers.DataCollatorWithPadding,
    }
    table = datasets.load_from_disk(job.table)
    settings = TrainingArguments(
        job.output,
        per_device_train_batch_size=job.rows,
        per_device_eval_batch_size=job.rows,
        max_steps=job.steps or 1,
        learning_rate=job.lr,
        weight_decay=job.decay,
        warmup_steps=job.rise,
        seed=job.seed,
        train_sampling_strategy=job.sampling,
        bf16=job.precision == "bf16",
        use_cpu=True,
        torch_compile=job.compile,
        dataloader_num_workers=job.workers,
        logging_steps=max(1, job.warmup),
        save_strategy="steps" if job.save else "no",
        save_steps=job.steps or 1,
        report_to="none",
        disable_tqdm=True,
    )
    return CountingTrainer(
        model,
        settings,
        train_dataset=table,
        eval_dataset=table,
        processing_class=words,
        data_collator=collators[job.task](words),
        callbacks=[clock],
    )


def train(job: Job) -> dict[str, float]:
    """Real tokens a second and share of padding of the steps after the warm-up."""
    clock = Clock()
    peer = trainer(job, clock)
    started = time.perf_counter()
    peer.train()
    real, fed = [int(count) for count in peer.real], peer.fed
    begin = clock.ends[job.warmup - 1] if job.warmup else started
    return {
        "rate": sum(real[job.warmup :]) / (clock.ends[-1] - begin),
        "padding": 1 - sum(real[job.warmup :]) / sum(fed[job.warmup :]),
        "tokens": sum(real),
    }


def evaluate(job: Job) -> dict[str, float]:
    """Real tokens a second of forward passes over the whole table."""
    peer = trainer(job, Clock())
    tokens = sum(len(row["input_ids"]) for row in datasets.load_from_disk(job.table))
    seconds = []
    for _ in range(1 + job.evaluations):
        started = time.perf_counter()
        peer.evaluate()
        seconds.append(time.perf_counter() - started)
    return {"rate": tokens * job.evaluations / sum(seconds[1:]), "tokens": tokens}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    transformers.set_seed(0)
    transformers.logging.set_verbosity_error()
    took = evaluate(job) if job.evaluations else train(job)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
