"""Find the layer that produced the first NaN or infinity of a step, by repeating its forward and
backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from xformer.data.batch import Batch
from xformer.parallel.compiled import not_compiled
from xformer.setup import Setup
from xformer.tasks.task import Loss, Model, to_device

# the stages in which the first non-finite value can occur, in the order of computation
WEIGHT, FORWARD, BACKWARD, NOWHERE = range(4)


def trace(setup: Setup, model: Model, step: int, position: int) -> tuple[int, dict[str, Any]]:
    """Find the first non-finite value of a step on any rank. `position` is the step's first sample.

    Returns the stage (WEIGHT to NOWHERE), and a record with the place in words (`where`), the
    `rows` of the store, and for FORWARD and BACKWARD the `rank` and the `micro_batch`.
    The passes are repeated without compiled code or graphs, on batches without filler. If the
    step's batches had filler, the repetition has other dropout.
    """
    ranks, batches = setup.ranks, setup.feed().take(position).batches
    packed = [to_device(batch, ranks.device) for batch in batches]
    stage, i, where = first_layer(
        model, len(packed), lambda i: loss_of(setup, model, packed[i], step, i)
    )
    mine = [batch.rows.tolist() for batch in batches]
    idle = not batches  # a rank without rows has no gradient, so `min` prefers other ranks
    every = ranks.gather([stage, idle, ranks.rank, i, where, mine])
    stage, _, rank, i, where, theirs = min(every)
    if stage in (WEIGHT, NOWHERE):  # not caused by a single micro-batch
        rows = [row for *_, batches in every for batch in batches for row in batch]
        return stage, {"where": where, "rows": sorted(rows)}
    return stage, {"where": where, "rank": rank, "micro_batch": i, "rows": sorted(theirs[i])}


def loss_of(setup: Setup, model: Model, batch: Batch[Tensor], step: int, micro_batch: int) -> Loss:
    """The loss of a micro-batch, with the same dropout as in its step."""
    setup.seed_dropout(step, micro_batch)
    with setup.ranks.autocast(setup.recipe.system.precision):
        loss: Loss = model(batch)
        return loss


def first_layer(
    model: nn.Module, micro_batches: int, loss_of: Callable[[int], Loss]
) -> tuple[int, int, str]:
    """Repeat the passes of all micro-batches, and find the first number that is not finite.

    `loss_of(i)` must compute the loss of micro-batch i with the same dropout as in the step.
    Returns the stage (WEIGHT to NOWHERE), the micro-batch, and the place in words. If all numbers
    are finite, the place is the weight with the largest gradient. Overwrites the gradients of the
    model.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return WEIGHT, 0, f"the weight {name}"
    model.zero_grad()
    earliest = (NOWHERE, 0, "")
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for i in range(micro_batches):
        places: list[tuple[int, str]] = []
        with _watched(model, places), not_compiled():
            total = loss_of(i).total
            if not _finite(total):
                places.append((FORWARD, "the loss itself"))
            total.backward()
        bad = (n for n, p in model.named_parameters() if p.grad is not None and not _finite(p.grad))
        places += [(BACKWARD, f"the gradient of the weight {name}") for name in bad][:1]
        if places and places[0][0] < earliest[0]:
            earliest = (places[0][0], i, places[0][1])
    for buffer, before in buffers:
        buffer.copy_(before)
    if earliest[0] == NOWHERE:
        norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
        largest = max(norms, key=lambda name: norms[name], default="")
        return NOWHERE, 0, f"all values are finite; the largest gradient is that of {largest}"
    return earliest


@contextmanager
def _watched(model: nn.Module, places: list[tuple[int, str]]) -> Iterator[None]:
    """A context that appends to `places` every output of a module that is not finite, and every
    gradient of an output, in the order of computation."""

    def hook(name: str) -> Callable[..., None]:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not isinstance(tensor, Tensor):
                return
            if not _finite(tensor):
                places.append((FORWARD, f"the output of {name}"))
            elif tensor.requires_grad:
                tensor.register_hook(lambda gradient: note(gradient, name))

        return check

    def note(gradient: Tensor, name: str) -> None:
        if not _finite(gradient):
            places.append((BACKWARD, f"the gradient of the output of {name}"))

    hooks = [
        module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
