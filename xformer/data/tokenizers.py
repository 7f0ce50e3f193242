"""Text to ids and back: train, load, save. WordPiece and byte-level BPE by `tokenizers`, unigram by
`sentencepiece`, and symbols (a fixed alphabet, one id each) by a table lookup.

A tokenizer is a directory: `tokenizer_meta.json` (kind, special tokens, options) beside
`tokenizer.json` (wordpiece, bpe), `spiece.model` (unigram) or nothing more (symbols: the alphabet
is in the meta file). Ids are bare: special tokens are added when a batch is built, never here, and
a text that spells "[SEP]" does not get the special token.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.errors import BadInput
from xformer.data.files import read_json

META = "tokenizer_meta.json"
KINDS = ("wordpiece", "bpe", "unigram", "symbols")
BERT_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_SPECIAL = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
ALBERT_SPECIAL = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


class Tokenizer:
    """One vocabulary and its rules.

    `pieces` is the vocabulary in id order; `special` maps "pad", "unk", "cls", "sep", "mask" to
    ids; `pair_separators` is how many separators stand between the texts of a pair (BERT 1,
    RoBERTa 2).
    """

    def __init__(self, meta: dict[str, Any], model: Any):
        self.meta = meta
        self.kind: str = meta["kind"]
        self.pair_separators: int = meta["pair_separators"]
        self._model = model
        if self.kind == "symbols":
            self.pieces: list[str] = list(model)
        elif self.kind == "unigram":
            self.pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
        else:
            vocabulary = model.get_vocab(with_added_tokens=False)
            self.pieces = sorted(vocabulary, key=vocabulary.__getitem__)
            if list(map(vocabulary.__getitem__, self.pieces)) != list(range(len(vocabulary))):
                raise BadInput("the vocabulary's ids are not 0 to its size without gaps")
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        missing = [piece for piece in meta["special"].values() if piece not in ids]
        if missing:
            raise BadInput(f"the vocabulary lacks the special tokens {', '.join(missing)}")
        self.special: dict[str, int] = {role: ids[p] for role, p in meta["special"].items()}
        self.ids = ids

    def __len__(self) -> int:
        return len(self.pieces)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides which ids a text gets."""
        state = {**self.meta, "pieces": self.pieces}
        if self.kind == "unigram":
            state["model"] = hashlib.sha256(self._model.serialized_model_proto()).hexdigest()
        elif self.kind != "symbols":
            state["model"] = json.loads(self._model.to_str())
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bare ids of each text, int32, no special tokens, no truncation."""
        if self.kind == "symbols":
            return [self._encode_symbols(text) for text in texts]
        if self.kind == "unigram":
            return [np.asarray(ids, np.int32) for ids in self._model.encode(list(texts))]
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Readable text of ids; special tokens appear as they are spelt."""
        ids = [int(i) for i in ids]
        if self.kind == "symbols":
            between = " " if self.meta["separated"] else ""
            return between.join(self.pieces[i] for i in ids)
        if self.kind == "unigram":
            return self._model.decode(ids)
        return self._model.decode(ids, skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into an existing directory."""
        meta = {**self.meta, "vocab_size": len(self), "fingerprint": self.fingerprint}
        if self.kind == "symbols":
            meta["pieces"] = self.pieces
        elif self.kind == "unigram":
            (directory / "spiece.model").write_bytes(self._model.serialized_model_proto())
        else:
            self._model.save(str(directory / "tokenizer.json"), pretty=False)
        text = json.dumps(meta, indent=1, ensure_ascii=False) + "\n"
        (directory / META).write_text(text, encoding="utf-8")

    @cached_property
    def _symbol_table(self) -> np.ndarray:
        singles = [(ord(p), i) for p, i in self.ids.items() if len(p) == 1]
        table = np.full(max(c for c, _ in singles) + 2, self.special["unk"], np.int32)
        for code, i in singles:
            table[code] = i
        return table

    def _encode_symbols(self, text: str) -> np.ndarray:
        if self.meta["separated"]:
            unknown, special = self.special["unk"], set(self.meta["special"].values())
            words = ("" if word in special else word for word in text.split())
            return np.asarray([self.ids.get(word, unknown) for word in words], np.int32)
        codes = np.frombuffer("".join(text.split()).encode("utf-32-le"), np.uint32)
        table = self._symbol_table
        return table[np.minimum(codes, len(table) - 1)]  # the last entry is the unknown symbol


def load(directory: str | Path) -> Tokenizer:
    """The tokenizer in a directory: a tokenizer, a store, a checkpoint or a finished run.

    Raises BadInput if there is none, or its files do not agree with the recorded fingerprint.
    """
    path = Path(directory)
    if (path / "result.json").is_file():
        path = path / str(read_json(path / "result.json")["selected"])
    if not (path / META).is_file():
        raise BadInput(f"{path} holds no tokenizer ({META} is missing)")
    meta = read_json(path / META)
    try:
        fingerprint, _ = meta.pop("fingerprint"), meta.pop("vocab_size")
        pieces = meta.pop("pieces", None)
        if meta["kind"] == "symbols":
            tokenizer = Tokenizer(meta, pieces)
        elif meta["kind"] == "unigram":
            tokenizer = Tokenizer(meta, _sentencepiece(path / "spiece.model"))
        else:
            tokenizer = Tokenizer(meta, _fast(path / "tokenizer.json"))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path / META} is not a tokenizer's description: {error!r}") from None
    if tokenizer.fingerprint != fingerprint:
        raise BadInput(f"the tokenizer in {path} was changed after it was saved")
    return tokenizer


def _fast(path: Path) -> Any:
    import tokenizers

    if not path.is_file():
        raise BadInput(f"{path} does not exist")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise BadInput(f"{path} is not a tokenizer file: {error}") from None


def _sentencepiece(path: Path) -> Any:
    import sentencepiece

    if not path.is_file():
        raise BadInput(f"{path} does not exist")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(path.read_bytes())
    except RuntimeError as error:
        raise BadInput(f"{path} is not a SentencePiece model: {error}") from None
    return model


def wordpiece(vocabulary: dict[str, int], lowercase: bool, strip_accents: bool | None = None,
              chinese: bool = True) -> Tokenizer:  # fmt: skip
    """BERT's tokenizer over a given vocabulary (piece -> id)."""
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
    return Tokenizer(
        {"kind": "wordpiece", "special": dict(BERT_SPECIAL), "pair_separators": 1}, model
    )


def byte_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """RoBERTa's byte-level BPE over a given vocabulary and merge list."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    model = Fast(models.BPE(vocabulary, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return Tokenizer({"kind": "bpe", "special": dict(ROBERTA_SPECIAL), "pair_separators": 2}, model)


def symbols(alphabet: Iterable[str], separated: bool = False) -> Tokenizer:
    """A fixed alphabet after the five special tokens, in the order given, duplicates dropped.

    One character is one symbol and white space is ignored; with `separated`, symbols are words
    between white space (pitches, synthetic tokens).
    """
    letters = list(dict.fromkeys(alphabet))
    wrong = [s for s in letters if not s or any(map(str.isspace, s)) or s in BERT_SPECIAL.values()]
    wrong += [] if separated else [s for s in letters if len(s) > 1]
    if wrong or not letters:
        raise BadInput(f"these cannot be the symbols of an alphabet: {wrong[:5] or 'none given'}")
    special = dict(BERT_SPECIAL)
    meta = {"kind": "symbols", "special": special, "pair_separators": 1, "separated": separated}
    return Tokenizer(meta, [*BERT_SPECIAL.values(), *letters])


def train(kind: str, texts: Iterable[str], vocab_size: int, lowercase: bool = True,
          characters: Iterable[str] | None = None) -> Tokenizer:  # fmt: skip
    """Learn a vocabulary of `vocab_size` pieces (special tokens included) from a stream of texts.

    `kind` is wordpiece, bpe, unigram or symbols (the characters seen; `vocab_size` bounds them).
    `lowercase` concerns WordPiece alone. WordPiece and BPE give fewer where the texts hold no more;
    otherwise raises BadInput where they cannot give that many. `characters` are all that the texts
    hold: with them WordPiece learns the same pieces every time; without, ties fall at random.
    """
    if vocab_size <= len(BERT_SPECIAL):
        raise BadInput(f"a vocabulary of {vocab_size} leaves nothing beside the 5 special tokens")
    if kind == "symbols":
        seen: set[str] = set()
        for text in texts:
            seen.update(text)
        letters = {letter for letter in seen if not letter.isspace()}
        if len(letters) + len(BERT_SPECIAL) > vocab_size:
            raise BadInput(f"{len(letters)} symbols + 5 special > --vocab-size {vocab_size}")
        return symbols(sorted(letters))
    if kind == "unigram":
        return _train_unigram(texts, vocab_size)
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers, trainers

    if kind == "wordpiece":
        # the library's own trainer, run on this module's normalisation
        rules = wordpiece(dict(zip(BERT_SPECIAL.values(), range(5), strict=True)), lowercase)._model
        # the trainer numbers pieces as it meets them in a hash map, and ties go by number: those
        # inside of words get their numbers here, as "special" ones come first and in order
        special = [*BERT_SPECIAL.values(), *_continuations(rules, characters or ())]
        rules.train_from_iterator(
            texts,
            trainers.WordPieceTrainer(
                vocab_size=vocab_size, special_tokens=special, show_progress=False
            ),
        )
        return wordpiece(_ids(rules, vocab_size), lowercase)
    if kind != "bpe":
        raise BadInput(f"unknown kind {kind!r}: give one of {', '.join(KINDS)}")
    rules = Fast(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = list(ROBERTA_SPECIAL.values())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rules.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    merges = [tuple(m) for m in json.loads(rules.to_str())["model"]["merges"]]
    return byte_bpe(_ids(rules, vocab_size), merges)


def _continuations(rules: Any, characters: Iterable[str]) -> list[str]:
    """The pieces of one character that can stand inside of a word, as BERT's rules leave them."""
    found: set[str] = set()
    for character in characters:
        for normal in rules.normalizer.normalize_str(character):
            if len(rules.pre_tokenizer.pre_tokenize_str(f"a{normal}a")) == 1:
                found.add(f"##{normal}")
    return sorted(found)


def _ids(model: Any, vocab_size: int) -> dict[str, int]:
    """A trained model's vocabulary, its ids made gapless in order."""
    vocabulary = model.get_vocab(with_added_tokens=True)
    if len(vocabulary) > vocab_size:  # the trainers keep every character, whatever was asked
        raise BadInput(
            f"--vocab-size {vocab_size} is too small: characters and special tokens alone make "
            f"{len(vocabulary)}"
        )
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    return {piece: i for i, piece in enumerate(ordered)}


def _train_unigram(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    import sentencepiece

    model = io.BytesIO()
    lines = (line for text in texts for line in text.splitlines())
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            max_sentence_length=2**24,  # longer lines than the limit are skipped in silence
            input_sentence_size=5_000_000,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece="<pad>",
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput(f"SentencePiece cannot make {vocab_size} pieces of this: {reason}") from None
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(model.getvalue())
    meta = {"kind": "unigram", "special": dict(ALBERT_SPECIAL), "pair_separators": 1}
    return Tokenizer(meta, processor)
