"""Import of checkpoints: every tensor is accounted for, bad ones are refused in one line, and real
weights give the outputs of `transformers`."""

import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Done, command, refused
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, PIECES, VOCABULARY, tiny
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import start
from xformer.analysis.examples import inside
from xformer.checkpoint import Head
from xformer.convert import __main__ as convert
from xformer.convert import hf
from xformer.data import errors
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum, read_json, write_json
from xformer.data.store import Ragged, Split
from xformer.evaluate import fill_mask
from xformer.parallel.feed import to_device

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with an MLM head, as transformers saves it. Tests must not change it."""
    directory = tmp_path_factory.mktemp("plain")
    tiny("BertForMaskedLM", directory)
    return directory


@pytest.fixture
def source(plain: Path, tmp_path: Path) -> Path:
    """A copy of `plain` to change."""
    directory = tmp_path / "source"
    directory.mkdir()
    for file in plain.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def weights_of(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def put(directory: Path, weights: Weights) -> None:
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def put_bin(directory: Path, weights: Any) -> None:
    """The same weights in pytorch_model.bin only."""
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")


def change_config(directory: Path, **changes: Any) -> None:
    config = {**read_json(directory / "config.json"), **changes}
    write_json(directory / "config.json", {k: v for k, v in config.items() if v is not ...})


def assert_same(first: Path, second: Path) -> None:
    one, two = (hf.from_hf(directory).checkpoint for directory in (first, second))
    assert one.weights.keys() == two.weights.keys()
    assert all(torch.equal(w, two.weights[name]) for name, w in one.weights.items())
    assert one.config == two.config
    assert one.head == two.head


# ------------------------------------------------------------------------------------ import


def test_every_tensor_is_accounted_for(plain: Path) -> None:
    imported = hf.from_hf(plain)
    assert imported.checkpoint.head == Head("mlm", max_tokens=17)
    assert imported.taken == len(weights_of(plain))
    assert imported.left == []
    assert imported.lacking == ["pooler"]
    (record,) = imported.checkpoint.history
    assert record["op"] == "from-hf"
    parameters = sum(w.numel() for w in weights_of(plain).values())
    lines = hf.import_report(imported)
    assert lines[0] == f"bert: 2 layers, 39 wide, 3 heads, {parameters:,} parameters, 97 pieces"
    assert "not imported: none" in lines
    assert "not in the source, initialised when trained: pooler" in lines


def rename_old(weights: Weights) -> Weights:
    """Give LayerNorm's parameters TensorFlow's names, and add a buffer, which is not a weight."""
    renamed = {}
    for name, weight in weights.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        renamed[name.replace("LayerNorm.bias", "LayerNorm.beta")] = weight
    assert len([n for n in renamed if n.endswith(("gamma", "beta"))]) == 12
    return {**renamed, "bert.embeddings.position_ids": torch.arange(17)[None]}


def rename_bare(weights: Weights) -> Weights:
    """Remove the prefix from all names, as in a bare BertModel, and write the tied copies out."""
    bare = {n.removeprefix("bert."): w for n, w in weights.items()}
    assert len(bare.keys() & weights.keys()) < len(bare)
    decoder = "cls.predictions.decoder"
    word, bias = bare["embeddings.word_embeddings.weight"], bare["cls.predictions.bias"]
    return {**bare, f"{decoder}.weight": word.clone(), f"{decoder}.bias": bias.clone()}


@pytest.mark.parametrize("rename", [rename_old, rename_bare])
def test_old_and_new_names_are_read(
    plain: Path, source: Path, rename: Callable[[Weights], Weights]
) -> None:
    put(source, rename(weights_of(source)))
    assert_same(source, plain)
    assert hf.from_hf(source).left == []


def test_pytorch_model_bin_is_read(plain: Path, source: Path) -> None:
    weights = rename_old(weights_of(source))
    put_bin(source, {n: w.requires_grad_(w.is_floating_point()) for n, w in weights.items()})
    assert_same(source, plain)
    assert not any(w.requires_grad for w in hf.from_hf(source).checkpoint.weights.values())


def test_half_precision_is_widened(plain: Path, source: Path) -> None:
    put(source, {n: w.bfloat16() for n, w in weights_of(source).items()})
    exact, widened = (hf.from_hf(d).checkpoint.weights for d in (plain, source))
    for name, weight in widened.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, exact[name].bfloat16().float())


def test_what_is_left_over_is_named(source: Path) -> None:
    extra = {"classifiers.weight": torch.ones(2, HIDDEN), "bert.strange": torch.ones(1)}
    put(source, {**weights_of(source), **extra})
    imported = hf.from_hf(source)
    assert imported.left == ["classifiers.weight", "strange"]
    assert "not imported: classifiers.weight, strange" in hf.import_report(imported)


def test_heads_are_recognised(tmp_path: Path) -> None:
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}, "num_labels": 2}
    tiny("BertForSequenceClassification", tmp_path / "class", **names)
    imported = hf.from_hf(tmp_path / "class")
    assert imported.checkpoint.head == Head("classify", ("bad", "good"), max_tokens=17)
    assert imported.lacking == ["MLM head"]
    tiny("BertForSequenceClassification", tmp_path / "score", num_labels=1)
    assert hf.from_hf(tmp_path / "score").checkpoint.head == Head("regress", max_tokens=17)
    tiny("BertModel", tmp_path / "bare")
    bare = hf.from_hf(tmp_path / "bare")
    assert bare.checkpoint.head is None
    assert bare.lacking == ["MLM head"]
    assert "pooler.weight" in bare.checkpoint.weights
    tiny("BertForPreTraining", tmp_path / "both")
    both = hf.from_hf(tmp_path / "both")
    assert both.checkpoint.head == Head("mlm", max_tokens=17)
    assert "pooler.weight" in both.checkpoint.weights
    assert both.checkpoint.weights["pair_head.weight"].shape == (2, HIDDEN)
    assert both.left == []
    for imported in (bare, both):
        imported.checkpoint.model()


def test_classes_are_named_by_their_numbers(tmp_path: Path) -> None:
    """Any other name of a class would be lost without a word."""
    tiny("BertForSequenceClassification", tmp_path)
    change_config(tmp_path, id2label={"a": "w", "b": "x", "c": "y", "d": "z"})
    with pytest.raises(
        BadInput, match=r"w, x, y, z; the head has 4 .* id2label must give each number from 0 to 3"
    ):
        hf.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("Bert", "type_vocab_size", 0, "type_vocab_size=0 is not bert's: it has token types"),
        ("Esm", "mask_token_id", None, "token_dropout=True needs mask_token_id"),
    ],
)
def test_what_a_config_would_silently_leave_out_is_refused(
    name: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    tiny(f"{name}ForMaskedLM", tmp_path)
    change_config(tmp_path, **{key: value})
    with pytest.raises(BadInput, match=words):
        hf.from_hf(tmp_path)


KINDS = {
    "SequenceClassification": "classify",
    "TokenClassification": "tag",
    "MultipleChoice": "choice",
}


@pytest.mark.parametrize("said", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("end", KINDS)
@pytest.mark.parametrize("name", ["Bert", "Roberta", "Albert", "DistilBert"])
def test_the_task_of_a_classifier_is_recognised(
    name: str, end: str, said: bool, tmp_path: Path
) -> None:
    """`architectures` or else the tensors show the task.

    Without `architectures`, a classifier for multiple choice is not recognised: its tensors could
    also be those of a score.
    """
    tiny(f"{name}For{end}", tmp_path)
    if not said:
        change_config(tmp_path, architectures=...)
    if end == "MultipleChoice":  # it has one output, however many labels the config names
        change_config(tmp_path, id2label=..., label2id=...)
    imported = hf.from_hf(tmp_path)
    head = imported.checkpoint.head
    known = said or end != "MultipleChoice"
    assert (head.kind if head else None) == (KINDS[end] if known else None)
    assert (imported.left == []) == (head is not None)
    if head is None:
        assert [n for n in imported.left if n.startswith("classifier.")]
    else:
        named = () if end == "MultipleChoice" else tuple(f"LABEL_{i}" for i in range(4))
        assert head.labels == named


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Albert", "DistilBert"])
def test_one_output_is_a_score_if_the_config_says_so(name: str, tmp_path: Path) -> None:
    tiny(f"{name}ForSequenceClassification", tmp_path, num_labels=1)
    for spoil in ({}, {"architectures": ...}, {"id2label": ..., "problem_type": "regression"}):
        change_config(tmp_path, **spoil)
        head = hf.from_hf(tmp_path).checkpoint.head
        assert head is not None
        assert head.kind == "regress"
    change_config(tmp_path, problem_type=...)
    # now it could be multiple choice
    assert hf.from_hf(tmp_path).checkpoint.head is None


@pytest.mark.parametrize("name", ["Bert", "Roberta", "ModernBert"])
@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_text_has_one_label_or_one_score(name: str, problem: str, tmp_path: Path) -> None:
    """A head of another kind, or no head, does not read problem_type."""
    tiny(f"{name}ForSequenceClassification", tmp_path, problem_type=problem)
    more = " with 4 outputs" if problem == "regression" else ""
    with pytest.raises(errors.BadInput, match=f"problem_type {problem}{more} is not supported; a"):
        hf.from_hf(tmp_path)
    for kind in ("Model", "ForTokenClassification"):
        tiny(f"{name}{kind}", tmp_path / kind, problem_type=problem)
        assert hf.from_hf(tmp_path / kind).left == []


def test_two_ids_of_padding_cost_a_warning(tmp_path: Path) -> None:
    """The positions of a RoBERTa start after the padding of its config."""
    tiny("RobertaModel", tmp_path)
    assert not any("pad_token_id" in line for line in hf.import_report(hf.from_hf(tmp_path)))
    change_config(tmp_path, pad_token_id=0)
    imported = hf.from_hf(tmp_path)
    warnings = [line for line in hf.import_report(imported) if line.startswith("warning: ")]
    assert "pad_token_id is 0 in config.json and 1 in the tokenizer" in warnings[0]
    with pytest.raises(errors.BadInput, match=r"model\.first_position=1 is not roberta's"):
        hf.to_hf(imported.checkpoint, tmp_path / "out")


def test_robertas_fixed_activation_concerns_only_its_mlm_head(tmp_path: Path) -> None:
    tiny("RobertaForSequenceClassification", tmp_path, hidden_act="gelu_new")
    imported = hf.from_hf(tmp_path).checkpoint
    assert imported.config.activation == "gelu_tanh"
    hf.to_hf(imported, tmp_path / "out")
    assert read_json(tmp_path / "out/config.json")["hidden_act"] == "gelu_new"
    trained = imported.with_head(Head("mlm"), 1)
    with pytest.raises(errors.BadInput, match="not that of roberta's MLM head"):
        hf.to_hf(trained, tmp_path / "mlm")


def test_tied_embeddings_matter_only_to_an_mlm_head(source: Path, tmp_path: Path) -> None:
    tiny("BertModel", tmp_path / "bare", tie_word_embeddings=False)
    assert hf.from_hf(tmp_path / "bare").left == []


def test_a_vocabulary_may_hold_any_character(source: Path) -> None:
    pieces = [*VOCABULARY[:6], "\u2028", "\x85", "é", *VOCABULARY[9:]]
    (source / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    assert hf.from_hf(source).checkpoint.tokenizer.pieces == pieces
    (source / "vocab.txt").write_bytes("\r\n".join(pieces).encode())
    assert hf.from_hf(source).checkpoint.tokenizer.pieces == pieces


@pytest.mark.parametrize("cased", [False, True])
def test_the_vocabulary_is_read_from_either_file(source: Path, cased: bool) -> None:
    transformers = pytest.importorskip("transformers")
    pieces = [*tuple(VOCABULARY[:5]), *"abcdeABCDE", *(f"##{c}" for c in "abcdeABCDE"), "é", "##é"]
    (source / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    write_json(source / "tokenizer_config.json", {"do_lower_case": not cased})
    theirs = transformers.BertTokenizer.from_pretrained(source)
    text = ["Abé CAB dé [SEP] abc", "é É aE\tb  c\n", "", "xyz a"]
    from_txt = hf.from_hf(source).checkpoint.tokenizer
    theirs.save_pretrained(source)
    (source / "vocab.txt").unlink(missing_ok=True)
    assert (source / "tokenizer.json").is_file()
    from_json = hf.from_hf(source).checkpoint.tokenizer
    assert from_json.fingerprint == from_txt.fingerprint
    for ids, line in zip(from_json.encode_batch(text), text, strict=True):
        if "[SEP]" not in line:  # in a text it is not a special token for us
            assert ids.tolist() == theirs(line, add_special_tokens=False)["input_ids"]


# ----------------------------------------------------------------------------------- refusals


class Evil:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def evil_zip(source: Path) -> None:
    put_bin(source, {**weights_of(source), "x": Evil(source.parent / "hacked")})


def evil_pickle(source: Path) -> None:
    (source / "model.safetensors").unlink()
    content = pickle.dumps(Evil(source.parent / "hacked"))
    (source / "pytorch_model.bin").write_bytes(content)


def strange_pickle(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"\x80\x89(K")  # torch warns about its protocol


def truncated(name: str, share: float) -> Callable[[Path], None]:
    def cut(source: Path) -> None:
        if name == "pytorch_model.bin":
            put_bin(source, weights_of(source))
        content = (source / name).read_bytes()
        (source / name).write_bytes(content[: int(share * len(content))])

    return cut


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Change one tensor, or remove it if `change` returns None."""

    def apply(source: Path) -> None:
        weights = weights_of(source)
        new = change(weights.pop(name))
        put(source, weights if new is None else {**weights, name: new.contiguous()})

    return apply


def added(**tensors: Tensor) -> Callable[[Path], None]:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda source: put(source, {**weights_of(source), **named})


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda source: change_config(source, **changes)


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        (source / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def without(name: str) -> Callable[[Path], None]:
    return lambda source: (source / name).unlink()


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
WORD = "bert.embeddings.word_embeddings.weight"
NORM = "bert.encoder.layer.0.output.LayerNorm.bias"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 440\n"


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "malicious pickle": (evil_pickle, "pytorch_model.bin is refused"),
    "malicious tensor file": (evil_zip, "pytorch_model.bin is refused"),
    "strange pickle": (strange_pickle, "pytorch_model.bin is refused"),
    "a list": (lambda s: put_bin(s, [torch.ones(2)]), "is not a state dict"),
    "numbered tensors": (lambda s: put_bin(s, {1: torch.ones(2)}), "is not a state dict"),
    "a checkpoint of xformer": (
        lambda s: [(s / f).write_text("{}") for f in ("manifest.json", "config.json")],
        "is a checkpoint of xformer already",
    ),
    "an adapter": (
        lambda s: (s / "config.json").rename(s / "adapter_config.json"),
        "has only an adapter; merge it into its model first",
    ),
    "cut pickle": (truncated("pytorch_model.bin", 0.7), "pytorch_model.bin is refused"),
    "cut early": (truncated("pytorch_model.bin", 0.01), "pytorch_model.bin is refused"),
    "empty pickle": (truncated("pytorch_model.bin", 0), "pytorch_model.bin is refused"),
    "cut safetensors": (truncated("model.safetensors", 0.9), "not a complete safetensors file"),
    "cut header": (truncated("model.safetensors", 0.001), "not a complete safetensors file"),
    "empty safetensors": (truncated("model.safetensors", 0), "not a complete safetensors file"),
    "pointer": (written("model.safetensors", POINTER), "is only a pointer of Git LFS; fetch"),
    "no weights": (without("model.safetensors"), "has neither model.safetensors nor pytorch"),
    "a tensor missing": (
        changed(QUERY, lambda w: None),
        f"lacks the tensor {QUERY.removeprefix('bert.')}",
    ),
    "a head's tensor missing": (
        changed("cls.predictions.transform.dense.bias", lambda w: None),
        "lacks the tensor cls.predictions.transform.dense.bias",
    ),
    "a tensor too wide": (
        changed(WORD, lambda w: w[:, 1:]),
        f"encoder.embeddings.word.weight is ({PIECES}, {HIDDEN - 1}), but its config needs "
        f"({PIECES}, {HIDDEN})",
    ),
    "query unlike key": (
        changed(QUERY, lambda w: w[1:]),
        "attention.self.value.weight must have the same shape, not [(38, 39), (",
    ),
    "a number alone": (changed(NORM, lambda w: w[0]), "output.LayerNorm.bias is a single number"),
    "NaN": (changed(NORM, lambda w: w / 0 * 0), f"{NORM.removeprefix('bert.')} holds NaN"),
    "infinity": (changed(QUERY, lambda w: w / 0), "query.weight holds NaN or infinity"),
    "whole numbers": (changed(NORM, lambda w: w.int()), "holds torch.int32, not floating-point"),
    "one name twice": (
        added(embeddings__word_embeddings__weight=torch.ones(PIECES, HIDDEN)),
        "holds embeddings.word_embeddings.weight twice",
    ),
    "an untied decoder": (
        added(cls__predictions__decoder__weight=torch.ones(PIECES, HIDDEN)),
        "cls.predictions.decoder.weight differs from embeddings.word_embeddings.weight",
    ),
    "a decoder said to be untied": (
        config(tie_word_embeddings=False),
        "tie_word_embeddings: false; only decoders that are tied",
    ),
    "more pieces than vectors": (
        written("vocab.txt", "\n".join([*VOCABULARY, "one", "two"])),
        "the vocabulary has 99 pieces, the embeddings only 97",
    ),
    "a piece twice": (written("vocab.txt", "\n".join([*VOCABULARY, "w3"])), "occurs twice"),
    "no special tokens": (
        written("vocab.txt", "a\nb\n[UNK]\n"),
        "lacks the special tokens [PAD], [CLS], [SEP]",
    ),
    "vocabulary not UTF-8": (written("vocab.txt", b"a\n\xff\n"), "vocab.txt is not UTF-8"),
    "no vocabulary": (without("vocab.txt"), "must contain tokenizer.json, vocab.txt"),
    "another tokenizer": (
        written("tokenizer.json", '{"model": {"type": "BPE"}, "normalizer": null}'),
        "tokenizer.json is not BERT's WordPiece",
    ),
    "no tokenizer": (written("tokenizer.json", "[]"), "tokenizer.json is not BERT's WordPiece"),
    "no config": (without("config.json"), "config.json does not exist"),
    "config not JSON": (written("config.json", "{"), "config.json is not valid JSON"),
    "a list for config": (
        written("config.json", "[]"),
        "model_type None is not supported; bert, ro",
    ),
    "another family": (config(model_type="gpt2"), "model_type 'gpt2' is not supported; bert"),
    "a decoder": (config(is_decoder=True), "is_decoder=True is not supported; only encoders are"),
    "relative positions": (
        config(position_embedding_type="relative_key"),
        "position_embedding_type='relative_key' is not supported; it must be 'absolute'",
    ),
    "another activation": (
        config(hidden_act="silu"),
        "hidden_act 'silu' is not one of gelu, gelu_new, gelu_pytorch_tanh",
    ),
    "heads that do not divide": (
        config(num_attention_heads=4),
        "model.hidden=39 is not a multiple of model.heads=4",
    ),
    "no width": (config(hidden_size=...), "is not a config of bert: it lacks 'hidden_size'"),
    "a wrong width": (config(intermediate_size="wide"), "intermediate input should be a valid int"),
    "more layers than there are": (
        config(num_hidden_layers=3),
        "lacks the tensor encoder.layer.2.attention.self.query.weight",
    ),
}


def shards(directory: Path, form: str = "safetensors", parts: int = 3) -> dict[str, str]:
    """Split the weights into files with an index. Returns the file of each tensor."""
    weights = weights_of(directory)
    (directory / "model.safetensors").unlink()
    stem = "model" if form == "safetensors" else "pytorch_model"
    names = [f"{stem}-{i + 1:05}-of-{parts:05}.{form}" for i in range(parts)]
    places = {name: names[i % parts] for i, name in enumerate(weights)}
    for file in names:
        part = {name: weights[name] for name, place in places.items() if place == file}
        if form == "safetensors":
            save_file(part, directory / file)
        else:
            torch.save(part, directory / file)
    write_json(directory / f"{stem}.{form}.index.json", {"weight_map": places})
    return places


def sharded(
    change: Callable[[dict[str, str], Path], Any], form: str = "safetensors"
) -> Callable[[Path], None]:
    """Split the weights into shards, then change their index."""

    def apply(source: Path) -> None:
        places = shards(source, form)
        change(places, source)
        index = next(source.glob("*.index.json"))
        write_json(index, {"weight_map": places})

    return apply


def last(places: dict[str, str]) -> str:
    return list(places)[-1]


def lying(places: dict[str, str], source: Path) -> None:
    places[QUERY] = next(file for file in set(places.values()) if file != places[QUERY])


def doubled(places: dict[str, str], source: Path) -> None:
    """Put one tensor into two shards."""
    file = source / next(file for file in set(places.values()) if file != places[QUERY])
    save_file({**load_file(file), QUERY: load_file(source / places[QUERY])[QUERY]}, file)


BAD |= {
    "a shard missing": (
        sharded(lambda places, source: (source / places[QUERY]).unlink()),
        "does not exist, although model.safetensors.index.json names it",
    ),
    "a shard of a pickle missing": (
        sharded(lambda places, source: (source / places[QUERY]).unlink(), "bin"),
        "does not exist, although pytorch_model.bin.index.json names it",
    ),
    "a shard cut": (
        sharded(lambda places, source: truncated(places[QUERY], 0.9)(source)),
        "is not a complete safetensors file",
    ),
    "a lying index": (sharded(lying), f"lacks the tensor {QUERY}, which model.safetensors.index"),
    "a tensor in two shards": (sharded(doubled), f"holds {QUERY}, and so does another shard"),
    "a shard elsewhere": (
        sharded(lambda places, source: places.update({QUERY: "../x.safetensors"})),
        "names '../x.safetensors', which is not a file in its directory",
    ),
    "a shard above": (
        sharded(lambda places, source: places.update({QUERY: ".."})),
        "names '..', which is not a file",
    ),
    "a shard of no name": (
        sharded(lambda places, source: places.update({QUERY: ""})),
        "names '', which is not a file",
    ),
    "an absolute shard": (
        sharded(lambda places, source: places.update({QUERY: "/etc/passwd"})),
        "names '/etc/passwd', which is not a file in its directory",
    ),
    "an empty index": (
        sharded(lambda places, source: places.clear()),
        "index.json has no weight_map",
    ),
    "more positions than there are numbers": (
        config(max_position_embeddings=2**63),
        "is not a config of bert",
    ),
    "a billion layers": (config(num_hidden_layers=10**9), "layers input should be less than 4096"),
    "too many layers": (config(num_hidden_layers=4000), "too few for the config's 4000 layers"),
    "too wide by far": (config(hidden_size=3 * 10**9), "hidden input should be less than 16777216"),
    "too wide": (
        config(hidden_size=3 * 10**4),
        "word.weight is (97, 39), but its config needs (97, 30000)",
    ),
    "an activation that is a list": (
        config(hidden_act=["gelu"]),
        "hidden_act ['gelu'] is not one of",
    ),
}


def run_here(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> Done:
    """`python -m xformer.convert ARGUMENTS`, in this process."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        patch.setattr(sys, "argv", ["xformer.convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            start.run(convert.main)
    assert isinstance(ended.value.code, int)
    out, err = capfd.readouterr()
    return Done(ended.value.code, out, "".join([*(f"{w.message}\n" for w in warned), err]))


def assert_refused(done: Done, message: str, directory: Path) -> None:
    """Assert status 2, one line that contains `message`, and no output in `directory`."""
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert message in done.err
    assert [path.name for path in directory.iterdir()] == ["source"]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_costs_one_line_and_leaves_nothing(
    source: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    spoil, message = BAD[case]
    spoil(source)
    capfd.readouterr()
    done = run_here(capfd, "from-hf", source, source.parent / "out")
    assert_refused(done, message, source.parent)


FAMILY = {"bert": "Bert", "roberta": "Roberta", "albert": "Albert", "distilbert": "DistilBert"}
BAD_FAMILIES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "groups": ("albert", config(num_hidden_groups=2), "one group of one layer"),
    "inner groups": ("albert", config(inner_group_num=2), "one group of one layer"),
    "another width of embeddings": (
        "albert",
        config(embedding_size=12),
        "is (97, 11), but its config needs (97, 12)",
    ),
    "no projection": (
        "albert",
        changed("albert.encoder.embedding_hidden_mapping_in.weight", lambda w: None),
        "lacks the tensor encoder.embedding_hidden_mapping_in.weight",
    ),
    "another activation than its head's": (
        "roberta",
        config(hidden_act="relu"),
        "not that of roberta's MLM head, which is always gelu",
    ),
    "no padding": ("roberta", config(pad_token_id=None), "pad_token_id None is not a token id"),
    "words for positions": (
        "roberta",
        config(max_position_embeddings="many"),
        "is not a config of roberta",
    ),
    "too few positions": (
        "roberta",
        config(max_position_embeddings=12),
        "is (19, 39), but its config needs",
    ),
    "half a head": (
        "roberta",
        changed("lm_head.layer_norm.bias", lambda w: None),
        "lacks the tensor lm_head.layer_norm.bias",
    ),
    "an untied decoder": (
        "roberta",
        added(lm_head__decoder__weight=torch.ones(PIECES, HIDDEN)),
        "lm_head.decoder.weight differs from embeddings.word_embeddings.weight",
    ),
    "more pieces than vectors": (
        "roberta",
        config(vocab_size=90),
        "is (97, 39), but its config needs (90, 39)",
    ),
    "a list of types": (
        "bert",
        config(model_type=["bert"]),
        "model_type ['bert'] is not supported",
    ),
    "fewer layers than weights": (
        "bert",
        config(num_hidden_layers=1),
        "beyond the 1 layers in config.json",
    ),
    "fewer layers than distilled weights": (
        "distilbert",
        config(n_layers=1),
        "beyond the 1 layers in config.json",
    ),
    "no merges": ("roberta", without("merges.txt"), "merges.txt does not exist"),
    "NaN": (
        "distilbert",
        changed("distilbert.transformer.layer.1.ffn.lin1.bias", lambda w: w / 0 * 0),
        "transformer.layer.1.ffn.lin1.bias holds NaN",
    ),
    "8-bit numbers": (
        "distilbert",
        changed("vocab_transform.weight", lambda w: w.to(torch.int8)),
        "vocab_transform.weight holds torch.int8",
    ),
    "no dim": ("distilbert", config(dim=...), "is not a config of distilbert: it lacks 'dim'"),
    "another name of activation": (
        "distilbert",
        config(activation="swish"),
        "activation 'swish' is not one of gelu",
    ),
}


@pytest.fixture(scope="module")
def plain_families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny MLM of each family. Tests must not change them."""
    directories = {name: tmp_path_factory.mktemp(name) for name in FAMILY}
    for name, directory in directories.items():
        tiny(f"{FAMILY[name]}ForMaskedLM", directory)
    return directories


@pytest.mark.parametrize("case", BAD_FAMILIES)
def test_bad_input_of_each_family(
    plain_families: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    family, spoil, message = BAD_FAMILIES[case]
    shutil.copytree(plain_families[family], tmp_path / "source")
    spoil(tmp_path / "source")
    capfd.readouterr()
    done = run_here(capfd, "from-hf", tmp_path / "source", tmp_path / "out")
    assert_refused(done, message, tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("family", FAMILY)
def test_shards_are_read(
    plain_families: dict[str, Path], tmp_path: Path, family: str, form: str
) -> None:
    shutil.copytree(plain_families[family], tmp_path / "source")
    shards(tmp_path / "source", form)
    assert_same(tmp_path / "source", plain_families[family])
    imported = hf.from_hf(tmp_path / "source")
    assert imported.left == []
    sums = imported.checkpoint.history[-1]["shards"]
    assert sums == {name: file_checksum(tmp_path / "source" / name) for name in sums}
    assert len(sums) > 1


@pytest.mark.parametrize("family", FAMILY)
def test_old_pickles_of_each_family_are_read(
    plain_families: dict[str, Path], tmp_path: Path, family: str
) -> None:
    # TensorFlow's names, a buffer, which is not a weight, and tied copies written out
    source = tmp_path / "source"
    shutil.copytree(plain_families[family], source)
    weights, names = weights_of(source), hf.FAMILIES[family]
    old = {}
    for name, weight in weights.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old[name.replace("LayerNorm.bias", "LayerNorm.beta")] = weight
    assert old.keys() != weights.keys()
    old[f"{names.prefix}embeddings.position_ids"] = torch.arange(17)[None]
    for copy, original in names.tied.items():
        bare = original if original in weights else f"{names.prefix}{original}"
        old[copy] = weights[bare].clone()
    put_bin(source, old)
    assert_same(source, plain_families[family])
    imported = hf.from_hf(source)
    assert imported.left == []
    assert imported.tied == [*names.tied]


@pytest.mark.parametrize("family", FAMILY)
def test_every_family_is_accounted_for(plain_families: dict[str, Path], family: str) -> None:
    imported = hf.from_hf(plain_families[family])
    assert imported.family.name == family
    assert imported.checkpoint.head == Head("mlm", max_tokens=17)
    assert imported.taken == len(weights_of(plain_families[family]))
    assert imported.left == []


def test_the_malicious_pickles_are_really_malicious(source: Path) -> None:
    # the two files above are dangerous if they are trusted
    for spoil in (evil_zip, evil_pickle):
        put(source, {"x": torch.ones(1)})
        spoil(source)
        with (source / "pytorch_model.bin").open("rb") as file:
            if spoil is evil_pickle:
                pickle.load(file)
            else:
                torch.load(file, weights_only=False)
        (source.parent / "hacked").unlink()


def test_the_command_refuses_a_malicious_pickle(source: Path) -> None:
    evil_pickle(source)
    out = source.parent / "out"
    done = command("-m", "xformer.convert", "from-hf", source, out)
    assert_refused(done, "it is damaged, or holds objects other than tensors", source.parent)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["from-hg", "a", "b"],
            "command: 'from-hg' is not one of from-hf, from-plus, to-hf, halve, inspect; did you",
        ),
        (["from-hf"], "the following arguments are required: HF_DIR, OUT"),
        ([], "the following arguments are required: command"),
        (["from-hf", "./nowhere", "out"], "nowhere is not a directory"),
        (["to-hf", "nowhere", "out"], "the checkpoint nowhere does not exist"),
        (["inspect", "nowhere"], "the checkpoint nowhere does not exist"),
        (["inspekt", "x"], "halve, inspect; did you mean inspect?"),
        (["from-hf", "a", "b", "--overwite"], "unrecognized arguments: --overwite"),
    ],
)
def test_bad_arguments_cost_one_line(
    capfd: pytest.CaptureFixture[str], arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    assert_refused(run_here(capfd, *arguments), message, tmp_path)


def test_the_command_writes_a_checkpoint_and_keeps_an_old_one(
    plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    done = command("-m", "xformer.convert", "from-hf", plain, out)
    imported = hf.from_hf(plain)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == hf.import_report(imported)
    loaded = checkpoints.load(out)
    for name, weight in imported.checkpoint.weights.items():
        assert torch.equal(loaded.weights[name], weight), name
    assert loaded.tokenizer.fingerprint == imported.checkpoint.tokenizer.fingerprint

    manifest = (out / "manifest.json").read_bytes()
    again = run_here(capfd, "from-hf", plain, out)
    assert again.status == 2
    assert again.err == (
        f"error: {out} exists; give another output, or --overwrite to replace it (in Python, "
        "overwrite=True)\n"
    )
    assert (out / "manifest.json").read_bytes() == manifest
    assert run_here(capfd, "from-hf", plain, out, "--overwrite").status == 0


@pytest.mark.parametrize("command", ["from-hf", "to-hf"])
def test_only_its_own_output_is_overwritten(
    plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    """A directory of other files is not overwritten, nor one that contains the source."""
    checkpoint = tmp_path / "nest/checkpoint"
    assert run_here(capfd, "from-hf", plain, checkpoint).status == 0
    source = plain if command == "from-hf" else checkpoint
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("keep")
    done = run_here(capfd, command, source, precious, "--overwrite")
    assert (done.status, "was not written by this command" in done.err) == (2, True)
    assert (precious / "thesis.txt").read_text() == "keep"
    if command == "to-hf":
        for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
            (tmp_path / "nest" / name).write_text("{}")
        done = run_here(capfd, command, source, tmp_path / "nest", "--overwrite")
        assert (done.status, "contains the input" in done.err) == (2, True)
        assert checkpoints.load(checkpoint).head is not None


def test_a_failure_leaves_the_old_checkpoint(
    plain: Path, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = source.parent / "out"
    assert run_here(capfd, "from-hf", plain, out).status == 0
    (source / "vocab.txt").unlink()
    assert run_here(capfd, "from-hf", source, out, "--overwrite").status == 2
    checkpoints.load(out).model()


# -------------------------------------------------------------------------------- real weights


@pytest.fixture(scope="module")
def sentences(shared: Path) -> list[str]:
    """100 real sentences: the last column of CoLA's dev set."""
    lines = (shared / "glue/CoLA/dev.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[3] for line in lines[:100]]


def test_real_weights_give_the_hidden_states_of_transformers(
    minilm: Path, sentences: list[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    imported = hf.from_hf(minilm)
    assert imported.left == []
    assert imported.lacking == ["MLM head"]
    checkpoint = imported.checkpoint
    bare = checkpoint.tokenizer.encode_batch(sentences)
    theirs = transformers.AutoTokenizer.from_pretrained(minilm)
    ids = theirs(sentences, padding=True, return_tensors="pt")
    assert [b.tolist() for b in bare] == theirs(sentences, add_special_tokens=False)["input_ids"]

    offsets = np.cumsum([0, *map(len, bare)])
    split = Split("x", 100, int(offsets[-1]), {"tokens": Ragged(np.concatenate(bare), offsets)})
    batch = Assembler(split, checkpoint.tokenizer, 512).batch(np.arange(100))
    with torch.inference_mode():
        packed = to_device(batch, torch.device("cpu"))
        ours = inside(checkpoint.model().encoder, packed).hidden
        bert = transformers.BertModel.from_pretrained(minilm).eval()
        expected = bert(**ids, output_hidden_states=True).hidden_states
    assert len(ours) == len(expected) == 7
    order = torch.from_numpy(batch.rows)
    real = ids["attention_mask"][order].bool()
    for our_hidden, hidden in zip(ours, expected, strict=True):
        assert torch.allclose(our_hidden, hidden[order][real], rtol=0, atol=1e-5)


# ------------------------------------------------------------------- halved, and installed


@pytest.mark.slow
def test_halve_copies_with_16_bits(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has half the size and loads as fp32 within the rounding of fp16. A weight that is
    too large is refused. If the path micro/NAME does not exist, it means the installed
    checkpoint."""
    imported = hf.from_hf(plain).checkpoint
    checkpoints.save(imported, tmp_path / "whole")
    installed = tmp_path / "package" / "micro"
    installed.mkdir(parents=True)
    out = installed / "english"
    done = command("-m", "xformer.convert", "halve", tmp_path / "whole", out)
    assert f"{out}: {len(imported.weights)} weights, " in done.out
    sizes = [(path / "model.safetensors").stat().st_size for path in (tmp_path / "whole", out)]
    assert sizes[1] < 0.7 * sizes[0]
    monkeypatch.setattr("xformer.data.files.PACKAGE", tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    halved = checkpoints.load("micro/english")
    assert (halved.config, halved.head) == (imported.config, imported.head)
    for name, weight in imported.weights.items():
        assert halved.weights[name].dtype == weight.dtype
        torch.testing.assert_close(halved.weights[name], weight, rtol=2**-11, atol=2**-25)
    with pytest.raises(BadInput, match="micro/french does not exist"):
        checkpoints.load("micro/french")

    name = next(iter(imported.weights))
    weights = {**imported.weights, name: imported.weights[name] + 1e6}
    checkpoints.save(replace(imported, weights=weights), tmp_path / "large")
    refused(
        command("-m", "xformer.convert", "halve", tmp_path / "large", tmp_path / "no"),
        f"the weight {name} overflows fp16",
    )
    assert not (tmp_path / "no").exists()


def test_the_installed_encoders_fill_masks() -> None:
    """micro/english knows some English, and micro/brackets closes brackets."""
    english = checkpoints.load("micro/english")
    assert english.config.layers == 4
    assert sum(weight.numel() for weight in english.weights.values()) == 5_364_480
    for text, word in (
        ("he opened the [MASK] and went out .", "door"),
        ("he put his [MASK] in his pocket .", "hand"),
    ):
        assert word == fill_mask(english, text, 1)[0][0][1]
    brackets = checkpoints.load("micro/brackets")
    assert fill_mask(brackets, "w7 w9 w9 [MASK]", 1)[0][0][1] == "w7"  # closes it
    with pytest.raises(BadInput, match="top=0: give at least 1"):
        fill_mask(english, "[MASK]", 0)
    with pytest.raises(BadInput, match="is not UTF-8; type it in a terminal that uses UTF-8"):
        fill_mask(english, "caf\udce9 [MASK]", 1)
    shown = command("-m", "xformer.convert", "inspect", "micro/english").out
    assert "installed with the package" in shown
