"""The cost of a model: its floating-point operations, and its use of a device.

T tokens, N rows, M masked tokens, S the sum over rows of their squared lengths; C hidden size, E
embedding size, F inner size of the MLP, V vocabulary, K outputs of a head.

Only the operations of matrix products on real tokens are counted; a multiplication followed by an
addition counts as two. Padding, recomputation and element-wise operations are not counted, so that
the share of a device's peak can be compared between programs (as in Chowdhery et al. 2022, appendix
B). In the last layer, what follows the attention is counted only for the tokens that the head
reads.
"""

from __future__ import annotations

import math

import torch

from xformer.data.batch import Workload
from xformer.model.config import ModelConfig
from xformer.tasks.classify import Classify
from xformer.tasks.task import Head, Model, Task

BACKWARD = 2  # the backward pass of a matrix product is two products of the same size

# (part of a device's name, its peak in 16 bits, its peak in fp32), in 10^12 operations per second,
# for dense matrices with fp32 accumulation, from NVIDIA's data sheets. The first match is used. 16
# bits are bf16, or fp16 on V100 and T4, whose tensor cores have no bf16.
PEAKS = (
    ("H200 NVL", 835.0, 60.0),
    ("H100 NVL", 835.0, 60.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("T4", 65.0, 8.1),
)


def forward_flops(config: ModelConfig, task: Task | None, work: Workload) -> int:
    """Operations of a forward pass with the task's head, or of the encoder if `task` is None."""
    if config.architecture == "hilbert_cnn":
        return sum(_convolutions(config, task)) * work.rows
    C, E, F = config.hidden, config.width, config.intermediate
    last = work.tokens if task is None else task.tokens_read(config, work)
    layers = config.layers if task is None or task.head.layer is None else task.head.layer
    # 2 for multiply and add: qkv 3CC; scores and weighted sums 2C per pair of tokens in a row
    windows = sum(map(config.has_window, range(layers)))
    near = min(work.squares, (2 * config.window + 1) * work.tokens)  # at row ends there are fewer
    pairs = (layers - windows) * work.squares + windows * near
    flops = 6 * C * C * layers * work.tokens + 4 * C * pairs
    # attention output CC, MLP up CF (2CF with gates) and down CF: in the last layer only for tokens
    # that are read
    mlp = (6 if config.gated else 4) * C * F
    if layers:
        flops += (2 * C * C + mlp) * ((layers - 1) * work.tokens + last)
    if config.embedding:
        flops += 2 * E * C * work.tokens
    return flops if task is None else flops + task.head_flops(config, work)


def training_flops(config: ModelConfig, task: Task | None, work: Workload) -> int:
    """Operations of forward and backward passes that train all weights, or only the head if it
    reads the states of one layer, as a probe does."""
    if task is not None and task.head.layer is not None:
        return forward_flops(config, task, work) + BACKWARD * task.head_flops(config, work)
    flops = (1 + BACKWARD) * forward_flops(config, task, work)
    if config.architecture == "hilbert_cnn":  # its one-hot input needs no gradient
        flops -= _convolutions(config, task)[0] * work.rows
    return flops


def _convolutions(config: ModelConfig, task: Task | None) -> list[int]:
    """Operations of each product of a HilbertCNN's forward pass, the first convolution first."""
    with torch.device("meta"):
        model = Model(config, task or Classify(Head("classify")))
    assert model.cnn is not None
    # the cells of an image that was halved 0, 1 and 2 times
    whole, half, quarter = (math.prod(-(-n // 2**i) for n in model.cnn.size) for i in range(3))
    cells = {"first": whole, "second": whole, "blocks.0": half, "blocks": quarter}
    flops = []
    for name, weight in model.cnn.named_parameters():
        if weight.ndim > 1:
            image = next((cells[part] for part in cells if name.startswith(part)), 1)
            flops.append(2 * weight.numel() * image)
    assert model.task_head is not None
    return [*flops, 2 * model.task_head.weight.numel()]


def peak_flops(device: str, precision: str) -> float | None:
    """The peak of a device in operations per second, by its name; None if it is not known.
    `precision` is bf16, fp32 or tf32. On every GPU that has TF32 its peak is half that of bf16."""
    for name, half, full in PEAKS:
        if name in device:
            return 1e12 * {"bf16": half, "tf32": half / 2, "fp32": full}[precision]
    return None


def utilisation(flops: float, seconds: float, peak: float, devices: int = 1) -> float:
    """Model FLOPs utilisation (MFU): `flops` in `seconds` as a share of the peak of `devices`."""
    return flops / (max(seconds, 1e-9) * peak * devices)
