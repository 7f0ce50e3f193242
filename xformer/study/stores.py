"""The stores and tokenizers of a plan, as far as they are known before the plan is run.

What lies on disk is read. What a command will make is deduced from the command. What neither says
is None: it is not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from xformer import checkpoint as checkpoints
from xformer.config import each, validate
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.tokenizers import META
from xformer.recipe import Recipe
from xformer.study.plan import Plan, Work

# what `preprocess.py task NAME` makes; of the rest the option --kind decides, or a class is it
SCORES = ("glue/stsb", "protein/stability", "protein/fluorescence")
TAGS = ("conll", "protein/secondary", "protein/conservation")
OPEN = ("tsv", "dna", "protein")  # tasks with --kind
SPECIAL = 5  # tokens that every tokenizer of `preprocess.py tokenizer` has beside its letters


@dataclass(frozen=True)
class Words:
    """A tokenizer. Two of one `maker` are the same; `size` counts its pieces, special ones
    included; `letters`: one id a symbol; `learned`: `preprocess.py tokenizer` makes it."""

    maker: str
    size: int | None = None
    letters: bool | None = None
    learned: bool = False
    fingerprint: str | None = None

    def is_other(self, than: Words) -> bool:
        """Whether the two are known to be different tokenizers."""
        if self.fingerprint and than.fingerprint:
            return self.fingerprint != than.fingerprint
        if self.maker == than.maker:
            return False
        pairs = ((self.size, than.size), (self.letters, than.letters))
        differ = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        return differ or (self.learned and than.learned)


@dataclass(frozen=True)
class Stored:
    """A store: what messages call it, its kind, its splits, its tokenizer."""

    name: str
    kind: str | None = None
    splits: tuple[str, ...] | None = None
    words: Words | None = None


class Stores:
    """Stores and tokenizers of a plan by path."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._by_path = {str(work.path): work for work in plan.works.values()}
        self._stores: dict[str, Stored] = {}
        self._words: dict[str, Words] = {}

    def store(self, paths: str | Sequence[str]) -> Stored:
        """What a store is or will be; of several, what they are read as. Raises BadInput naming two
        of them that are known to be of different kinds or tokenizers."""
        first, *others = every = [self._one(path) for path in each(paths)]
        if not others:
            return first
        for other in others:
            _refuse_unlike(first, other)
        kind = next((store.kind for store in every if store.kind), None)
        words = next((store.words for store in every if store.words), None)
        return Stored(" and ".join(store.name for store in every), kind, _splits(every), words)

    def _one(self, path: str) -> Stored:
        if path not in self._stores:
            self._stores[path] = self._store(path)
        return self._stores[path]

    def words(self, path: str) -> Words:
        """The tokenizer in a tokenizer, store or checkpoint, or in what a work makes there."""
        if path not in self._words:
            found = _read_words(path)
            if found is None:
                work = self._by_path.get(path)
                found = Words(path) if work is None else self._made_words(work)
            self._words[path] = found
        return self._words[path]

    def _store(self, path: str) -> Stored:
        work = self._by_path.get(path)
        name = path if work is None else work.name
        with suppress(BadInput, KeyError, TypeError):
            meta = read_json(Path(path) / "store.json")
            return Stored(name, meta["kind"], tuple(meta["splits"]), self.words(path))
        if work is None:
            return Stored(name)
        kind = made_kind(work.command)
        return Stored(name, kind, words=self.words(path) if kind else None)

    def _made_words(self, work: Work) -> Words:
        """The tokenizer that a work leaves at its path."""
        if work.recipe is not None:
            return self._trained_words(validate(Recipe, work.recipe))
        unknown = Words(work.key)
        match work.command:
            case ("preprocess.py", "tokenizer", *options):
                return _learned(unknown, options)
            case ("preprocess.py", "synthetic", _, *options):
                size = _option(options, "--vocab-size")
                source = _option(options, "--frequencies")
                most = int(size) if size else self.words(source).size if source else None
                return Words(f"numbers {most or work.key}", most, letters=True)
            case ("preprocess.py", "pairs", *options):
                source = _option(options, "--store")
                return self.words(source) if source else unknown
            case ("preprocess.py", "text" | "task", *options):
                source = _option(options, "--tokenizer")
                return self.words(source) if source else replace(unknown, letters=True)
            case ("-m", "xformer.convert", "from-hf", *_):
                return replace(unknown, letters=False)
            case ("-m", "xformer.surgery", before, _, *operations):
                moved = any(text.strip().startswith("transplant") for text in operations)
                return unknown if moved else self.words(before)
        return unknown

    def _trained_words(self, recipe: Recipe) -> Words:
        source = recipe.init or each(recipe.data)[0]
        for operation in recipe.surgery:
            if operation.op == "transplant":
                source = operation.arguments["source"]
        return self.words(source)


def _refuse_unlike(first: Stored, other: Stored) -> None:
    """Raise BadInput where two stores are known not to fit together."""
    line = f"{first.name} and {other.name} cannot be read as one: "
    if None not in (first.kind, other.kind) and first.kind != other.kind:
        raise BadInput(f"{line}they differ in kind ({first.kind}; {other.kind})")
    if first.words and other.words and first.words.is_other(other.words):
        raise BadInput(f"{line}they differ in tokenizer")


def _splits(stores: Sequence[Stored]) -> tuple[str, ...] | None:
    """The splits of stores that are read as one; None where one is not known."""
    known = [store.splits for store in stores if store.splits is not None]
    found = tuple(dict.fromkeys(name for splits in known for name in splits))
    return found if len(known) == len(stores) else None


def made_kind(command: Sequence[str]) -> str | None:
    """The kind of the store that a command of preprocess.py makes; None where it makes none."""
    match command:
        case ("preprocess.py", "text" | "synthetic", *_):
            return "text"
        case ("preprocess.py", "pairs", *_):
            return "class"
        case ("preprocess.py", "task", "squad", *_):
            return "span"
        case ("preprocess.py", "task", "choice", *_):
            return "choice"
        case ("preprocess.py", "task", task, *options) if task in OPEN:
            return _option(options, "--kind") or "class"
        case ("preprocess.py", "task", task, *_):
            return "score" if task in SCORES else "tag" if task in TAGS else "class"
    return None


def _learned(unknown: Words, options: Sequence[str]) -> Words:
    """What `preprocess.py tokenizer` makes; a small text may give fewer pieces than are asked."""
    kind, size = _option(options, "--kind"), _option(options, "--vocab-size")
    alphabet = _option(options, "--alphabet")
    pieces = len(set(alphabet)) + SPECIAL if alphabet else int(size) if size else None
    letters = None if kind is None else kind == "symbols"
    return replace(unknown, size=pieces, letters=letters, learned="--from" not in options)


def _option(command: Sequence[str], name: str) -> str | None:
    """The word after an option of a command."""
    return next((value for before, value in pairwise(command) if before == name), None)


def _read_words(path: str) -> Words | None:
    """The tokenizer that lies in a directory, or in the checkpoint that a run selected."""
    place = Path(path)
    with suppress(BadInput, KeyError, TypeError, ValueError):
        if (place / "result.json").is_file():
            place = checkpoints.resolve(place)
        meta = read_json(place / META)
        size, letters = int(meta["vocab_size"]), meta["kind"] == "symbols"
        return Words(path, size, letters, fingerprint=str(meta["fingerprint"]))
    return None
