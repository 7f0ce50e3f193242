"""docs/findings.md: its overview and its scores come from the kept results, and these are whole
and small.
"""

from __future__ import annotations

import csv
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers import ROOT, script
from scipy import stats

from xformer import checkpoint

LARGEST = 40_000_000  # bytes of results/
# rows of the table on predictions for STS-B: the kept study, and the levels of its runs
FOLLOWED: dict[str, tuple[str, dict[str, str]]] = {
    "MiniLM (sentence-tuned), unchanged": ("zhang2021-operations-full", {"model": "whole"}),
    "MiniLM, word embeddings shuffled": ("zhang2021-operations-full", {"model": "shuffled"}),
    "MiniLM, tokens shifted (permuted STS-B)": (
        "kao2021-mappings-full",
        {"task": "stsb", "mapping": "shift", "model": "minilm"},
    ),
    "MiniLM, tokens mapped at random": (
        "kao2021-mappings-full",
        {"task": "stsb", "mapping": "random", "model": "minilm"},
    ),
    "MiniLM, fresh word embeddings": ("zhang2021-operations-full", {"model": "clean-words"}),
    "MiniLM's twin, all fresh": ("zhang2021-operations-full", {"model": "clean"}),
    "20 M tokens of nested pairs of equal tokens": ("brackets-small", {"corpus": "nested-equal"}),
    "20 M tokens of nested pairs of different ones": (
        "brackets-small",
        {"corpus": "nested-different"},
    ),
    "10 M tokens of nested brackets": ("onset-short", {"corpus": "nesting", "step": "5000"}),
    "10 M tokens of English": ("onset-short", {"corpus": "english", "step": "5000"}),
    "10 M tokens of k-Shuffle Dyck": ("onset-short", {"corpus": "shuffle", "step": "5000"}),
}
# rows of the first table, by their beginning: the claims that decide whether they hold
HOLD: dict[str, tuple[str, list[str]]] = {
    "With shuffled": ("zhang2021-operations-full", ["shuffled word"]),
    "With its layers": ("zhang2021-operations-full", ["an encoder with its layers reversed"]),
    "The first half": ("zhang2021-operations-full", ["without the last half"]),
    "With each matrix": ("zhang2021-operations-full", ["the oracle"]),
    "An encoder of German": ("zhang2021-foreign-short", ["the German encoder beats a clean"]),
    "Nested brackets": ("onset-short", ["5,000 steps on nested brackets"]),
    "English is better": ("chiang2020-table1-mini", ["pre-training on English beats nested"]),
    "Brackets beat": ("chiang2020-table1-mini", ["nested brackets beat uniform noise"]),
    "Brackets of 50": ("chiang2020-substitute-mini", ["brackets of 50 tokens are worse"]),
    "It helps to": ("chiang2020-substitute-mini", ["substitution makes brackets"]),
    "It helps brackets": ("chiang2020-table6-short", ["learning English words first"]),
    "On permuted": ("kao2021-figure2-full", ["the pre-trained encoder beats", "STS-B"]),
    "The same on DNA": ("kao2021-figure2-full", ["the pre-trained encoder beats", "splice"]),
    "The same on prot": ("kao2021-figure2-full", ["the pre-trained encoder beats", "local"]),
    "The same on music": ("kao2021-figure2-mini", ["the pre-trained encoder", "every kind"]),
    "Tokens that": ("kao2021-mappings-full", ["random mappings"]),
    "Fresh word": ("kao2021-figure2-full", ["fresh word embeddings"]),
    "With 1 %": ("kao2021-one-percent-full", ["permuted STS-B"]),
    "Adam is": ("kao2021-optimizers-mini", ["at 1e-4 Adam"]),
    "A text encoder": ("kao2021-inside-mini", ["than like a random model"]),
    "With only": ("huang2021-layers-full", ["all layers but the first"]),
    "A fresh head": ("huang2021-heads-full", ["a head of the last layer"]),
    "WNLI as": ("huang2021-intermediate-small", ["WNLI as the intermediate task"]),
}
PAGE = (ROOT / "docs/findings.md").read_text(encoding="utf-8")


def overview(text: str) -> list[list[str]]:
    table = text.split(script("overview").BEGIN)[1].split(script("overview").END)[0]
    rows = [line.strip("|").split("|") for line in re.findall(r"^\|.*", table, re.MULTILINE)]
    return [[cell.strip() for cell in row] for row in rows]


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The study and the text of each section of the page that begins with the name of a study."""
    for section in re.split(r"\n###? ", text)[1:]:
        if named := re.search(r"\n\n(?:The study )?`([\w-]+)`", section):
            yield named[1], section


def kept_scores(study: str) -> dict[str, set[str]]:
    """The scores of all seeds of each cell of a study as the page shows them, in the order of the
    seeds: {scores: their mean ± standard deviation}. Several fine-tunings of a pre-training are
    averaged."""
    cells: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for path in (ROOT / "results").glob(f"{study}-*.results.csv"):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["state"] == "done" and row["value"] and row["seed"]:
                    seed, value = int(row.pop("seed")), float(row.pop("value"))
                    of_run = ("run", "key", "seconds", "draw")
                    which = [v for k, v in row.items() if k not in of_run]
                    cell = cells.setdefault((path.name, *which), {})
                    cell.setdefault(seed, []).append(100 * value)
    shown: dict[str, set[str]] = {}
    for cell in cells.values():
        scores = [float(np.mean(cell[seed])) for seed in sorted(cell)]
        if len(scores) > 1:
            summary = f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}"
            shown.setdefault(", ".join(f"{score:.1f}" for score in scores), set()).add(summary)
    return shown


def test_the_overview_is_of_the_present_results() -> None:
    assert script("overview").page(PAGE) == PAGE, "write it anew: python docs/overview.py"
    verdicts = [row[1].strip("*") for row in overview(PAGE)[2:]]
    assert set(verdicts) == {"holds", "fails", "undecided"}
    share = f"{verdicts.count('undecided')} of {len(verdicts)} claims are undecided ("
    assert share in PAGE.split(script("overview").BEGIN)[1]


def test_the_first_table_says_which_claims_hold() -> None:
    rows = PAGE.split("| claim | encoder ")[1].split("\n\n")[0].splitlines()[2:]
    said = {claim.strip(): holds.strip() for _, claim, *_, holds, _ in (r.split("|") for r in rows)}
    said = {claim: holds for claim, holds in said.items() if not claim.startswith("**")}
    assert len(said) == len(HOLD)
    for claim, holds in said.items():
        ((study, words),) = (HOLD[begin] for begin in HOLD if claim.startswith(begin))
        kept = json.loads((ROOT / f"results/{study}.claims.json").read_text())["claims"]
        verdicts = {c["verdict"] for c in kept if all(word in c["text"] for word in words)}
        assert len(verdicts) == 1, claim
        word = {"holds": "**yes**", "fails": "**no**", "undecided": "undecided"}[verdicts.pop()]
        assert holds.startswith(word), claim


def test_every_list_of_scores_is_kept() -> None:
    """Also the mean and the deviation in the cell before it."""
    lists, checked = re.compile(r"-?\d+\.\d(?:, -?\d+\.\d)+"), 0
    for study, section in sections(PAGE):
        kept = kept_scores(study)
        assert any((ROOT / "results").glob(f"{study}-*.results.csv")), f"{study} is not kept"
        for line in re.findall(r"^\|.*\|$", section, re.MULTILINE):
            cells = [cell.replace("*", "").strip() for cell in line.strip("|").split("|")]
            for before, cell in zip(["", *cells], cells, strict=False):
                for scores in lists.findall(cell):
                    assert scores in kept, f"{study}: {scores}"
                    summary = re.match(r"-?\d+\.\d ± \d+\.\d", before)
                    if summary:
                        assert summary[0] in kept[scores], f"{study}: {before}: {scores}"
                    checked += 1
    overview_ = script("overview")
    by_hand = overview_.replaced(PAGE, overview_.BEGIN, "")  # it has differences, not scores
    tables = "".join(re.findall(r"^\|.*\n", by_hand, re.MULTILINE))
    assert checked == len(lists.findall(tables)) > 100  # each is in a section that names a study


def test_kept_results_are_whole_and_small() -> None:
    directory = ROOT / "results"
    assert sum(path.stat().st_size for path in directory.rglob("*")) < LARGEST
    for path in directory.glob("*.results.csv"):
        with path.open(encoding="utf-8") as file:
            keys = {row["key"] for row in csv.DictReader(file) if row["state"] == "done"}
        assert all((directory / f"{key}.zip").is_file() for key in keys), path
    for path in directory.glob("*.claims.json"):
        claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
        keys = {key for claim in claims for pair in claim["pairs"] for _, key, *_ in pair}
        assert all((directory / f"{key}.zip").is_file() for key in keys), path


def test_a_row_of_the_overview(tmp_path: Path) -> None:
    part: dict[str, Any] = {
        "text": "a is better",
        "part": "low",
        "verdict": "holds",
        "registered": "0123abc of 2026",
    }
    part |= {"shown": "+1.2 ± 0.5", "published": -2, "digits": 1, "hours": 3.21}
    part |= {"pairs": [[], [], []]}
    parts = [part, {**part, "part": "high", "shown": "+4.0", "published": None}]
    path = tmp_path / "huang2021-heads-mini.claims.json"
    path.write_text(json.dumps({"claims": parts}))
    text = script("overview").page(PAGE, tmp_path)
    row = "| a is better | **holds** | low +1.2 ± 0.5; high +4.0 | low -2.0 | 3 | 3.2 | "
    assert row + "0123abc of 2026 | `huang2021-heads-mini` |" in text
    assert "0 of 1 claims are undecided (0%)." in text
    del part["shown"]
    for content in ({"claims": [part]}, {}):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="run the study huang2021-heads-mini again"):
            script("overview").page(PAGE, tmp_path)


def test_decided_claims_are_resampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The interval contains the difference, and a claim whose margin lies in it is named. A claim
    about an analysis, whose predictions are not kept, has none."""
    resampled = script("resampled")
    assert resampled.main(tmp_path) == 2
    assert capsys.readouterr().out.startswith(f"error: {tmp_path} has no *.claims.json")
    path = ROOT / "results/onset-short.claims.json"
    records = json.loads(path.read_text(encoding="utf-8"))["claims"]
    claim = next(record for record in records if record["verdict"] == "holds")
    for key in {key for pair in claim["pairs"] for _, key, *_ in pair}:
        (tmp_path / f"{key}.zip").symlink_to(ROOT / "results" / f"{key}.zip")
    low, high = resampled.interval(tmp_path, claim)
    assert low < claim["effect"] < high
    within = {**claim, "text": "within", "margin": (low + claim["effect"]) / 2}
    lost = {**claim, "text": "lost", "pairs": [[[1.0, "lost", "valid", "spearman"]]] * 3}
    few = {**claim, "text": "few", "pairs": claim["pairs"][:2]}
    open_ = {**claim, "text": "open", "verdict": "undecided"}
    every = [claim, within, lost, few, open_]
    (tmp_path / path.name).write_text(json.dumps({"claims": every}))
    assert resampled.main(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"same side     {low:+.2f} to {high:+.2f}  onset-short: {claim['text']}"
    assert [line.split("  ")[0] for line in lines[1:4]] == ["crosses", *["no interval"] * 2]
    assert lines[4:] == ["1 same side, 1 crosses, 2 no interval"]


@pytest.mark.parametrize(
    ("effect", "ends", "expected"),
    [(1, (-1, 1.5), "same side"), (1, (-1, 2.1), "crosses"), (3, (2.1, 4), "same side")],
)
def test_the_interval_of_a_tie(effect: float, ends: tuple[float, float], expected: str) -> None:
    assert script("resampled").side({"tie": True, "margin": 2, "effect": effect}, *ends) == expected


@pytest.mark.slow
def test_the_page_says_how_many_claims_resampled_examples_leave_decided() -> None:
    resampled = script("resampled")
    states = [state for state, *_ in resampled.decided(ROOT / "results")]
    same, known = states.count(resampled.SAME), len(states) - states.count(resampled.NONE)
    assert f"{same} of {known} decided claims\nstay on their side" in PAGE
    assert known == same + 1  # the page names the other one


def test_attention_to_equal_tokens(tmp_path: Path) -> None:
    """To the other token of a pair of brackets, or to the equal tokens of the other text; or to
    neighbours."""
    partners = script("partners")
    assert np.argwhere(partners.nested([5, 6, 6, 5, 7])).tolist() == [
        [0, 3],
        [1, 2],
        [2, 1],
        [3, 0],
    ]
    assert np.argwhere(partners.nested([5, 5, 5])).tolist() == [[0, 1], [1, 0]]
    # special tokens are at both ends, and between two texts
    rows = [[2, 7, 7, 8, 3, 9, 7, 3], [2, 8, 8, 9, 3]]
    of_two = np.argwhere(partners.partners(np.array(rows[0])))
    assert of_two.tolist() == [[1, 6], [2, 6], [6, 1], [6, 2]]
    # head 0 attends uniformly, and head 1 of layer 1 only to the last partner
    maps = []
    for row in rows:
        heads = np.full((len(row), len(row), 2), 1 / len(row), np.float16)
        heads[..., 1] = 0
        for i, j in np.argwhere(partners.partners(np.array(row))):
            heads[i, :, 1] = 0
            heads[i, j, 1] = 1
        maps.append(heads.reshape(-1, 2))
    sizes = np.array(list(map(len, rows)))
    with h5py.File(tmp_path / "F.h5", "w") as file:
        file["attention/1"] = np.concatenate(maps)
        file["tokens"] = np.concatenate(rows)
        file["sizes"] = sizes
        file["offsets"] = np.cumsum([0, *sizes])
        file["attention_offsets"] = np.cumsum([0, *sizes**2])
    # three tokens of the first row have one, one and two partners; two of the second have one
    uniform = ((1 + 1 + 2) / 8 + 2 / 5) / 5
    shares, expected = partners.shares(str(tmp_path / "F.h5"))
    np.testing.assert_allclose(shares[1], [uniform, 1], rtol=1e-3)
    assert expected == pytest.approx(uniform)
    # in the second row, the first token and the separator have no neighbours
    before = np.argwhere(partners.neighbours(np.array(rows[1]), -1)).tolist()
    after = np.argwhere(partners.neighbours(np.array(rows[1]), 1)).tolist()
    assert before == [[1, 0], [2, 1], [3, 2]]
    assert after == [[1, 2], [2, 3], [3, 4]]
    shares, expected = partners.shares(str(tmp_path / "F.h5"), offset=-1)
    assert expected == pytest.approx((5 / 8 + 3 / 5) / 8)
    assert shares[1][0] == pytest.approx(expected, rel=1e-3)


def test_the_page_says_what_predictions_follow(shared: Path) -> None:
    """Each row of the table is the mean over the kept runs of its study at full length."""
    table = PAGE.split("### What predictions on STS-B follow")[1].split("\n## ")[0]
    shown = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"\|.*", table)]
    runs: dict[str, list[str]] = {}
    for label, (study, wanted) in FOLLOWED.items():
        with (ROOT / f"results/{study}.results.csv").open(encoding="utf-8") as file:
            every = [row for row in csv.DictReader(file) if row["metric"] == "spearman"]
        wanted = {"split": "valid", **wanted}
        of_cell = [row for row in every if wanted.items() <= row.items()]
        assert len(of_cell) >= 3
        runs[label] = [str(ROOT / f"results/{row['key']}.zip") for row in of_cell]
    names = list(dict.fromkeys(name for of_cell in runs.values() for name in of_cell))
    measured = script("stsb").correlations(shared / "glue/STS-B/dev.tsv", names)
    plain, rare = measured["words in common"], measured["words in common, by rarity"]
    assert shown[2][1:4] == ["", *(f"{100 * value:.1f}" for (value,) in (plain, rare))]
    assert [row[0] for row in shown[3:]] == list(FOLLOWED)
    for label, *cells, study in shown[3:]:
        assert FOLLOWED[label][0].startswith(study)
        means = np.mean([measured[name] for name in runs[label]], axis=0)
        assert cells == [f"{100 * value:.1f}" for value in means], label


def test_similarities_without_fine_tuning(tmp_path: Path) -> None:
    stsb = script("stsb")
    assert stsb.shared("A man, a plan.", "the plan of A MAN") == 3 / 5
    assert stsb.shared("a", "b") == stsb.shared("", "!") == 0
    weight = stsb.rarity(["a b", "A c", "a a", "d"])
    assert [weight(word) for word in "abx"] == pytest.approx(np.log([4 / 4, 4 / 2, 4 / 1]))
    assert stsb.shared("a b", "b x", weight) == pytest.approx(np.log(2) / np.log(8))
    path = tmp_path / "dev.tsv"
    pairs = [("a b", "a b", 5), ("a b", "b c", 3), ("a b", "c d", 1), ("a", "b", 1)]
    lines = ["index\tsentence1\tsentence2\tscore"]
    lines += [f"{i}\t{one}\t{other}\t{score}" for i, (one, other, score) in enumerate(pairs)]
    path.write_text("\n".join(lines), encoding="utf-8")
    train = [f"{i}\t{text}\t{text}\t1" for i, text in enumerate(["a", "a b", "c", "d", "e"])]
    (tmp_path / "train.tsv").write_text("\n".join([lines[0], *train]), encoding="utf-8")
    outputs = np.array([[3], [4], [2], [1]], np.float32)
    for name, labels in (("run", [5, 3, 1, 1]), ("other", [5, 3, 1, 2])):
        np.savez(tmp_path / "valid.npz", outputs=outputs, label=np.array(labels, np.float32))
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as parts:
            parts.write(tmp_path / "valid.npz", "predictions/valid.npz")
    measured = stsb.correlations(path, ["micro/english", str(tmp_path / "run.zip")])
    assert measured["words in common"] == pytest.approx((1,))
    weights = np.log([10 / 5, 10 / 3, 10 / 3])  # of a, b and c; two sentences of a pair are equal
    share = weights[1] / weights.sum()
    three = [stats.spearmanr([3, 4, 2, 1], x)[0] for x in ([5, 3, 1, 1], [1, 1 / 3, 0, 0])]
    three.append(stats.spearmanr([3, 4, 2, 1], [1, share, 0, 0])[0])
    assert measured[str(tmp_path / "run.zip")] == pytest.approx(tuple(three))
    with pytest.raises(ValueError, match=r"other\.zip was not scored on this file"):
        stsb.correlations(path, [str(tmp_path / "other.zip")])
    vectors = checkpoint.load("micro/english").encode([text for pair in pairs for text in pair[:2]])
    a, b = vectors[::2], vectors[1::2]
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    scores = [score for *_, score in pairs]
    assert measured["micro/english"] == pytest.approx((stats.spearmanr(cosines, scores)[0],))
