"""Checkpoints of Hugging Face, in and out: BERT, RoBERTa and XLM-RoBERTa, ALBERT, DistilBERT (the
names are in xformer/convert/names.py)."""

from __future__ import annotations

import errno
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from xformer.checkpoint import Checkpoint, check_weights, load_tensors, parts_of, save_tensors
from xformer.convert.names import FAMILIES, Family, Table, expand
from xformer.data import published
from xformer.data.errors import BadInput
from xformer.data.files import atomic_directory, file_checksum, put_back, read_json, write_json
from xformer.data.tokenizers import XLM_ROBERTA
from xformer.model.config import ModelConfig
from xformer.tasks.choice import Choice
from xformer.tasks.classify import Classify
from xformer.tasks.known import task_of
from xformer.tasks.regress import Regress
from xformer.tasks.tag import Tag
from xformer.tasks.task import Head, Model, Task

BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# of sentence-transformers: the modules without weights, and what describes them
MODULE = re.compile(r"\.(Transformer|Pooling|Normalize)$")
SENTENCE = ("config_sentence_transformers.json", "sentence_bert_config.json")


@dataclass(frozen=True)
class Imported:
    """A checkpoint, and the account of the source's tensors."""

    checkpoint: Checkpoint
    family: Family
    taken: int
    tied: list[str]  # copies of other tensors, checked equal
    left: list[str]  # what the source has and we have no place for
    lacking: list[str]  # heads that the source lacks


# ------------------------------------------------------------------------------------- in


def from_hf(directory: Path) -> Imported:
    """Read a Hugging Face directory: config.json, weights, tokenizer.

    Weights come from model.safetensors, else pytorch_model.bin (tensors only: a pickle that asks
    for anything else is refused), whole or in the shards that their index names. Raises BadInput
    for an unknown architecture, a missing tensor, one of another shape or type, NaN, or a
    vocabulary that does not fit the embeddings.
    """
    put_back(directory)
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory; give one with config.json and weights")
    family, config, meta = _config(directory)
    files, source = _tensors(directory)
    file = files[0]
    names = [_modern(name, family) for name in source]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"{file} holds {twice} twice, under an old name and a new one")
    source = dict(zip(names, source.values(), strict=True))
    tied = _untie(source, family, file)
    head, table, lacking = _heads(source, meta, config, family)
    if config.stored_layers > len(source):
        layers = config.stored_layers
        raise BadInput(
            f"{file} holds {len(source)} tensors: too few for the config's {layers} layers"
        )
    wanted = expand(family.encoder | table, config.stored_layers)
    weights, used = _take(wanted, source, file)
    left = sorted(n for n in source if n not in used and not BUFFERS.fullmatch(n))
    beyond = _layer_names(family)
    if extra := next((name for name in left if beyond.match(name)), None):
        raise BadInput(
            f"{file} holds {extra}, beyond the {config.layers} layers that config.json knows"
        )
    with torch.device("meta"):
        shape = Model(config, task_of(head), parts_of(weights)).state_dict()
    check_weights(weights, shape, str(file))
    tokenizer = published.import_tokenizer(directory)
    if len(tokenizer) > config.vocab_size:
        raise BadInput(
            f"{directory}: the vocabulary has {len(tokenizer)} pieces, "
            f"the embeddings only {config.vocab_size}"
        )
    modules, foreign = _sentence(directory)
    record = {
        "op": "from-hf",
        "family": family.name,
        "file": file.name,
        "sha256": file_checksum(file),
        **_types(source, used),
    }
    record |= {"sentence": modules} if modules else {}
    checkpoint = Checkpoint(config, weights, tokenizer, head, (record,))
    return Imported(checkpoint, family, len(used) + len(tied), tied, left + foreign, lacking)


def _sentence(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Of a directory of sentence-transformers, how hidden states become a sentence's vector: the
    files that say so, by name, and the modules that have weights of their own (then no files)."""
    if not (directory / "modules.json").is_file():
        return {}, []
    modules = read_json(directory / "modules.json")
    try:
        foreign = [f"the module {m['type']}" for m in modules if not MODULE.search(m["type"])]
        places = [str(m["path"]) for m in modules]
    except (KeyError, TypeError) as error:
        raise BadInput(f"{directory / 'modules.json'} is no list of modules: {error!r}") from None
    if foreign or any(Path(place).name != place for place in places if place):
        return {}, foreign
    names = ["modules.json", *SENTENCE, *(f"{place}/config.json" for place in places if place)]
    return {n: read_json(directory / n) for n in names if (directory / n).is_file()}, []


def _types(source: dict[str, Tensor], used: Iterable[str]) -> dict[str, Any]:
    """For the history: the type that most tensors have, and those of the others by name."""
    types = {name: str(source[name].dtype).removeprefix("torch.") for name in sorted(used)}
    common = Counter(types.values()).most_common(1)[0][0]
    others = {name: dtype for name, dtype in types.items() if dtype != common}
    return {"dtype": common} | ({"other_dtypes": others} if others else {})


def _layer_names(family: Family) -> re.Pattern[str]:
    """What the tensors of any layer are called."""
    starts = {
        re.escape(names[0].split("{}")[0]) for names in family.encoder.values() if "{}" in names[0]
    }
    return re.compile(rf"(?:{'|'.join(sorted(starts))})\d+\.")


def shape(directory: Path) -> ModelConfig:
    """The shape of the model in a Hugging Face directory, by its config.json. Raises BadInput
    where there is none, or one that is not known."""
    return _config(directory)[1]


def _config(directory: Path) -> tuple[Family, ModelConfig, dict[str, Any]]:
    file = directory / "config.json"
    meta = read_json(file)
    kind = meta.get("model_type") if isinstance(meta, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadInput(f"{file}: model_type {kind!r} is not known; {known} are")
    family = FAMILIES[kind]
    if meta.get("position_embedding_type", "absolute") != "absolute" or meta.get("is_decoder"):
        raise BadInput(f"{file}: only encoders with absolute positions are known")
    if meta.get("problem_type") == "multi_label_classification":
        raise BadInput(f"{file}: several labels at once (problem_type) are not known, one class is")
    if meta.get("num_hidden_groups", 1) != 1 or meta.get("inner_group_num", 1) != 1:
        raise BadInput(f"{file}: only ALBERTs with one group of one layer are known")
    values = dict(family.defaults)
    for ours, theirs in family.config.items():
        if theirs in meta:
            values[ours] = meta[theirs]
        elif ours not in values:
            raise BadInput(f"{file} is not of the family {family.name}: no {theirs!r}")
    if str(values["activation"]) not in ACTIVATIONS:
        name, found = family.config["activation"], values["activation"]
        raise BadInput(f"{file}: {name} {found!r} is none of {', '.join(ACTIVATIONS)}")
    values["activation"] = ACTIVATIONS[str(values["activation"])]
    try:
        form = family.name.removeprefix("xlm-")
        if form == "roberta":  # rows of positions before the first are the padding's
            pad = meta.get("pad_token_id", 1)
            if not isinstance(pad, int) or pad < 0:
                raise BadInput(
                    f"{file}: pad_token_id {pad!r} is no id, behind which positions begin"
                )
            values["first_position"] = first = pad + 1
            values["max_positions"] -= first
        return family, ModelConfig(**values, **family.fixed, dropout_form=form), meta
    except (ValidationError, TypeError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first_error = error.errors()[0]
            reason = " ".join(map(str, (*first_error["loc"], first_error["msg"].lower())))
        raise BadInput(f"{file} is not of the family {family.name}: {reason}") from None


def _tensors(directory: Path) -> tuple[list[Path], dict[str, Tensor]]:
    """The files with weights, and all their tensors."""
    for name, read in (("model.safetensors", load_tensors), ("pytorch_model.bin", _unpickle)):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return [directory / name], read(directory / name)
        if index.is_file():
            return _shards(index, read)
    raise BadInput(f"{directory} has neither model.safetensors nor pytorch_model.bin")


def _shards(index: Path, read: Any) -> tuple[list[Path], dict[str, Tensor]]:
    """What an index puts together; every tensor must be in the shard it names."""
    places = read_json(index)
    places = places.get("weight_map") if isinstance(places, dict) else None
    if not isinstance(places, dict) or not places:
        raise BadInput(f"{index} holds no weight_map")
    shards = sorted({str(shard) for shard in places.values()})
    if outside := [s for s in shards if s in ("", "..") or Path(s).name != s]:
        raise BadInput(f"{index} names {outside[0]!r}, which is no file of its directory")
    if lost := [s for s in shards if not (index.parent / s).is_file()]:
        raise BadInput(f"{index.parent / lost[0]} does not exist; {index.name} names it")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        found = read(index.parent / shard)
        if twice := sorted(set(found) & set(tensors)):
            raise BadInput(f"{index.parent / shard} holds {twice[0]}, as another shard does")
        tensors |= found
        for name in (name for name, place in places.items() if place == shard):
            if name not in found:
                raise BadInput(
                    f"{index.parent / shard} lacks the tensor {name}, which "
                    f"{index.name} says it holds"
                )
    return [index, *(index.parent / shard for shard in shards)], tensors


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damage fails anywhere: struct.error, IndexError ..
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise BadInput(f"{file} is refused: it is damaged, or holds more than tensors") from None
    if isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()
    ):
        return tensors
    raise BadInput(f"{file} is not a table of tensors")


def _modern(name: str, family: Family) -> str:
    """A tensor's name without prefix and with today's LayerNorm parameters."""
    name = name.removeprefix(family.prefix)
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)


def _untie(source: dict[str, Tensor], family: Family, file: Path) -> list[str]:
    """Take the copies of other tensors out of `source`; returns their names."""
    tied = [copy for copy in family.tied if copy in source]
    for copy in tied:
        original = family.tied[copy]
        tensor = source.pop(copy)
        if not torch.equal(tensor, source.setdefault(original, tensor)):
            raise BadInput(f"{file}: {copy} differs from {original}; only tied decoders are known")
    return tied


def _heads(
    source: dict[str, Tensor], meta: dict[str, Any], config: ModelConfig, family: Family
) -> tuple[Head | None, dict[str, list[str]], list[str]]:
    """The head, the table of names of the heads the source has, and those it lacks."""

    def has(table: dict[str, list[str]]) -> bool:
        # a part of a head is enough: what it lacks is an error then
        return any(name in source for names in expand(table, 1).values() for name in names)

    longest = config.max_positions
    task = _classifier(source, meta, family)
    pooler = dict(family.pooler) if has(family.pooler) else {}
    if task is not None:
        labels = _labels(source, meta, family.head(task)) if task.named_classes else ()
        own = family.pooler if task.reads_pooled else pooler
        return Head(task.name, labels, max_tokens=longest), own | family.head(task), ["MLM head"]
    table, lacking = pooler, [] if pooler else ["pooler"]
    if has(family.pair):
        table |= family.pair
    if has(family.span):
        return Head("span", max_tokens=longest), table | family.span, [*lacking, "MLM head"]
    if has(family.mlm):
        if meta.get("tie_word_embeddings") is False:
            raise BadInput(
                "config.json says tie_word_embeddings: false; only decoders that are "
                "tied to the word embeddings are known"
            )
        _check_activation(config, family)
        return Head("mlm", max_tokens=longest), table | family.mlm, lacking
    return None, table, [*lacking, "MLM head"]


def _classifier(
    source: dict[str, Tensor], meta: dict[str, Any], family: Family
) -> type[Task] | None:
    """The task of the source's classifier, if it has one that is known.

    The config's `architectures` says it. If that is silent the tensors do: a classifier of texts
    has a pooler, one of words none. But one output on a pooler may be that of multiple choice,
    unless the config speaks of a single label.
    """

    def there(table: Table, part: str) -> bool:
        return any(
            f"{name[:-1]}{kind}" in source
            for name in table.get(part, ())
            for kind in ("weight", "bias")
        )

    said = str(meta.get("architectures") or "").strip("[]'").rpartition("For")[2]
    texts, words = (there(table, "task_head.*") for table in (family.classify, family.tag))
    pooled = there(family.pooler | family.classify, "pooler.*")
    if said == Tag.hf_class and words:
        return Tag
    if said == Choice.hf_class and there(family.choice, "task_head.*"):
        return Choice
    if said == "NextSentencePrediction" or not (texts or words):
        return None
    known = said == Classify.hf_class
    if not known and not (texts and pooled):
        return Tag if words and not there(family.pooler, "pooler.*") else None
    labels = meta.get("id2label")
    named = len(labels) if isinstance(labels, dict) else meta.get("num_labels")
    one = _outputs(source, family.classify) == 1
    if meta.get("problem_type") == "regression" or (one and (known or named == 1)):
        return Regress
    return None if one else Classify


def _outputs(source: dict[str, Tensor], table: Table) -> int:
    weight = source.get(table["task_head.*"][0].replace("*", "weight"))
    return len(weight) if weight is not None and weight.ndim else 0


def _labels(source: dict[str, Tensor], meta: dict[str, Any], table: Table) -> tuple[str, ...]:
    """The classes of a head, one an output. Raises BadInput where the config names others."""
    count, names = _outputs(source, table), meta.get("id2label")
    names = names if isinstance(names, dict) else {}
    given = [str(name) for name in names.values()]
    if names and (len(names) != count or len(set(given)) != count):
        raise BadInput(
            f"config.json names the classes {', '.join(given)}; the head has {count} outputs, "
            "each of which needs a name of its own"
        )
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _check_activation(config: ModelConfig, family: Family) -> None:
    """Raise BadInput unless the family's MLM head has the activation of the layers, as ours has."""
    if family.mlm_activation not in (None, config.activation):
        raise BadInput(
            f"model.activation={config.activation} is not that of {family.name}'s MLM "
            f"head, which is always {family.mlm_activation}"
        )


def _take(
    wanted: dict[str, list[str]], source: dict[str, Tensor], file: Path
) -> tuple[dict[str, Tensor], set[str]]:
    weights, used = {}, set()
    for ours, theirs in wanted.items():
        parts = []
        for name in theirs:
            if name not in source:
                raise BadInput(f"{file} lacks the tensor {name}")
            tensor = source[name]
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                raise BadInput(
                    f"{file}: {name} holds {tensor.dtype}, not floating-point numbers "
                    "of 16 bits or more"
                )
            tensor = tensor.detach()
            if tensor.dtype != torch.float64:  # which float32 does not hold
                tensor = tensor.float()
            if not torch.isfinite(tensor).all():
                raise BadInput(f"{file}: {name} holds NaN or infinity")
            parts.append(tensor)
            used.add(name)
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) > 1 or not shapes[0]:
            raise BadInput(f"{file}: {theirs[0]} and its fellows do not fit: {shapes}")
        weights[ours] = torch.cat(parts)
    return weights, used


def account(imported: Imported) -> str:
    """The lines that say what became of every tensor."""
    checkpoint = imported.checkpoint
    parameters = sum(w.numel() for w in checkpoint.weights.values())
    config = checkpoint.config
    lines = [
        f"{imported.family.name}: {config.layers} layers, {config.hidden} wide, {config.heads} "
        f"heads, {parameters:,} parameters, {len(checkpoint.tokenizer):,} pieces",
        f"taken: {imported.taken} tensors",
    ]
    if imported.tied:
        lines.append(f"tied copies, equal to what they copy: {', '.join(imported.tied)}")
    if spare := config.vocab_size - len(checkpoint.tokenizer):
        lines.append(f"vectors without a piece: the last {spare:,}")
    lines.append(f"left over: {', '.join(imported.left) or 'none'}")
    if imported.lacking:
        lines.append(f"lacking in the source, new when trained: {', '.join(imported.lacking)}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ out


def to_hf(checkpoint: Checkpoint, out: Path, overwrite: bool = False) -> Family:
    """Write a directory that `transformers` loads: config.json, model.safetensors, tokenizer.

    Tensors have the types they were imported with where that loses nothing, else float32; tied ones
    are written once. Raises BadInput where no family has the checkpoint's shape.
    """
    family = family_of(checkpoint)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in _their_names(checkpoint, family).items():
        parts = checkpoint.weights[ours].chunk(len(theirs))
        tensors |= dict(zip(theirs, parts, strict=True))
    dtype, tensors = _in_their_types(checkpoint, family, tensors)
    config = checkpoint.config
    with atomic_directory(out, overwrite) as directory:
        save_tensors(tensors, directory / "model.safetensors")
        write_json(directory / "config.json", _their_config(checkpoint, family, dtype))
        published.export_tokenizer(
            checkpoint.tokenizer, directory, config.max_positions, segments=config.token_types > 1
        )
        for name, content in _kept_sentence(checkpoint).items():
            (directory / name).parent.mkdir(exist_ok=True)
            write_json(directory / name, content)
    return family


def _kept_sentence(checkpoint: Checkpoint) -> dict[str, Any]:
    """The files of sentence-transformers that an encoder was imported with; sentence-transformers
    takes the mean over tokens where there are none."""
    if checkpoint.task is not None and not checkpoint.task.predicts_masked:
        return {}
    records = (record["sentence"] for record in checkpoint.history if "sentence" in record)
    return next(records, {})


def _their_names(checkpoint: Checkpoint, family: Family) -> dict[str, list[str]]:
    """What each of our weights is called there. Raises BadInput for one without a place."""
    weights = checkpoint.weights
    own = family.head(checkpoint.task)
    bare = dict(family.encoder)
    if "pooler.weight" in weights and "pooler.*" not in own:
        bare |= family.pooler
    heads = own | (family.pair if "pair_head.weight" in weights else {})
    prefix = family.prefix if heads else ""
    layers = checkpoint.config.stored_layers
    names = {o: [prefix + name for name in t] for o, t in expand(bare, layers).items()}
    names |= expand(heads, 1)
    if lost := sorted(set(weights) - set(names)):
        raise BadInput(f"{family.name} has no place for the weights {', '.join(lost[:4])}")
    return names


def _in_their_types(
    checkpoint: Checkpoint, family: Family, tensors: dict[str, Tensor]
) -> tuple[str, dict[str, Tensor]]:
    """The tensors in the types they were imported with, and the name of the commonest. Where one
    would lose by it, as after training in float32, all are float32."""
    plain: dict[str, Any] = {"dtype": "float32"}
    record = next((r for r in checkpoint.history if "dtype" in r), plain)
    others = record.get("other_dtypes", {})
    found = {}
    for name, tensor in tensors.items():
        dtype = getattr(torch, others.get(name.removeprefix(family.prefix), record["dtype"]))
        # imported float64 is still that; what is not is new
        kept = tensor if dtype == torch.float64 else tensor.to(dtype)
        if not torch.equal(kept.to(tensor.dtype), tensor):
            return "float32", {n: t.float().contiguous() for n, t in tensors.items()}
        found[name] = kept.contiguous()
    (common, _), *_ = Counter(str(tensor.dtype) for tensor in found.values()).most_common(1)
    return common.removeprefix("torch."), found


def family_of(checkpoint: Checkpoint) -> Family:
    """The family whose models have this shape. Raises BadInput if there is none."""
    config = checkpoint.config
    if config.norm != "post":
        raise BadInput("no family has LayerNorm before its parts (model.norm='pre')")
    for field in ("architecture", "positions", "norm_form"):  # Hilbert-CNN's and PLUS's
        plain_value = ModelConfig.model_fields[field].default
        if getattr(config, field) != plain_value:
            raise BadInput(f"no family of Hugging Face has model.{field}={getattr(config, field)}")
    if config.shared_layers or config.embedding:
        name = "albert"
    elif config.first_position:
        name = "roberta"
    elif config.token_types == 0:
        name = "distilbert"
    else:
        name = "bert"
    family = FAMILIES[name]
    plain = ModelConfig(**family.fixed)
    for field in ("shared_layers", "first_position", "pooler", *family.fixed):
        value = getattr(config, field)
        if field == "first_position" and name == "roberta":
            continue
        if field == "pooler" and "pooler.weight" not in checkpoint.weights and value != "none":
            continue
        if value != getattr(plain, field):
            raise BadInput(f"model.{field}={value} is not {name}'s: no family has this mixture")
    if bool(config.embedding) != ("embedding" in family.config):
        raise BadInput(f"model.embedding={config.embedding} is not {name}'s: it projects them")
    if config.token_types == 0 and name != "distilbert":
        raise BadInput(f"model.token_types=0 is not {name}'s: no family has this mixture")
    if checkpoint.task is not None and checkpoint.task.predicts_masked:
        _check_activation(config, family)
    pad = checkpoint.tokenizer.special["pad"]
    if name == "roberta" and pad != config.first_position - 1:
        raise BadInput(
            f"model.first_position={config.first_position} is not roberta's: its "
            f"positions begin after the id of padding, {pad}"
        )
    own = checkpoint.tokenizer.meta.get("normalisation") == XLM_ROBERTA
    return FAMILIES["xlm-roberta"] if name == "roberta" and own else family


def _their_config(checkpoint: Checkpoint, family: Family, dtype: str) -> dict[str, Any]:
    config, task, special = checkpoint.config, checkpoint.task, checkpoint.tokenizer.special
    values = config.model_dump()
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values["activation"] = names[config.activation]
    values["max_positions"] += config.first_position
    if family.defaults["head_dropout"] is not None:  # it cannot say that two dropouts are one
        values["head_dropout"] = config.before_head
    written = {theirs: values[ours] for ours, theirs in family.config.items()}
    named = family.class_of(task, "pair_head.weight" in checkpoint.weights)
    written |= {"model_type": family.name, "architectures": [named]}
    written |= {"dtype": dtype, "pad_token_id": special["pad"]}
    written |= {"bos_token_id": special["cls"], "eos_token_id": special["sep"]}
    if task is not None and task.named_classes and not task.predicts_masked:
        written["id2label"] = {str(i): label for i, label in enumerate(task.head.labels)}
        written["label2id"] = {label: i for i, label in enumerate(task.head.labels)}
    return written | (task.hf_config if task is not None else {})
