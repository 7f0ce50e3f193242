"""Operations on weights, compared with small matrices written out by hand and with scipy. Also
training only a part of the weights.

C hidden size, H heads, D = C / H, V pieces, E embedding size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import NO_DROPOUT, SMOKE, Done, Forks, command, good, refused, training
from scipy import stats
from tiny import ESM, MODERNBERT
from torch import Tensor
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import surgery
from xformer.checkpoint import Checkpoint, Head
from xformer.config import Settings, validate
from xformer.convert.names import FAMILIES
from xformer.data import tokenizers, vocabularies
from xformer.data.errors import BadInput
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import create_store
from xformer.freeze import weights_matching
from xformer.model.config import ModelConfig
from xformer.recipe import AnyOperation
from xformer.study.forecast import shape_after
from xformer.surgery import random_values, registry
from xformer.surgery.registry import OPERATIONS, parse_operation, split_docstring

WORD, BIAS = "encoder.embeddings.word.weight", "mlm_head.bias"
PIECES = [*tokenizers.BERT_SPECIAL.values(), "[unused1]", "a", "##b", "Cd", "1", "##2", "é", "x"]
ENGLISH = [6, 7, 8, 12]  # a, ##b, Cd, x
SHAPE = ModelConfig(layers=4, hidden=6, heads=3, intermediate=7, max_positions=9)


def tokenizer(pieces: list[str] = PIECES) -> Tokenizer:
    return vocabularies.wordpiece({piece: i for i, piece in enumerate(pieces)}, lowercase=False)


def counted(
    config: ModelConfig = SHAPE, known: Tokenizer | None = None, head: Head | None = None
) -> Checkpoint:
    """A checkpoint whose elements all differ, because they are numbered from 1."""
    checkpoint = checkpoints.fresh(config, known or tokenizer(), seed=0)
    checkpoint = checkpoint.with_head(head or Head("mlm"), seed=0)
    sizes = [weight.numel() for weight in checkpoint.weights.values()]
    numbers = torch.arange(1.0, sum(sizes) + 1).split(sizes)
    shapes = [weight.shape for weight in checkpoint.weights.values()]
    values = [n.view(shape) for n, shape in zip(numbers, shapes, strict=True)]
    return replace(checkpoint, weights=dict(zip(checkpoint.weights, values, strict=True)))


def same(one: Checkpoint, two: Checkpoint) -> bool:
    """Whether both have the same weights, by name and by value."""
    return one.weights.keys() == two.weights.keys() and all(
        torch.equal(weight, two.weights[name]) for name, weight in one.weights.items()
    )


def differing(one: Checkpoint, two: Checkpoint) -> set[str]:
    """The names of the weights that are not the same tensor objects in both."""
    assert one.weights.keys() == two.weights.keys()
    return {name for name, weight in one.weights.items() if weight is not two.weights[name]}


def ids(store: Path, rows: list[list[int]], known: Tokenizer) -> Path:
    """Write a store with these rows of ids."""
    with create_store(store, known, {"tokens": ""}, ("tokens",)) as writer:
        with writer.split("train") as split:
            values = np.array([i for row in rows for i in row], np.int64)
            split.append_ragged("tokens", values, np.array([len(row) for row in rows]))
        writer.finish("text", [], None, {})
    return store


# ------------------------------------------------------------------------------------ layers


def test_reversing_puts_the_last_layer_first() -> None:
    before = counted()
    after = surgery.reverse_layers(before)
    assert after.config == before.config
    assert after.weights.keys() == before.weights.keys()
    for name, weight in before.weights.items():
        parts = name.split(".")
        if name.startswith("encoder.layers."):
            parts[2] = str(3 - int(parts[2]))
        assert after.weights[".".join(parts)] is weight, name  # renamed, not copied
    assert surgery.reverse_layers(after).weights == before.weights
    after.model()


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({"first": 1}, [1]),
        ({"first": 3}, [1, 2, 3]),
        ({"first": 4}, [1, 2, 3, 4]),
        ({"every": 1}, [1, 2, 3, 4]),
        ({"every": 2}, [1, 3]),
        ({"every": 3}, [1, 4]),
        ({"every": 4}, [1]),
        ({"layers": [2, 4]}, [2, 4]),
    ],
)
def test_the_layers_that_are_kept(given: dict[str, Any], numbers: list[int]) -> None:
    before = counted()
    after = surgery.keep_layers(before, **given)
    assert after.config.layers == len(numbers)
    expected = {n: w for n, w in before.weights.items() if not n.startswith("encoder.layers.")}
    for place, layer in enumerate(numbers):
        old = f"encoder.layers.{layer - 1}."
        for name, weight in before.weights.items():
            if name.startswith(old):
                expected[f"encoder.layers.{place}.{name.removeprefix(old)}"] = weight
    assert after.weights.keys() == expected.keys()
    assert all(after.weights[name] is weight for name, weight in expected.items())
    assert after.history[-1] == {"op": "keep_layers", **given}
    after.model()


@pytest.mark.parametrize("first", [1, 3, 4, 5])
def test_the_last_layers_are_reinitialised(first: int) -> None:
    """Huang et al. 2021. A from_layer after the last layer re-initialises nothing."""
    before = counted()
    after = surgery.reinit_last_layers(before, from_layer=first, seed=2)
    expected = {
        name
        for name in before.weights
        if name.startswith("encoder.layers.") and int(name.split(".")[2]) + 1 >= first
    }
    assert differing(after, before) == expected
    for name in expected:
        weight = after.weights[name]
        if "norm.weight" in name:
            assert (weight == 1).all()
        elif name.endswith("bias"):
            assert (weight == 0).all()
        else:
            assert 0 < float(weight.abs().max()) <= 0.04
            assert weight.unique().numel() == weight.numel()


@pytest.mark.parametrize(("layer", "head"), [(1, 1), (2, 3), (4, 2)])
def test_one_head_is_its_rows_and_columns(layer: int, head: int) -> None:
    """With 3 heads of size 2, head 2 has rows 2 and 3 of q, 8 and 9 of k, 14 and 15 of v."""
    before = counted()
    after = surgery.reinit_head(before, layer=layer, head=head, seed=5)
    prefix = f"encoder.layers.{layer - 1}.attention."
    names = {f"{prefix}{part}" for part in ("qkv.weight", "qkv.bias", "out.weight")}
    assert differing(after, before) == names
    own = {1: [0, 1], 2: [2, 3], 3: [4, 5]}[head]
    rows = [*own, *(6 + i for i in own), *(12 + i for i in own)]
    others = [i for i in range(18) if i not in rows]
    weight, bias, out = (
        (before.weights[prefix + part], after.weights[prefix + part])
        for part in ("qkv.weight", "qkv.bias", "out.weight")
    )
    assert torch.equal(weight[1][others], weight[0][others])
    assert (weight[1][rows].abs() > 0).all()
    assert float(weight[1][rows].abs().max()) <= 0.04
    assert torch.equal(bias[1][others], bias[0][others])
    assert (bias[1][rows] == 0).all()
    columns = [i for i in range(6) if i not in own]
    assert torch.equal(out[1][:, columns], out[0][:, columns])
    assert float(out[1][:, own].abs().max()) <= 0.04
    assert same(before, counted())  # the original is untouched


def test_a_head_acts_through_its_rows_and_columns_alone() -> None:
    """Attention adds up the heads. If the output projection is 0 for heads 1 and 2, only
    re-initialising head 3 changes the hidden states."""
    from tiny import random_batch

    before = checkpoints.fresh(
        SHAPE.model_copy(update={"vocab_size": 97, "max_positions": 17}), tokenizer(), seed=3
    )
    out = before.weights["encoder.layers.0.attention.out.weight"]
    out[:, :4] = 0  # heads 1 and 2 of 3 are cut off
    batch = random_batch()

    def states(checkpoint: Checkpoint) -> Tensor:
        return checkpoint.model().encoder(batch).detach()

    inputs = ("qkv.weight", "qkv.bias")
    for head, changes in ((1, False), (2, False), (3, True)):
        after = surgery.reinit_head(before, layer=1, head=head, seed=1)
        weights = dict(before.weights)  # but keep the old columns of the output projection
        weights |= {n: after.weights[n] for n in weights if n.endswith(inputs)}
        changed = states(replace(before, weights=weights))
        assert torch.equal(changed, states(before)) is not changes, head


# ------------------------------------------------------------------------- word embeddings


def test_clean_embeddings_touches_the_word_embeddings_alone() -> None:
    before = counted()
    after = surgery.clean_embeddings(before, seed=8)
    assert after.history[-1] == {"op": "clean_embeddings", "seed": 8, "distribution": "normal"}
    assert differing(after, before) == {WORD}
    assert abs(float(after.weights[WORD].std()) - 0.02) < 0.005
    # not the values of a from-scratch model with this seed, which would undo its training
    assert not torch.equal(
        after.weights[WORD], checkpoints.fresh(SHAPE, tokenizer(), 8).weights[WORD]
    )


def moved(checkpoint: Checkpoint, **arguments: Any) -> tuple[list[int], Checkpoint]:
    """The rows of the table that a shuffle changed, and the shuffled checkpoint."""
    after = surgery.shuffle_embeddings(checkpoint, **arguments)
    assert differing(after, checkpoint) == {WORD}
    old, new = checkpoint.weights[WORD], after.weights[WORD]
    assert sorted(map(tuple, new.tolist())) == sorted(map(tuple, old.tolist()))  # whole rows
    return [i for i in range(len(old)) if not torch.equal(old[i], new[i])], after


def test_only_english_like_pieces_exchange_their_vectors() -> None:
    seen = set()
    for seed in range(40):
        rows, after = moved(counted(), seed=seed)
        assert set(rows) <= set(ENGLISH)
        seen |= {tuple(after.weights[WORD][:, 0].tolist())}
    assert len(seen) > 15  # of 24 orders


def test_all_pieces_but_special_and_unused_ones_exchange_theirs() -> None:
    wide = SHAPE.model_copy(update={"vocab_size": len(PIECES) + 3})
    shuffled = {
        i for seed in range(30) for i in moved(counted(wide), seed=seed, english_only=False)[0]
    }
    assert shuffled == set(range(6, len(PIECES)))
    free = {"english_only": False, "keep_special": False}
    shuffled = {i for seed in range(30) for i in moved(counted(wide), seed=seed, **free)[0]}
    assert shuffled == {*range(5), *range(6, len(PIECES))}


def test_special_tokens_of_a_publisher_keep_their_vectors(tmp_path: Path) -> None:
    before = counted(SHAPE.model_copy(update={"vocab_size": 16}))
    further = before.tokenizer.pieces[7]
    before.tokenizer.published["special"] = {further: {}, "a token that is not there": {}}
    seeds = range(30)
    shuffled = {i for seed in seeds for i in moved(before, seed=seed, english_only=False)[0]}
    assert shuffled == {6, *range(8, len(PIECES))}
    assert 7 not in {i for seed in seeds for i in moved(before, seed=seed)[0]}
    store = ids(tmp_path / "s", [[6, 7, 9]], before.tokenizer)
    old = before.weights[WORD]
    new = surgery.substitute_unused(before, store=str(store)).weights[WORD]
    assert torch.equal(new[7], old[7])
    assert not any(torch.equal(row, old[7]) for row in (*new[:7], *new[8:]))


def test_english_like_pieces_of_other_vocabularies() -> None:
    bpe = vocabularies.byte_bpe(
        {
            p: i
            for i, p in enumerate(
                [*tokenizers.ROBERTA_SPECIAL.values(), "Ġ", "a", "b", "1", "Ġa", "Ġ1"]
            )
        },
        [("Ġ", "a"), ("Ġ", "1")],
    )
    known = counted(SHAPE, bpe)
    assert {i for seed in range(20) for i in moved(known, seed=seed)[0]} == {6, 7, 9}
    letters = counted(SHAPE, vocabularies.symbols("ACGT"))
    with pytest.raises(BadInput, match="needs a subword tokenizer"):
        surgery.shuffle_embeddings(letters)
    shuffled = {"english_only": False}
    assert {i for s in range(20) for i in moved(letters, seed=s, **shuffled)[0]} == {5, 6, 7, 8}


def test_a_transplant_takes_tokenizer_and_word_embeddings(tmp_path: Path) -> None:
    """The table and its bias come from the source. All other weights stay."""
    foreign, pieces = counted(), [*PIECES[:5], "the", "of", "##s"]
    english = counted(SHAPE.model_copy(update={"layers": 2, "vocab_size": 10}), tokenizer(pieces))
    english = replace(english, weights={n: -w for n, w in english.weights.items()})
    checkpoints.save(english, tmp_path / "en")
    after = surgery.transplant(foreign, source=str(tmp_path / "en"))
    assert after.config == SHAPE.model_copy(update={"vocab_size": 10})
    assert after.tokenizer.pieces == pieces
    for name, weight in after.weights.items():
        donor = english if name in (WORD, BIAS) else foreign
        assert torch.equal(weight, donor.weights[name]), name
    record = after.history[-1]
    assert (record["op"], record["source"]) == ("transplant", str(tmp_path / "en"))
    assert len(record["sha256"]) == 64
    after.model()
    checkpoints.save(after, tmp_path / "mixed")
    assert same(checkpoints.load(tmp_path / "mixed"), after)


def test_a_source_without_an_lm_head_gives_no_bias(tmp_path: Path) -> None:
    bare = checkpoints.fresh(SHAPE, tokenizer(), seed=1)
    checkpoints.save(bare, tmp_path / "en")
    after = surgery.transplant(counted(), source=str(tmp_path / "en"))
    assert (after.weights[BIAS] == 0).all()
    bias_free = surgery.transplant(bare, source=str(tmp_path / "en"))
    assert BIAS not in bias_free.weights


def test_unused_embeddings_become_copies_of_used_ones(tmp_path: Path) -> None:
    """Of 16 vectors, 6 and 9 are used. Special tokens are neither copied nor replaced."""
    before = counted(SHAPE.model_copy(update={"vocab_size": 16}))
    store = ids(tmp_path / "s", [[6, 9, 6], [9, 1]], before.tokenizer)
    after = surgery.substitute_unused(before, store=str(store), seed=4)
    assert differing(after, before) == {WORD}
    old, new = before.weights[WORD], after.weights[WORD]
    for i in [*range(5), 6, 9]:
        assert torch.equal(new[i], old[i]), i
    copies = [
        next(j for j in (6, 9) if torch.equal(new[i], old[j]))
        for i in range(16)
        if i > 4 and i not in (6, 9)
    ]
    assert sorted(copies) in ([6] * 4 + [9] * 5, [6] * 5 + [9] * 4)
    record = after.history[-1]
    assert (record["store"], record["split"], record["seed"]) == (str(store), "train", 4)


def test_usage_is_counted_after_the_mapping(tmp_path: Path) -> None:
    """A model of words is pre-trained on letters. A and C are used, as pieces 7 and 8."""
    letters = vocabularies.symbols("ACGT")
    store = ids(tmp_path / "s", [[5, 6, 5]], letters)
    mapping = np.array([0, 1, 2, 3, 4, 7, 8, 9, 10])
    before = replace(counted(), source=letters, mapping=mapping)
    after = surgery.substitute_unused(before, store=str(store))
    old, new = before.weights[WORD], after.weights[WORD]
    for i in range(5, len(old)):
        assert any(torch.equal(new[i], old[j]) for j in (7, 8)), i


# ------------------------------------------------------------------------------ all weights


def test_the_clean_twin_is_drawn_from_either_distribution() -> None:
    before = counted()
    normal, truncated = (
        surgery.clean(before, seed=3, distribution=d) for d in ("normal", "truncated")
    )
    scratch = checkpoints.fresh(SHAPE, tokenizer(), 3).with_head(Head("mlm"), 3)
    assert same(normal, scratch)
    for name, weight in truncated.weights.items():
        assert float(weight.abs().max()) <= (1 if "norm" in name else 0.04), name
    assert any(float(w.abs().max()) > 0.04 for n, w in normal.weights.items() if "norm" not in n)


def test_an_oracle_shuffle_keeps_the_elements_of_each_matrix() -> None:
    before = counted()
    after = surgery.oracle_shuffle(before, seed=6)
    assert after.weights.keys() == before.weights.keys()
    for name, old in before.weights.items():
        new = after.weights[name]
        assert new.shape == old.shape
        assert not torch.equal(new, old), name
        parts = 3 if ".qkv." in name else 1  # q, k and v are three matrices
        for one, two in zip(old.chunk(parts), new.chunk(parts), strict=True):
            assert torch.equal(one.flatten(), two.flatten().sort().values), name
    assert same(before, counted())


@pytest.mark.parametrize("size", [random_values.BUCKET, 2 * random_values.BUCKET + 1, 300_001])
def test_a_large_shuffle_keeps_its_elements_and_no_order(size: int) -> None:
    """This also holds with buckets: places are uniform, and neighbours do not stay neighbours."""
    values = torch.arange(float(size))
    after = random_values.shuffled(values.view(1, -1), 3).squeeze(0)
    assert torch.equal(after.sort().values, values)
    assert torch.equal(random_values.shuffled(values, 3), after)
    assert not torch.equal(random_values.shuffled(values, 4), after)
    tenth = size // 10  # the first tenth is spread evenly over all tenths
    places = after.argsort()[:tenth]
    counts = np.bincount((places * 10 // size).numpy(), minlength=10)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert abs(stats.spearmanr(after[:-1], after[1:]).statistic) < 5 / size**0.5


def test_all_orders_of_a_shuffle_through_buckets_are_equally_likely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_values, "BUCKET", 2)  # four elements in two buckets
    counts: dict[tuple[float, ...], int] = {}
    for seed in range(6000):
        order = tuple(random_values.shuffled(torch.arange(4.0), seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("match", ["magnitude", "variance"])
def test_a_scaled_matrix_keeps_its_size(match: Any) -> None:
    """Zhang 2021, section 5.1: each matrix gets fresh values, all multiplied by one
    number.
    """
    before = counted()
    scaled = surgery.reinit_scaled(before, match=match, seed=1)
    for name, old in before.weights.items():
        new, fresh = (
            scaled.weights[name],
            checkpoints.initialise(name, old.shape, SHAPE, 1, purpose="reinit_scaled"),
        )
        if old.ndim == 1:
            assert torch.equal(new, fresh), name
            continue
        parts = 3 if ".qkv." in name else 1
        for a, b, c in zip(old.chunk(parts), new.chunk(parts), fresh.chunk(parts), strict=True):
            one, two = (x.double().numpy() for x in (a, b))
            if match == "magnitude":
                assert np.isclose((one**2).sum(), (two**2).sum(), rtol=1e-5), name
            else:
                assert np.isclose(one.var(), two.var(), rtol=1e-5), name
            ratio = b / c
            assert torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=1e-5), name


def test_a_matrix_of_zeros_stays_one() -> None:
    before = counted()
    name = "encoder.layers.0.mlp.up.weight"
    before.weights[name].zero_()
    after = surgery.reinit_scaled(before, match="variance")
    assert (after.weights[name] == 0).all()


# ---------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 1000])
def test_a_truncated_normal_has_its_bounds(size: int) -> None:
    for seed in range(20):
        values = checkpoints.truncated_normal(
            torch.Size([size]), torch.Generator().manual_seed(seed)
        )
        assert values.shape == (size,)
        assert float(values.abs().max()) <= 2


def test_a_truncated_normal_is_scipys() -> None:
    """As in Devlin et al., the standard deviation is 0.02 before truncation at ±0.04."""
    config = SHAPE.model_copy(update={"initializer_range": 0.02})
    weight = checkpoints.initialise("x.weight", torch.Size([500, 400]), config, 1, "truncated")
    values = weight.flatten().double().numpy()
    oracle = stats.truncnorm(-2, 2, loc=0, scale=0.02)
    assert stats.kstest(values, oracle.cdf).pvalue > 1e-3
    assert np.isclose(values.std(), oracle.std(), rtol=0.01)
    assert 0.0399 < np.abs(values).max() <= 0.04
    # a mistake in redrawing rejected values would show in the tails
    tail = np.abs(values)[np.abs(values) > 0.035]
    expected = 2 * oracle.sf(0.035) * len(values)
    assert abs(len(tail) - expected) < 5 * expected**0.5
    normal = checkpoints.initialise("x.weight", torch.Size([500, 400]), config, 1).flatten()
    assert stats.kstest(normal.double().numpy(), stats.norm(0, 0.02).cdf).pvalue > 1e-3


# ------------------------------------------------------------------------ lists and history

RANDOM = [
    "clean(seed=7)",
    "clean_embeddings(seed=7)",
    "shuffle_embeddings(seed=7, english_only=false)",
    "reinit_scaled(seed=7, match=variance)",
    "oracle_shuffle(seed=7)",
    "reinit_last_layers(seed=7, from_layer=2)",
    "reinit_head(seed=7, layer=2, head=1)",
]


@pytest.mark.parametrize("text", RANDOM)
def test_a_seed_gives_the_same_numbers_every_time(text: str) -> None:
    before, operation = counted(), parse_operation(text)
    once, twice = (surgery.apply(before, [operation]) for _ in range(2))
    other = surgery.apply(before, [operation.model_copy(update={"seed": 8})])
    unnamed = surgery.apply(before, [operation.model_copy(update={"seed": None})], seed=7)
    assert same(once, twice)
    assert same(once, unnamed)
    assert once.history == unnamed.history
    assert not same(once, other)
    assert not same(once, before)


def test_an_operation_draws_the_same_numbers_anywhere_in_a_list() -> None:
    """Its numbers depend on its own seed, not on what was drawn before it."""
    before = counted()
    alone = surgery.reinit_head(before, layer=2, head=1, seed=7)
    for changed in (
        surgery.clean(before, seed=1),
        surgery.oracle_shuffle(before, seed=7),
        surgery.reverse_layers(before),
        surgery.reinit_head(before, layer=1, head=2, seed=7),
    ):
        after = surgery.reinit_head(changed, layer=2, head=1, seed=7)
        for part, axis in (("qkv.weight", 0), ("out.weight", 1)):
            name = f"encoder.layers.1.attention.{part}"
            one, two = (c.weights[name].narrow(axis, 0, 2) for c in (after, alone))
            assert torch.equal(one, two)


def test_operations_with_one_seed_do_not_share_their_numbers() -> None:
    before, name = counted(), "encoder.layers.2.mlp.up.weight"
    drawn = [
        surgery.clean(before, seed=7),
        surgery.reinit_last_layers(before, from_layer=1, seed=7, distribution="normal"),
    ]
    values = torch.stack([checkpoint.weights[name].flatten() for checkpoint in drawn])
    assert abs(np.corrcoef(values.numpy())[0, 1]) < 0.6


def test_the_order_matters_and_is_kept() -> None:
    before = counted()
    both = [parse_operation(text) for text in ("keep_layers(first=2)", "reverse_layers")]
    one, other = surgery.apply(before, both), surgery.apply(before, both[::-1])
    name = "encoder.layers.0.mlp.up.weight"
    assert torch.equal(one.weights[name], before.weights["encoder.layers.1.mlp.up.weight"])
    assert torch.equal(other.weights[name], before.weights["encoder.layers.3.mlp.up.weight"])
    added = [record["op"] for record in one.history[len(before.history) :]]
    assert added == ["keep_layers", "reverse_layers"]
    assert surgery.apply(before, []) is before


def test_an_operation_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "OPERATIONS", dict(OPERATIONS))

    def mine(checkpoint: Checkpoint, share: float) -> Checkpoint:
        """Change a share of the weights."""
        return checkpoint

    with pytest.raises(TypeError, match=r"operation mine: the argument share needs .* 'Args:'"):
        registry.operation(mine)
    mine.__doc__ = "Change a share of the weights.\n\nArgs:\n    share: How many."
    registry.operation(mine)
    registry.operation(mine)  # as when a cell of a notebook runs again
    assert parse_operation("mine(share=0.5)").arguments == {"share": 0.5}
    mine.__name__ = "clean"
    with pytest.raises(TypeError, match=r"an operation clean already, in xformer.surgery"):
        registry.operation(mine)


def test_the_signature_is_the_schema_and_the_docstring_is_the_help() -> None:
    for name, (function, schema, _) in OPERATIONS.items():
        about, sentences = split_docstring(function)
        parameters = inspect.signature(function).parameters
        first, *arguments = parameters
        assert (function.__name__, first) == (name, "checkpoint")
        assert getattr(surgery, name).__doc__ == function.__doc__
        assert set(arguments) == set(sentences) == set(schema.model_fields) - {"op"}
        assert schema.__doc__ == about.split("\n\n")[0]
        for key, field in schema.model_fields.items():
            if key != "op":
                assert field.description == sentences[key]
            if key not in ("op", "seed") and not field.is_required():
                assert field.default == parameters[key].default, (name, key)


def test_a_call_in_python_is_checked_and_recorded_like_a_recipe() -> None:
    before = counted()
    called = surgery.keep_layers(surgery.clean(before, distribution="truncated"), layers=(1, 3))
    recipe = [{"op": "clean", "distribution": "truncated"}, {"op": "keep_layers", "layers": [1, 3]}]
    listed = surgery.apply(before, validate(Listed, {"surgery": recipe}).surgery)
    assert same(called, listed)
    assert called.history == listed.history
    assert [record["op"] for record in called.history[-2:]] == ["clean", "keep_layers"]
    with pytest.raises(BadInput, match="reinit_head: layer=9: the model has layers 1 to 4"):
        surgery.reinit_head(before, layer=9, head=1)
    with pytest.raises(BadInput, match="clean: distribution='uniform'"):
        surgery.clean(before, distribution="uniform")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="clean: seed=-1"):
        surgery.clean(before, seed=-1)
    with pytest.raises(TypeError, match="frist"):
        surgery.keep_layers(before, frist=2)  # type: ignore[call-arg]


class Listed(Settings):
    """A recipe that holds only operations."""

    surgery: tuple[AnyOperation, ...] = ()


# --------------------------------------------------------------------------------- families

LAYERED = (
    "reverse_layers",
    "keep_layers(first=1)",
    "reinit_last_layers(from_layer=1)",
    "reinit_head(layer=1, head=1)",
)
ALL = (
    *LAYERED,
    "clean",
    "clean_embeddings",
    "shuffle_embeddings",
    "reinit_scaled(match=variance)",
    "oracle_shuffle",
)
KINDS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"first_position": 2, "token_types": 1},
    "xlm-roberta": {"first_position": 2, "token_types": 1},
    "camembert": {"first_position": 2, "token_types": 1},
    "albert": {"shared_layers": True, "embedding": 4},
    "distilbert": {"token_types": 0, "pooler": "relu"},
    "modernbert": {**MODERNBERT, "global_every": 3},
    "esm": ESM,
    "pre-LN": {"norm": "pre"},
    "plus": {"positions": "sinusoidal", "norm_form": "deviation", "pooler": "none"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ALL)
def test_operations_on_every_family(kind: str, operation: str) -> None:
    assert set(FAMILIES) <= set(KINDS)
    head = Head("classify", ("no", "yes"))
    before = counted(SHAPE.model_copy(update=KINDS[kind]), head=head)
    if kind == "albert" and operation in LAYERED:
        with pytest.raises(BadInput, match=r"one set of weights \(ALBERT\)"):
            surgery.apply(before, [parse_operation(operation)])
        return
    if kind == "modernbert" and operation == "reverse_layers":
        message = (
            "layer 4 cannot become layer 1: the first layer of this model, and no other, has no "
            "LayerNorm before attention; choose layers that begin with layer 1, or "
            ".*first_norm=true"
        )
        with pytest.raises(BadInput, match=message):
            surgery.reverse_layers(before)
        return
    after = surgery.apply(before, [parse_operation(operation)])
    assert not same(after, before)
    model = after.model()
    assert len(model.encoder.layers) == after.config.stored_layers
    final = [name for name in after.weights if name.startswith("encoder.final_norm")]
    assert bool(final) == (SHAPE.model_copy(update=KINDS[kind]).norm == "pre")


def test_layers_keep_their_windows() -> None:
    """Layers that would attend to more or less than they were trained with are refused, also in a
    plan."""
    shape = {**KINDS["modernbert"], "layers": 8, "first_norm": True}  # 1, 4 and 7 see the whole row
    before = counted(SHAPE.model_copy(update=shape))
    kept = surgery.keep_layers(before, layers=(1, 2, 6, 7))
    kept.model()
    name = "encoder.layers.{}.attention.qkv.weight"
    assert torch.equal(kept.weights[name.format(3)], before.weights[name.format(6)])
    refused = {
        "keep_layers(layers=[1, 3, 4])": "layer 4 attends to the whole row and cannot become",
        "keep_layers(layers=[2, 3])": "layer 2 has a window and cannot become layer 1",
        "reverse_layers": "layer 8 has a window and cannot .*pre-train with model.global_every=1",
    }
    for operation, message in refused.items():
        steps = [parse_operation(operation)]
        with pytest.raises(BadInput, match=message):
            surgery.apply(before, steps)
        with pytest.raises(BadInput, match=message):
            shape_after(before.config, steps)


def test_query_key_and_value_stay_three_matrices() -> None:
    """Shuffles and scales treat them separately, also without biases, and reinit_head finds its
    rows."""
    before = counted(SHAPE.model_copy(update=KINDS["modernbert"]))
    name = "encoder.layers.1.attention.qkv.weight"
    after = surgery.oracle_shuffle(before, seed=1).weights[name]
    for one, two in zip(before.weights[name].chunk(3), after.chunk(3), strict=True):
        assert torch.equal(one.flatten().sort().values, two.flatten().sort().values)
    fresh = surgery.reinit_head(before, layer=2, head=3)
    assert differing(before, fresh) == {name, "encoder.layers.1.attention.out.weight"}
    changed = (fresh.weights[name] != before.weights[name]).any(1)
    assert changed.tolist() == [False, False, False, False, True, True] * 3


def test_surgery_of_layers_leaves_out_the_contact_head() -> None:
    before = counted(SHAPE.model_copy(update=ESM))
    contact = {"contact_head.weight": torch.ones(1, 12), "contact_head.bias": torch.ones(1)}
    before = replace(before, weights={**before.weights, **contact})
    before.model()
    assert not contact.keys() & surgery.keep_layers(before, first=2).weights.keys()
    surgery.keep_layers(before, first=2).model()
    assert contact.keys() < surgery.clean_embeddings(before).weights.keys()


def test_a_transplant_brings_its_own_mask_token(tmp_path: Path) -> None:
    before = counted(SHAPE.model_copy(update=ESM))
    other = counted(known=vocabularies.esm([*tokenizers.ESM_SPECIAL.values(), "A", "C"]))
    pieces = other.tokenizer
    assert pieces.special["mask"] == 4
    order = [*pieces.pieces[:4], "A", "C", "<mask>"]
    checkpoints.save(counted(known=vocabularies.esm(order)), tmp_path / "other")
    after = surgery.transplant(before, source=str(tmp_path / "other"))
    assert (before.config.zeroed_token, after.config.zeroed_token) == (4, 6)


@pytest.mark.parametrize("operation", [o for o in ALL if o != "clean"])
def test_a_hilbert_cnn_is_refused(operation: str) -> None:
    config = ModelConfig(architecture="hilbert_cnn", kmer=2, max_positions=63)
    made = checkpoints.fresh(config, vocabularies.symbols("ACGT"), seed=1)
    with pytest.raises(BadInput, match="this model is a Hilbert-CNN"):
        surgery.apply(made, [parse_operation(operation)])


# ------------------------------------------------------------------------- the command line


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoints.save(counted(), tmp_path / "old")
    return tmp_path / "old"


Operate = Callable[..., Done]


@pytest.fixture(scope="module")
def operate(forks: Forks) -> Operate:
    return lambda *arguments: forks.run("-m", "xformer.surgery", *arguments)


def test_the_command_line(forks: Forks, saved: Path, tmp_path: Path) -> None:
    """The command is run as a user types it."""
    given = [
        "reverse_layers",
        "shuffle_embeddings(seed=1, keep_special=true, english_only=true)",
        "keep_layers(layers=[1, 4])",
        "reinit_scaled(match=magnitude)",
    ]
    done = good(command("-m", "xformer.surgery", saved, tmp_path / "new", *given, "--seed", "9"))
    expected = surgery.shuffle_embeddings(surgery.reverse_layers(counted()), seed=1)
    expected = surgery.keep_layers(expected, layers=(1, 4))
    expected = surgery.reinit_scaled(expected, match="magnitude", seed=9)
    made = checkpoints.load(tmp_path / "new")
    assert same(made, expected)
    assert made.history == expected.history
    assert made.config == expected.config
    assert [line.split(" ")[0] for line in done.out.splitlines()[:4]] == [
        "reverse_layers",
        "shuffle_embeddings",
        "keep_layers",
        "reinit_scaled",
    ]
    assert "34 weights, all of them with new values" in done.out.splitlines()[4]
    shown = good(forks.run("-m", "xformer.convert", "inspect", tmp_path / "new")).out
    for line in (
        "reverse_layers",
        "shuffle_embeddings seed=1 keep_special=True english_only=True",
        "keep_layers layers=[1, 4]",
        "reinit_scaled seed=9 match=magnitude",
    ):
        assert line in shown, shown


def test_unchanged_weights_are_not_loaded(saved: Path, tmp_path: Path) -> None:
    """The weights are mapped from the file; changing one in place leaves the file as it is."""
    file = (saved / "model.safetensors").read_bytes()
    opened = checkpoints.load(saved)
    after = surgery.shuffle_embeddings(surgery.reverse_layers(opened))
    mapped = {weight.data_ptr() for weight in opened.weights.values()}
    assert sum(weight.data_ptr() not in mapped for weight in after.weights.values()) == 1
    opened.weights[WORD].zero_()
    assert (saved / "model.safetensors").read_bytes() == file


BAD_INPUT: list[tuple[list[str], list[str]]] = [
    (["revers_layers"], ["unknown operation 'revers_layers'", "did you mean reverse_layers?"]),
    (["xyz"], ["unknown operation 'xyz'", "the operations are clean,"]),
    (["keep_layers(frist=2)"], ["keep_layers: unknown key frist", "did you mean first?"]),
    (["keep_layers"], ["keep_layers takes exactly one of first, every and layers"]),
    (["keep_layers(first=2, every=2)"], ["keep_layers takes exactly one of"]),
    (["keep_layers(layers=[1,4)"], ["unbalanced brackets"]),
    (["keep_layers(first=true)"], ["first", "integer"]),
    (["keep_layers(2)"], ["keep_layers: '2' is not argument=value", "first=..., every=..."]),
    (["reverse_layers(1)"], ["'1' is not argument=value; it takes no arguments"]),
    (["keep_layers(first=5)"], ["keep_layers: first=5: the model has layers 1 to 4"]),
    (["keep_layers(first=0)"], ["first=0: the model has layers 1 to 4"]),
    (["keep_layers(every=5)"], ["every=5: the model has layers 1 to 4"]),
    (["keep_layers(layers=[1,5])"], ["layers=5: the model has layers 1 to 4"]),
    (
        ["keep_layers(layers=[2,1])"],
        ["layers=[2, 1]: give at least one layer, each once, in ascending"],
    ),
    (["keep_layers(layers=[])"], ["keep_layers: layers=[]: give at least one layer"]),
    (["keep_layers(first=x)"], ["keep_layers: first='x'", "integer"]),
    (["keep_layers(first=2"], ["'keep_layers(first=2' is not of the form name or name("]),
    (["keep_layers(first=2, first=3)"], ["first is given twice"]),
    (["keep_layers(first=2)", "reinit_head(layer=3, head=1)"], ["layer=3", "layers 1 to 2"]),
    (["reinit_head(layer=1)"], ["reinit_head: head must be given"]),
    (["reinit_head(layer=5, head=1)"], ["layer=5: the model has layers 1 to 4"]),
    (["reinit_head(layer=1, head=4)"], ["head=4: a layer has heads 1 to 3"]),
    (["reinit_head(layer=0, head=1)"], ["layer=0: the model has layers 1 to 4"]),
    (["reinit_last_layers(from_layer=6)"], ["from_layer=6: give 1 to 5", "5 re-initialises none"]),
    (["reinit_scaled(match=norm)"], ["reinit_scaled: match='norm'", "'magnitude' or 'variance'"]),
    (["clean(seed=-1)"], ["clean: seed=-1", "greater than or equal to 0"]),
    (["clean(distribution=uniform)"], ["distribution='uniform'", "'normal' or 'truncated'"]),
    (["shuffle_embeddings(keep_special=false)"], ["needs english_only=false"]),
    (["shuffle_embeddings(keep_special=maybe)"], ["keep_special='maybe'", "true or false"]),
    (["transplant(source={tmp}/none)"], ["transplant", "none does not exist"]),
    (["transplant(source={tmp}/wide)"], ["word embeddings 9 wide, the checkpoint 6"]),
    (["transplant(source={tmp}/cnn)"], ["cnn has no word embeddings"]),
    (["substitute_unused(store={tmp}/none)"], ["substitute_unused", "is not a store"]),
    (["substitute_unused(store={tmp}/letters)"], ["was made with a different tokenizer"]),
    (["substitute_unused(store={tmp}/full)"], ["uses every piece: there is none to replace"]),
    (["substitute_unused(store={tmp}/unknown)"], ["contains only special tokens"]),
    (["substitute_unused(store={tmp}/full, split=test)"], ["no split 'test'; it has train"]),
    ([], ["OPERATION", "--help"]),
    (["clean", "--seed", "-1"], ["argument --seed: -1 is not allowed; it must be at least 0"]),
]


def test_bad_input_costs_one_line(saved: Path, tmp_path: Path) -> None:
    """Runs main in this process: importing torch for each case would take a minute."""
    from xformer.surgery.__main__ import main

    checkpoints.save(
        checkpoints.fresh(SHAPE.model_copy(update={"hidden": 9}), tokenizer(), 1), tmp_path / "wide"
    )
    cnn = ModelConfig(architecture="hilbert_cnn", kmer=2, max_positions=63)
    checkpoints.save(checkpoints.fresh(cnn, vocabularies.symbols("ACGT"), 1), tmp_path / "cnn")
    ids(tmp_path / "letters", [[5, 6]], vocabularies.symbols("ACGT"))
    ids(tmp_path / "full", [list(range(5, len(PIECES)))], tokenizer())
    ids(tmp_path / "unknown", [[1, 1]], tokenizer())
    before = sorted(tmp_path.iterdir())
    for given, expected in BAD_INPUT:
        arguments = [argument.format(tmp=tmp_path) for argument in given]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "sys.argv", ["xformer.surgery", str(saved), str(tmp_path / "new"), *arguments]
            )
            with pytest.raises(BadInput) as caught:
                main()
        message = str(caught.value)
        assert "\n" not in message
        for word in expected:
            assert word in message, (given, message)
        assert sorted(tmp_path.iterdir()) == before, given


def test_outputs_that_are_refused(operate: Operate, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("x")
    checkpoints.save(counted(), tmp_path / "deep/new")
    refused(operate(saved, saved, "clean"), "old exists", "--overwrite")
    refused(operate(saved, saved, "clean", "--overwrite"), "contains the input")
    refused(operate(saved, tmp_path / "other", "clean", "--overwrite"), "not written by this")
    own = tmp_path / "run/checkpoints/step_5"
    checkpoints.save(counted(), own)
    (tmp_path / "run/config.json").write_text('{"identity": {}}')
    refused(operate(saved, own, "clean", "--overwrite"), "only the run itself writes")
    probe = checkpoints.load(saved).with_head(Head("classify", ("a", "b"), layer=2))
    with pytest.raises(BadInput, match="the head is a probe of layer 2, but the result has 1"):
        surgery.keep_layers(probe, first=1)
    refused(operate(tmp_path / "none", tmp_path / "new", "clean"), "none does not exist")
    assert same(checkpoints.load(saved), counted())
    good(operate(saved, tmp_path / "deep/new", "clean", "--overwrite"))
    assert not same(checkpoints.load(tmp_path / "deep/new"), counted())
    assert (tmp_path / "other/thesis.tex").read_text() == "x"


@pytest.mark.parametrize(
    "out", ["micro/english", "./micro/../micro/english", "{tmp}/micro/english"]
)
def test_the_name_of_a_packaged_checkpoint_is_refused(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on micro/english would mean another model in this directory."""
    from xformer.surgery.__main__ import main

    monkeypatch.chdir(tmp_path)
    line = ["surgery", "micro/english", out.format(tmp=tmp_path), "reverse_layers", "--overwrite"]
    monkeypatch.setattr("sys.argv", line)
    with pytest.raises(BadInput, match="micro/english is the name of a checkpoint that comes with"):
        main()
    assert not list(tmp_path.iterdir())


def test_the_summary_says_what_is_new_and_what_is_gone() -> None:
    from xformer.surgery.__main__ import summary

    before = counted(SHAPE.model_copy(update=ESM))
    contact = {"contact_head.weight": torch.ones(1, 12), "contact_head.bias": torch.ones(1)}
    before = replace(before, weights={**before.weights, **contact})
    count = len(before.weights)
    reversed_layers = summary(before, surgery.reverse_layers(before))
    assert (
        f" {count - 2} weights, 0 of them with new values, without contact_head" in reversed_layers
    )
    clean = summary(before, surgery.clean_embeddings(before))
    assert clean.endswith(f" {count} weights, 1 of them with new values")


def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(
    operate: Operate, saved: Path, tmp_path: Path
) -> None:
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "model.safetensors").write_bytes(content)
    refused(operate(saved, tmp_path / "new", "reverse_layers"), "damaged", "checksum")
    assert not (tmp_path / "new").exists()


def test_help_names_every_operation_and_argument(operate: Operate) -> None:
    lines = good(operate("--help")).out.splitlines()
    assert max(map(len, lines)) <= 100
    for name, known in OPERATIONS.items():
        start = next(i for i, line in enumerate(lines) if line.strip().split("(")[0] == name)
        own = lines[start : start + 20]
        for key in set(known.schema.model_fields) - {"op"}:
            assert any(line.strip().startswith(f"{key}: ") for line in own), (name, key)


# -------------------------------------------------------------------- recipes and train.only


def test_a_recipe_operates_on_what_it_starts_from(
    forks: Forks, learned: dict[str, Path], data: Toys, tmp_path: Path
) -> None:
    """It reverses the layers, re-initialises one head and keeps half of the layers. The run trains,
    and its history lists the operations.
    """
    listed = (
        '[{op="reverse_layers"}, {op="reinit_head", layer=2, head=1, seed=5}, '
        '{op="keep_layers", every=2}]'
    )
    line = training(
        SMOKE,
        data.text,
        tmp_path / "run",
        f"init={learned['text']}",
        f"surgery={listed}",
        "train.steps=2",
        "seed=3",
    )
    good(forks.run(*[part for part in line if not part.startswith("model.layers")]))
    made = checkpoints.load(tmp_path / "run")
    assert made.config.layers == 1
    assert made.history[-4:-1] == (
        {"op": "reverse_layers"},
        {"op": "reinit_head", "seed": 5, "layer": 2, "head": 1, "distribution": "truncated"},
        {"op": "keep_layers", "every": 2},
    )


# Python that stops this process after three steps
AT_STEP = """
import os, signal
from xformer.monitor import Monitor
advance = Monitor.advance
def stopping(self, done):
    advance(self, done)
    if done == 3:
        os.kill(os.getpid(), signal.SIGTERM)
Monitor.advance = stopping
"""


def started(learned: dict[str, Path], data: Toys, run: Path, *more: str) -> list[str]:
    return training(
        SMOKE,
        data.text,
        run,
        f"init={learned['text']}",
        *NO_DROPOUT,
        "train.steps=6",
        "optim.weight_decay=0.5",
        *more,
    )


WORDS_ONLY = 'train.only=["embeddings.word", "mlm_head"]'


def test_weights_that_are_not_trained_keep_every_bit(
    forks: Forks, learned: dict[str, Path], data: Toys, tmp_path: Path
) -> None:
    """Only word embeddings and MLM head are trained (Chiang & Lee 2020, section 4.4). They share
    one table.
    """
    done = good(forks.run(*started(learned, data, tmp_path / "run", WORDS_ONLY)))
    before, after = (checkpoints.load(p) for p in (learned["text"], tmp_path / "run"))
    changed = {
        name
        for name, weight in before.weights.items()
        if weight.numpy().tobytes() != after.weights[name].numpy().tobytes()
    }
    assert changed == {
        WORD,
        BIAS,
        *(
            f"mlm_head.{part}"
            for part in ("dense.weight", "dense.bias", "norm.weight", "norm.bias")
        ),
    }
    assert after.history[-1]["only"] == ["embeddings.word", "mlm_head"]
    some, every = (
        sum(w.numel() for n, w in before.weights.items() if n in names)
        for names in (changed, set(before.weights))
    )
    assert f"trains {some:,} of {every:,} parameters" in done.err + done.out
    state = checkpoints.load_tensors(
        checkpoints.resolve(tmp_path / "run") / "optimizer.safetensors"
    )
    assert {name.partition(".")[2] for name in state if name != "step"} == changed


def test_partial_training_resumes_exactly(
    forks: Forks, learned: dict[str, Path], data: Toys, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    good(forks.run(*started(learned, data, whole, WORDS_ONLY)))
    stopped = forks.run(*started(learned, data, cut, WORDS_ONLY), before=AT_STEP)
    assert stopped.status == 128 + 15, stopped
    refused(forks.run(*started(learned, data, cut)), "was made with other settings", "train.only")
    good(forks.run(*started(learned, data, cut, WORDS_ONLY)))
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, two = (checkpoints.resolve(run) / name for run in (whole, cut))
        assert one.read_bytes() == two.read_bytes(), name


@pytest.mark.parametrize(
    ("pattern", "chosen_names"),
    [
        ("embeddings", {"word", "position", "segment", "norm.weight", "norm.bias"}),
        ("encoder.embeddings.word", {"word"}),
        ("embeddings.w*", {"word"}),
        ("embeddings.word.weight", {"word"}),
    ],
)
def test_patterns_match_names_and_their_beginnings(pattern: str, chosen_names: set[str]) -> None:
    names = weights_matching(counted(), [pattern])
    short = {n.removeprefix("encoder.embeddings.").removesuffix(".weight") for n in names}
    assert short == {n.removesuffix(".weight") for n in chosen_names}


def test_a_pattern_for_one_layer_and_for_a_part_of_all() -> None:
    wide = counted(SHAPE.model_copy(update={"layers": 12}))
    first = weights_matching(wide, ["layers.1"])  # this must not match layers 10 and 11
    assert {name.split(".")[2] for name in first} == {"1"}
    biases = weights_matching(wide, ["layers.*.attention.*.bias", "mlm_head"])
    assert len([n for n in biases if "attention" in n]) == 24
    assert weights_matching(wide, []) == set(wide.weights)


def test_patterns_that_are_refused(
    forks: Forks, learned: dict[str, Path], data: Toys, tmp_path: Path
) -> None:
    for given, expected in (
        ('["embedding.word"]', ["'embedding.word'", "did you mean embeddings.word?"]),
        ('["mlmhead"]', ["'mlmhead'", "did you mean mlm_head?"]),
        ('["layers.2"]', ["'layers.2' matches no weight", "did you mean layers."]),
        ('["zzz"]', ["'zzz' matches no weight; there are embeddings, layers, mlm_head"]),
        ("mlm_head", ["train.only='mlm_head'", "list"]),
    ):
        line = started(learned, data, tmp_path / "run", f"train.only={given}")
        refused(forks.run(*line), *expected)
        assert list(tmp_path.iterdir()) == []


def test_frozen_new_weights_are_named(
    forks: Forks, learned: dict[str, Path], data: Toys, tmp_path: Path
) -> None:
    line = training(
        "recipes/finetune/classify.toml",
        data.classes,
        tmp_path / "run",
        f"init={learned['text']}",
        "train.epochs=0.1",
        'train.only=["task_head"]',
    )
    done = good(forks.run(*line))
    assert "frozen by train.only although newly initialised: pooler" in done.err + done.out
    after = checkpoints.load(tmp_path / "run").weights
    before = checkpoints.load(learned["text"]).weights
    shared = [name for name in after if name in before]
    assert shared
    assert all(torch.equal(after[name], before[name]) for name in shared)
