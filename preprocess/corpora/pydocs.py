"""English text and two labelled tasks, made from Python's own documentation.

With them everything can be tried without a download. The sources are the language reference that
`help()` shows (`pydoc_data.topics`) and the docstrings of the standard library. Docstrings are read
from the source files with `ast`; nothing is imported.

    DIR/english.txt               prose for pre-training, one document per definition or section
    DIR/english.valid.txt         5 % of the documents, held out
    DIR/task/{train,valid,test}.tsv   `passage<TAB>module`: the part of the library that a passage
                                  documents ("language" for the reference)
    DIR/order/{train,valid,test}.tsv  `words<TAB>order`: the first words of each of these passages,
                                  once as they are ("kept") and once with two pairs of neighbours
                                  swapped ("swapped")

The same Python gives the same bytes. Each definition (function, class, module or section) is in one
split only. A paragraph that occurs twice is kept once. Held-out passages, and text that resembles
them, are in neither the training passages nor the pre-training text. The names of the classes are
removed from every passage, so that no passage contains its own label. The text belongs to the
Python Software Foundation.
"""

from __future__ import annotations

import argparse
import ast
import re
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from xformer.data.display import Progress, say
from xformer.data.errors import Failure
from xformer.data.files import atomic_directory
from xformer.data.outputs import check_directory

from ..arguments import add_output

# Distributors leave out tkinter and turtle, and newer Pythons have no distutils. So their text is
# used if it is there, but no class depends on it.
CLASSES = (
    "asyncio",
    "decimal",
    "difflib",
    "doctest",
    "email",
    "http",
    "importlib",
    "language",
    "logging",
    "typing",
    "unittest",
    "xml",
)
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "_vendor",
    "ensurepip",
    "pydoc_data",
    "turtledemo",
    "__pycache__",
    "this.py",
    "antigravity.py",
}
TEST, VALID = 0.14, 0.10  # shares of the definitions; the rest is for training
CAPS = {"train": 300, "valid": 50, "test": 60}  # the maximum number of passages per class
WORDS = (15, 100)  # the minimum and maximum number of words in a passage
ENGLISH_HELD_OUT = 0.05
ORDERED = 12  # the task of word order shows this many words of a passage
SWAPS = 2  # pairs of neighbours that are swapped in them
SHINGLE = 8  # words in a shingle
ALIKE = 0.2  # a held-out passage may share at most this part of its shingles with training text

_ORDINARY = re.compile(
    r"[(\"'\u201c\u2018]*[A-Za-z][a-z]*(?:[-'\u2019][a-z]+)*[.,;:!?)\"'\u201d\u2019]*"
)
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and are as be but by can for from has if in is it its may must not of on or that the "
        "this to when which will with you",
    )
)
_CLASS_NAME = re.compile(rf"\b(?:{'|'.join(CLASSES)})\b\.?", re.IGNORECASE)


@dataclass(frozen=True)
class Definition:
    """The prose of one docstring or one section of the reference, with its dotted name."""

    name: str
    module: str
    paragraphs: tuple[str, ...]

    def draw(self, purpose: str) -> float:
        """A number in [0, 1) that depends only on the name and the purpose."""
        return _uniform(f"{purpose}:{self.name}")


def _uniform(text: str) -> float:
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big") / 2**56


# ---------------------------------------------------------------------------------- reading


def docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, docstring) of every definition in the source files in a directory."""
    paths = [
        path
        for path in sorted(library.rglob("*.py"))
        if not any(
            part in SKIPPED or part.startswith("config-")
            for part in path.relative_to(library).parts
        )
    ]
    with Progress("reading the standard library", len(paths), "files") as bar:
        for path in paths:
            bar.advance(1)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # some strings contain outdated escapes
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # a template, or invalid source on purpose
                continue
            name = ".".join(path.relative_to(library).parts)
            yield from _definitions(tree, name.removesuffix(".py").removesuffix(".__init__"))


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, documented) and (text := ast.get_docstring(node)):
        yield name, text
    for child in getattr(node, "body", []):
        if isinstance(child, documented[1:]):
            yield from _definitions(child, f"{name}.{child.name}")


def reference() -> Iterator[tuple[str, str]]:
    """Yield (topic and section number, text) of every section of the language reference."""
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        sections = re.split(r"\n[^\n]+\n(?:={4,}|\*{4,}|-{4,}|~{4,})\n", "\n" + topics[topic])
        for number, section in enumerate(sections):
            yield f"language.{topic}.{number}", section


def prose(text: str) -> list[str]:
    """The paragraphs of a docstring that are English prose, each on one line, without markup."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip().splitlines()]
        session = [i for i, line in enumerate(lines) if line.startswith((">>>", "..."))]
        paragraph = " ".join(lines[: session[0]] if session else lines)
        paragraph = re.sub(r"^(?:[*+-]|\(?\d+[.)]|o) +", "", paragraph)
        paragraph = re.sub(r":[a-z:]+:`([^`]*)`", r"\1", paragraph)
        paragraph = re.sub(r"(``|`|\*\*|\*)(\S(?:[^`*]*?\S)?)(?:\1|')", r"\2", paragraph)
        paragraph = re.sub(r"\s+", " ", paragraph.replace("::", ":")).strip()
        if is_prose(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is mostly ordinary words, some of them common, and not code."""
    words = paragraph.split()
    if len(words) < 5 or ":=" in paragraph or "\x00" in paragraph:
        return False
    ordinary = sum(_ORDINARY.fullmatch(word) is not None for word in words)
    common = sum(word.lower() in _COMMON for word in words)
    return ordinary >= 0.75 * len(words) and common >= 0.12 * len(words)


def collect(library: Path) -> list[Definition]:
    """All definitions with prose. A paragraph is kept in the first definition that contains it."""
    seen: set[str] = set()
    definitions = []
    for name, text in [*docstrings(library), *reference()]:
        paragraphs = []
        for paragraph in prose(text):
            key = " ".join(_bare_words(paragraph))
            if key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
        if paragraphs:
            module = name.split(".")[0].removeprefix("_py")
            definitions.append(Definition(name, module, tuple(paragraphs)))
    return definitions


# ---------------------------------------------------------------------------------- the task


def passages(definition: Definition) -> Iterator[str]:
    """Yield passages of a definition's prose with WORDS[0] to WORDS[1] words.

    A passage ends where a sentence ends. At the end of a paragraph it ends too, if it is long
    enough. A remainder that is too short is dropped.
    """
    least, most = WORDS
    held: list[str] = []
    for paragraph in definition.paragraphs:
        for sentence in re.split(r"(?<=[.!?:;]) +(?=[A-Z\"(])", _without_names(paragraph)):
            words = sentence.split()
            if len(held) >= least and len(held) + len(words) > 1.5 * least:
                yield " ".join(held)
                held = []
            held += words
            if len(held) > most:
                held = []
        if len(held) >= least:
            yield " ".join(held)
            held = []


def _without_names(text: str) -> str:
    return re.sub(r"\s+", " ", _CLASS_NAME.sub("", text)).strip()


def _bare_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", _without_names(text).lower())


def _shingles(text: str) -> set[int]:
    words = _bare_words(text)
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(max(1, len(words) - SHINGLE + 1))}


def _alike(text: str, known: set[int]) -> bool:
    own = _shingles(text)
    return len(own & known) > ALIKE * len(own)


def task_split(definition: Definition) -> str:
    """The split of a definition's passages, which depends only on its name."""
    drawn = definition.draw("task")
    return "test" if drawn < TEST else "valid" if drawn < TEST + VALID else "train"


def labelled(definitions: Iterable[Definition]) -> dict[str, list[tuple[str, str]]]:
    """split -> [(passage, module)], at most CAPS passages for each class.

    No held-out passage resembles a training passage.
    """
    drawn: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    for definition in definitions:
        if definition.module in CLASSES:
            rows = [(text, definition.module) for text in passages(definition)]
            drawn[task_split(definition)] += rows
    known: set[int] = set()
    seen: set[str] = set()
    for split in drawn:  # the order matters: a split must not resemble the splits before it
        rows = sorted(drawn[split], key=lambda row: sha256(row[0].encode()).digest())
        counts: Counter[str] = Counter()
        kept = []
        for text, module in rows:
            key = " ".join(_bare_words(text))
            if counts[module] == CAPS[split] or key in seen:
                continue
            if split == "train" or not _alike(text, known):
                seen.add(key)
                counts[module] += 1
                kept.append((text, module))
        known = known.union(*(_shingles(text) for text, _ in kept))
        drawn[split] = kept
    return drawn


def english_documents(
    definitions: Iterable[Definition], held_out: Iterable[str]
) -> tuple[list[str], list[str]]:
    """The documents for pre-training and for validation.

    They contain no definition that the task holds out, and no text that resembles the passages
    `held_out`.
    """
    known: set[int] = set().union(*map(_shingles, held_out))
    train: list[str] = []
    valid: list[str] = []
    for definition in definitions:
        if definition.module in CLASSES and task_split(definition) != "train":
            continue
        kept = [text for text in definition.paragraphs if not _alike(text, known)]
        if kept:
            held = definition.draw("english") < ENGLISH_HELD_OUT
            (valid if held else train).append("\n".join(kept))
    return train, valid


def swapped(words: list[str]) -> list[str]:
    """The words with SWAPS pairs of neighbours swapped; [] if the choice leaves too few pairs.

    Only words in lower case without punctuation are swapped, so that capitals and full stops do not
    give the swap away. Pairs do not touch. The choice depends only on the words.
    """
    text, words = " ".join(words), list(words)
    pairs = [
        i
        for i, (a, b) in enumerate(pairwise(words))
        if a != b and re.fullmatch("[a-z]+", a) and re.fullmatch("[a-z]+", b)
    ]
    taken: list[int] = []
    for i in sorted(pairs, key=lambda i: _uniform(f"{i}:{text}")):
        if len(taken) < SWAPS and all(abs(i - j) > 1 for j in taken):
            taken.append(i)
            words[i], words[i + 1] = words[i + 1], words[i]
    return words if len(taken) == SWAPS else []


def ordered(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """[(words, "kept" or "swapped")], two rows for each passage of `rows`."""
    result = []
    for text, _ in rows:
        words = text.split()[:ORDERED]
        if other := swapped(words):
            result += [(" ".join(words), "kept"), (" ".join(other), "swapped")]
    return result


# ---------------------------------------------------------------------------------- writing


def write(output: Path, overwrite: bool) -> dict[str, int]:
    """Write the files and return the numbers of documents, words and passages.

    Raises Failure if this Python was installed without the sources of its library.
    """
    definitions = collect(Path(sysconfig.get_path("stdlib")))
    task = labelled(definitions)
    modules = {module for _, module in task["train"]}
    if len(definitions) < 1000 or not all(task.values()) or len(modules) < len(CLASSES):
        raise Failure(
            f"this Python was installed without the source files of its standard library in "
            f"{sysconfig.get_path('stdlib')}; use another Python"
        )
    held_out = [text for split in ("valid", "test") for text, _ in task[split]]
    train, valid = english_documents(definitions, held_out)
    with atomic_directory(output, overwrite) as directory:
        for name, documents in (("english.txt", train), ("english.valid.txt", valid)):
            (directory / name).write_text("\n\n".join(documents) + "\n", encoding="utf-8")
        order = {split: ordered(rows) for split, rows in task.items()}
        for name, header, made in (
            ("task", "passage\tmodule", task),
            ("order", "words\torder", order),
        ):
            (directory / name).mkdir()
            for split, rows in made.items():
                text = "\n".join([header, *map("\t".join, rows)]) + "\n"
                (directory / name / f"{split}.tsv").write_text(text, encoding="utf-8")
    words = sum(len(document.split()) for document in train)
    return {
        "documents": len(train),
        "words": words,
        "held-out documents": len(valid),
    } | {f"{split} passages": len(rows) for split, rows in task.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pydocs`."""
    add_output(parser, "DIR")


def run(arguments: argparse.Namespace) -> None:
    """Write the text and the tasks."""
    check_directory(arguments.output, arguments.overwrite, ("english.txt",))
    started = time.monotonic()
    counts = write(arguments.output, arguments.overwrite)
    written = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    say(f"{arguments.output}: {written}, {time.monotonic() - started:.1f} s")
