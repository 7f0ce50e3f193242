"""Analyses of bad models and with wrong settings: what is refused, when, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import looking
import numpy as np
import pytest

from xformer import checkpoint as checkpoints
from xformer.analysis import (
    __main__,
    attention,
    blimp,
    drawing,
    gradients,
    jacobian,
    perturbation,
    pwcca,
)
from xformer.data import style
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.writing import create_store
from xformer.tasks.task import Head, Model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store `s` of texts and `pairs` of pairs; checkpoints `a`, `b` and `shallow`; a checkpoint
    `bad` with NaN in its second layer, and `zeros` with only zeros."""
    directory = tmp_path_factory.mktemp("small")
    looking.store(directory / "s")
    generator = np.random.default_rng(3)
    columns = {"tokens": "", "tokens_b": "", "label": "<i8"}
    with create_store(
        directory / "pairs", looking.tokenizer(), columns, ("tokens", "tokens_b")
    ) as writer:
        with writer.split("valid") as split:
            for name in ("tokens", "tokens_b"):
                sizes = np.full(looking.ROWS, 6)
                ids = generator.integers(5, looking.PIECES, sizes.sum())
                split.append_ragged(name, ids, sizes)
            split.append("label", np.arange(looking.ROWS) % 2)
        writer.finish("class", ["no", "yes"], "accuracy", {})
    looking.checkpoint(directory / "a")
    looking.checkpoint(directory / "b", seed=1)
    looking.checkpoint(directory / "shallow", layers=1)
    looking.checkpoint(directory / "bad", damage="encoder.layers.1.mlp.up.bias")
    made = checkpoints.load(directory / "a")
    zeros = {name: weight * 0 for name, weight in made.weights.items()}
    checkpoints.save(replace(made, weights=zeros), directory / "zeros")
    return directory


def settings(small: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {"data": str(small / "s"), "out": str(out), "threads": 1, **more}


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not written, which takes the most time."""

    def drawn(draw: Callable[[], Any], *_: object) -> list[Path]:
        draw()
        return []

    monkeypatch.setattr(style, "write_light_and_dark", drawn)


def never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("this is long work")


# ------------------------------------------------------------------------------------ similarity


@pytest.mark.usefixtures("no_files")
def test_layers_of_few_distinct_inputs_get_a_warning(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows, again and again: many tokens, but only 20 distinct ones for 21 neurons."""
    ids = np.random.default_rng(1).integers(5, looking.PIECES, (2, 8))
    with create_store(tmp_path / "few", looking.tokenizer(), {"tokens": ""}) as writer:
        with writer.split("valid") as split:
            split.append_ragged("tokens", np.tile(ids, (30, 1)).ravel(), np.full(60, 8))
        writer.finish("text", [], None, {})
    a, b = str(small / "a"), str(small / "b")

    def warning(paths: list[str], data: Path) -> bool:
        config = pwcca.PwccaConfig(data=str(data), out=str(tmp_path / "o"), threads=1)
        capsys.readouterr()
        pwcca.run(paths, config)
        err = capsys.readouterr().err
        assert "are too few for" not in err  # there are enough tokens
        line = "warning: cca is 1 for the layers 0 and 0 (and 8 other pairs): unless they compute "
        assert (line in err) == ("cca is 1" in err)
        return line in err

    assert warning([a, b], tmp_path / "few")
    similarity = read_json(tmp_path / "o/pwcca.json")["similarity"]
    assert similarity[0][0]["chance"] < 0.4 < 0.9999 < similarity[0][0]["pwcca"]
    assert not warning([a, b], small / "s")
    assert not warning([a, a], tmp_path / "few")


# -------------------------------------------------------------------------- results and figures


def test_a_result_whose_figure_cannot_be_drawn_is_kept(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pwcca.PwccaConfig(**settings(small, tmp_path, layers="last"))
    with monkeypatch.context() as patch:
        patch.setattr(pwcca, "draw", never)
        with pytest.raises(AssertionError):
            pwcca.run([str(small / "a"), str(small / "b")], config)
    __main__._redraw([str(tmp_path / "pwcca.json")])
    assert (tmp_path / "pwcca.svg").is_file()
    with pytest.raises(BadInput, match=r"is a directory; give a JSON file in it.*/pwcca\.json"):
        __main__._redraw([str(tmp_path)])


@pytest.mark.usefixtures("no_files")
def test_a_model_of_zeros_has_results_in_json(small: Path, tmp_path: Path) -> None:
    zeros = [str(small / "zeros")]
    jacobian.run(
        zeros, jacobian.JacobianConfig(**settings(small, tmp_path, examples=2, whole=True, steps=3))
    )
    perturbation.run(zeros, perturbation.PerturbationConfig(**settings(small, tmp_path)))
    for name in ("jacobian", "perturbation"):
        text = (tmp_path / f"{name}.json").read_text()
        json.loads(text, parse_constant=never)  # NaN and Infinity are not JSON
    (model,) = read_json(tmp_path / "perturbation.json")["models"]
    assert [noise["relative"] for noise in model["noise"]] == [None] * 4
    values = read_json(tmp_path / "jacobian.json")["spectra"][0]["examples"][0]["values"]
    assert set(values) == {0.0}


@pytest.mark.usefixtures("no_files")
def test_one_example_has_no_deviation(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drawing.spread([3.0]) == {"mean": 3.0}
    assert drawing.spread([1.0, 3.0]) == {"mean": 2.0, "deviation": pytest.approx(2**0.5)}
    paths = [str(small / "a"), str(small / "b")]
    one = settings(small, tmp_path, examples=1)
    jacobian.run(paths, jacobian.JacobianConfig(**one))
    attention.run(paths, attention.AttentionConfig(**one))
    perturbation.run(paths, perturbation.PerturbationConfig(**one, draws=1))
    assert "±" not in capsys.readouterr().out
    gradients.run(paths, gradients.GradientsConfig(**settings(small, tmp_path)))
    for summary in read_json(tmp_path / "gradients.json")["gradients"]:
        assert summary["deviation"] == pytest.approx(np.std(summary["cosines"], ddof=1), rel=1e-5)


@pytest.mark.usefixtures("no_files")
def test_one_layer_shows_all_that_the_legend_names(small: Path, tmp_path: Path) -> None:
    paths = [str(small / "shallow"), str(small / "b")]
    attention.run(paths, attention.AttentionConfig(**settings(small, tmp_path)))
    with style.colours(style.LIGHT):
        figure = attention.draw(read_json(tmp_path / "attention.json"))
    axes = figure.axes[0]
    assert len(axes.get_legend_handles_labels()[1]) == 4
    for line in axes.get_lines():
        assert line.get_marker() not in ("None", "")
    bars: Any = axes.containers[0]
    (segment,) = bars.lines[2][0].get_segments()
    assert segment[1, 1] > segment[0, 1]
    assert axes.get_ylim()[1] > segment[1, 1]


@pytest.mark.usefixtures("no_files")
def test_tiny_singular_values_do_not_stretch_the_axis(small: Path, tmp_path: Path) -> None:
    config = jacobian.JacobianConfig(**settings(small, tmp_path, examples=2, whole=True, steps=6))
    jacobian.run([str(small / "a")], config)
    result = read_json(tmp_path / "jacobian.json")
    every = [example["whole"] for example in result["spectra"][0]["examples"]]
    every[0]["nodes"][0][-1] = 1e-12
    low = jacobian.SMALLEST_SHARE * max(whole["largest"] for whole in every)
    with style.colours(style.LIGHT):
        figure = jacobian.draw(result)
    for axes in figure.axes[2:]:
        assert 0.1 * low < axes.get_xlim()[0] <= low


# ------------------------------------------------------------------------------- wrong settings


def test_settings_that_do_nothing_are_refused(small: Path, tmp_path: Path) -> None:
    given = settings(small, tmp_path)
    for name in ("steps", "probes"):
        with pytest.raises(BadInput, match=f"^{name}= applies only with whole=true"):
            jacobian.run([str(small / "a")], jacobian.JacobianConfig(**given, **{name: 5}))
    given["data"] = str(small / "pairs")
    with pytest.raises(BadInput, match=r"masking= applies only to .*/pairs is of kind 'class'"):
        gradients.run([str(small / "a")], gradients.GradientsConfig(**given, masking=0.3))
    assert not list(tmp_path.iterdir())


def test_noise_that_is_too_large_is_named(small: Path, tmp_path: Path) -> None:
    config = perturbation.PerturbationConfig(**settings(small, tmp_path), deviations=(1e300,))
    with pytest.raises(BadInput, match=r"^deviations: noise of 1e\+300 is too large for .*/a: its"):
        perturbation.run([str(small / "a")], config)


# ----------------------------------------------------------------- every model is checked first


@pytest.mark.parametrize(
    ("module", "schema", "work"),
    [
        (jacobian, jacobian.JacobianConfig, "_of_example"),
        (gradients, gradients.GradientsConfig, "inner_products"),
        (perturbation, perturbation.PerturbationConfig, "perturbed"),
    ],
)
def test_a_second_model_that_is_not_finite_is_named_first(
    module: Any,
    schema: Callable[..., Any],
    work: str,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, work, never)
    with pytest.raises(BadInput, match=r"/bad: (layer 2|the last layer) is not finite .* in row"):
        module.run([str(small / "a"), str(small / "bad")], schema(**settings(small, tmp_path)))


def test_every_model_can_score_sentences(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head and the weights of every checkpoint are checked before the first is scored."""
    monkeypatch.setattr(blimp, "score_pairs", never)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"sentence_good": "w1 w2", "sentence_bad": "w2 w1"}\n')
    made = checkpoints.load(small / "a")
    damaged = {"mlm_head.bias": made.with_head(Head("mlm")).weights["mlm_head.bias"] * np.nan}
    for name, head in (("mlm", Head("mlm")), ("classes", Head("classify", ("no", "yes")))):
        checkpoints.save(made.with_head(head), tmp_path / name)
    broken = made.with_head(Head("mlm"))
    checkpoints.save(replace(broken, weights={**broken.weights, **damaged}), tmp_path / "damaged")
    config = blimp.BlimpConfig(data=str(pairs), out=str(tmp_path / "o"), threads=1)
    for name, words in (
        ("classes", "has no MLM head to score"),
        ("damaged", "the weight mlm_head.bias is not finite"),
    ):
        with pytest.raises(BadInput, match=f"{name}:? {words}"):
            blimp.run([str(tmp_path / "mlm"), str(tmp_path / name)], config)


# ------------------------------------------------------------------------- heads of the gradients


@pytest.mark.usefixtures("no_files")
def test_a_pair_head_of_its_own_is_used(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is that of pre-training, MLM and pairs. Another model gets a new head, and the title
    of the figure says so."""
    head = Head("mlm", labels=("no", "yes"), pair=True, pair_scale=3.0)
    checkpoints.save(checkpoints.load(small / "a").with_head(head), tmp_path / "own")
    models: list[Model] = []
    inner_products = gradients.inner_products

    def noted(model: Model, batch: Any) -> Any:
        models.append(model)
        assert (batch.places is not None) == (model.pair_head is not None)
        return inner_products(model, batch)

    monkeypatch.setattr(gradients, "inner_products", noted)
    given = settings(small, tmp_path / "o") | {"data": str(small / "pairs")}
    gradients.run([str(tmp_path / "own"), str(small / "b")], gradients.GradientsConfig(**given))
    assert models[0].pair_head is not None
    result = read_json(tmp_path / "o/gradients.json")
    heads = [(s["head"], s["fresh_head"]) for s in result["gradients"]]
    assert heads == [("mlm + pair", False), ("classify", True)]
    with style.colours(style.LIGHT):
        title = gradients.draw(result).axes[0].get_title()
    assert title.endswith("\nhead: mlm + pair, classify (new)")
    config = gradients.GradientsConfig(**given, masking=0.3, overwrite=True)
    gradients.run([str(tmp_path / "own")], config)  # this loss masks tokens
