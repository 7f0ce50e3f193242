"""Training at scale as users see it: ranks, machines, utilisation and profiles."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import (
    CLASSIFY,
    NO_DROPOUT,
    PATIENCE,
    ROOT,
    SMOKE,
    Forks,
    _free_port,
    good,
    refused,
    task,
    training,
)
from safetensors.torch import load_file
from test_train import AT_STEP, board, log, same
from tiny import HEADS, HIDDEN, INNER, PIECES, random_batch, seeded
from torch.autograd import DeviceType
from torch.testing import assert_close
from toys import Toys

from xformer import cost
from xformer.data.batch import Workload
from xformer.data.files import read_json
from xformer.model.config import ModelConfig
from xformer.parallel import processes as ranks_and_devices
from xformer.profile import HEADING, OTHER, SKIP, STEPS, kind_of_name, summary
from xformer.tasks.task import Model

SHORT = ["train.steps=9", "train.checkpoint_every=4", "train.validate_every=6", "train.log_every=3"]
PART = ['train.only=["mlm_head"]', "optim.weight_decay=0.1"]
# more micro-batches than rows: some ranks have nothing to do in a step
IDLE = ["batch.rows=3", "batch.accumulate=2", "model.shared_layers=true"]
# Code that makes ranks compare what they exchange, as TORCH_DISTRIBUTED_DEBUG=DETAIL does. A fork
# cannot use the variable, because PyTorch reads it when it is imported. This level wraps the group
# of ranks. The logger of torch 2.13 takes a wrapped group of gloo for a bare one and crashes, so it
# is told nothing.
DETAIL = """
import torch.distributed as dist
class Quiet(dist.Logger):
    def set_construction_data_and_log(self, *given):
        pass
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.Logger = Quiet
"""
# Code that makes rank 1 exchange less than rank 0 after the backward pass
LESS = """
import os
from xformer.parallel import replicas
class Less(replicas.Replicas):
    def reduce(self, sums):
        sums.all = sums.all[int(os.environ["RANK"]):]
        return super().reduce(sums)
import xformer.train
xformer.train.Replicas = Less
"""
# Code that makes DDP reduce the gradient in many small buckets, and prints each with its shapes
BUCKETS = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from xformer.parallel import replicas
def hook(group, bucket):
    print("bucket", bucket.index(), [list(p.shape) for p in bucket.parameters()])
    return allreduce_hook(group, bucket)
class Small(replicas.DistributedDataParallel):
    def __init__(self, model, **options):
        super().__init__(model, bucket_cap_mb=0.01, **options)
        self.register_comm_hook(None, hook)
replicas.DistributedDataParallel = Small
"""


def close(run: Path, reference: Path) -> None:
    """Assert that two runs agree up to the rounding of sums in another order."""
    for a, b in zip(log(reference), log(run), strict=True):
        for key in ("loss", "grad_norm", "lr", "accuracy"):
            assert b.get(key, 0) == pytest.approx(a.get(key, 0), rel=1e-5), key
    name = "checkpoints/step_9/{}.safetensors"
    for kind, tolerance in (("model", 1e-5), ("optimizer", 1e-7)):
        ours, theirs = (load_file(r / name.format(kind)) for r in (run, reference))
        assert set(ours) == set(theirs)
        for key, tensor in theirs.items():
            assert_close(ours[key], tensor, rtol=1e-4, atol=tolerance)


# ------------------------------------------------------------------------------------ ranks


def test_ranks_give_the_run_of_one_process(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Without dropout, also if a rank has no rows or a part of the model is frozen. The ranks
    compare what they exchange."""
    runs = {
        "part": (1, SMOKE, PART),
        "part-ranks": (2, SMOKE, PART),
        "task": (1, CLASSIFY, IDLE),
        "task-ranks": (3, CLASSIFY, IDLE),
    }
    stores = {SMOKE: data.text, CLASSIFY: data.classes}
    going = [
        forks.start(
            *training(recipe, stores[recipe], tmp_path / name, *SHORT, *NO_DROPOUT, *more),
            ranks=ranks,
            before=DETAIL,
        )
        for name, (ranks, recipe, more) in runs.items()
    ]
    for fork in going:
        good(fork.wait())
    for name in ("part", "task"):
        close(tmp_path / f"{name}-ranks", tmp_path / name)


def test_ranks_that_exchange_something_else(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The comparison of what ranks exchange can fail."""
    line = training(SMOKE, data.text, tmp_path / "run", *SHORT)
    done = forks.run(*line, ranks=2, before=DETAIL + LESS)
    assert done.status
    assert "Detected mismatch between collectives on ranks" in done.err


@pytest.mark.parametrize("kind", ["mlm", "pairs", "classify", "regress", "span", "tag"])
def test_every_weight_has_a_gradient(kind: str) -> None:
    """DistributedDataParallel waits for all gradients.

    So every weight has one, even if no token is masked or labelled. On a rank without rows it is 0.
    """
    config = ModelConfig(
        vocab_size=PIECES, layers=1, hidden=HIDDEN, heads=HEADS, intermediate=INNER
    )
    outputs = PIECES if kind == "tag" else 2
    trained = task("mlm", pair_scale=2.0) if kind == "pairs" else task(kind, outputs)
    model = Model(config, trained).train()
    for weight in model.parameters():
        weight.data.normal_(0, 0.1, generator=seeded(len(weight)))
    batch = random_batch(classes=2)
    if kind == "regress":
        batch = replace(batch, labels=torch.rand(len(batch.first)))
    if kind == "span":
        batch = replace(batch, labels=torch.zeros(len(batch.first), 2, dtype=torch.long))
    assert batch.places is not None
    assert batch.targets is not None
    nothing = replace(batch, places=batch.places[:0], targets=batch.targets[:0])
    for given in (batch, None, *([nothing] if kind in ("mlm", "pairs", "tag") else [])):
        model.zero_grad()
        loss = model(given)
        loss.total.backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None, name
            assert weight.grad.isfinite().all(), name
            assert given is not None or not weight.grad.any(), name
        assert given is not None or (loss.total == 0 and loss.count == 0)


def test_the_gradient_travels_once_a_step(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The number of micro-batches does not matter, and a resumed run has the same buckets.

    The first pass after every start, whose result is not used, has other buckets: they are not
    settled yet.
    """
    line = training(SMOKE, data.text, tmp_path / "run", "train.select=last", "batch.accumulate=3")
    first = good(forks.run(*line, "train.steps=2", ranks=2, before=BUCKETS)).out.splitlines()
    later = good(forks.run(*line, "train.steps=3", ranks=2, before=BUCKETS)).out.splitlines()
    assert first[0] == later[0]
    step = later[1:]
    assert len(step) > 3
    assert [line.split()[1] for line in step] == [str(i) for i in range(len(step))]
    assert first[1:] == [*step, *step]


def test_resumed_at_three_ranks_in_many_buckets(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """It is equal bit for bit, with dropout. A sum of three numbers depends on their order, and so
    on the buckets.
    """
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    straight, stopped = [training(SMOKE, data.text, run, *SHORT) for run in runs]
    reference = forks.start(*straight, ranks=3, before=BUCKETS)
    stop = AT_STEP.format(step=4, signal="SIGTERM", ranks="2")
    assert forks.run(*stopped, ranks=3, before=BUCKETS + stop).status == 128 + 15
    good(forks.run(*stopped, ranks=3, before=BUCKETS))
    good(reference.wait())
    same(runs[1], runs[0])


@pytest.mark.slow
def test_two_machines_are_one_process(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Two torchrun agents meet over loopback, as on two nodes. They give the losses of one
    process.
    """
    runs = [tmp_path / "one", tmp_path / "two"]
    lines = [training(SMOKE, data.text, run, *SHORT, *NO_DROPOUT) for run in runs]
    good(forks.run(*lines[0]))
    port = str(_free_port())
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--node-rank",
                str(i),
                "--nproc-per-node",
                "1",
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                port,
                *lines[1],
            ],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    for agent in agents:
        _, err = agent.communicate(timeout=PATIENCE)
        assert agent.returncode == 0, err
    close(runs[1], runs[0])


def test_refusals(forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run")
    refused(forks.run(*line, "system.shard=model"), "unknown key system.shard")
    (tmp_path / "recipe.toml").write_text('system = { shard = "none" }')
    run = [f"data={data.text}", f"run={tmp_path / 'run'}", "head=mlm"]
    refused(forks.run("train.py", tmp_path / "recipe.toml", *run), "unknown key system.shard")
    (tmp_path / "recipe.toml").unlink()
    refused(forks.run(*line, "system.peak_tflops=-1"), "system.peak_tflops=-1")
    evaluate = ["evaluate.py", str(learned["text"]), f"data={data.text}"]
    refused(forks.run(*evaluate, "system.profile=true"), "unknown key system.profile")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- utilisation, profile


def test_utilisation_in_log_and_tensorboard(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """`mfu` is the operations of the step's real rows, divided by the time and by the peak of both
    ranks together.
    """
    run = tmp_path / "run"
    steps = ["train.steps=4", "train.log_every=2", "train.select=last", "system.peak_tflops=0.5"]
    good(forks.run(*training(SMOKE, data.text, run, *steps), ranks=2))
    lines = [record for record in log(run) if record["event"] == "train"]
    shown = board(run).Scalars("speed/mfu")
    assert [e.value for e in shown] == pytest.approx([line["mfu"] for line in lines])
    config = ModelConfig(**read_json(run / "checkpoints/step_4/config.json")["model"])
    for line in lines:
        # 8 rows of at most 20 tokens: between a tenth of the work of full rows and all of it
        seconds = 1.0 / line["real_tokens_per_second"]
        most = cost.training_flops(config, task("mlm"), Workload(100, 2000, 100, 40)) / 100
        least = cost.training_flops(config, task("mlm"), Workload(100, 300, 5, 5)) / 100
        assert least < line["mfu"] * 2 * 0.5e12 * seconds < most
    plain = tmp_path / "plain"
    good(forks.run(*training(SMOKE, data.text, plain, *steps[:3])))
    assert not any("mfu" in record for record in log(plain))  # the CPU has no known peak


def shares_of(lines: list[str]) -> dict[str, float]:
    """The percentages in the lines of a profile's summary, by name."""
    return {line[:24].strip(): float(line[24:].split()[0]) for line in lines}


def test_profile_leaves_the_run_as_it_is(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A trace and its summary are written after 15 steps, and the run's results do not change."""
    last = SKIP + STEPS
    steps = [f"train.steps={last + 3}", "train.validate_every=8", "train.log_every=3"]
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    going = forks.start(*training(SMOKE, data.text, plain, *steps))
    line = training(SMOKE, data.text, traced, *steps, "system.profile=true")
    done = good(forks.run(*line))
    good(going.wait())
    same(traced, plain)
    assert not (plain / "profile").exists()
    (path,) = (traced / "profile").glob("*.json.gz")
    assert path.name == f"steps_{SKIP + 1}-{last}.pt.trace.json.gz"
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert names.count("waiting for data") == names.count("optimizer") == STEPS
    assert names.count("aten::_fused_adamw_") == 2 * STEPS  # decayed weights and others
    text = path.with_name(path.name.replace(".pt.trace.json.gz", ".txt")).read_text()
    assert text in done.err
    title, *lines = text.splitlines()
    assert title.startswith(f"steps {SKIP + 1} to {last}: ")
    shares = shares_of(lines[: lines.index(HEADING)])
    assert len(shares) == 10
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    for kind in ("matrix products", "attention", "LayerNorm", "dropout", "optimizer"):
        assert 0 < shares[kind] < 100, kind
    ours = shares_of(lines[lines.index(HEADING) + 1 :])
    assert ours.keys() == {"attention", "add_norm", "dropout", "vocabulary_loss"}
    assert sum(ours.values()) < 100
    good(forks.run(*line, "overwrite=true", "system.profile=false"))
    assert not (traced / "profile").exists()


def test_profile_of_a_short_run_says_so(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", "train.steps=12", "system.profile=true")
    done = good(forks.run(*line))
    assert f"no profile: it needs {SKIP + STEPS} steps, and this run made 12" in done.err
    assert not (tmp_path / "run/profile").exists()


def test_profile_of_a_gpu() -> None:
    """Kernels count for the operator that started them, else by their own name. Gaps are idle
    time. A backward pass counts for the operation whose gradient it computes."""

    def kernel(name: str, begin: float, end: float) -> Any:
        span = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
        return SimpleNamespace(
            device_type=DeviceType.CUDA,
            name=name,
            time_range=span,
            is_user_annotation=name == "optimizer",
        )

    def operator(
        name: str, own: float, parent: Any = None, started: Any = None, **more: int
    ) -> Any:
        kernels = [
            SimpleNamespace(name=k.name, duration=k.time_range.elapsed_us()) for k in started or []
        ]
        return SimpleNamespace(
            device_type=DeviceType.CPU,
            name=name,
            self_cpu_time_total=own,
            cpu_parent=parent,
            kernels=kernels,
            time_range=SimpleNamespace(start=0),
            **{"scope": 0, "thread": 1, "fwd_thread": 0, "sequence_nr": -1, **more},
        )

    product = kernel("nvjet_tst_128x256", 0, 40)
    scale = kernel("void at::native::vectorized_elementwise_kernel<4, Mul>", 40, 45)
    norm = kernel("triton_per_fused_add_native_layer_norm_3", 45, 60)
    overlapping = kernel("ncclDevKernel_AllReduce_Sum_f32", 50, 70)
    more = kernel("void at::native::layer_norm_backward", 90, 94)
    step = operator("optimizer", 3.0)
    add_norm = operator("xformer::add_norm", 1.0, sequence_nr=7)
    backward = {"scope": 1, "thread": 2, "fwd_thread": 1}
    events = [
        add_norm,
        operator("aten::native_layer_norm", 1.0, parent=add_norm, started=[norm], sequence_nr=7),
        operator("AddBackward0", 1.0, started=[more], sequence_nr=7, **backward),
        operator("AddBackward0", 1.0, sequence_nr=8, **backward),
        operator("aten::addmm", 5.0, started=[product]),
        step,
        operator("aten::mul_", 1.0, parent=step, started=[scale]),
        operator("waiting for data", 20.0),
        product,
        scale,
        norm,
        overlapping,
        more,
        kernel("optimizer", 38, 95),
    ]
    lines = summary(events, 100e-6, cuda=True)
    cut = lines.index(HEADING)
    assert shares_of(lines[cut + 1 :]) == {"add_norm": 19}
    shares = shares_of(lines[:cut])
    assert lines[0].split() == ["GPU", "idle", "26.0", "%"]
    expected = {
        "matrix products": 40,
        "optimizer": 5,
        "LayerNorm": 19,
        "communication": 20,
        "waiting for data": 20,
        "GPU idle": 26,
    }
    assert {kind: share for kind, share in shares.items() if share} == expected


@pytest.mark.usefixtures("kernels")
def test_a_profiler_knows_the_operations() -> None:
    """Also outside a run, and with the plain implementations. Without it no range is made."""
    batch = random_batch()
    config = ModelConfig(
        vocab_size=PIECES, layers=1, hidden=HIDDEN, heads=HEADS, intermediate=INNER
    )
    model = Model(config, task("mlm")).train()
    for weight in model.parameters():
        weight.data.normal_(0, 0.1, generator=seeded(len(weight)))

    def step() -> None:
        model(batch).total.backward()

    with mock.patch.object(torch.profiler, "record_function", side_effect=AssertionError):
        step()
        with pytest.raises(AssertionError), torch.profiler.profile():
            step()
    with torch.profiler.profile() as trace:
        step()
    named = {"attention", "add_norm", "dropout", "vocabulary_loss"}
    assert {f"xformer::{name}" for name in named} <= {event.name for event in trace.events()}
    lines = summary(trace.events(), 1.0, cuda=False)
    assert shares_of(lines[lines.index(HEADING) + 1 :]).keys() == named


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("mkldnn::_linear_pointwise", "matrix products"),
        ("aten::bmm", "attention"),
        ("aten::_softmax_backward_data", "attention"),
        ("pytorch_flash::flash_fwd_kernel<attention>", "attention"),
        ("aten::_log_softmax", "activations and loss"),
        ("aten::native_layer_norm_backward", "LayerNorm"),
        ("xformer::attention_backward", "attention"),
        ("xformer::add_norm", "LayerNorm"),
        ("xformer::vocabulary_loss", "activations and loss"),
        ("xformer::rotary", "attention"),
        ("xformer::dropout", "dropout"),
        ("aten::_foreach_norm", "optimizer"),
        ("aten::bernoulli_", "dropout"),
        ("aten::_fused_adam_", "optimizer"),
        ("gloo:all_reduce", "communication"),
        ("aten::index_select", "embeddings and copies"),
        ("Memcpy HtoD (Pinned -> Device)", "embeddings and copies"),
        ("aten::add", OTHER),
    ],
)
def test_kinds_of_work(name: str, kind: str) -> None:
    assert kind_of_name(name) == kind


@pytest.mark.parametrize(
    ("asked", "setting", "processes", "threads"),
    [("1", 0, 1, 1), ("1", 2, 1, 2), ("3", 0, 1, 3), ("1", 0, 2, None), ("", 0, 1, None)],
)
def test_threads_of_a_process(
    asked: str, setting: int, processes: int, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OMP_NUM_THREADS is used, unless it is the 1 that torchrun sets. None means the rank's share
    of the cores.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    before = torch.get_num_threads()
    try:
        ranks_and_devices.start(ranks_and_devices.SystemConfig(threads=setting))
        share = max(1, len(os.sched_getaffinity(0)) // processes)
        assert torch.get_num_threads() == (threads or share)
    finally:
        torch.set_num_threads(before)
