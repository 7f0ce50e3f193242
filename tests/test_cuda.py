"""Training and scoring on CUDA, without a GPU: tensors have no content (benchmarks/fake_cuda.py).

As on a real device, mixing devices is an error, and so are arguments that an operation does not
accept.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import eight_ranks, splits
from helpers import command
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import bare, fake_cuda, first_hour
from benchmarks.steps import CASES, LENGTH, ROWS, STEPS
from xformer import optim
from xformer.data.errors import BadInput
from xformer.ops import attention, native, vocabulary_loss
from xformer.parallel import compiled, processes

READ = "_local_scalar_dense"  # the host reads a number from the device
MIXED = re.compile("found (at least )?two (different )?devices")  # versions of torch differ


ONE_COPY = {"a blocking copy": 1}  # all outputs of a split, to the host
no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has a CUDA device")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the library of the fake device."""
    return tmp_path_factory.mktemp("fake_cuda")


def lines(module: str, library: Path) -> list[tuple[str, Any]]:
    """What a module prints about its cases on the fake device."""
    process = fake_cuda.start(module, library)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return [(name, told) for name, told in map(json.loads, out.splitlines())]


@no_device
@pytest.mark.slow
def test_a_step_does_not_wait_for_the_device(library: Path) -> None:
    """In every case but those that are wrong on purpose, and show that the check can fail."""
    waits = dict(lines("benchmarks.steps", library))
    told = waits.pop("a step that waits")
    assert told == {READ: STEPS, "a blocking copy": 2 * STEPS, "index by a mask": STEPS}
    weights = len(list(CASES["adagrad"].trainer("cpu").model.model.parameters()))
    assert waits.pop("an optimizer that waits")[READ] > STEPS * weights
    told = waits.pop("a step that mixes devices")
    assert MIXED.search(told)
    assert set(optim.KINDS) == {"adam", "adamw", "muon", *first_hour.ASK_THE_HOST}
    expected = {case: {READ: STEPS} if case in first_hour.ASK_THE_HOST else {} for case in CASES}
    for case in ("Hilbert-CNN", "class weights"):
        # the first step copies the curve, or the class weights, to the device
        expected[case] = {"a blocking copy": 1}
    assert waits == expected


@no_device
@pytest.mark.slow
def test_a_step_is_timed_without_waits(library: Path) -> None:
    """By the analysis cost, as a step of a run has none."""
    assert lines("fake_device.measured", library) == [("a step", {})]


@no_device
@pytest.mark.slow
def test_scoring_waits_once_a_split(library: Path) -> None:
    """Its batches are made while the one before is computed. Prediction shares the code."""
    seen = dict(lines("fake_device.splits", library))
    told = {name: seen.pop(name) for name in splits.WRONG}
    assert seen.keys() == splits.SCORED.keys()
    seen["Hilbert-CNN"]["waits"]["a blocking copy"] -= 1  # the curve, in the first batch
    for name, case in seen.items():
        batches = len(case["ahead"])
        assert batches > 3, name
        assert case == {"waits": ONE_COPY, "ahead": [1] * (batches - 1) + [0]}, name

    right = seen["classify, fp32"]
    batches = len(right["ahead"])
    assert told["an evaluation that reads"]["waits"] == ONE_COPY | {READ: batches}
    assert told["an evaluation that copies"]["waits"] == {"a blocking copy": 1 + batches}
    assert told["batches one by one"] == right | {"ahead": [0] * batches}
    assert MIXED.search(told["an evaluation that mixes devices"])
    assert "this thread has set no device" in told["a thread on any device"]


@no_device
@pytest.mark.slow
def test_eight_ranks_take_steps(library: Path) -> None:
    """No rank waits for its device, and all exchange the same, whether they have rows or not."""
    seen: dict[str, list[Any]] = {}
    for name, told in lines("fake_device.eight_ranks", library):
        assert isinstance(told, dict), told
        seen.setdefault(name, []).append(told)
    for name in eight_ranks.CASES:
        ranks = seen.pop(name)
        assert len(ranks) == eight_ranks.CASES[name].ranks
        exchanged = ranks[0]["exchanged"]
        begun, trained, scored = exchanged
        assert (len(begun), len(scored)) == (2, 1), name
        assert trained == eight_ranks.STEPS * trained[: len(trained) // eight_ranks.STEPS], name
        for rank in ranks:
            assert rank.pop("micro-batches") in ([1, 0], [2, 1]), name
            expected = {"waits in training": {}, "waits in scoring": ONE_COPY}
            assert rank == expected | {"exchanged": exchanged}, name

    first, second = seen.pop("ranks without rows exchange less")
    assert first["exchanged"] != second["exchanged"]
    for rank in seen.pop("a loss that reads"):
        assert rank["waits in training"] == {READ: sum(rank["micro-batches"])}
    assert not seen


@no_device
@pytest.mark.slow
def test_a_step_launches_few_kernels(library: Path) -> None:
    """Without torch.compile, which fuses many of them."""
    with fake_cuda.start("benchmarks.launches", library) as process:
        assert process.stdout is not None
        cells = next(line for line in process.stdout if "BERT-base" in line).split(" | ")
        process.kill()  # the other models take it longer
    assert int(cells[1]) <= 600
    assert int(cells[2]) <= 120


@pytest.mark.slow
def test_the_first_hour_survives_a_part_that_fails(tmp_path: Path) -> None:
    arguments = ["--rehearse", "--only", "waits", "ranks", "--fail", "ranks"]
    ended = command("-m", "benchmarks.first_hour", *arguments, "--output", tmp_path)
    assert ended.status == 1
    told = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    cases = 2 * len(CASES) - 1 if torch.cuda.is_available() else len(CASES)
    assert told["waits"]["rows"][0]["value"] == f"{cases} cases"
    assert "this part was told to fail" in told["ranks"]["error"]
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert "| ranks | **failed** | AssertionError: this part was told to fail |" in lines


@pytest.mark.slow
def test_the_first_hour_measures_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to compile has its row."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    *ours, theirs = first_hour.speed_of("MiniLM")(True)
    ways = [row.what.partition(", compile=")[2] for row in ours]
    assert ways == ["none", "graphs", "both"]
    assert all(row.value.endswith("tokens/s") for row in ours)
    how = "CUDA graphs" if torch.cuda.is_available() else "not compiled"
    assert theirs.what == f"{ours[0].what.partition(', compile')[0]}: transformers, SDPA, {how}"
    assert theirs.note.startswith("ours is ")


def test_the_first_hour_compares_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no way of ours can be compiled, the row of transformers has no ratio."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(bare.Trainer, "compile", lambda *_: "compiling fails")
    *ours, theirs = first_hour.speed_of("MiniLM")(True)
    assert {row.value for row in ours} == {"not run"}
    assert theirs.value.endswith("tokens/s")
    assert theirs.note.endswith("GiB")
    assert "times as fast" not in theirs.note


@pytest.mark.slow
def test_the_first_hour_finds_wrong_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler whose results are off by half."""

    def backend(program: Any, _: Any, **options: Any) -> Any:
        return lambda *given: [1.5 * x for x in program.forward(*given)]

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    assert len(list(first_hour.programs(True))) == 9
    monkeypatch.setattr(compiled, "BACKEND", backend)
    with pytest.raises(AssertionError, match="compile=layers, fp32: a loss is off by"):
        list(first_hour.programs(True))


def test_the_first_hour_does_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    peer = first_hour.Peer("BertForMaskedLM", bare.shape("tiny"))

    def cannot_compile(**given: torch.Tensor) -> None:
        raise FileNotFoundError("gcc")

    peer.ways = {"compiled": cannot_compile, "not compiled": peer.model}
    tokens = torch.ones(2, 8, dtype=torch.int64)
    peer.warm_up([{"input_ids": tokens, "attention_mask": tokens, "labels": tokens}])
    assert peer.forward is peer.model
    assert peer.how == "not compiled (compiled: FileNotFoundError)"


def test_the_first_hour_keeps_the_rows_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a part is killed, the page says so, and what the part had measured stays."""
    code = """import json, os, signal
print(json.dumps({"what": "a", "value": "1", "note": ""}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)"""
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda line, **given: start([sys.executable, "-c", code], **given)
    )
    result = first_hour.of_part("waits", math.inf, "--rehearse")
    assert first_hour.table("waits", result) == [
        "| a | 1 |  |",
        "| waits | **failed** | it was ended by SIGKILL |",
    ]


@pytest.mark.slow
def test_the_first_hour_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is cut off keeps its rows, and a part that comes too late is not started."""
    code = """import json, time
print(json.dumps({"what": "a", "value": "1", "note": ""}), flush=True)
time.sleep(600)"""
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda line, **given: start([sys.executable, "-c", code], **given)
    )
    over = "the time for all parts is over; --only MiniLM runs this part alone"
    for seconds, lines in (
        (8.0, ["| a | 1 |  |", f"| MiniLM's shape | **failed** | {over} |"]),
        (0.0, [f"| MiniLM's shape | **failed** | not run: {over} |"]),
    ):
        result = first_hour.of_part("MiniLM", time.monotonic() + seconds, "--rehearse")
        assert first_hour.table("MiniLM", result) == lines
    assert not first_hour.running


def test_the_first_hour_compares_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = 2 if torch.cuda.is_available() else 1
    assert len(list(first_hour.tasks(True))) == ways * 2 * 2 * 8  # precisions, with filler, tasks
    right = first_hour.gradient
    factor = {"fp32": 1, "bf16": 2}
    monkeypatch.setattr(first_hour, "gradient", lambda *given: right(*given) * factor[given[3]])
    with pytest.raises(AssertionError, match=r"gradient of mlm, bf16, compile=none is off by"):
        list(first_hour.tasks(True))
    full = ROWS * LENGTH
    monkeypatch.setattr(
        first_hour,
        "gradient",
        lambda *given: right(*given) * (1 + (len(given[1].tokens) > full)),
    )
    with pytest.raises(AssertionError, match=r"^gradient of mlm, fp32, compile=none, with filler"):
        list(first_hour.tasks(True))


CPU = torch.device("cpu")


def test_kernels_that_agree_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_flash", "_efficient"):
        monkeypatch.setattr(attention, name, attention.plain)
    monkeypatch.setattr(attention, "untrusted", set())
    assert attention.check_kernels(CPU) == ""
    assert attention.untrusted == set()


def test_a_kernel_that_differs_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel's values are right and only its gradient is wrong. The second kernel is
    missing.
    """

    def wrong(qkv: Tensor, layout: attention.Layout) -> Tensor:
        return attention.plain(qkv, layout) + (qkv - qkv.detach()).sum(1)

    def absent(qkv: Tensor, layout: attention.Layout) -> Tensor:
        return torch.ops.aten.no_such_attention(qkv)

    monkeypatch.setattr(attention, "_flash", wrong)
    monkeypatch.setattr(attention, "_efficient", absent)
    monkeypatch.setattr(attention, "untrusted", set())
    note = attention.check_kernels(CPU)
    assert note.startswith("PyTorch's flash attention is off by ")
    assert "PyTorch's efficient attention fails (" in note
    assert "no_such_attention" in note
    assert note.endswith("on this device: the plain way is used, which is slower")
    assert attention.untrusted == {"flash", "efficient"}


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        ("_flash", {}),
        ("_flash", {"dropout": 0.1, "window": 2}),
        ("_flash", {"dtype": torch.float16, "head": 256}),
        ("_efficient", {"dtype": torch.float32}),
        ("plain", {"head": 264}),
        ("plain", {"untrusted": {"flash"}}),
        ("plain", {"dtype": torch.float32, "dropout": 0.1}),
        ("plain", {"dtype": torch.float32, "window": 2}),
        ("plain", {"dtype": torch.float32, "untrusted": {"efficient"}}),
        ("plain", {"longest": 0}),
        ("plain", {"asked": True}),
        ("plain", {"asked": True, "dtype": torch.float32}),
    ],
)
def test_which_kernel_computes_attention(
    kernel: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any]
    given = {"dtype": torch.bfloat16, "head": 8, "dropout": 0.0, "window": 0, "longest": 6}
    given |= {"asked": False, "untrusted": set(), **changes}
    called: list[str] = []
    for name in ("_flash", "_efficient", "plain", "_run_by_run"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(attention, "untrusted", given["untrusted"])
    asked = native.only_plain() if given["asked"] else nullcontext()
    with FakeTensorMode(), asked:
        qkv = torch.empty(6, 3, 2, given["head"], dtype=given["dtype"], device="cuda")
        bounds = torch.empty(2, dtype=torch.int32, device="cuda")
        where = attention.Layout(bounds, given["longest"], given["window"])
        attention.attention(qkv, where, given["dropout"])
    assert called == [kernel]


@pytest.mark.parametrize("asked", [False, True])
def test_the_loss_takes_one_pass_unless_the_plain_way_is_asked(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("one_pass", "plain"):
        monkeypatch.setattr(vocabulary_loss, name, lambda *_, name=name: called.append(name))
    with FakeTensorMode(), native.only_plain() if asked else nullcontext():
        shapes = [(6, 8), (50, 8), (50,), (6,)]
        vocabulary_loss.vocabulary_loss(*(torch.empty(shape, device="cuda") for shape in shapes))
    assert called == ["plain" if asked else "one_pass"]


def test_more_ranks_than_devices_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BadInput, match=r"this machine has 2; .* --nproc-per-node 2"):
        processes.start(processes.SystemConfig())
