"""Export: every tensor comes back unchanged, and transformers loads the directories with equal
outputs and equal token ids. Also tests `inspect`.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
import torch
from oracle import CASES, FAMILIES, class_of, labels_of
from oracle import HEADS as CLASSES
from safetensors.torch import load_file, save_file
from test_tokenizers import TEXTS
from tiny import LONGEST, PIECES, distance, family_of, packed, padded, random_batch, tiny
from tokenizers import AddedToken

from xformer import checkpoint as checkpoints
from xformer import start
from xformer.checkpoint import Checkpoint, Head
from xformer.convert import __main__ as convert
from xformer.convert import hf
from xformer.convert.describe import describe
from xformer.data import published, tokenizers, vocabularies
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.files import read_json, write_json
from xformer.data.store import Ragged, Split
from xformer.evaluate import fill_mask
from xformer.model.config import ModelConfig
from xformer.parallel.feed import to_device
from xformer.texts import pack

ROBERTA = [*tokenizers.ROBERTA_SPECIAL.values()]
CAMEMBERT = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
AUTO = {"pair": "ForPreTraining", "": "", **{kind: f"For{name}" for kind, name in CLASSES.items()}}


def there_and_back(source: Path, directory: Path) -> Path:
    """Import with from-hf, save, load, and export with to-hf."""
    imported = hf.from_hf(source)
    assert imported.left == []
    checkpoints.save(imported.checkpoint, directory / "ours")
    loaded = checkpoints.load(directory / "ours")
    assert hf.to_hf(loaded, directory / "theirs") is imported.family
    return directory / "theirs"


def assert_same_bytes(exported: Path, source: Path) -> None:
    one, two = (load_file(d / "model.safetensors") for d in (exported, source))
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *CASES,
        *((name, "") for name in FAMILIES),
        *((name, kind) for name in ("XLMRoberta", "Camembert") for kind in ("", "mlm")),
    ],
    ids=lambda x: x or "bare",
)
def test_a_round_trip_keeps_every_byte(name: str, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    one = {"num_labels": 1} if kind == "regress" else {}
    source = tmp_path / "source"
    theirs = tiny(class_of(name, kind) if kind else f"{name}Model", source, **one)
    exported = there_and_back(source, tmp_path)
    assert_same_bytes(exported, source)
    assert hf.from_hf(exported).checkpoint.config == hf.from_hf(source).checkpoint.config
    assert hf.from_hf(exported).checkpoint.head == hf.from_hf(source).checkpoint.head

    auto = getattr(transformers, f"AutoModel{AUTO[kind]}")
    loaded, report = auto.from_pretrained(
        exported, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(theirs)
    batch = random_batch()
    given = padded(batch, family_of(f"{name}Model").name)
    for one_output, other in zip(loaded.eval()(**given)[:2], theirs(**given)[:2], strict=True):
        # the bytes are equal, but their place in memory may change the last bit of an output
        assert torch.allclose(one_output, other, rtol=1e-5, atol=1e-6)
    ours, again = (hf.from_hf(d).checkpoint.tokenizer for d in (source, exported))
    assert again.fingerprint == ours.fingerprint
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    text = "MKTAYIAKQR" if name == "Esm" else "w3 W4w5 a!? é"
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bare == ours.encode_batch([text])[0].tolist()
    loaded(**tokenizer(["w3", "w4 w5"], padding=True, return_tensors="pt"))


def camembert(directory: Path) -> Any:
    """A random CamembertForMaskedLM with a SentencePiece model, as fairseq published them."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_writer=model, vocab_size=115, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    special = {"pad_token_id": 1, "bos_token_id": 5, "eos_token_id": 6}
    theirs = tiny("CamembertForMaskedLM", directory, vocab_size=pieces + 5, **special)
    for file in directory.glob("*token*"):
        file.unlink()
    (directory / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    return theirs


def test_camembert_is_imported_as_the_roberta_that_it_is(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = camembert(tmp_path / "source")
    exported = there_and_back(tmp_path / "source", tmp_path)
    ours = checkpoints.load(tmp_path / "ours")
    assert (ours.config.dropout_form, ours.config.first_position) == ("roberta", 2)
    assert ours.tokenizer.special == {"pad": 1, "unk": 3, "cls": 5, "sep": 6, "mask": 119}
    slow, fast = (
        transformers.CamembertTokenizerFast.from_pretrained(tmp_path / "source"),
        transformers.AutoTokenizer.from_pretrained(exported),
    )
    assert type(fast) is type(slow) is transformers.CamembertTokenizer
    # elsewhere a text that spells a special token gets its id
    texts = [text for text in TEXTS if "<s>" not in text] + ["  ", "NOTUSED a▁b", "l'été ☃ 12"]
    ids = [row.tolist() for row in ours.tokenizer.encode_batch(texts)]
    for tokenizer in (slow, fast):
        assert tokenizer(texts, add_special_tokens=False)["input_ids"] == ids
        rows = tokenizer(texts[:2])["input_ids"]
        assert rows == [[5, *row, 6] for row in ids[:2]]
        assert tokenizer(*texts[:2])["input_ids"] == [5, *ids[0], 6, 6, *ids[1], 6]
    hidden = set(range(5)) - {3}
    [spelt] = ours.tokenizer.encode_batch(["<s>NOTUSED <unk>NOTUSED</s>NOTUSED <pad><mask>"])
    assert not hidden & set(spelt.tolist())
    assert_same_bytes(exported, tmp_path / "source")
    again = transformers.AutoModelForMaskedLM.from_pretrained(exported)
    assert type(again) is type(theirs)
    batch = random_batch()
    with torch.inference_mode():
        expected = [packed(m(**padded(batch, "camembert")).logits, batch) for m in (theirs, again)]
    for logits in expected:
        assert distance(ours.model().logits(batch), logits[batch.places]) <= 1e-5


def mixed(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Norms in float32, queries in float64, all others in float16."""
    if "norm" in name.lower():
        return weight
    queries = any(part in name for part in ("q_lin", "query", "Wqkv"))
    return weight.double() * 1.1 if queries else weight.half()


PRECISIONS: dict[str, tuple[str, Callable[[str, torch.Tensor], torch.Tensor]]] = {
    "fp16": ("float16", lambda _, w: w.half()),
    "bf16": ("bfloat16", lambda _, w: w.bfloat16()),
    # numbers that float32 cannot hold
    "fp64": ("float64", lambda n, w: w.double() * (1.0 if n.endswith("inv_freq") else 1.1)),
    "mixed": ("float16", mixed),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_a_round_trip_keeps_every_precision(name: str, precision: str, tmp_path: Path) -> None:
    common, change = PRECISIONS[precision]
    tiny(f"{name}ForSequenceClassification", tmp_path)
    source = {n: change(n, w) for n, w in load_file(tmp_path / "model.safetensors").items()}
    save_file(source, tmp_path / "model.safetensors", metadata={"format": "pt"})
    exported = there_and_back(tmp_path, tmp_path)
    assert_same_bytes(exported, tmp_path)
    assert len({w.dtype for w in source.values()}) == (3 if precision == "mixed" else 1)
    assert read_json(exported / "config.json")["dtype"] == common
    # after training the weights no longer fit their types
    checkpoint = checkpoints.load(tmp_path / "ours")
    assert {w.dtype for w in checkpoint.model().state_dict().values()} == {torch.float32}
    weights = {n: w.float() + 1e-6 for n, w in checkpoint.weights.items()}
    hf.to_hf(replace(checkpoint, weights=weights), tmp_path / "changed")
    changed = load_file(tmp_path / "changed/model.safetensors")
    assert {w.dtype for w in changed.values()} == {torch.float32}
    assert read_json(tmp_path / "changed/config.json")["dtype"] == "float32"


SHAPES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"first_position": 2, "token_types": 1},
    "albert": {"embedding": 8, "shared_layers": True, "activation": "gelu_tanh"},
    "distilbert": {"token_types": 0, "pooler": "relu", "head_dropout": 0.2},
}
SMALL: dict[str, Any] = {
    "layers": 3,
    "hidden": 24,
    "heads": 3,
    "intermediate": 20,
    "max_positions": LONGEST,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="module")
def learned() -> dict[str, tokenizers.Tokenizer]:
    corpus = TEXTS * 3
    letters = [*(f"▁{c}" for c in "abcdefgh"), "▁", *"abcdefghijklmnopqrstuvwxyz.,'?"]
    special = [(piece, 0.0) for piece in tokenizers.ALBERT_SPECIAL.values()]
    scores = [*special, *((p, -1.0 - i / 7) for i, p in enumerate([*letters, "X", "e\u0301"]))]
    return {
        "wordpiece": vocabularies.learn("wordpiece", corpus, 200, True, set("".join(corpus))),
        "cased": vocabularies.learn("wordpiece", corpus, 200, False, set("".join(corpus))),
        "bpe": vocabularies.learn("bpe", corpus, 400),
        "unigram": vocabularies.learn("unigram", corpus, 100),
        "albert": vocabularies.albert(scores, None, [], ["?"]),
        "accents": vocabularies.albert(scores, None, [], [], lowercase=False, keep_accents=True),
        "xlm": vocabularies.xlm_roberta(
            [*((p, 0.0) for p in ROBERTA[:4]), *scores[5:], (ROBERTA[4], 0.0)], None
        ),
        "camembert": vocabularies.xlm_roberta(
            [*((p, 0.0) for p in CAMEMBERT), *scores[5:], (ROBERTA[4], 0.0)], None
        ),
        "symbols": vocabularies.learn("symbols", corpus, 200),
        "separated": vocabularies.symbols(["w5", "w6", "w7"], separated=True),
    }


def scratch(learned: dict[str, tokenizers.Tokenizer], family: str, **more: Any) -> Checkpoint:
    tokenizer = learned["bpe" if family == "roberta" else "wordpiece"]
    return checkpoints.fresh(ModelConfig(**{**SMALL, **SHAPES[family], **more}), tokenizer, 1)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("family", SHAPES)
def test_our_own_checkpoints_give_equal_outputs_in_transformers(
    learned: dict[str, tokenizers.Tokenizer], family: str, kind: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    head = Head(kind, ("a", "b", "c") if kind in ("classify", "tag") else ())
    made = scratch(learned, family).with_head(head, seed=2)
    assert hf.to_hf(made, tmp_path / "theirs").name == family
    auto = getattr(transformers, f"AutoModel{AUTO[kind]}")
    theirs = auto.from_pretrained(tmp_path / "theirs").eval()
    batch = replace(random_batch(), labels=labels_of(random_batch(), kind))
    output = theirs(**padded(batch, family))
    ours = made.model().logits(batch)
    if kind == "span":
        expected = packed(torch.stack([output.start_logits, output.end_logits], 2), batch)
    else:
        words = kind in ("mlm", "tag")
        expected = packed(output.logits, batch)[batch.places] if words else output.logits
    assert distance(ours, expected) <= 1e-5
    if head.labels:
        assert list(theirs.config.id2label.values()) == ["a", "b", "c"]
    again = hf.from_hf(tmp_path / "theirs").checkpoint
    assert again.head is not None
    assert (again.head.kind, again.head.labels) == (kind, head.labels)
    assert again.config == made.config.model_copy(
        update={"head_dropout": again.config.head_dropout, "dropout_form": family}
    )
    assert again.config.before_head == made.config.before_head
    assert again.tokenizer.fingerprint == made.tokenizer.fingerprint
    assert all(torch.equal(w, again.weights[name]) for name, w in made.weights.items())


@pytest.mark.parametrize("family", SHAPES)
def test_masks_are_filled_as_transformers_does(
    learned: dict[str, tokenizers.Tokenizer], family: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    made = scratch(learned, family).with_head(Head("mlm"), seed=2)
    hf.to_hf(made, tmp_path / "theirs")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    mask = tokenizer.mask_token
    text = f"the {mask} of{mask} tests {mask}."
    given = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        logits = theirs(**given).logits[given["input_ids"] == tokenizer.mask_token_id]
    best = logits.softmax(1).topk(3)
    filled = fill_mask(made, text, 3)
    assert len(filled) == 3
    for one, values, ids in zip(filled, best.values, best.indices, strict=True):
        assert [piece for _, piece in one] == tokenizer.convert_ids_to_tokens(ids)
        assert [p for p, _ in one] == pytest.approx(values.tolist(), rel=1e-4)


@pytest.mark.parametrize("family", SHAPES)
def test_pairs_of_texts_give_equal_outputs(
    learned: dict[str, tokenizers.Tokenizer], family: str, tmp_path: Path
) -> None:
    # covers RoBERTa's separators and positions, with and without segments, rows of all lengths
    transformers = pytest.importorskip("transformers")
    made = scratch(learned, family, max_positions=80).with_head(Head("classify", ("a", "b")), 2)
    hf.to_hf(made, tmp_path / "theirs")
    name = "AutoModelForSequenceClassification"
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "theirs").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    texts = ["", "the first", "It's done.", "of 17 tests, isn't it?"]
    others = ["a", "Don't panic: we're done", "", "b"]
    with torch.inference_mode():
        expected = theirs(**tokenizer(texts, others, padding=True, return_tensors="pt")).logits
    columns = {}
    for column, of in (("tokens", texts), ("tokens_b", others)):
        ids = made.tokenizer.encode_batch(of)
        columns[column] = Ragged(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))
    batch = Assembler(Split("x", 4, 0, columns), made.tokenizer, 80).batch(np.arange(4))
    logits = made.model().logits(to_device(batch, torch.device("cpu")))
    assert distance(logits, expected[torch.from_numpy(batch.rows)]) <= 1e-5


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        (
            "bert",
            {"norm": "pre"},
            "no family has LayerNorm before attention and MLP (model.norm='pre')",
        ),
        ("bert", {"shared_layers": True}, "model.embedding=0 is not albert's"),
        ("bert", {"embedding": 7}, "model.shared_layers=False is not albert's"),
        ("albert", {"first_position": 2}, "model.first_position=2 is not albert's"),
        ("albert", {"token_types": 0}, "model.token_types=0 is not albert's"),
        (
            "roberta",
            {"first_position": 5},
            "first_position=5 is not roberta's, which needs 2",
        ),
        ("roberta", {"token_types": 0}, "model.token_types=0 is not roberta's"),
        ("distilbert", {"pooler": "tanh"}, "model.pooler=tanh is not distilbert's"),
        ("distilbert", {"layer_norm_eps": 1e-5}, "model.layer_norm_eps=1e-05 is not distilbert's"),
        ("bert", {"pooler": "relu"}, "model.pooler=relu is not bert's"),
    ],
)
def test_a_shape_that_no_family_has_is_refused(
    learned: dict[str, tokenizers.Tokenizer],
    family: str,
    more: dict[str, Any],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = scratch(learned, family, **more).with_head(Head("classify", ("a", "b")), 1)
    checkpoints.save(made, tmp_path / "ours")
    status, out, err = run(capfd, "to-hf", tmp_path / "ours", tmp_path / "theirs")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def run(capfd: pytest.CaptureFixture[str], *arguments: Any) -> tuple[Any, str, str]:
    """`python -m xformer.convert ARGUMENTS`, in this process."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "argv", ["xformer.convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            start.run(convert.main)
    out, err = capfd.readouterr()
    return ended.value.code, out, err


def test_the_command_keeps_an_old_directory(
    learned: dict[str, tokenizers.Tokenizer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints.save(scratch(learned, "bert"), tmp_path / "ours")
    line = ("to-hf", tmp_path / "ours", tmp_path / "theirs")
    assert run(capfd, *line)[0] == 0
    assert run(capfd, *line)[::2] == (
        2,
        f"error: {line[2]} exists; give another output, or --overwrite to replace it "
        "(in Python, overwrite=True)\n",
    )
    assert run(capfd, *line, "--overwrite")[0] == 0
    (tmp_path / "ours/model.safetensors").write_bytes(b"x")
    before = (tmp_path / "theirs/config.json").read_bytes()
    assert "is damaged" in run(capfd, *line, "--overwrite")[2]
    assert (tmp_path / "theirs/config.json").read_bytes() == before


def test_a_name_that_is_not_a_directory_needs_the_hub(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run(capfd, "from-hf", "nobody/nothing", tmp_path / "out")[::2] == (
        2,
        "error: nobody/nothing is not a directory; fetching it from the Hugging Face hub "
        "needs the package huggingface_hub, which is in xformer-transfer[hub]: pip install "
        "huggingface_hub\n",
    )


def test_of_a_repository_of_the_hub_one_kind_of_weights_is_fetched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    there, cache = tmp_path / "there", tmp_path / "cache"
    tiny("BertModel", there)
    weights = load_file(there / "model.safetensors")
    torch.save(weights, there / "pytorch_model.bin")
    shutil.copyfile(there / "model.safetensors", there / "adapter_model.safetensors")
    cache.mkdir()

    def fetch(name: str, allow_patterns: list[str]) -> str:
        if name != "some/model":
            raise hub.errors.HFValidationError(f"no such repository: {name}\nmore")
        for file in there.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copyfile(file, cache / file.name)
        return str(cache)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    for kind in ("model.safetensors", "pytorch_model.bin"):  # the second only without the first
        place = tmp_path / kind
        assert run(capfd, "from-hf", "some/model", place)[0] == 0
        made = checkpoints.load(place)
        assert (made.config.hidden, made.history[0]["repository"]) == (39, "some/model")
        assert {f.name for f in cache.iterdir() if f.suffix in (".safetensors", ".bin")} == {kind}
        assert {f.name for f in there.iterdir()} - {f.name for f in cache.iterdir()} <= {
            "model.safetensors",
            "pytorch_model.bin",
            "adapter_model.safetensors",
        }
        shutil.rmtree(cache)
        cache.mkdir()
        (there / "model.safetensors").unlink(missing_ok=True)
    status, out, err = run(capfd, "from-hf", "other/model", tmp_path / "two")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.endswith(
        "fetching it from the Hugging Face hub failed: no such repository: other/model\n"
    )


def test_real_weights_survive_a_round_trip(minilm: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    exported = there_and_back(minilm, tmp_path)
    source = load_file(minilm / "model.safetensors")
    source.pop("embeddings.position_ids", None)
    again = load_file(exported / "model.safetensors")
    assert {n: w.dtype for n, w in again.items()} == {n: w.dtype for n, w in source.items()}
    assert all(torch.equal(again[name], tensor) for name, tensor in source.items())
    one, two = (transformers.AutoTokenizer.from_pretrained(d) for d in (minilm, exported))
    pair = ["It's naïve — a test.", "Isn't it? 北京"]
    assert one(*pair)["input_ids"] == two(*pair)["input_ids"]
    with torch.inference_mode():
        outputs = [
            transformers.AutoModel.from_pretrained(d).eval()(**one(*pair, return_tensors="pt"))
            for d in (minilm, exported)
        ]
    for one_output, other in zip(outputs[0].to_tuple(), outputs[1].to_tuple(), strict=True):
        assert torch.allclose(one_output, other, rtol=1e-5, atol=1e-6)


def test_the_files_of_sentence_transformers_are_kept(minilm: Path, tmp_path: Path) -> None:
    exported = there_and_back(minilm, tmp_path)
    names = ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"]
    for name in names:
        assert read_json(exported / name) == read_json(minilm / name)
    assert read_json(exported / "sentence_bert_config.json")["max_seq_length"] == 256
    # a classifier is not a sentence encoder
    imported = hf.from_hf(minilm).checkpoint
    made = imported.with_head(Head("classify", ("a", "b")), 1)
    hf.to_hf(made, tmp_path / "classifier")
    assert not (tmp_path / "classifier/modules.json").exists()


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "pooling=first"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "pooling=mean"),
        ({"pooling_mode_max_tokens": True}, ""),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ""),
    ],
)
def test_the_import_says_how_to_get_the_same_vectors(
    pooling: dict[str, bool], expected: str, tmp_path: Path
) -> None:
    tiny("BertModel", tmp_path)
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ]
    write_json(tmp_path / "modules.json", modules)
    (tmp_path / "1_Pooling").mkdir()
    write_json(tmp_path / "1_Pooling/config.json", {"word_embedding_dimension": 24, **pooling})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 8})
    lines = hf.import_report(hf.from_hf(tmp_path))
    said = [line for line in lines if "sentence-transformers" in line]
    how = f"xformer encode {expected} normalize=true max_tokens=8"
    none = "a pooling that xformer encode does not have"
    assert said == [f"the vectors of sentence-transformers: {how if expected else none}"]


def test_modules_with_weights_are_reported_as_left_over(tmp_path: Path) -> None:
    tiny("BertModel", tmp_path / "source")
    kinds = ("Transformer", "Pooling", "Dense")
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(tmp_path / "source/modules.json", modules)
    assert hf.from_hf(tmp_path / "source").left == ["the module sentence_transformers.models.Dense"]
    write_json(tmp_path / "source/modules.json", [{"path": "../x", "type": "a.Pooling"}])
    assert "sentence" not in hf.from_hf(tmp_path / "source").checkpoint.history[0]
    write_json(tmp_path / "source/modules.json", {"path": ""})
    with pytest.raises(BadInput, match=r"modules\.json is not a list of modules"):
        hf.from_hf(tmp_path / "source")


def test_sentence_transformers_loads_an_exported_directory(
    learned: dict[str, tokenizers.Tokenizer], minilm: Path, tmp_path: Path
) -> None:
    sentence = pytest.importorskip("sentence_transformers")
    texts = ["a test", "It's done, isn't it?"]
    there = sentence.SentenceTransformer(str(minilm), device="cpu").encode(texts)
    exported = there_and_back(minilm, tmp_path)
    again = sentence.SentenceTransformer(str(exported), device="cpu").encode(texts)
    assert np.allclose(there, again, atol=1e-6)
    hf.to_hf(scratch(learned, "bert"), tmp_path / "plain")
    plain = sentence.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    assert plain.encode(texts).shape == (2, 24)


# ---------------------------------------------------------------------------------- tokenizers

KINDS = ["wordpiece", "cased", "bpe", "unigram", "albert", "accents", "xlm", "camembert"]
KINDS += ["symbols", "separated"]
# written so that a table of NFKC must be read as SentencePiece reads it
COMPOSED = [
    "\uff83\uff9a\uff8b\uff9e\u3068 \uff8a\uff9f\uff9d",  # half-width kana, voicing marks apart
    normalize("NFD", "\u30ac\u30fc\u30eb\u30ba \u30d4\u30a2\u30ce\u304c"),  # kana
    normalize("NFD", "\ud55c\uae00 \ubd84\ud574"),  # Hangul
    "\ub124\u3133 \u314b\u314b\u314f",  # letters of Hangul after a syllable, and before a vowel
    normalize("NFD", "Vi\u1ec7t qu\u1ed1c \u1eabn"),  # two accents
    "qu\xf4\u0301c Vi\xea\u0323t",  # Vietnamese as Windows writes it, which stays apart
    "\u0627\u0644\u0644\u0651\u064f\u063a\u064e",  # Arabic marks in an order that NFC would change
    "\u0628\u0651\u0650 \u0622 \u0627\u0653",
    "\u05d1\u05bc\u05b0\u05e8\u05b5\u05d0\u05e9\u05c1\u05b4",  # Hebrew
    "\u0e19\u0e49\u0e33 \u0915\u093c\u0930",  # Thai, Devanagari
]


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids(
    learned: dict[str, tokenizers.Tokenizer], kind: str, segments: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = learned[kind]
    published.export_tokenizer(ours, tmp_path, 37, segments)
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [text for text in TEXTS if "[SEP]" not in text] + ["  ", "a  ▁b", " w5 w6\x1fw9 "]
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == expected
    a, b = (ids.tolist() for ids in ours.encode_batch(["w5 first", "w6 d."]))
    cls, sep = ours.special["cls"], ours.special["sep"]
    assert theirs("w5 first")["input_ids"] == [cls, *a, sep]
    pair = theirs("w5 first", "w6 d.")
    assert pair["input_ids"] == [cls, *a, *[sep] * ours.pair_separators, *b, sep]
    assert ("token_type_ids" in pair) == segments
    if segments:  # as in xformer.data.batch
        second = len(b) + 1
        assert pair["token_type_ids"] == [0] * (len(pair["input_ids"]) - second) + [1] * second
    for role, i in ours.special.items():
        assert getattr(theirs, f"{role}_token_id") == i
    assert theirs.model_max_length == 37
    assert len(theirs) == len(ours)
    again = published.import_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint


def test_the_length_of_training_is_exported(
    learned: dict[str, tokenizers.Tokenizer], tmp_path: Path
) -> None:
    """So that `truncation=True` is enough. An MLM head reads all lengths of its model."""
    start = scratch(learned, "bert")
    longest = start.config.max_positions
    for name, head, limit in (
        ("class", Head("classify", ("x", "y"), max_tokens=9), 9),
        ("mlm", Head("mlm", max_tokens=9), longest),
        ("none", None, longest),
    ):
        hf.to_hf(start if head is None else start.with_head(head, 0), tmp_path / name)
        assert read_json(tmp_path / name / "tokenizer_config.json")["model_max_length"] == limit
    for i, (said, limit) in enumerate(
        ((1e30, longest), (11, 11), (11.0, 11), ("12", longest), (None, longest), (0, longest))
    ):
        tokenizer = copy(start.tokenizer)
        tokenizer.published = {"model_max_length": said}
        hf.to_hf(replace(start, tokenizer=tokenizer), tmp_path / str(i))
        assert read_json(tmp_path / str(i) / "tokenizer_config.json")["model_max_length"] == limit
    short = replace(start, tokenizer=tokenizer).with_head(Head("regress", max_tokens=9), 0)
    tokenizer.published = {"model_max_length": 10}  # of an earlier fine-tuning
    hf.to_hf(short, tmp_path / "again")
    assert read_json(tmp_path / "again/tokenizer_config.json")["model_max_length"] == 9


def test_a_unigram_of_ours_composes_letters_in_transformers_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    # every letter and mark is known, so that a wrong one changes the ids
    corpus = [" ".join(normalize(form, text)) for form in ("NFKC", "NFKD") for text in COMPOSED]
    ours = vocabularies.learn("unigram", [*COMPOSED, *corpus], 110)
    published.export_tokenizer(ours, tmp_path, 37)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = [ids.tolist() for ids in ours.encode_batch(COMPOSED)]
    assert not any(ours.special["unk"] in ids for ids in expected)
    assert theirs(COMPOSED, add_special_tokens=False)["input_ids"] == expected


@pytest.mark.parametrize("prefix_space", [True, False])
def test_an_nfc_beside_roberta_s_special_tokens_is_exported(
    prefix_space: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    learned = vocabularies.learn("bpe", ["\u304c\u304e \xe9\xe8"] * 3, 280)
    rules = learned.rules
    merges = [tuple(pair) for pair in rules["model"]["merges"]]
    ours = vocabularies.byte_bpe(rules["model"]["vocab"], merges, prefix_space, composed=True)
    published.export_tokenizer(ours, tmp_path, 37, segments=False)
    write_json(tmp_path / "config.json", {"model_type": "roberta"})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    decomposed = normalize("NFD", "\u304c\u304e")
    a, b = (ids.tolist() for ids in ours.encode_batch([decomposed, "e\u0301"]))
    assert a == ours.encode_batch(["\u304c\u304e"])[0].tolist()
    cls, sep = ours.special["cls"], ours.special["sep"]
    assert theirs(decomposed, "e\u0301")["input_ids"] == [cls, *a, sep, sep, *b, sep]
    assert theirs.model_input_names == ["input_ids", "attention_mask"]
    assert {role: getattr(theirs, f"{role}_token_id") for role in ours.special} == ours.special
    masked = theirs(f"e {theirs.mask_token}", add_special_tokens=False)["input_ids"]
    assert masked == [*ours.encode_batch(["e"])[0].tolist(), ours.special["mask"]]
    assert published.import_tokenizer(tmp_path).fingerprint == ours.fingerprint


def general(source: Path) -> None:
    """Save a BERT's tokenizer under the general class, which gives no segments."""
    transformers = pytest.importorskip("transformers")
    transformers.BertTokenizer.from_pretrained(source).save_pretrained(source)
    options = read_json(source / "tokenizer_config.json")
    write_json(
        source / "tokenizer_config.json", options | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )


def unnumbered(source: Path) -> None:
    """Let a BERT's tokenizer give no segments."""
    names = ["input_ids", "attention_mask"]
    options = {"tokenizer_class": "BertTokenizer", "model_input_names": names}
    write_json(source / "tokenizer_config.json", options)


@pytest.mark.parametrize(
    ("name", "change", "segments"),
    [
        ("Bert", None, True),
        ("Bert", unnumbered, False),
        ("Bert", general, False),
        ("Roberta", None, False),
    ],
)
def test_a_pair_has_the_segments_of_the_published_tokenizer(
    name: str, change: Callable[[Path], None] | None, segments: bool, tmp_path: Path
) -> None:
    """So the source, the checkpoint and the export give the same outputs."""
    transformers = pytest.importorskip("transformers")
    theirs = tiny(f"{name}ForSequenceClassification", tmp_path / "source", type_vocab_size=2)
    if change is not None:
        change(tmp_path / "source")
    exported = there_and_back(tmp_path / "source", tmp_path)
    ours = checkpoints.load(tmp_path / "ours")
    batch = pack(ours.tokenizer, ["w3 w4"], texts_b=["w5 a"])
    assert batch.segments.any() == segments
    with torch.no_grad():
        outputs = [ours.model().eval().logits(batch)]
        for directory in (tmp_path / "source", exported):
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            given = tokenizer(["w3 w4"], ["w5 a"], return_tensors="pt")
            assert ("token_type_ids" in given) == segments
            outputs.append(theirs(**given).logits)
    for other in outputs[1:]:
        assert torch.allclose(outputs[0], other, rtol=1e-5, atol=1e-5)
    # a checkpoint of an earlier version does not say
    assert tokenizers.Tokenizer(ours.tokenizer.meta, ours.tokenizer._model).segments


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_special_tokens_may_follow_added_words(name: str, slow: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny(f"{name}Model", tmp_path / "source", vocab_size=PIECES + 4)
    theirs = getattr(transformers, f"{name}Tokenizer").from_pretrained(tmp_path / "source")
    theirs.add_tokens(["newtok"])
    theirs.add_special_tokens({"additional_special_tokens": ["<e1>"]})
    theirs.add_tokens(["last"])
    theirs.save_pretrained(tmp_path / "source")
    if slow:  # the words are in tokenizer_config.json only
        state = read_json(tmp_path / "source/tokenizer.json")["added_tokens"]
        (tmp_path / "source/tokenizer.json").unlink()
        options = read_json(tmp_path / "source/tokenizer_config.json")
        options["added_tokens_decoder"] = {str(token.pop("id")): token for token in state}
        write_json(tmp_path / "source/tokenizer_config.json", options)
    exported = there_and_back(tmp_path / "source", tmp_path)
    ours = checkpoints.load(tmp_path / "ours").tokenizer
    again = transformers.AutoTokenizer.from_pretrained(exported)
    assert len(ours) == len(again) == len(theirs) == PIECES + 3
    text = "w3 newtok a newtoks lastw4 last"
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch([text])[0].tolist() == expected
    assert again(text, add_special_tokens=False)["input_ids"] == expected
    assert again.convert_tokens_to_ids("<e1>") == theirs.convert_tokens_to_ids("<e1>")
    assert hf.from_hf(exported).checkpoint.tokenizer.fingerprint == ours.fingerprint


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_an_extended_vocabulary_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    """It has added words and special tokens. How these treat the spaces beside them, and the other
    settings of tokenizer_config.json, are kept.
    """
    transformers = pytest.importorskip("transformers")
    tiny(f"{name}Model", tmp_path / "source", vocab_size=PIECES + 4)
    theirs = getattr(transformers, f"{name}Tokenizer").from_pretrained(tmp_path / "source")
    mask = theirs.mask_token
    theirs.add_special_tokens(
        {
            "mask_token": AddedToken(mask, lstrip=name == "Bert", rstrip=True, normalized=False),
            "additional_special_tokens": [AddedToken("[ENT]", rstrip=True, normalized=False)],
        }
    )
    theirs.add_tokens(["new york", "w3x", AddedToken("ab", single_word=True)])
    theirs.save_pretrained(tmp_path / "source")
    said = tmp_path / "source/tokenizer_config.json"
    write_json(said, {**read_json(said), "padding_side": "left", "model_max_length": 11})
    for file in (
        "special_tokens_map.json",
        "added_tokens.json",
    ):  # new versions of transformers write neither
        (tmp_path / "source" / file).unlink(missing_ok=True)
    exported = there_and_back(tmp_path / "source", tmp_path)
    first, again = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / d) for d in ("source", "theirs")
    )
    texts = ["w3 w3x new york ab abc", f"w4 {mask} w5[ENT]  w6 ", "W3X New York", "a w3xab"]
    assert again(texts)["input_ids"] == first(texts)["input_ids"]
    plain = hf.from_hf(exported).checkpoint.tokenizer
    for text in (texts[0], texts[2], texts[3]):
        ids = first(text, add_special_tokens=False)["input_ids"]
        assert plain.encode_batch([text])[0].tolist() == ids
    assert (again.padding_side, again.model_max_length) == ("left", 11)
    assert len(again) == len(first) == len(plain) == PIECES + 4
    one, two = (d.added_tokens_decoder for d in (first, again))
    assert one == two
    assert plain.mask_takes_space == (name == "Bert")


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_added_words_are_read_from_every_file(name: str, tmp_path: Path) -> None:
    """Old and new versions of transformers store them in different files."""
    tiny(f"{name}Model", tmp_path, vocab_size=PIECES + 2)
    before = hf.from_hf(tmp_path).checkpoint.tokenizer
    words = {"w3x": PIECES + 1, "[ENT]": PIECES}
    write_json(tmp_path / "added_tokens.json", words)
    special = {"additional_special_tokens": ["[ENT]"]}
    write_json(tmp_path / "tokenizer_config.json", special)
    old = hf.from_hf(tmp_path).checkpoint.tokenizer
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    decoder = {
        str(i): {"content": w, "special": w == "[ENT]", "normalized": w != "[ENT]", **flags}
        for w, i in words.items()
    }
    (tmp_path / "added_tokens.json").unlink()
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": decoder})
    new = hf.from_hf(tmp_path).checkpoint.tokenizer
    assert old.fingerprint == new.fingerprint != before.fingerprint
    assert old.pieces == new.pieces == [*before.pieces, "[ENT]", "w3x"]
    assert old.encode_batch(["w3xw3x"])[0].tolist() == [PIECES + 1] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_is_saved_and_loaded(
    learned: dict[str, tokenizers.Tokenizer], kind: str, tmp_path: Path
) -> None:
    learned[kind].save(tmp_path)
    assert tokenizers.load_tokenizer(tmp_path).fingerprint == learned[kind].fingerprint


# ------------------------------------------------------------------------------------- inspect


@pytest.mark.parametrize("name", FAMILIES)
def test_inspect_shows_both_forms_of_a_model(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels: dict[str, Any] = {
        "id2label": {0: "bad", 1: "good"},
        "label2id": {"bad": 0, "good": 1},
        "num_labels": 2,
    }
    tiny(f"{name}ForSequenceClassification", tmp_path / "source", **labels)
    tensors = load_file(tmp_path / "source/model.safetensors")
    parameters = sum(w.numel() for n, w in tensors.items() if not n.endswith("inv_freq"))
    wide = hf.read_shape(tmp_path / "source").hidden
    assert run(capfd, "from-hf", tmp_path / "source", tmp_path / "ours")[0] == 0
    for directory in ("source", "ours"):
        status, out, err = run(capfd, "inspect", tmp_path / directory)
        assert (status, err) == (0, "")
        assert len(out.splitlines()) <= 24
        assert max(map(len, out.splitlines())) <= 180
        for said in (
            family_of(f"{name}Model").name,
            f"{wide} wide",
            "3 heads",
            f"{parameters:,}",
            "2 classes: bad, good",
            "97 pieces",
            "from-hf family=",
        ):
            assert said in out, said
        parts = re.sub(r"\(.*?\)", "", out.split(f"{parameters:,}\n")[1].splitlines()[0])
        numbers = [int(n.replace(",", "")) for n in re.findall(r"[a-z_]+ ([\d,]*\d)", parts)]
        assert sum(numbers) == parameters


def test_inspect_says_why_no_family_fits(
    learned: dict[str, tokenizers.Tokenizer], tmp_path: Path
) -> None:
    made = scratch(learned, "bert", norm="pre")
    checkpoints.save(made, tmp_path / "ours")
    said = "\n".join(describe(tmp_path / "ours"))
    assert "none of Hugging Face's: no family has LayerNorm before attention and MLP" in said
    assert "fresh seed=1" in said
    with pytest.raises(BadInput, match="does not exist"):
        describe(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="is not a checkpoint"):
        describe(tmp_path)
