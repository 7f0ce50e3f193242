"""CUDA graphs (xformer.parallel.graphs), without a GPU: a stand-in for a graph runs the passes
again, on the recorded batch and into the recorded gradients, as a replay does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks import bare
from benchmarks.steps import CASES, SHAPE
from xformer.data.batch import Batch
from xformer.data.errors import Failure
from xformer.data.store import IGNORED
from xformer.parallel import graphs
from xformer.parallel.graphs import Recorder
from xformer.parallel.processes import ALONE, Ranks
from xformer.parallel.replicas import Replicas
from xformer.tasks.task import Loss, Model

CPU = torch.device("cpu")


class Graph:
    """Repeats what was done within `record` when it is replayed."""

    def __init__(self) -> None:
        self.work: Callable[[], None] = lambda: None

    def replay(self) -> None:
        self.work()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Stand-ins for CUDA's part. The list gets the recorded graphs."""
    made: list[Graph] = []

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)

    @contextmanager
    def record(graph: Graph, pool: Any, stream: Stream, mode: str) -> Iterator[None]:
        made.append(graph)
        with torch.random.fork_rng([]):  # recording draws no numbers
            yield

    monkeypatch.setattr(torch.cuda, "graph", record)
    original = Recorder._record

    def record_and_repeat(self: Recorder, passes: graphs.Passes, batch: Batch[Tensor]) -> Any:
        recording = original(self, passes, batch)

        def work() -> None:
            before = [weight.grad for weight in recording.gradients]
            for weight in recording.gradients:
                weight.grad = None
            loss = passes(recording.batch)
            recording.loss.total.copy_(loss.total)
            recording.loss.correct.copy_(loss.correct)
            assert isinstance(recording.loss.count, Tensor)
            recording.loss.count.copy_(torch.as_tensor(loss.count))
            for (weight, gradient), old in zip(recording.gradients.items(), before, strict=True):
                assert weight.grad is not None
                gradient.copy_(weight.grad)
                weight.grad = old

        made[-1].work = work
        return recording

    monkeypatch.setattr(Recorder, "_record", record_and_repeat)
    return made


def batches_of(lengths: list[int]) -> list[Batch[Tensor]]:
    torch.manual_seed(0)
    return [bare.full_rows(8, length, 0.25, 1000, "cpu") for length in lengths]


def model_of(name: str = "mlm, fp32") -> Model:
    torch.manual_seed(1)
    return CASES[name].trainer("cpu").model.model


@pytest.mark.parametrize("name", ["mlm, fp32", "classify, fp32"])
def test_the_loop_of_the_benchmarks_takes_steps(name: str) -> None:
    """On the CPU, and without the files of a run."""
    case = CASES[name]
    trainer = case.trainer("cpu")
    before = [weight.detach().clone() for weight in trainer.model.model.parameters()]
    trainer.train([case.batches("cpu")])
    after = trainer.model.model.parameters()
    assert not all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def quiet_model() -> Model:
    """A model without dropout."""
    torch.manual_seed(1)
    shape = SHAPE | {"dropout": 0.0, "attention_dropout": 0.0}
    return replace(CASES["mlm, fp32"], model=shape).trainer("cpu").model.model


def gradients_of(model: Model) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def steps(
    model: Model, parts: list[list[Batch[Tensor]]], graphs: bool
) -> list[tuple[list[float], Tensor]]:
    """Loss, count and correct predictions of every step, and its gradient. Its micro-batches have
    dropout of their own."""
    replicas = Replicas(model, ALONE, lambda: parts[0][0], "fp32", graphs)
    results = []
    for number, batches in enumerate(parts):
        model.zero_grad()
        sums = replicas.begin()
        for i, batch in enumerate(batches):
            torch.manual_seed(10 * number + i)
            sums.add(replicas.forward_backward(batch, i, len(batches)))
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradient = torch.cat([gradient.flatten() for gradient in gradients])
        results.append((sums.all.tolist(), gradient))
    return results


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.slow
def test_graphs_give_the_same_losses_and_gradients(together: int, recorded: list[Graph]) -> None:
    """Two shapes take turns, in steps of one micro-batch and of several."""
    batches = batches_of([16, 16, 16, 12, 12, 16, 12, 16, 16, 12, 12, 16])
    for i, batch in enumerate(batches):  # filler, which does not count
        assert batch.targets is not None
        batch.targets[:i] = IGNORED
    parts = [batches[i : i + together] for i in range(0, len(batches), together)]
    expected = steps(model_of(), parts, graphs=False)
    got = steps(model_of(), parts, graphs=True)
    assert len(recorded) == 2
    for (sums, gradient), (same_sums, same_gradient) in zip(expected, got, strict=True):
        assert sums == pytest.approx(same_sums, rel=1e-6)
        torch.testing.assert_close(gradient, same_gradient)


class Pair(Ranks):
    """One of two ranks in two threads of this process, which exchange sums. Only one of them
    computes at a time: the one that has the `turn`."""

    turn = threading.Lock()
    barrier = threading.Barrier(2, timeout=60)
    given: ClassVar[dict[int, Tensor]] = {}

    def sum(self, tensor: Tensor) -> Tensor:
        self.given[self.rank] = tensor.clone()
        self.turn.release()
        self.barrier.wait()
        tensor.copy_(self.given[0] + self.given[1])
        self.barrier.wait()
        self.turn.acquire()
        return tensor


@pytest.mark.slow
def test_two_ranks_average_their_gradients(recorded: list[Graph]) -> None:
    """The ranks meet the shapes in different orders. In the last step one rank has no rows."""
    shapes = [16, 16, 12, 12, 16, 12], [12, 16, 16, 12, 12, 16]
    batches = [batches_of(lengths) for lengths in shapes]
    expected: list[list[Tensor]] = []
    model = quiet_model()
    for step in range(4):
        model.zero_grad()
        rows = [b for own in batches for b in own[2 * step : 2 * step + 2]]
        for batch in rows or batches[0][:1]:
            model(batch).total.backward()
        expected.append(gradients_of(model))

    def rank(number: int) -> list[list[Tensor]]:
        model = models[number]
        replicas = Replicas(model, Pair(number, 2, CPU), lambda: batches[0][0], "fp32", True)
        last: list[Batch[Tensor] | None] = [batches[0][0] if number == 0 else None]
        got = []
        for step in range(4):
            given = batches[number][2 * step : 2 * step + 2] or last
            model.zero_grad()
            with Pair.turn:
                for i, batch in enumerate(given):
                    replicas.forward_backward(batch, i, len(given))
            got.append([2 * gradient for gradient in gradients_of(model)])
        return got

    models = quiet_model(), quiet_model()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(rank, number) for number in range(2)]
    for end in ends:
        for got, wanted in zip(end.result(), expected, strict=True):
            torch.testing.assert_close(got, wanted)


def test_weights_without_a_gradient_get_none(recorded: list[Graph]) -> None:
    """A zero would let the optimizer's weight decay change them."""
    model = model_of("classify, fp32")
    extra = torch.nn.Parameter(torch.ones(3))
    model.register_parameter("extra", extra)
    steps(model, [[batch] for batch in batches_of([16, 16, 16])], graphs=True)
    assert len(recorded) == 1
    assert extra.grad is None


def test_a_shape_that_cannot_be_recorded(
    recorded: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch raises a second error when it leaves the block; the message has the first."""

    @contextmanager
    def fails(*_: Any) -> Iterator[None]:
        yield
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    parts = [[batch] for batch in batches_of([16, 16])]
    with pytest.raises(Failure, match=r"\(operation not permitted .*; give system.compile=layers"):
        steps(model_of(), parts, graphs=True)


def test_a_shape_is_all_but_the_content() -> None:
    first, second = batches_of([16, 16])
    assert not torch.equal(first.tokens, second.tokens)
    shape = graphs._shape(first)
    assert shape == graphs._shape(second)
    others = (
        batches_of([12])[0],
        replace(first, longest=17),
        replace(first, together=2),
        replace(first, labels=None),
        replace(first, tokens=first.tokens.int()),
    )
    assert all(graphs._shape(other) != shape for other in others)


@pytest.mark.slow
def test_all_graphs_share_the_memory_of_their_gradients(recorded: list[Graph]) -> None:
    batches = batches_of([16, 16, 12, 12, 8, 8])
    replicas = Replicas(model_of(), ALONE, lambda: batches[0], "fp32", True)
    for batch in batches:
        replicas.forward_backward(batch, 0, 1)
    assert replicas.recorder is not None
    one, *others = (r.gradients for r in replicas.recorder.recordings.values() if r is not None)
    assert len(others) == 2
    for other in others:
        assert all(other[weight] is gradient for weight, gradient in one.items())


def test_too_little_memory_is_one_line(
    recorded: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first passes of a shape, and while they are recorded."""
    (batch,) = batches_of([16])
    replicas = Replicas(model_of(), ALONE, lambda: batch, "fp32", True)
    assert replicas.recorder is not None
    for _ in range(2):
        with monkeypatch.context() as context:
            context.setattr(replicas, "_passes", no_memory)
            with pytest.raises(Failure, match=r"little memory: .*, and system\.compile=none takes"):
                replicas.forward_backward(batch, 0, 1)
        replicas.recorder.recordings.clear()
        replicas.forward_backward(batch, 0, 1)


def no_memory(_: Batch[Tensor]) -> Loss:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_too_little_memory_without_graphs_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = batches_of([16])
    replicas = Replicas(model_of(), ALONE, lambda: batch)
    monkeypatch.setattr(replicas, "wrapped", no_memory)
    with pytest.raises(Failure, match=r"batch\.accumulate divides .* into smaller micro-batches$"):
        replicas.forward_backward(batch, 0, 1)


def test_too_little_memory_of_several_ranks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first pass, which decides the order of sums, is made with the replicas."""
    (batch,) = batches_of([16])

    class Copy:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __call__(self, batch: Batch[Tensor]) -> Loss:
            return no_memory(batch)

    monkeypatch.setattr("xformer.parallel.replicas.DistributedDataParallel", Copy)
    with pytest.raises(Failure, match="the GPU has too little memory"):
        Replicas(model_of(), replace(ALONE, world_size=2), lambda: batch)


def test_graphs_are_freed_without_a_search_for_garbage(recorded: list[Graph]) -> None:
    """They hold the memory of all activations, which a notebook needs for its next run."""
    (batch,) = batches_of([16])
    replicas = Replicas(model_of(), ALONE, lambda: batch, "fp32", True)
    replicas.forward_backward(batch, 0, 1)
    recorder = weakref.ref(replicas.recorder)
    gc.disable()
    try:
        del replicas
        assert recorder() is None
    finally:
        gc.enable()
