"""`tokenizer --from`: published vocabularies brought in, and what is refused."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import command, good, refused

from xformer.data import published, tokenizers, vocabularies
from xformer.data.errors import BadInput, Failure
from xformer.preprocess import cli

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "\n".join([*SPECIAL, "hello", "Hello", "world", "##s"]) + "\n"
BYTES = {"l": 0, "o": 1, "lo": 2, "w": 3, "Ġ": 4}
MERGES = "#version: 0.2\nl o\n"


def here(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Run the command within this process."""
    monkeypatch.setattr(sys, "argv", ["preprocess.py", *map(str, arguments)])
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    cli.main()


def fast(**changes: Any) -> str:
    """A tokenizer.json with BERT's rules, with some parts changed."""
    normal = {
        "type": "BertNormalizer",
        "lowercase": False,
        "strip_accents": None,
        "clean_text": True,
        "handle_chinese_chars": True,
    }
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {piece: i for i, piece in enumerate(WORDS.split())},
    }
    parts: dict[str, Any] = {
        "normalizer": normal,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": model,
    }
    for name, value in changes.items():
        if isinstance(value, dict):
            value = {**(parts.get(name) or {}), **value}
        parts[name] = value
    return json.dumps(parts)


def put(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")


GENERAL = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}


def test_the_command_brings_in_a_vocabulary(tmp_path):
    put(tmp_path, {"my.vocab.txt": WORDS})
    arguments = ["preprocess.py", "tokenizer", "--from", tmp_path / "my.vocab.txt", "--output"]
    said = good(command(*arguments, tmp_path / "low")).out
    assert "of 9 pieces (texts are lower-cased, so pieces with capitals (1) are never" in said
    said = good(command(*arguments, tmp_path / "cased", "--cased")).out
    assert "of 9 pieces, 0." in said
    for name, ids in (("low", [5, 7, 8]), ("cased", [6, 7, 8])):
        tokenizer = tokenizers.load_tokenizer(tmp_path / name)
        np.testing.assert_array_equal(tokenizer.encode_batch(["Hello worlds"])[0], ids)
    done = command(*arguments, tmp_path / "low")
    refused(done, "low exists; give another output, or --overwrite")


def test_fairseqs_dictionary_is_refused_with_what_would_work(tmp_path):
    put(tmp_path, {"dict.txt": "11 7941\nmadeupword0000 0\n"})
    output = tmp_path / "tok"
    done = command(
        "preprocess.py", "tokenizer", "--from", tmp_path / "dict.txt", "--output", output
    )
    refused(done, "dict.txt has a word and a number in each line, as fairseq's dict.txt")
    assert not output.exists()


@pytest.mark.parametrize(
    ("files", "lowercase"),
    [
        ({"vocab.txt": WORDS}, True),
        ({"vocab.txt": f"\ufeff{WORDS}"}, True),
        ({"vocab.txt": WORDS, "tokenizer_config.json": {"do_lower_case": False}}, False),
        ({"vocab.txt": WORDS, "tokenizer_config.json": {"do_lower_case": None}}, True),
        ({"vocab.txt": WORDS, "tokenizer.json": fast()}, False),
        ({"tokenizer.json": fast()}, False),
        ({"tokenizer.json": fast(normalizer={"lowercase": True})}, True),
        ({"tokenizer.json": fast(), "tokenizer_config.json": {"do_lower_case": True}}, True),
        ({"tokenizer.json": fast(), "tokenizer_config.json": GENERAL}, False),
        ({"vocab.txt": WORDS, "tokenizer_config.json": GENERAL}, True),
        ({"tokenizer.json": fast(model={"type": None})}, False),
        ({"vocab.txt": WORDS, "config.json": [1]}, True),
        ({"vocab.txt": WORDS, "config.json": {"model_type": None}}, True),
    ],
)
def test_what_decides_on_lower_case(tmp_path, files, lowercase):
    put(tmp_path, files)
    for path in (tmp_path, tmp_path / next(iter(files))):
        ids = published.import_tokenizer(path).encode_batch(["Hello"])[0]
        assert ids.tolist() == [5 if lowercase else 6]


def unigram(**changes: object) -> str:
    """A tokenizer.json with ALBERT's rules, with some parts changed."""
    replaced = [
        {"type": "Replace", "pattern": {kind: old}, "content": new}
        for kind, old, new in (("String", "``", '"'), ("String", "''", '"'))
    ]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    steps = [*replaced, *({"type": t} for t in ("NFKD", "StripAccents", "Lowercase")), spaces]
    pieces = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁a", "b", "▁"]
    words = [{"type": "WhitespaceSplit"}, {"type": "Metaspace", "add_prefix_space": True}]
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
        "model": {"type": "Unigram", "unk_id": 1, "vocab": [[piece, -1.5] for piece in pieces]},
    }
    return json.dumps({**parts, **changes})


def test_albert_s_tokenizer_json_of_old(tmp_path):
    """The earliest files do not name the kind of prefix, and join spaces at the end."""
    put(tmp_path, {"tokenizer.json": unigram()})
    tokenizer = published.import_tokenizer(tmp_path)
    assert tokenizer.meta["normalisation"] == {"lowercase": True, "keep_accents": False}
    # "b" after a space is "▁" and "b". "<pad>" is not a special token here, so it is split up.
    assert tokenizer.encode_batch(["Áb  b <pad>"])[0].tolist() == [5, 6, 7, 6, 7, 1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "must contain tokenizer.json, vocab.txt, spiece.model, or vocab.json"),
    "another text": ({"vocab.txt": "Some\ntext\n"}, "vocab.txt: the vocabulary lacks the special"),
    "one special missing": (
        {"vocab.txt": WORDS.replace("[MASK]\n", "")},
        "lacks the special tokens [MASK]",
    ),
    "bytes": ({"vocab.txt": b"\xff\xfe"}, "vocab.txt is not UTF-8"),
    "a piece twice": (
        {"vocab.txt": f"{WORDS}hello\n"},
        "vocab.txt:10: the piece 'hello' occurs twice, first in line 6",
    ),
    "no merges": ({"vocab.json": BYTES}, "merges.txt does not exist: vocab.json needs its merges"),
    "not JSON": ({"vocab.json": "{", "merges.txt": MERGES}, "vocab.json is not valid JSON"),
    "a list": ({"vocab.json": ["a"], "merges.txt": MERGES}, "vocab.json is not a vocabulary"),
    "no numbers": ({"vocab.json": {"a": "b"}, "merges.txt": MERGES}, "is not a vocabulary: give"),
    "a gap": ({"vocab.json": {**BYTES, "x": 6}, "merges.txt": MERGES}, "0 to 5: none has the id 5"),
    "an id twice": (
        {"vocab.json": {**BYTES, "x": 4}, "merges.txt": MERGES},
        "the ids 0 to 5: 'Ġ' has the id of another",
    ),
    "a key twice": (
        {"vocab.json": '{"a": 0, "b": 1, "a": 2}', "merges.txt": MERGES},
        "none has the id 0",
    ),
    "some special tokens": (
        {"vocab.json": {**BYTES, "<s>": 5}, "merges.txt": MERGES},
        "vocab.json: the vocabulary lacks the special tokens <pad>, </s>",
    ),
    "merges of another": (
        {"vocab.json": BYTES, "merges.txt": f"{MERGES}l w\n"},
        "merges.txt:3: the merge 'l' 'w' does not fit the vocabulary, which lacks 'lw'",
    ),
    "no merges at all": (
        {"vocab.json": BYTES, "merges.txt": "one two three\n"},
        "merges.txt:1: 'one two three' is not a merge",
    ),
    "not SentencePiece": ({"spiece.model": b"\x99nonsense"}, "is not a SentencePiece model"),
    "empty": ({"spiece.model": b""}, "spiece.model is not a SentencePiece model"),
    "no tokenizer": ({"tokenizer.json": []}, "is not BERT's WordPiece, RoBERTa's or"),
    "other rules": ({"tokenizer.json": fast(normalizer={"type": "NFC"})}, "is not BERT's"),
    "no cleaning": ({"tokenizer.json": fast(normalizer={"clean_text": False})}, "is not BERT's"),
    "other words": ({"tokenizer.json": fast(pre_tokenizer={"type": "Whitespace"})}, "is not"),
    "longer words": ({"tokenizer.json": fast(model={"max_input_chars_per_word": 200})}, "is not"),
    "an added word": (
        {
            "tokenizer.json": fast(
                added_tokens=[{"id": 12, "content": "covid", "special": False, "normalized": False}]
            )
        },
        "'covid' was added to the vocabulary with the id 12; only special tokens and then words",
    ),
    "a JSON gap": ({"tokenizer.json": fast(model={"vocab": {"a": 1}})}, "none has the id 0"),
    "other replacements": (
        {"tokenizer.json": unigram().replace("``", "~~")},
        "unigram model of ALBERT",
    ),
    "no prefix": (
        {"tokenizer.json": unigram().replace('fix_space": true', 'fix_space": false')},
        "unigram model of ALBERT",
    ),
    "other specials": ({"tokenizer.json": unigram().replace("<unk>", "<u>")}, "id 1 is not <unk>"),
    "options not a table": (
        {"vocab.txt": WORDS, "tokenizer_config.json": [1]},
        "must contain a JSON object of options",
    ),
    "an option not a bool": (
        {"vocab.txt": WORDS, "tokenizer_config.json": {"do_lower_case": "no"}},
        "do_lower_case is 'no'; it must be true or false",
    ),
    "MeCab": (
        {"vocab.txt": WORDS, "tokenizer_config.json": {"tokenizer_class": "BertJapaneseTokenizer"}},
        "tokenizer_class BertJapaneseTokenizer is not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_vocabulary_is_refused_in_one_line(monkeypatch, tmp_path, case):
    files, phrase = REFUSED[case]
    (tmp_path / "raw").mkdir()
    put(tmp_path / "raw", files)
    with pytest.raises(BadInput) as caught:
        here(monkeypatch, "tokenizer", "--from", tmp_path / "raw", "--output", tmp_path / "out")
    assert phrase in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_protobuf_that_is_too_old_is_one_line(monkeypatch, tmp_path):
    """SentencePiece's messages then raise ImportError, or an error of protobuf's own."""
    (tmp_path / "raw").mkdir()
    put(tmp_path / "raw", {"spiece.model": b""})
    monkeypatch.setitem(sys.modules, "sentencepiece", ModuleType("sentencepiece"))
    monkeypatch.delitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False)
    with pytest.raises(Failure, match=r"be read: .*; try: pip install --upgrade protobuf$"):
        here(monkeypatch, "tokenizer", "--from", tmp_path / "raw", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pieces", ["<s> <pad> </s>", "<s> <pad> </s> a <unk>", ""])
def test_a_unigram_vocabulary_with_other_special_tokens_is_refused(pieces):
    scores = [(piece, 0.0) for piece in pieces.split()]
    with pytest.raises(BadInput, match="is not XLM-RoBERTa's: id 3 is not <unk>"):
        vocabularies.xlm_roberta(scores, None)


def test_a_tokenizer_of_ours_is_not_brought_in(monkeypatch, tmp_path):
    vocabularies.symbols("ACGT").save(tmp_path)
    with pytest.raises(BadInput, match="is a tokenizer already; use it without importing it"):
        here(monkeypatch, "tokenizer", "--from", tmp_path, "--output", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--from", "nowhere"], "nowhere does not exist"),
        (["--from", "picture.png"], "picture.png is not a vocabulary: give a .txt, a .json or a"),
        (
            ["--from", "vocab.txt", "--cased"],
            "do_lower_case is true in the files next to it; leave out --cased",
        ),
        (["--from", "vocab.txt", "--kind", "bpe"], "--kind is for training"),
        (["--from", "vocab.txt", "--vocab-size", "9"], "--vocab-size is for training"),
        (["--from", "vocab.txt", "--input", "vocab.txt"], "--input is for training"),
        (["--input", "vocab.txt"], "--alphabet makes one of letters, and --from imports one"),
    ],
)
def test_options_that_do_not_go_together(monkeypatch, tmp_path, arguments, phrase):
    monkeypatch.chdir(tmp_path)
    options = {"do_lower_case": True}
    put(tmp_path, {"vocab.txt": WORDS, "picture.png": b"", "tokenizer_config.json": options})
    with pytest.raises(BadInput) as caught:
        here(monkeypatch, "tokenizer", *arguments, "--output", "out")
    assert phrase in str(caught.value)
    assert not (tmp_path / "out").exists()
