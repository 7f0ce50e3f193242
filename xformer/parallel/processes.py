"""Ranks and devices: what torchrun has set up, and the few collectives that the loop needs."""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from xformer.config import Settings
from xformer.data.display import say
from xformer.data.errors import BadInput, Failure
from xformer.data.files import usable_cores
from xformer.ops import attention
from xformer.parallel.precision import use_tf32
from xformer.parallel.watch import Watch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # options of glibc's mallopt
GRACE = 20  # seconds that a failing rank waits for rank 0 to report the error
# starts N ranks on this machine: python *TORCHRUN N ...
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LIMIT = timedelta(minutes=30)  # for all ranks to start, and for a collective


class SystemConfig(Settings):
    """How the command is executed."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the matrix products: fp32, or bf16 by autocast with fp32 weights. auto takes bf16 on
    GPUs from compute capability 8.0 and on CPUs with avx512_bf16 or amx_bf16, and fp32 elsewhere.
    A run keeps the precision that it began with, and evaluation uses the same one."""
    tf32: bool = False
    """On CUDA, with precision=fp32: compute matrix products and convolutions in TF32, which has the
    range of fp32 and 10 bits of mantissa."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads of a process. 0 takes the process's share of the cores, or OMP_NUM_THREADS if
    that is set and only one process runs on the machine."""
    deterministic: bool = False
    """On CUDA, use only kernels that give the same bits every time. The CPU always does."""

    @model_validator(mode="after")
    def _tf32_is_for_fp32(self) -> Self:
        if self.tf32 and self.precision != "fp32":
            raise ValueError(
                f"system.tf32=true needs system.precision=fp32, not {self.precision}: it changes "
                "only products in fp32"
            )
        return self


class TrainingSystem(SystemConfig):
    """How a run is executed. A stopped run may be resumed with other values. A study counts runs
    with different precisions as different runs."""

    peak_tflops: float = Field(0.0, ge=0)
    """Peak throughput of a device, in 10^12 operations per second; `mfu` (model FLOPs utilisation)
    is the share of it that a run reaches. 0 takes the known peak of the GPU in this precision. If
    that peak is not known, mfu is not logged."""
    compile: Literal["auto", "none", "layers", "graphs", "both"] = "auto"
    """How training is prepared for a GPU. layers: torch.compile compiles the embeddings and each
    layer. graphs: the forward and backward pass become CUDA graphs; several GPUs then exchange
    gradients only after the backward pass. both: graphs of compiled layers. none: neither. auto: on
    a single GPU both for MLM on batches of one shape, otherwise graphs; on several GPUs, on the CPU
    and for a Hilbert-CNN none. Except with none, every batch is filled up to one of a few
    shapes."""
    profile: bool = False
    """Trace a few steps of rank 0, write RUN/profile/ and print where the time goes."""


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks: number `rank` of `world_size`, on `device`. `watch` notices
    when another rank is gone."""

    rank: int
    world_size: int
    device: torch.device
    watch: Watch | None = field(default=None, compare=False)

    def report_step(self, step: int) -> None:
        """Tell the other ranks which step this rank has finished."""
        if self.watch is not None:
            self.watch.step = step

    def autocast(self, precision: str) -> torch.autocast:
        """The autocast context for fp32 or bf16."""
        if precision not in ("fp32", "bf16"):  # auto was replaced before
            raise BadInput(f"precision={precision!r} must be 'fp32' or 'bf16'")
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")

    def seed(self, number: int) -> None:
        """Seed the generator of this rank's device."""
        # not torch.manual_seed, which seeds devices of every kind: 250 us on an AMD core
        if self.device.type == "cuda":
            device = torch.cuda.current_device()
            torch.cuda.default_generators[device].manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over all ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0 only. Every rank returns its result or raises its error."""
        error: BadInput | Failure | OSError | None = None
        answer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                answer = {"result": work()}
            except (BadInput, Failure, OSError) as caught:
                error = caught
                answer = {"error": str(caught), "bad_input": isinstance(caught, BadInput)}
        if self.world_size > 1:
            answers = [answer]
            dist.broadcast_object_list(answers, 0)
            answer = answers[0]
        if error is not None:
            raise error
        if "error" in answer:
            raise (BadInput if answer["bad_input"] else Failure)(answer["error"])
        return answer["result"]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


ALONE = Ranks(0, 1, torch.device("cpu"))  # a single process on the CPU


def keep_memory() -> None:
    """Make glibc keep the memory of a step for the next step.

    If it returned the memory to the system, every large tensor would be mapped and zeroed page by
    page again: 100,000 page faults in a step of 4,096 tokens. By default glibc also gives each
    allocation of 32 MiB or more, such as the gradient of a word table, a mapping of its own, which
    it returns as soon as it is freed. Such mappings are switched off for the same reason.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # not glibc
    set_option(M_MMAP_MAX, 0)
    set_option(M_TRIM_THRESHOLD, 2**31 - 1)


def start(config: SystemConfig) -> Ranks:
    """Join the process group of torchrun, or run as a single process, and choose a device."""
    # oneDNN caches a compiled matrix product for every shape, and packed batches have many shapes
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
    keep_memory()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _own_device(rank, config.deterministic)
    cuda = device.type == "cuda"
    use_tf32(device, config.tf32)
    torch.set_num_threads(config.threads or _own_cores())
    if world_size > 1 and not dist.is_initialized():
        _join("nccl" if cuda else "gloo", rank, world_size)
        _watches.append(Watch(rank, world_size, device))
    if cuda and (note := attention.check_kernels(device)) and rank == 0:
        say(note, error=True)
    return Ranks(rank, world_size, device, _watches[-1] if _watches else None)


def _own_device(rank: int, deterministic: bool) -> torch.device:
    """The device of this rank, which PyTorch then uses by default. Raises BadInput if the machine
    has fewer GPUs than ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.index >= (count := torch.cuda.device_count()):
        raise BadInput(
            f"rank {rank} needs its own GPU, but this machine has {count}; start one process "
            f"per GPU, with --nproc-per-node {count}"
        )
    torch.cuda.set_device(device)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return device


def _own_cores() -> int:
    """This process's share of the cores. A process that runs alone may have OMP_NUM_THREADS."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if processes == 1 and threads.isdigit() and int(threads):  # torchrun itself sets it to 1
        return int(threads)
    return max(1, usable_cores() // processes)


def _join(backend: str, rank: int, world_size: int) -> None:
    """Join the group of ranks. Raises Failure if another rank does not start.

    torchrun (torch 2.13) keeps one store for all its restarts. A late rank would find the address
    of its dead predecessor there. So rank 0 makes a prefix for this start. Every other rank asks
    for the prefix under a random name, and rank 0 answers until all ranks have confirmed.
    """
    store, *_ = next(rendezvous("env://", rank, world_size, timeout=LIMIT))
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"asks {rank}", mine)
        start = store.get(f"answer to {mine}").decode()
        store.set(f"{start} heard by {rank}", "")
    else:
        start, late = mine, set(range(1, world_size))
        end = time.monotonic() + LIMIT.total_seconds()
        while late := {other for other in late if not store.check([f"{start} heard by {other}"])}:
            for other in late:
                if store.check([f"asks {other}"]):
                    store.set(f"answer to {store.get(f'asks {other}').decode()}", start)
            if time.monotonic() > end:
                raise Failure(
                    f"rank {min(late)} of {world_size} did not start within {LIMIT}; give the same "
                    "command again"
                )
            time.sleep(0.02)
    store = dist.PrefixStore(start, store)
    dist.init_process_group(backend, timeout=LIMIT, store=store, rank=rank, world_size=world_size)


_watches: list[Watch] = []  # the watch of this process's group, if it has joined one
_ended: list[Any] = []  # the groups that this process has left


@contextmanager
def group() -> Iterator[None]:
    """A context that leaves the group of ranks at its end, whether it succeeds or not.

    torchrun ends all ranks when the first one exits, and rank 0 reports errors that all ranks have.
    So the other ranks wait GRACE seconds, and report the error themselves only if they still run.

    After an error a rank stays in a group of NCCL, because all ranks of a node must leave it
    together (NCCL's manual, ncclCommDestroy), and the others may wait for a collective. They end
    when they no longer hear of this rank. `xformer.start` then ends it without destructors.
    """
    rank, stays = os.environ.get("RANK", "0"), True
    try:
        with _named():
            yield
        stays = False
    except (BadInput, Failure) as error:
        if rank != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(GRACE)
            say(f"error: rank {rank}: {error}", error=True)
        raise
    finally:
        stays = stays and dist.is_initialized() and dist.get_backend() == "nccl"
        while _watches:
            _watches.pop().close(says_so=not stays)
        if dist.is_initialized() and not stays:
            # The traceback of an error may keep DistributedDataParallel alive, which keeps the
            # group. If that is the last reference, the group's destructor holds the GIL while it
            # waits for its threads, and these may wait for the GIL. Dropping a Python reference
            # releases the GIL first, so one is kept.
            _ended.append(dist.group.WORLD)
            dist.destroy_process_group()


@contextmanager
def _named() -> Iterator[None]:
    """A context that turns the failure of a collective into a Failure that names the rank that is
    gone."""
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, dist.DistError) or "gloo" in str(error)
        if not _watches or not known or not (line := _watches[-1].explain()):
            raise
        raise Failure(line) from None
