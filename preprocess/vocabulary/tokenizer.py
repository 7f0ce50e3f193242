"""`tokenizer`: train a tokenizer on raw text, or import a published one."""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from xformer.data import published, tokenizers, vocabularies
from xformer.data.arguments import whole_number
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.files import atomic_directory, what_is
from xformer.data.outputs import check_directory
from xformer.data.store import MAX_PIECES

from ..arguments import add_output, add_skip_lines, covered_share
from ..bad import BadRows
from ..corpora import inputs
from ..corpora.documents import TextOptions, read_documents
from .characters import CharacterCounts, deleted, left_out, marks

WORDS = "words"  # a kind of tokenizer that is saved as one of symbols


def learn(
    kind: str,
    paths: list[Path],
    vocab_size: int,
    lowercase: bool,
    options: TextOptions,
    keep_accents: bool = False,
    coverage: float | None = None,
) -> tokenizers.Tokenizer:
    """Train a tokenizer with `vocab_size` pieces on the files' documents, read as a stream. For
    `lowercase`, `keep_accents` and `coverage` see `vocabularies.learn`.

    Raises BadInput if a file cannot be read, if there is no text, or if the text does not allow
    that many pieces.
    """
    total = sum(path.stat().st_size for path in paths)
    characters = CharacterCounts()
    if kind == "wordpiece":  # without the characters, the trainer breaks ties at random
        with Progress("looking for characters", total, "B") as bar:
            for text, _ in read_documents(paths, options, bar.advance):
                characters.add(text)
    known = [character for character, _ in characters.items()]

    counts: Counter[str] = Counter()  # of words

    def learned(texts: Iterator[str]) -> tokenizers.Tokenizer:
        if kind == "unigram":
            texts = _counted(texts, characters)
        if kind != WORDS:
            return vocabularies.learn(
                kind, texts, vocab_size, lowercase, known, keep_accents, coverage
            )
        for text in texts:
            counts.update(text.split())
        return vocabularies.words(counts, vocab_size)

    with Progress("reading", total, "B") as bar:
        tokenizer = _Training(learned, paths, options, bar).result()
    if kind == WORDS:
        _say_unknown(counts, tokenizer)
    if kind == "wordpiece" and lowercase and not keep_accents and (note := deleted(characters)):
        say(note, error=True)
    if kind == "unigram" and (note := left_out(characters, tokenizer, coverage)):
        say(note, error=True)
    return tokenizer


def _counted(texts: Iterator[str], characters: CharacterCounts) -> Iterator[str]:
    """Yield the texts unchanged, and count their characters."""
    for text in texts:
        characters.add(text)
        yield text


def _say_unknown(counts: Counter[str], tokenizer: tokenizers.Tokenizer) -> None:
    """Say which words of a text become the unknown token."""
    special = {tokenizer.pieces[i] for i in tokenizer.special.values()} & counts.keys()
    if special:
        times = ", ".join(f"{word} ({counts[word]:,})" for word in sorted(special))
        line = f"special tokens in the text become [UNK]: {times}; spell them otherwise"
        say(f"note: {line}", error=True)
    if rare := counts.keys() - tokenizer.ids.keys():
        share = sum(counts[word] for word in rare) / counts.total()
        line = f"{len(rare):,} of {len(counts) - len(special):,} words are left out"
        say(f"note: {line}: {100 * share:.3g} % of the tokens become [UNK]", error=True)


class _Training(threading.Thread):
    """Trains in a separate thread. The libraries ignore Ctrl-C, but the main thread can react to
    it.
    """

    def __init__(
        self,
        learn: Callable[[Iterator[str]], tokenizers.Tokenizer],
        paths: list[Path],
        options: TextOptions,
        bar: Progress,
    ):
        super().__init__(daemon=True)
        self.learn, self.paths, self.options, self.bar = learn, paths, options, bar
        self.problems: list[Exception] = []  # in order; the first one is the cause
        self.learned: tokenizers.Tokenizer | None = None
        self.stopped, self.parked = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self.learned = self.learn(self._texts())
        except Exception as error:
            self.problems.append(error)

    def _texts(self) -> Iterator[str]:
        """Yield the files' texts. Errors are kept here, because the libraries reword them."""
        has_text = False
        try:
            for text, _ in read_documents(self.paths, self.options, self.bar.advance):
                if self.stopped.is_set():
                    self.parked.set()
                    threading.Event().wait()  # until the process ends
                if text and not text.isspace():
                    has_text = True
                    yield text
        except (BadInput, OSError) as error:
            self.problems.append(error)
        if not has_text:
            names = inputs.first_names(self.paths)
            self.problems.append(BadInput(f"{names}: no text found; give files with text"))

    def result(self) -> tokenizers.Tokenizer:
        self.start()
        try:
            while self.is_alive():
                self.join(0.1)
        except BaseException:
            self.stopped.set()
            self.parked.wait(0.5)  # a native thread that runs while Python exits would abort it
            raise
        if self.problems or self.learned is None:
            raise self.problems[0]
        return self.learned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tokenizer`."""
    add = parser.add_argument
    add(
        "--kind",
        choices=(*tokenizers.KINDS, WORDS),
        help="The kind of tokenizer to train. wordpiece: BERT's. bpe: byte-level BPE, as in "
        "RoBERTa. unigram: SentencePiece. symbols: one id for each character. words: one id for "
        "each word between white space, the most frequent words first; all others are unknown.",
    )
    add(
        "--input",
        nargs="+",
        metavar="FILE|DIR|GLOB",
        default=[],
        help="Raw text in UTF-8: files, directories (all their files with known extensions), or "
        "quoted globs such as 'text/**/*.txt'.",
    )
    inputs.add_arguments(parser)
    add_skip_lines(parser)
    add(
        "--vocab-size",
        type=whole_number(6, MAX_PIECES),
        metavar="N",
        help="The number of pieces in the vocabulary, including the five special tokens. A small "
        "text may yield fewer. Required with --input, except for --kind symbols and words, which "
        "take all characters or words of the text.",
    )
    add(
        "--from",
        type=Path,
        metavar="PATH",
        dest="source",
        help="Import a published tokenizer instead of training one: a Hugging Face directory, or "
        "one of these files: BERT's vocab.txt, RoBERTa's or GPT-2's vocab.json beside "
        "merges.txt, ALBERT's spiece.model, or a tokenizer.json. File names may have a prefix, as "
        "in gpt2.vocab.json. RoBERTa's five special tokens are added at the end of GPT-2's "
        "vocabulary.",
    )
    add(
        "--cased",
        action="store_true",
        help="Keep upper case and accents with --kind wordpiece (default: lower-case the text and "
        "strip accents; other kinds keep both). With --from, this is for the vocabularies of BERT "
        "and SentencePiece without a tokenizer_config.json or tokenizer.json that gives "
        "do_lower_case.",
    )
    add(
        "--keep-accents",
        action="store_true",
        help="Keep accents, but not upper case. Accents include the vowel signs of Hindi, the tone "
        "marks of Thai and the voicing marks of Japanese (default: strip them, unless --cased is "
        "given). With --from, this is for files beside which nothing gives strip_accents or "
        "keep_accents.",
    )
    add(
        "--character-coverage",
        type=covered_share,
        metavar="SHARE",
        help="The share of the text whose characters --kind unigram keeps. The rarest characters "
        "are left out and become <unk>, and a line says how many (default: 0.9995, as in "
        "SentencePiece; 1 keeps all; at least 0.98).",
    )
    add(
        "--alphabet",
        metavar="LETTERS",
        help="The letters of a symbols tokenizer, in the order of their ids, such as ACGT. "
        "Give it alone: --input is refused, and --vocab-size has no effect.",
    )
    add_output(parser, "TOK")


def run(arguments: argparse.Namespace) -> None:
    """Train a tokenizer, make one from an alphabet, or import a published one."""
    kind, output = arguments.kind, arguments.output
    read = [*map(Path, arguments.input), *([arguments.source] if arguments.source else [])]
    check_directory(output, arguments.overwrite, (tokenizers.META,), *read)
    if output.exists() and (what := what_is(output)) != "a tokenizer":
        raise BadInput(f"{output} is {what}, so it is not overwritten; give another output")
    started = time.monotonic()
    note = ""
    if arguments.character_coverage is not None and kind != "unigram":
        raise BadInput("--character-coverage goes with --kind unigram; leave it out")
    if arguments.source is not None:
        for option in ("kind", "input", "vocab_size", "alphabet"):
            if getattr(arguments, option):
                raise BadInput(
                    f"--{option.replace('_', '-')} is for training a tokenizer and --from imports "
                    "one; give one of them"
                )
        tokenizer = published.import_tokenizer(
            arguments.source, arguments.cased, arguments.keep_accents
        )
        note = _unreachable(tokenizer)
    elif kind is None and arguments.alphabet is None:
        raise BadInput(
            "--kind trains a tokenizer, --alphabet makes one of letters, and --from imports one; "
            "give one of them"
        )
    elif arguments.alphabet is not None:
        if kind not in ("symbols", None):
            raise BadInput(f"--alphabet goes with --kind symbols, not {kind}")
        if arguments.input:
            raise BadInput("give either --alphabet or --input, not both")
        if len(set(arguments.alphabet)) < len(arguments.alphabet):
            raise BadInput(
                f"--alphabet {arguments.alphabet} holds a letter twice; give each letter once"
            )
        tokenizer = vocabularies.symbols(arguments.alphabet)
    else:
        if not arguments.input:
            letters = ", unless --alphabet gives the letters" if kind == "symbols" else ""
            raise BadInput(f"--input is required for --kind {kind}{letters}")
        if not arguments.vocab_size and kind not in ("symbols", WORDS):
            raise BadInput(f"--vocab-size is required for --kind {kind}")
        files = inputs.find_files(arguments.input, arguments.format)
        inputs.check_distinct({"--input": files})
        bad = BadRows(arguments.skip_bad)
        options = TextOptions(
            skip=arguments.skip_lines, format=arguments.format, json_field=arguments.field, bad=bad
        )
        most = arguments.vocab_size or MAX_PIECES
        with bad:
            tokenizer = learn(
                kind,
                files,
                most,
                not arguments.cased,
                options,
                arguments.keep_accents,
                arguments.character_coverage,
            )
        if kind != "symbols" and len(tokenizer) < (arguments.vocab_size or 0):
            note = " (the text yields no more)"
    with atomic_directory(output, arguments.overwrite) as directory:
        tokenizer.save(directory)
    name = WORDS if tokenizer.symbols == WORDS else tokenizer.kind
    what = f"{name} tokenizer of {len(tokenizer):,} pieces{note}"
    say(f"{output}: {what}, {time.monotonic() - started:.1f} s")


def _unreachable(tokenizer: tokenizers.Tokenizer) -> str:
    """A remark if a vocabulary with upper case or accents is imported, but texts are lower-cased or
    lose their accents."""
    capitals = _never_used(tokenizer, re.compile("[A-Z]").search)
    # in a byte-level BPE, the letter Ġ stands for a space
    accents = 0 if tokenizer.kind == "bpe" else _never_used(tokenizer, marks)
    if not capitals and not accents:
        return ""
    what = ["are lower-cased"] * bool(capitals) + ["lose their accents"] * bool(accents)
    pieces = [f"with capitals ({capitals:,})"] * bool(capitals)
    pieces += [f"with accents or vowel signs ({accents:,})"] * bool(accents)
    option = "--cased" if capitals else "--keep-accents"
    return (
        f" (texts {' and '.join(what)}, so pieces {' and '.join(pieces)} are never used; "
        f"see {option})"
    )


def _never_used(tokenizer: tokenizers.Tokenizer, holds: Callable[[str], object]) -> int:
    """The number of pieces for which `holds` is true, if they are 1 % of the vocabulary and the
    text of none is encoded to one of them; else 0."""
    special = set(tokenizer.special.values())
    chosen = {
        i: piece.strip("#▁")
        for i, piece in enumerate(tokenizer.pieces)
        if holds(piece) and i not in special
    }
    used = {i for ids in tokenizer.encode_batch([*chosen.values()]) for i in ids.tolist()}
    return 0 if len(chosen) < 0.01 * len(tokenizer) or used & set(chosen) else len(chosen)
