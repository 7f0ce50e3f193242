"""torch.compile for training: which parts of a model are compiled, and where compiled code is not
used.

Compiled code fuses the work between matrix products. It is made for one shape of its input, so the
feed fills the micro-batches up to a few shapes (see xformer.data.capacity). Evaluation, whose
batches have many shapes, does not use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from xformer.data.batch import Batch
from xformer.data.errors import BadInput
from xformer.model.config import ModelConfig
from xformer.parallel.processes import Ranks, TrainingSystem
from xformer.tasks.task import Model

BACKEND = "inductor"
# the values of system.compile that compile the layers, and those that need CUDA graphs
LAYERS, GRAPHS = ("layers", "both"), ("graphs", "both")
# The largest number of programs of all modules together. There is one program for each kind of
# module (such as the embeddings, a layer, a frozen layer or the last layer) and each shape of a
# batch. A run that needs more programs ends with an error.
PROGRAMS = 256


def compile_mode(
    system: TrainingSystem, ranks: Ranks, config: ModelConfig, pays: Callable[[], bool]
) -> str:
    """`system.compile`, with "auto" replaced. `pays()` says whether a compiler is worth its time.
    Raises BadInput if the model or the device does not allow what the settings ask for."""
    asked, cnn = system.compile, config.architecture == "hilbert_cnn"
    if asked == "auto":
        if ranks.device.type != "cuda" or ranks.world_size > 1 or cnn:
            return "none"
        return "both" if pays() else "graphs"
    if asked != "none" and cnn:
        raise BadInput(
            f"system.compile={asked} needs a transformer: the batch norms of a Hilbert-CNN would "
            "see the filler of compiled batches; give system.compile=none"
        )
    if asked in GRAPHS and ranks.device.type != "cuda":
        raise BadInput(f"system.compile={asked} needs a GPU; give layers or none")
    return asked


def compile_parts(
    model: Model,
    what: str,
    ranks: Ranks,
    sample: Callable[[], Batch[Tensor]],
    precision: str,
) -> str:
    """Compile the embeddings and every layer of a model in place, if `what` is one of LAYERS.

    Layers of the same shape share compiled code. DistributedDataParallel can start to reduce
    gradients between two layers, because each is compiled separately. The code is tried with a
    micro-batch, `sample()`. Returns why compiling failed, in one line, or "". If it failed, the
    model runs without compiled code.
    """
    if what not in LAYERS:
        return ""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = PROGRAMS
    parts = [model.encoder.embeddings, *model.encoder.layers]
    for part in parts:
        part.compile(fullgraph=True, dynamic=False, backend=BACKEND)
    try:
        with ranks.autocast(precision):
            model(sample()).total.backward()
    except Exception as error:  # whatever a compiler, a driver or Triton raises
        for part in parts:
            # Module.compile has no public inverse, and a stance of torch.compiler would also stop
            # every other model of this process from being compiled.
            part._compiled_call_impl = None
        reason = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())[:200]
        return reason or type(error).__name__
    finally:
        model.zero_grad()
        torch.cuda.empty_cache()  # CUDA graphs compute on another stream, which cannot reuse it
    return ""


def not_compiled() -> AbstractContextManager[None]:
    """Within the block every module runs without its compiled code."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
