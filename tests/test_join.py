"""Stores that are made in parts by many jobs, and joined without copying their tokens."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import SMOKE, Forks, good, refused, training
from test_joined import equal
from test_train import timeless_log
from toys import WORDS, Toys

from xformer.checkpoint import resolve
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.joined import open_stores
from xformer.data.store import JoinsOthers, open_store
from xformer.preprocess.corpora import documents
from xformer.preprocess.corpora.documents import (
    TextOptions,
    files_of_part,
    read_documents,
    read_part,
)

Line = list[str | Path]


def texts(number: int, seed: int) -> str:
    draw = random.Random(seed)
    return "\n\n".join(" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) for _ in range(number))


@pytest.fixture(scope="module")
def raw(data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several formats and lengths, some compressed."""
    place = tmp_path_factory.mktemp("raw")
    for i, number in enumerate((20, 3, 41, 8, 30)):
        (place / f"{i}.txt").write_text(texts(number, i))
    (place / "5.txt.gz").write_bytes(gzip.compress(texts(50, 5).encode()))
    lines = [json.dumps({"text": text}) for text in texts(25, 6).split("\n\n")]
    (place / "6.jsonl").write_text("\n".join(lines))
    (place / "7.csv").write_text("text\n" + texts(25, 7).replace("\n\n", "\n"))
    (place / "8.fasta").write_text("\n".join(f">{i}\nACGT" for i in range(9)))
    return place


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_the_documents_of_all_parts_are_those_of_the_files(
    raw: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order. Within a file too, if it is larger than what is read at once."""
    monkeypatch.setattr(documents, "READ", 300)
    paths, options = sorted(raw.iterdir()), TextOptions()
    whole = list(read_documents(paths, options, lambda _: None))
    each = [
        list(read_part(paths, (number, parts), options, lambda _: None))
        for number in range(1, parts + 1)
    ]
    assert [segment for one in each for segment in one] == whole
    read = [files_of_part(paths, (number, parts)) for number in range(1, parts + 1)]
    assert {path for files in read for path, *_ in files} == set(paths)
    if parts == 7:  # a part does not read the files of distant parts
        assert max(map(len, read)) <= 5


def test_a_few_hundred_kilobytes_are_divided(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(texts(6000, 1))
    assert 300_000 < file.stat().st_size < 900_000
    sizes = []
    for number in range(1, 5):
        part = read_part([file], (number, 4), TextOptions(), lambda _: None)
        sizes.append(sum(len(text) for text, _ in part))
    assert max(sizes) - min(sizes) <= 2**17


def test_a_long_file_is_divided_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "READ", 1000)
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(texts(6000, 1).encode()))
    sizes = []
    for number in range(1, 5):
        part = read_part([file], (number, 4), TextOptions(), lambda _: None)
        sizes.append(sum(len(text) for text, _ in part))
    assert max(sizes) - min(sizes) < 0.4 * np.mean(sizes)


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv.gz", "a.parquet", "a.jsonl", "a.json", "table.json", "columns.json"]
)
def test_tables_and_json_are_divided_within(name: str, tmp_path: Path) -> None:
    """What is read of each document is told before it, and at the end it is the whole file."""
    rows = texts(20_000, 2).split("\n\n")
    path, table = tmp_path / name, [{"text": row} for row in rows]
    if name == "a.parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"text": rows}), path)
    elif name == "columns.json":
        path.write_text(json.dumps({"text": {str(i): row for i, row in enumerate(rows)}}))
    elif name in ("a.json", "table.json"):
        path.write_text(json.dumps(table))
    elif name == "a.jsonl":
        path.write_text("\n".join(map(json.dumps, table)))
    else:
        lines = "\n".join(["text", *rows]).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    form = "table" if name in ("table.json", "columns.json") else None
    options, seen = TextOptions(format=form), list[int]()
    whole = [text for text, _ in read_documents([path], options, seen.append)]
    assert whole == rows
    assert sum(seen) == path.stat().st_size
    parts = [
        [text for text, _ in read_part([path], (number, 4), options, lambda _: None)]
        for number in (1, 2, 3, 4)
    ]
    assert [text for part in parts for text in part] == rows
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) < 0.4 * np.mean(sizes)


@pytest.fixture(scope="module")
def made(
    forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path], Path]:
    """A store made at once, the same in three parts, and these joined. The parts are given in
    another order."""
    place = tmp_path_factory.mktemp("parts")
    for i in range(5):
        (place / f"{i}.txt").write_text(texts(40, i))
    line: Line = ["preprocess.py", "text", "--input", *sorted(place.glob("*.txt")), "--documents"]
    line += ["--valid", data.raw / "valid.txt", "--tokenizer", data.tokenizer, "--max-tokens", "9"]
    good(forks.run(*line, "--output", place / "whole"))
    parts = [place / f"parts/{number}" for number in (1, 2, 3)]
    parts[0].parent.mkdir()
    for number, path in enumerate(parts, 1):
        good(forks.run(*line, "--part", f"{number}/3", "--output", path))
    done = good(forks.run("preprocess.py", "join", *parts[::-1], "--output", place / "joined"))
    whole = open_store(place / "whole").split("train")
    assert f"joined: 3 stores; train {whole.rows:,} rows, {whole.tokens:,} tokens; v" in done.out
    return place / "whole", parts, place / "joined"


def test_joined_parts_hold_what_one_store_does(made: tuple[Path, list[Path], Path]) -> None:
    whole, parts, joined = made
    store = open_stores(joined)
    for name in ("train", "valid"):
        equal(store.split(name), open_store(whole).split(name))
        assert store.split(name).words == open_store(whole).split(name).words
    assert [open_store(part).splits for part in parts] == [["train", "valid"], ["train"], ["train"]]
    assert (store.name, store.tokenizer().fingerprint) == (str(joined), store.fingerprint)
    files = [path.name for path in joined.rglob("*") if path.is_file()]
    assert not [name for name in files if name.endswith(".npy")]
    sources = [s["file"] for p in parts for s in open_store(p).meta["origin"]["sources"]]
    assert {Path(name).name for name in sources} == {*(f"{i}.txt" for i in range(5)), "valid.txt"}
    with pytest.raises(JoinsOthers, match=r"open it with xformer\.data\.joined"):
        open_store(joined)


def test_a_file_that_changes_between_the_parts(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The size stays the same, so only the contents tell. Two files of one name are not mistaken
    for one."""
    files = [tmp_path / name / "a.txt" for name in ("x", "y")]
    for i, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(texts(6000, i))
    line: Line = ["preprocess.py", "text", "--input", *files, "--tokenizer", data.tokenizer]
    parts = [tmp_path / f"part{number}" for number in range(1, 5)]
    for number, part in enumerate(parts, 1):
        good(forks.run(*line, "--max-tokens", "9", "--part", f"{number}/4", "--output", part))
    good(forks.run("preprocess.py", "join", *parts, "--output", tmp_path / "joined"))
    files[1].write_text(files[1].read_text()[::-1])
    again = [*line, "--max-tokens", "9", "--part", "4/4", "--output", parts[3], "--overwrite"]
    good(forks.run(*again))
    done = forks.run("preprocess.py", "join", *parts, "--output", tmp_path / "other")
    refused(done, "a.txt has changed between the parts; make all of them again")


def test_joined_parts_train_like_one_store(
    forks: Forks, made: tuple[Path, list[Path], Path], tmp_path: Path
) -> None:
    runs = [tmp_path / "whole", tmp_path / "joined"]
    for store, run in zip((made[0], made[2]), runs, strict=True):
        good(forks.run(*training(SMOKE, store, run, "train.steps=6")))
    assert timeless_log(runs[0]) == timeless_log(runs[1])
    for name in ("model", "optimizer"):
        a, b = ((resolve(run) / f"{name}.safetensors").read_bytes() for run in runs)
        assert a == b
    outputs = []
    for store in (made[0], made[2]):
        line: Line = ["evaluate.py", runs[0], f"data={store}", "split=valid"]
        outputs.append(good(forks.run(*line)).out.replace(str(store), ""))
    assert outputs[0] == outputs[1]


def test_every_command_reads_a_joined_store(
    forks: Forks, made: tuple[Path, list[Path], Path], data: Toys, tmp_path: Path
) -> None:
    whole, parts, joined = made
    described = [
        good(forks.run("preprocess.py", "stats", store)).out.replace(store.name, "")
        for store in (whole, joined)
    ]
    assert described[0] == described[1]
    pairs = []
    for name, store in (("a", whole), ("b", joined)):
        line: Line = [
            "preprocess.py",
            "pairs",
            store,
            "--kind",
            "next",
            "--output",
            tmp_path / name,
        ]
        good(forks.run(*line))
        pairs.append(open_store(tmp_path / name).key)
    assert pairs[0] == pairs[1]
    done = good(forks.run("preprocess.py", "verify", joined))
    assert f"{parts[2] / 'train/tokens.npy'}: ok" in done.out
    assert done.out.count(": ok") == 12
    # joined stores can be joined, and read beside another
    again = tmp_path / "again"
    good(forks.run("preprocess.py", "join", joined, "--output", again))
    equal(open_stores(again).split("train"), open_store(whole).split("train"))
    words: Line = ["text", "--input", data.raw / "test.txt", "--documents", "--max-tokens", "9"]
    words += ["--tokenizer", data.tokenizer, "--output", tmp_path / "more"]
    good(forks.run("preprocess.py", *words))
    good(forks.run("preprocess.py", "join", tmp_path / "more", "--output", tmp_path / "one"))
    done = good(forks.run("preprocess.py", "verify", tmp_path / "one"))
    assert f"{tmp_path / 'more/train/tokens.npy'}: ok" in done.out
    good(forks.run("preprocess.py", "join", tmp_path / "one", joined, "--output", tmp_path / "two"))
    rows = open_store(tmp_path / "more").split("train").rows + open_store(whole).split("train").rows
    assert open_stores(tmp_path / "two").split("train").rows == rows
    both = open_stores([str(joined), str(tmp_path / "more")])
    more = open_store(tmp_path / "more").split("train")
    assert both.split("train").rows == open_store(whole).split("train").rows + more.rows
    assert both.split("train").columns["tokens"][-1].tolist() == more.columns["tokens"][-1].tolist()
    turned = open_stores([str(tmp_path / "more"), str(joined)]).split("train").columns["tokens"]
    rows = open_store(whole).split("train").columns["tokens"]
    assert all((turned[more.rows + i] == rows[i]).all() for i in range(len(rows)))


def test_stores_that_are_no_parts_keep_their_order(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    line: Line = ["preprocess.py", "text", "--tokenizer", data.tokenizer, "--input"]
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(texts(9, ord(name)))
        good(forks.run(*line, tmp_path / f"{name}.txt", "--output", tmp_path / name))
    joined = tmp_path / "joined"
    good(forks.run("preprocess.py", "join", tmp_path / "b", tmp_path / "a", "--output", joined))
    paths = [str(tmp_path / name) for name in ("b", "a")]
    equal(open_stores(joined).split("train"), open_stores(paths).split("train"))
    assert open_stores(joined).key == open_stores(paths).key
    inside: Line = ["preprocess.py", "join", *paths, "--output", tmp_path / "a/joined"]
    refused(forks.run(*inside), f"lies inside the store {tmp_path / 'a'}; give another")
    assert not (tmp_path / "a/joined").exists()


def test_held_out_rows_that_stores_share_are_read_once(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """The splits `valid` of a and b are equal, and those of `test` are not."""
    line: Line = ["preprocess.py", "text", "--tokenizer", data.tokenizer]
    line += ["--valid", data.raw / "valid.txt"]
    for seed, name in enumerate("ab"):
        for split in ("train", "test"):
            (tmp_path / f"{name}-{split}.txt").write_text(texts(9, 2 * seed + (split == "test")))
        files: Line = ["--input", tmp_path / f"{name}-train.txt"]
        files += ["--test", tmp_path / f"{name}-test.txt"]
        good(forks.run(*line, *files, "--output", tmp_path / name))
    a, b = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    good(forks.run("preprocess.py", "join", a.path, b.path, "--output", tmp_path / "both"))
    for both in (open_stores([a.path, b.path]), open_stores(tmp_path / "both")):
        equal(both.split("valid"), a.split("valid"))
        assert both.split("valid").rows == b.split("valid").rows
        for name in ("train", "test"):
            assert both.split(name).rows == a.split(name).rows + b.split(name).rows


def test_symbolic_links_do_not_hide_the_parts(
    forks: Forks, made: tuple[Path, list[Path], Path], tmp_path: Path
) -> None:
    """A link to a joined store, and a joined store that was made behind a link, are read by every
    path."""
    _, parts, joined = made
    link = tmp_path / "link"
    link.symlink_to(joined)
    (tmp_path / "far/away/deep").mkdir(parents=True)
    (tmp_path / "near").symlink_to(tmp_path / "far/away/deep")
    good(forks.run("preprocess.py", "join", *parts, "--output", tmp_path / "near/joined"))
    for path in (link, tmp_path / "near/joined", tmp_path / "far/away/deep/joined"):
        assert open_stores(path).key == open_stores(joined).key


# -------------------------------------------------------------------------------- what is refused


def copied(made: tuple[Path, list[Path], Path], place: Path) -> tuple[list[Path], Path]:
    """The parts and the joined store, moved together to another place."""
    shutil.copytree(made[2], place / "joined")
    shutil.copytree(made[1][0].parent, place / "parts")
    return [place / "parts" / path.name for path in made[1]], place / "joined"


def test_a_missing_changed_or_damaged_part_is_refused(
    forks: Forks, made: tuple[Path, list[Path], Path], tmp_path: Path
) -> None:
    parts, joined = copied(made, tmp_path / "moved")
    assert open_stores(joined).key == open_stores(made[2]).key
    line = training(SMOKE, joined, tmp_path / "run", "train.steps=3")

    tokens = parts[1] / "train/tokens.npy"
    content = bytearray(tokens.read_bytes())
    content[-2] ^= 1
    tokens.write_bytes(content)
    done = forks.run(*line)
    assert done.status == 1
    assert f"{tokens} is damaged in block 0" in done.err.splitlines()[-1]
    verified = forks.run("preprocess.py", "verify", joined)
    assert verified.status == 1
    assert f"damaged: {tokens} block 0" in verified.err
    shutil.rmtree(tmp_path / "run")

    shutil.rmtree(parts[1])
    refused(forks.run(*line), f"{joined} joins {parts[1]}, which is not there: move it back")
    shutil.copytree(parts[0], parts[1])
    refused(forks.run(*line), f"{parts[1]} has changed since {joined} joined it")
    (joined / "store.json").write_text((joined / "store.json").read_text() + " ")
    refused(forks.run(*line), "store.json differs from its checksum")
    assert not (tmp_path / "run").exists()


def test_only_all_parts_of_one_store_are_joined(
    forks: Forks, made: tuple[Path, list[Path], Path], data: Toys, tmp_path: Path
) -> None:
    whole, parts, _ = made
    out: Line = ["--output", tmp_path / "out"]
    for stores, words in (
        (parts[:2], "of the 3 parts, these are missing: 3"),
        (parts[1:2], "of the 3 parts, these are missing: 1, 3"),
        ([*parts, whole], f"{parts[0]} was made with --part, {whole} was not: join the parts"),
        ([whole, *parts], f"{parts[0]} was made with --part, {whole} was not: join the parts"),
        ([*parts, parts[0]], "are the same part"),
        ([whole, data.text], "cannot be read as one: they differ in columns"),
        ([whole, data.classes], "they differ in kind"),
        ([tmp_path / "none"], "is not a store"),
    ):
        refused(forks.run("preprocess.py", "join", *stores, *out), words)
    line: Line = ["preprocess.py", "text", "--tokenizer", data.tokenizer, "--input"]
    other: Line = [
        *line,
        *sorted(parts[0].parents[1].glob("*.txt")),
        "--output",
        tmp_path / "other",
    ]
    good(forks.run(*other, "--documents", "--max-tokens", "8", "--part", "2/3"))
    mixed = [parts[0], tmp_path / "other", parts[2]]
    differ = "differ in their input files, tokenizer, options, number of parts or version of "
    refused(forks.run("preprocess.py", "join", *mixed, *out), differ)
    # the parts of a joined store need not be joined alone
    four: Line = ["join", made[2], whole, "--output", tmp_path / "four"]
    assert "four: 4 stores; " in good(forks.run("preprocess.py", *four)).out
    twice = training(SMOKE, json.dumps([str(made[2]), str(parts[1])]), tmp_path / "run")
    refused(forks.run(*twice), f"{parts[1]} and {parts[1]} hold the same rows")
    for option in ("0/3", "4/3", "3", "a/b"):
        done = forks.run(*line, "x", "--output", tmp_path / "x", "--part", option)
        assert (done.status, f"{option!r}: give PART/PARTS, such as 3/16" in done.err) == (2, True)
    small: Line = [*line, data.raw / "train.txt", "--output", tmp_path / "x", "--part", "1/2"]
    refused(forks.run(*small), "--part 1/2: no document begins in this part", "fewer parts")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "out").exists()
    other_name = parts[1].parent / "none" / ".." / "2"
    for joined, place in ((parts, parts[1]), (parts, other_name), ([made[2]], parts[1])):
        line = ["preprocess.py", "join", *joined, "--output", place, "--overwrite"]
        refused(forks.run(*line), "is one of the stores")


def test_readers_of_before_refuse_a_joined_store(made: tuple[Path, list[Path], Path]) -> None:
    """They compare the format with 1, and say in one line that they cannot read the store."""
    assert read_json(made[2] / "store.json")["format"] == 2
    meta = read_json(made[2] / "store.json")
    assert [part["path"] for part in meta["parts"]] == [f"../parts/{n}" for n in (1, 2, 3)]
    with pytest.raises(BadInput, match="it has train, valid"):
        open_stores(made[2]).split("test")
