"""A CUDA device without memory or kernels, on a machine without a GPU.

Under FakeTensorMode a tensor has a shape, a type and a device, but no content. A whole training
step runs on such tensors in seconds. It shows which operations would run on a GPU, and which of
them would make the host wait. PyTorch without CUDA also needs the library that `start` compiles
from fake_cuda.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
LOADED = "XFORMER_FAKE_CUDA"  # set in the environment of a process that has the library


def start(module: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `python -m MODULE ARGUMENTS` with a fake CUDA device. The library is compiled into
    `folder`."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder, library = Path(spec.origin).parent, folder / "fake_cuda.so"
    line = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE)]
    line += [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    subprocess.run([*line, "-lc10", "-ltorch_cpu", "-o", str(library)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), LOADED: "1"}
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
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    assert LOADED in os.environ, "this process was not started by fake_cuda.start"
    # PyTorch uses its foreach operations only for the tensor types that it knows.
    lists = optimizer._foreach_supported_types
    tensor = torch.tensor

    def listed(tensors: object, device: object) -> bool:
        return True

    def from_host(values: Any, *, device: Any = None, **options: Any) -> Tensor:
        """torch.tensor, which itself would make a real tensor and copy it."""
        return tensor(values, **options).to(device or "cpu")

    with (
        mock.patch.object(torch, "tensor", from_host),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(optimizer, "_foreach_supported_types", [*lists, FakeTensor]),
        mock.patch.object(_foreach_utils, "_has_foreach_support", listed),
        mock.patch.object(torch.nn.utils.clip_grad, "_has_foreach_support", listed),
        FakeTensorMode(),
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
        """What it reads and writes; a tensor that it changes counts once."""
        return sum({**self.reads, **self.writes}.values())


class Recorder:
    """Within the block, records every operation on the fake device in `operations`, and counts in
    `waits` those that would make the host wait for the device."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.kept: list[Any] = []  # memory; if it were freed, other memory could get its key
        self.waits: Counter[str] = Counter()

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
            if name in PARTIAL:
                reads[self._key(given[0])] = size(made[0])
            if name == "scatter_":  # the result is its first argument
                reads |= (writes := {self._key(made[0]): size(given[-1])})
            self.operations.append(Operation(name, reads, writes, name in PRODUCTS, cast))
        return result

    def _touched(self, tensors: list[Tensor]) -> dict[int, int]:
        """The bytes of each piece of memory that the tensors show."""
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
        return target.device.type == "cpu" or not without


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal"}
CASTS = {"_to_copy", "copy_", "_foreach_copy_"}  # if their tensors differ in type
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
