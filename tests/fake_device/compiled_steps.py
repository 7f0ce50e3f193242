"""Compile the training step of every task and shape for CUDA, without a GPU.

    benchmarks.fake_cuda.start("fake_device.compiled_steps", FOLDER)

traces the loss of each case of benchmarks/steps.py on a fake device, as torch.compile does before
it generates code. A case that cannot be traced as one program ends with a traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks import fake_cuda
from benchmarks.steps import CASES, TASKS, Case
from xformer import optim

# These do not change the loss, heads do not depend on the precision, and a Hilbert-CNN is never
# compiled.
SAME = (*optim.KINDS, "accumulated gradients", "spikes")
SAME = (*SAME, *(f"{name}, fp32" for name in TASKS if name not in ("mlm", "classify")))
COMPILED = {name: case for name, case in CASES.items() if name not in (*SAME, "Hilbert-CNN")}
# One layer is enough, where all layers are alike.
COMPILED |= {
    name: replace(case, model=case.model | {"layers": 1})
    for name, case in COMPILED.items()
    if not {"window", "shared_layers"} & case.model.keys()
}


def programs(case: Case) -> tuple[int, set[str]]:
    """The number of programs that the loss needs, and the attention kernels in them."""
    kernels: list[set[str]] = []

    def backend(program: Any, _: Any) -> Callable[..., Any]:
        names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        kernels.append({name.removeprefix("aten.") for name in names if "_attention_" in name})
        forward: Callable[..., Any] = program.forward
        return forward

    with fake_cuda.device():
        trainer, (batch, *_) = case.trainer(), case.batches()
        trainer.model.wrapped.compile(fullgraph=True, dynamic=False, backend=backend)
        for _ in range(2):
            trainer.model.forward_backward(batch, 0, 1)
    return len(kernels), set().union(*kernels)


def main() -> None:
    """Print a line for each case."""
    import torch._dynamo
    from torch._dynamo.device_interface import CudaInterface

    with (
        # torch.compile asks these before it traces
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "get_rng_state", return_value=None),
        mock.patch.object(torch.cuda, "set_rng_state", return_value=None),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(CudaInterface, "is_available", return_value=False),
    ):
        for name, case in COMPILED.items():
            torch._dynamo.reset()
            count, kernels = programs(case)
            unit = "program" if count == 1 else "programs"
            print(f"{name}: {', '.join([f'{count} {unit}', *sorted(kernels)])}", flush=True)


if __name__ == "__main__":
    main()
