"""Import and export Hugging Face checkpoints: BERT, ALBERT, DistilBERT, ModernBERT, ESM-2, and
RoBERTa with its relatives XLM-RoBERTa and CamemBERT.

`from_hf` reads a directory as `save_pretrained` writes it, `to_hf` writes one that
`from_pretrained` loads. The families differ only in data: xformer/convert/names.py has a table of
tensor names for each, which is read in both directions.

In this file "ours" are names and values of xformer, "theirs" those of Hugging Face. `meta` is the
content of their config.json.
"""

from __future__ import annotations

import errno
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from xformer.checkpoint import Checkpoint, check_weights, load_tensors, parts_of, save_tensors
from xformer.convert import modern
from xformer.convert.names import FAMILIES, Family, Table, expand
from xformer.data import published
from xformer.data.errors import BadInput
from xformer.data.files import (
    atomic_directory,
    file_checksum,
    put_back,
    read_json,
    replaceable,
    write_json,
    write_text,
)
from xformer.model.config import NEWER, ModelConfig
from xformer.tasks.choice import Choice
from xformer.tasks.classify import Classify
from xformer.tasks.known import task_of
from xformer.tasks.regress import Regress
from xformer.tasks.span import Span
from xformer.tasks.tag import Tag
from xformer.tasks.task import Head, Model, Task

# the files by which an export is recognised, before it is overwritten
EXPORT = ("config.json", "model.safetensors", "tokenizer_config.json")
# buffers that old versions of transformers saved with the weights
BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
LFS = b"version https://git-lfs."  # how a file begins that a clone without Git LFS leaves
# sentence-transformers: the modules that have no weights of their own, and its config files
MODULE = re.compile(r"\.(Transformer|Pooling|Normalize)$")
SENTENCE = ("config_sentence_transformers.json", "sentence_bert_config.json")


@dataclass(frozen=True)
class Imported:
    """An imported checkpoint, and what became of each tensor of the source."""

    checkpoint: Checkpoint
    family: Family
    taken: int  # tensors of the source that are in the checkpoint, tied copies included
    tied: list[str]  # copies of other tensors; they were checked to be equal
    left: list[str]  # tensors and modules of the source that the checkpoint has no place for
    lacking: list[str]  # heads that the source does not have


# ------------------------------------------------------------------------------------- import


def from_hf(directory: str | Path, repository: str = "") -> Imported:
    """Import a Hugging Face directory: config.json, weights, tokenizer. `repository` is its name on
    the hub, for the history.

    The weights are model.safetensors or else pytorch_model.bin, whole or in the shards that an
    index names. A .bin may hold tensors only: a pickle that asks for anything else is refused.

    Raises BadInput if the architecture is not supported, if a tensor is missing, has another shape
    or type than expected or holds NaN, or if the vocabulary does not fit the embeddings.
    """
    directory = Path(directory)
    put_back(directory)
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory; give one with config.json and weights")
    family, config, meta = _read_config(directory)
    files, tensors = _read_tensors(directory)
    file = files[0]
    source = _with_current_names(tensors, family, file)
    tied = drop_tied_copies(source, family, file)
    config, frequencies = modern.take_frequencies(source, family, config, file)
    head, head_names, lacking = _find_heads(source, meta, config, family)
    if head is not None:
        task = task_of(head)
        _check_head(task, family, meta, _count_outputs(source, family.classify))
        modern.check_head(task, family, meta, directory / "config.json")
    weights, used, left = _take_weights(source, family, config, head, head_names, file)
    tokenizer = published.import_tokenizer(directory)
    if len(tokenizer) > config.vocab_size:
        raise BadInput(
            f"{directory}: the vocabulary has {len(tokenizer)} pieces, "
            f"the embeddings only {config.vocab_size}"
        )
    sentence, foreign_modules = _read_sentence_files(directory)
    record = {
        "op": "from-hf",
        "family": family.name,
        "file": file.name,
        "sha256": file_checksum(file),
        **_dtypes(source, used),
    }
    if files[1:]:  # the file above is their index
        record["shards"] = {shard.name: file_checksum(shard) for shard in files[1:]}
    if frequencies:
        record["frequencies"] = frequencies
    if repository:
        record["repository"] = repository
    if sentence:
        record["sentence"] = sentence
    checkpoint = Checkpoint(config, weights, tokenizer, head, (record,))
    left += foreign_modules
    taken = len(used) + len(tied) + len(frequencies)
    return Imported(checkpoint, family, taken, tied, left, lacking)


def read_shape(directory: str | Path) -> ModelConfig:
    """The shape of the model in a Hugging Face directory, from its config.json.

    Raises BadInput if there is no config.json, or if its architecture is not supported.
    """
    return _read_config(Path(directory))[1]


def _read_config(directory: Path) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """The family, our config, and the content of config.json."""
    file = directory / "config.json"
    if not file.is_file() and (directory / "adapter_config.json").is_file():
        raise BadInput(
            f"{directory} has only an adapter; merge it into its model first (`merge_and_unload` "
            "of peft), and save the whole"
        )
    meta = read_json(file)
    kind = meta.get("model_type") if isinstance(meta, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        supported = ", ".join(FAMILIES)
        if (directory / "manifest.json").is_file():
            raise BadInput(f"{directory} is a checkpoint of xformer already; use it as it is")
        raise BadInput(f"{file}: model_type {kind!r} is not supported; {supported} are")
    family = FAMILIES[kind]
    rotary = family.fixed.get("positions") == "rotary"  # modern.read_settings checks these
    form = meta.get("position_embedding_type", "absolute")
    if not rotary and form != "absolute":
        raise BadInput(
            f"{file}: position_embedding_type={form!r} is not supported; it must be 'absolute'"
        )
    if meta.get("is_decoder"):
        raise BadInput(f"{file}: is_decoder=True is not supported; only encoders are")
    if meta.get("num_hidden_groups", 1) != 1 or meta.get("inner_group_num", 1) != 1:
        raise BadInput(f"{file}: only ALBERTs with one group of one layer are supported")
    values = dict(family.defaults)
    for ours, theirs in family.config.items():
        if theirs in meta:
            values[ours] = meta[theirs]
        elif ours not in values:
            raise BadInput(f"{file} is not a config of {family.name}: it lacks {theirs!r}")
    if str(values["activation"]) not in ACTIVATIONS:
        key, value = family.config["activation"], values["activation"]
        raise BadInput(f"{file}: {key} {value!r} is not one of {', '.join(ACTIVATIONS)}")
    values["activation"] = ACTIVATIONS[str(values["activation"])]
    try:
        if family.form == "roberta":  # its position ids start after the padding id
            pad = meta.get("pad_token_id", 1)
            if not isinstance(pad, int) or pad < 0:
                raise BadInput(
                    f"{file}: pad_token_id {pad!r} is not a token id; it must be an integer from "
                    "0, because position ids start after it"
                )
            values["first_position"] = pad + 1
            values["max_positions"] -= pad + 1
        values |= modern.read_settings(family, meta, values["layers"], file) | family.fixed
        if values["token_types"] == 0 and "token_types" not in family.fixed:
            raise BadInput(f"{file}: type_vocab_size=0 is not {family.name}'s: it has token types")
        return family, ModelConfig(**values, dropout_form=family.form), meta
    except (ValidationError, TypeError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = " ".join(map(str, (*first["loc"], first["msg"].lower())))
        raise BadInput(f"{file} is not a config of {family.name}: {reason}") from None


def _read_tensors(directory: Path) -> tuple[list[Path], dict[str, Tensor]]:
    """All tensors of a directory, and the files that they come from. If there are shards, the first
    of these files is their index."""
    for name, read in (("model.safetensors", load_tensors), ("pytorch_model.bin", read_pickle)):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            _refuse_pointer(directory / name)
            return [directory / name], read(directory / name)
        if index.is_file():
            return _read_shards(index, read)
    raise BadInput(f"{directory} has neither model.safetensors nor pytorch_model.bin")


def _refuse_pointer(file: Path) -> None:
    """Raise BadInput if Git LFS has left a pointer in place of the weights."""
    with file.open("rb") as start:
        if start.read(len(LFS)) == LFS:
            raise BadInput(f"{file} is only a pointer of Git LFS; fetch the file by `git lfs pull`")


def _read_shards(
    index: Path, read: Callable[[Path], dict[str, Tensor]]
) -> tuple[list[Path], dict[str, Tensor]]:
    """The tensors of all shards. Raises BadInput if a tensor is not in the shard that the index
    names, or is in two shards."""
    content = read_json(index)
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise BadInput(f"{index} has no weight_map")
    shards = sorted({str(shard) for shard in shard_of.values()})
    if outside := [s for s in shards if s in ("", "..") or Path(s).name != s]:
        raise BadInput(f"{index} names {outside[0]!r}, which is not a file in its directory")
    if lost := [s for s in shards if not (index.parent / s).is_file()]:
        raise BadInput(f"{index.parent / lost[0]} does not exist, although {index.name} names it")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        _refuse_pointer(index.parent / shard)
        own = read(index.parent / shard)
        if twice := sorted(set(own) & set(tensors)):
            raise BadInput(f"{index.parent / shard} holds {twice[0]}, and so does another shard")
        tensors |= own
        for name, place in shard_of.items():
            if place == shard and name not in own:
                raise BadInput(
                    f"{index.parent / shard} lacks the tensor {name}, which {index.name} says it "
                    "holds"
                )
    return [index, *(index.parent / shard for shard in shards)], tensors


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors in a pickle by name. Nothing in it is executed.

    Raises BadInput if the file is damaged or holds anything but tensors.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises anything: struct.error, IndexError, ...
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise BadInput(
            f"{file} is refused: it is damaged, or holds objects other than tensors"
        ) from None
    if isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()
    ):
        return tensors
    raise BadInput(f"{file} is not a state dict, a table of tensors by name")


def _with_current_names(
    tensors: dict[str, Tensor], family: Family, file: Path
) -> dict[str, Tensor]:
    """The tensors under the names that `Family` uses: without the prefix (such as "bert.") that
    the encoder's tensors have in a model with a head, and with LayerNorm.weight and .bias instead
    of TensorFlow's .gamma and .beta."""
    names = [name.removeprefix(family.prefix) for name in tensors]
    names = [re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name) for name in names]
    names = [re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name) for name in names]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"{file} holds {twice} twice, under an old name and a new one")
    return dict(zip(names, tensors.values(), strict=True))


def drop_tied_copies(source: dict[str, Tensor], family: Family, file: Path) -> list[str]:
    """Remove the copies of other tensors from `source` and return their names.

    A copy without its original becomes the original. Raises BadInput if a copy differs from its
    original.
    """
    tied = [copy for copy in family.tied if copy in source]
    for copy in tied:
        original = family.tied[copy]
        tensor = source.pop(copy)
        if not torch.equal(tensor, source.setdefault(original, tensor)):
            raise BadInput(
                f"{file}: {copy} differs from {original}; only tied decoders are supported"
            )
    return tied


def _find_heads(
    source: dict[str, Tensor], meta: dict[str, Any], config: ModelConfig, family: Family
) -> tuple[Head | None, Table, list[str]]:
    """The head of the source, the names of the tensors of all its heads, and the heads that it does
    not have."""

    def has(table: Table) -> bool:
        # one tensor of a head is enough; the others are then reported as missing
        return any(name in source for names in expand(table, 1).values() for name in names)

    longest = config.max_positions
    task = _find_classifier(source, meta, family)
    pooler = dict(family.pooler) if has(family.pooler) else {}
    contact = dict(family.contact) if has(family.contact) else {}
    if task is not None:
        labels = _read_labels(source, meta, family.head(task)) if task.named_classes else ()
        own = family.pooler if task.reads_pooled else pooler
        table = own | contact | family.head(task)
        return Head(task.name, labels, max_tokens=longest), table, ["MLM head"]
    table = pooler | contact
    lacking = [] if pooler else ["pooler"]
    if has(family.pair):
        table |= family.pair
    if has({"task_head.*": family.span["task_head.*"]}):
        return Head("span", max_tokens=longest), table | family.span, [*lacking, "MLM head"]
    if has(family.mlm):
        if meta.get("tie_word_embeddings") is False:
            raise BadInput(
                "config.json says tie_word_embeddings: false; only decoders that are tied to the "
                "word embeddings are supported"
            )
        _check_activation(config, family)
        return Head("mlm", max_tokens=longest), table | family.mlm, lacking
    return None, table, [*lacking, "MLM head"]


def _find_classifier(
    source: dict[str, Tensor], meta: dict[str, Any], family: Family
) -> type[Task] | None:
    """The task of the source's classifier; None if it has none, or its task cannot be determined.

    `architectures` in config.json names the task. Without it the tensors decide: a classifier of
    texts has a pooler, a classifier of words has none. A single output on a pooler is a score only
    if the config says regression or has a single label: multiple choice has the same tensors.
    """

    def has_part(table: Table, part: str) -> bool:
        names = (name.removesuffix("*") for name in table.get(part, ()))
        return any(name + kind in source for name in names for kind in ("weight", "bias"))

    architectures = meta.get("architectures")
    if isinstance(architectures, list):
        architectures = architectures[-1] if architectures else None
    # "BertForTokenClassification" -> "TokenClassification"
    architecture = str(architectures or "").rpartition("For")[2]
    texts, words = has_part(family.classify, "task_head.*"), has_part(family.tag, "task_head.*")
    pooled = has_part(family.pooler | family.classify, "pooler.*")
    if architecture == Tag.hf_class and words:
        return Tag
    if architecture == Choice.hf_class and has_part(family.choice, "task_head.*"):
        return Choice
    if architecture == Span.hf_class:  # in ModernBERT its head has the name of a classifier
        return Span if texts else None
    if architecture == "NextSentencePrediction" or not (texts or words):
        return None
    is_named = architecture == Classify.hf_class
    if not is_named and not (texts and pooled):
        return Tag if words and not has_part(family.pooler, "pooler.*") else None
    labels = meta.get("id2label")
    label_count = len(labels) if isinstance(labels, dict) else meta.get("num_labels")
    one_output = _count_outputs(source, family.classify) == 1
    if meta.get("problem_type") == "regression" or (one_output and (is_named or label_count == 1)):
        return Regress
    return None if one_output else Classify


def _check_head(task: Task, family: Family, meta: dict[str, Any], outputs: int) -> None:
    """Raise BadInput if a head has several labels or several scores for a text."""
    problem = meta.get("problem_type")
    if isinstance(task, Classify) and problem == "multi_label_classification":
        raise BadInput(
            f"config.json: problem_type {problem} is not supported; a classifier must predict one "
            "label"
        )
    if isinstance(task, Regress) and outputs > 1:
        raise BadInput(
            f"config.json: problem_type {problem} with {outputs} outputs is not supported; a "
            "regression must have one output"
        )


def _count_outputs(source: dict[str, Tensor], table: Table) -> int:
    """The number of outputs of a head; 0 if the source does not have it."""
    weight = source.get(table["task_head.*"][0].replace("*", "weight"))
    return len(weight) if weight is not None and weight.ndim else 0


def _read_labels(source: dict[str, Tensor], meta: dict[str, Any], table: Table) -> tuple[str, ...]:
    """The name of each output of a classifier. Raises BadInput if the config does not give each
    output a name of its own."""
    count, names = _count_outputs(source, table), meta.get("id2label")
    names = names if isinstance(names, dict) else {}
    labels = [str(name) for name in names.values()]
    if names and (set(names) != set(map(str, range(count))) or len(set(labels)) != count):
        raise BadInput(
            f"config.json names the classes {', '.join(labels)}; the head has {count} outputs, "
            f"so id2label must give each number from 0 to {count - 1} a name of its own"
        )
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _check_activation(config: ModelConfig, family: Family) -> None:
    """Raise BadInput if the family's MLM head has a different activation from the layers.

    In our models both have the same activation.
    """
    if family.mlm_activation not in (None, config.activation):
        raise BadInput(
            f"model.activation={config.activation} is not that of {family.name}'s MLM "
            f"head, which is always {family.mlm_activation}"
        )


def take_tensors(
    names: Table, source: dict[str, Tensor], file: Path
) -> tuple[dict[str, Tensor], set[str]]:
    """Our weights as fp32 (fp64 stays fp64), and the names of the tensors that they were made from.

    `names` gives the tensors of each weight; several are joined along the first dimension. Raises
    BadInput if one is missing, holds integers or NaN, or does not fit the others.
    """
    weights, used = {}, set()
    for ours, theirs in names.items():
        parts = []
        for name in theirs:
            if name not in source:
                raise BadInput(f"{file} lacks the tensor {name}")
            tensor = source[name]
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                raise BadInput(
                    f"{file}: {name} holds {tensor.dtype}, not floating-point numbers of 16 bits "
                    "or more"
                )
            tensor = tensor.detach()
            if tensor.dtype != torch.float64:
                tensor = tensor.float()
            if not torch.isfinite(tensor).all():
                raise BadInput(f"{file}: {name} holds NaN or infinity")
            parts.append(tensor)
            used.add(name)
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) > 1:
            raise BadInput(f"{file}: {', '.join(theirs)} must have the same shape, not {shapes}")
        if not shapes[0]:
            raise BadInput(f"{file}: {theirs[0]} is a single number, not a vector or a matrix")
        weights[ours] = torch.cat(parts)
    return weights, used


def _take_weights(
    source: dict[str, Tensor],
    family: Family,
    config: ModelConfig,
    head: Head | None,
    head_names: Table,
    file: Path,
) -> tuple[dict[str, Tensor], set[str], list[str]]:
    """Our weights, the names of the tensors that they were made from, and of those that the model
    has no place for. Raises BadInput unless the weights are those of the config's layers."""
    # `expand` makes entries for each layer. config.json may claim any number of layers, so the
    # number is checked first.
    if config.stored_layers > len(source):
        raise BadInput(
            f"{file} holds {len(source)} tensors: too few for the config's "
            f"{config.stored_layers} layers"
        )
    names = expand(family.encoder | head_names, config.stored_layers)
    expected = _expected(config, head, names)
    names = {ours: theirs for ours, theirs in names.items() if ours in expected}
    weights, used = take_tensors(names, source, file)
    left = sorted(name for name in source if name not in used and not BUFFERS.fullmatch(name))
    layer_name = _layer_name(family)
    if extra := next((name for name in left if layer_name.match(name)), None):
        raise BadInput(
            f"{file} holds {extra}, which is beyond the {config.layers} layers in config.json"
        )
    check_complete(weights, config, head, file)
    return weights, used, left


def check_complete(
    weights: dict[str, Tensor], config: ModelConfig, head: Head | None, file: Path
) -> None:
    """Raise BadInput unless these are the weights, by name and shape, of a model of this config."""
    check_weights(weights, _expected(config, head, weights), str(file))


def _expected(
    config: ModelConfig, head: Head | None, weights: Collection[str]
) -> dict[str, Tensor]:
    """The weights, without content, of a model with this head and the parts of `weights`."""
    task = None if head is None else task_of(head)
    with torch.device("meta"):
        return Model(config, task, parts_of(weights)).state_dict()


def _layer_name(family: Family) -> re.Pattern[str]:
    """Matches the beginning of the name of any layer's tensor, such as "encoder.layer.11."."""
    starts = {
        re.escape(names[0].split("{}")[0]) for names in family.encoder.values() if "{}" in names[0]
    }
    return re.compile(rf"(?:{'|'.join(sorted(starts))})\d+\.")


def _read_sentence_files(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The config files that tell sentence-transformers how to make a sentence embedding from hidden
    states.

    Returns their content by name, and the modules with weights of their own, which cannot be
    imported. If there is such a module, no file is kept. Raises BadInput if modules.json is
    damaged.
    """
    if not (directory / "modules.json").is_file():
        return {}, []
    modules = read_json(directory / "modules.json")
    try:
        foreign = [f"the module {m['type']}" for m in modules if not MODULE.search(m["type"])]
        places = [str(m["path"]) for m in modules]
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"{directory / 'modules.json'} is not a list of modules: {error!r}"
        ) from None
    if foreign or any(Path(place).name != place for place in places if place):
        return {}, foreign
    names = ["modules.json", *SENTENCE, *(f"{place}/config.json" for place in places if place)]
    return {n: read_json(directory / n) for n in names if (directory / n).is_file()}, []


def vector_arguments(sentence: dict[str, Any]) -> str:
    """The arguments of `xformer encode` that give the vectors of sentence-transformers. "" if the
    files name a pooling that we do not have, or several."""
    named = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
    contents = [content for content in sentence.values() if isinstance(content, dict)]
    modes = [m for c in contents for m in c if m.startswith("pooling_mode_") and c[m] is True]
    if len(modes) != 1 or modes[0] not in named:
        return ""
    normalised = any(module["type"].endswith(".Normalize") for module in sentence["modules.json"])
    longest = next((c["max_seq_length"] for c in contents if c.get("max_seq_length")), None)
    arguments = [f"pooling={named[modes[0]]}", *["normalize=true"] * normalised]
    return " ".join([*arguments, *([f"max_tokens={longest}"] if longest else [])])


def _dtypes(source: dict[str, Tensor], used: Iterable[str]) -> dict[str, Any]:
    """For the history: the type of most tensors, and the types of the others by name."""
    dtypes = {name: str(source[name].dtype).removeprefix("torch.") for name in sorted(used)}
    common = Counter(dtypes.values()).most_common(1)[0][0]
    others = {name: dtype for name, dtype in dtypes.items() if dtype != common}
    if not others:
        return {"dtype": common}
    return {"dtype": common, "other_dtypes": others}


def import_report(imported: Imported) -> list[str]:
    """Lines that say what became of each tensor."""
    checkpoint, config = imported.checkpoint, imported.checkpoint.config
    parameters = sum(weight.numel() for weight in checkpoint.weights.values())
    lines = [
        f"{imported.family.name}: {config.layers} layers, {config.hidden} wide, {config.heads} "
        f"heads, {parameters:,} parameters, {len(checkpoint.tokenizer):,} pieces",
        f"imported: {imported.taken} tensors",
    ]
    if imported.tied:
        lines.append(f"tied, equal to the tensors they copy: {', '.join(imported.tied)}")
    if spare := config.vocab_size - len(checkpoint.tokenizer):
        lines.append(f"embeddings without a piece: the last {spare:,}")
    pad, before = checkpoint.tokenizer.special["pad"], config.first_position - 1
    if imported.family.form == "roberta" and pad != before:
        lines.append(
            f"warning: pad_token_id is {before} in config.json and {pad} in the tokenizer; "
            f"transformers gives other positions to rows with the id {before}, and to-hf refuses "
            "this checkpoint"
        )
    if sentence := checkpoint.history[-1].get("sentence"):
        made = vector_arguments(sentence)
        how = f"xformer encode {made}" if made else "a pooling that xformer encode does not have"
        lines.append(f"the vectors of sentence-transformers: {how}")
    lines.append(f"not imported: {', '.join(imported.left) or 'none'}")
    if imported.lacking:
        lines.append(f"not in the source, initialised when trained: {', '.join(imported.lacking)}")
    return lines


# ------------------------------------------------------------------------------------- export


def to_hf(
    checkpoint: Checkpoint, out: str | Path, overwrite: bool = False, card: str = ""
) -> Family:
    """Write a directory that `transformers` loads: config.json, model.safetensors, tokenizer, and
    `card` as README.md.

    Tied tensors are written once. The tensors get the types that they were imported with. If one of
    them would lose precision, all are float32 instead. Raises BadInput if the checkpoint fits no
    family, or if `out` exists; with `overwrite` only if it holds something other than an export.
    """
    family, out = family_of(checkpoint), Path(out)
    if overwrite and not replaceable(out, *EXPORT):
        raise BadInput(f"{out} is not an export, so it is not overwritten; give another path")
    checkpoint, tensors = _with_plain_scores(checkpoint), dict[str, Tensor]()
    for ours, theirs in _their_names(checkpoint, family).items():
        parts = checkpoint.weights[ours].chunk(len(theirs))
        tensors |= dict(zip(theirs, parts, strict=True))
    prefix = family.prefix if checkpoint.task is not None else ""
    tensors |= modern.frequency_tensors(family, checkpoint, prefix)
    dtype, tensors = _in_their_dtypes(checkpoint, family, tensors)
    config, task = checkpoint.config, checkpoint.task
    longest = published.length_limit(checkpoint.tokenizer, config.max_positions)
    if task is not None and not task.predicts_masked and checkpoint.max_tokens < longest:
        longest = checkpoint.max_tokens  # the head knows rows of this length alone
    with atomic_directory(out, overwrite) as directory:
        save_tensors(tensors, directory / "model.safetensors")
        write_json(directory / "config.json", _their_config(checkpoint, family, dtype))
        published.export_tokenizer(
            checkpoint.tokenizer, directory, longest, segments=config.token_types > 1
        )
        for name, content in _sentence_files(checkpoint).items():
            (directory / name).parent.mkdir(exist_ok=True)
            write_json(directory / name, content)
        if card:
            write_text(directory / "README.md", card)
    return family


def _with_plain_scores(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint; a head that learnt standardized scores computes them in the unit of the
    labels."""
    mean, deviation = checkpoint.head.scale if checkpoint.head else Head.scale
    if (mean, deviation) == Head.scale:
        return checkpoint
    weight, bias = (checkpoint.weights[f"task_head.{name}"] for name in ("weight", "bias"))
    plain = {"task_head.weight": deviation * weight, "task_head.bias": mean + deviation * bias}
    return replace(checkpoint, weights={**checkpoint.weights, **plain})


def family_of(checkpoint: Checkpoint) -> Family:
    """The family whose architecture this checkpoint has. Raises BadInput if there is none."""
    config = checkpoint.config
    rotary = config.positions == "rotary"
    if checkpoint.head is not None and checkpoint.head.layer is not None:
        raise BadInput(
            f"its head is a probe of layer {checkpoint.head.layer}, for which transformers has no "
            "class; export the checkpoint that it was trained from"
        )
    if config.norm != "post" and not rotary:
        raise BadInput("no family has LayerNorm before attention and MLP (model.norm='pre')")
    for field in ("architecture", "positions", "norm_form"):  # other values: Hilbert-CNN and PLUS
        value = getattr(config, field)
        if value not in (ModelConfig.model_fields[field].default, "rotary"):
            raise BadInput(f"no family of Hugging Face has model.{field}={value}")
    family = FAMILIES[_nearest(config, checkpoint.tokenizer.form)]
    for field, expected in _settings_of(family, checkpoint).items():
        if (value := getattr(config, field)) != expected:
            raise BadInput(
                f"model.{field}={value} is not {family.name}'s, which needs {expected}: no family "
                "has this combination"
            )
    if bool(config.embedding) != ("embedding" in family.config):
        raise BadInput(
            f"model.embedding={config.embedding} is not {family.name}'s: its embeddings are "
            "projected"
        )
    if config.token_types == 0 and "token_types" not in family.fixed:
        raise BadInput(f"model.token_types=0 is not {family.name}'s: it has token types")
    if checkpoint.task is not None and checkpoint.task.predicts_masked:
        _check_activation(config, family)
    return family


def _nearest(config: ModelConfig, form: str) -> str:
    """The name of the family that is most like a model, whose tokenizer has this `form`."""
    if config.positions == "rotary":
        return "modernbert" if config.gated else "esm"
    if config.shared_layers or config.embedding:
        return "albert"
    if config.first_position:
        return form or "roberta"
    return "bert" if config.token_types else "distilbert"


def architecture_of(checkpoint: Checkpoint, family: Family) -> str:
    """The class of transformers for this checkpoint, such as BertForMaskedLM."""
    return family.class_of(checkpoint.task, "pair_head.weight" in checkpoint.weights)


def _settings_of(family: Family, checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of the model that can have only one value in this family, with this value."""
    pad = checkpoint.tokenizer.special["pad"]  # position ids of the RoBERTas start after it
    defaults = {name: field.default for name, field in ModelConfig.model_fields.items()}
    named = ("shared_layers", "norm", "positions", "pooler", *NEWER)
    settings = {
        **{name: defaults[name] for name in named if name not in family.free},
        "first_position": pad + 1 if family.form == "roberta" else 0,
        **family.fixed,
    }
    if "pooler.weight" not in checkpoint.weights and checkpoint.config.pooler != "none":
        del settings["pooler"]  # its activation is not used
    if checkpoint.config.zeroed_token is not None and "zeroed_token" in family.free:
        settings["zeroed_token"] = checkpoint.tokenizer.special["mask"]
    return settings


def _their_names(checkpoint: Checkpoint, family: Family) -> Table:
    """The names of their tensors for each of our weights. Raises BadInput for a weight that the
    family has no place for."""
    weights = checkpoint.weights
    own = family.head(checkpoint.task)
    bare = dict(family.encoder)
    if "pooler.weight" in weights and "pooler.*" not in own:
        bare |= family.pooler
    bare |= family.contact if "contact_head.weight" in weights else {}
    heads = own | (family.pair if "pair_head.weight" in weights else {})
    # BertModel's tensors have no prefix; in a model with heads they are named "bert.embeddings..."
    prefix = family.prefix if heads else ""
    names = expand(bare, checkpoint.config.stored_layers)
    names = {ours: [prefix + name for name in theirs] for ours, theirs in names.items()}
    names |= expand(heads, 1)
    names = {ours: theirs for ours, theirs in names.items() if ours in weights}
    if lost := sorted(set(weights) - set(names)):
        raise BadInput(f"{family.name} has no place for the weights {', '.join(lost[:4])}")
    return names


def _in_their_dtypes(
    checkpoint: Checkpoint, family: Family, tensors: dict[str, Tensor]
) -> tuple[str, dict[str, Tensor]]:
    """The name of the most common type, and the tensors in the types that they were imported with.

    If a tensor would lose precision, as after training in float32, all are float32.
    """
    default: dict[str, Any] = {"dtype": "float32"}
    record = next((record for record in checkpoint.history if "dtype" in record), default)
    others = record.get("other_dtypes", {}) | record.get("frequencies", {})
    converted = {}
    for name, tensor in tensors.items():
        dtype = getattr(torch, others.get(name.removeprefix(family.prefix), record["dtype"]))
        # Never converted to float64: an imported float64 tensor is still float64, and a tensor made
        # after the import is float32.
        same = tensor if dtype == torch.float64 else tensor.to(dtype)
        if not torch.equal(same.to(tensor.dtype), tensor):
            return "float32", {n: t.float().contiguous() for n, t in tensors.items()}
        converted[name] = same.contiguous()
    dtypes = Counter(str(tensor.dtype) for tensor in converted.values())
    common = dtypes.most_common(1)[0][0]
    return common.removeprefix("torch."), converted


def _their_config(checkpoint: Checkpoint, family: Family, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    config, task, special = checkpoint.config, checkpoint.task, checkpoint.tokenizer.special
    values = config.model_dump()
    # two of their names mean gelu_tanh; going backwards, the first one is kept
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values["activation"] = activations[config.activation]
    values["max_positions"] += config.first_position
    # Where the default is None, None means "the same as dropout". Elsewhere a number is needed.
    if family.defaults.get("head_dropout") is not None:
        values["head_dropout"] = config.before_head
    written = {theirs: values[ours] for ours, theirs in family.config.items()}
    architecture = architecture_of(checkpoint, family)
    written |= {"model_type": family.name, "architectures": [architecture]}
    written |= {"dtype": dtype, "pad_token_id": special["pad"]}
    written |= {"bos_token_id": special["cls"], "eos_token_id": special["sep"]}
    written |= modern.their_settings(family, config, special, values["activation"])
    if task is not None and task.named_classes and not task.predicts_masked:
        written["id2label"] = {str(i): label for i, label in enumerate(task.head.labels)}
        written["label2id"] = {label: i for i, label in enumerate(task.head.labels)}
    return written | (task.hf_config if task is not None else {})


def _sentence_files(checkpoint: Checkpoint) -> dict[str, Any]:
    """The files of sentence-transformers that an encoder was imported with, by name.

    Only a model without a head or with an MLM head gets them. Without these files
    sentence-transformers averages over the tokens.
    """
    if checkpoint.task is not None and not checkpoint.task.predicts_masked:
        return {}
    records = (record["sentence"] for record in checkpoint.history if "sentence" in record)
    return next(records, {})
