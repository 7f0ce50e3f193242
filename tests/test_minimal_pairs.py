"""Minimal pairs: pseudo-log-likelihoods are those of a loop over the tokens with transformers."""

from __future__ import annotations

import csv
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SMOKE, Forks, good, refused
from test_evaluate import evaluate
from tiny import LETTERS, tiny
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer.analysis import blimp
from xformer.analysis.__main__ import _redraw
from xformer.analysis.subcommand import parse_arguments
from xformer.convert import hf
from xformer.data import vocabularies
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.tokenizers import Tokenizer
from xformer.minimal_pairs import PLL, Pair, PairScores, read_pairs, score_pairs
from xformer.parallel.processes import ALONE

VARIANTS: tuple[PLL, ...] = ("word-l2r", "original")
SENTENCES = [
    ("The cats that the dog chases sleep.", "The cats that the dog chases sleeps."),
    ("Mary's unforgettable granddaughters hadn't overslept.", "Mary's cats hadn't oversleep."),
    ("She is sleeping.", "She are sleeping."),
    ("The cats that the dog chases sleep.", "Sleep the that cats."),
]


def loop(directory: Path, text: str, variant: str) -> float:
    """The score of a sentence, one token at a time, as Salazar et al. and Kauf & Ivanova define
    it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForMaskedLM.from_pretrained(directory).eval()
    given = tokenizer(text, return_tensors="pt")
    ids, words = given["input_ids"][0], given.word_ids()
    total = 0.0
    for i in range(1, len(ids) - 1):
        masked = ids.clone()
        for j in range(1, len(ids) - 1):
            after = j > i and words[j] == words[i] and variant == "word-l2r"
            if j == i or after:
                masked[j] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(**{**given, "input_ids": masked[None]}).logits[0, i]
        total += float(logits.double().log_softmax(0)[ids[i]])
    return total


def compare(directory: Path, checkpoint: Any, sentences: list[tuple[str, str]]) -> None:
    for variant in VARIANTS:
        pairs = [Pair(*texts, "a", "b") for texts in sentences]
        scores = score_pairs(checkpoint, pairs, variant, ALONE, "fp32")
        expected = [[loop(directory, text, variant) for text in pair] for pair in sentences]
        assert np.abs(np.stack([scores.good, scores.bad], 1) - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Albert"])
def test_scores_are_those_of_a_loop_with_transformers(kind: str, tmp_path: Path) -> None:
    """On a tiny random model of each kind of tokenizer. Some sentences have unknown words."""
    tiny(f"{kind}ForMaskedLM", tmp_path)
    draw = np.random.default_rng(0)
    if kind == "Bert":
        words = ["w1", "w3, w8", "w5-w6", "none", "w9"]
    else:  # words of several pieces, which are single letters here
        words = ["".join(draw.choice(LETTERS[33:60], n)) for n in (1, 3, 2)] + ["ab,c", "d."]
    texts = [" ".join(draw.choice(words, n)) for n in (1, 3, 2, 3, 3, 1)]
    assert len(set(texts)) > 3
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    compare(tmp_path, hf.from_hf(tmp_path).checkpoint, pairs)


@pytest.mark.slow
def test_scores_of_micro_english(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    english = checkpoints.load("micro/english")
    hf.to_hf(english, tmp_path / "hf")
    compare(tmp_path / "hf", english, SENTENCES)


def test_a_short_batch_and_a_long_one_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the masked copies of one sentence are in several batches."""
    english = checkpoints.load("micro/english")
    pairs = [Pair(*texts, "a", "b") for texts in SENTENCES]
    whole = score_pairs(english, pairs, "word-l2r", ALONE, "fp32")
    assert whole.good[0] == whole.good[3]  # computed once
    monkeypatch.setattr("xformer.minimal_pairs.CHUNK", 30)
    parts = score_pairs(english, pairs, "word-l2r", ALONE, "fp32")
    assert np.abs(whole.good - parts.good).max() < 1e-4
    assert np.abs(whole.bad - parts.bad).max() < 1e-4


# ---------------------------------------------------------------------------------- words


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces of each word, joined by +."""
    ids, words = tokenizer.encode_with_words([text])[0]
    assert ids.tolist() == tokenizer.encode_batch([text])[0].tolist()
    of = [[tokenizer.pieces[i] for i, w in zip(ids, words, strict=True) if w == n] for n in words]
    return ["+".join(pieces) for pieces in dict.fromkeys(map(tuple, of))]


def test_words_of_each_kind(tmp_path: Path) -> None:
    english = checkpoints.load("micro/english").tokenizer
    assert words_of(english, "She sat, unforgettably.")[:3] == ["she", "sat", ","]
    assert "+##" in words_of(english, "unforgettably.")[0]
    corpus = ["the cat sat, unhappily", "a cat and the unhappy dog"] * 40
    bpe = vocabularies.learn("bpe", iter(corpus), 300)
    assert [w.replace("+", "") for w in words_of(bpe, "the cat, unhappily")] == [
        *("the", "Ġcat", ",", "Ġunhappily")
    ]
    unigram = vocabularies.learn("unigram", iter(corpus), 25)
    assert [w.replace("+", "") for w in words_of(unigram, "the cat, unhappily")] == [
        *("▁the", "▁cat,", "▁unhappily")
    ]
    separated = vocabularies.symbols(["w5", "w6"], separated=True)
    assert words_of(separated, "w6 w5 w7") == ["w6", "w5", "[UNK]"]
    letters = vocabularies.symbols(["A", "C"])
    with pytest.raises(BadInput, match="does not split a text into words"):
        letters.encode_with_words(["AC"])
    of_letters = replace(checkpoints.load("micro/english"), tokenizer=letters)
    with pytest.raises(BadInput, match=r"^pll=word-l2r needs words, but .*; give pll=original, or"):
        score_pairs(of_letters, [Pair("AC", "CA", "", "")], "word-l2r", ALONE, "fp32")


# ---------------------------------------------------------------------------------- the command


def as_line(good: str, bad: str, **more: str) -> str:
    return json.dumps({"sentence_good": good, "sentence_bad": bad, **more}) + "\n"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive in BLiMP's form, with two paradigms of one phenomenon and one of another. A name
    has a comma."""
    path = tmp_path_factory.mktemp("pairs") / "BLiMP.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name, term in (("a", "agreement"), ("b, c", "agreement"), ("d", "s-selection")):
            lines = [as_line(*texts, UID=name, linguistics_term=term) for texts in SENTENCES]
            file.writestr(f"data/{name}.jsonl", "".join(lines))
        file.writestr("__MACOSX/data/a.jsonl", b"\x00")
    return path


def test_a_table_by_phenomenon_and_paradigm() -> None:
    names = [("a", "x"), ("a", "x"), ("b", "x"), ("c", "y"), ("a", "y"), ("a", "y")]
    pairs = [Pair("g", "b", *name) for name in names]
    scores = PairScores(pairs, np.array([-1.0, -3, -1, -2, -1, -1]), np.full(6, -2.0))
    assert scores.accuracy == pytest.approx(2 / 3)
    assert scores.ties == 1  # which counts as wrong
    assert scores.table() == [
        ("x", "", 3, pytest.approx(2 / 3)),
        ("x", "a", 2, 0.5),
        ("x", "b", 1, 1.0),
        ("y", "", 3, pytest.approx(2 / 3)),
        ("y", "a", 2, 1.0),
        ("y", "c", 1, 0.0),
    ]
    assert scores.by("paradigm")["a"] == {"pairs": 4, "accuracy": 0.75}


CUT_OFF = """
from xformer import evaluate
plain = evaluate.say
def say(*lines, error=False):
    if not error: raise BrokenPipeError  # as if the output went to a `head` that has ended
    plain(*lines, error=error)
evaluate.say = say
"""


def test_files_do_not_depend_on_who_reads_the_output(
    forks: Forks, archive: Path, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    cases: list[list[str | Path]] = [
        ["micro/english", f"blimp={archive}"],
        [learned["classes"], f"data={data.classes}"],
    ]
    for given in cases:
        out, table = tmp_path / "scores.json", tmp_path / "rows.tsv"
        files = [f"out={out}", f"predictions={table}"]
        forks.run("evaluate.py", *given, "system.precision=fp32", *files, before=CUT_OFF)
        assert read_json(out)["precision"] == "fp32"
        assert table.read_text()
        out.unlink()
        table.unlink()


def test_the_command(forks: Forks, archive: Path, tmp_path: Path) -> None:
    out, table, each = (tmp_path / name for name in ("a.json", "a.csv", "pairs.tsv"))
    line = [f"blimp={archive}", "system.precision=fp32", "pairs=3", f"predictions={each}"]
    done = good(evaluate(forks, Path("micro/english"), *line, f"out={out}"))
    result = read_json(out)
    assert result["phenomena"].keys() == {"agreement", "argument_structure"}
    assert result["phenomena"]["agreement"]["pairs"] == 6
    assert (result["pairs"], result["pll"], result["precision"]) == (9, "word-l2r", "fp32")
    assert f"blimp accuracy {result['accuracy']:.4f} (9 pairs)" in done.out
    with each.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["good"] for row in rows[:3]] == [texts[0] for texts in SENTENCES[:3]]
    assert np.mean([int(row["correct"]) for row in rows]) == pytest.approx(result["accuracy"])
    for row in rows:
        assert (float(row["pll_good"]) > float(row["pll_bad"])) == (row["correct"] == "1")
    # two ranks share the work, and the table can be a file
    good(evaluate(forks, Path("micro/english"), *line, f"out={table}", ranks=2))
    with table.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["paradigm"] for row in read] == ["", "a", "b, c", "", "d"]
    shares = {row["paradigm"]: float(row["accuracy"]) for row in read if row["paradigm"]}
    assert shares == {name: part["accuracy"] for name, part in result["paradigms"].items()}


def test_brackets_read_english_with_another_tokenizer(
    forks: Forks, archive: Path, learned: dict[str, Path]
) -> None:
    brackets, line = Path("micro/brackets"), [f"blimp={archive}", "pairs=1"]
    for pll in ("word-l2r", "original"):
        refused(
            evaluate(forks, brackets, *line, f"pll={pll}"),
            "tokens are unknown to the tokenizer",
            "give the tokenizer of their language as tokenizer=",
        )
    done = good(evaluate(forks, brackets, *line, "tokenizer=micro/english"))
    assert "blimp accuracy" in done.out
    refused(evaluate(forks, learned["text"], *line, "tokenizer=micro/english"), "has 8,192 pieces")


def test_the_mapping_of_training_is_used(learned: dict[str, Path]) -> None:
    """A checkpoint that reads the ids of another tokenizer scores as one that has them itself."""
    english = checkpoints.load("micro/english")
    shifted = np.roll(np.arange(8192), -100).astype(np.int32)
    weights = dict(english.weights)
    for name in ("encoder.embeddings.word.weight", "mlm_head.bias"):
        moved = weights[name].clone()
        moved[torch.from_numpy(shifted).long()] = weights[name]
        weights[name] = moved
    special = {role: int(shifted[i]) for role, i in english.tokenizer.special.items()}
    own = english.tokenizer
    mapped = replace(english, weights=weights, source=own, mapping=shifted)
    pairs = [Pair(*texts, "a", "b") for texts in SENTENCES]
    expected = score_pairs(english, pairs, "word-l2r", ALONE, "fp32")
    mapped.tokenizer.special, kept = special, mapped.tokenizer.special
    try:
        scores = score_pairs(mapped, pairs, "word-l2r", ALONE, "fp32")
    finally:
        mapped.tokenizer.special = kept
    assert np.abs(scores.good - expected.good).max() < 1e-3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no pairs"),
        ('{"sentence_good": "a"}\n', "line 1: not JSON with two texts"),
        (r'{"sentence_good": "\ud800", "sentence_bad": "b"}' + "\n", "line 1: not JSON with two"),
        (as_line("a b", " "), "line 1: not JSON with two texts"),
        (as_line("a", "b") + "[1]\n", "line 2: not JSON with two texts"),
        (as_line("a", "b" * 3).encode() + b"\xff", "is not text in UTF-8"),
        ('{"sentence_good": "a", "sentence_bad": "b", "UID": null}\n', "line 1: UID and"),
    ],
)
def test_bad_files(content: str | bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    for path in (file, tmp_path):
        with pytest.raises(BadInput, match=words):
            read_pairs(path)
    with pytest.raises(BadInput, match="does not exist"):
        read_pairs(tmp_path / "none.zip")


def test_a_damaged_archive_costs_one_line(archive: Path, tmp_path: Path) -> None:
    """Half of it is there, as after a broken download, or some bytes of the texts have changed."""
    path = tmp_path / "BLiMP.zip"
    for number, method in enumerate((zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)):
        other = tmp_path / f"{number}.zip"
        with zipfile.ZipFile(archive) as old, zipfile.ZipFile(other, "w", method) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        whole = other.read_bytes()
        middle = len(whole) // 3
        for damaged in (
            whole[: len(whole) // 2],
            whole[:middle] + b"\xff" * 40 + whole[middle + 40 :],
        ):
            path.write_bytes(damaged)
            with pytest.raises(BadInput, match=r"BLiMP\.zip is a damaged, incomplete or encrypted"):
                read_pairs(path)


def test_an_unpacked_archive_is_read_like_the_archive(archive: Path, tmp_path: Path) -> None:
    """It has its files in a subdirectory, beside the files that macOS adds."""
    with zipfile.ZipFile(archive) as file:
        file.extractall(tmp_path)
    resources = tmp_path / "__MACOSX/data"
    resources.mkdir(parents=True, exist_ok=True)
    (resources / "._some.jsonl").write_bytes(b"\x00\x05")
    assert list(tmp_path.glob("*.jsonl")) == []
    assert read_pairs(tmp_path) == read_pairs(archive)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadInput, match=r"holds no \.jsonl file, nor do"):
        read_pairs(empty)


def test_a_file_with_a_byte_order_mark_and_a_line_separator(tmp_path: Path) -> None:
    line = json.dumps({"sentence_good": "a\u2028b", "sentence_bad": "c"}, ensure_ascii=False)
    (tmp_path / "some.jsonl").write_bytes(f"\ufeff{line}\r\n\r\n{line}".encode())
    assert read_pairs(tmp_path) == [Pair("a\u2028b", "c", "some", "some")] * 2


def test_sentences_that_do_not_fit(
    forks: Forks, archive: Path, learned: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(as_line("a " * 130, "b"))
    long = f"blimp={tmp_path / 'long.jsonl'}"
    refused(evaluate(forks, Path("micro/english"), long), "has 132 tokens", "the model takes 128")
    refused(
        evaluate(forks, learned["classes"], f"blimp={archive}"), "need a checkpoint with an MLM"
    )
    refused(evaluate(forks, Path("micro/english"), long, "split=test"), "split= cannot be combined")


# ---------------------------------------------------------------------------------- the picture


@pytest.mark.slow
def test_accuracy_over_training(forks: Forks, data: Toys, archive: Path, tmp_path: Path) -> None:
    """All kept checkpoints of a run, and one point for a checkpoint. The numbers are those of
    `evaluate`."""
    run, out, score = tmp_path / "run", tmp_path / "out", tmp_path / "score.json"
    keep = ["train.keep_at=[0, 10, 2]", "train.steps=12", "init=micro/brackets", "mapping=ids"]
    good(forks.run("train.py", SMOKE, f"data={data.text}", f"run={run}", *keep))
    line = [f"data={archive}", f"out={out}", "pairs=3", "tokenizer=micro/english", "threads=1"]
    paths = ["micro/english", str(run)]
    blimp.run(*parse_arguments(blimp.SUBCOMMAND, [*paths, *line]))
    result = read_json(out / "blimp.json")
    english, trained = result["models"]
    assert [english["name"], trained["name"]] == ["english", "run"]
    assert [point["step"] for point in english["points"]] == [None]
    assert [point["step"] for point in trained["points"]] == [0, 2, 10]
    for path, point in (
        (Path("micro/english"), english["points"][0]),
        (run / "trajectory/step_10", trained["points"][2]),
    ):
        more = [f"blimp={archive}", "pairs=3", "tokenizer=micro/english", f"out={score}"]
        good(evaluate(forks, path, *more, "system.precision=fp32"))
        scored = read_json(score)
        assert point["accuracy"] == scored["accuracy"]
        assert point["phenomena"] == {
            name: part["accuracy"] for name, part in scored["phenomena"].items()
        }
    assert result["metrics"]["run"]["accuracy"] == trained["points"][2]["accuracy"]
    # checkpoints of the same name are averaged
    line += ["names=seeds,seeds", "overwrite=true"]
    two = ["micro/english", str(run / "trajectory/step_2")]
    blimp.run(*parse_arguments(blimp.SUBCOMMAND, [*two, *line]))
    result = read_json(out / "blimp.json")
    each = [model["points"][0]["accuracy"] for model in result["models"]]
    assert each == [english["points"][0]["accuracy"], trained["points"][1]["accuracy"]]
    assert each[0] != each[1]
    assert result["metrics"]["seeds"]["accuracy"] == sum(each) / 2
    (mean,) = blimp.averaged(result["models"])["seeds"]
    assert mean["range"] == (min(each), max(each))
    with pytest.raises(BadInput, match="the name 'seeds', but were not kept at the same steps"):
        blimp.run(*parse_arguments(blimp.SUBCOMMAND, [*paths, *line]))
    first = (out / "blimp.svg").read_bytes()
    _redraw([str(out / "blimp.json")])
    assert len((out / "blimp.svg").read_bytes()) == len(first)
    with pytest.raises(BadInput, match="takes 1 or more checkpoints first"):
        parse_arguments(blimp.SUBCOMMAND, line)


def test_blimp_itself(shared: Path) -> None:
    pairs = read_pairs(shared / "blimp/BLiMP.zip")
    scores = PairScores(pairs, np.ones(len(pairs)), np.zeros(len(pairs)))
    assert len(pairs) == 67_000
    assert len(scores.by("paradigm")) == 67
    assert len(scores.by("phenomenon")) == 12
    assert {part["pairs"] for part in scores.by("paradigm").values()} == {1000}
    assert len(read_pairs(shared / "blimp/BLiMP.zip", 5)) == 67 * 5
