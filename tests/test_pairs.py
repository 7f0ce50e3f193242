"""Stores of pairs, and pre-training on them: masked tokens and how two texts are related."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NO_DROPOUT, SMOKE, Forks, good, kept_as_scored, refused, training

from xformer import checkpoint as checkpoints
from xformer.data import vocabularies
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.store import open_store
from xformer.data.writing import create_store
from xformer.parallel.feed import to_device
from xformer.preprocess import cli
from xformer.preprocess.tasks import pairs
from xformer.tasks.mlm import MLM
from xformer.tasks.pairs import Pairs

LETTERS = "ABCDEFGH"
SIZES = [1, 40, 7, 150, 2, 100]  # rows of each family, or document


def families(rng: np.random.Generator, path: Path) -> Path:
    """A store of sequences whose letters show their family. Its column `group` numbers
    documents.
    """
    symbols = vocabularies.symbols(LETTERS)
    columns = {"tokens": "", "label": "int64", "group": "int32"}
    with create_store(path, symbols, columns) as store:
        for name in ("train", "valid"):
            with store.split(name) as split:
                label = np.repeat(np.arange(len(SIZES)), SIZES)
                lengths = rng.integers(3, 9, size=len(label))
                values = np.repeat(5 + label, lengths)
                split.append_ragged("tokens", values, lengths)
                split.append("label", label)
                split.append("group", label)
        store.finish("class", [f"f{i}" for i in range(len(SIZES))], "accuracy", {})
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families(np.random.default_rng(0), tmp_path_factory.mktemp("pairs") / "families")


def make(source: Path, out: Path, *options: object) -> Path:
    parser = cli.make_parser()
    arguments = parser.parse_args(["pairs", str(source), "--output", str(out), *map(str, options)])
    arguments.do(arguments)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_families_are_paired_as_drawn(seed: int) -> None:
    family = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    first, second, label = pairs.draw_family(np.random.default_rng(seed), family)
    assert first.tolist() == list(range(len(family)))
    assert ((family[first] == family[second]) == (label == 1)).all()
    assert (first != second).all()
    assert (label[family == 0] == 0).all()  # the only row of its family
    share = label[family != 0].mean()
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(len(family))
    # every other family is equally likely, whatever its size
    counts = np.zeros(len(SIZES))
    for turn in range(40):
        _, second, label = pairs.draw_family(np.random.default_rng([seed, turn]), family)
        rows = (family == 3) & (label == 0)
        counts += np.bincount(family[second[rows]], minlength=len(SIZES))
    assert counts[3] == 0
    expected = counts.sum() / 5
    assert (np.abs(np.delete(counts, 3) - expected) < 5 * np.sqrt(expected)).all()


def test_rows_without_a_known_family_are_in_no_pair() -> None:
    family = np.array([-2, 0, 1, -1, 0, -2, 1])
    for seed in range(20):
        first, second, label = pairs.draw_family(np.random.default_rng(seed), family)
        assert first.tolist() == [1, 2, 4, 6]
        assert (family[second] >= 0).all()
        assert ((family[first] == family[second]) == (label == 1)).all()
    assert len(pairs.draw_family(np.random.default_rng(0), np.array([-2, 0, -1, 0])).first) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_next_row_is_the_next_of_its_document(seed: int) -> None:
    document = np.repeat(np.arange(len(SIZES)), SIZES)
    first, second, label = pairs.draw_next(np.random.default_rng(seed), document)
    assert len(first) == len(document) - len(SIZES)  # the last row of a document has no next
    follows = label == 0
    assert (second[follows] == first[follows] + 1).all()
    assert (document[second[follows]] == document[first[follows]]).all()
    assert (document[second[~follows]] != document[first[~follows]]).all()
    assert 0.35 < label.mean() < 0.65
    assert set(document[second[~follows]]) >= {1, 3, 5}


def test_order_swaps_neighbours() -> None:
    document = np.repeat(np.arange(len(SIZES)), SIZES)
    first, second, label = pairs.draw_order(np.random.default_rng(1), document)
    assert (second - first == np.where(label == 1, -1, 1)).all()
    assert (document[first] == document[second]).all()
    assert 0.35 < label.mean() < 0.65


def test_one_document_has_no_random_rows() -> None:
    first, second, label = pairs.draw_next(np.random.default_rng(0), np.zeros(9, np.int64))
    assert (label == 0).all()
    assert (second == first + 1).all()
    assert len(pairs.draw_family(np.random.default_rng(0), np.zeros(9, np.int64))[0]) == 0


def test_a_store_of_pairs(source: Path, tmp_path: Path) -> None:
    store = open_store(make(source, tmp_path / "p", "--kind", "family", "--rounds", 3))
    assert (store.kind, store.labels) == ("class", ["different", "same"])
    split = store.split("train")
    assert split.rows == 3 * sum(SIZES)
    columns = split.columns
    for row in range(0, split.rows, 7):
        same = columns["tokens"][row][0] == columns["tokens_b"][row][0]
        assert same == columns["label"][row]
    again = open_store(make(source, tmp_path / "q", "--kind", "family", "--rounds", 3))
    other = open_store(make(source, tmp_path / "r", "--kind", "family", "--seed", 1))
    assert again.key == store.key != other.key


@pytest.mark.parametrize(
    ("store_kind", "column", "kind", "how"),
    [
        ("text", "", "next", "text --documents"),
        ("span", "group", "next", "text --documents"),
        ("score", "label", "family", "task prot"),
        ("text", "", "family", "task prot"),
    ],
)
def test_refused(tmp_path: Path, store_kind: str, column: str, kind: str, how: str) -> None:
    symbols = vocabularies.symbols(LETTERS)
    columns = {"tokens": ""} | ({column: "int64"} if column else {})
    with create_store(tmp_path / "s", symbols, columns) as store:
        with store.split("train") as split:
            split.append_ragged("tokens", np.array([5, 6]), np.array([1, 1]))
            if column:
                split.append(column, np.array([0, 0]))
        store.finish(store_kind, [], None, {})
    with pytest.raises(BadInput, match=f"needs a store made by `{how}"):
        make(tmp_path / "s", tmp_path / "out", "--kind", kind)
    assert not (tmp_path / "out").exists()


def test_the_joint_loss_is_a_sum_over_rows(source: Path, tmp_path: Path, forks: Forks) -> None:
    """Two halves of a batch add up to the whole, and a pair counts `pair_scale` masked tokens."""
    store = make(source, tmp_path / "p", "--kind", "family")
    run = tmp_path / "run"
    good(
        forks.run(
            *training(SMOKE, store, run, "masking.pair_weight=0.5", "train.steps=1", *NO_DROPOUT)
        )
    )
    checkpoint = checkpoints.load(run)
    head = checkpoint.head
    assert head is not None
    split = open_store(store).split("train")
    assert head.pair_scale == pytest.approx(0.5 * 0.15 * split.tokens / split.rows)
    model = checkpoint.model()
    assembler = Assembler(split, checkpoint.tokenizer, 20)
    rows = np.arange(24)
    whole, halves = rows, (rows[:11], rows[11:])
    totals = []
    for part in (whole, *halves):
        batch = assembler.masked_batch(part, np.zeros_like(part), 0, 0.15)
        moved = to_device(batch, torch.device("cpu"))
        loss, logits = model.loss(moved), model.logits(moved)
        assert isinstance(model.task, Pairs)
        assert batch.labels is not None
        assert batch.targets is not None
        tokens = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(batch.targets), reduction="sum"
        )
        kinds = torch.nn.functional.cross_entropy(
            model.task._both(model, moved)[1], torch.from_numpy(batch.labels), reduction="sum"
        )
        assert loss.total.item() == pytest.approx((tokens + head.pair_scale * kinds).item())
        totals.append((loss.total.item(), loss.count))
    assert totals[0][0] == pytest.approx(totals[1][0] + totals[2][0], rel=1e-5)
    assert totals[0][1] == totals[1][1] + totals[2][1]


@pytest.mark.slow
def test_pairs_are_learned(source: Path, tmp_path: Path, forks: Forks) -> None:
    """A model shaped like PLUS learns to tell families apart, and still learns MLM."""
    store = make(source, tmp_path / "p", "--kind", "family", "--rounds", 4)
    run = tmp_path / "run"
    good(
        forks.run(
            *training(
                SMOKE,
                store,
                run,
                "masking.pair_weight=1",
                "train.steps=300",
                "batch.rows=32",
                "model.positions=sinusoidal",
                "model.pooler=none",
                "train.metric=pair_accuracy",
                "optim.lr=3e-3",
                *NO_DROPOUT,
            )
        )
    )
    kept_as_scored(run)
    scores = read_json(run / "result.json")["metrics"]["valid"]
    assert scores["pair_accuracy"] > 0.9
    assert scores["loss"] < 2.0
    assert scores["pair_loss"] < 0.5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [(["masking.pair_weight=1"], ["masking.pair_weight needs head=mlm and a store of pairs"])],
)
def test_pair_weight_needs_pairs(
    source: Path, tmp_path: Path, forks: Forks, overrides: list[str], words: list[str]
) -> None:
    refused(forks.run(*training(SMOKE, source, tmp_path / "run", *overrides)), *words)
    assert not (tmp_path / "run").exists()


def labelled_pairs(path: Path, **unlabelled: int) -> Path:
    """A store of 40 pairs of two classes in each split; `unlabelled` of them have no label."""
    columns = {"tokens": "", "tokens_b": "", "label": "int64"}
    texts = ("tokens", "tokens_b")
    with create_store(path, vocabularies.symbols(LETTERS), columns, texts) as store:
        for name in ("train", "valid", "test"):
            with store.split(name) as split:
                label = np.arange(40) % 2
                label[: unlabelled.get(name, 0)] = -1
                for column in texts:
                    split.append_ragged(column, np.tile(np.arange(5, 13), 40), np.full(40, 8))
                split.append("label", label)
        store.finish("class", ["no", "yes"], "accuracy", {})
    return path


def test_pairs_without_labels(tmp_path: Path, forks: Forks) -> None:
    """Training refuses them. A split without any label has only MLM's scores."""
    pair = ("masking.pair_weight=1", "train.steps=1", *NO_DROPOUT)
    store = labelled_pairs(tmp_path / "some", valid=39, test=40)
    good(forks.run(*training(SMOKE, store, tmp_path / "run", *pair)))
    metrics = read_json(tmp_path / "run/result.json")["metrics"]
    assert set(metrics["valid"]) == set(Pairs.metrics)
    assert set(metrics["test"]) == set(MLM.metrics)
    kept_as_scored(tmp_path / "run")
    store = labelled_pairs(tmp_path / "none", train=1)
    done = forks.run(*training(SMOKE, store, tmp_path / "refused", *pair))
    refused(done, "the split 'train' has rows without a label")
    store = labelled_pairs(tmp_path / "valid", valid=40)
    done = forks.run(*training(SMOKE, store, tmp_path / "refused", *pair, "train.metric=pair_loss"))
    refused(done, "train.metric='pair_loss' is not a metric of the split 'valid'")


def test_from_pfam_to_pairs(tmp_path: Path) -> None:
    """The third field of Pfam's headers names the family, and the pairs hold Pfam's sequences."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(120):
        name = ("1-cysPrx_C", "2OG-FeII_Oxy", "7tm_1")[i % 3]
        letters = "".join(rng.choice(list("ACDEFGHIKL"), 20)) + "VWY"[i % 3]
        lines.append(f">P{i}_X/1-21 P{i}.1 PF0{i % 3}.9;{name};\n{letters}\n")
    (tmp_path / "pfam.fasta").write_text("".join(lines))
    parser = cli.make_parser()
    for line in (
        f"task protein/family --input {tmp_path}/pfam.fasta --output {tmp_path}/families",
        f"pairs {tmp_path}/families --kind family --output {tmp_path}/pairs",
    ):
        arguments = parser.parse_args(line.split())
        arguments.do(arguments)
    families = open_store(tmp_path / "families")
    assert families.labels == ["1-cysPrx_C", "2OG-FeII_Oxy", "7tm_1"]
    paired = open_store(tmp_path / "pairs")
    tokenizer, columns = paired.tokenizer(), paired.split("train").columns
    for row in range(paired.split("train").rows):
        ends = [tokenizer.decode(columns[c][row])[-1] for c in ("tokens", "tokens_b")]
        assert (ends[0] == ends[1]) == columns["label"][row]


def test_documents_are_numbered(tmp_path: Path) -> None:
    texts = ["a b c d e f g", "h", "", "i j k l", "m n o p q r s t u"]
    (tmp_path / "t.txt").write_text("\n\n".join(texts))
    parser = cli.make_parser()
    for line in (
        f"tokenizer --kind symbols --alphabet abcdefghijklmnopqrstu --output {tmp_path}/tok",
        f"text --input {tmp_path}/t.txt --tokenizer {tmp_path}/tok --max-tokens 3 --documents "
        f"--output {tmp_path}/s",
        f"pairs {tmp_path}/s --kind order --output {tmp_path}/pairs",
    ):
        arguments = parser.parse_args(line.split())
        arguments.do(arguments)
    columns = open_store(tmp_path / "s").split("train").columns
    assert columns["group"].tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3]
    pairs_of = open_store(tmp_path / "pairs").split("train")
    decode = open_store(tmp_path / "s").tokenizer().decode
    for row in range(pairs_of.rows):
        first, second = (decode(pairs_of.columns[c][row]) for c in ("tokens", "tokens_b"))
        assert (first > second) == pairs_of.columns["label"][row]
