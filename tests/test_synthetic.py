"""`preprocess.py synthetic`: what it draws, compared with closed forms and exact recursions.

A figure is compared within five standard errors, or by a chi-square test at 1e-6. A correct
generator fails by chance once in a million, and the seeds are fixed. Sequences are independent of
each other but their steps are not, so standard errors are taken over sequences.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from math import comb
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from xformer.data import tokenizers, vocabularies
from xformer.data.errors import BadInput, Failure
from xformer.data.store import Ragged, Store, open_store
from xformer.data.writing import create_store
from xformer.preprocess import stats
from xformer.preprocess.corpora import synthetic
from xformer.preprocess.corpora.synthetic import AliasTable, Corpus

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> str:
    command = [sys.executable, str(ROOT / "preprocess.py"), "synthetic", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(store: Store, split: str) -> list[list[int]]:
    values = store.split(split).columns["tokens"]
    assert isinstance(values, Ragged)
    return [values[i].tolist() for i in range(len(values))]


def fits(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Whether counts agree with expected ones. Cells that expect fewer than 20 are merged."""
    few = expected < 20
    observed = np.append(observed[~few], observed[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    if expected[-1] == 0:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    return chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-6


def agree(per_sequence: np.ndarray, expected: np.ndarray | float) -> None:
    """Assert that the mean over sequences (axis 0) is as expected, within five standard errors."""
    error = per_sequence.std(0) / np.sqrt(len(per_sequence))
    off = np.abs(per_sequence.mean(0) - expected)
    assert (off <= 5 * error + 1e-9).all(), (off / np.maximum(error, 1e-12)).max()


# ------------------------------------------------------------------------------ what is drawn

ZIPF = (1 / np.arange(1, 996)) / (1 / np.arange(1, 996)).sum()  # of 1000 ids, five of them special
COUNTS = np.random.default_rng(7).integers(0, 50, 1000) * (np.arange(1000) % 3 > 0)


def drawn_from(generator: str, counts: np.ndarray | None, **options: int) -> np.ndarray:
    """The probabilities of 1000 ids, computed from their definition."""
    wanted = np.ones(995)
    if counts is not None:
        wanted = counts[5:].astype(float)
    elif generator == "zipf":
        wanted = ZIPF.copy()
    if "distinct" in options:  # the most frequent ones; of equally frequent ones, the first
        least = sorted(wanted, reverse=True)[options["distinct"] - 1]
        keep = list(np.flatnonzero(wanted > least))
        keep += list(np.flatnonzero(wanted == least))[: options["distinct"] - len(keep)]
        wanted *= np.isin(np.arange(995), keep)
    return np.concatenate([np.zeros(5), wanted / wanted.sum()])


CASES = [
    ("uniform", None, {}),
    ("zipf", None, {}),
    ("zipf", COUNTS, {}),
    ("uniform", None, {"distinct": 50}),
    ("zipf", COUNTS, {"distinct": 50}),
    ("nesting", COUNTS, {"distinct": 7}),
]


@pytest.mark.parametrize(("generator", "counts", "options"), CASES)
def test_the_table_holds_the_probabilities_exactly(generator, counts, options):
    corpus = Corpus(generator, 1, (1, 1), 0, **options)
    weights = synthetic.weights(corpus, 1000, counts)
    wanted = drawn_from(generator, counts, **options)
    np.testing.assert_allclose(weights, wanted, rtol=1e-12)
    table = synthetic.alias_table(weights)
    columns = len(table.keep)
    assert (columns, table.step.dtype) == (1024, np.uint16)
    keep = table.keep / 2.0**64
    mass = np.zeros(columns)
    for column in range(columns):
        mass[column] += keep[column]
        mass[(column + int(table.step[column])) % 2**16] += 1 - keep[column]
    np.testing.assert_allclose(mass[:1000] / columns, wanted, rtol=1e-9, atol=1e-16)
    assert not mass[:5].any()
    assert not mass[1000:].any()


@pytest.mark.parametrize(("generator", "counts", "options"), CASES)
def test_tokens_are_as_frequent_as_they_should_be(generator, counts, options):
    table = synthetic.alias_table(drawn_from(generator, counts, **options))
    made = table.draw(np.random.default_rng(1), 500_000)
    wanted = drawn_from(generator, counts, **options)
    assert fits(np.bincount(made, minlength=1000), 500_000 * wanted)
    assert not set(made.tolist()) - set(np.flatnonzero(wanted).tolist())


def test_more_than_65536_ids():
    wanted = np.append(np.zeros(5), np.arange(1, 69_996))
    table = synthetic.alias_table(wanted / wanted.sum())
    made = table.draw(np.random.default_rng(1), 500_000)
    assert made.dtype == np.uint32
    bins = np.bincount(made // 1000, minlength=70)
    assert fits(bins, 500_000 * wanted.reshape(70, 1000).sum(1) / wanted.sum())


def test_neighbours_are_independent():
    """Pairs include an id followed by itself. A table that takes column and bound from the same
    bits of the random number fails.
    """
    wanted = np.append(np.zeros(5), np.arange(1, 8) / 28)
    corpus = Corpus("zipf", 1, (10, 10), 0)
    lengths = np.full(30_000, 10)
    generator = np.random.default_rng(3)
    made = synthetic.independent(generator, synthetic.alias_table(wanted), lengths, corpus)
    pairs = np.bincount(made[:-1].astype(int) * 12 + made[1:], minlength=144)
    assert fits(pairs, len(made) * np.outer(wanted, wanted).ravel())


def test_lengths_are_even_over_their_range():
    corpus = Corpus("uniform", 1, (90, 120), 5)
    blocks = list(synthetic.draw_lengths(corpus, "train", 5_000_000))
    assert len(blocks) > 2
    lengths = np.concatenate(blocks)
    assert fits(np.bincount(lengths, minlength=130)[90:121], np.full(31, len(lengths) / 31))
    assert 0 <= lengths.sum() - 5_000_000 < lengths[-1]
    assert set(
        np.concatenate(list(synthetic.draw_lengths(replace(corpus, lengths=(7, 7)), "train", 700)))
    ) == {7}


# ------------------------------------------------------------------------------ the stack grammar

LENGTH = 60


@dataclass(frozen=True)
class Counting(AliasTable):
    """A table that never draws a token twice, so that every pair is known by its token."""

    keep: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint64))
    step: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint32))

    def draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        self.step[0] += n
        return np.arange(self.step[0] - n, self.step[0], dtype=np.uint32)


def matched(made: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The step at which each token was opened, and whether it is a push; both (sequences,
    steps).
    """
    _, first, number = np.unique(made, return_index=True, return_inverse=True)
    opened = first[number.reshape(made.shape)] - made.shape[1] * np.arange(len(made))[:, None]
    return opened, opened == np.arange(made.shape[1])


@cache
def structure(name: str, push: float, length: int = LENGTH, number: int = 20_000) -> tuple:
    """The tokens, the step at which each was opened, whether it is a push, and the depth before the
    step; (sequences, steps) each.
    """
    corpus = Corpus(name, 0, (length, length), 0, push=push)
    lengths = np.full(number, length)
    made = synthetic.parentheses(np.random.default_rng(11), Counting(), lengths, corpus)
    made = made.reshape(number, length)
    opened, pushed = matched(made)
    depth = np.cumsum(np.where(pushed, 1, -1), 1)
    return made, opened, pushed, np.hstack([np.zeros((number, 1), int), depth[:, :-1]])


def depths(length: int, push: float) -> np.ndarray:
    """The probability of each number of open tokens before each step: (length + 1, length + 2)."""
    chances = np.zeros((length + 1, length + 2))
    chances[0, 0] = 1
    for step in range(length):
        now, after = chances[step], chances[step + 1]
        after[1] = now[0]  # on an empty stack a pop becomes a push
        after[2:] += push * now[1:-1]
        after[:-1] += (1 - push) * now[1:]
    return chances


GRAMMARS = [("nesting", 0.4), ("nesting", 0.55), ("flat", 0.4), ("flat", 0.55)]


@pytest.mark.parametrize(("name", "push"), GRAMMARS)
def test_every_closing_token_is_its_opening(name, push):
    """A separate parser knows the grammar, but not how sequences are made."""
    made, opened, pushed, depth = structure(name, push)
    assert (depth >= 0).all()
    assert (opened >= 0).all()  # in the same sequence
    crossing = 0
    for tokens, pushes in zip(made[:3000].tolist(), pushed[:3000].tolist(), strict=True):
        assert max(Counter(tokens).values()) <= 2
        stack: list[int] = []
        for token, push_ in zip(tokens, pushes, strict=True):
            if push_:
                assert token not in stack
                stack.append(token)
            else:
                crossing += token != stack[-1]
                stack.remove(token)  # raises ValueError if it is not open
    assert (crossing == 0) if name == "nesting" else (crossing > 3000)


@pytest.mark.parametrize(("name", "push"), GRAMMARS)
def test_push_rate_and_depth_at_every_step(name, push):
    _, _, pushed, depth = structure(name, push)
    chance = depths(LENGTH, push)
    empty = chance[:LENGTH, 0]
    assert pushed[:, 0].all()
    assert (pushed[depth == 0]).all()
    agree(pushed, empty + (1 - empty) * push)
    agree(depth, chance[:LENGTH] @ np.arange(LENGTH + 2))
    for step in (2, 7, 30, LENGTH - 1):
        observed = np.bincount(depth[:, step], minlength=LENGTH + 2)
        assert not observed[chance[step] == 0].any()  # this includes the parity of the depth
        assert fits(observed, len(depth) * chance[step])


def test_depth_settles_at_its_closed_form():
    """pi_0 = (q - p) / 2q, pi_d = pi_0 / q (p / q)^(d - 1), and the mean depth is 1 / 2(q - p).

    These hold for the mean of two steps, because the parity alternates. p = 0.4 is the value of
    Chiang and Lee.
    """
    p, q = 0.4, 0.6
    _, _, pushed, depth = structure("nesting", p, 300, 2000)
    late = depth[:, -2:]
    agree(late.mean(1), 1 / (2 * (q - p)))
    agree((late == 0).mean(1), (q - p) / (2 * q))
    for level in (1, 2, 5):
        agree((late == level).mean(1), (q - p) / (2 * q * q) * (p / q) ** (level - 1))
    agree(pushed[:, -2:].mean(1), 0.5)


def distances(opened: np.ndarray, pushed: np.ndarray) -> np.ndarray:
    """How many pairs of each sequence have their tokens 0, 1, 2, ... steps apart: (sequences,
    steps).
    """
    number, length = opened.shape
    apart = np.where(pushed, 0, np.arange(length) - opened) + length * np.arange(number)[:, None]
    return np.bincount(apart.ravel(), minlength=number * length).reshape(number, length)


def compare_distances(name: str, push: float, expected: np.ndarray) -> None:
    """Compare the histogram and the mean of the distances. `expected` is the number of pairs per
    sequence.
    """
    _, opened, pushed, _ = structure(name, push)
    counts = distances(opened, pushed)
    common = np.flatnonzero(expected * len(counts) > 20)
    common = common[common > 0]
    assert len(common) > 10
    agree(counts[:, common], expected[common])
    agree(counts[:, 1:].sum(1), expected[1:].sum())
    # the mean is a ratio of sums; the difference from the expected one has mean 0 per sequence
    apart = np.arange(LENGTH)
    mean = (expected * apart).sum() / expected[1:].sum()
    agree(counts[:, 1:] @ (apart[1:] - mean), 0.0)


@pytest.mark.parametrize("push", [0.4, 0.55])
def test_nesting_pairs_are_first_returns(push):
    """A pair is 2k + 1 steps apart with probability C_k p^k q^(k + 1) if the sequence is long
    enough. C_k are Catalan's numbers.
    """
    chance = depths(LENGTH, push)[:LENGTH, 0]
    opening = chance + (1 - chance) * push  # the probability of a push at each step
    expected = np.zeros(LENGTH)
    for k in range(LENGTH // 2):
        first_return = comb(2 * k, k) // (k + 1) * push**k * (1 - push) ** (k + 1)
        expected[2 * k + 1] = first_return * opening[: LENGTH - 2 * k - 1].sum()
    compare_distances("nesting", push, expected)


@pytest.mark.parametrize("push", [0.4, 0.55])
def test_flat_pairs_by_the_recursion_of_a_tagged_token(push):
    """At depth d a pop takes the tagged token with probability 1 / d."""
    chance = depths(LENGTH, push)
    level = np.arange(LENGTH + 2)
    inverse = 1 / np.maximum(level, 1)
    expected = np.zeros(LENGTH)
    for opening in range(LENGTH):
        opens = np.where(level == 0, 1.0, push) * chance[opening]
        tagged = np.append(0, opens[:-1])  # the probability that it is still open, by depth
        for step in range(opening + 1, LENGTH):
            pop = (1 - push) * tagged
            expected[step - opening] += (pop * inverse).sum()
            tagged = push * np.append(0, tagged[:-1]) + np.append((pop * (1 - inverse))[1:], 0)
    compare_distances("flat", push, expected)


def test_flat_closes_any_open_token_alike():
    made, _, pushed, _ = structure("flat", 0.55)
    chosen = {depth: np.zeros(depth, int) for depth in (2, 3, 5, 8)}
    for tokens, pushes in zip(made.tolist(), pushed.tolist(), strict=True):
        open_: list[int] = []  # oldest first
        for token, push in zip(tokens, pushes, strict=True):
            if push:
                open_.append(token)
                continue
            if len(open_) in chosen:
                chosen[len(open_)][open_.index(token)] += 1
            open_.remove(token)
    for depth, counts in chosen.items():
        assert counts.sum() > 2000
        assert fits(counts, np.full(depth, counts.sum() / depth))


@pytest.mark.parametrize("name", ["nesting", "flat"])
def test_sequences_of_all_lengths_keep_their_places(name):
    """The lengths are in no order. Every sequence is complete and has its own length."""
    lengths = np.random.default_rng(0).integers(1, 40, 500)
    corpus = Corpus(name, 0, (1, 39), 0)
    made = synthetic.parentheses(np.random.default_rng(1), Counting(), lengths, corpus)
    assert len(made) == lengths.sum()
    parts = np.split(made, np.cumsum(lengths)[:-1])
    for part in parts:
        _, pushed = matched(part[None])
        assert max(Counter(part.tolist()).values()) <= 2
        assert (np.cumsum(np.where(pushed, 1, -1)) >= 0).all()
    everything = Counter(made.tolist())  # no token is in two sequences
    assert everything == sum((Counter(part.tolist()) for part in parts), Counter())
    assert sum(len(set(part.tolist())) for part in parts) == len(everything)


@pytest.mark.parametrize("name", ["nesting", "flat"])
def test_different_partners_change_only_the_closing_tokens(name):
    """Partners are neighbours in the order of frequency, whichever of the two opens the pair."""
    counts = np.array([0, 0, 0, 0, 0, 2, 6, 0, 4, 5, 3])
    corpus = Corpus(name, 0, (LENGTH, LENGTH), 0)
    different = replace(corpus, partners="different")
    weights = synthetic.weights(different, 11, counts)
    # The ids by falling frequency are 6, 9, 8, 10, 5. Id 5 has no partner, so it cannot occur.
    np.testing.assert_allclose(weights * 18, [0, 0, 0, 0, 0, 0, 6, 0, 4, 5, 3])
    assert synthetic.closing_ids(corpus, weights) is None
    closing = synthetic.closing_ids(different, weights)
    assert closing.tolist() == [0, 1, 2, 3, 4, 5, 9, 7, 10, 6, 8]
    with pytest.raises(BadInput, match="--partners different needs at least two tokens"):
        synthetic.weights(replace(different, distinct=1), 11, counts)

    lengths, other = np.full(2000, LENGTH), np.arange(2000 * LENGTH)[::-1] + 10**6
    equal = synthetic.parentheses(np.random.default_rng(4), Counting(), lengths, corpus)
    table = Counting(closers=other.astype(np.uint32))
    made = synthetic.parentheses(np.random.default_rng(4), table, lengths, different)
    _, pushed = matched(equal.reshape(-1, LENGTH))
    assert 0.5 < pushed.mean() < 0.6
    np.testing.assert_array_equal(made, np.where(pushed.ravel(), equal, other[equal]))


def test_the_command_with_different_partners(tmp_path):
    options = ["--tokens", 20_000, "--vocab-size", 45, "--partners", "different"]
    run("nesting", *options, "--output", tmp_path / "s")
    store = open_store(tmp_path / "s")
    assert store.meta["origin"]["synthetic"]["partners"] == "different"
    closed = 0
    for tokens in rows(store, "train"):
        open_: list[int] = []
        for token in tokens:
            if open_ and (open_[-1] - 5) ^ 1 == token - 5:
                open_.pop()
                closed += 1
            else:
                open_.append(token)
    # Fewer than 10,000, because some tokens are still open when a sequence ends.
    assert closed > 8000


# ------------------------------------------------------------------------------ the store


@pytest.mark.parametrize("name", ["uniform", "zipf", "nesting", "flat"])
def test_the_command(tmp_path, name):
    options = ["--push", 0.3] if name in ("nesting", "flat") else []
    said = run(
        name,
        "--tokens",
        20_000,
        *options,
        "--seed",
        3,
        "--distinct",
        50,
        "--output",
        tmp_path / "s",
    )
    assert "M tokens/s" in said
    store = open_store(tmp_path / "s")
    # the embedding keeps its size (Chiang and Lee 2020, section 4.3)
    assert (store.vocab_size, len(store.tokenizer()), store.kind) == (30_000, 30_000, "text")
    assert np.flatnonzero(stats.id_counts(store, "train")).tolist() == list(range(5, 55))
    lengths = np.diff(store.split("train").columns["tokens"].offsets)
    assert lengths.min() >= 90
    assert lengths.max() <= 120
    assert 20_000 <= store.split("train").tokens < 20_120
    assert 1_000 <= store.split("valid").tokens < 1_120
    made = store.meta["origin"]["synthetic"]
    assert (made["generator"], made["seed"], made["distinct"]) == (name, 3, 50)
    assert made["lengths"] == [90, 120]
    if options:
        assert made["push"] == 0.3
        assert "empty stack: a pop is a push" in made["rules"]
        assert "start: empty" in made["rules"]
        assert "stay unmatched" in made["rules"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A store whose ids, including special ones, all have different frequencies."""
    tokenizer = vocabularies.symbols([f"s{i}" for i in range(20)], separated=True)
    with create_store(tmp_path / "source", tokenizer, {"tokens": ""}) as store:
        with store.split("train") as split:
            values = np.repeat(np.arange(25), np.arange(25) % 7 * 3)
            split.append_ragged("tokens", values, np.array([len(values)]))
        store.finish("text", [], None, {})
    return tmp_path / "source"


def test_frequencies_of_a_store_with_other_special_tokens(tmp_path, capsys):
    """Ids 0 to 4, which are special here, may be ordinary tokens there, as in GPT-2."""
    pieces = [*"abcdefgh", *tokenizers.BERT_SPECIAL.values()]
    tokenizer = vocabularies.wordpiece({piece: i for i, piece in enumerate(pieces)}, True)
    with create_store(tmp_path / "source", tokenizer, {"tokens": ""}) as store:
        with store.split("train") as split:
            split.append_ragged("tokens", np.array([0, 5, 6, 7]), np.array([4]))
        store.finish("text", [], None, {})
    corpus = Corpus("zipf", 100, (5, 9), 0)
    synthetic.write_corpus(tmp_path / "s", corpus, None, open_store(tmp_path / "source"), {})
    said = capsys.readouterr().err
    assert "note: ids 0 to 4 are special tokens here, but ordinary ones in" in said
    assert "where they are 25.00% of the tokens; they are left out" in said


@pytest.mark.parametrize("name", ["zipf", "nesting"])
def test_frequencies_of_a_store(tmp_path, source, name):
    run(
        name,
        "--frequencies",
        source,
        "--tokens",
        100_000,
        "--lengths",
        "5:9",
        "--vocab-size",
        40,
        "--output",
        tmp_path / "s",
    )
    store = open_store(tmp_path / "s")
    assert store.vocab_size == 40
    assert store.tokenizer().pieces[5:7] == ["w5", "w6"]
    assert store.meta["origin"]["frequencies"]["file"] == "source"
    wanted = np.concatenate([np.zeros(5), np.arange(5, 25) % 7, np.zeros(15)])
    counts = np.array([np.bincount(row, minlength=40) for row in rows(store, "train")])
    # a token's count in a sequence, less its expected share of the sequence's length
    lengths = counts.sum(1, keepdims=True)
    agree(counts - lengths * wanted / wanted.sum(), 0.0)
    assert not counts.sum(0)[wanted == 0].any()


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "BLOCK_TOKENS", 2**11)
    monkeypatch.setattr(synthetic, "LEAST_ROWS", 8)


@pytest.mark.parametrize("name", ["uniform", "zipf", "nesting", "flat"])
@pytest.mark.slow
def test_the_same_bytes_whatever_the_number_of_workers(monkeypatch, tmp_path, name):
    small_blocks(monkeypatch)
    corpus = Corpus(name, 50_000, (5, 40), 3)
    for workers in (1, 2, 3, 8):
        synthetic.write_corpus(tmp_path / f"{workers}", corpus, 500, None, {}, workers=workers)
    tokens = {w: (tmp_path / f"{w}/train/tokens.npy").read_bytes() for w in (1, 2, 3, 8)}
    assert tokens[1] == tokens[2] == tokens[3] == tokens[8]
    stores = [open_store(tmp_path / f"{workers}") for workers in (1, 2)]
    assert stores[0].key == stores[1].key  # the key covers the checksums of all files
    train, valid = rows(stores[0], "train"), rows(stores[0], "valid")
    assert len(set(map(tuple, train)) & set(map(tuple, valid))) < len(valid) / 10
    synthetic.write_corpus(tmp_path / "other", replace(corpus, seed=4), 500, None, {}, workers=2)
    assert rows(open_store(tmp_path / "other"), "train")[:20] != train[:20]


def test_blocks_differ(monkeypatch):
    small_blocks(monkeypatch)
    corpus = Corpus("uniform", 1, (40, 40), 0)
    table = synthetic.alias_table(drawn_from("uniform", None))
    blocks = list(synthetic.make_blocks(corpus, table, "train", 20_000))
    assert len(blocks) > 5
    assert len({block[:40].tobytes() for block in blocks}) == len(blocks)


def test_a_worker_that_dies_is_one_failure(monkeypatch, tmp_path):
    small_blocks(monkeypatch)
    parent = os.getpid()

    def dies(*arguments: object) -> np.ndarray:
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setitem(synthetic.GENERATORS, "uniform", dies)
    corpus = Corpus("uniform", 50_000, (5, 40), 3)
    with pytest.raises(Failure, match=r"a worker process was ended by SIGKILL .* --workers 1"):
        synthetic.write_corpus(tmp_path / "s", corpus, 500, None, {}, workers=2)
    assert not os.listdir(tmp_path)


def children(parent: int) -> set[int]:
    """Its running child processes."""
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(above) == parent and state != "Z":
            pids.add(int(stat.parent.name))
    return pids


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_workers_end_with_their_parent(tmp_path, number, status):
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "preprocess.py"),
            "synthetic",
            "flat",
            "--tokens",
            "3000000000",
            "--workers",
            "2",
            "--output",
            str(tmp_path / "s"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        workers: set[int] = set()
        until = time.monotonic() + 60
        while len(workers) < 2 and time.monotonic() < until:
            time.sleep(0.05)
            workers = children(process.pid)
        assert len(workers) == 2
        time.sleep(0.5)  # until they have set their own signal handlers
        # Ctrl-C and a closed terminal reach the whole group
        whole_group = number in (signal.SIGINT, signal.SIGHUP)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == status
        assert said.count("\n") == (number != signal.SIGKILL), said
        while any(map(running, workers)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(running, workers))
        if number != signal.SIGKILL:
            assert not os.listdir(tmp_path)
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------- k-Shuffle Dyck


def test_shuffle_dyck_is_balanced_within_its_depth():
    """A separate parser checks this: every closing token has an open one of its kind, and no more
    than `depth` are open.

    All kinds open equally often, and any open bracket is equally likely to close.
    """
    kinds, deepest, length = 16, 8, 100
    corpus = Corpus("shuffle", 0, (length, length), 0, kinds, 0.5, deepest)
    weights = synthetic.weights(corpus, 5 + 2 * kinds, None)
    table = synthetic.alias_table(weights, synthetic.closing_ids(corpus, weights))
    lengths = np.full(4000, length)
    made = synthetic.parentheses(np.random.default_rng(3), table, lengths, corpus)
    made = made.reshape(-1, length).astype(int) - 5
    assert made.min() == 0
    assert made.max() == 2 * kinds - 1
    opened = np.zeros(kinds, int)
    places = {3: np.zeros(3, int), deepest: np.zeros(deepest, int)}
    choices = np.zeros(2, int)  # how often one closed, and one opened, if both were possible
    for tokens in made.tolist():
        open_: list[int] = []  # kinds, oldest first
        for token in tokens:
            if 0 < len(open_) < deepest:
                choices[int(token < kinds)] += 1
            if token < kinds:
                open_.append(token)
                opened[token] += 1
                continue
            kind = token - kinds
            if len(open_) in places and open_.count(kind) == 1:
                places[len(open_)][open_.index(kind)] += 1
            open_.remove(kind)  # raises ValueError if it is not open
        assert len(open_) <= deepest
    assert fits(opened, np.full(kinds, opened.sum() / kinds))
    assert fits(choices, np.full(2, choices.sum() / 2))
    for depth, counts in places.items():
        assert counts.sum() > 5000
        assert fits(counts, np.full(depth, counts.sum() / depth))


def test_the_shuffle_command_and_a_vocabulary_too_small(tmp_path):
    options = ["--tokens", 5000, "--distinct", 10, "--vocab-size", 40]
    run("shuffle", *options, "--output", tmp_path / "s")
    store = open_store(tmp_path / "s")
    counts = stats.id_counts(store, "train")
    assert store.meta["origin"]["synthetic"]["depth"] == 8
    assert np.flatnonzero(counts).tolist() == list(range(5, 25))
    corpus = Corpus("shuffle", 5000, (90, 120), 0, 10, 0.5, 8)
    with pytest.raises(BadInput, match="--vocab-size 20 is too small: --distinct 10 kinds"):
        synthetic.write_corpus(tmp_path / "small", corpus, 20, None, {})
