"""`make reproduce`: the artificial language, the expected curves, and when a run is refused."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Forks, good, refused

from xformer import reproduce
from xformer.data.errors import BadInput
from xformer.data.files import write_json
from xformer.data.store import open_store
from xformer.preprocess.corpora import dialects
from xformer.recipe import MaskingConfig
from xformer.reproduce import CURVES, EXPECTED, Reproduce, band, compare, draw, study_of
from xformer.study.plan import Job, Plan

SPLITS = ("train", "valid", "test")
SMALL = [
    *("pretrain.train.steps=30", "pretrain.train.log_every=5", "pretrain.train.validate_every=15"),
    *("pretrain.model.hidden=32", "pretrain.model.intermediate=32", "pretrain.batch.tokens=256"),
    *("finetune.train.steps=20", "finetune.train.log_every=5", "finetune.train.validate_every=10"),
]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dialects")
    dialects.write(directory)
    return directory


# ----------------------------------------------------------------------------------- the language


def test_the_text_is_the_same_everywhere(raw: Path) -> None:
    texts = ["vocab.txt", "text.txt", "text.valid.txt", *(f"task/{s}.tsv" for s in SPLITS)]
    sums = sha256(b"".join((raw / name).read_bytes() for name in texts)).hexdigest()
    assert sums == "0f4576f6c05636278bf84de0e36c81f39f002b31cc3e9858c9111cc8839d5009"


def test_most_words_are_followed_by_the_successor_of_the_dialect() -> None:
    table = dialects.successors()
    assert [sorted(row) for row in table.tolist()] == [list(range(dialects.W))] * len(table)
    rows, spoken = dialects.passages("train")
    follows = [
        table[dialect][a] == b
        for row, dialect in zip(rows, spoken, strict=True)
        for a, b in pairwise(row)
    ]
    by_chance = (1 - dialects.FOLLOWS) / dialects.W
    assert np.mean(follows) == pytest.approx(dialects.FOLLOWS + by_chance, abs=0.01)
    assert {len(row) for row in rows} == set(range(12, 21))
    assert max(np.bincount(spoken)) - min(np.bincount(spoken)) <= 1


def test_the_best_predictions_are_the_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward-backward algorithm against the sum over all passages of three words."""
    tables = np.array([[1, 2, 0], [0, 2, 1]])
    monkeypatch.setattr(dialects, "W", 3)
    monkeypatch.setattr(dialects, "DIALECTS", ("a", "b"))
    monkeypatch.setattr(dialects, "successors", lambda: tables)
    masked, follow, n = dialects.MASKING, dialects.FOLLOWS, 4

    def emitted(word: int, seen: int) -> float:
        return 0.8 * (seen == 3) + 0.1 * (seen == word) + 0.1 / 3 * (seen < 3)

    for seen in ([3, 1, 2, 3], [0, 3, 3, 1], [2, 2, 0, 1]):
        posterior = dialects._posterior(np.array([seen]))[0]
        for place in range(n):
            expected = np.zeros(3)
            for table, words in product(tables, product(range(3), repeat=n)):
                chance = 1.0
                for a, b in pairwise(words):
                    chance *= follow * (table[a] == b) + (1 - follow) / 3
                for t, word in enumerate(words):
                    chosen = emitted(word, seen[t])
                    plain = (1 - masked) * (seen[t] == word)
                    chance *= chosen if t == place else masked * chosen + plain
                expected[words[place]] += chance
            np.testing.assert_allclose(posterior[place], expected / expected.sum())


def test_the_best_loss_is_of_the_masking_that_the_recipe_has(raw: Path) -> None:
    recorded = json.loads((raw / "best.json").read_text())
    assert recorded["masking"] == MaskingConfig().probability
    run = plan(Path("none")).runs("pretrain")[0].recipe
    assert run is not None
    assert "masking" not in run  # so it has the default
    last = np.array(expected()["curves"][CURVES[1].name]["seeds"])[:, -1]
    assert recorded["loss"] < last.min()  # nobody is better than the best


# ------------------------------------------------------------------------------ the expected curves


def plan(output: Path, **settings: Any) -> Plan:
    return Plan(study_of(Reproduce(output=str(output), **settings)), output, {})


def expected() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(EXPECTED.read_text())
    return content


def test_the_expected_curves_are_of_the_present_recipes(tmp_path: Path) -> None:
    """If this fails, a recipe was changed: measure anew with reproduce record=FILE."""
    fp32 = {"system": {"precision": "fp32"}}
    runs = plan(tmp_path, pretrain=fp32, finetune=fp32)
    assert expected()["runs"] == {name: runs.runs(name)[0].key for name in runs.study.stages}


def run_with(curve: reproduce.Curve, path: Path, values: np.ndarray, steps: list[float]) -> Job:
    """A run whose log has these numbers."""
    path.mkdir()
    lines = [
        json.dumps({"event": curve.event, "step": int(step), curve.value: float(value)})
        for step, value in zip(steps, values, strict=True)
    ]
    (path / "log.jsonl").write_text("\n".join(lines) + "\n")
    return Job("run", "key", path, path / "result.json", ())


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_a_band_holds_other_seeds_but_not_other_curves(
    curve: reproduce.Curve, tmp_path: Path
) -> None:
    content = expected()["curves"][curve.name]
    seeds, steps = np.array(content["seeds"]), content["steps"]
    for i, own in enumerate(seeds):  # each seed lies in the band of the others
        low, high = band(np.delete(seeds, i, 0))
        assert ((low <= own) & (own <= high)).all(), (curve.name, i)
    mean = seeds.mean(0)
    verdict = compare(curve, expected(), run_with(curve, tmp_path / "mean", mean, steps))
    assert verdict.inside
    assert verdict.line().startswith("reproduced ")
    late = mean.copy()
    late[-3:] += 0.5 if curve.value == "loss" else -0.2
    verdict = compare(curve, expected(), run_with(curve, tmp_path / "late", late, steps))
    assert verdict.outside == len(steps) - 3
    assert f"leaves its band at step {steps[-3]:g}: {late[-3]:.3f}, expected" in verdict.line()
    short = run_with(curve, tmp_path / "short", mean[:-1], steps[:-1])
    verdict = compare(curve, expected(), short)
    assert not verdict.inside
    assert "the run did not log the steps" in verdict.line()


def test_the_picture(tmp_path: Path) -> None:
    verdicts = []
    for curve in CURVES:
        content = expected()["curves"][curve.name]
        values = np.array(content["seeds"]).mean(0) * (1.5 if curve is CURVES[2] else 1)
        run = run_with(curve, tmp_path / curve.name, values, content["steps"])
        verdicts.append(compare(curve, expected(), run))
    figure = draw(verdicts, 0.4)
    assert figure.get_suptitle() == "NOT reproduced"
    figure = draw([v for v in verdicts if v.inside], 0.4)
    assert figure.get_suptitle() == "Reproduced"


@pytest.mark.parametrize(
    "content",
    [{}, {"curves": {}}, {"curves": {c.name: {"steps": [1], "seeds": []} for c in CURVES}}],
)
def test_a_file_without_curves_is_refused(content: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", content)
    with pytest.raises(BadInput, match=r"x\.json holds no expected curves"):
        reproduce.main([f"expected={tmp_path / 'x.json'}", f"output={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_reproduce(forks: Forks, tmp_path: Path) -> None:
    """Curves are recorded; the same settings reproduce them and a higher rate does not."""
    output, file = tmp_path / "out", tmp_path / "curves.json"
    line = ["-m", "xformer.study", "reproduce", f"output={output}", *SMALL]
    good(forks.run(*line, f"record={file}", "seeds=2"))
    assert len(json.loads(file.read_text())["curves"][CURVES[0].name]["seeds"]) == 2
    done = good(forks.run(*line, f"expected={file}"))
    assert done.out.count("reproduced ") == len(CURVES) + 2
    assert "NOT" not in done.out
    assert (output / "reproduce-mini/reproduce.png").stat().st_size > 10_000
    done = forks.run(*line, f"expected={file}", "pretrain.optim.lr=0.1")
    assert done.status == 1
    assert "NOT reproduced  pre-training, loss" in done.out
    assert "leaves its band at step 5: " in done.out
    assert "error: not reproduced: pre-training, loss" in done.err
    refused(forks.run(*line, "pretrain.optim.lrr=1"), "unknown key optim.lrr", "optim.lr?")
    stores = {job.name: job.path for job in plan(output).jobs.values()}
    keys = {name: open_store(stores[name]).key for name in reproduce.STORES}
    assert keys == expected()["stores"]
