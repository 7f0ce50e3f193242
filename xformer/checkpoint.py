"""The Checkpoint: one value that every tool takes and returns, and how it lies on disk.

CHECKPOINT/model.safetensors    the weights, under the bare model's names
CHECKPOINT/config.json          the model's shape, its head, the history of operations
CHECKPOINT/tokenizer_meta.json  and the tokenizer's own files
CHECKPOINT/input/               only with a mapping: the tokenizer of the raw input, mapping.npy
CHECKPOINT/manifest.json        SHA-256 of every file, written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from xformer.data import tokenizers
from xformer.data.errors import BadInput, typed
from xformer.data.files import (
    atomic_directory,
    file_checksum,
    installed,
    load_array,
    put_back,
    read_json,
    read_own_json,
    read_run_json,
    refuse_existing,
    write_json,
)
from xformer.data.tokenizers import Tokenizer
from xformer.model import hilbert
from xformer.model.config import ModelConfig
from xformer.tasks.known import TASKS, task_of
from xformer.tasks.task import Head, Model, Task

FORMAT = 1
STATE = ("state.json", "optimizer.safetensors")  # of a run, beside the checkpoint proper
HALF = (torch.float16, torch.bfloat16)  # widened to fp32 when they are read
Distribution = Literal["normal", "truncated"]


@dataclass(frozen=True)
class Checkpoint:
    """Weights with all that is needed to use them.

    `source` and `mapping` are set where the raw input has a tokenizer of its own whose ids are
    mapped to the model's (see xformer.data.mapping).
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    head: Head | None = None
    history: tuple[dict[str, Any], ...] = ()
    source: Tokenizer | None = None
    mapping: np.ndarray | None = None

    @property
    def task(self) -> Task | None:
        """What the head is trained for; None without a head."""
        return task_of(self.head)

    def model(self) -> Model:
        """The model with these weights (copied, float32), on the CPU in evaluation mode.

        Raises BadInput if a weight is missing, left over or of another shape.
        """
        check_weights(self.weights, self._empty_model().state_dict(), "the checkpoint")
        with torch.device("meta"):
            model = self._empty_model()
        weights = {k: v.to(torch.float32, copy=True) for k, v in self.weights.items()}
        model.load_state_dict(weights, assign=True)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model.eval()

    def _empty_model(self) -> Model:
        with torch.device("meta"):
            return Model(self.config, self.task, parts_of(self.weights))

    def with_head(self, head: Head, seed: int) -> tuple[Checkpoint, list[str], list[str]]:
        """This checkpoint with another head: what fits is kept, the rest is fresh or dropped.

        A task head is always fresh: labels of equal names may belong to another task.

        Returns the checkpoint, the names of the fresh weights and those of the dropped ones. Raises
        BadInput for a head that the architecture cannot bear.
        """
        task = task_of(head)
        assert task is not None
        check_head(self.config, task)
        kept = {k: v for k, v in self.weights.items() if not k.startswith("task_head")}
        with torch.device("meta"):
            wanted = Model(self.config, task).state_dict()
        kept = {k: v for k, v in kept.items() if k in wanted}
        fresh = [name for name in wanted if name not in kept]
        dropped = [name for name in self.weights if name not in kept]
        weights = {
            name: kept[name] if name in kept else initialise(name, shape.shape, self.config, seed)
            for name, shape in wanted.items()
        }
        return replace(self, weights=weights, head=head), fresh, dropped


def check_head(config: ModelConfig, task: Task | type[Task]) -> None:
    """Raise BadInput for a task whose head the architecture cannot bear."""
    if config.architecture == "hilbert_cnn" and not task.reads_pooled:
        raise BadInput(
            f"head={task.name}: model.architecture=hilbert_cnn predicts classes and scores"
        )


def parts_of(weights: Collection[str]) -> list[str]:
    """Which heads beside the one that trains these weights hold."""
    return [part for part in ("pooler", "pair_head") if f"{part}.weight" in weights]


def check_weights(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    """Raise BadInput naming the first weight that is missing, left over or of another shape."""
    for name, tensor in wanted.items():
        if name not in found:
            raise BadInput(f"{where} lacks the weight {name}, {tuple(tensor.shape)}")
        if found[name].shape != tensor.shape:
            has, needs = tuple(found[name].shape), tuple(tensor.shape)
            raise BadInput(f"{where}: the weight {name} is {has} where its config wants {needs}")
    left = sorted(set(found) - set(wanted))
    if left:
        raise BadInput(f"{where} has weights that its config does not know: {', '.join(left[:4])}")


def initialise(
    name: str,
    shape: torch.Size,
    config: ModelConfig,
    seed: int,
    distribution: Distribution = "normal",
    purpose: str = "",
) -> Tensor:
    """Fresh values of one weight: norms and running variances 1, biases and running means 0, all
    else N(0, initializer_range^2), of a HilbertCNN N(0, spread^2).

    "normal" is Kao & Lee 2021, appendix A; "truncated" is the same within two standard deviations
    (Devlin et al. 2019; Huang et al. 2021, section 4.4). Each weight has a generator of its own,
    seeded by (seed, name), so that its values do not depend on what else is initialised. A
    `purpose` gives others: without it a seed gives what a model from scratch began with.
    """
    *_, owner, kind = ("", *name.split("."))
    if owner.endswith("norm"):
        return torch.ones(shape) if kind in ("weight", "running_var") else torch.zeros(shape)
    if kind == "bias":
        return torch.zeros(shape)
    own = number(seed, purpose, name) if purpose else number(seed, name)
    generator = torch.Generator().manual_seed(own)
    cnn = config.architecture == "hilbert_cnn"
    spread = hilbert.spread(shape) if cnn else config.initializer_range
    if distribution == "truncated":
        return truncated_normal(shape, generator).mul_(spread)
    return torch.empty(shape).normal_(0.0, spread, generator=generator)


def number(*parts: object) -> int:
    """56 bits out of what the parts spell: a seed that no other parts have."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def truncated_normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """N(0, 1) within [-2, 2], exactly: what falls outside (4.6 %) is drawn again.

    Six times as fast as torch.nn.init.trunc_normal_, which goes through the inverse error function.
    """
    values = torch.empty(shape).normal_(generator=generator)
    flat = values.view(-1)
    outside = (flat.abs() > 2).nonzero().squeeze(1)
    while len(outside):
        again = torch.empty(len(outside)).normal_(generator=generator)
        flat[outside] = again
        outside = outside[again.abs() > 2]
    return values


def fresh(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> Checkpoint:
    """A model from scratch, without a head. Raises BadInput if the vocabulary does not fit."""
    if config.vocab_size == 0:
        config = config.model_copy(update={"vocab_size": len(tokenizer)})
    check_vocabulary(config, len(tokenizer))
    if config.architecture == "hilbert_cnn" and not config.letters:
        config = config.model_copy(update={"letters": hilbert.letters_of(tokenizer)})
    with torch.device("meta"):
        shapes = {name: w.shape for name, w in Model(config).state_dict().items()}
    weights = {name: initialise(name, shape, config, seed) for name, shape in shapes.items()}
    return Checkpoint(config, weights, tokenizer, history=({"op": "fresh", "seed": seed},))


def check_vocabulary(config: ModelConfig, pieces: int) -> None:
    """Raise BadInput if a fresh model has fewer embeddings than its tokenizer has pieces."""
    if 0 < config.vocab_size < pieces:
        raise BadInput(f"model.vocab_size={config.vocab_size} is below the tokenizer's {pieces}")


# ---------------------------------------------------------------------------------- on disk


def save(
    checkpoint: Checkpoint,
    path: str | Path,
    overwrite: bool = False,
    optimizer: dict[str, Tensor] | None = None,
    state: dict[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint as a directory that is whole or absent; `optimizer` and `state` are what
    a run needs to go on. Raises BadInput if `path` exists, unless `overwrite`, and whatever
    `check`, called last, raises: then nothing is left."""
    with atomic_directory(Path(path), overwrite) as directory:
        save_tensors(checkpoint.weights, directory / "model.safetensors")
        if optimizer is not None:
            save_tensors(optimizer, directory / "optimizer.safetensors")
        checkpoint.tokenizer.save(directory)
        if checkpoint.source is not None and checkpoint.mapping is not None:
            (directory / "input").mkdir()
            checkpoint.source.save(directory / "input")
            np.save(directory / "input/mapping.npy", checkpoint.mapping)
        if state is not None:
            write_json(directory / "state.json", state)
        config = {
            "format": FORMAT,
            "model": checkpoint.config.model_dump(),
            "head": _head_record(checkpoint.head) if checkpoint.head else None,
            "history": list(checkpoint.history),
        }
        write_json(directory / "config.json", config)
        files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
        sums = {str(file.relative_to(directory)): file_checksum(file) for file in files}
        write_json(directory / "manifest.json", {"sha256": sums})
        check()


def _head_record(head: Head) -> dict[str, Any]:
    """A head as config.json holds it: without what older versions do not know, unless it is set."""
    newer = [name for name in ("smoothing", "class_weights") if not getattr(head, name)]
    return {name: value for name, value in asdict(head).items() if name not in newer}


def size(checkpoint: Checkpoint) -> int:
    """About how many bytes `save` writes of a checkpoint whose weights are float32, without what a
    run needs to go on."""
    files = [*checkpoint.tokenizer.files().values()]
    if checkpoint.source is not None and checkpoint.mapping is not None:
        files += [*checkpoint.source.files().values(), checkpoint.mapping.tobytes()]
    header = 120 * len(checkpoint.weights)  # names, shapes and places
    weights = 4 * sum(weight.numel() for weight in checkpoint.weights.values())
    return weights + header + sum(map(len, files))


def forget_state(path: Path) -> None:
    """Delete of a checkpoint what its run needs to go on: the manifest names it no longer before it
    goes."""
    sums = _sums(path)
    left = {name: value for name, value in sums.items() if name not in STATE}
    write_json(path / "manifest.json", {"sha256": left})
    for name in STATE:
        (path / name).unlink(missing_ok=True)


def content_key(path: Path) -> str:
    """SHA-256 of what a checkpoint is to others: all but its run's state."""
    sums = sorted((name, its) for name, its in _sums(path).items() if name not in STATE)
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. A tensor that has two names is written twice."""
    found: dict[str, Tensor] = {}
    held: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # the library refuses tensors that share memory
        found[name] = tensor.clone() if tensor.data_ptr() in held else tensor
        held.add(tensor.data_ptr())
    path.touch()
    mode = path.stat().st_mode
    save_file(found, path, metadata={"format": "pt"})
    path.chmod(mode)  # the library makes files that only their owner can read


def check_output(out: Path, overwrite: bool, *read: Path) -> None:
    """Raise BadInput unless `out` is free, or a checkpoint that may be overwritten and holds
    nothing of what is read."""
    refuse_existing(out, overwrite)
    if out.exists() and not (out / "manifest.json").is_file():
        raise BadInput(f"{out} is no checkpoint: it is not overwritten")
    held = next((path for path in read if path.resolve().is_relative_to(out.resolve())), None)
    if held is not None:
        raise BadInput(f"{out} contains the input {held}: give another output")


def resolve(path: str | Path) -> Path:
    """The checkpoint a path means: itself, the one a finished run selected, or, where there is no
    such path, one that is installed with the package, such as micro/english."""
    given, path = Path(path), installed(path)
    put_back(path)
    if (path / "manifest.json").is_file():
        return path
    if (path / "result.json").is_file():
        result = read_run_json(path / "result.json")
        if not isinstance(result, dict) or not isinstance(result.get("selected"), str):
            raise BadInput(f"{path / 'result.json'} is damaged: it names no selected checkpoint")
        return path / result["selected"]
    if (path / "checkpoints").is_dir():
        steps = ", ".join(sorted(p.name for p in (path / "checkpoints").glob("step_*")))
        if not steps:
            raise BadInput(
                f"the run {path} is not finished and has no checkpoint yet; finish it, or wait for "
                "its first checkpoint"
            )
        raise BadInput(f"the run {path} is not finished; name one of its checkpoints: {steps}")
    if not path.is_dir():
        where = ", neither here nor in the package" if given != path else ""
        raise BadInput(f"the checkpoint {given} does not exist{where}")
    several = [manifest.parent.name for manifest in path.glob("step_*/manifest.json")]
    if several:  # a run's trajectory, say
        names = ", ".join(sorted(several, key=lambda name: (len(name), name)))
        raise BadInput(f"{path} holds several checkpoints; name one of them: {names}")
    hint = (
        typed("; import it with python -m xformer.convert from-hf")
        if (path / "config.json").is_file()
        else ""
    )
    raise BadInput(f"{path} is not a checkpoint (no manifest.json){hint}")


def verify(path: Path) -> None:
    """Raise BadInput naming the first file of a checkpoint that is not as it was written."""
    sums = _sums(path)
    for name in sums:
        if not (path / name).is_file():
            raise BadInput(f"{path / name} is missing, which the manifest lists: it is incomplete")
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: file_checksum(path / name), sums)
        for (name, expected), actual in zip(sums.items(), found, strict=True):
            if actual != expected:
                raise BadInput(f"{path / name} is damaged: its checksum is not the manifest's")


def _sums(path: Path) -> dict[str, Any]:
    """The checksums in a checkpoint's manifest, by file."""
    manifest = read_own_json(path / "manifest.json")
    sums = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(sums, dict) or not {"model.safetensors", "config.json"} <= set(sums):
        raise BadInput(f"{path / 'manifest.json'} is damaged: it lists no checksums")
    return sums


@contextmanager
def opened(path: Path) -> Iterator[tuple[Checkpoint, Callable[[], None]]]:
    """A checkpoint as `load` gives it, before its checksums are taken: that goes on meanwhile, and
    the function beside it waits for the end and raises BadInput if the checkpoint is damaged."""
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(verify, path)
        try:
            yield _read(path), check.result
        finally:
            check.result()  # of all that may be wrong, damage is what is said


def load(path: str | Path, verified: bool = False) -> Checkpoint:
    """The checkpoint in a directory, or the one a finished run selected. One that is `verified` is
    not verified again.

    The weights are mapped from the file: one that is not touched takes no memory, and one that is
    changed in place stays as it is on disk. Raises BadInput if the checkpoint is absent,
    incomplete, damaged, or its config contradicts its weights.
    """
    path = resolve(path)
    if verified:
        return _read(path)
    with opened(path) as (checkpoint, _):
        return checkpoint


def _read(path: Path) -> Checkpoint:
    meta = read_json(path / "config.json")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise BadInput(f"{path / 'config.json'} is not of format {FORMAT}")
    try:
        config = ModelConfig(**meta["model"])
        head = Head(**meta["head"]) if meta["head"] else None
        history = tuple(meta["history"])
    except (KeyError, TypeError, ValidationError) as error:
        raise BadInput(f"{path / 'config.json'} is damaged: {error!r}") from None
    if head is not None and head.kind not in TASKS:
        raise BadInput(f"{path / 'config.json'}: head {head.kind!r} is none of {', '.join(TASKS)}")
    if head is not None:
        weights_of_classes = tuple(head.class_weights)
        head = replace(head, labels=tuple(head.labels), class_weights=weights_of_classes)
    source = mapping = None
    if (path / "input").is_dir():
        source = tokenizers.load(path / "input")
        mapping = load_array(path / "input/mapping.npy", mapped=False)
    weights = {
        name: weight.float() if weight.dtype in HALF else weight
        for name, weight in load_tensors(path / "model.safetensors").items()
    }
    return Checkpoint(config, weights, tokenizers.load(path), head, history, source, mapping)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped from it. Raises BadInput if it is absent or
    damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except safetensors.SafetensorError as error:
        raise BadInput(f"{path} is not a whole safetensors file: {error}") from None
    except OSError as error:  # a directory, say
        raise BadInput(f"{path} cannot be read: {error}") from None
