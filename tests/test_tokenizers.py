"""Tokenizers: learnt, saved, loaded, decoded; and the word table gives the tokenizer's own ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess import words
from preprocess.words import Encoder
from xformer.data import tokenizers
from xformer.data.errors import BadInput

SHARED = Path(__file__).parents[1].parent / "shared/data"
TEXTS = [
    "It's the first of 17 tests, isn't it? Don't panic: we're done.",
    "  Two  spaces,\ttabs and\n\nnew lines\r\n stay where they are. ",
    "Étude for naïve façades — “quoted” … Ελληνικά ς Русский 中文字符 日本語 한국어 🙂👩‍🚀",
    "",
    "combining e\u0301 \u0301x and a\u200bb, nbsp\u00a0here, [SEP] and <s> are only text",
    "controls a\x0bb\x0cc\x1cd\x1fe\x85f\x00g\ufffd and \u2028 separators\u3000end",
    "supercalifragilistic " + "x" * 120 + " 3.14159 a.b,c;d--e",
]


@pytest.fixture(scope="module")
def learned() -> dict[str, tokenizers.Tokenizer]:
    corpus = TEXTS * 3
    seen = set("".join(corpus))
    return {
        "wordpiece": tokenizers.train("wordpiece", corpus, 200, True, seen),
        "cased": tokenizers.train("wordpiece", corpus, 200, False, seen),
        "bpe": tokenizers.train("bpe", corpus, 400),
        "unigram": tokenizers.train("unigram", corpus, 100),
        "symbols": tokenizers.train("symbols", corpus, 200),
        "separated": tokenizers.symbols(["w5", "w6", "w7"], separated=True),
    }


KINDS = ["wordpiece", "cased", "bpe", "unigram", "symbols", "separated"]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(learned, kind, tmp_path):
    tokenizer = learned[kind]
    tokenizer.save(tmp_path)
    again = tokenizers.load(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.pieces == tokenizer.pieces
    assert again.special == tokenizer.special
    for one, two in zip(tokenizer.encode_batch(TEXTS), again.encode_batch(TEXTS), strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_gets_a_special_id_but_unknown(learned, kind):
    tokenizer = learned[kind]
    special = set(tokenizer.special.values()) - {tokenizer.special["unk"]}
    spelt = ["[SEP] [CLS][MASK] <s> </s> <pad> [PAD]", "a [MASK] b"]
    for ids in tokenizer.encode_batch(spelt):
        assert not special & set(ids.tolist())


def test_decoding(learned):
    for kind in ("bpe", "unigram"):
        tokenizer = learned[kind]
        text = "the first tests"
        assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text
    for text in TEXTS:
        if "\ufffd" not in text and text.isascii():
            assert learned["bpe"].decode(learned["bpe"].encode_batch([text])[0]) == text
    ids = learned["wordpiece"].encode_batch(["The First"])[0]
    assert learned["wordpiece"].decode(ids) == "the first"
    assert learned["cased"].decode(learned["cased"].encode_batch(["It's"])[0]) == "It ' s"
    assert learned["separated"].decode([5, 2, 7]) == "w5 [CLS] w7"


def test_symbols():
    dna = tokenizers.symbols("ACGTA")
    assert dna.pieces[5:] == ["A", "C", "G", "T"]
    np.testing.assert_array_equal(dna.encode_batch(["GA TX\n"])[0], [7, 5, 8, dna.special["unk"]])
    np.testing.assert_array_equal(dna.encode_batch(["", "😀"])[1], [dna.special["unk"]])
    assert dna.decode([5, 6]) == "AC"
    for wrong in (["a b"], [""], ["[MASK]"], [], ["AB"]):
        with pytest.raises(BadInput, match="cannot be the symbols"):
            tokenizers.symbols(wrong)


def test_special_tokens_are_each_family_s_own(learned):
    assert learned["wordpiece"].pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert learned["bpe"].pieces[:5] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert (learned["bpe"].pair_separators, learned["wordpiece"].pair_separators) == (2, 1)
    assert learned["unigram"].pieces[:5] == ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def test_learning_is_repeatable():
    generator = np.random.default_rng(0)
    letters = list("abcdefghij")
    corpus = ["".join(generator.choice(letters, 6)) for _ in range(400)]
    found = [tokenizers.train("wordpiece", corpus, 120, True, letters) for _ in range(4)]
    assert len({tokenizer.fingerprint for tokenizer in found}) == 1
    assert len({tokenizers.train("bpe", corpus, 320).fingerprint for _ in range(4)}) == 1


@pytest.mark.parametrize(
    ("kind", "size", "phrase"),
    [
        ("wordpiece", 12, "too small"),
        ("bpe", 100, "too small"),
        ("symbols", 6, "--vocab-size 6"),
        ("unigram", 5000, "cannot make 5000 pieces"),
        ("bpe", 5, "nothing beside"),
        ("letters", 100, "unknown kind"),
    ],
)
def test_vocabularies_that_cannot_be(kind, size, phrase):
    with pytest.raises(BadInput, match=phrase):
        tokenizers.train(kind, ["hello world", "words"], size)


def test_a_changed_or_missing_tokenizer_is_refused(learned, tmp_path):
    with pytest.raises(BadInput, match="holds no tokenizer"):
        tokenizers.load(tmp_path)
    learned["wordpiece"].save(tmp_path)
    text = (
        (tmp_path / "tokenizer.json").read_text().replace('"lowercase":true', '"lowercase":false')
    )
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadInput, match="was changed"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="not a tokenizer file"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="does not exist"):
        tokenizers.load(tmp_path)
    meta = json.loads((tmp_path / tokenizers.META).read_text())
    del meta["kind"]
    (tmp_path / tokenizers.META).write_text(json.dumps(meta))
    with pytest.raises(BadInput, match="not a tokenizer's description"):
        tokenizers.load(tmp_path)


# ------------------------------------------------------------------------------ the word table


def same_as_direct(encoder: Encoder, texts: list[str]) -> None:
    values, lengths = encoder.encode(texts)
    direct = encoder.tokenizer.encode_batch(texts)
    assert lengths.tolist() == [len(ids) for ids in direct]
    np.testing.assert_array_equal(values, np.concatenate([np.empty(0, np.int32), *direct]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_word_table_gives_the_same_ids(learned, kind):
    encoder = Encoder(learned[kind])
    assert (encoder.rules is None) == (kind in ("unigram", "symbols", "separated"))
    for _ in range(2):  # once learning the words, once knowing them
        same_as_direct(encoder, TEXTS)
    same_as_direct(encoder, [])
    same_as_direct(encoder, ["", ""])


@pytest.mark.parametrize("kind", ["wordpiece", "cased", "bpe"])
def test_the_word_table_starts_anew_when_full(learned, kind, monkeypatch):
    monkeypatch.setattr(words, "LIMIT", 20)
    encoder = Encoder(learned[kind])
    for text in TEXTS * 2:
        same_as_direct(encoder, [text])
    assert encoder.characters < 600


odd = st.text(
    st.one_of(
        st.sampled_from(" \n\t.,'sdrvmltae\r\x0b\x0c\x1c\x85\xa0\u3000\u0301\u200b中É\u017fİ#[]"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["wordpiece", "cased", "bpe"])
def test_the_word_table_on_odd_unicode(learned, kind):
    encoder = Encoder(learned[kind])

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(odd, max_size=4))
    def check(texts):
        same_as_direct(encoder, texts)

    check()


def test_a_tokenizer_with_other_rules_has_no_word_table(learned):
    """A byte-level BPE that puts a space before every text is encoded text by text."""
    from tokenizers import pre_tokenizers

    tokenizer = tokenizers.byte_bpe({**learned["bpe"].ids}, [])
    tokenizer._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    encoder = Encoder(tokenizer)
    assert encoder.rules is None
    same_as_direct(encoder, TEXTS)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data in ../shared is not there")
@pytest.mark.parametrize("cased", [True, False])
def test_the_word_table_on_real_text_with_bert_s_vocabulary(cased):
    name = "bert-base-cased" if cased else "bert-base-uncased"
    lines = (SHARED / f"vocabs/{name}.vocab.txt").read_text(encoding="utf-8").split("\n")
    vocabulary = {piece: i for i, piece in enumerate(lines) if piece}
    tokenizer = tokenizers.wordpiece(vocabulary, lowercase=not cased)
    text = (SHARED / "english_wikipedia/test.txt").read_text(encoding="utf-8")
    encoder = Encoder(tokenizer)
    assert encoder.rules is not None
    same_as_direct(encoder, text.split("\n"))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data in ../shared is not there")
def test_the_word_table_on_real_text_with_roberta_s_vocabulary():
    vocabulary = json.loads((SHARED / "vocabs/gpt2.vocab.json").read_text(encoding="utf-8"))
    for piece in tokenizers.ROBERTA_SPECIAL.values():
        vocabulary[piece] = len(vocabulary)
    lines = (SHARED / "vocabs/gpt2.merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    merges = [(first, second) for first, second in (line.split(" ") for line in lines if line)]
    encoder = Encoder(tokenizers.byte_bpe(vocabulary, merges))
    text = (SHARED / "english_wikipedia/test.txt").read_text(encoding="utf-8")
    same_as_direct(encoder, text.split("\n\n"))
