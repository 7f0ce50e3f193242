"""Tokenizers: learning, saving, loading, decoding and offsets.

The word table gives the tokenizer's own ids. Imported tokenizers give the ids of transformers, on
real text and on unusual Unicode.
"""

import csv
import io
import json
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from xformer.data import published, tokenizers, vocabularies
from xformer.data.errors import BadInput
from xformer.data.spelled import Spelled
from xformer.evaluate import _readable
from xformer.preprocess import words
from xformer.preprocess.words import CachedEncoder

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
        "wordpiece": vocabularies.learn("wordpiece", corpus, 200, True, seen),
        "cased": vocabularies.learn("wordpiece", corpus, 200, False, seen),
        "bpe": vocabularies.learn("bpe", corpus, 400),
        "unigram": vocabularies.learn("unigram", corpus, 100),
        "symbols": vocabularies.learn("symbols", corpus, 200),
        "separated": vocabularies.symbols(["w5", "w6", "w7"], separated=True),
    }


KINDS = ["wordpiece", "cased", "bpe", "unigram", "symbols", "separated"]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(learned, kind, tmp_path):
    tokenizer = learned[kind]
    tokenizer.save(tmp_path)
    again = tokenizers.load_tokenizer(tmp_path)
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


def test_esm_reads_single_letters() -> None:
    """The Nucleotide Transformer has ESM's special tokens, but its words are six letters long."""
    special = ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>"]
    letters = vocabularies.esm([*special, "A", "-", "<null_1>"])
    assert letters.encode_batch(["A-A"])[0].tolist() == [5, 6, 5]
    with pytest.raises(BadInput, match="words of several letters, such as 'AAA'; only ESM's"):
        vocabularies.esm([*special, "AAA", "A"])


def test_symbols():
    dna = vocabularies.symbols("ACGTA")
    assert dna.pieces[5:] == ["A", "C", "G", "T"]
    np.testing.assert_array_equal(dna.encode_batch(["GA TX\n"])[0], [7, 5, 8, dna.special["unk"]])
    np.testing.assert_array_equal(dna.encode_batch(["", "😀"])[1], [dna.special["unk"]])
    assert dna.decode([5, 6]) == "AC"
    for wrong in (["a b"], [""], ["[MASK]"], ["AB"]):
        with pytest.raises(BadInput, match="cannot be symbols"):
            vocabularies.symbols(wrong)
    with pytest.raises(BadInput, match="needs at least one letter"):
        vocabularies.symbols([])


def test_special_tokens_are_each_family_s_own(learned):
    assert learned["wordpiece"].pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert learned["bpe"].pieces[:5] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert (learned["bpe"].pair_separators, learned["wordpiece"].pair_separators) == (2, 1)
    assert learned["unigram"].pieces[:5] == ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def test_learning_is_repeatable():
    generator = np.random.default_rng(0)
    letters = list("abcdefghij")
    corpus = ["".join(generator.choice(letters, 6)) for _ in range(400)]
    actual = [vocabularies.learn("wordpiece", corpus, 120, True, letters) for _ in range(4)]
    assert len({tokenizer.fingerprint for tokenizer in actual}) == 1
    assert len({vocabularies.learn("bpe", corpus, 320).fingerprint for _ in range(4)}) == 1


@pytest.mark.parametrize(
    ("kind", "size", "phrase"),
    [
        ("wordpiece", 12, "too small"),
        ("bpe", 100, "too small"),
        ("symbols", 6, "--vocab-size 6"),
        ("unigram", 5000, "5000 is too large for this text; give at most"),
        ("bpe", 5, "no room for pieces besides"),
        ("letters", 100, "unknown kind"),
    ],
)
def test_vocabularies_that_cannot_be(kind, size, phrase):
    with pytest.raises(BadInput, match=phrase):
        vocabularies.learn(kind, ["hello world", "words"], size)


def test_texts_that_spell_out_special_tokens_are_counted(learned):
    spelled = Spelled(learned["wordpiece"])
    spelled.add(["plain", "a [SEP] b [MASK]"])
    assert sorted(spelled.seen) == ["[MASK]", "[SEP]"]
    assert spelled.note().startswith("note: 1 text spells out [")
    spelled.add(["[MASK]"])
    assert spelled.note().startswith("note: 2 texts spell out [")
    assert spelled.note().endswith("; these are read as plain characters")
    assert not Spelled(learned["wordpiece"]).note()


def test_a_changed_or_missing_tokenizer_is_refused(learned, tmp_path):
    with pytest.raises(BadInput, match="holds no tokenizer"):
        tokenizers.load_tokenizer(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"import a published one with .* from-hf .*/model CHECKPO"):
        tokenizers.load_tokenizer(tmp_path / "model")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text("{}")
    with pytest.raises(BadInput, match=r"result.json is damaged: it names no selected checkpoint"):
        tokenizers.load_tokenizer(tmp_path / "run")
    learned["wordpiece"].save(tmp_path)
    text = (
        (tmp_path / "tokenizer.json").read_text().replace('"lowercase":true', '"lowercase":false')
    )
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadInput, match="was changed"):
        tokenizers.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="not a tokenizer file"):
        tokenizers.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="does not exist"):
        tokenizers.load_tokenizer(tmp_path)
    meta = json.loads((tmp_path / tokenizers.META).read_text())
    del meta["kind"]
    (tmp_path / tokenizers.META).write_text(json.dumps(meta))
    with pytest.raises(BadInput, match="does not describe a tokenizer"):
        tokenizers.load_tokenizer(tmp_path)


# ------------------------------------------------------------------------------ the word table


def same_as_direct(encoder: CachedEncoder, texts: list[str]) -> None:
    values, lengths = encoder.encode(texts)
    direct = encoder.tokenizer.encode_batch(texts)
    assert lengths.tolist() == [len(ids) for ids in direct]
    np.testing.assert_array_equal(values, np.concatenate([np.empty(0, np.int32), *direct]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_word_table_gives_the_same_ids(learned, kind):
    encoder = CachedEncoder(learned[kind])
    assert (encoder.rules is None) == (kind in ("unigram", "symbols", "separated"))
    for _ in range(2):  # first with new words, then with known ones
        same_as_direct(encoder, TEXTS)
    same_as_direct(encoder, [])
    same_as_direct(encoder, ["", ""])


def test_a_vocabulary_without_a_line_end_needs_no_mark_between_words(tmp_path: Path) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "\u0120"]  # a space
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    tokenizer = published.import_tokenizer(tmp_path / "vocab.json")
    ids, lengths = CachedEncoder(tokenizer).encode(["ab ba", "a a\nb"])
    direct = tokenizer.encode_batch(["ab ba", "a a\nb"])
    np.testing.assert_array_equal(ids, np.concatenate(direct))
    assert lengths.tolist() == [len(each) for each in direct]


@pytest.mark.parametrize("kind", ["wordpiece", "cased", "bpe"])
def test_the_word_table_starts_again_when_full(learned, kind, monkeypatch):
    monkeypatch.setattr(words, "TABLE_CHARACTERS", 20)
    encoder = CachedEncoder(learned[kind])
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
    encoder = CachedEncoder(learned[kind])

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(odd, max_size=4))
    def check(texts):
        same_as_direct(encoder, texts)

    check()


def test_a_tokenizer_with_other_rules_has_no_word_table(learned):
    """A byte-level BPE that puts a space before every text has no word table."""
    from tokenizers import pre_tokenizers

    tokenizer = vocabularies.byte_bpe({**learned["bpe"].ids}, [])
    tokenizer._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    encoder = CachedEncoder(tokenizer)
    assert encoder.rules is None
    same_as_direct(encoder, TEXTS)


# ------------------------------------------------------------------------- published tokenizers

SAMPLE = 15_000  # characters of each corpus


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


@pytest.fixture(scope="module")
def corpora(shared: Path) -> dict[str, list[str]]:
    """Some real text of every kind, split into texts according to its format."""

    def read(name: str) -> str:
        return (shared / name).read_text(encoding="utf-8-sig")

    java = sorted((shared / "java").rglob("*.java"))
    german = csv.reader(io.StringIO(read("lang/de/10kGNAD_test.csv")), delimiter=";", quotechar="'")
    every = {
        "English": read("english_wikipedia/test.txt").split("\n"),
        "paragraphs": read("english_wikipedia/valid.txt").split("\n\n"),
        "German": [row[1] for row in german],
        "Chinese": list(strings(json.loads(read("lang/zh/zh_ncv.json")))),
        "Japanese": read("lang/ja/train.ja").replace(" ", "").split("\n"),
        "Kannada": [
            *read("lang/kn/entity_kannada.txt").split("\n")[:150],
            *strings(json.loads(read("lang/kn/allama.json"))),
        ],
        "Java": [path.read_text(encoding="utf-8") for path in java[::30]],
        "GLUE": [
            *read("glue/CoLA/dev.tsv").replace("\t", "\n").split("\n")[:400],
            *read("glue/STS-B/dev.tsv").replace("\t", "\n").split("\n"),
        ],
    }
    for name, texts in every.items():
        sizes = np.cumsum([len(text) for text in texts])
        every[name] = texts[: int(np.searchsorted(sizes, SAMPLE)) + 1]
        assert sum(map(len, every[name])) > 0.5 * SAMPLE, name
    return every


def spiece(corpora: dict[str, list[str]], user_defined: str) -> bytes:
    """A model in ALBERT's layout, learned from real text of many kinds."""
    import sentencepiece

    model = io.BytesIO()
    lines = [line for texts in corpora.values() for text in texts for line in text.split("\n")]
    plain = [
        "".join(c for c in unicodedata.normalize("NFKD", line) if not unicodedata.combining(c))
        for line in lines
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.lower() for line in plain]),
        model_writer=model,
        vocab_size=4000,
        model_type="unigram",
        max_sentence_length=2**20,
        character_coverage=0.998,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        pad_piece="<pad>",
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        user_defined_symbols=list(user_defined),
        minloglevel=2,
    )
    return model.getvalue()


def bare_spiece(corpora: dict[str, list[str]]) -> bytes:
    """A model as XLM-RoBERTa and CamemBERT have it: its special pieces are <unk>, <s>, </s>."""
    import sentencepiece

    model = io.BytesIO()
    lines = (line for texts in corpora.values() for text in texts for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=4000,
        model_type="unigram",
        max_sentence_length=2**20,
        character_coverage=0.998,
        minloglevel=2,
    )
    return model.getvalue()


def extended(theirs: Any, path: Path) -> Any:
    """A tokenizer that transformers saved with added words and an added special token."""
    from tokenizers import AddedToken

    theirs.add_special_tokens({"additional_special_tokens": ["[ENT]"]})
    theirs.add_tokens(
        [
            "covid",
            "Naïve",
            "new york",
            "study",
            AddedToken("ab", single_word=True),
            AddedToken("iso", normalized=False, lstrip=True),
        ]
    )
    theirs.save_pretrained(path)
    return type(theirs).from_pretrained(path)


class Pair(NamedTuple):
    """One of our tokenizers and one of transformers, read from the same files."""

    ours: tokenizers.Tokenizer
    theirs: Any

    def agree(self, texts: list[str]) -> int:
        """Assert that both tokenizers give the same ids, and return how many there are.

        Ours is asked directly and through the word table.
        """
        wanted = self.theirs(texts, add_special_tokens=False)["input_ids"]
        assert [ids.tolist() for ids in self.ours.encode_batch(texts)] == wanted
        values, lengths = CachedEncoder(self.ours).encode(texts)
        assert lengths.tolist() == list(map(len, wanted))
        assert values.tolist() == [i for ids in wanted for i in ids]
        return len(values)

    def spelt(self, text: str) -> bool:
        """Whether the text spells out a special token. Only transformers gives that its id."""
        return any(token in text for token in [*self.ours.meta["special"].values(), "[ENT]"])


PAIRS = [
    "uncased",
    "cased",
    "chinese",
    "gpt2",
    "albert",
    "albert cased",
    "albert symbols",
    "xlm",
    "camembert",
    "uncased words",
    "cased words",
    "gpt2 words",
]


def folder(path: Path, files: dict[str, Path | bytes], options: dict[str, bool]) -> Path:
    """A Hugging Face directory."""
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    if options:
        (path / "tokenizer_config.json").write_text(json.dumps(options))
    return path


@pytest.fixture(scope="module")
def pairs(
    shared: Path, corpora: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    transformers = pytest.importorskip("transformers")
    bert, roberta, albert = (
        getattr(transformers, f"{name}Tokenizer") for name in ("Bert", "Roberta", "Albert")
    )
    xlm, camembert = transformers.XLMRobertaTokenizer, transformers.CamembertTokenizer
    bare, kind = bare_spiece(corpora), b'{"model_type": "camembert"}'
    vocabularies = shared / "vocabs"
    plain, symbols = (spiece(corpora, user_defined) for user_defined in ("", '()"-.\u2013£€'))
    gpt2 = {name: vocabularies / f"gpt2.{name}" for name in ("vocab.json", "merges.txt")}
    accents = {"do_lower_case": False, "keep_accents": True}
    table: dict[str, tuple[Any, dict[str, Any], dict[str, bool]]] = {
        **{
            name: (
                bert,
                {"vocab.txt": vocabularies / f"bert-base-{name}.vocab.txt"},
                {"do_lower_case": name == "uncased"},
            )
            for name in ("uncased", "cased", "chinese")
        },
        "gpt2": (roberta, gpt2, {}),
        "albert": (albert, {"spiece.model": plain}, {}),
        "albert cased": (albert, {"spiece.model": plain}, accents),
        "albert symbols": (albert, {"spiece.model": symbols}, {}),
        "xlm": (xlm, {"sentencepiece.bpe.model": bare}, {}),
        "camembert": (camembert, {"sentencepiece.bpe.model": bare, "config.json": kind}, {}),
    }
    actual = {}
    for name, (kind, files, options) in table.items():
        path = folder(tmp_path_factory.mktemp("published") / "x", files, options)
        actual[name] = Pair(published.import_tokenizer(path), kind.from_pretrained(path))
        if f"{name} words" in PAIRS:
            theirs = extended(kind.from_pretrained(path), path / "words")
            actual[f"{name} words"] = Pair(published.import_tokenizer(path / "words"), theirs)
    return actual


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.slow
def test_published_tokenizers_give_the_ids_of_transformers(pairs, corpora, name):
    pair = pairs[name]
    for corpus, texts in corpora.items():
        kept = [text for text in texts if not pair.spelt(text)]
        assert len(kept) == len(texts), corpus
        assert pair.agree(kept) > 100, corpus


anything = st.text(
    st.one_of(
        st.sampled_from(
            " \n\t.,'`\"-()sdaeiéÉİß\u017fﬁ½㎏ｱﾞΩς中國각\u1100\u1161\u0301\u0327\u0323\u200b"
            "\u200d\u00ad\ufe0f"
            "\xa0\u3000\u2028\u0085\x00\x1c\x7f\ufeff\ufffd🙂👩🚀🏽[]<>#▁ĠĊ"
        ),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)
long_word = st.builds(lambda part, times: part * times, anything, st.sampled_from([1, 1, 1, 30]))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.slow
def test_any_unicode_gives_the_ids_of_transformers(pairs, name):
    pair = pairs[name]

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(long_word, min_size=1, max_size=5))
    def check(texts):
        assume(not any(map(pair.spelt, texts)))
        pair.agree(texts)

    check()


@pytest.mark.parametrize(
    "name",
    [
        "cased",
        "gpt2",
        "albert",
        "albert cased",
        "albert symbols",
        "xlm",
        "camembert",
        "cased words",
    ],
)
@pytest.mark.slow
def test_published_tokenizers_are_the_same_in_every_form(pairs, corpora, tmp_path, name):
    ours, theirs = pairs[name]
    texts = [text for texts in corpora.values() for text in texts[:20]]
    wanted = [ids.tolist() for ids in ours.encode_batch(texts)]
    ours.save(tmp_path)
    theirs.save_pretrained(tmp_path / "fast")
    # tokenizer.json alone gives the same ids by its own steps
    shutil.copy(tmp_path / "fast/tokenizer.json", tmp_path / "alone.json")
    again = [
        tokenizers.load_tokenizer(tmp_path),
        published.import_tokenizer(tmp_path / "fast"),
        published.import_tokenizer(tmp_path / "alone.json"),
    ]
    for other in again:
        assert (other.kind, other.meta) == (ours.kind, ours.meta)
        assert [ids.tolist() for ids in other.encode_batch(texts)] == wanted
        if name != "gpt2":  # transformers gives it the special tokens in another order
            assert (other.pieces, other.fingerprint) == (ours.pieces, ours.fingerprint)


def test_a_vocabulary_of_gpt2_and_one_of_roberta(pairs, shared, tmp_path):
    """The same pieces and merges with other ids. GPT-2 gets the special tokens at the end."""
    gpt2 = pairs["gpt2"].ours
    assert gpt2.pieces[-5:] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    inner = gpt2.pieces[:-5]
    table = json.loads((shared / "vocabs/gpt2.vocab.json").read_text(encoding="utf-8"))
    assert inner == sorted(table, key=table.__getitem__)
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *inner[::-1], "madeupword0000", "<mask>"]
    vocabulary = json.dumps({piece: i for i, piece in enumerate(pieces)}).encode()
    files = {"vocab.json": vocabulary, "merges.txt": shared / "vocabs/gpt2.merges.txt"}
    roberta = published.import_tokenizer(folder(tmp_path / "x", files, {"add_prefix_space": True}))
    assert [roberta.special[r] for r in ("cls", "pad", "sep", "unk", "mask")] == [0, 1, 2, 3, 50262]
    text = "It's  a\tstudy 中 "
    one, other = gpt2.encode_batch([f" {text}"])[0], roberta.encode_batch([text])[0]
    assert [gpt2.pieces[i] for i in one] == [roberta.pieces[i] for i in other]
    assert pieces_of(roberta, "Hello x") == [("ĠHello", "Hello"), ("Ġx", "x")]


@pytest.mark.parametrize("chinese", [True, False])
@pytest.mark.parametrize("accents", [True, False, None])
@pytest.mark.parametrize("lowercase", [True, False])
def test_bert_s_options_are_those_of_transformers(tmp_path, lowercase, accents, chinese):
    transformers = pytest.importorskip("transformers")
    letters = "aAeéEÉ中文"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    options = {
        "do_lower_case": lowercase,
        "strip_accents": accents,
        "tokenize_chinese_chars": chinese,
    }
    path = folder(tmp_path / "x", {"vocab.txt": "\n".join(pieces).encode()}, options)
    theirs = transformers.BertTokenizer.from_pretrained(path)
    Pair(published.import_tokenizer(path), theirs).agree(["aÉe\u0301 A中文e É", "Aa中"])
    # a prefix of vocab.txt is also the prefix of the files beside it
    for file in path.iterdir():
        file.rename(path / f"my-{file.name}")
    Pair(published.import_tokenizer(path / "my-vocab.txt"), theirs).agree(
        ["aÉe\u0301 A中文e É", "Aa中"]
    )


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": "x"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"mask_token": {"special": true}}'),
        ("added_tokens.json", "[1]"),
        ("added_tokens.json", '{"x": "1", "y": 2}'),
        ("tokenizer.json", "[]"),
    ],
)
def test_damaged_added_tokens_are_refused(tmp_path, file, content):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    path = folder(tmp_path / "x", {"vocab.txt": "\n".join(pieces).encode()}, {})
    (path / file).write_text(content)
    with pytest.raises(BadInput):
        published.import_tokenizer(path / "vocab.txt")


@pytest.mark.parametrize("name", PAIRS)
def test_a_published_vocabulary_gives_text_no_special_id(pairs, name):
    ours = pairs[name].ours
    special = set(ours.special.values()) - {ours.special["unk"]}
    spelt = ["[SEP] [CLS][MASK] <s> </s> <pad> [PAD]", "a <mask> b [mask]", "x<pad>[SEP]<pad>"]
    for ids in ours.encode_batch(spelt):
        assert not special & set(ids.tolist())
    ids = [ours.special["cls"], *ours.encode_batch(["on the other side"])[0]]
    assert ours.decode(ids).replace(ours.meta["special"]["cls"], "").strip() == "on the other side"


# ------------------------------------------------------------------------------------- offsets


def pieces_of(tokenizer: tokenizers.Tokenizer, text: str) -> list[tuple[str, str]]:
    """The pieces of a text, each with its characters."""
    ((ids, starts, ends),) = tokenizer.encode_with_offsets([text])
    assert ids.dtype == starts.dtype == ends.dtype == np.int32
    return [(tokenizer.pieces[i], text[s:e]) for i, s, e in zip(ids, starts, ends, strict=True)]


def sound(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Assert that offsets lie in the text, never decrease and exclude outer white space, and that
    the ids are the usual ones.
    """
    actual = tokenizer.encode_with_offsets(texts)
    assert len(actual) == len(texts)
    for text, bare, (ids, starts, ends) in zip(
        texts, tokenizer.encode_batch(texts), actual, strict=True
    ):
        assert ids.tolist() == bare.tolist()
        assert len(ids) == len(starts) == len(ends)
        assert (np.diff(starts) >= 0).all()
        assert (np.diff(ends) >= 0).all()
        for start, end in zip(starts, ends, strict=True):
            assert 0 <= start <= end <= len(text)
            assert text[start:end] == text[start:end].strip()


def test_offsets_of_wordpiece(pairs):
    ours = pairs["uncased"].ours
    text = " Étude  e\u0301te\u0301 naïve中文, “ok” 🙂x"
    assert pieces_of(ours, text) == [
        ("et", "Ét"),
        ("##ude", "ude"),
        ("et", "e\u0301t"),
        ("##e", "e\u0301"),
        ("naive", "naïve"),
        ("中", "中"),
        ("文", "文"),
        (",", ","),
        ("“", "“"),
        ("ok", "ok"),
        ("”", "”"),
        ("[UNK]", "🙂x"),
    ]


def test_offsets_of_byte_bpe(pairs):
    text = "Hello  world 🙂\n\nnaïve x "
    assert pieces_of(pairs["gpt2"].ours, text) == [
        ("Hello", "Hello"),
        ("Ġ", ""),
        ("Ġworld", "world"),
        ("ĠðŁĻĤ", "🙂"),
        ("Ċ", ""),
        ("Ċ", ""),
        ("na", "na"),
        ("Ã¯ve", "ïve"),
        ("Ġx", "x"),
        ("Ġ", ""),
    ]
    actual = pieces_of(pairs["gpt2"].ours, "𓂀")  # each token is a part of the character's bytes
    assert len(actual) == 4
    assert {span for _, span in actual} == {"𓂀"}


def test_predicted_pieces_of_byte_bpe_are_readable(pairs):
    tokenizer = pairs["gpt2"].ours
    (ids,) = tokenizer.encode_batch(["x 🙂 naïve 𓂀"])
    shown = [_readable(tokenizer, int(i)) for i in ids]
    assert shown[:4] == ["x", "Ġ🙂", "Ġnaïve", "Ġ"]
    assert shown[4:] == [tokenizer.pieces[i] for i in ids[4:]]  # parts of a character
    assert [_readable(tokenizer, int(i)) for i in tokenizer.encode_batch(["\n"])[0]] == ["Ċ"]


def test_offsets_of_unigram(pairs, learned):
    for tokenizer in (pairs["albert"].ours, learned["unigram"]):
        text = "  ﬁne ½ \u3000Été e\u0301te\u0301 "
        actual = pieces_of(tokenizer, text)
        letters = [span for piece, span in actual if piece.strip("▁")]
        assert letters[0][0] == "ﬁ"  # each piece of a ligature has the whole ligature
        assert all(letters)
        for word in ("ﬁne", "½", "Été"):
            start = text.index(word)
            ((_, starts, ends),) = tokenizer.encode_with_offsets([text])
            inside = (starts < start + len(word)) & (ends > start)
            assert (starts[inside].min(), ends[inside].max()) == (start, start + len(word))
    actual = [("1", "1"), ("▁", ""), ("1", "½"), ("<unk>", "½")]
    assert pieces_of(learned["unigram"], "1 ½")[1:] == actual


def test_offsets_of_symbols(learned):
    text = " ab\tc\u3000é"
    for kind, spans in (("symbols", ["a", "b", "c", "é"]), ("separated", ["ab", "c", "é"])):
        assert [span for _, span in pieces_of(learned[kind], text)] == spans


@pytest.mark.parametrize("name", ["uncased", "gpt2", "albert"])
def test_offsets_are_those_of_transformers(pairs, corpora, name):
    ours, theirs = pairs[name]
    texts = [text for texts in corpora.values() for text in texts[:30]]
    wanted = theirs(texts, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for text, spans, (_, starts, ends) in zip(
        texts, wanted, ours.encode_with_offsets(texts), strict=True
    ):
        for (a, b), start, end in zip(spans, starts, ends, strict=True):
            inner = text[a:b].strip()
            marks = text[start:end].removeprefix(inner)  # ours includes those that are deleted
            assert text[start:end] == inner + marks
            assert all(unicodedata.category(mark).startswith("M") for mark in marks)
            if inner:
                assert a <= start < end <= b + len(marks)


@pytest.mark.parametrize(
    "name",
    [
        *KINDS,
        "gpt2",
        "albert",
        "albert cased",
        "albert symbols",
        "xlm",
        "camembert",
        "uncased words",
    ],
)
def test_offsets_of_any_unicode(request, name):
    if name in KINDS:
        tokenizer = request.getfixturevalue("learned")[name]
    else:
        tokenizer = request.getfixturevalue("pairs")[name].ours

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(anything, max_size=3))
    def check(texts):
        sound(tokenizer, texts)

    check()
    sound(tokenizer, [*TEXTS, ""])
