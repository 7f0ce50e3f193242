"""ModernBERT and ESM-2: what their configs and files may say, and what is refused.

test_families.py compares their outputs and gradients with `transformers`, and test_export.py their
files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import trainable
from safetensors.torch import load_file, save_file
from tiny import (
    AMINO_ACIDS,
    ESM,
    LENGTHS,
    LONGEST,
    MODERNBERT,
    PIECES,
    distance,
    lengths_of,
    packed,
    padded,
    random_batch,
    tiny,
)

from xformer import checkpoint as checkpoints
from xformer import surgery
from xformer.analysis.cost import parameters
from xformer.checkpoint import Head
from xformer.config import merge, read_recipe
from xformer.convert import hf
from xformer.convert.describe import describe
from xformer.convert.modern import PLACE
from xformer.cost import forward_flops
from xformer.data import vocabularies
from xformer.data.batch import Workload
from xformer.data.errors import BadInput
from xformer.data.files import read_json, write_json
from xformer.model.config import NEWER, ModelConfig
from xformer.ops.rotary import frequencies
from xformer.study.reading import read_study

SIZES = {"layers": 4, "hidden": 36, "heads": 3, "intermediate": 20, "max_positions": LONGEST}
FREQUENCIES = "esm.rotary_embeddings.inv_freq"
ROOT = Path(__file__).parents[1]


def changed_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json. The value ... removes a key."""
    file = directory / "config.json"
    config = {**read_json(file), **changes}
    write_json(file, {key: value for key, value in config.items() if value is not ...})


def changed_tensors(directory: Path, **changes: torch.Tensor) -> None:
    """Replace tensors; in their names `__` stands for a dot."""
    file = directory / "model.safetensors"
    renamed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({**load_file(file), **renamed}, file, metadata={"format": "pt"})


# ------------------------------------------------------------------------------------- configs


def test_a_config_of_an_earlier_version_means_the_same(tmp_path: Path) -> None:
    """Before version 5, transformers wrote the bases and the rhythm of the layers under other
    keys."""
    shape = {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 50.0}
    tiny("ModernBertForMaskedLM", tmp_path, **shape)
    new = hf.from_hf(tmp_path).checkpoint.config
    assert (new.rotary_base, new.local_rotary_base) == (500.0, 50.0)
    assert (new.window, new.global_every) == (3, 2)
    changed_config(tmp_path, rope_parameters=..., layer_types=..., **shape)
    assert hf.from_hf(tmp_path).checkpoint.config == new
    changed_config(tmp_path, local_rope_theta=None)  # null: as in the other layers
    assert hf.from_hf(tmp_path).checkpoint.config.local_rotary_base == 500.0


def test_an_export_is_read_by_earlier_versions(tmp_path: Path) -> None:
    tiny("ModernBertForMaskedLM", tmp_path / "source", local_attention=10)
    hf.to_hf(hf.from_hf(tmp_path / "source").checkpoint, tmp_path / "theirs")
    written = read_json(tmp_path / "theirs/config.json")
    expected = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": 10}
    assert expected.items() <= written.items()
    assert written["global_attn_every_n_layers"] == 3
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert written["layer_types"] == kinds


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "biases": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, attention_bias=True),
        "attention_bias=True is not supported; it must be False",
    ),
    "another rhythm": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, layer_types=["sliding_attention"] * 4),
        "layer_types must name full_attention for every n-th layer",
    ),
    "no layer that attends to the whole row": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, layer_types=..., global_attn_every_n_layers=0),
        "global_attn_every_n_layers=0 must be at least 1",
    ),
    "half a layer": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, layer_types=..., global_attn_every_n_layers=1.5),
        "global_attn_every_n_layers=1.5 must be at least 1",
    ),
    "layers without end": (  # a list of them would fill the memory
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, num_hidden_layers=10**15),
        "layer_types must name full_attention for every n-th layer",
    ),
    "scaled positions": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, rope_parameters={"full_attention": {"rope_type": "yarn"}}),
        "rope_type='yarn' is not supported; it must be 'default'",
    ),
    "scaled positions of an earlier version": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, rope_scaling={"factor": 2.0}),
        "rope_scaling={'factor': 2.0} is not supported; it must be null",
    ),
    "different dropout": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, mlp_dropout=0.2),
        "mlp_dropout=0.2 must be equal to embedding_dropout=0.0",
    ),
    "a decoder without a bias": (
        "ModernBertForMaskedLM",
        lambda d: changed_config(d, decoder_bias=False),
        "decoder_bias=False is not supported; it must be True",
    ),
    "a head with a bias": (
        "ModernBertForSequenceClassification",
        lambda d: changed_config(d, classifier_bias=True),
        "classifier_bias=True is not supported; it must be False",
    ),
    "a head with another activation": (
        "ModernBertForTokenClassification",
        lambda d: changed_config(d, classifier_activation="relu"),
        "classifier_activation='relu' must be equal to hidden_activation='gelu'",
    ),
    "a window of one token": (
        "ModernBertModel",
        lambda d: changed_config(d, local_attention=1),
        "local_attention=1 is not supported; it must be a number of tokens, at least 2",
    ),
    "another pooling": (
        "ModernBertForSequenceClassification",
        lambda d: changed_config(d, classifier_pooling="max"),
        "classifier_pooling='max' is not supported; it must be 'cls' or 'mean'",
    ),
    "ESM-1": (
        "EsmForMaskedLM",
        lambda d: changed_config(d, position_embedding_type="absolute"),
        "position_embedding_type='absolute' is not supported; it must be 'rotary'",
    ),
    "a norm of embeddings": (
        "EsmForMaskedLM",
        lambda d: changed_config(d, emb_layer_norm_before=True),
        "emb_layer_norm_before=True is not supported",
    ),
    "other frequencies": (
        "EsmForMaskedLM",
        lambda d: changed_tensors(d, esm__rotary_embeddings__inv_freq=torch.ones(6)),
        "does not hold the rotary frequencies of rope_theta=10000",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    kind, spoil, message = REFUSED[case]
    tiny(kind, tmp_path)
    hf.from_hf(tmp_path)
    spoil(tmp_path)
    with pytest.raises(BadInput, match=r"(?s).*") as refused:
        hf.from_hf(tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_of_heads_do_not_matter_without_the_head(tmp_path: Path) -> None:
    changes = {"decoder_bias": False, "classifier_activation": "relu", "classifier_bias": True}
    tiny("ModernBertModel", tmp_path / "base", **changes)
    assert hf.from_hf(tmp_path / "base").checkpoint.head is None
    tiny("ModernBertForTokenClassification", tmp_path / "tag", decoder_bias=False)
    assert hf.from_hf(tmp_path / "tag").lacking == ["MLM head"]


def test_new_classifiers_pool_as_the_base_model_says(tmp_path: Path) -> None:
    """The published config of ModernBERT says `mean`, which only its classifiers use."""
    tiny("ModernBertForMaskedLM", tmp_path)
    changed_config(tmp_path, classifier_pooling="mean")
    imported = hf.from_hf(tmp_path).checkpoint
    assert imported.config.pooling == "mean"
    made = imported.with_head(Head("classify", ("a", "b")), 1)
    for name, checkpoint in (("mlm", imported), ("classify", made)):
        hf.to_hf(checkpoint, tmp_path / name)
        assert read_json(tmp_path / name / "config.json")["classifier_pooling"] == "mean"
    assert hf.from_hf(tmp_path / "classify").checkpoint.config == made.config


def test_a_bert_that_reads_means_is_not_exported(tmp_path: Path) -> None:
    tiny("BertForSequenceClassification", tmp_path / "theirs")
    checkpoint = hf.from_hf(tmp_path / "theirs").checkpoint
    config = checkpoint.config.model_copy(update={"pooling": "mean"})
    with pytest.raises(BadInput, match="pooling"):
        hf.to_hf(replace(checkpoint, config=config), tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 4}, "model.window=4 does not fit model.global_every=1"),
        ({"global_every": 3}, "model.window=0 does not fit model.global_every=3"),
        ({"first_norm": False}, "model.first_norm=false needs model.norm=pre"),
        ({"positions": "rotary", "hidden": 15, "heads": 3}, "make them 5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        ModelConfig(**changes)


def test_combinations_without_a_family_are_refused() -> None:
    known = vocabularies.symbols("ACGT")
    for changes, message in (
        ({**MODERNBERT, "bias": True}, "model.bias=True is not modernbert's, which needs False"),
        ({**MODERNBERT, "first_norm": True}, "model.first_norm=True is not modernbert's"),
        ({**ESM, "window": 2, "global_every": 2}, "model.window=2 is not esm's, which needs 0"),
        ({**ESM, "zeroed_token": 0}, "model.zeroed_token=0 is not esm's, which needs 4"),
        ({"gated": True}, "model.gated=True is not bert's, which needs False"),
    ):
        made = checkpoints.fresh(ModelConfig(**SIZES, **changes), known, seed=1)
        with pytest.raises(BadInput, match=message.replace(".", r"\.")):
            hf.family_of(made)


def test_checkpoints_of_bert_say_nothing_new(tmp_path: Path) -> None:
    """Earlier versions read them, and this version reads theirs."""
    known = vocabularies.symbols("ACGT")
    checkpoints.save(checkpoints.fresh(ModelConfig(**SIZES), known, seed=1), tmp_path / "bert")
    written = read_json(tmp_path / "bert/config.json")["model"]
    assert not set(NEWER) & written.keys()
    assert set(NEWER) | written.keys() == ModelConfig.model_fields.keys()
    for name, changes in (("modern", MODERNBERT), ("esm", ESM)):
        made = checkpoints.fresh(ModelConfig(**SIZES, **changes), known, seed=1)
        checkpoints.save(made, tmp_path / name)
        assert checkpoints.load(tmp_path / name).config == made.config


# --------------------------------------------------------------------------------------- ESM-2


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", [FREQUENCIES, f"esm.{PLACE}"])
def test_rounded_frequencies_are_kept(precision: str, place: str, tmp_path: Path) -> None:
    """The published weights of ESM-2 hold frequencies that were rounded to float16. Earlier
    versions of transformers stored them in every layer."""
    transformers = pytest.importorskip("transformers")
    tiny("EsmForMaskedLM", tmp_path / "source")
    file = tmp_path / "source/model.safetensors"
    tensors = load_file(file)
    exact, *_ = (tensors.pop(f"esm.{PLACE.format(layer)}") for layer in range(4))
    rounded = exact.to(getattr(torch, precision)).float()
    assert torch.equal(exact, frequencies(12, 10000.0))
    for layer in range(4):
        tensors[place.format(layer)] = rounded.clone()
    save_file(tensors, file, metadata={"format": "pt"})
    theirs = transformers.EsmForMaskedLM.from_pretrained(tmp_path / "source").eval()
    imported = hf.from_hf(tmp_path / "source")
    assert imported.left == []
    assert imported.checkpoint.config.rotary_precision == precision
    batch = random_batch(LENGTHS)
    logits = packed(theirs(**padded(batch, "esm")).logits, batch)[batch.places]
    assert distance(imported.checkpoint.model().logits(batch), logits) <= 1e-5
    other = replace(
        imported.checkpoint,
        config=imported.checkpoint.config.model_copy(update={"rotary_precision": "float32"}),
    )
    assert distance(other.model().logits(batch), logits) > 1e-5
    hf.to_hf(imported.checkpoint, tmp_path / "theirs")
    written = load_file(tmp_path / "theirs/model.safetensors")
    assert written.keys() == tensors.keys()
    assert torch.equal(written[place.format(3)], rounded)
    hf.to_hf(surgery.keep_layers(imported.checkpoint, first=2), tmp_path / "half")
    written = load_file(tmp_path / "half/model.safetensors")
    assert sum(name.endswith("inv_freq") for name in written) == (1 if place == FREQUENCIES else 2)


def test_proteins_get_the_ids_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny("EsmForMaskedLM", tmp_path / "source")
    imported = hf.from_hf(tmp_path / "source").checkpoint
    hf.to_hf(imported, tmp_path / "theirs")
    texts = ["MKTAYIAKQR", "A", AMINO_ACIDS, "MK TA", "AXJB"]
    ids = [row.tolist() for row in imported.tokenizer.encode_batch(texts)]
    for directory in ("source", "theirs"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / directory)
        assert type(theirs) is transformers.EsmTokenizer
        assert theirs(texts, add_special_tokens=False)["input_ids"] == ids
        assert theirs(texts[0])["input_ids"] == [0, *ids[0], 2]
        assert theirs.mask_token_id == imported.tokenizer.special["mask"] == PIECES - 1
    assert len(ids[2]) == len(AMINO_ACIDS)
    assert imported.tokenizer.decode(ids[0]) == texts[0]
    again = hf.from_hf(tmp_path / "theirs").checkpoint.tokenizer
    assert again.fingerprint == imported.tokenizer.fingerprint


def test_a_new_head_leaves_out_the_contact_head(tmp_path: Path) -> None:
    tiny("EsmForMaskedLM", tmp_path)
    imported = hf.from_hf(tmp_path).checkpoint
    assert imported.weights["contact_head.weight"].shape == (1, 4 * 3)
    continued = imported.with_head(Head("mlm"))
    assert trainable(imported).weights.keys() == continued.weights.keys()


# ------------------------------------------------------------------------------------ ModernBERT


def test_texts_get_the_ids_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny("ModernBertForMaskedLM", tmp_path / "source")
    imported = hf.from_hf(tmp_path / "source").checkpoint
    hf.to_hf(imported, tmp_path / "theirs")
    texts = ["a b", " a   a", "e\u0301 \u00e9", "[unused0]a", "", "ABC    a"]
    ids = [row.tolist() for row in imported.tokenizer.encode_batch(texts)]
    assert ids[2] == [93, 89, 93]  # both are composed to one letter, of two bytes
    assert 95 in ids[1]
    assert ids[3][0] == 96
    for directory in ("source", "theirs"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / directory)
        assert theirs(texts, add_special_tokens=False)["input_ids"] == ids
        assert theirs(*texts[:2])["input_ids"] == [2, *ids[0], 3, *ids[1], 3]
        masked = theirs("a [MASK]", add_special_tokens=False)["input_ids"]
        assert masked == [*imported.tokenizer.encode_batch(["a"])[0], 4]
    assert imported.tokenizer.mask_takes_space
    assert not {94, 4} & {
        i for row in imported.tokenizer.encode_batch(["<|endoftext|>[MASK]"]) for i in row
    }
    again = hf.from_hf(tmp_path / "theirs").checkpoint.tokenizer
    assert again.fingerprint == imported.tokenizer.fingerprint


# ------------------------------------------------------------------------- what else runs on them


@pytest.mark.parametrize("changes", [MODERNBERT, ESM], ids=["modernbert", "esm"])
def test_padded_tensors_give_the_states_of_packed_ones(changes: dict[str, Any]) -> None:
    """Positions and masks count within each row, wherever its padding is."""
    config = ModelConfig(**SIZES, **changes, initializer_range=0.3)
    made = checkpoints.fresh(config, vocabularies.symbols("ABCDEFGHIJ"), seed=1)
    model = made.model()
    batch = random_batch(LENGTHS)
    batch = replace(batch, tokens=batch.tokens % 15)
    with torch.inference_mode():
        together = model.encoder(batch)
        alone = []
        for tokens in batch.tokens.split(lengths_of(batch)):
            states = model(
                torch.nn.functional.pad(tokens[None], (3, 2)),
                torch.nn.functional.pad(torch.ones(1, len(tokens)), (3, 2)),
            )
            assert not states[0, :3].any()
            alone.append(states[0, 3:-2])
    torch.testing.assert_close(torch.cat(alone), together)
    vectors = made.encode(["ABC", "ACDCBAG"])
    assert np.allclose(vectors[1], made.encode("ACDCBAG"), atol=1e-6)
    assert np.isfinite(vectors).all()


def test_a_window_hides_far_tokens_from_a_layer() -> None:
    """With only windows a change reaches no further than the layers' windows together."""
    config = ModelConfig(**{**SIZES, **MODERNBERT, "layers": 3, "global_every": 3, "window": 2})
    made = checkpoints.fresh(config, vocabularies.symbols("ABCDEFGHIJ"), seed=1)
    model = made.model()
    batch = random_batch([LONGEST])
    batch = replace(batch, tokens=batch.tokens % 15)
    other = replace(batch, tokens=batch.tokens.clone())
    other.tokens[0] = (other.tokens[0] + 1) % 15
    # the first layer sees the whole row; leave it out
    model.encoder.layers[0].forward = lambda x, *rest: x
    with torch.inference_mode():
        moved = (model.encoder(batch) - model.encoder(other)).abs().amax(1) > 0
    assert moved.tolist() == [True] * 5 + [False] * (LONGEST - 5)


def test_costs_count_gates_and_windows() -> None:
    sizes = {**SIZES, "vocab_size": 20, "layers": 2, "token_types": 0}
    plain = ModelConfig(**sizes)
    gated = ModelConfig(**sizes, gated=True)
    work = Workload.even(2, 100)
    extra = forward_flops(gated, None, work) - forward_flops(plain, None, work)
    assert extra == 2 * 2 * 36 * 20 * work.tokens
    near = ModelConfig(**sizes, window=3, global_every=2)
    less = forward_flops(plain, None, work) - forward_flops(near, None, work)
    assert less == 4 * 36 * (work.squares - 7 * work.tokens)
    short = Workload.even(2, 5)
    assert forward_flops(near, None, short) == forward_flops(plain, None, short)
    counts = parameters(ModelConfig(**{**SIZES, **MODERNBERT, "vocab_size": 20}))
    assert counts["attention"] == 4 * 4 * 36 * 36
    assert counts["feed-forward"] == 4 * 3 * 36 * 20
    assert counts["norms"] == (3 + 4) * 36
    assert "other embeddings" in counts  # the norm


def test_inspect_says_what_is_special(tmp_path: Path) -> None:
    tiny("ModernBertForMaskedLM", tmp_path)
    screen = "\n".join(describe(tmp_path))
    line = (
        "rotary positions with base 160000, a window of 3 tokens on each side and base 10000 in all"
    )
    assert line in screen
    assert "gelu with gates, pre-LN" in screen


def test_the_study_trains_the_encoder_of_the_recipe() -> None:
    """The study repeats the settings of pretrain/micro-modern, which has as many parameters as
    pretrain/micro."""
    recipes = ROOT / "recipes"
    study = read_study(recipes / "studies/micro-modern.toml", "small")
    encoders: Any = study.stages["pretrain"].vary["encoder"]
    micro, modern = (
        read_recipe(recipes / f"pretrain/{name}.toml") for name in ("micro", "micro-modern")
    )
    assert merge(micro, json.loads(json.dumps(encoders["modern"]))) == modern
    sizes = [
        sum(parameters(ModelConfig(**{**r["model"], "vocab_size": 8192})).values())
        for r in (micro, modern)
    ]
    assert abs(sizes[1] / sizes[0] - 1) < 0.01
