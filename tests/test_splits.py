"""Splits that a source names itself, and splits that are drawn with every class in proportion."""

from __future__ import annotations

import csv
import json
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers import Done, Forks, good, refused

from xformer.data.store import Store, open_store

Rows = list[dict[str, str]]
HEAD = ["sequence", "target", "set", "validation"]
LETTERS = list("ACDEFGHIKLMNPQRSTVWY")


def proteins(number: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(LETTERS, 12)) for _ in range(number)]


def flip(train: int, valid: int, test: int) -> Rows:
    """Rows like those of FLIP's two_vs_rest.csv, in any order."""
    marks = [("train", "")] * train + [("train", "True")] * valid + [("test", "")] * test
    order = np.random.default_rng(1).permutation(len(marks))
    return [
        dict(zip(HEAD, (text, f"{i / 7:.3f}", *marks[i]), strict=True))
        for i, text in zip(order, proteins(len(marks)), strict=True)
    ]


def write(rows: Rows, path: Path) -> Path:
    """Write the rows in the format given by the file's ending."""
    form, names = path.suffix, list(rows[0])
    if form == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif form == ".jsonl":
        # empty values are left out, as a program may do
        lines = [{k: v for k, v in row.items() if v != ""} for row in rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif form == ".fasta":
        path.write_text(
            "".join(
                f">s{i} TARGET={r['target']} SET={r['set']} VALIDATION={bool(r['validation'])}\n"
                f"{r['sequence']}\n"
                for i, r in enumerate(rows)
            )
        )
    else:
        mark = "," if form == ".csv" else "\t"
        path.write_text(
            "\n".join(mark.join(line) for line in [names, *(list(r.values()) for r in rows)])
        )
    return path


def task(forks: Forks, name: str, path: Path, *options: str) -> Done:
    text = ["--text", "sequence", "--label", "target", "--tokenizer", str(path.parent / "tok")]
    return forks.run(
        "preprocess.py",
        "task",
        name,
        "--input",
        path,
        *(text * (name == "tsv")),
        "--output",
        path.parent / "store",
        "--overwrite",
        *options,
    )


def sizes(store: Store) -> dict[str, int]:
    return {name: store.split(name).rows for name in store.splits}


def tokenizer(forks: Forks, place: Path) -> None:
    (place / "words.txt").write_text("\n".join(proteins(50)))
    good(
        forks.run(
            "preprocess.py",
            "tokenizer",
            "--kind",
            "wordpiece",
            "--vocab-size",
            "60",
            "--input",
            place / "words.txt",
            "--output",
            place / "tok",
        )
    )


# ------------------------------------------------------------------- what the source says


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet", "fasta"])
def test_two_vs_rest(form: str, forks: Forks, tmp_path: Path) -> None:
    """FLIP's columns name the splits in every file format, and a note says so."""
    rows = flip(381, 43, 830)
    path = write(rows, tmp_path / f"two_vs_rest.{form}")
    done = good(task(forks, "protein", path, "--kind", "score"))
    store = open_store(tmp_path / "store")
    assert sizes(store) == {"train": 381, "valid": 43, "test": 830}
    case = str.upper if form == "fasta" else str
    columns = [case("set"), case("validation")]
    assert store.meta["origin"]["split_columns"] == columns
    assert "seed" not in store.meta["origin"]
    told = "name the splits: train 381, valid 43, test 830 rows"
    assert done.err.splitlines() == [f"note: {columns[0]!r} and {columns[1]!r} of {path} {told}"]
    labels = store.split("valid").columns["label"].tolist()
    assert labels == pytest.approx([float(r["target"]) for r in rows if r["validation"]], rel=1e-6)


def test_a_table_of_texts(forks: Forks, tmp_path: Path) -> None:
    """`task tsv` and GLUE's copies read these columns too. The values may be written in any usual
    way.
    """
    tokenizer(forks, tmp_path)
    values = ["train", "Training", "TRAIN", "val", "dev", "Validation", "valid", "test", "Test "]
    rows = [
        {"sequence": text, "target": "xy"[i % 2], "Split": values[i % 9]}
        for i, text in enumerate(proteins(90))
    ]
    done = good(task(forks, "tsv", write(rows, tmp_path / "all.tsv")))
    assert sizes(open_store(tmp_path / "store")) == {"train": 30, "valid": 40, "test": 20}
    assert "note: 'Split' of" in done.err
    named = [
        {"sentence": r["sequence"], "label": str(i % 2), "split": r["Split"]}
        for i, r in enumerate(rows)
    ]
    good(
        forks.run(
            "preprocess.py",
            "task",
            "glue/sst2",
            "--input",
            write(named, tmp_path / "sst2.csv"),
            "--tokenizer",
            tmp_path / "tok",
            "--output",
            tmp_path / "store",
            "--overwrite",
        )
    )
    assert sizes(open_store(tmp_path / "store")) == {"train": 30, "valid": 40, "test": 20}


def test_a_column_of_marks_alone(forks: Forks, tmp_path: Path) -> None:
    rows = [{**row, "set": ""} for row in flip(60, 9, 0)]
    rows = [{k: v for k, v in row.items() if k != "set"} for row in rows]
    done = good(task(forks, "protein", write(rows, tmp_path / "a.csv"), "--kind", "score"))
    assert sizes(open_store(tmp_path / "store")) == {"train": 60, "valid": 9}
    assert "note: 'validation' of" in done.err


def test_without_a_row_to_validate_on(forks: Forks, tmp_path: Path) -> None:
    path = write(flip(60, 0, 9), tmp_path / "a.csv")
    done = good(task(forks, "protein", path, "--kind", "score"))
    assert sizes(open_store(tmp_path / "store")) == {"train": 60, "test": 9}
    assert "warning: there is no validation split; train with train.select=last" in done.err


def test_a_file_beside_its_test_set(forks: Forks, tmp_path: Path) -> None:
    """The file is divided into train and valid; the test set stays whole."""
    rows = [{k: row[k] for k in HEAD[:2]} for row in flip(109, 0, 0)]
    path, test = write(rows[:100], tmp_path / "dev.csv"), write(rows[100:], tmp_path / "other.csv")
    good(task(forks, "protein", path, "--kind", "score", "--test", str(test)))
    assert sizes(open_store(tmp_path / "store")) == {"train": 90, "valid": 10, "test": 9}
    again = task(forks, "protein", path, "--kind", "score", "--valid", str(test), "--overwrite")
    refused(again, "--valid cannot be combined with --input", "dev.csv, which is a file")


def test_another_column_or_none(forks: Forks, tmp_path: Path) -> None:
    rows = [
        {**row, "mine": "val" if i % 3 == 0 else "train"} for i, row in enumerate(flip(90, 0, 9))
    ]
    path = write(rows, tmp_path / "a.csv")
    good(task(forks, "protein", path, "--kind", "score", "--split-column", "mine"))
    assert sizes(open_store(tmp_path / "store")) == {"train": 66, "valid": 33}
    done = good(task(forks, "protein", path, "--kind", "score", "--split-column", "none"))
    store = open_store(tmp_path / "store")
    assert sizes(store) == {"train": 89, "valid": 5, "test": 5}
    assert store.meta["origin"]["seed"] == 0
    assert "note: splits were drawn at random, with seed 0: train 89" in done.err


def test_a_split_has_the_same_names_in_files_and_in_columns(forks: Forks, tmp_path: Path) -> None:
    rows = flip(60, 9, 0)
    names = ["devel" if row["validation"] else "training" for row in rows]
    plain = [{k: row[k] for k in HEAD[:2]} for row in rows]
    column = [{**row, "set": name} for row, name in zip(plain, names, strict=True)]
    (tmp_path / "files").mkdir()
    for name in ("training", "devel"):
        some = [row for row, own in zip(plain, names, strict=True) if own == name]
        write(some, tmp_path / "files" / f"{name}.csv")
    for source in (tmp_path / "files", write(column, tmp_path / "a.csv")):
        good(task(forks, "protein", source, "--kind", "score", "--overwrite"))
        assert sizes(open_store(tmp_path / "store")) == {"train": 60, "valid": 9}


@pytest.mark.parametrize("name", ["secondary_structure", "conservation"])
def test_flips_own_headers(name: str, shared: Path, forks: Forks, tmp_path: Path) -> None:
    """The headers of FLIP's own proteins name their splits; so does a csv with the same columns."""
    with zipfile.ZipFile(shared / f"protein/flip/{name}_splits.zip") as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "splits"
    heads = [
        line[1:].split()
        for line in (folder / "sampled.fasta").read_text().splitlines()
        if line.startswith(">")
    ]
    texts = (folder / "sequences.fasta").read_text().split(">")[1:]
    sequences = {text.split()[0]: "".join(text.split()[1:]) for text in texts}
    rows = [
        {
            "sequence": sequences[head[0]],
            "target": str(len(sequences[head[0]])),
            "set": head[1].removeprefix("SET="),
            "validation": head[2].removeprefix("VALIDATION="),
        }
        for head in heads
    ]
    expected = {"secondary_structure": [9712, 1080, 364], "conservation": [9392, 555, 519]}[name]
    good(task(forks, "protein", write(rows, tmp_path / "a.csv"), "--kind", "score"))
    assert list(sizes(open_store(tmp_path / "store")).values()) == expected


# ------------------------------------------------------------------- what is refused


def changed(i: int, **values: str) -> Rows:
    rows = flip(60, 9, 9)
    rows[i] |= values
    return rows


LATE = [{k: v for k, v in row.items() if k in ("sequence", "target")} for row in flip(60, 0, 0)]
REFUSED: list[tuple[Rows, str, list[str], str]] = [
    (
        changed(4, set="holdout"),
        "a.csv",
        [],
        "a.csv:6: column 'set' is 'holdout', which is not one of train, training, valid",
    ),
    (changed(4, set=""), "a.csv", [], "a.csv:6: column 'set' is ''"),
    (changed(4, set="7"), "a.jsonl", [], "a.jsonl:5: column 'set' is '7'"),
    (
        changed(4, validation="maybe"),
        "a.csv",
        [],
        "a.csv:6: column 'validation' is 'maybe', which is neither true nor false",
    ),
    (
        changed(4, set="test", validation="True"),
        "a.tsv",
        [],
        "a.tsv:6: column 'set' is 'test', but column 'validation' is 'True'",
    ),
    (changed(4, set="holdout"), "a.fasta", [], "a.fasta:9: SET is 'holdout', which is not one of"),
    (
        [{**row, "split": "train"} for row in flip(60, 9, 9)],
        "a.csv",
        [],
        "has the columns 'split' and 'set': which names the splits?",
    ),
    (flip(60, 9, 9), "a.csv", ["--split-column", "sett"], "no column 'sett'"),
    (flip(60, 9, 9), "a.fasta", ["--split-column", "set"], "a.fasta has no named columns"),
    ([*LATE, *flip(1, 1, 1)], "a.jsonl", [], "a.jsonl:61: this row has 'set', but the first"),
    (
        flip(60, 9, 9),
        "train.csv",
        ["--train", "--split-column", "set"],
        "is already given as a file of the split train; give it as --input FILE",
    ),
    (flip(60, 9, 9), "a.csv", ["--stratify"], "but the task has no classes"),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[3] for case in REFUSED])
def test_marks_that_cannot_be(
    case: tuple[Rows, str, list[str], str], forks: Forks, tmp_path: Path
) -> None:
    """One line names the file, the line and the value. Nothing is drawn and nothing is written."""
    rows, name, options, words = case
    path = write(rows, tmp_path / name)
    if options[:1] == ["--train"]:
        path, options = tmp_path, options[1:]
    done = task(forks, "protein", path, "--kind", "score", *options)
    refused(done, words)
    assert not (tmp_path / "store").exists()


def test_marks_that_cannot_be_are_left_out(forks: Forks, tmp_path: Path) -> None:
    path = write(changed(4, set="holdout"), tmp_path / "a.csv")
    good(task(forks, "protein", path, "--kind", "score", "--skip-bad"))
    assert sum(sizes(open_store(tmp_path / "store")).values()) == 77


def test_a_file_given_as_one_split_keeps_it(forks: Forks, tmp_path: Path) -> None:
    """The command line takes precedence over the splits named in the file, and a note says so."""
    for name in ("train.csv", "train.fasta"):
        path = write(flip(60, 9, 9), tmp_path / name)
        done = good(
            forks.run(
                "preprocess.py",
                "task",
                "protein",
                "--train",
                path,
                "--kind",
                "score",
                "--output",
                tmp_path / f"{name}.store",
            )
        )
        assert sizes(open_store(tmp_path / f"{name}.store")) == {"train": 78}
        assert "was given as the split train, so all its rows belong to it; its" in done.err
        assert "is not read" in done.err


# ------------------------------------------------------------------- classes in proportion


def classes(store: Store) -> dict[str, Counter[str]]:
    return {
        name: Counter(store.labels[i] for i in store.split(name).columns["label"])
        for name in store.splits
    }


def test_classes_in_proportion(forks: Forks, tmp_path: Path) -> None:
    """Each split gets its share of the rows of every class, and equal texts stay together."""
    counts = {"common": 400, "rare": 40, "other": 160, "two": 2}
    names = [name for name, count in counts.items() for _ in range(count)]
    texts = proteins(len(names))
    rows = [{"sequence": t, "label": n} for t, n in zip(texts, names, strict=True)]
    rows += [rows[i] for i in range(0, 600, 4)]  # the same texts again
    order = np.random.default_rng(3).permutation(len(rows))
    path = write([rows[i] for i in order], tmp_path / "a.csv")
    whole = Counter(row["label"] for row in rows)
    for seed in ("0", "1"):
        good(task(forks, "protein", path, "--stratify", "--seed", seed))
        store = open_store(tmp_path / "store")
        by_split = classes(store)
        for part in ("valid", "test"):
            for name, count in whole.items():
                assert by_split[part][name] == pytest.approx(0.05 * count, abs=2)
        assert by_split["train"]["two"] == 2
        assert sizes(store)["test"] == pytest.approx(0.05 * len(rows), abs=2)
        of_split = [
            {bytes(c[i]) for i in range(len(c))}
            for c in (store.split(s).columns["tokens"] for s in store.splits)
        ]
        assert sum(map(len, of_split)) == len(set().union(*of_split)) == len(texts)
        assert store.meta["origin"]["stratified"] is True


def test_a_class_that_a_split_lacks(forks: Forks, tmp_path: Path) -> None:
    """A warning names the class, whether the splits were drawn (in either way) or published."""
    names = ["a"] * 60 + ["b"] * 60 + ["c"] * 3
    rows = [{"sequence": t, "label": n} for t, n in zip(proteins(123), names, strict=True)]
    path = write(rows, tmp_path / "a.csv")
    for options in ([], ["--stratify"]):
        done = good(task(forks, "protein", path, *options))
        counts = classes(open_store(tmp_path / "store"))
        for part in ("valid", "test"):
            if lacking := sorted({"a", "b", "c"} - counts[part].keys()):
                said = f"warning: {part} has no rows of {len(lacking)} of the 3 classes: "
                assert said + ", ".join(lacking) in done.err
        assert "c" not in counts["valid"] or "c" not in counts["test"]
    rows = [
        {**row, "set": "test" if i % 2 and row["label"] != "c" else "train"}
        for i, row in enumerate(rows)
    ]
    done = good(task(forks, "protein", write(rows, tmp_path / "b.csv")))
    assert "warning: test has no rows of 1 of the 3 classes: c" in done.err
    refused(
        task(forks, "protein", tmp_path / "b.csv", "--stratify"), "but the source names its splits"
    )


def test_classes_that_may_be_mistakes(forks: Forks, tmp_path: Path) -> None:
    """What pandas writes for a missing label becomes a class, and so does another spelling."""
    names = ["Yes"] * 40 + ["no"] * 50 + ["NaN"] * 20 + ["yes"] * 10
    rows = [{"sequence": t, "label": n} for t, n in zip(proteins(120), names, strict=True)]
    done = good(task(forks, "protein", write(rows, tmp_path / "a.csv")))
    said = "warning: 'NaN' is a class, with 20 rows: if it stands for a missing label, take these"
    assert f"{said} rows out\n" in done.err
    assert "warning: some classes differ only in case, white space, or how their" in done.err
    assert ": 'Yes' (40 rows) and 'yes' (10 rows)\n" in done.err
    lines = [f"text {i}\t{name}\n" for i, name in enumerate(names)]
    (tmp_path / "b.tsv").write_text("".join(lines))
    listed = ["--no-header", "--text", "1", "--label", "2", "--labels", "Yes,no,NaN,yes"]
    done = good(task(forks, "tsv", tmp_path / "b.tsv", *listed, "--tokenizer", "micro/english"))
    assert "is a class" not in done.err
    assert "in case" not in done.err


def test_classes_of_real_proteins(shared: Path, forks: Forks, tmp_path: Path) -> None:
    """There are eleven places in the cell, with 63 to 1,411 proteins each. Every split has its
    share of each.
    """
    (tmp_path / "in").symlink_to(shared / "protein/localization_multiloc/multiloc")
    done = good(task(forks, "protein/localization", tmp_path / "in", "--stratify"))
    counts = classes(open_store(tmp_path / "store"))
    whole = sum(counts.values(), Counter())
    for part in ("valid", "test"):
        assert len(counts[part]) == 11
        for name, count in whole.items():
            assert counts[part][name] == pytest.approx(0.05 * count, abs=2)
    assert "warning" not in done.err


def grouped(number: int) -> Rows:
    """Rows of `number` groups, each of one to eight rows, in any order. Each eighth has none."""
    draw = np.random.default_rng(5)
    groups = [f"g{i}" for i in range(number) for _ in range(draw.integers(1, 9))]
    texts = proteins(len(groups))
    return [
        {
            "sequence": texts[i],
            "label": "ab"[i % 2],
            "name": f"n{i}",
            "family": "" if i % 8 == 0 else groups[i],
        }
        for i in draw.permutation(len(groups))
    ]


def names_of(store: Store) -> dict[str, list[str]]:
    """The column `id` of every split."""
    splits = ((name, store.split(name)) for name in store.splits)
    return {
        name: [split.columns["id"].text(i) for i in range(split.rows)] for name, split in splits
    }


@pytest.mark.parametrize("form", ["protein", "tsv", "choice"])
def test_groups_stay_together(forks: Forks, tmp_path: Path, form: str) -> None:
    """--group: the rows of a family go to one split, and the others are drawn one by one."""
    rows = grouped(120)
    family = {row["name"]: row["family"] for row in rows}
    options = ["--id", "name", "--group", "family"]
    if form == "choice":
        rows = [{**row, "end": "CC", "label": str(i % 2)} for i, row in enumerate(rows)]
        options += ["--context", "sequence", "--endings", "name", "end", "--label", "label"]
    elif form == "tsv":
        options += ["--text", "sequence", "--label", "label"]
    if form != "protein":
        options += ["--tokenizer", "micro/english"]
    path = write(rows, tmp_path / "a.csv")
    drawn = set()
    for seed in ("0", "1"):
        done = good(task(forks, form, path, *options, "--seed", seed))
        assert f"note: splits were drawn at random by 'family', with seed {seed}: " in done.err
        assert "are in two splits" not in done.err
        splits = names_of(open_store(tmp_path / "store"))
        where = {(family[name], split) for split, names in splits.items() for name in names}
        of_groups = Counter(group for group, _ in where if group)
        assert set(of_groups.values()) == {1}
        assert len(of_groups) > 100
        assert ("", "train") in where
        assert len({split for group, split in where if not group}) > 1
        share = 0.05 * len(rows)
        for part in ("valid", "test"):
            assert len(set(splits[part])) == pytest.approx(share, abs=8)
        drawn.add(tuple(sorted(splits["test"])))
    assert len(drawn) == 2


def test_groups_and_splits_of_the_source(forks: Forks, tmp_path: Path) -> None:
    """Groups in two splits are counted, and so are equal texts of different groups."""
    rows = [{**row, "set": "test" if i < 9 else "train"} for i, row in enumerate(grouped(30))]
    train = {row["family"] for row in rows[9:]}
    shared = sum(row["family"] in train - {""} for row in rows[:9])
    assert 0 < shared < 9
    done = good(task(forks, "protein", write(rows, tmp_path / "a.csv"), "--group", "family"))
    counts = f"{shared} of the 9 rows of test are in train"
    assert f"note: the same groups are in two splits: {counts}\n" in done.err
    assert "the same texts" not in done.err
    origin = open_store(tmp_path / "store").meta["origin"]
    assert origin["groups_in_two_splits"] == {"test": {"train": shared}}
    assert "in_two_splits" not in origin
    text = rows[0]["sequence"]
    rows = [{**row, "family": f"g{i}"} for i, row in enumerate(rows)]
    rows[20]["sequence"] = text
    done = good(task(forks, "protein", write(rows, tmp_path / "b.csv"), "--group", "family"))
    said = "note: the same texts are in two splits: 1 of the 9 rows of test are in train\n"
    assert said in done.err
    assert "the same groups" not in done.err


@pytest.mark.parametrize("largest", [40, 240])
def test_large_groups(forks: Forks, tmp_path: Path, largest: int) -> None:
    """A family of most rows is in training with every seed, and ten equal families can be drawn."""
    sizes = [40] * 10 if largest == 40 else [240, *[4] * 40]
    families = [f"g{i}" for i, size in enumerate(sizes) for _ in range(size)]
    rows: Rows = [
        {"sequence": text, "label": "ab"[i % 2], "name": f"n{i}", "family": families[i]}
        for i, text in enumerate(proteins(400))
    ]
    path = write(rows, tmp_path / "a.csv")
    for seed in "0123":
        good(task(forks, "protein", path, "--group", "family", "--seed", seed))
        store = open_store(tmp_path / "store")
        held = 40 if largest == 40 else 20
        assert [store.split(name).rows for name in ("valid", "test")] == [held, held]


def test_groups_by_number(forks: Forks, tmp_path: Path) -> None:
    """7 and 7.0, as pandas writes it beside a missing value, are one group."""
    rows = [{**row, "family": row["family"][1:]} for row in grouped(60)]
    path = write(rows[9:], tmp_path / "a.csv")
    others = [{**row, "family": f"{row['family']}.0"} for row in rows[:9] if row["family"]]
    test = write(others, tmp_path / "b.csv")
    done = good(task(forks, "protein", path, "--test", str(test), "--group", "family"))
    assert "note: the same groups are in two splits: " in done.err


def test_every_file_needs_the_groups(forks: Forks, tmp_path: Path) -> None:
    """FASTA names no group, so a note could not say which of its rows have relatives."""
    test = tmp_path / "b.fasta"
    test.write_text(">n1 a\nACDEF\n")
    files = write(grouped(60), tmp_path / "a.csv"), "--test", str(test)
    good(task(forks, "protein", *files))
    refused(task(forks, "protein", *files, "--group", "family"), f"but {test} has none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--group", "famly"], ["'famly'", "family"]),
        (["--group", "family", "--stratify"], ["--group keeps rows together"]),
        (["--group", "kind"], ["2 groups, too few to be split 90/5/5"]),
    ],
)
def test_groups_that_cannot_be_used(
    forks: Forks, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    rows = [{**row, "kind": row["label"]} for row in grouped(30)]
    refused(task(forks, "protein", write(rows, tmp_path / "a.csv"), *options), *words)


def test_segments_of_a_piece_stay_together(shared: Path, forks: Forks, tmp_path: Path) -> None:
    """MAESTRO's splits are drawn again, with composers in proportion. No piece is in two splits."""
    with (shared / "music/maestro-v1-subset/maestro-v1.0.0.csv").open() as file:
        few = list(csv.DictReader(file))[::4]
    for row in few:
        place = tmp_path / row["midi_filename"]
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(shared / "music/maestro-v1-subset" / row["midi_filename"])
    path = tmp_path / "maestro.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(few[0]))
        writer.writeheader()
        writer.writerows(few)
    good(task(forks, "music/maestro", path, "--split-column", "none", "--stratify"))
    store = open_store(tmp_path / "store")
    pieces = []
    for name in store.splits:
        ids = store.split(name).columns["id"]
        pieces.append({ids.text(i).rpartition(":")[0] for i in range(len(ids))})
    assert sum(map(len, pieces)) == len(set().union(*pieces)) == len(few)
    rows, whole = sizes(store), sum(sizes(store).values())
    assert rows["test"] / whole == pytest.approx(0.05, abs=0.04)
