"""The class Checkpoint and its files. A checkpoint is an immutable value; tools take and return it.

CHECKPOINT/model.safetensors    the weights, under the model's own names
CHECKPOINT/config.json          the model's shape, its head, the history of operations
CHECKPOINT/tokenizer_meta.json  and the tokenizer's own files
CHECKPOINT/input/               with a mapping: the tokenizer of the raw input, and mapping.npy
CHECKPOINT/manifest.json        SHA-256 of every file, written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from xformer.config import Settings, validate
from xformer.data import tokenizers
from xformer.data.batch import CHUNK
from xformer.data.display import many
from xformer.data.errors import BadInput, typed
from xformer.data.files import (
    atomic_directory,
    file_checksum,
    installed,
    load_array,
    near,
    put_back,
    read_json,
    read_sums,
    replaceable,
    selected,
    what_is,
    write_json,
)
from xformer.data.memory import check_list
from xformer.data.tokenizers import Tokenizer
from xformer.model import hilbert
from xformer.model.config import NEWER, ModelConfig
from xformer.tasks.known import TASKS, task_of
from xformer.tasks.task import Head, Model, Task
from xformer.texts import Pooling, vectors_of

FORMAT = 1
STATE = ("state.json", "optimizer.safetensors")  # files that a run needs to continue
# settings that older files do not have
NEWER_OF_HEADS = ("smoothing", "class_weights", "scale", "layer")
HALF = (torch.float16, torch.bfloat16)  # weights of these types are converted to fp32 on reading
Distribution = Literal["normal", "truncated"]


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """Weights with everything that is needed to use them.

    `source` and `mapping` are set if the input is tokenized by another tokenizer, `source`, whose
    ids are mapped to the model's (see xformer.data.mapping).
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    head: Head | None = None
    history: tuple[dict[str, Any], ...] = ()
    source: Tokenizer | None = None
    mapping: np.ndarray | None = None

    def __repr__(self) -> str:
        head = None if self.head is None else self.head.kind
        size = sum(weight.numel() for weight in self.weights.values())
        shape = str(self.config.architecture)
        if shape == "transformer":
            shape += f", {many(self.config.layers, 'layer')} of {self.config.hidden}"
        return f"Checkpoint({shape}, {size:,} parameters, head {head})"

    @property
    def task(self) -> Task | None:
        """The task of the head, or None if there is no head."""
        return None if self.head is None else task_of(self.head)

    @property
    def max_tokens(self) -> int:
        """The length in tokens to which rows are truncated: as in the training of the head, but at
        most what the model accepts."""
        longest = self.config.max_positions
        return longest if self.head is None else min(self.head.max_tokens, longest)

    def model(self) -> Model:
        """The model with a float32 copy of these weights, on the CPU in evaluation mode.

        Raises BadInput if a weight is missing, unexpected or of the wrong shape.
        """
        return self._built(copy=True)

    def _built(self, copy: bool) -> Model:
        """The model. Without `copy` it shares the weights, so it must not be trained."""
        if self.task is not None:
            check_head(self.config, self.task)
        with torch.device("meta"):
            model = Model(self.config, self.task, parts_of(self.weights))
        check_weights(self.weights, model.state_dict(), "the checkpoint")
        weights = {k: v.to(torch.float32, copy=copy) for k, v in self.weights.items()}
        model.load_state_dict(weights, assign=True)
        return model.eval()

    def with_head(self, head: Head, seed: int = 0) -> Checkpoint:
        """This checkpoint with another head. Weights that both heads have, such as a pooler, are
        kept. A task head is always initialised anew, because equal labels may belong to another
        task.

        Raises BadInput if there is no such head, if it lacks the names of its classes or has one
        twice, if it has a metric or a number that is not allowed, or if the architecture does not
        support it.
        """
        task = task_of(head)
        if task.named_classes and not task.predicts_masked and not head.labels:
            raise BadInput(f"the head {head.kind} needs labels=, the names of its classes")
        if len(set(head.labels)) < len(head.labels):
            raise BadInput(f"labels={list(head.labels)}: a class is named twice")
        if not task.predicts_masked and head.metric not in (None, *task.metrics):
            raise BadInput(f"metric={head.metric!r} is none of {', '.join(task.metrics)}")
        if head.max_tokens < 3:
            raise BadInput(f"max_tokens={head.max_tokens}: a row has at least 3 tokens")
        if not head.scale[1] > 0:
            raise BadInput(f"scale={head.scale}: the second number must be above 0")
        check_head(self.config, task)
        kept = {k: v for k, v in self.weights.items() if not k.startswith("task_head")}
        with torch.device("meta"):
            wanted = Model(self.config, task).state_dict()
        weights = {
            name: kept[name] if name in kept else initialise(name, shape.shape, self.config, seed)
            for name, shape in wanted.items()
        }
        return replace(self, weights=weights, head=head)

    def with_weights(self, model: Model) -> Checkpoint:
        """This checkpoint with a copy of the weights of `model`, which your program has trained.

        The model may be wrapped by torch.compile, DataParallel or DistributedDataParallel. The
        history records that a program changed the weights. Raises BadInput if the names or shapes
        of the model's weights differ from the checkpoint's, or if a weight is not finite.
        """
        weights = {}
        for name, weight in model.state_dict().items():
            own_name = name.replace("_orig_mod.", "").removeprefix("module.")
            weights[own_name] = weight.detach().cpu().clone()
            if not torch.isfinite(weight).all():
                raise BadInput(f"the weight {own_name} is not finite: the training diverged")
        check_weights(weights, self.weights, "the model")
        return replace(self, weights=weights, history=(*self.history, {"op": "with_weights"}))

    def encode(
        self,
        texts: Iterable[str],
        *,
        pooling: Pooling = "mean",
        normalize: bool = False,
        max_tokens: int | None = None,
        batch_tokens: int = CHUNK,
        device: str | torch.device | None = None,
    ) -> np.ndarray:
        """The vectors of texts, (N, C) float32; or of one text, (C,).

        `vectors_of` of xformer.texts explains the arguments. The vectors are computed on `device`,
        by default on a GPU if there is one. Every call builds the model anew. To encode many small
        lists, build the model once with `model()`, and call `vectors_of`. Raises BadInput if an
        argument is not allowed.
        """
        if not isinstance(texts, Iterable):
            raise BadInput(f"encode takes a text or a list of texts, not {texts!r}")
        if not isinstance(texts, str):
            check_list(texts, "texts")
        given = [texts] if isinstance(texts, str) else list(texts)
        on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        vectors = vectors_of(
            self._built(copy=False).to(on),
            self.tokenizer,
            given,
            pooling=pooling,
            normalize=normalize,
            max_tokens=max_tokens,
            batch_tokens=batch_tokens,
            source=self.source,
            mapping=self.mapping,
        )
        return vectors[0] if isinstance(texts, str) else vectors


def changed_weights(before: Checkpoint, after: Checkpoint) -> tuple[list[str], list[str]]:
    """Two lists of names: the weights of `after` that are new, and the weights of `before` that
    `after` has not kept."""
    new = [name for name, w in after.weights.items() if w is not before.weights.get(name)]
    return new, [name for name, w in before.weights.items() if w is not after.weights.get(name)]


def check_head(config: ModelConfig, task: Task | type[Task]) -> None:
    """Raise BadInput if the architecture does not support the task's head, or lacks the layer that
    a probe reads, or if the task has no probe."""
    layer = task.head.layer if isinstance(task, Task) else None
    if layer is not None and not task.takes_probe:
        able = ", ".join(name for name, other in TASKS.items() if other.takes_probe)
        raise BadInput(f"probe.layer={layer} needs one of the heads {able}")
    if layer is not None and config.architecture != "transformer":
        raise BadInput(
            f"probe.layer={layer}: model.architecture={config.architecture} has no layers to probe"
        )
    if layer is not None and not 0 <= layer <= config.layers:
        raise BadInput(
            f"probe.layer={layer}: the model has {config.layers} layer{'s' * (config.layers > 1)}; "
            f"give 0 (the embeddings) to {config.layers}"
        )
    if config.architecture == "hilbert_cnn" and not task.reads_pooled:
        raise BadInput(
            f"head={task.name}: model.architecture=hilbert_cnn predicts only classes and scores; "
            "give head=classify or head=regress"
        )


def parts_of(weights: Collection[str]) -> list[str]:
    """Which parts the weights have, for the argument `parts` of `Model`."""
    return [p for p in ("pooler", "pair_head", "contact_head") if f"{p}.weight" in weights]


def check_weights(given: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    """Raise BadInput that names the first weight that is missing or has the wrong shape, or the
    weights that are unexpected."""
    for name, tensor in wanted.items():
        if name not in given:
            raise BadInput(f"{where} lacks the weight {name}, {tuple(tensor.shape)}")
        if given[name].shape != tensor.shape:
            has, needs = tuple(given[name].shape), tuple(tensor.shape)
            raise BadInput(f"{where}: the weight {name} is {has}, but its config needs {needs}")
    left = sorted(set(given) - set(wanted))
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
    """Initial values of a weight tensor: norms and running variances 1, biases and running means 0,
    all others N(0, initializer_range^2), or N(0, hilbert.initial_std(shape)^2) for a HilbertCNN.

    "normal" follows Kao & Lee 2021, section 3.1; "truncated" is the same within two standard
    deviations (Devlin et al. 2019; Huang et al. 2021, section 4.4). Each tensor has its own
    generator, seeded by (seed, name), so its values do not depend on the other tensors. Without a
    `purpose` they are the initial values of a from-scratch model with this seed. Each purpose gives
    different values.
    """
    module, _, kind = name.rpartition(".")
    if module.endswith("norm"):
        value = float(kind in ("weight", "running_var"))
        return torch.full(shape, value, dtype=torch.float32)
    if kind == "bias":
        return torch.zeros(shape, dtype=torch.float32)
    own = number(seed, purpose, name) if purpose else number(seed, name)
    generator = torch.Generator().manual_seed(own)
    cnn = config.architecture == "hilbert_cnn"
    spread = hilbert.initial_std(shape) if cnn else config.initializer_range
    if distribution == "truncated":
        return truncated_normal(shape, generator).mul_(spread)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, spread, generator=generator)


def number(*parts: object) -> int:
    """A 56-bit seed: a hash of the parts."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def truncated_normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Exact samples of N(0, 1) within [-2, 2]: values outside (4.6 %) are drawn again.

    This is six times as fast as torch.nn.init.trunc_normal_, which inverts the error function.
    """
    values = torch.empty(shape, dtype=torch.float32).normal_(generator=generator)
    flat = values.view(-1)
    outside = (flat.abs() > 2).nonzero().squeeze(1)
    while len(outside):
        again = torch.empty(len(outside), dtype=torch.float32).normal_(generator=generator)
        flat[outside] = again
        outside = outside[again.abs() > 2]
    return values


def fresh(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> Checkpoint:
    """A newly initialised model without a head. If vocab_size is 0, the model gets the vocabulary
    size of the tokenizer. Raises BadInput if vocab_size is smaller than that."""
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
        raise BadInput(
            f"model.vocab_size={config.vocab_size} is below the tokenizer's {pieces} pieces; "
            "leave it out"
        )


# ---------------------------------------------------------------------------------- on disk


def save(
    checkpoint: Checkpoint,
    path: str | Path,
    overwrite: bool = False,
    optimizer: dict[str, Tensor] | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint as a directory, which appears only when it is complete. A run also saves
    `optimizer` and `state`, because it needs them to continue.

    Raises BadInput if `path` exists; with `overwrite` only if it holds something other than a
    checkpoint.
    """
    if not isinstance(checkpoint, Checkpoint):
        given = type(checkpoint).__name__
        raise BadInput(f"save takes a checkpoint, not a {given}; START.with_weights(MODEL) is one")
    path = Path(path)
    # a run also replaces a damaged checkpoint of its own
    of_run = path.parent.name in ("checkpoints", "trajectory") and step_of(path) is not None
    if overwrite and not of_run and not replaceable(path, "manifest.json", "model.safetensors"):
        raise BadInput(f"{path} is not a checkpoint, so it is not overwritten; give another path")
    with atomic_directory(path, overwrite) as directory:
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
        model, head = checkpoint.config.model_dump(), checkpoint.head
        config = {
            "format": FORMAT,
            "model": _record(model, ModelConfig().model_dump(), NEWER),
            "head": head and _record(asdict(head), asdict(Head(head.kind)), NEWER_OF_HEADS),
            "history": list(checkpoint.history),
        }
        write_json(directory / "config.json", config)
        files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
        sums = {str(file.relative_to(directory)): file_checksum(file) for file in files}
        write_json(directory / "manifest.json", {"sha256": sums})


def _record(values: dict[str, Any], defaults: dict[str, Any], newer: Collection[str]) -> Any:
    """Settings as config.json stores them. Those that older versions do not know, `newer`, are
    stored only if they are not the defaults."""
    return {k: v for k, v in values.items() if k not in newer or v != defaults[k]}


def size(checkpoint: Checkpoint) -> int:
    """The approximate number of bytes that `save` writes for a checkpoint with float32 weights,
    without the state of a run."""
    files = [*checkpoint.tokenizer.files().values()]
    if checkpoint.source is not None and checkpoint.mapping is not None:
        files += [*checkpoint.source.files().values(), checkpoint.mapping.tobytes()]
    header = 120 * len(checkpoint.weights)  # names, shapes and offsets
    weights = 4 * sum(weight.numel() for weight in checkpoint.weights.values())
    return weights + header + sum(map(len, files))


def forget_state(path: str | Path) -> None:
    """Delete the state of a run from its checkpoint. The manifest is changed before the files are
    deleted, so that it never lists a missing file."""
    path = Path(path)
    sums = _sums(path)
    left = {name: value for name, value in sums.items() if name not in STATE}
    write_json(path / "manifest.json", {"sha256": left})
    for name in STATE:
        (path / name).unlink(missing_ok=True)


def content_key(path: str | Path) -> str:
    """SHA-256 of a checkpoint's content, without the state of its run."""
    sums = sorted((name, value) for name, value in _sums(Path(path)).items() if name not in STATE)
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def save_tensors(tensors: dict[str, Tensor], path: str | Path) -> None:
    """Write a safetensors file. A tensor with two names is written twice."""
    path = Path(path)
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # the library refuses tensors that share memory, so copy them
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    path.touch()
    mode = path.stat().st_mode
    save_file(separate, path, metadata={"format": "pt"})
    with suppress(OSError):  # some file systems, such as FAT, have no modes
        path.chmod(mode)  # the library restricts access to the file's owner


def resolve(path: str | Path) -> Path:
    """The checkpoint directory for a path. For a finished run, this is the checkpoint that the run
    selected. A path that does not exist can name a checkpoint that comes with the package,
    such as micro/english. Raises BadInput if there is no checkpoint."""
    given, path = Path(path), installed(path)
    door = typed("python -m xformer.convert from-hf")
    put_back(path)
    if (path / "manifest.json").is_file():
        return path
    if (path / "result.json").is_file():
        return selected(path)
    if (path / "checkpoints").is_dir():
        steps = ", ".join(place.name for place in by_step(path / "checkpoints").values())
        if not steps:
            raise BadInput(
                f"the run {path} is not finished and has no checkpoint yet; finish it, or wait for "
                "its first checkpoint"
            )
        raise BadInput(f"the run {path} is not finished; name one of its checkpoints: {steps}")
    if not path.exists():
        where = " here or in the package" if given != path else ""
        hint = near(given)
        may_be_on_the_hub = given.parent == Path() or not given.parent.is_dir()
        if not hint and may_be_on_the_hub:
            hint = f"; a model of Hugging Face is imported by {door}"
        raise BadInput(f"the checkpoint {given} does not exist{where}{hint}")
    several = [manifest.parent.name for manifest in path.glob("step_*/manifest.json")]
    if several:  # such as a run's trajectory
        names = ", ".join(sorted(several, key=lambda name: (len(name), name)))
        raise BadInput(f"{path} holds several checkpoints; name one of them: {names}")
    if what := what_is(path):
        remedy = "give the directory of a checkpoint or of a finished run"
        raise BadInput(f"{path} is not a checkpoint but {what}: {remedy}")
    foreign = (path / "config.json").is_file()
    hint = f"; import it with {door}" if foreign else ""
    raise BadInput(f"{path} is not a checkpoint (no manifest.json){hint}")


def step_of(path: str | Path) -> int | None:
    """The step in the name of a run's checkpoint; None if it is not the name of one."""
    name = Path(path).name
    step = name.removeprefix("step_")
    return int(step) if step.isdecimal() and name == f"step_{int(step)}" else None


def by_step(folder: str | Path) -> dict[int, Path]:
    """A run's checkpoints in a directory, in the order of their steps. Other directories, such as a
    copy of a checkpoint, are left out."""
    steps = ((step_of(place), place) for place in Path(folder).glob("step_*") if place.is_dir())
    return dict(sorted((step, place) for step, place in steps if step is not None))


def verify(path: str | Path) -> None:
    """Raise BadInput that names the first file of a checkpoint that is missing or has changed."""
    path = Path(path)
    sums = _sums(path)
    for name in sums:
        if not (path / name).is_file():
            raise BadInput(
                f"the checkpoint is incomplete: its manifest lists {path / name}, which is missing"
            )
    with ThreadPoolExecutor() as pool:
        checksums = pool.map(lambda name: file_checksum(path / name), sums)
        for (name, expected), actual in zip(sums.items(), checksums, strict=True):
            if actual != expected:
                raise BadInput(
                    f"{path / name} is damaged: its checksum differs from the manifest's"
                )


def _sums(path: Path) -> dict[str, Any]:
    """{file: SHA-256} from a checkpoint's manifest."""
    return read_sums(path / "manifest.json", "model.safetensors", "config.json")


def load(path: str | Path, verified: bool = False) -> Checkpoint:
    """The checkpoint at `path` (see `resolve`). If `verified` is true, its checksums are not
    computed again.

    The weights are memory-mapped: they use no memory until they are read, and changing them in
    place does not change the file. Raises BadInput if the checkpoint is absent, incomplete or
    damaged.
    """
    path = resolve(path)
    if not verified:
        verify(path)
    config, head, history = _read_config(path / "config.json")
    source = mapping = None
    if (path / "input").is_dir():
        source = tokenizers.load_tokenizer(path / "input")
        mapping = load_array(path / "input/mapping.npy", mapped=False)
    weights = {
        name: weight.float() if weight.dtype in HALF else weight
        for name, weight in load_tensors(path / "model.safetensors").items()
    }
    tokenizer = tokenizers.load_tokenizer(path)
    return Checkpoint(config, weights, tokenizer, head, history, source, mapping)


class _Shape(Settings):
    """The settings in config.json."""

    model: ModelConfig


def _read_config(path: Path) -> tuple[ModelConfig, Head | None, tuple[dict[str, Any], ...]]:
    """The settings of the model, the head and the history in a config.json. Raises BadInput if it
    is of another version or damaged."""
    meta = read_json(path)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise BadInput(f"{path} is not of format {FORMAT}, which this version requires")
    try:
        config = validate(_Shape, {"model": meta["model"]}).model
        head = _head(meta["head"]) if meta["head"] else None
        history = meta["history"]
    except BadInput as error:
        why = error.lines[0].partition("; did you mean")[0].partition("; --help")[0]
        newer = ", or a newer version wrote it" if why.startswith("unknown key") else ""
        raise BadInput(f"{path} is damaged{newer}: {why}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is damaged: {error!r}") from None
    if not isinstance(history, list) or not all(isinstance(record, dict) for record in history):
        raise BadInput(f"{path} is damaged: its history is not a list of operations")
    if head is not None and head.kind not in TASKS:
        raise BadInput(f"{path}: this version has no head {head.kind!r}, only {', '.join(TASKS)}")
    return config, head, tuple(history)


def _head(values: dict[str, Any]) -> Head:
    """The head with these values, which were read from JSON, so that tuples became lists."""
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    if unknown := [name for name in given if name not in {field.name for field in fields(Head)}]:
        raise BadInput(f"unknown key head.{unknown[0]}")
    return Head(**given)


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """The memory-mapped tensors of a safetensors file. Raises BadInput if it is absent or
    damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except safetensors.SafetensorError as error:
        raise BadInput(f"{path} is not a complete safetensors file: {error}") from None
    except OSError as error:  # a directory, for example
        raise BadInput(f"{path} cannot be read: {error}") from None
