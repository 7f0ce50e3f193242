"""Text to ids and back.

WordPiece and byte-level BPE use the library `tokenizers`. Unigram uses `sentencepiece`, or
`tokenizers` if text is first normalised as ALBERT or the RoBERTas do. Symbols, a fixed alphabet
with one id each, are looked up in a table.

A tokenizer is a directory: `tokenizer_meta.json` (kind, special tokens, options), and beside it
`tokenizer.json` (wordpiece, bpe, the unigrams of ALBERT, XLM-RoBERTa and CamemBERT), `spiece.model`
(every other unigram), or no other file (symbols: the alphabet is in the meta file). Encoding adds
no special tokens; they are added when a batch is built. A text that contains "[SEP]" does not get
the id of the special token.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.errors import BadInput, typed
from xformer.data.files import installed, json_text, near, put_back, read_json, selected

META = "tokenizer_meta.json"
HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which UTF-8 cannot encode
NOT_ASCII = re.compile(r"[^\x00-\x7f]")
KINDS = ("wordpiece", "bpe", "unigram", "symbols")
BERT_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_SPECIAL = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
ALBERT_SPECIAL = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ESM_SPECIAL = {"cls": "<cls>", "pad": "<pad>", "sep": "<eos>", "unk": "<unk>", "mask": "<mask>"}
UNKNOWN = 0.01  # a warning says if a larger share of the tokens is unknown
# Pieces at the beginning of CamemBERT's vocabulary. No text is encoded to them.
UNUSED = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")
# Prefix of the unigram pieces that no text may be encoded to, such as special tokens. Text is split
# into words at white space, so no word matches a piece that contains a space.
HIDDEN = " "
Spans = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, starts, ends


class Tokenizer:
    """A vocabulary and its rules.

    `pieces` is the vocabulary in the order of ids, and `ids` maps each piece to its id. `special`
    maps "pad", "unk", "cls", "sep", "mask" to ids. `pair_separators` is the number of separators
    between the texts of a pair (BERT 1, RoBERTa 2). `meta["normalisation"]` exists if the unigram
    is ALBERT's, XLM-RoBERTa's or CamemBERT's. `added` are words that were added at the end of a
    WordPiece or BPE vocabulary. `published` holds the publisher's other settings, which change no
    id (see xformer.data.published).
    """

    def __init__(self, meta: dict[str, Any], model: Any, published: dict[str, Any] | None = None):
        self.meta = meta
        self.published = published or {}
        self.added: list[str] = []
        self.kind: str = meta["kind"]
        self.pair_separators: int = meta["pair_separators"]
        self._model = model
        self._sentencepiece = _runs_sentencepiece(meta)
        if self.kind == "symbols":
            self.pieces: list[str] = list(model)
        elif self._sentencepiece:
            self.pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
        else:
            vocabulary = model.get_vocab(with_added_tokens=True)
            self.pieces = sorted(vocabulary, key=vocabulary.__getitem__)
            if self.kind != "unigram":
                self.added = self.pieces[model.get_vocab_size(with_added_tokens=False) :]
            if list(map(vocabulary.__getitem__, self.pieces)) != list(range(len(vocabulary))):
                raise BadInput(f"the vocabulary's ids are not 0 to {len(vocabulary) - 1}")
            if self.kind == "unigram":
                self.pieces = [piece.removeprefix(HIDDEN) for piece in self.pieces]
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        missing = [piece for piece in meta["special"].values() if piece not in ids]
        if missing:
            raise BadInput(f"the vocabulary lacks the special tokens {', '.join(missing)}")
        self.special: dict[str, int] = {role: ids[p] for role, p in meta["special"].items()}
        self.ids = ids

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {len(self):,} pieces)"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the ids of a text."""
        state = {**self.meta, "pieces": self.pieces}
        if self._sentencepiece:
            state["model"] = hashlib.sha256(self._model.serialized_model_proto()).hexdigest()
        elif self.kind != "symbols":
            state["model"] = rules = self.rules
            if self.kind == "unigram":  # the library reads the last bit of some scores wrongly
                scores = [(piece, float(np.float32(s))) for piece, s in rules["model"]["vocab"]]
                rules["model"]["vocab"] = scores
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    @property
    def form(self) -> str:
        """The model whose unigram this is, if it uses RoBERTa's special tokens: "xlm-roberta" or
        "camembert". "" for every other tokenizer."""
        return str(self.meta.get("normalisation", {}).get("form", ""))

    @property
    def mask_takes_space(self) -> bool:
        """Whether a mask includes the space before it. If the publisher did not say, it does for
        BPE, as in RoBERTa, and does not for other kinds."""
        mask = self.published.get("special", {}).get(self.meta["special"]["mask"])
        return bool(mask["lstrip"]) if mask else self.kind == "bpe"

    @property
    def all_special(self) -> list[int]:
        """The ids of the special tokens, also of those that a publisher added."""
        further = (self.ids[p] for p in self.published.get("special", {}) if p in self.ids)
        return sorted({*self.special.values(), *further})

    @property
    def symbols(self) -> str:
        """What has an id of its own: "letters", as in DNA and proteins, or "words", which are
        separated by white space. "" if words are cut into pieces."""
        return symbols_of(self.meta)

    @property
    def segments(self) -> bool:
        """Whether the second text of a pair has the segment 1. If the published tokenizer gave the
        model no segments, both texts have the segment 0."""
        return "token_type_ids" in self.published.get("model_input_names", ["token_type_ids"])

    @property
    def rules(self) -> dict[str, Any]:
        """The content of tokenizer.json, for the tokenizers that have this file."""
        return dict(json.loads(self._model.to_str()))

    @property
    def sentencepiece(self) -> bytes | None:
        """The content of spiece.model, or None if the tokenizer has none."""
        return self._model.serialized_model_proto() if self._sentencepiece else None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32, without special tokens or truncation. Raises BadInput if
        `texts` is a single text."""
        if isinstance(texts, str):
            raise BadInput("give a list of texts, not a single text")
        if self.kind == "symbols":
            return [self._encode_symbols(text) for text in texts]
        if self._sentencepiece:
            return [np.asarray(ids, np.int32) for ids in self._model.encode(list(texts))]
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Spans]:
        """(ids, starts, ends) of each text, int32: token i comes from `text[starts[i]:ends[i]]`.

        The ids are those of `encode_batch`. Starts and ends count the characters (code points) of
        the original text; they do not decrease, except in ligatures of a unigram. A span excludes
        white space at its ends, so the span of a white-space token is empty. If a token is a part
        of a character (bytes of an emoji, the "f" of a ligature), its span is the whole character.
        A span includes the combining marks (accents, vowel signs) after it that the tokenizer
        deletes.
        """
        spans = self._spans_of_symbols if self.kind == "symbols" else self._spans_of_pieces
        if self._sentencepiece:
            spans = self._spans_of_sentencepiece
        return [
            (ids, *_with_marks(text, *_without_space(text, starts, ends)))
            for text, (ids, starts, ends) in zip(texts, spans(texts), strict=True)
        ]

    def encode_with_words(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, words) of each text, int32. The ids are those of `encode_batch`. Tokens with the
        same number in `words` are pieces of one word. The numbers never decrease.

        WordPiece and BPE also end a word at a punctuation mark, as the models of these kinds do.
        For unigrams a word ends at white space. Raises BadInput if the tokenizer knows no words.
        """
        if self._sentencepiece:
            begins = np.array([piece.startswith("▁") for piece in self.pieces])
            return [
                (ids, np.cumsum(begins[ids], dtype=np.int32)) for ids in self.encode_batch(texts)
            ]
        if self.symbols == "words":
            return [(ids, np.arange(len(ids), dtype=np.int32)) for ids in self.encode_batch(texts)]
        if self.symbols or self._model.pre_tokenizer is None:
            raise BadInput("the tokenizer does not split a text into words")
        encodings = self._model.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.asarray(encoding.ids, np.int32), np.asarray(encoding.word_ids, np.int32))
            for encoding in encodings
        ]

    def _spans_of_pieces(self, texts: Sequence[str]) -> Iterator[Spans]:
        for encoding in self._model.encode_batch(list(texts), add_special_tokens=False):
            yield _columns(encoding.ids, encoding.offsets)

    def _spans_of_sentencepiece(self, texts: Sequence[str]) -> Iterator[Spans]:
        encodings = self._model.encode(list(texts), return_type="offset_mapping")
        for text, pieces in zip(texts, encodings, strict=True):
            spans = list(pieces["offsets"])
            for i, piece in enumerate(pieces["pieces"]):
                start, end = spans[i]
                # if a character becomes several pieces, the library assigns it only to the last
                if piece.strip("▁") and not text[start:end].strip():
                    spans[i] = end, min(end + 1, len(text))
            yield _columns(pieces["ids"], spans)

    def _spans_of_symbols(self, texts: Sequence[str]) -> Iterator[Spans]:
        symbol = re.compile(r"\S+" if self.meta["separated"] else r"\S")
        for text in texts:
            yield _columns(self._encode_symbols(text), [m.span() for m in symbol.finditer(text)])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids, with special tokens spelt out."""
        ids = [int(i) for i in ids]
        if self.kind == "symbols":
            between = " " if self.meta["separated"] else ""
            return between.join(self.pieces[i] for i in ids)
        if self._sentencepiece:
            return self._model.decode(ids)
        text = self._model.decode(ids, skip_special_tokens=False)
        return text.removeprefix(HIDDEN) if self.kind == "unigram" else text

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer's files to an existing directory."""
        for name, content in self.files().items():
            (Path(directory) / name).write_bytes(content)

    def files(self) -> dict[str, bytes]:
        """The content of the files that `save` writes, by name."""
        contents: dict[str, bytes] = {}
        meta = {**self.meta, "vocab_size": len(self), "fingerprint": self.fingerprint}
        meta |= {"published": self.published} if self.published else {}
        if self.kind == "symbols":
            meta["pieces"] = self.pieces
        elif self._sentencepiece:
            contents["spiece.model"] = self._model.serialized_model_proto()
        else:
            contents["tokenizer.json"] = self._model.to_str(pretty=False).encode()
        contents[META] = json_text(meta).encode()
        return contents

    @cached_property
    def _symbol_table(self) -> np.ndarray:
        """The id of every character code. The last entry is the unknown symbol's id."""
        singles = [(ord(p), i) for p, i in self.ids.items() if len(p) == 1]
        codes = [code for code, _ in singles] + [ord(s) for s in self.meta.get("synonyms", {})]
        table = np.full(max(codes) + 2, self.special["unk"], np.int32)
        for code, i in singles:
            table[code] = i
        for letter, synonym in self.meta.get("synonyms", {}).items():
            table[ord(letter)] = self.ids[synonym]
        return table

    def _encode_symbols(self, text: str) -> np.ndarray:
        if self.meta["separated"]:
            unknown, special = self.special["unk"], set(self.meta["special"].values())
            words = ("" if word in special else word for word in text.split())
            return np.asarray([self.ids.get(word, unknown) for word in words], np.int32)
        codes = np.frombuffer("".join(text.split()).encode("utf-32-le"), np.uint32)
        table = self._symbol_table
        return table[np.minimum(codes, len(table) - 1)]


def unknown_note(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """A warning if the tokenizer does not know more than the share UNKNOWN of the text that became
    `ids` (T,), else ""."""
    share = float(np.mean(ids == tokenizer.special["unk"])) if len(ids) else 0.0
    if share <= UNKNOWN:
        return ""
    return unknown_warning([f"{100 * share:.3g} % of the tokens"], tokenizer)


def unknown_warning(parts: Sequence[str], tokenizer: Tokenizer) -> str:
    """A warning that the tokenizer does not know these parts of its input."""
    piece = tokenizer.pieces[tokenizer.special["unk"]]
    return (
        f"warning: the tokenizer does not know {', '.join(parts)}, which became {piece}; check the "
        "input, or give a tokenizer that was trained on such input (for DNA and proteins: one of "
        "--kind symbols)"
    )


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer in a directory: a tokenizer, a store, a checkpoint or a finished run.

    Raises BadInput if there is no tokenizer, or if its files differ from the recorded fingerprint.
    """
    path = model_directory(directory)
    if not (path / META).is_file():
        if not path.exists():
            hint = near(Path(directory)) or "; give a tokenizer, a store, a run or micro/english"
            raise BadInput(f"the tokenizer {directory} does not exist{hint}")
        door = typed("python preprocess.py tokenizer --from FILE")
        if (path / "config.json").is_file():  # a model of transformers
            from_hf = typed("python -m xformer.convert from-hf")
            door = f"{from_hf} {path} CHECKPOINT, with its model"
        lacks = f"{path} holds no tokenizer ({META} is missing)"
        raise BadInput(f"{lacks}; import a published one with {door}")
    meta = read_json(path / META)
    try:
        fingerprint, _ = meta.pop("fingerprint"), meta.pop("vocab_size")
        model, published = meta.pop("pieces", None), meta.pop("published", None)
        if _runs_sentencepiece(meta):
            model = sentencepiece_model(path / "spiece.model")
        elif meta["kind"] != "symbols":
            model = _fast_model(path / "tokenizer.json")
            if meta["kind"] == "unigram":
                _restore_scores(model, path / "tokenizer.json")
        tokenizer = Tokenizer(meta, model, published)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path / META} does not describe a tokenizer: {error!r}") from None
    if tokenizer.fingerprint != fingerprint:
        raise BadInput(
            f"the tokenizer in {path} was changed after it was saved: make it again, or restore it "
            "from a copy"
        )
    return tokenizer


def model_directory(directory: str | Path) -> Path:
    """The directory itself, or the checkpoint that it stands for as a finished run."""
    path = installed(directory)
    put_back(path)
    return selected(path)


def symbols_of(meta: dict[str, Any]) -> str:
    """The property `symbols` of the tokenizer with this meta file."""
    return "" if meta["kind"] != "symbols" else "words" if meta["separated"] else "letters"


def _runs_sentencepiece(meta: dict[str, Any]) -> bool:
    return meta["kind"] == "unigram" and "normalisation" not in meta


def _columns(ids: Any, spans: list[tuple[int, int]]) -> Spans:
    starts, ends = np.asarray(spans, np.int32).reshape(-1, 2).T
    return np.asarray(ids, np.int32), starts, ends


def _without_space(
    text: str, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The spans without white space at their ends. A span of white space becomes empty."""
    visible = np.array([i for i, letter in enumerate(text) if not letter.isspace()], np.int32)
    following = np.append(visible, len(text))[np.searchsorted(visible, starts)]
    preceding = np.append(-1, visible)[np.searchsorted(visible, ends)] + 1
    starts = np.minimum(following, ends).astype(np.int32)
    return starts, np.maximum(preceding, starts).astype(np.int32)


def _with_marks(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The spans, each with the combining marks that follow it and belong to no token."""
    marks = [m.start() for m in NOT_ASCII.finditer(text) if unicodedata.category(m[0])[0] == "M"]
    if not marks or not len(starts):
        return starts, ends
    others = np.delete(np.arange(len(text) + 1), marks)  # all other places, the end included
    following = others[np.searchsorted(others, ends)]  # the first of them from each span's end
    next_starts = np.append(starts[1:], len(text))
    grown = np.where(ends > starts, np.minimum(following, next_starts), ends)
    return starts, np.maximum(ends, grown).astype(np.int32)


def _fast_model(path: Path) -> Any:
    """The model in a tokenizer.json. Raises BadInput if there is none."""
    import tokenizers

    if not path.is_file():
        raise BadInput(f"{path} does not exist")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise BadInput(f"{path} is not a tokenizer file: {error}") from None


def _restore_scores(model: Any, path: Path) -> None:
    """Set a unigram's scores again, because the library reads the last bit of some wrongly."""
    from tokenizers import models

    unigram = read_json(path)["model"]
    scores = [(piece, score) for piece, score in unigram["vocab"]]
    model.model = models.Unigram(scores, unk_id=unigram["unk_id"], byte_fallback=False)


def sentencepiece_model(path: Path) -> Any:
    """The SentencePiece model in a file. Raises BadInput if there is none."""
    import sentencepiece

    if not path.is_file():
        raise BadInput(f"{path} does not exist")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(path.read_bytes())
    except RuntimeError as error:
        raise BadInput(f"{path} is not a SentencePiece model: {error}") from None
    return model
