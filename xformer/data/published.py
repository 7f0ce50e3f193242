"""Imports and exports tokenizers in the formats of BERT, RoBERTa, ALBERT, ModernBERT and ESM-2.

    vocab.txt                  BERT's WordPiece or ESM-2's alphabet: one piece in each line
    vocab.json, merges.txt     RoBERTa's or GPT-2's byte-level BPE
    spiece.model               ALBERT's unigram, as SentencePiece writes it
    sentencepiece.bpe.model    XLM-RoBERTa's or CamemBERT's unigram, as SentencePiece writes it
    tokenizer.json             any of these, as Hugging Face's `tokenizers` writes it

`tokenizer_config.json` may say how text is normalised: do_lower_case, strip_accents,
tokenize_chinese_chars (BERT), keep_accents (ALBERT), add_prefix_space (RoBERTa). If it does not, or
if it names a general class (PreTrainedTokenizerFast), tokenizer.json decides. If that does not
either, the default of BERT or ALBERT applies. Words that were added to a vocabulary of WordPiece or
BPE are listed in tokenizer.json, tokenizer_config.json or added_tokens.json.

The ids are those of `transformers` for the same files, with three exceptions. A special token that
is spelled out in a text is split like any other text. If tokenizer_config.json does not say whether
a BERT lower-cases, transformers lower-cases even if tokenizer.json says that it does not. In ESM-2
each unknown character is one <unk>; transformers makes one of several that follow one another.

An export repeats the other settings of the files: how special tokens treat the space beside them,
further special tokens, the options in KEPT, and whether the texts of a pair have segments
(`token_type_ids` in model_input_names, or else the default of the class).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

from xformer.data import tokenizers, vocabularies
from xformer.data.errors import BadInput, Failure
from xformer.data.files import read_json, write_json
from xformer.data.tokenizers import (
    BERT_SPECIAL,
    ESM_SPECIAL,
    HIDDEN,
    ROBERTA_SPECIAL,
    UNUSED,
    Tokenizer,
)

# if a directory has several of these files, the first is read
FORMS = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
# the classes of `transformers` whose rules are implemented; others split text differently, such as
# those that use MeCab for Japanese
CLASSES = re.compile(
    r"(Bert|DistilBert|Electra|MobileBert|SqueezeBert|Roberta|GPT2|Albert|XLMRoberta|Camembert)"
    r"Tokenizer(Fast)?"
    r"|PreTrainedTokenizerFast|TokenizersBackend|EsmTokenizer"
)
GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the classes without own rules
ESM_CLASS = "EsmTokenizer"
# How the classes and model types begin whose tokenizers number the texts of a pair. AlbertTokenizer
# does so only before version 5 of `transformers`, but ALBERTs were trained with these numbers.
SEGMENTS = re.compile(r"bert|electra|mobilebert|squeezebert|albert")
UNIGRAM_CLASSES = {"xlm-roberta": "XLMRobertaTokenizer", "camembert": "CamembertTokenizer"}
# the options of tokenizer_config.json that change ids
OPTIONS = (
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "keep_accents",
    "add_prefix_space",
)
# the options of tokenizer_config.json that do not change ids; they are exported unchanged
KEPT = ("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # options of an added token
ALBERT_STEPS = re.compile(
    r"Replace Replace( NFKD StripAccents)?( Lowercase)?( Precompiled)?( Replace)?"
)
ALBERT_REPLACED = [{"String": "``"}, {"String": "''"}, {"Regex": " {2,}"}]
# the options of a model in tokenizer.json that change ids, with the values that are supported
WORDPIECE = {
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}
BPE = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "byte_fallback": False,
    "ignore_merges": False,
}
UNIGRAM = {"unk_id": 1, "byte_fallback": False}
XLM = {"unk_id": 3, "byte_fallback": False}
SPACE = r"[\s\x1c-\x1f]+"  # white space as Python defines it
WALL = "\ufdd0"  # keeps two characters apart; Unicode reserves it for such uses within programs


@dataclass(frozen=True)
class _Source:
    """A file to import, its form (one of FORMS), and the prefix of its companion files' paths."""

    file: Path
    form: str
    stem: str
    cased: bool
    keep_accents: bool

    def beside(self, name: str) -> Path:
        """The path of a companion file."""
        return Path(self.stem + name)

    @cached_property
    def fast(self) -> Any:
        """The content of tokenizer.json, or None if this file does not exist. It may itself be the
        file to import."""
        own = self.form == "tokenizer.json"
        file = self.file if own else self.beside("tokenizer.json")
        return read_json(file) if file.is_file() else None

    @cached_property
    def options(self) -> dict[str, Any]:
        """How text is normalised: tokenizer_config.json takes precedence over tokenizer.json, if
        its class reads these options."""
        file = self.beside("tokenizer_config.json")
        options = read_json(file) if file.is_file() else {}
        if not isinstance(options, dict):
            raise BadInput(f"{file} must contain a JSON object of options")
        name = options.get("tokenizer_class")
        if name is not None and not CLASSES.fullmatch(str(name)):
            raise BadInput(
                f"{file}: tokenizer_class {name} is not supported; give a tokenizer of BERT, "
                "RoBERTa, ALBERT, XLM-RoBERTa, CamemBERT, ModernBERT, ESM-2 or their relatives"
            )
        for option in OPTIONS:
            if not isinstance(options.get(option), bool | None):
                raise BadInput(f"{file}: {option} is {options[option]!r}; it must be true or false")
        if not isinstance(names := options.get("model_input_names"), list | None):
            raise BadInput(f"{file}: model_input_names is {names!r}; it must be a list of names")
        if self.fast is not None and name in GENERAL:  # they read only tokenizer.json
            options = {key: value for key, value in options.items() if key not in OPTIONS}
        return {**_normalisation(self.fast), **options}

    @cached_property
    def added(self) -> dict[str, dict[str, Any]]:
        """The added tokens in the order of their ids, with their flags, including special ones."""
        try:
            return self._added()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadInput(
                f"{self.file}: it or a file beside it lists damaged added tokens: {error!r}"
            ) from None

    def _added(self) -> dict[str, dict[str, Any]]:
        if self.fast is not None:
            tokens = {t["content"]: t for t in self.fast.get("added_tokens") or []}
        elif decoder := self.options.get("added_tokens_decoder"):
            tokens = {t["content"]: {**t, "id": int(i)} for i, t in decoder.items()}
        else:
            file = self.beside("added_tokens.json")
            special = str(self.options.get("additional_special_tokens"))
            ids = read_json(file) if file.is_file() else {}
            tokens = {
                piece: {"id": i, "special": repr(piece) in special} for piece, i in ids.items()
            }
        mask = self.options.get("mask_token")
        if isinstance(mask, dict) and mask["content"] not in tokens:
            tokens[mask["content"]] = {"id": -1, "special": True, **mask}
        return {
            piece: {
                "id": token["id"],
                "special": bool(token["special"]),
                **{
                    flag: bool(token.get(flag, flag == "normalized" and not token["special"]))
                    for flag in FLAGS
                },
            }
            for piece, token in sorted(tokens.items(), key=lambda item: item[1]["id"])
        }

    @property
    def name(self) -> str:
        """The tokenizer_class, or else the model_type of config.json, in lower case; "" if the
        files have neither."""
        name = self.options.get("tokenizer_class")
        file = self.beside("config.json")
        if name is None and file.is_file():
            config = read_json(file)
            name = config.get("model_type") if isinstance(config, dict) else None
        return str(name or "").lower()

    @property
    def is_camembert(self) -> bool:
        """Whether a sentencepiece.bpe.model is CamemBERT's and not XLM-RoBERTa's. The model itself
        does not say."""
        return self.name.startswith("camembert")

    @property
    def input_names(self) -> list[str] | None:
        """What the published tokenizer gives to the model. None if the files do not say."""
        names = self.options.get("model_input_names")
        if names is not None:
            return list(map(str, names))
        if not self.name:
            return None
        segments = bool(SEGMENTS.match(self.name))
        return ["input_ids", *["token_type_ids"] * segments, "attention_mask"]

    def lowercase(self) -> bool:
        """Whether text is lower-cased: as the files say, or else as the user says."""
        option = self.options.get("do_lower_case")
        if option and self.cased:
            raise BadInput(
                f"{self.file}: do_lower_case is true in the files next to it; leave out --cased"
            )
        return not self.cased if option is None else option

    def check_accents(self, option: str, strips: bool) -> None:
        """Raise BadInput if the files strip accents by an option, but the user keeps them."""
        if strips and self.keep_accents:
            value = str(self.options[option]).lower()
            raise BadInput(
                f"{self.file}: {option} is {value} in the files next to it; leave out "
                "--keep-accents"
            )


def import_tokenizer(
    path: str | Path, cased: bool = False, keep_accents: bool = False
) -> Tokenizer:
    """The tokenizer in a directory, or in a file in one of the FORMS.

    Files may share a prefix, as `gpt2.vocab.json` and `gpt2.merges.txt` do. `cased` keeps upper
    case and accents, and `keep_accents` keeps accents only, unless the files say otherwise. A GPT-2
    vocabulary lacks RoBERTa's special tokens, so they are added at its end: <s>, <pad>, </s>,
    <unk>, <mask>.

    Raises BadInput if a file is missing or is not a vocabulary, if special tokens are missing, if a
    piece occurs twice, if an id is missing, if merges do not fit the vocabulary, or if the rules
    are not those of BERT, RoBERTa, ALBERT, XLM-RoBERTa, CamemBERT, ModernBERT or ESM-2.
    """
    source = _source(Path(path), cased, keep_accents)
    readers = {
        "tokenizer.json": _tokenizer_json,
        "vocab.txt": _vocab_txt,
        "vocab.json": _vocab_json,
        "spiece.model": _spiece_model,
        "sentencepiece.bpe.model": _spiece_model,
    }
    tokenizer = readers[source.form](source)
    tokenizer.published |= {name: source.options[name] for name in KEPT if name in source.options}
    flags = {
        piece: {flag: token[flag] for flag in FLAGS}
        for piece, token in source.added.items()
        if token["special"]
    }
    tokenizer.published |= {"special": flags} if flags else {}
    names = source.input_names
    tokenizer.published |= {"model_input_names": names} if names is not None else {}
    return tokenizer


def _source(path: Path, cased: bool, keep_accents: bool) -> _Source:
    if (path / tokenizers.META).is_file():
        raise BadInput(f"{path} is a tokenizer already; use it without importing it")
    if path.is_dir():
        for form in FORMS:
            if (path / form).is_file():
                return _Source(path / form, form, f"{path}/", cased, keep_accents)
        raise BadInput(
            f"{path} must contain tokenizer.json, vocab.txt, spiece.model, or vocab.json together "
            "with merges.txt; give a directory that contains one of these"
        )
    if not path.exists():
        raise BadInput(f"{path} does not exist")
    stem = str(path).removesuffix("merges.txt")
    if stem != str(path):
        return _Source(Path(f"{stem}vocab.json"), "vocab.json", stem, cased, keep_accents)
    for form in FORMS:
        if path.name.endswith(form):
            return _Source(path, form, str(path).removesuffix(form), cased, keep_accents)
    for form in ("tokenizer.json", "vocab.txt", "spiece.model"):
        if path.suffix == Path(form).suffix:  # a file of another name has no companions
            return _Source(path, form, f"{path}.", cased, keep_accents)
    raise BadInput(
        f"{path} is not a vocabulary: give a .txt, a .json or a .model, or a directory with one"
    )


# ---------------------------------------------------------------------------------- file formats


def _vocab_txt(source: _Source) -> Tokenizer:
    # not splitlines(), because a piece may be U+2028 or another line separator
    pieces = _text(source.file).removesuffix("\n").split("\n")
    seen: dict[str, int] = {}
    for number, piece in enumerate(pieces, 1):
        if seen.setdefault(piece, number) != number:
            raise BadInput(
                f"{source.file}:{number}: the piece {piece!r} occurs twice, first in line "
                f"{seen[piece]}; remove one of them"
            )
    if all(re.fullmatch(r"\S+ \d+( #fairseq:overwrite)?", piece) for piece in pieces):
        raise BadInput(
            f"{source.file} has a word and a number in each line, as fairseq's dict.txt: give a "
            "file of the words alone to tokenizer --kind words --input"
        )
    if source.options.get("tokenizer_class") == ESM_CLASS or set(ESM_SPECIAL.values()) <= set(seen):
        with _naming(source.file):
            return vocabularies.esm(pieces)
    return _wordpiece(source, {piece: i for i, piece in enumerate(pieces)})


def _vocab_json(source: _Source) -> Tokenizer:
    file = source.beside("merges.txt")
    vocabulary = _vocabulary(source.file, read_json(source.file))
    if not file.is_file():
        raise BadInput(f"{file} does not exist: {source.file.name} needs its merges next to it")
    merges = []
    for number, line in enumerate(_text(file).removesuffix("\n").split("\n"), 1):
        if number == 1 and line.startswith("#version"):
            continue
        merge = line.split(" ")
        if len(merge) != 2:
            raise BadInput(
                f"{file}:{number}: {line!r} is not a merge: give two pieces with a space between"
            )
        merges.append((f"{file}:{number}", (merge[0], merge[1])))
    return _byte_bpe(source, vocabulary, merges)


def _empty_spiece_model() -> Any:
    """A SentencePiece model as a protocol buffer. Raises Failure if protobuf is too old for the
    installed sentencepiece."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except Exception as error:  # an old protobuf lacks what is imported, or has an error of its own
        raise Failure(
            f"SentencePiece models cannot be read: {error}; try: pip install --upgrade protobuf"
        ) from None
    messages: Any = sentencepiece_model_pb2
    return messages.ModelProto()


def _spiece_model(source: _Source) -> Tokenizer:
    model = _empty_spiece_model()
    try:
        model.ParseFromString(source.file.read_bytes())
    except Exception as error:  # protobuf has its own errors
        raise BadInput(f"{source.file} is not a SentencePiece model: {error}") from None
    if not model.pieces or model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
        raise BadInput(f"{source.file} is not a SentencePiece model of the kind unigram")
    charsmap = model.normalizer_spec.precompiled_charsmap
    if source.form == "sentencepiece.bpe.model":  # its first pieces are <unk>, <s> and </s>
        pieces = [(piece.piece, piece.score) for piece in model.pieces]
        first = [(piece, 0.0) for piece in [*ROBERTA_SPECIAL.values()][:4]]
        if source.is_camembert:
            names = (UNUSED[0], ROBERTA_SPECIAL["pad"], UNUSED[1], ROBERTA_SPECIAL["unk"])
            first = [*((piece, 0.0) for piece in names), (UNUSED[2], -100.0)]
        scores = first + pieces[1 if source.is_camembert else 3 :]
        with _naming(source.file):
            return vocabularies.xlm_roberta([*scores, (ROBERTA_SPECIAL["mask"], 0.0)], charsmap)
    kinds = model.SentencePiece
    return _albert(
        source,
        [(piece.piece, piece.score) for piece in model.pieces],
        charsmap,
        [piece.piece for piece in model.pieces if piece.type == kinds.CONTROL],
        [piece.piece for piece in model.pieces if piece.type == kinds.USER_DEFINED],
    )


def _tokenizer_json(source: _Source) -> Tokenizer:
    fast = source.fast
    unknown = BadInput(
        f"{source.file} is not BERT's WordPiece, RoBERTa's or ModernBERT's byte-level BPE, or the "
        "unigram model of ALBERT, XLM-RoBERTa or CamemBERT; for words between white space train "
        "one with --kind words --input FILE"
    )
    try:
        if (own := _own(source, fast)) is not None:
            return own
        model = fast["model"]
        special = {p: t["id"] for p, t in source.added.items() if t["special"] and t["id"] >= 0}
        symbols = [piece for piece, token in source.added.items() if not token["special"]]
        kind = _kind(fast)
        if kind is None:
            raise unknown
        if kind in ("unigram", "xlm"):
            scores = [(str(piece), float(score)) for piece, score in model["vocab"]]
            maps = [
                step["precompiled_charsmap"]
                for step in _steps(fast["normalizer"])
                if step["type"] == "Precompiled"
            ]
            charsmap = base64.b64decode(maps[0]) if maps else b""
            if kind == "unigram":
                return _albert(source, scores, charsmap, special, symbols)
            if symbols:
                raise BadInput(
                    f"{source.file}: {symbols[0]!r} was added to the vocabulary, but only special "
                    "tokens can be added to XLM-RoBERTa's and CamemBERT's; remove it"
                )
            with _naming(source.file):
                return vocabularies.xlm_roberta(scores, charsmap)
        if kind == "bpe" and BERT_SPECIAL["cls"] in special:
            # ModernBERT's special tokens and added words take turns at the end of the vocabulary
            special = {piece: token["id"] for piece, token in source.added.items()}
        else:  # words that special tokens follow are put into the vocabulary, too
            last = max(special.values(), default=-1)
            special |= {p: t["id"] for p, t in source.added.items() if 0 <= t["id"] < last}
        vocabulary = _vocabulary(source.file, {**special, **model["vocab"]})
        if kind == "wordpiece":
            return _wordpiece(source, vocabulary)
        pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
        return _byte_bpe(source, vocabulary, [(str(source.file), (a, b)) for a, b in pairs])
    except (KeyError, TypeError, AttributeError, ValueError):
        raise unknown from None


def _own(source: _Source, fast: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer, if `export_tokenizer` wrote the files from a kind that only this project has
    (symbols or plain unigram); otherwise None."""
    steps = [step["type"] for step in _steps(fast["pre_tokenizer"])]
    if fast["model"]["type"] == "WordLevel" and steps in (["Split"], ["Split", "Split"]):
        vocabulary = _vocabulary(source.file, fast["model"]["vocab"])
        pieces = sorted(vocabulary, key=vocabulary.__getitem__)
        if pieces[:5] == [*BERT_SPECIAL.values()]:
            return vocabularies.symbols(pieces[5:], separated=len(steps) == 1)
    proto = source.beside("spiece.model")
    if fast["model"]["type"] == "Unigram" and steps == ["Metaspace"] and proto.is_file():
        return vocabularies.unigram(proto)
    return None


def _kind(fast: dict[str, Any]) -> str | None:
    """The kind of a tokenizer.json (wordpiece, bpe, unigram or xlm), or None if it has steps or
    options of another kind."""
    model, normal = fast["model"], _steps(fast["normalizer"])
    before = [step["type"] for step in _steps(fast["pre_tokenizer"])]
    steps = " ".join(step["type"] for step in normal)

    def has(options: dict[str, Any]) -> bool:
        # an empty affix may be written as null
        return all(
            model.get(name, value) == value or (value == "" and model[name] is None)
            for name, value in options.items()
        )

    if steps == "BertNormalizer" and before == ["BertPreTokenizer"] and has(WORDPIECE):
        return "wordpiece" if normal[0].get("clean_text", True) else None
    if steps in ("", "NFC") and before == ["ByteLevel"] and has(BPE) and "merges" in model:
        return "bpe" if fast["pre_tokenizer"].get("use_regex", True) else None
    replaced = [step["pattern"] for step in normal if step["type"] == "Replace"]
    if before == ["WhitespaceSplit", "Metaspace"]:
        space = _steps(fast["pre_tokenizer"])[1]
        always = space.get("prepend_scheme", "always") == "always"
        always &= space.get("add_prefix_space", True) is True
        if always and ALBERT_STEPS.fullmatch(steps) and has(UNIGRAM):
            return "unigram" if replaced == ALBERT_REPLACED[: len(replaced)] else None
        if always and steps in ("", "Precompiled") and has(XLM):
            return "xlm"
    return None


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, in order."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return list(part["normalizers"] if "normalizers" in part else part["pretokenizers"])


def _normalisation(fast: Any) -> dict[str, Any]:
    """How a tokenizer.json normalises text, as options of a tokenizer_config.json."""
    try:
        normal, before = _steps(fast["normalizer"]), _steps(fast["pre_tokenizer"])
        steps = [step["type"] for step in normal]
    except (KeyError, TypeError):
        return {}
    if steps == ["BertNormalizer"]:
        return {
            "do_lower_case": normal[0].get("lowercase"),
            "strip_accents": normal[0].get("strip_accents"),
            "tokenize_chinese_chars": normal[0].get("handle_chinese_chars"),
        }
    if steps in ([], ["NFC"]) and before:
        return {"add_prefix_space": before[0].get("add_prefix_space")}
    return {"do_lower_case": "Lowercase" in steps, "keep_accents": "StripAccents" not in steps}


# ---------------------------------------------------------------------------------- families


def _added_words(source: _Source, vocabulary: dict[str, int]) -> list[Any]:
    """The words that were added to a vocabulary. Special tokens that follow its last id are put
    into it, with the words before them. Raises BadInput unless the ids of the other words follow
    the vocabulary's last id."""
    from tokenizers import AddedToken

    last = max((token["id"] for token in source.added.values() if token["special"]), default=-1)
    for piece, token in source.added.items():
        if token["id"] <= last and token["id"] == len(vocabulary):
            vocabulary.setdefault(piece, len(vocabulary))
    words, end = [], len(vocabulary)
    for piece, token in source.added.items():
        if token["special"] and (piece in vocabulary or token["id"] < 0):
            continue
        if token["special"] or token["id"] != vocabulary.get(piece, end):
            raise BadInput(
                f"{source.file}: {piece!r} was added to the vocabulary with the id {token['id']}; "
                f"only special tokens and then words may follow its {len(vocabulary)} pieces"
            )
        end += piece not in vocabulary
        words.append(AddedToken(piece, **{flag: token[flag] for flag in FLAGS}))
    return words


def _wordpiece(source: _Source, vocabulary: dict[str, int]) -> Tokenizer:
    lowercase, accents = source.lowercase(), source.options.get("strip_accents")
    source.check_accents("strip_accents", accents is True)
    if source.keep_accents and lowercase:
        accents = False
    chinese = source.options.get("tokenize_chinese_chars") is not False
    added = _added_words(source, vocabulary)
    with _naming(source.file):
        return vocabularies.wordpiece(vocabulary, lowercase, accents, chinese, added)


def _byte_bpe(
    source: _Source, vocabulary: dict[str, int], merges: list[tuple[str, tuple[str, str]]]
) -> Tokenizer:
    """RoBERTa's tokenizer. `merges` holds the place of each merge in a file, and its two pieces."""
    for place, (first, second) in merges:
        for piece in (first, second, first + second):
            if piece not in vocabulary:
                raise BadInput(
                    f"{place}: the merge {first!r} {second!r} does not fit the vocabulary, which "
                    f"lacks {piece!r}"
                )
    special, berts = ROBERTA_SPECIAL.values(), BERT_SPECIAL["cls"] in vocabulary
    if not berts and not any(piece in vocabulary for piece in special):
        vocabulary |= {piece: len(vocabulary) + i for i, piece in enumerate(special)}
    prefix_space = source.options.get("add_prefix_space") or False
    added, pairs = _added_words(source, vocabulary), [pair for _, pair in merges]
    composed = bool(source.fast and _steps(source.fast.get("normalizer")))  # only NFC is accepted
    with _naming(source.file):
        return vocabularies.byte_bpe(vocabulary, pairs, prefix_space, added, composed)


def _albert(
    source: _Source,
    scores: list[tuple[str, float]],
    charsmap: bytes,
    controls: Iterable[str],
    symbols: list[str],
) -> Tokenizer:
    known = {piece for piece, _ in scores}
    for piece in [*controls, *symbols]:
        if piece not in known:
            raise BadInput(f"{source.file}: the added token {piece!r} is not in the vocabulary")
    if len(known) != len(scores):
        raise BadInput(f"{source.file} holds a piece twice; remove one of them")
    lowercase, accents = source.lowercase(), source.options.get("keep_accents")
    source.check_accents("keep_accents", accents is False)
    if accents is None:  # as in transformers, files that say only do_lower_case strip accents
        cased = source.cased and source.options.get("do_lower_case") is None
        accents = source.keep_accents or cased
    with _naming(source.file):
        return vocabularies.albert(scores, charsmap, controls, symbols, lowercase, accents)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """A context that puts a file's name before the message of every BadInput."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist") from None
    except UnicodeDecodeError:
        raise BadInput(f"{file} is not UTF-8") from None


def _vocabulary(file: Path, value: Any) -> dict[str, int]:
    """The value as a vocabulary (piece -> id). Raises BadInput if it is not a vocabulary, or if its
    ids are not 0, 1, 2, ..., each once."""
    if not isinstance(value, dict) or any(type(i) is not int for i in value.values()):
        raise BadInput(f"{file} is not a vocabulary: give a JSON object that maps pieces to ids")
    for place, (i, piece) in enumerate(sorted((i, piece) for piece, i in value.items())):
        if i != place:
            wrong = f"{piece!r} has the id of another" if i < place else f"none has the id {place}"
            raise BadInput(f"{file}: the pieces must have the ids 0 to {len(value) - 1}: {wrong}")
    return value


# ------------------------------------------------------------------------------------ writing


def export_tokenizer(
    tokenizer: Tokenizer, directory: str | Path, longest: int, segments: bool = True
) -> None:
    """Write a tokenizer to a directory, for `transformers` and `import_tokenizer` to read.

    The AutoTokenizer of `transformers` reads the files and gives the same ids, with special tokens
    around a text or a pair. There, a special token that is spelled out in a text gets its id.
    `longest` is the length limit of a row, special tokens included. `segments` says whether the
    model has different segments for the texts of a pair. They are left out if the published
    tokenizer gave none.
    """
    from tokenizers import processors

    segments = segments and tokenizer.segments
    if tokenizer.meta["special"] == ESM_SPECIAL:
        _export_esm(tokenizer, Path(directory), longest)
        return
    directory, special = Path(directory), tokenizer.meta["special"]
    fast = _fast_form(tokenizer)
    flags = _flags(tokenizer)
    for piece, piece_flags in flags.items():
        fast.add_special_tokens([_special_token(piece, piece_flags)])
    between = f"{special['sep']}:0 " * tokenizer.pair_separators
    second = int(segments)
    fast.post_processor = processors.TemplateProcessing(
        single=f"{special['cls']}:0 $A:0 {special['sep']}:0",
        pair=f"{special['cls']}:0 $A:0 {between}$B:{second} {special['sep']}:{second}",
        special_tokens=[(special[role], tokenizer.special[role]) for role in ("cls", "sep")],
    )
    fast.save(str(directory / "tokenizer.json"))
    pieces = tokenizer.pieces[: len(tokenizer) - len(tokenizer.added)]
    if tokenizer.kind == "wordpiece":
        text = "".join(f"{piece}\n" for piece in pieces)
        (directory / "vocab.txt").write_text(text, encoding="utf-8")
    elif tokenizer.kind == "bpe" and tokenizer.pair_separators == 2:
        merges = json.loads(fast.to_str())["model"]["merges"]
        write_json(directory / "vocab.json", {piece: i for i, piece in enumerate(pieces)})
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
        (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif tokenizer.sentencepiece is not None:
        (directory / "spiece.model").write_bytes(tokenizer.sentencepiece)
    names = {f"{role}_token": piece for role, piece in special.items()}
    if tokenizer.kind == "unigram" or (tokenizer.kind == "bpe" and tokenizer.pair_separators == 2):
        names |= {"bos_token": special["cls"], "eos_token": special["sep"]}
    options = {
        "tokenizer_class": _transformers_class(tokenizer, segments),
        "model_input_names": ["input_ids", *["token_type_ids"] * segments, "attention_mask"],
        **_kept(tokenizer),
        "model_max_length": longest,
        **names,
        **_normalisation_options(tokenizer),
    }
    if further := [piece for piece in flags if piece not in special.values()]:
        options["additional_special_tokens"] = further
    mask_flags = flags[special["mask"]]
    if mask_flags != dict.fromkeys(FLAGS, False):
        options["mask_token"] = {"__type": "AddedToken", "content": special["mask"], **mask_flags}
    write_json(directory / "tokenizer_config.json", options)
    write_json(directory / "special_tokens_map.json", names)


def _export_esm(tokenizer: Tokenizer, directory: Path, longest: int) -> None:
    """Write the alphabet of ESM-2 as its class of `transformers` reads it."""
    (directory / "vocab.txt").write_text("\n".join(tokenizer.pieces), encoding="utf-8")
    roles = {**ESM_SPECIAL, "eos": ESM_SPECIAL["sep"]}
    names = {f"{role}_token": piece for role, piece in roles.items() if role != "sep"}
    options = {"tokenizer_class": ESM_CLASS, **_kept(tokenizer), "model_max_length": longest}
    options |= names
    write_json(directory / "tokenizer_config.json", options)
    write_json(directory / "special_tokens_map.json", names)


def _kept(tokenizer: Tokenizer) -> dict[str, Any]:
    """The published options that do not change the ids."""
    return {name: tokenizer.published[name] for name in KEPT if name in tokenizer.published}


def length_limit(tokenizer: Tokenizer, longest: int) -> int:
    """The published length limit of a row, if there is one below `longest`; else `longest`.
    `transformers` writes 1e30 for no limit."""
    limit = tokenizer.published.get("model_max_length")
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit >= 1:
        return longest
    return int(min(limit, longest))


def _flags(tokenizer: Tokenizer) -> dict[str, dict[str, bool]]:
    """Each special token with its flags. Flags that were not published get the defaults of the
    family: in RoBERTa and ALBERT a mask includes the space before it."""
    special = tokenizer.meta["special"]
    plain = dict.fromkeys(FLAGS, False)
    own = {
        piece: plain | {"lstrip": role == "mask" and tokenizer.kind in ("bpe", "unigram")}
        for role, piece in special.items()
    }
    return own | dict(tokenizer.published.get("special", {}))


def _special_token(piece: str, flags: dict[str, bool]) -> Any:
    from tokenizers import AddedToken

    return AddedToken(piece, special=True, **flags)


def _transformers_class(tokenizer: Tokenizer, segments: bool) -> str:
    """The name of the `transformers` class that implements the tokenizer's rules, or of the general
    class, which reads all rules from tokenizer.json."""
    if tokenizer.kind == "wordpiece":
        return "BertTokenizer"
    if tokenizer.kind == "bpe":
        # RoBERTa's class gives every token the segment 0, and drops NFC
        general = segments or tokenizer.rules["normalizer"] is not None
        modern = tokenizer.pair_separators == 1
        return "PreTrainedTokenizerFast" if general or modern else "RobertaTokenizer"
    if tokenizer.form:
        return "PreTrainedTokenizerFast" if segments else UNIGRAM_CLASSES[tokenizer.form]
    return "AlbertTokenizer" if "normalisation" in tokenizer.meta else "PreTrainedTokenizerFast"


def _normalisation_options(tokenizer: Tokenizer) -> dict[str, Any]:
    """How a tokenizer normalises text, as options of a tokenizer_config.json."""
    if not tokenizer.form and "normalisation" in tokenizer.meta:
        normal = tokenizer.meta["normalisation"]
        return {"do_lower_case": normal["lowercase"], "keep_accents": normal["keep_accents"]}
    return _normalisation(tokenizer.rules) if tokenizer.kind in ("wordpiece", "bpe") else {}


def _fast_form(tokenizer: Tokenizer) -> Any:
    """The tokenizer as an object of Hugging Face's `tokenizers`, before special tokens are
    added."""
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    if tokenizer.sentencepiece is not None:
        return _fast_unigram(tokenizer.sentencepiece)
    if tokenizer.kind != "symbols":
        rules = tokenizer.rules
        if tokenizer.kind != "unigram":
            return Fast.from_str(json.dumps(rules))
        pieces = rules["model"]["vocab"]  # see HIDDEN
        hidden = [piece.removeprefix(HIDDEN) for piece, _ in pieces if piece.startswith(HIDDEN)]
        rules["model"]["vocab"] = [[piece.removeprefix(HIDDEN), score] for piece, score in pieces]
        fast = Fast.from_str(json.dumps(rules))
        ours = tokenizer.meta["special"].values()
        plain = dict.fromkeys(FLAGS, False)
        fast.add_special_tokens([_special_token(p, plain) for p in hidden if p not in ours])
        return fast
    fast = Fast(models.WordLevel(tokenizer.ids, unk_token=tokenizer.meta["special"]["unk"]))
    steps = [pre_tokenizers.Split(Regex(SPACE), "removed")]
    if not tokenizer.meta["separated"]:
        steps.append(pre_tokenizers.Split(Regex("."), "isolated"))
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return fast


def _fast_unigram(proto: bytes) -> Any:
    """A SentencePiece unigram. It gives the same ids, with the exceptions in export.md."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    model = _empty_spiece_model()
    model.ParseFromString(proto)
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    fast = Fast(models.Unigram(pieces, unk_id=model.trainer_spec.unk_id, byte_fallback=False))
    table = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    composes = "nfkc" in model.normalizer_spec.name
    fast.normalizer = normalizers.Sequence(
        [
            *(_longest_match(table) if composes else [table]),
            normalizers.Strip(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return fast


def _longest_match(table: Any) -> list[Any]:
    """Steps that normalise as SentencePiece does with a table of NFKC.

    SentencePiece replaces the longest sequence of characters that the table has. Precompiled
    replaces one character or one short cluster: it does not compose kana and Hangul, and it drops a
    second accent. Here the table replaces single characters, and NFC composes them. NFC alone would
    compose and reorder more than the table does. So a wall is put before every mark. It is removed
    only between a letter and its first mark, and between marks that belong together.
    """
    from tokenizers import Regex, normalizers

    characters = map(chr, range(0x12000))  # no character beyond is composed
    composed = [c for c in characters if normalize("NFC", c) == c != normalize("NFD", c)]
    pairs = sorted({pair for c in composed for pair in pairwise(normalize("NFD", c))})
    letters = "가-힣" + "".join(c for c in composed if not "가" <= c <= "힣")
    # before a mark or joiner; between a syllable of Hangul and a letter that would end it. There is
    # none at the start of a text, because the library's NFC fails on a character inserted there.
    walls = r"(?<=.)(?=[\p{M}ﾞﾟ\u200c\u200d])|(?<=[가-힣])(?=[ᆨ-ᇂㄱ-ㅎﾡ-ﾾ])"
    passed = [f"(?<={a}){WALL}(?={b})" for a, b in pairs if category(a).startswith("M")]
    passed.append(rf"(?<![{letters}\p{{M}}]){WALL}")
    return [
        normalizers.Replace(Regex(walls), WALL),
        table,
        normalizers.Replace(Regex("|".join(passed)), ""),
        normalizers.NFC(),
        normalizers.Replace(WALL, ""),
    ]
