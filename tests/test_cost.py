"""Compare xformer.cost with PyTorch's own counter, sums by hand, and published sizes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import task
from tiny import random_batch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.goals import Times
from benchmarks.scaling import reduction_seconds
from xformer import cost
from xformer.analysis.cost import parameters
from xformer.data.batch import Workload
from xformer.model.config import ModelConfig
from xformer.ops.native import only_plain
from xformer.tasks.known import TASKS
from xformer.tasks.task import Head, Model, Task

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "layers": 2,
    "hidden": 39,
    "heads": 3,
    "intermediate": 53,
    "max_positions": 17,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"layers": 3, "embedding": 11, "shared_layers": True},
    "roberta": {"first_position": 2, "token_types": 1},
    "distilbert": {"token_types": 0, "pooler": "relu", "positions": "sinusoidal"},
    "plus": {"norm": "pre", "pooler": "none"},
    "means": {"pooling": "mean"},
}
BASE = ModelConfig(vocab_size=30522)
MLM, TWO, FOUR = task("mlm"), task("classify", 2), task("classify", 4)


LENGTHS = [7] * 6  # plain attention pads sequences to the longest, and torch counts padding too


def counted(model: Model, labels: torch.Tensor | None = None) -> int:
    """The operations that PyTorch counts in a forward and backward pass of random_batch."""
    batch = random_batch(LENGTHS)
    if labels is not None:
        batch = replace(batch, labels=labels)
    with only_plain(), FlopCounterMode(display=False) as counter:
        model.loss(batch).total.backward()
    return int(counter.get_total_flops())


def work(masked: bool) -> Workload:
    """The sizes of random_batch, as `xformer.cost` takes them."""
    places = random_batch(LENGTHS).places
    assert places is not None
    return Workload(
        sum(LENGTHS), sum(n * n for n in LENGTHS), len(LENGTHS), len(places) if masked else 0
    )


def initialised(config: ModelConfig, task: Task) -> Model:
    """A model in training mode whose weights are all finite."""
    model = Model(config, task).train()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_operations_are_those_that_torch_counts(shape: str) -> None:
    config = ModelConfig(**{**SMALL, **SHAPES[shape]})
    actual = counted(initialised(config, MLM))
    assert actual == cost.training_flops(config, MLM, work(masked=True))
    classes = counted(initialised(config, FOUR))
    assert classes == cost.training_flops(config, FOUR, work(False))
    scores = counted(initialised(config, task("regress")), torch.rand(len(LENGTHS)))
    assert scores == cost.training_flops(config, task("regress"), work(False))
    ends = torch.zeros(len(LENGTHS), 2, dtype=torch.long)
    spans = counted(initialised(config, task("span")), ends)
    assert spans == cost.training_flops(config, task("span"), work(False))


def test_operations_of_a_pair_head_beside_masked_tokens() -> None:
    config = ModelConfig(**SMALL)
    pairs = task("mlm", pair_scale=1.5)
    labels = torch.arange(len(LENGTHS)) % 2
    actual = counted(initialised(config, pairs), labels)
    assert actual == cost.training_flops(config, pairs, work(masked=True))


def test_operations_of_the_convolutional_network() -> None:
    config = ModelConfig(
        architecture="hilbert_cnn", vocab_size=97, kmer=2, letters=(5, 6, 7, 8), max_positions=17
    )
    actual = counted(initialised(config, FOUR))
    assert actual == cost.training_flops(config, FOUR, work(False))


def test_a_probe_has_no_backward_pass_through_the_encoder() -> None:
    probe = TASKS["classify"](Head("classify", ("a", "b"), layer=1))
    forward = cost.forward_flops(BASE, probe, work(False))
    head = probe.head_flops(BASE, work(False))
    assert 0 < head < forward / 100
    assert cost.training_flops(BASE, probe, work(False)) == forward + 2 * head


def test_evaluation_is_a_third_of_training() -> None:
    some = Workload.even(150, 128, 0.15)
    assert some == Workload(19_200, 150 * 128**2, 150, 2_880)
    assert cost.training_flops(BASE, MLM, some) == 3 * cost.forward_flops(BASE, MLM, some)
    # Chiang & Lee 2020's step by hand: layers, attention, MLM head
    layers = 12 * 6 * 768**2 * 19_200
    layers += (2 * 768**2 + 4 * 768 * 3072) * (11 * 19_200 + 2_880)
    attention = 12 * 4 * 768 * 128 * 19_200
    head = (2 * 768 * 768 + 2 * 768 * 30_522) * 2_880
    assert cost.forward_flops(BASE, MLM, some) == layers + attention + head


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_by_part_are_all_of_them(shape: str) -> None:
    config = ModelConfig(**{**SMALL, **SHAPES[shape]})
    parts = parameters(config, MLM)
    assert sum(parts.values()) == sum(p.numel() for p in Model(config, MLM).parameters())
    assert parts["word embeddings"] == 97 * config.width
    assert parts["attention"] == config.stored_layers * (4 * 39 * 39 + 4 * 39)
    assert parts["feed-forward"] == config.stored_layers * (2 * 39 * 53 + 39 + 53)
    assert parts["norms"] == config.stored_layers * 4 * 39


def test_published_sizes() -> None:
    """Devlin et al. 2019: 110 M and 340 M; Lan et al. 2020: 12 M; Sanh et al. 2019: 66 M; Yin et
    al. 2018: 961 K."""
    large = ModelConfig(vocab_size=30522, layers=24, hidden=1024, heads=16, intermediate=4096)
    albert = ModelConfig(vocab_size=30000, embedding=128, shared_layers=True)
    distil = ModelConfig(vocab_size=30522, layers=6, token_types=0)
    cnn = ModelConfig(architecture="hilbert_cnn", vocab_size=9, max_positions=502)

    def millions(config: ModelConfig, task: Task | None = None) -> float:
        return sum(parameters(config, task).values()) / 1e6

    assert millions(BASE, TWO) == pytest.approx(109.5, abs=0.05)
    assert millions(large, TWO) == pytest.approx(335.1, abs=0.1)
    assert millions(albert) == pytest.approx(11.1, abs=0.1)
    assert millions(distil) == pytest.approx(66.4, abs=0.1)
    assert millions(cnn, TWO) == pytest.approx(0.963, abs=0.001)


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("Tesla V100-SXM2-16GB", 125e12, 15.7e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("AMD EPYC", None, None),
    ],
)
def test_peaks_by_name(name: str, bf16: float | None, fp32: float | None) -> None:
    assert cost.peak_flops(name, "bf16") == bf16
    assert cost.peak_flops(name, "fp32") == fp32


def test_network_and_utilisation_by_hand() -> None:
    assert reduction_seconds(1000, 4, 1e3) == pytest.approx(6.0)
    assert reduction_seconds(1000, 1, 1e3) == 0
    assert cost.utilisation(4e12, 2.0, 1e12, 4) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("products", "others", "launches", "limit"),
    [(6, 8, 30, "launches"), (26, 25, 30, "products"), (14, 17, 30, "others")],
)
def test_launches_limit_a_step_only_if_the_gpu_waits_for_them(
    products: float, others: float, launches: float, limit: str
) -> None:
    times = Times(products, others, launches)
    assert times.limit == limit
    assert times.step == max(products + others, launches)


@pytest.mark.slow
def test_the_tables_of_scaling_are_the_programs(root: Path) -> None:
    """docs/scaling.md holds what benchmarks/scaling.py prints, and what it must add up to."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    page = (root / "docs/scaling.md").read_text(encoding="utf-8")
    assert done.stdout.strip() in page, "run python -m benchmarks.scaling --output docs/scaling.md"
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "|" in line]
    runs = {row[0]: int(row[1]) for row in rows if row[0].startswith("Zhang")}
    assert sum(runs.values()) == 3 * 9 * 21 + 9 * 6  # three runs in sections 3-4, one in 5-6
    flops = 200_000 * cost.training_flops(
        ModelConfig(vocab_size=30_000), MLM, Workload.even(150, 126, 0.15)
    )
    assert f"{flops / 1e18:.2f} EFLOP: 200,000 steps" in done.stdout
