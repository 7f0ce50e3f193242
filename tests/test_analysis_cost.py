"""The cost of a model: its counts, how it was made, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import looking
import pytest

from xformer import checkpoint as checkpoints
from xformer.analysis import cost
from xformer.analysis.cost import CostConfig, base_of
from xformer.data.errors import BadInput
from xformer.surgery import apply, parse_operation


def derived(base: Path, path: Path, *operations: str) -> str:
    made = apply(checkpoints.load(base), [parse_operation(text) for text in operations])
    checkpoints.save(made, path)
    return str(path)


@pytest.mark.slow
def test_counts_speed_and_origin(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = looking.checkpoint(tmp_path / "base")
    fewer = derived(base, tmp_path / "fewer", "clean(seed=3)", "keep_layers(first=1)")
    config = CostConfig(
        out=str(tmp_path / "out"), threads=1, repeats=1, rows=2, length=5, names="whole,half"
    )
    cost.run([str(base), fewer], config)
    models = json.loads((tmp_path / "out/cost.json").read_text())["models"]
    assert [m["name"] for m in models] == ["whole", "half"]
    half = checkpoints.load(fewer)
    model = cost._with_head(half, config).model()
    assert models[1]["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    C, F = looking.HIDDEN, 33
    layer = 8 * C * C + 4 * C * F + 4 * C * 5
    apart = [a["flops_per_token"]["forward"] for a in models]
    assert apart[0] - apart[1] == pytest.approx(layer)
    assert models[1]["made"]["how"].startswith("clean(seed=3, ")
    assert models[1]["made"]["identical"]
    assert models[0]["made"]["how"] == "copy"
    assert models[0]["made"]["identical"]
    halved = "micro/english"  # 16 bits on disk, 32 in memory and in a copy
    made = cost.seconds_to_make(halved, {halved: checkpoints.load(halved)}, tmp_path)
    assert (made["how"], made["identical"]) == ("copy", True)
    assert models[0]["speed"]["training"]["relative"] == 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.suffix == ".svg")
    assert not list((tmp_path / "out").glob(".*"))
    assert "half: " in capsys.readouterr().out


def test_masked_words_are_counted_and_timed(tmp_path: Path) -> None:
    config = CostConfig(out="x", threads=1, repeats=2, rows=2, length=5, head="mlm")
    checkpoint = checkpoints.load(looking.checkpoint(tmp_path / "base"))
    with_head = cost._with_head(checkpoint, config)
    ranks = cost.processes.start(cost.SystemConfig(threads=1))
    (taken,) = cost.time_models([with_head], config, ranks)
    assert [len(seconds) for seconds in taken.values()] == [2, 2]
    assert min(taken["forward"] + taken["training"]) > 0
    C, V, masked = looking.HIDDEN, looking.PIECES, 2 / 10
    bare = cost.parameters_and_flops(
        cost._with_head(checkpoint, CostConfig(out="x", rows=2, length=5)),
        CostConfig(out="x", rows=2, length=5),
    )
    pooled = (2 * C * C + 4 * C) / 5
    more = cost.parameters_and_flops(with_head, config)["flops_per_token"]["forward"]
    more -= bare["flops_per_token"]["forward"] - pooled
    assert more == pytest.approx(masked * (2 * C * C + 2 * C * V))


def test_the_base_is_the_nearest_checkpoint_before_operations(tmp_path: Path) -> None:
    base = checkpoints.load(looking.checkpoint(tmp_path / "base"))
    first = apply(base, [parse_operation("reverse_layers")])
    second = apply(first, [parse_operation("clean(seed=1)")])
    others = {"base": base, "first": first, "second": second}
    assert [base_of(c, others) for c in others.values()] == [None, "base", "first"]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    base = str(looking.checkpoint(tmp_path / "base"))
    with pytest.raises(BadInput, match=r"length=99: .* takes rows of at most 17 tokens"):
        cost.run([base], CostConfig(out=str(tmp_path / "out"), length=99))
    with pytest.raises(BadInput, match="give 2 different names"):
        cost.run([base, base], CostConfig(out=str(tmp_path / "out"), names=("a",)))
    bad = looking.checkpoint(tmp_path / "bad", damage="encoder.layers.1.mlp.up.bias")
    with pytest.raises(BadInput, match=r"bad: encoder.layers.1.mlp.up.bias holds NaN"):
        cost.run([str(bad)], CostConfig(out=str(tmp_path / "out"), length=9))
    assert not (tmp_path / "out").exists()
