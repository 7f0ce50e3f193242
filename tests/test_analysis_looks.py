"""Captures, attention maps, perturbation and curves: values, resuming, and bad input."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import looking
import numpy as np
import pytest
import torch
from helpers import PATIENCE, ROOT
from tiny import seeded

from xformer.analysis import (
    attention,
    capture,
    curves,
    gradients,
    jacobian,
    perturbation,
    pwcca,
)
from xformer.analysis.__main__ import _redraw as redraw
from xformer.analysis.capture import CaptureConfig, open_capture, open_pair
from xformer.analysis.curves import CurvesConfig
from xformer.analysis.examples import look_inside, open_examples, parse_layers
from xformer.analysis.gradients import GradientsConfig
from xformer.analysis.perturbation import PerturbationConfig
from xformer.analysis.pwcca import PwccaConfig
from xformer.analysis.subcommand import parse_arguments
from xformer.checkpoint import resolve
from xformer.data import style
from xformer.data.errors import BadInput
from xformer.data.files import read_json


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store `s`, checkpoints `a` and `b`, and a checkpoint `bad` with NaN in its second layer."""
    directory = tmp_path_factory.mktemp("small")
    looking.store(directory / "s")
    looking.checkpoint(directory / "a")
    looking.checkpoint(directory / "b", seed=1)
    looking.checkpoint(directory / "bad", damage="encoder.layers.1.mlp.up.bias")
    return directory


def config_of(small: Path, out: Path, **changes: Any) -> CaptureConfig:
    return CaptureConfig(data=str(small / "s"), out=str(out), threads=1, **changes)


# ------------------------------------------------------------------------------------ capture


def test_a_capture_holds_what_the_encoder_computes(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "PART_TOKENS", 40)  # several parts
    config = config_of(small, tmp_path / "f.h5", what="hidden,attention", dtype="float32")
    capture.run([str(small / "a")], config)
    reader = open_examples(config, [str(small / "a")]).models[0]
    monkeypatch.chdir(tmp_path.parent)  # paths do not depend on the working directory
    with h5py.File(tmp_path / "f.h5") as f:
        assert len(json.loads(f.attrs["parts"])) > 2
        assert f.attrs["checkpoint"] == str(small / "a")
        assert sorted(f["rows"][:]) == list(range(looking.ROWS))
        for i, row in enumerate(f["rows"][:]):
            batch, inside = look_inside(reader, np.array([row]), maps=True)
            a, b = f["offsets"][i], f["offsets"][i + 1]
            assert (f["tokens"][a:b] == batch.tokens).all()
            for layer, hidden in enumerate(inside.hidden):
                assert np.allclose(f[f"hidden/{layer}"][a:b], hidden.numpy(), atol=1e-5)
            a, b = f["attention_offsets"][i], f["attention_offsets"][i + 1]
            size = len(batch.tokens)
            captured = f["attention/2"][a:b].reshape(size, size, looking.HEADS)
            assert np.allclose(captured, inside.maps[1][0].permute(1, 2, 0).numpy(), atol=1e-5)


def test_a_killed_capture_continues(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "PART_TOKENS", 40)
    whole, cut = tmp_path / "whole.h5", tmp_path / "cut.h5"
    capture.run([str(small / "a")], config_of(small, whole))
    written: list[int] = []
    append = capture._append

    def dies(h5: Any, *rest: Any) -> None:
        if len(set(written)) == 2 and h5.filename not in written:
            raise KeyboardInterrupt
        written.append(h5.filename)
        append(h5, *rest)

    monkeypatch.setattr(capture, "_append", dies)
    with pytest.raises(KeyboardInterrupt):
        capture.run([str(small / "a")], config_of(small, cut))
    assert not cut.exists()
    done = sorted(Path(f"{cut}.parts").glob("0*.h5"))
    before = [file.stat().st_mtime_ns for file in done]
    assert len(done) == 2
    monkeypatch.setattr(capture, "_append", append)
    capture.run([str(small / "a")], config_of(small, cut))
    assert [file.stat().st_mtime_ns for file in done] == before  # not written again
    with h5py.File(whole) as f, h5py.File(cut) as g:
        for name in ("hidden/0", "hidden/2", "rows", "tokens", "offsets"):
            assert np.array_equal(f[name][:], g[name][:]), name


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
from xformer.analysis.__main__ import main
from xformer.start import run
run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 3_000, 9_000, 30_000])
def test_a_capture_on_a_full_disk_ends_in_one_line(size: int, small: Path, tmp_path: Path) -> None:
    """The file may be full at its beginning, or when HDF5 closes it."""
    out = tmp_path / "f.h5"
    line = [f"data={small / 's'}", f"out={out}", "what=hidden,attention", "dtype=float32"]
    code = [sys.executable, "-c", LIMITED, str(size), "capture", str(small / "a"), *line]
    done = subprocess.run(code, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(rf"error: File too large: {out}\S*\n", done.stderr)
    assert not out.exists()
    capture.run([str(small / "a")], config_of(small, out, what="hidden,attention", dtype="float32"))
    assert open_capture(out).layers == [0, 1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_error_of_the_disk_is_kept_from_hdf5() -> None:
    with (
        pytest.raises(OSError, match="No space left on device: 'shown'"),
        capture._Disk(Path("/dev/full"), Path("shown")) as disk,
        h5py.File(disk, "w") as h5,
    ):
        h5["a"] = np.zeros(10**5)


def test_a_capture_makes_its_directory(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "new/directory/f.h5"
    capture.run([str(small / "a")], config_of(small, out))
    assert open_capture(out).layers == [0, 1, 2]
    for wrong, message in ((out / "g.h5", "f.h5 is a file"), (tmp_path / "f", "ends in .h5")):
        with pytest.raises(BadInput, match=message):
            capture.run(["no such checkpoint"], config_of(small, wrong))  # before it is opened


def test_a_capture_of_something_else_is_refused(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.h5"
    capture.run([str(small / "a")], config_of(small, out))
    with pytest.raises(BadInput, match=r"holds another capture \(weights="):
        capture.run([str(small / "b")], config_of(small, out))
    with pytest.raises(BadInput, match=r"examples=13 is now 5"):
        capture.run([str(small / "a")], config_of(small, out, examples=5))
    capture.run([str(small / "a")], config_of(small, out))  # the same command again is allowed
    other = tmp_path / "g.h5"
    capture.run([str(small / "a")], config_of(small, other, examples=5))
    both = tmp_path / "both.h5"
    for what in ("hidden,attention", "attention,hidden"):  # the same in another order
        capture.run([str(small / "a")], config_of(small, both, what=what))
    with pytest.raises(BadInput, match="cannot be aligned"):
        open_pair([str(out), str(other)])
    for change, message in (
        ({"run": "runs/x"}, "leave run= out"),
        ({"names": ("x",)}, "leave names= out"),
        ({"mapping_b": "none"}, "leave mapping_b= out"),
        ({"layers": "0", "what": "attention"}, r"the embeddings \(0\) have no attention"),
    ):
        with pytest.raises(BadInput, match=message):
            capture.run([str(small / "a")], config_of(small, tmp_path / "h.h5", **change))
    capture.run([str(small / "b")], config_of(small, other, overwrite=True))
    assert open_capture(other).attributes["checkpoint"] == str(small / "b")
    same = {"out": str(tmp_path / "o"), "threads": 1}
    with pytest.raises(BadInput, match="examples= was chosen when the captures were made"):
        pwcca.run([str(out), str(other)], pwcca.PwccaConfig(**same, examples=3))
    pwcca.run([str(out), str(other)], pwcca.PwccaConfig(**same, names=("left", "right")))
    result = json.loads((tmp_path / "o/pwcca.json").read_text())
    assert [c["name"] for c in result["checkpoints"]] == ["left", "right"]
    (tmp_path / "f.h5.parts/capture.json").write_text("[]")
    out.rename(tmp_path / "f")
    with pytest.raises(BadInput, match=r"f.h5.parts holds another capture"):
        capture.run([str(small / "a")], config_of(small, out))
    pair = open_pair([str(other), str(other)])
    with pytest.raises(BadInput, match=r"hidden of the layers 7 is needed"):
        next(pair.stream([[7], [0]]))


@pytest.mark.parametrize("deviations", [(), (0.0, 1e-2), (1e-2, 1e-2)])
def test_each_size_of_the_noise_is_given_once(small: Path, deviations: tuple[float, ...]) -> None:
    config = PerturbationConfig(data=str(small / "s"), out="o", deviations=deviations)
    with pytest.raises(BadInput, match="give positive numbers, each once"):
        perturbation.run([str(small / "a")], config)


def test_captures_in_float16_are_not_compared_without_a_warning(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, warned in (("float16", True), ("float32", False)):
        out = tmp_path / f"{dtype}.h5"
        capture.run([str(small / "a")], config_of(small, out, dtype=dtype))
        capsys.readouterr()
        pwcca.run([str(out)] * 2, pwcca.PwccaConfig(out=str(tmp_path / dtype), threads=1))
        assert (f"warning: {out} and {out}: float16 adds" in capsys.readouterr().err) == warned


def test_a_capture_that_ends_meanwhile_is_not_mixed_with_another(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes its parts just before this one gets the lock."""
    out = tmp_path / "f.h5"
    make = capture.make_directory

    def late(path: Path, *rest: Any) -> None:
        make(path, *rest)
        (path / "capture.json").write_text('{"weights": "other"}')

    monkeypatch.setattr(capture, "make_directory", late)
    with pytest.raises(BadInput, match=r"holds another capture \(.*weights=other"):
        capture.run([str(small / "a")], config_of(small, out))


def test_a_damaged_capture_is_refused(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.h5"
    with pytest.raises(BadInput, match="does not exist"):
        open_capture(out)
    capture.run([str(small / "a")], config_of(small, out))
    part = tmp_path / "f.h5.parts/00000.h5"
    content = part.read_bytes()
    part.write_bytes(content[:-10])
    with pytest.raises(BadInput, match=r"00000.h5 is missing or truncated"):
        open_capture(out)
    part.write_bytes(content[:-10] + bytes(byte ^ 1 for byte in content[-10:]))
    with pytest.raises(BadInput, match=r"00000.h5 is not what `capture` wrote: its checksum"):
        open_capture(out)
    part.write_bytes(content)
    out.rename(tmp_path / "new.h5")
    part.parent.rename(tmp_path / "new.h5.parts")
    with pytest.raises(BadInput, match=r"refers to its parts as f.h5.parts: rename it back to"):
        open_capture(tmp_path / "new.h5")
    (tmp_path / "new.h5").rename(out)
    (tmp_path / "new.h5.parts").rename(part.parent)
    whole = out.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"FHDB") + 91] ^= 0xFF  # among its attributes: h5py raises RuntimeError
    for damaged in (bytes(flipped), whole[:1000]):
        out.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"f.h5 is not what `capture` wrote: its checksum"):
            open_capture(out)
        with pytest.raises(BadInput, match="truncated or not an HDF5 file"):
            open_capture(out, trust=True)


def test_a_capture_that_others_made_is_read_only_with_trust(small: Path, tmp_path: Path) -> None:
    """Such a capture has no checksums, like one of an earlier version of this program."""
    ours, theirs = tmp_path / "ours.h5", tmp_path / "theirs.h5"
    for path in (ours, theirs):
        capture.run([str(small / "a")], config_of(small, path))
    note = tmp_path / "theirs.h5.parts/capture.json"
    content = json.loads(note.read_text())
    assert sorted(content.pop("sha256")) == ["00000.h5", "joined"]
    settings: dict[str, Any] = {"out": str(tmp_path / "o"), "threads": 1, "names": ("a", "b")}
    refused = r"theirs.h5 has no checksums in .*capture.json: .* read it with trust=true"
    for change in (lambda: note.write_text(json.dumps(content) + "\n"), note.unlink):
        change()
        with pytest.raises(BadInput, match=refused):
            pwcca.run([str(ours), str(theirs)], pwcca.PwccaConfig(**settings))
        with pytest.raises(BadInput, match=refused):
            capture.run([str(small / "a")], config_of(small, theirs))  # it would say "is complete"
    pwcca.run([str(ours), str(theirs)], pwcca.PwccaConfig(**settings, trust=True))
    assert (tmp_path / "o/pwcca.json").is_file()
    both = [str(small / "a"), str(small / "b")]
    with pytest.raises(BadInput, match=r"trust= applies only to captures"):
        pwcca.run(both, pwcca.PwccaConfig(**settings, data=str(small / "s"), trust=True))


def test_numbers_that_are_not_finite_name_layer_and_row(small: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"layer 2 is not finite .* in row \d+ of the split 'valid'"):
        capture.run([str(small / "bad")], config_of(small, tmp_path / "f.h5"))
    assert not list(tmp_path.iterdir())  # nothing is left behind
    settings = {"data": str(small / "s"), "out": str(tmp_path / "o"), "threads": 1}
    for module, config in (
        (gradients, gradients.GradientsConfig(**settings)),
        (perturbation, PerturbationConfig(**settings)),
        (jacobian, jacobian.JacobianConfig(**settings)),
    ):
        with pytest.raises(BadInput, match=r"layer 2 is not finite .* in row \d+"):
            module.run([str(small / "bad")], config)


def test_layers_by_name_and_number() -> None:
    assert parse_layers("all", 2, "a") == [0, 1, 2]
    assert parse_layers("last", 2, "a") == [2]
    assert parse_layers("[2, 0]", 2, "a") == [0, 2]
    for wrong in ("3", "x", "-1", "²"):
        with pytest.raises(BadInput, match=f"^layers={wrong}: a has the layers 0 to 2; give all"):
            parse_layers(wrong, 2, "a")


def test_the_network_that_lacks_a_layer_is_named(small: Path, tmp_path: Path) -> None:
    looking.checkpoint(tmp_path / "deep", layers=3)
    paths = [str(tmp_path / "deep"), str(small / "a")]
    config = PwccaConfig(data=str(small / "s"), out=str(tmp_path / "o"), layers="0,3", threads=1)
    with pytest.raises(BadInput, match=r"^layers_b=0,3: .*/a has the layers 0 to 2"):
        pwcca.run(paths, config)
    with pytest.raises(BadInput, match=r"^layers=0,3: .*/a has the layers 0 to 2"):
        pwcca.run(paths[::-1], config)


def test_a_split_of_one_row_has_no_cosine(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "ROWS", 1)
    store = looking.store(tmp_path / "one")
    config = GradientsConfig(data=str(store), out=str(tmp_path / "o"), threads=1)
    with pytest.raises(BadInput, match=r"'valid' gives 1 example, but a cosine needs two: give"):
        gradients.run([str(small / "a")], config)


def test_a_run_without_a_checkpoint_says_so(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    config = PerturbationConfig(data=str(small / "s"), out=str(tmp_path / "o"), threads=1)
    with pytest.raises(BadInput, match=r"run is not finished and has no checkpoint yet; finish it"):
        perturbation.run([str(run)], config)
    looking.checkpoint(run / "checkpoints/step_9")
    with pytest.raises(BadInput, match=r"is not finished; name one of its checkpoints: step_9"):
        perturbation.run([str(run)], config)


# ---------------------------------------------------------------------------------- attention


def test_matching_finds_heads_that_were_shuffled() -> None:
    maps = torch.rand(5, 7, 7, generator=seeded(1)).softmax(2)
    order = [3, 0, 4, 1, 2]
    cost = attention.map_distances(maps, maps[order]).numpy()
    ours, theirs = attention.match(cost)
    assert [order[j] for j in theirs] == ours.tolist() == [0, 1, 2, 3, 4]
    assert cost[ours, theirs] == pytest.approx(0, abs=1e-6)


def test_the_matching_is_the_cheapest_of_all() -> None:
    cost = np.random.default_rng(2).random((4, 6))
    ours, theirs = attention.match(cost)
    best = min(cost[range(4), list(p)].sum() for p in itertools.permutations(range(6), 4))
    assert cost[ours, theirs].sum() == pytest.approx(best)


def test_distances_of_maps_go_from_0_to_2() -> None:
    first, last = torch.zeros(1, 3, 3), torch.zeros(1, 3, 3)
    first[..., 0] = 1
    last[..., 2] = 1
    assert float(attention.map_distances(first, last)) == pytest.approx(2)
    costs = np.array([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    layer = attention._of_layer(1, costs)
    assert layer["distance"]["mean"] == 0  # matched example by example
    assert layer["unmatched"] == 0.5
    assert np.mean(layer["matching"]["distance"]) == 0.5


# ------------------------------------------------------------------------------- perturbation


def test_small_noise_moves_outputs_in_proportion_and_by_seed(small: Path) -> None:
    config = PerturbationConfig(data=str(small / "s"), out="x", threads=1)
    examples = open_examples(config, [str(small / "a")])
    reader = examples.models[0]
    encoder = copy.deepcopy(reader.model.encoder).double()
    before = perturbation.outputs(encoder, reader, examples)

    def moved(size: float, seed: int = 0, number: int = 0) -> float:
        noisy = perturbation.perturbed(encoder, size, seed, number)
        after = perturbation.outputs(noisy, reader, examples)
        return float(perturbation.output_distances(before, after)[0].mean())

    tiny = moved(1e-8)
    assert moved(1e-6) / tiny == pytest.approx(100, rel=1e-3)
    assert moved(1e-8) == tiny
    assert len({moved(1e-8, 1), moved(1e-8, 0, 1), tiny}) == 3
    same = perturbation.outputs(encoder, reader, examples)
    # the encoder is unchanged: only a copy was perturbed
    assert all(torch.equal(a, b) for a, b in zip(before, same, strict=True))


def test_noise_is_standard_gaussian() -> None:
    made = perturbation.noise("a", torch.zeros(200, 100), 3, 4)
    assert abs(float(made.mean())) < 0.03
    assert float(made.std()) == pytest.approx(1, abs=0.02)


def test_each_size_of_noise_has_its_own_name() -> None:
    names = [perturbation._key(size) for size in (1e-2, 1.2e-2, 1e-8)]
    assert names == ["1e-02", "0.012", "1e-08"]


# ------------------------------------------------------------------------------------- curves


def run_of(
    path: Path, seed: int, lr: float, offset: float, more: dict[str, Any] | None = None
) -> str:
    path.mkdir()
    recipe = {
        "seed": seed,
        "run": str(path),
        "mapping": f"symbols:{seed}",
        "optim": {"lr": lr},
        "surgery": [{"op": "clean", "seed": seed}],
        **(more or {}),
    }
    (path / "config.json").write_text(json.dumps({"config": recipe}))
    lines = [
        json.dumps({"event": "train", "step": s, "time": 1, "loss": 5 - s + offset})
        for s in (1, 2, 3)
    ]
    (path / "log.jsonl").write_text("\n".join(lines) + '\n{"event": "tr')  # the run was killed
    return str(path)


def test_a_legend_shows_names_letter_by_letter() -> None:
    """By itself matplotlib leaves out labels that begin with _, and reads $b$ as a formula."""
    series = [{"name": "_a $b$", "runs": ["r"], "x": [1], "mean": [2.0], "deviation": [0.0]}]
    panels = [{"event": "train", "value": "loss", "series": series}]
    with style.colours(style.LIGHT):
        legend = curves.draw({"x": "step", "panels": panels}).axes[0].get_legend()
    assert legend is not None
    (text,) = legend.get_texts()
    assert (text.get_text(), text.get_parse_math()) == (" _a $b$ (1 run)", False)


def test_runs_that_differ_in_seeds_are_one_curve(tmp_path: Path) -> None:
    made = (("a", 0, 1e-3, 0.0), ("b", 1, 1e-3, 0.2), ("c", 0, 1e-4, 1.0))
    runs = [run_of(tmp_path / name, seed, lr, offset) for name, seed, lr, offset in made]
    groups = curves.grouped(runs)
    assert groups == {"optim.lr=0.001": runs[:2], "optim.lr=0.0001": runs[2:]}
    assert curves.grouped(runs[:2]) == {"all alike": runs[:2]}  # only the seed differs
    assert curves.grouped(runs[:1]) == {"a": runs[:1]}
    named = [run_of(tmp_path / f"lines-{i}", i, 1e-3, 0.0) for i in range(3)]
    assert curves.grouped(named) == {"lines": named}
    curves.run(runs, CurvesConfig(out=str(tmp_path / "out"), names=("fast", "slow")))
    drawn = read_json(tmp_path / "out/curves.json")["panels"][0]["series"]
    assert [(line["name"], line["runs"]) for line in drawn] == [
        ("fast", runs[:2]),
        ("slow", runs[2:]),
    ]
    with pytest.raises(BadInput, match="the runs form 2 curves; give one name for each"):
        curves.run(runs, CurvesConfig(out=str(tmp_path / "out"), names=("fast",)))
    for again in (runs[0], f"{runs[0]}/", f"{runs[1]}/../a"):
        with pytest.raises(BadInput, match="is given twice"):
            parse_arguments(curves.SUBCOMMAND, [runs[0], runs[1], again, "out=x"])
    (tmp_path / "d").mkdir()
    (tmp_path / "d/config.json").write_text("7")
    with pytest.raises(BadInput, match=r"d/config.json is damaged: it holds no recipe"):
        curves.grouped([str(tmp_path / "d")])
    (tmp_path / "d/result.json").write_text("{}")
    with pytest.raises(BadInput, match=r"result.json is damaged: it names no selected checkpoint"):
        resolve(tmp_path / "d")
    curve = curves.average(runs[:2], "train", "loss")
    assert curve["x"] == [1, 2, 3]
    assert curve["mean"] == pytest.approx([4.1, 3.1, 2.1])
    assert curve["deviation"] == pytest.approx([0.02**0.5] * 3)
    smooth = curves.average(runs[2:], "train", "loss", smooth=3)
    assert smooth["mean"] == pytest.approx([4.5, 4, 3.5])
    smooth = curves.average(runs[2:], "train", "loss", smooth=2)
    assert smooth["mean"] == pytest.approx([4.5, 3.5, 3])
    with pytest.raises(BadInput, match="no accuracy over step in train; it has loss, step"):
        curves.average(runs, "train", "accuracy")


def test_validations_have_the_epoch_of_their_step(tmp_path: Path) -> None:
    """Their lines do not name it."""
    run = run_of(tmp_path / "a", 0, 1e-3, 0.0)
    log = [{"event": "train", "step": s, "loss": 5.0, "epoch": s / 40} for s in (10, 20)]
    log += [{"event": "validation", "step": s, "loss": float(s)} for s in (5, 15, 50)]
    (tmp_path / "a/log.jsonl").write_text("\n".join(map(json.dumps, log)))
    curve = curves.average([run], "validation", "loss", "epoch")
    assert curve["x"] == pytest.approx([5 / 40, 15 / 40, 50 / 40])
    assert curve["mean"] == [5.0, 15.0, 50.0]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            [{"surgery": [{"op": "keep_layers", "first": n, "every": None}]} for n in (3, 6)],
            ["surgery=keep_layers(first=3)", "surgery=keep_layers(first=6)"],
        ),
        (
            [{"init": f"{name}/best"} for name in ("english", "brackets")],
            ['init="english/best"', 'init="brackets/best"'],
        ),
        ([{"data": [f"{x}/s", "t"]} for x in "ab"], ["data=a/s+t", "data=b/s+t"]),
        ([{"init": None}, {"init": "None"}], ["init=None", 'init="None"']),
    ],
)
def test_runs_with_different_settings_are_never_one_curve(
    settings: list[dict[str, Any]], names: list[str], tmp_path: Path
) -> None:
    """Runs of different operations, checkpoints or stores have a curve each, even if the short
    forms of these settings are the same."""
    runs = [run_of(tmp_path / str(i), i, 1e-3, 0.0, own) for i, own in enumerate(settings)]
    assert curves.grouped(runs) == {name: [run] for name, run in zip(names, runs, strict=True)}


@pytest.mark.parametrize("page", [style.LIGHT, style.DARK, style.BOTH])
def test_the_same_figure_is_the_same_file(page: dict[str, Any], tmp_path: Path) -> None:
    files = []
    for name in ("a.svg", "b.svg"):
        with style.colours(page):
            figure = style.new_figure(2, 2)
            figure.subplots().plot([1, 2], color="C1")
            style.write(figure, tmp_path / name)
            files.append((tmp_path / name).read_text())
    assert files[0] == files[1]
    palette = {"light": "d55e00", "dark": "ff8c42"}
    assert f"#{palette['dark' if page is style.DARK else 'light']}" in files[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "b.svg"]


def test_a_logarithmic_axis_shows_plain_numbers(tmp_path: Path) -> None:
    noise = [{"std": 10.0**-k, "mean": 10.0**-k, "deviation": 0.0} for k in (2, 4)]
    result: dict[str, Any] = {
        "models": [{"name": "a $ sign", "noise": noise}],
        "rows": [0],
        "draws": 3,
        "data": {"store": "words", "examples": 1},
    }
    written = style.write_light_and_dark(partial(perturbation.draw, result), tmp_path, "noise")
    names = ["noise.svg", "noise.png", "noise.pdf", "noise-dark.svg", "noise-dark.png"]
    assert [path.name for path in written] == names
    pdf = (tmp_path / "noise.pdf").read_bytes()
    style.write_light_and_dark(partial(perturbation.draw, result), tmp_path, "noise")
    assert pdf == (tmp_path / "noise.pdf").read_bytes()  # it contains no date
    svg = (tmp_path / "noise.svg").read_text()
    assert "mathdefault" not in svg
    assert "<!-- 0.01 -->" in svg
    assert "<!-- a $ sign -->" in svg  # the text itself, not a formula
    (tmp_path / "pwcca.json").write_text('{"analysis": "pwcca"}')
    with pytest.raises(BadInput, match=r"pwcca.json is not a complete result of pwcca \(KeyError"):
        redraw([str(tmp_path / "pwcca.json")])
