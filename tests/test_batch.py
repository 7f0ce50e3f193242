"""How rows become a packed batch: order, masks, mappings and packing, compared with slow, obvious
code.

V ids of a vocabulary, T tokens in a batch.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from xformer.config import validate
from xformer.convert import hf
from xformer.data import batch as batches
from xformer.data import mapping, masking, sampler, vocabularies
from xformer.data.batch import CHUNK, Assembler, Batch, Masks, chunks, ragged_arange, truncate
from xformer.data.errors import BadInput
from xformer.data.hashing import EPOCH, key, key_with_each
from xformer.data.sampler import Samples, Stream, permute
from xformer.data.store import Ragged, Split, Store, open_store
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import create_store
from xformer.recipe import Recipe

# special tokens are neither adjacent nor first, so that no range of ids is right by accident
PIECES = [
    *("a", "[unused0]", "[CLS]", "b", "c", "[MASK]", "[unused1]", "d", "[SEP]", "e"),
    *("[UNK]", "f", "g", "[PAD]", "h", "##i", "##j", "k", "[unused2]"),
]
V = len(PIECES)
BERT = vocabularies.wordpiece({piece: i for i, piece in enumerate(PIECES)}, True)
ROBERTA = vocabularies.byte_bpe(
    {p: i for i, p in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghijklmn"])}, []
)
UNUSED = [1, 6, 18]
SPECIAL = [2, 5, 8, 10, 13]
PLAIN = [i for i in range(V) if i not in UNUSED + SPECIAL]


def close(count: int, total: int, probability: float) -> bool:
    """Whether a count of `total` trials is within 5 standard deviations of the expected one."""
    sigma = (total * probability * (1 - probability)) ** 0.5
    return abs(count - total * probability) <= 5 * sigma


def looks_uniform(counts: np.ndarray) -> bool:
    """Whether counts are as even as uniform draws make them.

    Uniform draws fail this once in 500,000 times, by being too uneven or too even.
    """
    statistic = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    return 1e-6 < stats.chi2.cdf(statistic, counts.size - 1) < 1 - 1e-6


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    values = np.array([i for row in rows for i in row], np.uint16)
    return Ragged(values, np.cumsum([0, *map(len, rows)]))


def split_of(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]] | None = None) -> Split:
    """A split in memory; the label of row i is 100 + i."""
    columns: dict[str, Any] = {"tokens": ragged(a), "label": np.arange(len(a)) + 100}
    if b is not None:
        columns["tokens_b"] = ragged(b)
    return Split("train", len(a), 0, columns)


def made_store(path: Path, tokenizer: Tokenizer, rows: list[list[int]]) -> Store:
    """A store on disk. The second text of every row is empty. Each row has an id, whose bytes are
    not tokens."""
    columns = {"tokens": "", "tokens_b": "", "id": "uint8"}
    with create_store(path, tokenizer, columns, list(columns)) as writer:
        with writer.split("train") as split:
            split.append_ragged("tokens", ragged(rows).values, np.array([len(r) for r in rows]))
            split.append_ragged("tokens_b", np.zeros(0), np.zeros(len(rows), np.int64))
            split.append_texts("id", [f"row {i}" for i in range(len(rows))])
        writer.finish("text", [], None, {})
    return open_store(path)


# -------------------------------------------------------------------------------------- order


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@example(1, 0)
@example(2, 0)
@example(3, 0)
@example(4096, 1)
@example(4097, 1)
@settings(max_examples=60, deadline=None)
def test_permute_is_one_to_one(n: int, secret: int) -> None:
    images = permute(np.arange(n), n, np.uint64(secret))
    assert np.array_equal(np.sort(images), np.arange(n))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_an_image_depends_on_its_own_position_alone(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300))
    asked = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=50)), np.int64)
    secret = key(data.draw(st.integers(0, 9)))
    assert np.array_equal(permute(asked, n, secret), permute(np.arange(n), n, secret)[asked])


@given(st.lists(st.integers(0, 2**40), max_size=9), st.integers(-(2**63), 2**63 - 1))
def test_a_key_with_each_is_the_key_of_all_parts(values: list[int], seed: int) -> None:
    several = key_with_each(np.array(values, np.int64), seed, EPOCH)
    assert several.tolist() == [key(seed, EPOCH, value) for value in values]


@pytest.mark.parametrize(("n", "epochs"), [(2, 500), (3, 500), (8, 3000), (20, 800)])
@pytest.mark.slow
def test_every_order_is_as_likely(n: int, epochs: int) -> None:
    # over many epochs, every row comes to every position, and every pair of rows to every two
    orders, _ = Samples(n, seed=1).at(np.arange(n * epochs))
    orders = orders.reshape(epochs, n)
    for position in range(n):
        assert looks_uniform(np.bincount(orders[:, position], minlength=n)), position
    for i, j in ((0, 1), (n - 1, 0), (5, 3)):
        if n > 2 and max(i, j) < n:
            pairs = np.bincount(orders[:, i] * n + orders[:, j], minlength=n * n)
            distinct = pairs.reshape(n, n)[~np.eye(n, dtype=bool)]
            assert pairs.sum() == distinct.sum()
            assert looks_uniform(distinct), (i, j)


def test_one_order_of_many_rows_looks_random() -> None:
    n = 100_000
    order = permute(np.arange(n), n, key(5))
    table = np.bincount(np.arange(n) * 20 // n * 20 + order * 20 // n, minlength=400)
    assert looks_uniform(table)
    steps = np.bincount(np.diff(order) % n * 50 // n, minlength=50)
    assert looks_uniform(steps)


@pytest.mark.parametrize("other", [Samples(5000, seed=2), Samples(5000, seed=1 + 2**40)])
def test_seeds_and_epochs_differ(other: Samples) -> None:
    samples = Samples(5000, seed=1)
    first, second = samples.at(np.arange(10_000))[0].reshape(2, 5000)
    third = other.at(np.arange(5000))[0]
    for one, two in ((first, second), (first, third), (second, third)):
        assert (one == two).sum() < 10  # one is expected


def test_every_row_exactly_once_an_epoch() -> None:
    rows, epochs = Samples(997, seed=3).at(np.arange(5 * 997))
    assert np.array_equal(epochs, np.repeat(np.arange(5), 997))
    assert all(np.array_equal(np.sort(e), np.arange(997)) for e in rows.reshape(5, 997))


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_samples_do_not_depend_on_how_they_are_batched(fraction: float) -> None:
    samples = Samples(50, seed=4, fraction=fraction)
    rows, epochs = samples.at(np.arange(131))
    for cuts in ([1, 2, 3], [17, 49, 50, 51, 100], list(range(131))):
        parts = [samples.at(part) for part in np.split(np.arange(131), cuts)]
        assert np.array_equal(np.concatenate([p[0] for p in parts]), rows)
        assert np.array_equal(np.concatenate([p[1] for p in parts]), epochs)
    far = samples.at(np.array([samples.per_epoch * 10**9 + 7, 3]))
    assert far[1].tolist() == [10**9, 0]
    assert far[0][1] == rows[3]


def test_a_fraction_keeps_the_same_rows_each_epoch() -> None:
    samples = Samples(1000, seed=5, fraction=0.1)
    assert samples.per_epoch == 100
    epochs = samples.at(np.arange(300))[0].reshape(3, 100)
    kept = set(epochs[0].tolist())
    assert len(kept) == 100
    assert all(set(epoch.tolist()) == kept for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    others = set(Samples(1000, seed=6, fraction=0.1).at(np.arange(100))[0].tolist())
    assert len(kept & others) < 30  # 10 are expected
    chosen = [Samples(20, s, 0.25).at(np.arange(5))[0] for s in range(400)]
    assert looks_uniform(np.bincount(np.concatenate(chosen), minlength=20))


def test_a_tiny_fraction_keeps_one_row() -> None:
    assert Samples(3, seed=0, fraction=0.01).per_epoch == 1


def looked_up(stream: Stream, position: int) -> tuple[list[int], list[int], list[int]]:
    """(rows, epochs, sizes) of a step, as lists."""
    rows, epochs, sizes = stream.take(position)
    return rows.tolist(), epochs.tolist(), sizes.tolist()


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=400),
    st.integers(1, 900),
    st.booleans(),
    st.integers(1, 50),
)
@settings(max_examples=150, deadline=None)
def test_steps_are_full_and_cover_every_sample_once(
    lengths: list[int], tokens: int, by_tokens: bool, ahead: int
) -> None:
    """This does not depend on how many samples are looked up at once, nor on where a run
    continues.
    """
    sizes, samples, end = np.array(lengths), Samples(len(lengths), 5), len(lengths) * 2
    order, epochs = samples.at(np.arange(end))
    rows = 0 if by_tokens else tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "AHEAD", ahead)
        stream, position = (
            Stream(
                samples,
                end,
                sizes.__getitem__,
                tokens if not by_tokens else 32,
                tokens if by_tokens else 0,
            ),
            0,
        )
        while position < end:
            actual = looked_up(stream, position)
            last = position + len(actual[0])
            assert actual[0] == order[position:last].tolist()
            assert actual[1] == epochs[position:last].tolist()
            taken = sizes[actual[0]]
            assert actual[2] == taken.tolist()
            if by_tokens:
                assert len(taken) == 1 or 1 <= taken.sum() <= tokens
                # greedy: the next sample would not fit
                assert last == end or taken.sum() + sizes[order[last]] > tokens
            else:
                assert len(taken) == min(rows, end - position)
            fresh = Stream(samples, end, sizes.__getitem__, stream.per_step, stream.tokens)
            assert looked_up(fresh, position) == actual
            position = last


@pytest.mark.parametrize("tokens", [1, 100, 5_000, 300_000])
@pytest.mark.slow
def test_a_stream_looks_no_further_than_it_must(tokens: int) -> None:
    asked: list[int] = []

    def sizes(rows: np.ndarray) -> np.ndarray:
        asked.append(len(rows))
        return rows % 7 + 1

    stream = Stream(Samples(10**9, 0), 2**62, sizes, 32, tokens)
    position = 10**12
    while position < 10**12 + 10**6:
        position += len(stream.take(position)[0])
    assert sum(asked) <= 2 * 10**6
    assert max(asked) <= max(2**16, 4 * tokens)
    asked.clear()
    # few rows are not looked up many times either
    stream = Stream(Samples(99, 0), 2**62, sizes, 32, 100)
    stream.take(0)
    assert sum(asked) <= 99


# -------------------------------------------------------------------------------------- masks


@pytest.fixture(scope="module")
def million() -> dict[str, np.ndarray]:
    """A packed batch of a million tokens with equally frequent ids, masked at 15 %."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 99, 20_600)
    tokens = Ragged(random.integers(0, V, lengths.sum()), np.cumsum([0, *lengths]))
    assembler = Assembler(Split("train", len(tokens), 0, {"tokens": tokens}), BERT, 200)
    rows = np.arange(len(tokens))
    plain, masked = assembler.batch(rows), assembler.masked_batch(rows, rows % 3, 0, 0.15)
    assert len(plain.tokens) > 10**6
    assert masked.places is not None
    assert masked.targets is not None
    return {
        "tokens": plain.tokens,
        "masked": masked.tokens,
        "places": masked.places,
        "targets": masked.targets,
    }


def test_masking_rates(million: dict[str, np.ndarray]) -> None:
    tokens, places, targets = million["tokens"], million["places"], million["targets"]
    ordinary = ~np.isin(tokens, SPECIAL)
    assert close(len(places), ordinary.sum(), 0.15)
    assert np.array_equal(targets, tokens[places])
    now = million["masked"][places]
    alike = 0.1 / (V - len(SPECIAL))  # a random replacement may be the token itself
    assert close((now == BERT.special["mask"]).sum(), len(places), 0.8)
    assert close((now == targets).sum(), len(places), 0.1 + alike)
    others = np.delete(million["masked"] == tokens, places)
    assert others.all()


def test_special_tokens_are_never_masked(million: dict[str, np.ndarray]) -> None:
    assert not np.isin(million["targets"], SPECIAL).any()
    assert set(million["targets"].tolist()) == set(PLAIN + UNUSED)


def test_replacements_are_all_ordinary_ids_alike(million: dict[str, np.ndarray]) -> None:
    now, targets = million["masked"][million["places"]], million["targets"]
    replaced = now[(now != BERT.special["mask"]) & (now != targets)]
    counts = np.bincount(replaced, minlength=V)
    assert np.flatnonzero(counts).tolist() == sorted(PLAIN + UNUSED)
    assert looks_uniform(counts[counts > 0])
    # a replacement depends neither on the token nor on its neighbours
    shifts = np.bincount((replaced - targets[(now != 5) & (now != targets)]) % V, minlength=V)
    assert shifts[0] == 0
    assert shifts[1:].min() > 0.3 * shifts[1:].mean()


def test_masks_of_neighbours_and_epochs_are_independent() -> None:
    rows, length = 4000, 50
    chosen = {}
    for name, seed, epoch in (("a", 0, 0), ("epoch", 0, 1), ("seed", 1, 0)):
        row_keys = masking.row_keys(seed, np.full(rows, epoch), np.arange(rows))
        places, _ = masking.mask(
            np.zeros(rows * length, np.int32),
            np.tile(np.arange(length, dtype=np.int32), rows),
            row_keys,
            np.full(rows, length),
            np.zeros(V, bool),
            BERT.special["mask"],
            np.array([0]),
            0.3,
        )
        chosen[name] = np.zeros(rows * length, bool)
        chosen[name][places] = True
    a, table = chosen["a"], chosen["a"].reshape(rows, length)
    both = {
        "another epoch": (a, chosen["epoch"]),
        "another seed": (a, chosen["seed"]),
        "the next position": (table[:, 1:], table[:, :-1]),
        "the next row": (table[1:], table[:-1]),
        "the next row's next position": (table[1:, :-1], table[:-1, 1:]),
    }
    for what, (one, two) in both.items():
        assert close((one & two).sum(), one.size, 0.09), what
    assert looks_uniform(table.sum(0))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_rows_mask_does_not_depend_on_its_batch(wanted: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(1)
    texts = [random.choice(PLAIN, n).tolist() for n in (0, 1, 5, 5, 5, 9, 13, 30)]
    assembler = Assembler(split_of(texts, texts[::-1]), BERT, 24)

    def masked(samples: list[tuple[int, int]]) -> list[tuple[list[int], list[int], list[int]]]:
        rows, epochs = (np.array(x) for x in zip(*samples, strict=True))
        batch = assembler.masked_batch(rows, epochs, seed=7, probability=0.4)
        assert batch.places is not None
        assert batch.targets is not None
        actual = []
        for start, end in pairwise(batch.cu_seqlens):
            here = (batch.places >= start) & (batch.places < end)
            actual.append(
                (
                    batch.tokens[start:end].tolist(),
                    (batch.places[here] - start).tolist(),
                    batch.targets[here].tolist(),
                )
            )
        order = np.argsort(assembler.sizes(rows), kind="stable")
        return [actual[i] for i in np.argsort(order)]

    assert masked(wanted) == [masked([sample])[0] for sample in wanted]


def test_a_masked_batch_differs_from_the_plain_one_at_its_places_alone() -> None:
    assembler = Assembler(split_of([PLAIN * 20] * 30), BERT, 200)
    rows = np.arange(30)
    plain, masked = assembler.batch(rows), assembler.masked_batch(rows, rows, 0, 0.15)
    assert masked.places is not None
    assert masked.targets is not None
    assert np.array_equal(masked.targets, plain.tokens[masked.places])
    changed = np.flatnonzero(masked.tokens != plain.tokens)
    assert set(changed) <= set(masked.places)
    assert len(changed) > 0.8 * len(masked.places)
    for name in ("positions", "segments", "cu_seqlens", "rows", "labels"):
        assert np.array_equal(getattr(masked, name), getattr(plain, name)), name


# ----------------------------------------------------------------------------------- mappings


def test_mappings_parse() -> None:
    assert mapping.parse("none") == ("none", 0)
    assert mapping.parse("ids") == ("ids", 0)
    assert mapping.parse("shift:1000") == ("shift", 1000)
    assert mapping.parse("symbols:0") == ("symbols", 0)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "shift",
        "shift:",
        "shift:-1",
        "shift:1.5",
        "random:x",
        "Shift:1",
        "ids:3",
        "none:1",
        "random: 1",
        "unused:1 ",
        "shift:1\n",
    ],
)
def test_a_wrong_mapping_is_told_the_right_forms(wrong: str) -> None:
    with pytest.raises(BadInput, match="must be one of none, ids, shift:K, random:SEED"):
        mapping.parse(wrong)
    with pytest.raises(BadInput, match="must be one of"):  # also from Python, and in a study
        validate(Recipe, {"data": "-", "run": "-", "head": "mlm", "mapping": wrong})


def test_shift_is_the_formula_of_the_paper(tmp_path: Path, minilm: Path) -> None:
    # K section 2.1 and its footnote 2: a sentence of SST-2 under T(i) = (i + 1000) mod D
    tokenizer = hf.from_hf(minilm).checkpoint.tokenizer
    (ids,) = tokenizer.encode_batch(["his healthy sense of satire is light and fun..."])
    table = mapping.build_mapping(
        "shift:1000", made_store(tmp_path / "s", tokenizer, [[1]]), tokenizer
    )
    assert table is not None
    shown = " ".join(tokenizer.pieces[i] for i in table[ids])
    assert shown == "canadian franz ##me 1988 ##pia leader watch sports czech at at at"
    assert table.tolist() == [(i + 1000) % 30522 for i in range(30522)]
    large = mapping.build_mapping(
        f"shift:{10**30 * 30522 + 7}", open_store(tmp_path / "s"), tokenizer
    )
    assert large is not None
    assert large[:2].tolist() == [7, 8]


@pytest.fixture
def own_store(tmp_path: Path) -> Store:
    return made_store(tmp_path / "own", BERT, [[0, 3], [4]])


def test_random_is_one_to_one_and_leaves_special_and_unused_alone(own_store: Store) -> None:
    tables = [mapping.build_mapping(f"random:{seed}", own_store, BERT) for seed in (0, 0, 1)]
    for table in tables:
        assert table is not None
        assert sorted(table[PLAIN]) == PLAIN
        assert table[SPECIAL + UNUSED].tolist() == SPECIAL + UNUSED
    assert np.array_equal(np.array(tables[0]), np.array(tables[1]))
    assert not np.array_equal(np.array(tables[0]), np.array(tables[2]))


def test_random_reaches_every_piece(own_store: Store) -> None:
    counts = np.zeros(V, np.int64)
    for seed in range(600):
        table = mapping.build_mapping(f"random:{seed}", own_store, BERT)
        assert table is not None
        counts[table[PLAIN[3]]] += 1
    assert looks_uniform(counts[PLAIN])


@pytest.mark.parametrize(("name", "targets"), [("symbols", PLAIN), ("unused", UNUSED)])
def test_symbols_become_distinct_pieces(tmp_path: Path, name: str, targets: list[int]) -> None:
    letters = vocabularies.symbols("ACG")
    store = made_store(tmp_path / "dna", letters, [[5, 6, 7]])
    tables = []
    for seed in range(40):
        table = mapping.build_mapping(f"{name}:{seed}", store, BERT)
        assert table is not None
        assert table.shape == (8,)
        for role, i in letters.special.items():
            assert table[i] == BERT.special[role]
        assert len(set(table[5:].tolist())) == 3
        assert set(table[5:].tolist()) <= set(targets)
        tables.append(tuple(table.tolist()))
    assert len(set(tables)) > 3
    assert {i for table in tables for i in table[5:]} == set(targets)
    again = mapping.build_mapping(f"{name}:0", store, BERT)
    assert again is not None
    assert tuple(again.tolist()) == tables[0]


def test_more_symbols_than_pieces_are_refused(tmp_path: Path) -> None:
    store = made_store(tmp_path / "dna", vocabularies.symbols("ACGT"), [[5]])
    with pytest.raises(BadInput, match="4 symbols do not fit the vocabulary's 3 unused entries"):
        mapping.build_mapping("unused:0", store, BERT)
    many = made_store(tmp_path / "many", vocabularies.symbols("ABCDEFGHIJKL"), [[5]])
    with pytest.raises(BadInput, match="12 symbols do not fit the vocabulary's 11 ordinary pieces"):
        mapping.build_mapping("symbols:0", many, BERT)


def test_a_mapping_of_symbols_is_not_for_the_checkpoints_own_store() -> None:
    """A plan of runs asks the same question before a run is started."""
    with pytest.raises(BadInput, match="symbols:0 is for a tokenizer that differs from the check"):
        mapping.check_own_store("symbols:0", "s")
    mapping.check_own_store("shift:1", "s")


def test_none_and_ids_change_nothing(own_store: Store) -> None:
    assert mapping.build_mapping("none", own_store, BERT) is None
    assert mapping.build_mapping("ids", own_store, BERT) is None


@pytest.mark.parametrize("spec", ["none", "shift:1", "random:0"])
def test_another_tokenizers_store_is_refused(tmp_path: Path, spec: str) -> None:
    foreign = made_store(tmp_path / "foreign", ROBERTA, [[5, 6]])
    with pytest.raises(BadInput, match=r"a different tokenizer|the checkpoint's own tokenizer"):
        mapping.build_mapping(spec, foreign, BERT)


def test_a_foreign_store_names_the_mapping_for_its_case(tmp_path: Path) -> None:
    text = made_store(tmp_path / "text", ROBERTA, [[5, 6]])
    dna = made_store(tmp_path / "dna", vocabularies.symbols("ACGT"), [[5, 6]])
    for store, words in (
        (text, "checkpoint's; make it again with --tokenizer CHECKPOINT; mapping=ids keeps"),
        (dna, "checkpoint's; its symbols .* are not words: give mapping=symbols:0"),
    ):
        with pytest.raises(BadInput, match=words):
            mapping.build_mapping("none", store, BERT)
    with pytest.raises(BadInput, match=r"for text make it again .*; for DNA, .* mapping=symbols:0"):
        mapping.check_foreign_store("none", "made.task")
    assert mapping.build_mapping("symbols:0", dna, BERT) is not None


def test_a_store_of_letters_is_made_for_a_model_of_letters(tmp_path: Path) -> None:
    """A random mapping from one alphabet to another would shuffle residues, so it is not advised.
    Artificial corpora have symbols, too, but no letters."""
    dna = made_store(tmp_path / "dna", vocabularies.symbols("ACGT"), [[5, 6]])
    letters = vocabularies.symbols("ACGTN")
    with pytest.raises(BadInput, match="reads letters, too: make it again with --tokenizer CHECKP"):
        mapping.build_mapping("none", dna, letters)
    assert mapping.build_mapping("symbols:0", dna, letters) is not None  # if it is asked for
    words = vocabularies.symbols([f"w{i}" for i in range(9)], separated=True)
    with pytest.raises(BadInput, match="give mapping=symbols:0"):
        mapping.build_mapping("none", dna, words)
    artificial = made_store(tmp_path / "words", words, [[5, 6]])
    with pytest.raises(BadInput, match="mapping=ids keeps the ids"):
        mapping.build_mapping("none", artificial, letters)
    others = vocabularies.symbols([f"w{i}" for i in range(8)], separated=True)
    again = "reads words, too: make it again with .*; for words of another kind .*; mapping=ids"
    with pytest.raises(BadInput, match=again):
        mapping.build_mapping("none", artificial, others)
    english = made_store(tmp_path / "english", BERT, [[5, 6]])
    with pytest.raises(BadInput, match="the model reads words, not text; mapping=ids keeps"):
        mapping.build_mapping("none", english, words)


def test_rows_of_a_column_are_counted_as_in_a_list() -> None:
    rows = [[1, 2], [], [3]]
    column = ragged(rows)
    assert [column[i].tolist() for i in range(3)] == rows
    assert column[-1].tolist() == [3]
    with pytest.raises(IndexError):
        column[3]


def test_ids_must_fit_the_model(tmp_path: Path) -> None:
    wide = vocabularies.symbols("abcdefghijklmnop")  # 21 ids; the model has 19
    assert (
        mapping.build_mapping("ids", made_store(tmp_path / "low", wide, [[V - 1], [0]]), BERT)
        is None
    )
    high = made_store(tmp_path / "high", wide, [[V, 3], [0]])
    wrong = r"the id 19 in .*high/train/tokens\.npy does not fit .* with model\.vocab_size=21"
    with pytest.raises(BadInput, match=wrong):
        mapping.build_mapping("ids", high, BERT)
    assert (
        mapping.build_mapping("ids", high, BERT, embeddings=V + 1) is None
    )  # more embeddings than pieces


# ------------------------------------------------------------------------------------ batches


def slow_batch(
    rows: Sequence[int],
    a: list[list[int]],
    b: list[list[int]] | None,
    model: Tokenizer,
    max_tokens: int,
    table: Sequence[int] | None,
) -> Batch[np.ndarray]:
    """The correct batch, built one token at a time."""
    special, built = model.special, []
    for row in rows:
        first, second = list(a[row]), list(b[row]) if b is not None else []
        between = [special["sep"]] * model.pair_separators if b is not None else []
        while len(first) + len(second) + len(between) + 2 > max_tokens:
            # google-research/bert, run_classifier.py, _truncate_seq_pair
            (first if len(first) > len(second) else second).pop()
        if table is not None:
            first, second = [table[i] for i in first], [table[i] for i in second]
        ids = [special["cls"], *first, *between, *second, special["sep"]]
        after = len(second) + 1 if b is not None else 0
        built.append((row, ids, [0] * (len(ids) - after) + [1] * after))
    built.sort(key=lambda row: len(row[1]))
    cu_seqlens = np.cumsum([0, *(len(ids) for _, ids, _ in built)])
    return Batch(
        tokens=np.array([i for _, ids, _ in built for i in ids]),
        positions=np.array([p for _, ids, _ in built for p in range(len(ids))]),
        segments=np.array([s for _, _, segments in built for s in segments]),
        cu_seqlens=cu_seqlens,
        longest=max(len(ids) for _, ids, _ in built),
        rows=np.array([row for row, _, _ in built]),
        labels=np.array([100 + row for row, _, _ in built]),
    )


texts = st.lists(st.lists(st.integers(0, V - 1), max_size=9), min_size=5, max_size=5)


@given(
    texts,
    st.none() | texts,
    st.sampled_from([BERT, ROBERTA]),
    st.integers(5, 16),
    st.none() | st.permutations(range(V)),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_batches_equal_the_slow_reference(
    a: list[list[int]],
    b: list[list[int]] | None,
    model: Tokenizer,
    max_tokens: int,
    table: list[int] | None,
    rows: list[int],
) -> None:
    array = None if table is None else np.array(table)
    assembler = Assembler(split_of(a, b), model, max_tokens, array)
    actual = assembler.batch(np.array(rows))
    expected = slow_batch(rows, a, b, model, max_tokens, table)
    for name in ("tokens", "positions", "segments", "cu_seqlens", "rows", "labels"):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), name
    assert actual.tokens.dtype == actual.positions.dtype == actual.segments.dtype == np.int32
    assert actual.cu_seqlens.dtype == np.int32
    assert actual.longest == expected.longest
    sizes = assembler.sizes(np.array(rows))
    assert sorted(sizes.tolist()) == np.diff(actual.cu_seqlens).tolist()


@given(
    texts,
    st.none() | texts,
    st.booleans(),
    st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_batches_made_in_one_go_are_those_made_one_by_one(
    a: list[list[int]], b: list[list[int]] | None, masked: bool, parts: list[list[int]]
) -> None:
    assembler = Assembler(split_of(a, b), BERT, 9)
    rows = np.array([row for part in parts for row in part], np.int64)
    epochs = np.arange(len(rows)) % 3
    actual = assembler.batches(
        rows, [len(part) for part in parts], Masks(7, 0.4, epochs) if masked else None
    )
    assert len(actual) == len(parts)
    at = 0
    for batch, part in zip(actual, parts, strict=True):
        here = slice(at, at + len(part))
        one = assembler.batch(rows[here])
        if masked:
            one = assembler.masked_batch(rows[here], epochs[here], 7, 0.4)
        for name, value in one.__dict__.items():
            other = getattr(batch, name)
            if not isinstance(value, np.ndarray):
                assert other == value, name
            else:
                assert (other.tolist(), other.dtype) == (value.tolist(), value.dtype), name
        at += len(part)


def test_truncation_is_that_of_transformers(tmp_path: Path) -> None:
    # This is the Python tokenizer, which equals Google's. The Rust one gives the odd token to the
    # second text if that is not the shorter one.
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    bert = legacy.BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    first, second, budget = (x.ravel() for x in np.mgrid[0:12, 0:12, 0:14])
    new_a, new_b = truncate(first, second, budget)
    for a, b, n, *actual in zip(first, second, budget, new_a, new_b, strict=True):
        kept = bert.truncate_sequences([0] * a, [0] * b, max(0, a + b - n), "longest_first")
        assert actual == [len(kept[0]), len(kept[1])], (a, b, n)


def test_a_real_pair_has_berts_template(tmp_path: Path, minilm: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = hf.from_hf(minilm).checkpoint.tokenizer
    one, two = "A man is eating food.", "The girl's 2 cats, unbelievably, purr!"
    a, b = tokenizer.encode_batch([one, two])
    batch = Assembler(split_of([a.tolist()], [b.tolist()]), tokenizer, 128).batch(np.array([0]))
    expected = transformers.AutoTokenizer.from_pretrained(minilm)(one, two)
    assert batch.tokens.tolist() == expected["input_ids"]
    assert batch.segments.tolist() == expected["token_type_ids"]


def test_empty_rows_and_empty_batches() -> None:
    assembler = Assembler(split_of([[], []], [[], []]), BERT, 8)
    batch = assembler.batch(np.array([1, 0]))
    cls, sep = BERT.special["cls"], BERT.special["sep"]
    assert batch.tokens.tolist() == [cls, sep, sep] * 2
    assert batch.segments.tolist() == [0, 0, 1] * 2
    assert batch.rows is not None
    assert batch.rows.tolist() == [1, 0]
    nothing = assembler.batch(np.zeros(0, np.int64))
    assert nothing.tokens.tolist() == []
    assert nothing.cu_seqlens.tolist() == [0]
    assert nothing.longest == 0


def test_rows_too_short_for_the_special_tokens_are_refused() -> None:
    with pytest.raises(BadInput, match="max_tokens=3 leaves no room for the 4 special tokens"):
        Assembler(split_of([[5]], [[6]]), ROBERTA, 3)


def test_chunks_hold_every_row_once_in_order_of_length() -> None:
    lengths = np.random.default_rng(2).integers(0, 200, 1500)
    assembler = Assembler(split_of([[3] * n for n in lengths]), BERT, 130)
    actual = list(chunks(assembler, 1500))
    order = np.concatenate(actual)
    assert sorted(order.tolist()) == list(range(1500))
    sizes = assembler.sizes(order)
    assert (np.diff(sizes) >= 0).all()
    fills = [int(assembler.sizes(part).sum()) for part in actual]
    assert max(fills) < CHUNK + 130
    assert min(fills[:-1]) > CHUNK - 130
    few = list(chunks(Assembler(split_of([[3]]), BERT, 130), 1))
    assert [part.tolist() for part in few] == [[0]]


def test_chunks_put_windows_of_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WINDOW", 400)
    monkeypatch.setattr(batches, "CHUNK", 700)
    lengths = np.random.default_rng(2).integers(0, 200, 1500)
    assembler = Assembler(split_of([[3] * n for n in lengths]), BERT, 130)
    actual = list(chunks(assembler, 1500))
    assert all(len({row // 400 for row in part.tolist()}) == 1 for part in actual)
    order = np.concatenate(actual)
    for start in range(0, 1500, 400):
        window = order[start : start + 400]
        assert sorted(window.tolist()) == list(range(start, min(start + 400, 1500)))
        assert (np.diff(assembler.sizes(window)) >= 0).all()


def test_ragged_arange() -> None:
    starts, lengths = np.array([7, 0, 100, 5]), np.array([3, 0, 1, 2])
    assert ragged_arange(starts, lengths).tolist() == [7, 8, 9, 100, 5, 6]


def rows_of(lengths: list[int]) -> Assembler:
    """Rows of these lengths, with two special tokens in at most 8."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    column = Ragged(np.full(offsets[-1], 5), offsets)
    split = Split("train", len(lengths), int(offsets[-1]), {"tokens": column})
    return Assembler(split, vocabularies.symbols("ACGT"), 8)


def test_truncation_is_told_as_it_matters() -> None:
    """Rows have at least 7 tokens. The cases: no row is truncated, few are, less than a tenth,
    more.
    """

    def told(lengths: list[int]) -> str:
        return rows_of(lengths).truncation("batch.max_tokens=8", 512)

    are = "rows are longer than batch.max_tokens=8 and are truncated"
    assert told([6] * 50) == ""
    assert told([6] * 4999 + [7]) == f"1 of the 5,000 {are}"
    assert told([6] * 1999 + [7]) == f"0.05 % of the 2,000 {are}"
    assert told([6] * 95 + [7] * 5) == f"5 % of the 100 {are}"
    tail = "; the longest needs 12 (the model takes up to 512)"
    assert told(list(range(1, 11))) == f"WARNING: 40 % of the 10 {are}{tail}"
    assert told([10] * 7) == f"WARNING: 100 % of the 7 {are}{tail}"
    assert told([6] + [10] * 4999) == f"WARNING: 99.9 % of the 5,000 {are}{tail}"
    tail = "; the longest needs 1002, 99 % of the rows need at most 12 (the model takes up to 512)"
    assert told([10] * 999 + [1000]) == f"WARNING: 100 % of the 1,000 {are}{tail}"
    most = rows_of([6] * 100_000 + [7])
    assert most.truncation("batch.max_tokens=8", 512) == ""
