"""A CUDA device without memory or kernels, on a machine without a GPU.

Under FakeTensorMode a tensor has a shape, a type and a device, but no content. A whole training
step runs on such tensors in seconds. It shows which operations would run on a GPU, and which of
them would make the host wait. The library that `start` compiles from fake_cuda.cpp answers what
PyTorch asks the device.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from xformer.data.errors import Failure

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = "XFORMER_FAKE_CUDA"  # where the library is, in the environment of a process that has it


def start(module: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `python -m MODULE ARGUMENTS` with a fake CUDA device. It imports from the same places
    as this process. The library is compiled into `folder`, unless it is there. Raises Failure if
    that fails."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder, library = Path(spec.origin).parent, folder / "fake_cuda.so"
    line = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE)]
    line += [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    if not library.exists():
        try:
            subprocess.run([*line, "-lc10", "-ltorch_cpu", "-o", str(library)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Failure(f"{SOURCE.name} could not be compiled: {error}") from None
    places = {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **places, "LD_PRELOAD": str(library), LIBRARY: str(library)}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def device() -> Iterator[None]:
    """Within the block tensors have no content, and `cuda` is a device that can be used."""
    import torch
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    assert LIBRARY in os.environ, "this process was not started by fake_cuda.start"
    ctypes.CDLL(os.environ[LIBRARY]).use_fake_cuda()
    # PyTorch uses its foreach operations only for the tensor types that it knows.
    lists = optimizer._foreach_supported_types
    tensor = torch.tensor

    def listed(tensors: object, device: object) -> bool:
        return True

    def from_host(values: Any, *, device: Any = None, **options: Any) -> Tensor:
        """torch.tensor, which itself would make a real tensor and copy it."""
        return tensor(values, **options).to(device or "cpu")

    with (
        _threads(),
        _host_memory(),
        mock.patch.object(torch, "tensor", from_host),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "Stream", torch.Stream),
        mock.patch.object(torch.cuda, "stream", lambda stream: stream),
        mock.patch.object(torch.cuda, "current_stream", partial(torch.Stream, device="cuda")),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "default_generators", [torch.Generator()]),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(optimizer, "_foreach_supported_types", [*lists, FakeTensor]),
        mock.patch.object(_foreach_utils, "_has_foreach_support", listed),
        mock.patch.object(torch.nn.utils.clip_grad, "_has_foreach_support", listed),
        # some versions make a real tensor on the device first
        mock.patch.object(fake_tensor, "init_gpu_context", create=True),
        # else a single element keeps its content, which cannot be copied to the device
        mock.patch.object(FakeTensorMode, "may_turn_const", return_value=False),
        FakeTensorMode(),
    ):
        yield


@contextmanager
def _threads() -> Iterator[None]:
    """Within the block the work of a pool's thread sees the fake device too.

    Two threads at once would confuse FakeTensorMode. So a pool does its work when it is submitted,
    in its thread, while the submitting thread waits.
    """
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    submit, thread = ThreadPoolExecutor.submit, threading.local()

    def set_device(device: torch.device) -> None:
        thread.device = device

    def submitted(
        pool: ThreadPoolExecutor, work: Callable[..., Any], *given: Any, **named: Any
    ) -> Future[Any]:
        modes = _get_current_dispatch_mode_stack()

        def within() -> Any:
            assert hasattr(thread, "device"), "this thread has set no device, so GPU 0 is used"
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return work(*given, **named)

        future = submit(pool, within)
        wait([future])
        return future

    with (
        mock.patch.object(ThreadPoolExecutor, "submit", submitted),
        mock.patch.object(torch.cuda, "set_device", set_device),
    ):
        yield


@contextmanager
def _host_memory() -> Iterator[None]:
    """Within the block tensors on the host can be pinned, and read as arrays of ones."""
    import numpy as np
    from torch._subclasses.fake_tensor import FakeTensor

    def pin_memory(tensor: Any) -> Any:
        pinned = tensor.clone()
        pinned.is_in_pinned_memory = True
        return pinned

    def array(tensor: Tensor) -> np.ndarray:
        assert tensor.device.type == "cpu"
        return np.ones(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    with (
        mock.patch.object(FakeTensor, "pin_memory", pin_memory),
        mock.patch.object(FakeTensor, "numpy", array),
        mock.patch.object(FakeTensor, "record_stream", return_value=None),
    ):
        yield


@dataclass
class Operation:
    """One operation on the fake device. `reads` and `writes` hold the bytes of each piece of memory
    that it touches; the keys tell the pieces apart."""

    name: str
    reads: dict[int, int]
    writes: dict[int, int]
    is_product: bool
    is_cast: bool

    @property
    def bytes(self) -> int:
        """What it reads and writes; a tensor that it changes counts twice."""
        return sum(self.reads.values()) + sum(self.writes.values())


class Recorder:
    """Within the block, records every operation on the fake device in `operations`, counts in
    `waits` those that would make the host wait for the device, and notes in `collectives` the name
    and the shape of what the ranks exchange."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.kept: list[Any] = []  # memory; if it were freed, other memory could get its key
        self.waits: Counter[str] = Counter()
        self.collectives: list[str] = []

    def __enter__(self) -> Recorder:
        from torch.utils._python_dispatch import TorchDispatchMode

        recorder = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return recorder._take(operation, args, kwargs or {})

        self.mode = Mode()
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)

    def _take(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = str(operation.overloadpacket).removeprefix("aten.")
        given = tensors_in((args, kwargs))
        if operation.namespace == "c10d":
            self.collectives.append(f"{name} {[tuple(tensor.shape) for tensor in given]}")
        if name in WAITS and on_cuda(given):
            self.waits[name] += 1
        if name == "_local_scalar_dense":  # the host reads a number, but there is none
            number = 0 if on_cuda(given) else 1  # an optimizer counts its steps on the host
            return float(number) if given[0].dtype.is_floating_point else number
        if name in ("index", "index_put", "index_put_") and any(
            t.dtype.is_floating_point is False and str(t.dtype) == "torch.bool"
            for t in tensors_in(args[1])
        ):
            self.waits[f"{name} by a mask"] += 1
        result = operation(*args, **kwargs)
        made = tensors_in(result)
        if self._is_blocking_copy(name, given, made, args, kwargs):
            self.waits["a blocking copy"] += 1
        if launches(operation, name) and on_cuda([*given, *made]):
            cast = name in CASTS and len({t.dtype for t in [*given, *made]}) > 1
            reads, writes = self._touched(given), self._touched(made)
            changed = self._touched(tensors_in(self._changed(operation, args)))
            if name in OVERWRITE:
                reads = {key: n for key, n in reads.items() if key not in changed}
            writes |= changed
            if name in PARTIAL:
                reads[self._key(given[0])] = size(made[0])
            if name == "scatter_":  # the result is its first argument
                reads |= (writes := {self._key(made[0]): size(given[-1])})
            self.operations.append(Operation(name, reads, writes, name in PRODUCTS, cast))
        return result

    @staticmethod
    def _changed(operation: Any, args: Any) -> list[Any]:
        """The arguments that the operation changes."""
        pairs = zip(operation._schema.arguments, args, strict=False)
        return [given for one, given in pairs if one.alias_info and one.alias_info.is_write]

    def _touched(self, tensors: list[Tensor]) -> dict[int, int]:
        """The bytes of each piece of memory that the tensors cover."""
        pieces: dict[int, int] = {}
        for tensor in tensors:
            if tensor.device.type == "cuda":
                whole = tensor.untyped_storage().nbytes()
                key = self._key(tensor)
                pieces[key] = min(pieces.get(key, 0) + size(tensor), whole)
        return pieces

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        return int(storage._cdata)

    @staticmethod
    def _is_blocking_copy(
        name: str, given: list[Tensor], made: list[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> bool:
        if name not in ("_to_copy", "copy_"):
            return False
        source = given[1] if name == "copy_" else given[0]
        target = given[0] if name == "copy_" else made[0]
        without = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking")
        if source.device.type == target.device.type:
            return False
        pinned = getattr(source, "is_in_pinned_memory", False)
        return target.device.type == "cpu" or not without or not pinned


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal"}
CASTS = {"_to_copy", "copy_", "_foreach_copy_"}  # if their tensors differ in type
OVERWRITE = {"copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_"}  # without reading
PARTIAL = {"embedding", "gather", "index_select"}  # read as much as they write
PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"),
    *("_flash_attention_forward", "_flash_attention_backward"),
    *("_efficient_attention_forward", "_efficient_attention_backward"),
}
WITHOUT_KERNEL = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("detach", "_unsafe_view", "lift_fresh", "record_stream"),
}


def launches(operation: Any, name: str) -> bool:
    """Whether an operation launches a kernel: it is neither a view nor an allocation."""
    if operation.namespace in ("prim", "profiler") or name in WITHOUT_KERNEL:
        return False
    infos = [value.alias_info for value in operation._schema.returns]
    return not any(info is not None and not info.is_write for info in infos)


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def on_cuda(tensors: list[Tensor]) -> bool:
    """Whether any of them is on a CUDA device."""
    return any(tensor.device.type == "cuda" for tensor in tensors)


def size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return prod(tensor.shape) * tensor.element_size()
