"""Where numbers that are not finite arise, found by passing through a step again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from xformer.data.batch import Batch
from xformer.parallel.feed import to_device
from xformer.prepare import Job
from xformer.tasks.task import Loss, Model

WEIGHT, FORWARD, BACKWARD, NOWHERE = range(4)  # how early trouble arises
LossOf = Callable[[Job, Model, Batch[Tensor], int, int], Loss]  # step and micro-batch at the end


def trace(
    job: Job, model: Model, step: int, position: int, loss_of: LossOf
) -> tuple[int, dict[str, Any]]:
    """How early the trouble of a step arose (WEIGHT to NOWHERE); where, and on whose rows."""
    ranks, batches = job.ranks, job.feed().take(position).batches
    packed = [to_device(batch, ranks.device) for batch in batches]
    found = first_layer(model, len(packed), lambda i: loss_of(job, model, packed[i], step, i))
    stage, i, where = found
    mine = [batch.rows.tolist() for batch in batches]
    idle = not batches  # such a rank has no gradient to tell of
    every = ranks.gather([stage, idle, ranks.rank, i, where, mine])
    stage, _, rank, i, where, theirs = min(every)
    if stage in (WEIGHT, NOWHERE):  # no micro-batch has done it
        rows = [row for *_, batches in every for batch in batches for row in batch]
        return stage, {"where": where, "rows": sorted(rows)}
    return stage, {"where": where, "rank": rank, "micro_batch": i, "rows": sorted(theirs[i])}


def first_layer(
    model: nn.Module, micro_batches: int, loss_of: Callable[[int], Loss]
) -> tuple[int, int, str]:
    """Where numbers that are not finite arise, found by passing through the micro-batches again.

    `loss_of(i)` is the loss of a micro-batch, under the dropout that it had. Returns how early it
    is (WEIGHT to NOWHERE), the micro-batch, and the place in words; of finite numbers the weight
    with the largest gradient. Gradients of the model are overwritten.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return WEIGHT, 0, f"the weight {name}"
    model.zero_grad()
    found = (NOWHERE, 0, "")
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for i in range(micro_batches):
        places: list[tuple[int, str]] = []
        with _watched(model, places):
            total = loss_of(i).total
            if not _finite(total):
                places.append((FORWARD, "the loss itself"))
            total.backward()
        bad = (n for n, p in model.named_parameters() if p.grad is not None and not _finite(p.grad))
        places += [(BACKWARD, f"the gradient of the weight {name}") for name in bad][:1]
        if places and places[0][0] < found[0]:
            found = (places[0][0], i, places[0][1])
    for buffer, before in buffers:
        buffer.copy_(before)
    if found[0] == NOWHERE:
        norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
        largest = max(norms, key=lambda name: norms[name], default="")
        found = (NOWHERE, 0, f"nothing is infinite; the largest gradient is that of {largest}")
    return found


@contextmanager
def _watched(model: nn.Module, places: list[tuple[int, str]]) -> Iterator[None]:
    """Note the first output, then the first gradient of an output, that is not finite."""

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
