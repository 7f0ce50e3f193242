"""The training step on CUDA, without a GPU: tensors have no content (benchmarks/fake_cuda.py).

A mix of devices is an error there too, and so is an operation that does not take its arguments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fake_cuda
from benchmarks.steps import CASES, STEPS

READ = "_local_scalar_dense"  # the host reads a number from the device
# These optimizers ask the host whether to drop a step. Adam and AdamW ask the device.
ASK_THE_HOST = ("adagrad", "adamax", "radam", "novograd")


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
    expected = {case: {READ: STEPS} if case in ASK_THE_HOST else {} for case in CASES}
    expected["Hilbert-CNN"] = {"a blocking copy": 1}  # its curve, before the first step
    assert waits == expected
