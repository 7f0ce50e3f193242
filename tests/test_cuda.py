"""The training step on CUDA, without a GPU: tensors have no content (benchmarks/fake_cuda.py).

A mix of devices is an error there too, and so is an operation that does not take its arguments.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import command
from torch import Tensor

from benchmarks import fake_cuda, first_hour
from benchmarks.steps import CASES, STEPS
from xformer.data.errors import BadInput
from xformer.ops import attention
from xformer.parallel import processes

READ = "_local_scalar_dense"  # the host reads a number from the device


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has a CUDA device")
def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """In every case but those that are wrong on purpose, and show that the check can fail."""
    process = fake_cuda.start("benchmarks.steps", tmp_path)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    waits: dict[str, Any] = dict(map(json.loads, out.splitlines()))

    told = waits.pop("a step that waits")
    assert told == {READ: STEPS, "a blocking copy": 2 * STEPS, "index by a mask": STEPS}
    told = waits.pop("a step that mixes devices")
    assert "Expected all tensors to be on the same device" in told
    expected = {case: {READ: STEPS} if case in first_hour.ASK_THE_HOST else {} for case in CASES}
    for case in ("Hilbert-CNN", "class weights"):
        expected[case] = {"a blocking copy": 1}  # the curve and the weights, in the first step
    assert waits == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has a CUDA device")
def test_a_step_launches_few_kernels(tmp_path: Path) -> None:
    """Without torch.compile, which fuses many of them."""
    process = fake_cuda.start("benchmarks.launches", tmp_path)
    out, _ = process.communicate(timeout=240)
    cells = next(line for line in out.splitlines() if "BERT-base" in line).split(" | ")
    assert int(cells[1]) <= 612
    assert int(cells[2]) <= 120


def test_the_first_hour_survives_a_part_that_fails(tmp_path: Path) -> None:
    arguments = ["--rehearse", "--only", "waits", "ranks", "--fail", "ranks"]
    ended = command("-m", "benchmarks.first_hour", *arguments, "--output", tmp_path)
    assert ended.status == 1
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["waits"]["rows"][0]["value"] == f"{len(CASES)} cases"
    assert "this part was told to fail" in told["ranks"]["error"]
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert "| ranks | **failed** | AssertionError: this part was told to fail |" in lines


def test_the_first_hour_measures_beside_transformers() -> None:
    pytest.importorskip("transformers")
    ours, theirs = first_hour.speed_of("MiniLM")(True)
    assert ours.value.endswith("tokens/s")
    how = "compiled" if torch.cuda.is_available() else "not compiled"
    assert theirs.what == f"{ours.what}: transformers, SDPA, {how}"
    assert theirs.note.startswith("ours is ")


def test_the_first_hour_does_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    peer = first_hour.Peer("BertForMaskedLM", first_hour.shape("tiny", 8))

    def cannot_compile(**given: torch.Tensor) -> None:
        raise FileNotFoundError("gcc")

    monkeypatch.setattr(peer, "forward", cannot_compile)
    tokens = torch.ones(2, 8, dtype=torch.int64)
    peer.warm_up([{"input_ids": tokens, "attention_mask": tokens, "labels": tokens}])
    assert (peer.forward, peer.how) == (peer.model, "not compiled (FileNotFoundError)")


def test_the_first_hour_keeps_the_rows_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is killed says so, and what it has measured stays."""
    code = """import json, os, signal
print(json.dumps({"what": "a", "value": "1", "note": ""}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)"""
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda line, **given: start([sys.executable, "-c", code], **given)
    )
    result = first_hour.of_part("waits", True, False)
    assert first_hour.table("waits", result) == [
        "| a | 1 |  |",
        "| waits | **failed** | it was ended by SIGKILL |",
    ]


def test_the_first_hour_compares_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(first_hour.tasks(True))) == 2 * 7
    right = first_hour.gradient
    monkeypatch.setattr(first_hour, "gradient", lambda *given: right(*given) * (given[3].itemsize))
    with pytest.raises(AssertionError, match=r"mlm, fp32, torch\.bfloat16: the gradient is off by"):
        list(first_hour.tasks(True))


CPU = torch.device("cpu")


def test_kernels_that_agree_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_flash", "_efficient"):
        monkeypatch.setattr(attention, name, attention.plain)
    monkeypatch.setattr(attention, "untrusted", set())
    assert attention.check_kernels(CPU) == ""
    assert attention.untrusted == set()


def test_a_kernel_that_differs_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its gradient is wrong."""

    def wrong(qkv: Tensor, layout: attention.Layout, dropout: float) -> Tensor:
        return attention.plain(qkv, layout) + (qkv - qkv.detach()).sum(1)

    def absent(qkv: Tensor, layout: attention.Layout, dropout: float) -> Tensor:
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


def test_more_ranks_than_devices_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BadInput, match=r"this machine has 2; .* --nproc-per-node 2"):
        processes.start(processes.SystemConfig())
