"""Makes tokenizers from published vocabularies, or learns them from texts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xformer.data.errors import BadInput
from xformer.data.tokenizers import (
    ALBERT_SPECIAL,
    BERT_SPECIAL,
    ESM_SPECIAL,
    HIDDEN,
    KINDS,
    ROBERTA_SPECIAL,
    UNUSED,
    Tokenizer,
    sentencepiece_model,
)

if TYPE_CHECKING:
    from tokenizers import AddedToken


def wordpiece(
    vocabulary: dict[str, int],
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese: bool = True,
    added: Iterable[AddedToken] = (),
) -> Tokenizer:
    """BERT's tokenizer with a vocabulary (piece -> id).

    The words in `added` are never split. Those that the vocabulary lacks get the ids after its end.
    """
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    model = Fast(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    model.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    model.add_tokens(list(added))
    return Tokenizer(
        {"kind": "wordpiece", "special": dict(BERT_SPECIAL), "pair_separators": 1}, model
    )


def byte_bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    prefix_space: bool = False,
    added: Iterable[AddedToken] = (),
    composed: bool = False,
) -> Tokenizer:
    """RoBERTa's byte-level BPE with a vocabulary (piece -> id) and a list of merges.

    If the vocabulary has BERT's special tokens, it is ModernBERT's. With `prefix_space` the first
    word of a text is encoded as if a space preceded it. `composed` brings text into Unicode's form
    NFC first. For `added` see `wordpiece`.
    """
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    model = Fast(models.BPE(vocabulary, merges))
    if composed:
        model.normalizer = normalizers.NFC()
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    model.decoder = decoders.ByteLevel()
    model.add_tokens(list(added))
    berts = BERT_SPECIAL["cls"] in vocabulary
    special = dict(BERT_SPECIAL if berts else ROBERTA_SPECIAL)
    separators = 1 if berts else 2
    return Tokenizer({"kind": "bpe", "special": special, "pair_separators": separators}, model)


def albert(
    scores: list[tuple[str, float]],
    charsmap: bytes | None,
    controls: Iterable[str],
    symbols: Iterable[str],
    lowercase: bool = True,
    keep_accents: bool = False,
) -> Tokenizer:
    """ALBERT's tokenizer: SentencePiece's unigram model on normalised text.

    `scores` are the pieces in the order of ids with their log-probabilities. `charsmap` is the
    model's own normalisation table. Text is never encoded to one of the `controls`. The `symbols`
    are never merged with their neighbours, and the text after a symbol begins a new word. Raises
    BadInput unless id 1 is "<unk>".
    """
    from tokenizers import AddedToken, normalizers

    if len(scores) < 2 or scores[1][0] != ALBERT_SPECIAL["unk"]:
        raise BadInput("the vocabulary is not ALBERT's: id 1 is not <unk>")
    model = _unigram_rules(scores, 1, {*controls, *ALBERT_SPECIAL.values()})
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not keep_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lowercase:
        steps.append(normalizers.Lowercase())
    if charsmap:
        steps.append(_precompiled(charsmap))
    model.normalizer = normalizers.Sequence(steps)
    model.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    normalisation = {"lowercase": lowercase, "keep_accents": keep_accents}
    meta = {"kind": "unigram", "special": dict(ALBERT_SPECIAL), "pair_separators": 1}
    return Tokenizer({**meta, "normalisation": normalisation}, model)


def _precompiled(charsmap: bytes) -> Any:
    from tokenizers import normalizers

    try:
        return normalizers.Precompiled(charsmap)
    except Exception as error:  # the library raises a bare Exception
        raise BadInput(f"the table of characters is damaged: {error}; get the file again") from None


def xlm_roberta(scores: list[tuple[str, float]], charsmap: bytes | None) -> Tokenizer:
    """XLM-RoBERTa's or CamemBERT's tokenizer: SentencePiece's unigram model, with RoBERTa's special
    tokens. It is CamemBERT's if the first piece is "<s>NOTUSED".

    The arguments are those of `albert`, with `scores` in the final order of ids. Raises BadInput
    unless id 3 is "<unk>".
    """
    if len(scores) < 4 or scores[3][0] != ROBERTA_SPECIAL["unk"]:
        raise BadInput("the vocabulary is not XLM-RoBERTa's: id 3 is not <unk>")
    model = _unigram_rules(scores, 3, {*ROBERTA_SPECIAL.values(), *UNUSED})
    if charsmap:
        model.normalizer = _precompiled(charsmap)
    meta = {"kind": "unigram", "special": dict(ROBERTA_SPECIAL), "pair_separators": 2}
    form = "camembert" if scores[0][0] == UNUSED[0] else "xlm-roberta"
    return Tokenizer({**meta, "normalisation": {"form": form}}, model)


def _unigram_rules(scores: list[tuple[str, float]], unknown: int, hidden: set[str]) -> Any:
    """A unigram model on text that is split at white space. It never gives a `hidden` piece."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = [(HIDDEN + p if p in hidden else p, score) for p, score in scores]
    model = Fast(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    word = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    model.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), word])
    model.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return model


def symbols(alphabet: Iterable[str], separated: bool = False) -> Tokenizer:
    """A tokenizer with a fixed alphabet. Its ids are the five special tokens, then the alphabet in
    this order without duplicates.

    Each character is a symbol, and white space is ignored. With `separated` the symbols are words
    separated by white space (pitches, synthetic tokens). Raises BadInput if a symbol is empty,
    contains white space or is a special token, or if it has several characters and `separated` is
    false.
    """
    letters = list(dict.fromkeys(alphabet))
    wrong = [s for s in letters if not s or any(map(str.isspace, s)) or s in BERT_SPECIAL.values()]
    wrong += [] if separated else [s for s in letters if len(s) > 1]
    if not letters:
        raise BadInput("an alphabet needs at least one letter, such as ACGT")
    if wrong:
        raise BadInput(f"these cannot be symbols of an alphabet: {wrong[:5]}")
    special = dict(BERT_SPECIAL)
    meta = {"kind": "symbols", "special": special, "pair_separators": 1, "separated": separated}
    return Tokenizer(meta, [*BERT_SPECIAL.values(), *letters])


def words(counts: Mapping[str, int], vocab_size: int) -> Tokenizer:
    """A tokenizer of symbols that are separated by white space: the words with the largest counts,
    without special tokens. Words with equal counts are sorted. It has at most `vocab_size` pieces.

    Raises BadInput if there is no word.
    """
    ordinary = counts.keys() - BERT_SPECIAL.values()
    if not ordinary:
        raise BadInput("the text holds only special tokens, such as [MASK]; give text with words")
    ordered = sorted(ordinary, key=lambda word: (-counts[word], word))
    return symbols(ordered[: vocab_size - len(BERT_SPECIAL)], separated=True)


def unigram(path: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece model, with only the model's own normalisation."""
    return _unigram(sentencepiece_model(path))


def _unigram(model: Any) -> Tokenizer:
    meta = {"kind": "unigram", "special": dict(ALBERT_SPECIAL), "pair_separators": 1}
    return Tokenizer(meta, model)


def plus() -> Tokenizer:
    """The alphabet of PLUS (Min et al. 2019): 20 amino acids, and X for an unknown one. O is read
    as K, U as C, and B and Z as X."""
    special = {**BERT_SPECIAL, "unk": "X"}
    meta = {
        "kind": "symbols",
        "special": special,
        "pair_separators": 1,
        "separated": False,
        "synonyms": {"O": "K", "U": "C", "B": "X", "Z": "X"},
    }
    return Tokenizer(meta, ["[PAD]", *"ARNDCQEGHILKMFPSTWYVX", "[MASK]", "[CLS]", "[SEP]"])


def esm(pieces: list[str]) -> Tokenizer:
    """The alphabet of ESM-2 (Lin et al. 2023), whose pieces are in the order of their ids. Raises
    BadInput if there are words of several letters, as in the Nucleotide Transformer."""
    words = [piece for piece in pieces if len(piece) > 1 and not re.fullmatch("<.*>", piece)]
    if words:
        raise BadInput(
            f"the vocabulary has words of several letters, such as {words[0]!r}; only ESM's "
            "vocabularies of single letters can be imported"
        )
    meta = {"kind": "symbols", "special": dict(ESM_SPECIAL), "pair_separators": 1}
    return Tokenizer({**meta, "separated": False}, pieces)


def learn(
    kind: str,
    texts: Iterable[str],
    vocab_size: int,
    lowercase: bool = True,
    characters: Iterable[str] | None = None,
    keep_accents: bool = False,
    coverage: float | None = None,
) -> Tokenizer:
    """Learn a vocabulary of `vocab_size` pieces, special tokens included, from texts.

    `kind` is wordpiece, bpe, unigram or symbols (all characters of the texts, at most
    `vocab_size`). `lowercase` applies to WordPiece only. It also strips accents, unless
    `keep_accents` is set. WordPiece and BPE learn fewer pieces if the texts do not contain enough.
    `characters` are all characters of the texts: if they are given, WordPiece learns the same
    pieces every time; otherwise it breaks ties at random. `coverage` is the share
    of the text whose characters unigram keeps (default: SentencePiece's 0.9995); it leaves out the
    rarest ones. Raises BadInput if `vocab_size` is too small for the characters, or too large for
    unigram to reach.
    """
    if vocab_size <= len(BERT_SPECIAL):
        raise BadInput(
            f"--vocab-size {vocab_size} leaves no room for pieces besides the 5 special tokens; "
            "give more"
        )
    if kind == "symbols":
        return _train_symbols(texts, vocab_size)
    if kind == "unigram":
        return _train_unigram(texts, vocab_size, coverage)
    if kind == "wordpiece":
        return _train_wordpiece(texts, vocab_size, lowercase, characters or (), keep_accents)
    if kind == "bpe":
        return _train_bpe(texts, vocab_size)
    raise BadInput(f"unknown kind {kind!r}: give one of {', '.join(KINDS)}")


def _train_symbols(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    letters = {letter for letter in seen if not letter.isspace()}
    if len(letters) + len(BERT_SPECIAL) > vocab_size:
        raise BadInput(
            f"--vocab-size {vocab_size} is too small for {len(letters)} symbols and 5 special "
            f"tokens; give at least {len(letters) + len(BERT_SPECIAL)}"
        )
    return symbols(sorted(letters))


def _train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    lowercase: bool,
    characters: Iterable[str],
    keep_accents: bool,
) -> Tokenizer:
    from tokenizers import trainers

    strip_accents = False if lowercase and keep_accents else None  # None: if it lower-cases

    # train on text that is normalised and split as in `wordpiece`
    first = dict(zip(BERT_SPECIAL.values(), range(5), strict=True))
    rules = wordpiece(first, lowercase, strip_accents)._model
    # The trainer numbers pieces in the order of a hash map, and breaks ties by these numbers.
    # Special tokens are numbered first and in order, so pieces inside words are made special.
    special = [*BERT_SPECIAL.values(), *_continuations(rules, characters)]
    rules.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(
            vocab_size=vocab_size, special_tokens=special, show_progress=False
        ),
    )
    return wordpiece(_ids(rules, vocab_size), lowercase, strip_accents)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers, trainers

    rules = Fast(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(ROBERTA_SPECIAL.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    merges = [tuple(m) for m in json.loads(rules.to_str())["model"]["merges"]]
    return byte_bpe(_ids(rules, vocab_size), merges)


def _continuations(rules: Any, characters: Iterable[str]) -> list[str]:
    """The one-character pieces that can continue a word after BERT's normalisation."""
    pieces: set[str] = set()
    for character in characters:
        for normal in rules.normalizer.normalize_str(character):
            if len(rules.pre_tokenizer.pre_tokenize_str(f"a{normal}a")) == 1:
                pieces.add(f"##{normal}")
    return sorted(pieces)


def _ids(model: Any, vocab_size: int) -> dict[str, int]:
    """The vocabulary of a trained model, renumbered from 0 in the same order."""
    vocabulary = model.get_vocab(with_added_tokens=True)
    if len(vocabulary) > vocab_size:  # the trainers keep every character in any case
        raise BadInput(
            f"--vocab-size {vocab_size} is too small: characters and special tokens alone make "
            f"{len(vocabulary)}; give at least that many"
        )
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    return {piece: i for i, piece in enumerate(ordered)}


def _train_unigram(texts: Iterable[str], vocab_size: int, coverage: float | None) -> Tokenizer:
    import sentencepiece

    model = io.BytesIO()
    options: dict[str, Any] = {} if coverage is None else {"character_coverage": coverage}
    lines = (line for text in texts for line in text.splitlines())
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            max_sentence_length=2**24,  # longer lines would be skipped silently
            input_sentence_size=5_000_000,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece="<pad>",
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            minloglevel=2,
            **options,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        for pattern, wrong, bound in (
            (r"value <= (\d+)", "large", "most"),
            (r"required_chars\. \d+ vs (\d+)", "small", "least"),
        ):
            if match := re.search(pattern, reason):
                raise BadInput(
                    f"--vocab-size {vocab_size} is too {wrong} for this text; give at {bound} "
                    f"{match[1]}"
                ) from None
        raise BadInput(
            f"SentencePiece cannot make {vocab_size} pieces from this text: {reason}"
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(model.getvalue())
    return _unigram(processor)
