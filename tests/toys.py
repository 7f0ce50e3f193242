"""Toy data from the commands of preprocess.py, on which learning can be told from chance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from helpers import CLASSIFY, NO_DROPOUT, REGRESS, SMOKE, Forks, good, training

TOPICS = [[f"{a}{b}{c}" for b in "ae" for c in "mn"] for a in ("b", "d", "f", "g", "k", "p")]
WORDS = [word for topic in TOPICS for word in topic]  # 6 topics of 4 words


@dataclass(frozen=True)
class Toys:
    """Paths of the toy data: raw files in `raw`, and one store for each task."""

    raw: Path
    tokenizer: Path
    text: Path  # a document has words of one topic, so a masked word costs log 4 nats, not log 24
    classes: Path  # "no" if the word "bam" occurs, else "yes"
    scores: Path  # the share of "dan" among the words
    pairs: Path  # do both texts have the same topic?
    splice: Path  # letters; a motif in the middle decides between EI, IE and N


def document(draw: np.random.Generator, words: list[str], least: int = 6, most: int = 14) -> str:
    """A text of `least` to `most` random words."""
    return " ".join(draw.choice(words, draw.integers(least, most + 1)))


def _text(draw: np.random.Generator) -> str:
    return document(draw, TOPICS[draw.integers(len(TOPICS))])


def _class(draw: np.random.Generator) -> tuple[str, ...]:
    words = document(draw, WORDS[1:]).split()
    wanted = bool(draw.integers(2))
    if wanted:
        words[draw.integers(len(words))] = WORDS[0]
    return " ".join(words), "no" if wanted else "yes"


def _score(draw: np.random.Generator) -> tuple[str, ...]:
    share = draw.random()
    words = np.where(draw.random(10) < share, "dan", draw.choice(TOPICS[2], 10))
    return " ".join(words), f"{(words == 'dan').mean():.2f}"


def _pair(draw: np.random.Generator) -> tuple[str, ...]:
    a, b = draw.integers(len(TOPICS), size=2)
    b = a if draw.integers(2) else b
    return document(draw, TOPICS[a]), document(draw, TOPICS[b]), "same" if a == b else "other"


def _splice(draw: np.random.Generator) -> str:
    label = draw.choice(["EI", "IE", "N"])
    letters = draw.choice(list("ACGT"), 60)
    letters[28:34] = list({"EI": "AGGTAA", "IE": "TTTCAG", "N": "CCCCCC"}[str(label)])
    return f"{label},TOY-{draw.integers(10**6)},{''.join(letters)}"


def make(forks: Forks, directory: Path) -> Toys:
    """Write raw files and stores below a directory."""
    raw = directory / "raw"
    toys = Toys(
        raw, *(directory / n for n in ("tokenizer", "text", "classes", "scores", "pairs", "splice"))
    )
    raw.mkdir()
    for name, header, row in (
        ("classes", "text\tlabel", _class),
        ("scores", "text\tscore", _score),
        ("pairs", "left\tright\tlabel", _pair),
    ):
        (raw / name).mkdir()
        for split, rows in (("train", 300), ("valid", 60), ("test", 60)):
            draw = np.random.default_rng([rows, len(split), len(name)])
            lines = [header, *("\t".join(row(draw)) for _ in range(rows))]
            (raw / name / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    for split, rows in (("train", 300), ("valid", 60), ("test", 60)):
        draw = np.random.default_rng([rows, len(split)])
        (raw / f"{split}.txt").write_text("\n\n".join(_text(draw) for _ in range(rows)))
    draw = np.random.default_rng(0)
    (raw / "splice.data").write_text("\n".join(_splice(draw) for _ in range(200)) + "\n")

    def preprocess(*arguments: str | Path) -> None:
        good(forks.run("preprocess.py", *arguments))

    preprocess(
        "tokenizer",
        "--kind",
        "wordpiece",
        "--input",
        raw / "train.txt",
        "--vocab-size",
        "90",
        "--output",
        toys.tokenizer,
    )
    known = ("--tokenizer", toys.tokenizer, "--output")
    held_out = ("--valid", raw / "valid.txt", "--test", raw / "test.txt")
    preprocess("text", "--input", raw / "train.txt", *held_out, *known, toys.text)
    tsv = ("task", "tsv", "--input")
    preprocess(*tsv, raw / "classes", "--text", "text", "--label", "label", *known, toys.classes)
    preprocess(
        *tsv,
        raw / "scores",
        "--text",
        "text",
        "--label",
        "score",
        "--kind",
        "score",
        *known,
        toys.scores,
    )
    preprocess(
        *tsv,
        raw / "pairs",
        "--text",
        "left",
        "--text-b",
        "right",
        "--label",
        "label",
        *known,
        toys.pairs,
    )
    preprocess("task", "dna/splice", "--input", raw / "splice.data", "--output", toys.splice)
    return toys


def train_all(forks: Forks, toys: Toys, directory: Path) -> dict[str, Path]:
    """A finished run on each store, by the store's name. The splice model starts from the text
    model.
    """
    runs = {name: directory / name for name in ("text", "classes", "scores", "pairs", "splice")}
    lively = [*NO_DROPOUT, "batch.rows=16", "optim.lr=2e-3", "optim.warmup=0.1"]
    mapped = ["mapping=symbols:3", f"init={runs['text']}", "batch.max_tokens=64"]
    lines = [
        training(
            SMOKE,
            toys.text,
            runs["text"],
            *lively,
            "batch.rows=32",
            "optim.lr=4e-3",
            "train.steps=250",
            "train.validate_every=50",
        ),
        training(CLASSIFY, toys.classes, runs["classes"], *lively, "train.epochs=6"),
        training(REGRESS, toys.scores, runs["scores"], *lively, "train.epochs=6"),
        training(
            CLASSIFY, toys.pairs, runs["pairs"], *lively, "train.epochs=10", "batch.max_tokens=40"
        ),
        training(CLASSIFY, toys.splice, runs["splice"], *lively, *mapped),
    ]
    going = [forks.start(*line) for line in lines[:-1]]
    for fork in going:
        good(fork.wait())
    good(forks.run(*lines[-1]))
    return runs
