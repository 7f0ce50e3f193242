"""`evaluate.py input=`: the readers of preprocess.py read raw rows of any format. Every row of a
table of predictions has the same columns.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import CLASSIFY, REGRESS, Forks, good, refused, training
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import predictions
from xformer.data.files import read_json
from xformer.data.store import open_store
from xformer.tasks.task import Predictions, as_table

LIVELY = ["optim.lr=5e-3", "batch.rows=16", "train.epochs=2", "optim.warmup=0.1"]
SQUAD, TAG = "recipes/finetune/squad.toml", "recipes/finetune/tag.toml"
Table = list[dict[str, str]]


def read(text: str) -> Table:
    """Read a table of predictions, and check that every row has as many fields as the header."""
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True))
    assert {len(row) for row in rows} == {len(rows[0])}
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def predict(forks: Forks, run: Path, file: Path, *more: str) -> Table:
    return read(good(forks.run("evaluate.py", run, f"input={file}", "system.threads=1", *more)).out)


def predict_arrays(forks: Forks, run: Path, file: Path) -> Predictions:
    """The same predictions as arrays."""
    out = run / "arrays.npz"
    good(forks.run("evaluate.py", run, f"input={file}", f"out={out}", "system.threads=1"))
    return predictions.read(out)


def of_split(forks: Forks, run: Path, store: Path, split: str) -> Table:
    out = run / f"{split}.tsv"
    good(
        forks.run(
            "evaluate.py",
            run,
            f"data={store}",
            f"split={split}",
            f"predictions={out}",
            "system.threads=1",
        )
    )
    with out.open(newline="") as file:
        return read(file.read())


def answers(table: Table) -> list[list[str]]:
    """The label and its probability, or the score, of each row."""
    return [
        [row[name] for name in ("label", "probability", "score") if name in row] for row in table
    ]


def trained(
    forks: Forks, place: Path, recipe: str, task: Sequence[object], *overrides: str
) -> tuple[Path, Path]:
    """Make a store of a task and a short run on it."""
    store, run = place / "store", place / "run"
    line = ["task", *map(str, task), "--output", str(store)]
    good(forks.run("preprocess.py", *line))
    good(forks.run(*training(recipe, store, run, *LIVELY, *overrides)))
    return store, run


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's ending."""
    if path.suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            mark = "," if path.suffix == ".csv" else "\t"
            writer = csv.DictWriter(file, list(rows[0]), delimiter=mark, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(json.dumps(rows) if path.suffix == ".json" else lines)
    return path


# ------------------------------------------------------------------------------ sequences


@pytest.fixture(scope="module")
def dna(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A run on DNA, its store, and the sequences of the test split."""
    place = tmp_path_factory.mktemp("dna")
    draw = np.random.default_rng(0)
    made = ["".join(draw.choice(list("ACGT"), 16)) for _ in range(90)]
    for split, some in (("train", made[:60]), ("valid", made[60:70]), ("test", made[70:])):
        lines = [f">{split}{i} {'xy'[i % 2]}\n{text}\n" for i, text in enumerate(some)]
        (place / f"{split}.fasta").write_text("".join(lines))
    store, run = trained(forks, place, CLASSIFY, ["dna", "--input", place])
    return store, run, made[70:]


def test_sequences_in_every_form(
    dna: tuple[Path, Path, list[str]], forks: Forks, tmp_path: Path
) -> None:
    """Files of any format, with or without labels, give the predictions of the store, in order."""
    store, run, texts = dna
    expected = of_split(forks, run, store, "test")
    assert [row["id"] for row in expected] == [f"test{i}" for i in range(20)]
    fasta = "".join(f">s{i} of E. coli\n{t[:9].lower()}\n{t[9:]}\n" for i, t in enumerate(texts))
    three = "".join(f">s{i}\n{t}\nx\n" for i, t in enumerate(texts))
    (tmp_path / "a.fasta").write_text(fasta)
    (tmp_path / "b.txt").write_text(fasta)
    (tmp_path / "c.fa.gz").write_bytes(gzip.compress(fasta.encode()))
    (tmp_path / "d.txt").write_text(three)
    (tmp_path / "e.tsv").write_text("\n".join(texts))
    (tmp_path / "f.csv").write_text("seq\n" + "\n".join(texts))
    rows = [{"id": f"s{i}", "sequence": text, "note": 'a, "b"'} for i, text in enumerate(texts)]
    for form in ("csv", "tsv", "jsonl", "json", "parquet"):
        write(tmp_path / f"g.{form}", rows)
    write(tmp_path / "h.csv", [{**row, "label": "x"} for row in rows])
    for file in sorted(tmp_path.iterdir()):
        predicted = predict(forks, run, file)
        assert answers(predicted) == answers(expected), file
        assert [row["input"] for row in predicted] == texts, file
        if file.name[0] in "abcgh":
            assert [row["id"] for row in predicted] == [f"s{i}" for i in range(20)], file
    arrays = predict_arrays(forks, run, tmp_path / "a.fasta")
    outputs = arrays.arrays["outputs"].astype(np.float64)
    chances = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert [arrays.classes[i] for i in chances.argmax(1)] == [row["label"] for row in expected]
    assert chances.max(1) == pytest.approx([float(r["probability"]) for r in expected], abs=1e-4)


REFUSED = {
    "a.fasta": (">one\nACGT\n>two\nACQT\n", "a.fasta:3: letters other than ACGTNRYSWKMBDHV: 'Q'"),
    "b.fasta": (">one\nACGT\n>two\nAC-T\n", "b.fasta:4: '-' is not a letter of a sequence"),
    "c.fasta": (">one\nACGT\n>two\n>three\nAC\n", "c.fasta:3: a record without a sequence"),
    "d.fasta": ("ACGT\n>one\nACGT\n", "d.fasta:1: text before the first header"),
    "e.csv": ("sequence,id\nACGT,1\nACXT,2\n", "e.csv:3: letters other than ACGTNRYSWKMBDHV: 'X'"),
    "f.csv": ("name,dna\na,ACGT\n", "f.csv:1: the header lacks the column 'sequence'; it has 2 c"),
    "g.csv": (
        "dna\nACGT\n",
        "g.csv:1: the header lacks the column 'sequence'; it has 1 column, 'd",
    ),
    "h.tsv": ("name\tdna\na\tACGT\n", "h.tsv:1: the header lacks the column 'sequence'"),
    "i.tsv": ("ACGT\nACGT\tx\n", "i.tsv:2: 2 columns instead of 1"),
    "j.tsv": ("promoter\nACGT\n", "j.tsv:1: letters other than ACGTNRYSWKMBDHV: 'EOP'"),
    "k.jsonl": ('{"dna": "ACGT"}\n', "k.jsonl has no column 'sequence'; it has 'dna'"),
    "l.jsonl": ('{"sequence": "ACGT"}\n{"seq": "A"}\n', "l.jsonl:2: there is no 'sequence'"),
    "m.csv": ("sequence\nACGT\n\n ,\n", "m.csv:4: 2 columns instead of 1"),
    "n.csv": ("sequence,x\nACGT,1\n,1\n", "n.csv:3: the sequence is empty"),
    "o.csv": ("sequence\n", "o.csv has a header and no row"),
    "p.fasta": ("", "p.fasta is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_read(
    name: str, dna: tuple[Path, Path, list[str]], forks: Forks, tmp_path: Path
) -> None:
    content, words = REFUSED[name]
    (tmp_path / name).write_text(content)
    before = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}"
    done = forks.run("evaluate.py", dna[1], f"input={tmp_path / name}", before=before)
    refused(done, words)
    assert done.out == ""
    assert [path.name for path in tmp_path.iterdir()] == [name]  # no temporary store is left


def without_its_task(run: Path, place: Path) -> Path:
    """Save the run's checkpoint in the older form that does not record the task."""
    checkpoint = checkpoints.load(run)
    assert checkpoint.head is not None
    columns = {
        k: v for k, v in (checkpoint.head.columns or {}).items() if k not in ("task", "options")
    }
    head = replace(checkpoint.head, columns=columns)
    checkpoints.save(replace(checkpoint, head=head), place)
    return place


def test_older_checkpoints_read_by_their_columns(
    dna: tuple[Path, Path, list[str]],
    data: Toys,
    learned: dict[str, Path],
    forks: Forks,
    tmp_path: Path,
) -> None:
    store, run, _ = dna
    expected = answers(of_split(forks, run, store, "test"))
    old = without_its_task(run, tmp_path / "old")
    assert answers(predict(forks, old, store.parent / "test.fasta")) == expected
    (tmp_path / "a.fasta").write_text(REFUSED["a.fasta"][0])
    refused(
        forks.run("evaluate.py", old, f"input={tmp_path / 'a.fasta'}"),
        "a.fasta:3: letters other than ACGTNRYSWKMBDHV: 'Q'",
    )
    old = without_its_task(learned["pairs"], tmp_path / "pairs")
    expected = answers(of_split(forks, learned["pairs"], data.pairs, "test"))
    assert answers(predict(forks, old, data.raw / "pairs/test.tsv")) == expected


def test_two_columns_make_a_pair_of_an_imported_head(
    data: Toys, learned: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    """A published model does not say whether its classes are those of a text or of a pair."""
    checkpoint = checkpoints.load(learned["pairs"])
    assert checkpoint.head is not None
    head = replace(checkpoint.head, columns=None, pair=False)
    checkpoints.save(replace(checkpoint, head=head), tmp_path / "imported")
    expected = answers(of_split(forks, learned["pairs"], data.pairs, "test"))
    file = data.raw / "pairs/test.tsv"
    both = 'columns=["left", "right"]'
    assert answers(predict(forks, tmp_path / "imported", file, both)) == expected
    one = predict(forks, tmp_path / "imported", file, "columns=left")
    assert "input_b" not in one[0]
    done = forks.run("evaluate.py", tmp_path / "imported", f"input={file}", 'columns=["a","b","c"]')
    refused(done, "columns= names 3 columns, but a row needs 1")


def test_real_sequences(shared: Path, forks: Forks, tmp_path: Path) -> None:
    """Published files (E. coli promoters in csv, GFP in JSON lines, proteins in FASTA) give the
    predictions of their stores."""
    ecoli = shared / "dna/ecoli_promoter/v9d3.csv"
    store, run = trained(
        forks, tmp_path, CLASSIFY, ["dna", "--input", ecoli], "train.steps=2", "batch.max_tokens=64"
    )
    predicted = predict(forks, run, ecoli)
    lines = ecoli.read_text().split()[1:]
    assert [row["input"] for row in predicted] == [line.split(",")[0].upper() for line in lines]
    by_text = {row["input"]: row["label"] for row in predicted}
    opened = open_store(store)
    tokens, letters = opened.split("test").columns["tokens"], opened.tokenizer().pieces
    for row, said in enumerate(of_split(forks, run, store, "test")):
        assert said["label"] == by_text["".join(letters[i] for i in tokens[row])]

    gfp = tmp_path / "gfp"
    gfp.mkdir()
    for split in ("train", "valid", "test"):
        with (shared / f"protein/fluorescence/fluorescence_{split}.jsonl").open() as file:
            (gfp / f"{split}.jsonl").write_text("".join(next(file) for _ in range(40)))
    store, run = trained(
        forks, gfp, REGRESS, ["protein/fluorescence", "--input", gfp], "train.steps=2"
    )
    expected = answers(of_split(forks, run, store, "test"))
    assert answers(predict(forks, run, gfp / "test.jsonl")) == expected
    bare = [
        {"primary": json.loads(line)["primary"]}
        for line in (gfp / "test.jsonl").read_text().splitlines()
    ]
    assert answers(predict(forks, run, write(gfp / "bare.csv", bare))) == expected

    places = tmp_path / "places"
    places.mkdir()
    for name in ("ER", "Golgi"):
        text = (shared / f"protein/localization_multiloc/multiloc/{name}.fasta").read_text()
        (places / f"{name}.fasta").write_text(">".join(text.split(">")[:41]))
    store, run = trained(
        forks,
        places,
        CLASSIFY,
        ["protein/localization", "--input", places, "--longest", 50],
        "train.steps=2",
    )
    predicted = predict(forks, run, places / "ER.fasta")
    heads = [
        line[1:].split()[0]
        for line in (places / "ER.fasta").read_text().splitlines()
        if line.startswith(">")
    ]
    assert [row["id"] for row in predicted] == heads
    assert max(len(row["input"]) for row in predicted) == 50  # cut as in training
    known = {row["id"]: row["label"] for row in of_split(forks, run, store, "train")}
    assert {row["id"]: row["label"] for row in predicted}.items() >= {
        name: label for name, label in known.items() if name in heads
    }.items()


def test_splice_as_it_is_published(
    learned: dict[str, Path], data: Toys, forks: Forks, tmp_path: Path
) -> None:
    """UCI's file, which holds labels and names beside the sequences."""
    predicted = predict(forks, learned["splice"], data.raw / "splice.data")
    lines = [line.split(",") for line in (data.raw / "splice.data").read_text().splitlines()]
    assert [row["input"] for row in predicted] == [sequence for *_, sequence in lines]
    (tmp_path / "a.fasta").write_text("".join(f">{n}\n{s}\n" for _, n, s in lines))
    again = predict(forks, learned["splice"], tmp_path / "a.fasta")
    assert answers(again) == answers(predicted)
    assert [row["id"] for row in again] == [name for _, name, _ in lines]


# ------------------------------------------------------------------------------ text


@pytest.mark.slow
def test_texts_in_every_form(
    data: Toys, learned: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    for name, columns in (
        ("classes", ["text"]),
        ("pairs", ["left", "right"]),
        ("scores", ["text"]),
    ):
        run = learned[name]
        expected = answers(of_split(forks, run, getattr(data, name), "test"))
        with (data.raw / name / "test.tsv").open() as file:
            whole = list(csv.DictReader(file, delimiter="\t"))
        bare = [{c: row[c] for c in columns} for row in whole]
        for form in ("csv", "jsonl", "parquet"):
            for rows in (whole, bare, [{"id": str(i), **row} for i, row in enumerate(bare)]):
                predicted = predict(forks, run, write(tmp_path / f"{name}.{form}", rows))
                assert answers(predicted) == expected
                shown = ["input", "input_b"][: len(columns)]
                assert [[r[c] for c in shown] for r in predicted] == [
                    list(r.values()) for r in bare
                ]
                assert [r.get("id") for r in predicted] == [r.get("id") for r in rows]


def test_a_split_without_labels(forks: Forks, tmp_path: Path) -> None:
    """It has predictions but no scores."""
    files = {name: tmp_path / f"{name}.tsv" for name in ("train", "valid", "test")}
    for name, file in files.items():
        rows = [f"a {word} day\t{label}" for word, label in (("good", "yes"), ("bad", "no"))] * 8
        if name == "test":
            rows = ["a good day", "a bad day", "a day"]
        header = "text" if name == "test" else "text\tlabel"
        file.write_text("\n".join([header, *rows, ""]))
    task = ["tsv", "--train", files["train"], "--valid", files["valid"], "--test", files["test"]]
    task += ["--text", "text", "--label", "label", "--tokenizer", "micro/english"]
    store, run = trained(forks, tmp_path, CLASSIFY, task, "train.epochs=1")
    assert [sorted(row) for row in of_split(forks, run, store, "test")] == [
        ["label", "probability", "row"]
    ] * 3
    assert set(of_split(forks, run, store, "valid")[0]) == {"gold", "label", "probability", "row"}
    scores = ("evaluate.py", run, f"data={store}", "split=test", "system.threads=1")
    remedy = "or predictions=FILE alone for a table without scores"
    for more in ((), (f"out={tmp_path / 'x.json'}", f"predictions={tmp_path / 'x.tsv'}")):
        refused(
            forks.run(*scores, *more), "the split 'test' has no labels to score against", remedy
        )
    assert not [*tmp_path.glob("x.*")]


def test_other_files_are_refused(
    data: Toys, learned: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    for name, content, words in (
        ("x.fasta", ">a\nACGT\n", "was trained on text, not on .fasta files"),
        ("x.csv", "sentence,id\nbam,1\n", "x.csv:1: the header lacks the column 'text'; it has 2"),
        ("x.jsonl", '{"sentence": "bam"}\n', "no column 'text'; it has 'sentence'"),
        ("x.csv", "text,id\nbam,1\nban\n", "x.csv:3: 1 column instead of 2"),
    ):
        (tmp_path / name).write_text(content)
        refused(forks.run("evaluate.py", learned["classes"], f"input={tmp_path / name}"), words)


# ------------------------------------------------------------------------------ music


def test_pieces(shared: Path, forks: Forks, tmp_path: Path) -> None:
    """MIDI files, a directory of them and MAESTRO's table give one prediction per piece. The
    segments of a piece vote, as they do when the store is scored."""
    pytest.importorskip("symusic")
    with (shared / "music/maestro-v1-subset/maestro-v1.0.0.csv").open() as file:
        few = list(csv.DictReader(file))[::12]
    for row in few:
        place = tmp_path / row["midi_filename"]
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(shared / "music/maestro-v1-subset" / row["midi_filename"])
    table = write(tmp_path / "maestro.csv", few)
    task = ["music/maestro", "--input", table, "--segment", 60]
    store, run = trained(forks, tmp_path, CLASSIFY, task, "train.steps=20", "batch.max_tokens=62")
    predicted = predict(forks, run, table)
    assert [row["id"] for row in predicted] == [row["midi_filename"] for row in few]
    names = [{k: v for k, v in row.items() if k == "midi_filename"} for row in few]
    assert answers(predict(forks, run, write(tmp_path / "names.csv", names))) == answers(predicted)
    opened, said = open_store(store), {row["id"]: row["label"] for row in predicted}
    for split in opened.splits:
        pieces = [row for row in few if row["split"].startswith(split)]
        right = np.mean([said[row["midi_filename"]] == row["canonical_composer"] for row in pieces])
        score = read_json(run / "result.json")["metrics"].get(split, {}).get("accuracy")
        assert split == "train" or right == pytest.approx(score)
    one = predict(forks, run, tmp_path / few[0]["midi_filename"])
    assert answers(one) == answers(predicted)[:1]
    year = Path(few[0]["midi_filename"]).parent
    there = predict(forks, run, tmp_path / year)
    assert {row["id"]: row["label"] for row in there} == {
        Path(name).name: label for name, label in said.items() if Path(name).parent == year
    }
    (tmp_path / "bad.mid").write_bytes(b"no music")
    refused(forks.run("evaluate.py", run, f"input={tmp_path / 'bad.mid'}"), "bad.mid:1: not a MIDI")
    (tmp_path / "p.tsv").write_text("pitches\n60 61\n60 200\n")
    refused(
        forks.run("evaluate.py", run, f"input={tmp_path / 'p.tsv'}"),
        "p.tsv:3: '200' is not a pitch",
    )


# ------------------------------------------------------------------------------ questions


def test_questions(shared: Path, data: Toys, forks: Forks, tmp_path: Path) -> None:
    """SQuAD's JSON, with and without answers, and tables of questions and contexts."""
    raw = json.loads((shared / "squad/train-subset-1.json").read_text())
    paragraphs = raw["data"][0]["paragraphs"][:4]
    for paragraph in paragraphs:
        paragraph["qas"] = paragraph["qas"][:3]
    small = {"data": [{"title": "t", "paragraphs": paragraphs}]}
    for name in ("train", "dev"):
        (tmp_path / f"{name}.json").write_text(json.dumps(small))
    task = [
        "squad",
        "--input",
        tmp_path,
        "--tokenizer",
        data.tokenizer,
        "--max-tokens",
        64,
        "--stride",
        20,
        "--max-question",
        20,
    ]
    store, run = trained(forks, tmp_path, SQUAD, task, "train.steps=3", "batch.max_tokens=64")
    said = tmp_path / "said.json"
    good(forks.run("evaluate.py", run, f"data={store}", "split=valid", f"predictions={said}"))
    expected = json.loads(said.read_text())
    asked = [(qa["id"], qa["question"], p["context"]) for p in paragraphs for qa in p["qas"]]
    for paragraph in paragraphs:
        paragraph["qas"] = [{"id": qa["id"], "question": qa["question"]} for qa in paragraph["qas"]]
    (tmp_path / "hidden.json").write_text(json.dumps(small))
    rows = [dict(zip(("id", "question", "context"), one, strict=True)) for one in asked]
    files = [tmp_path / "dev.json", tmp_path / "hidden.json"]
    files += [write(tmp_path / f"rows.{form}", rows) for form in ("jsonl", "csv", "json")]
    (tmp_path / "lines.json").write_text((tmp_path / "rows.jsonl").read_text())
    for name in ("hidden.json", "lines.json"):
        files.append(tmp_path / f"{name}.gz")
        files[-1].write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    files.append(tmp_path / "lines.json")
    for file in files:
        predicted = predict(forks, run, file)
        assert {row["id"]: row["answer"] for row in predicted} == expected, file
        assert [(row["id"], row["input"]) for row in predicted] == [one[:2] for one in asked]
    again = tmp_path / "again.json"
    good(forks.run("evaluate.py", run, f"input={tmp_path / 'hidden.json'}", f"out={again}"))
    assert json.loads(again.read_text()) == expected  # in the form of SQuAD's script
    bare = write(
        tmp_path / "bare.csv", [{k: row[k] for k in ("question", "context")} for row in rows]
    )
    predicted = predict(forks, run, bare)
    assert [row["answer"] for row in predicted] == list(expected.values())
    assert [row["id"] for row in predicted] == [str(i) for i in range(12)]
    assert {row["answer"] for row in predict(forks, run, bare, "threshold=-1e9")} == {""}
    questions = predict_arrays(forks, run, bare).questions
    assert questions is not None
    assert questions.answer == list(expected.values())
    (tmp_path / "x.csv").write_text("question\nwho?\n")
    refused(
        forks.run("evaluate.py", run, f"input={tmp_path / 'x.csv'}"),
        "x.csv:1: the header lacks the column 'context'; it has 1",
    )


# ------------------------------------------------------------------------------ words


def test_words(data: Toys, forks: Forks, tmp_path: Path) -> None:
    """CoNLL's columns are not taken for text, whatever the file's name. Plain text has one sentence
    per line.
    """
    draw = np.random.default_rng(0)
    words = [
        list(draw.choice(["bam", "ban", "dan", "fan"], draw.integers(2, 6))) for _ in range(40)
    ]
    blocks = ["\n".join(f"{w} NN {'B-X' if w == 'bam' else 'O'}" for w in row) for row in words]
    for split, some in (("train", blocks[:30]), ("valid", blocks[30:]), ("test", blocks[30:])):
        (tmp_path / f"{split}.conll").write_text("\n\n".join(some) + "\n")
    task = ["conll", "--input", tmp_path, "--tokenizer", data.tokenizer]
    store, run = trained(forks, tmp_path, TAG, task)
    expected = [row["labels"] for row in of_split(forks, run, store, "test")]
    plain = [" ".join(row) for row in words[30:]]
    (tmp_path / "plain.txt").write_text("\n".join(plain) + "\n")
    (tmp_path / "columns.txt").write_text("\n\n".join(blocks[30:]))
    tabs = [block.replace(" ", "\t") for block in blocks[30:]]
    (tmp_path / "tabs.txt").write_text("\n\n".join(tabs))
    (tmp_path / "words.conll").write_text("\n\n".join("\n".join(row) for row in words[30:]))
    (tmp_path / "words.txt").write_text((tmp_path / "words.conll").read_text())
    unknown = ["\n".join(f"{word} NN _" for word in row) for row in words[30:]]
    (tmp_path / "unknown.txt").write_text("\n\n".join(unknown))
    files = "plain.txt columns.txt tabs.txt words.txt unknown.txt words.conll test.conll"
    for name in files.split():
        predicted = predict(forks, run, tmp_path / name)
        assert [row["labels"] for row in predicted] == expected, name
        assert [row["input"] for row in predicted] == plain, name
    arrays = predict_arrays(forks, run, tmp_path / "plain.txt")
    named = [arrays.classes[i] for i in arrays.arrays["predicted"]]
    assert named == " ".join(expected).split(" ")
    (tmp_path / "x.jsonl").write_text('{"text": "bam"}\n')
    refused(
        forks.run("evaluate.py", run, f"input={tmp_path / 'x.jsonl'}"), "give one sentence per line"
    )


def test_amino_acids(forks: Forks, tmp_path: Path) -> None:
    """A label per letter. Proteins come as FASTA, or one per line, with or without spaces."""
    draw = np.random.default_rng(0)
    made = {f"p{i}": "".join(draw.choice(list("ACDEF"), 9)) for i in range(30)}
    fasta = "".join(f">{name}\n{text}\n" for name, text in made.items())
    marks = [("train", False)] * 20 + [("train", True)] * 5 + [("test", False)] * 5
    labels = "".join(
        f">{name} SET={s} VALIDATION={v}\n{'HC' * 4}H\n"
        for name, (s, v) in zip(made, marks, strict=True)
    )
    (tmp_path / "sequences.fasta").write_text(fasta)
    (tmp_path / "sampled.fasta").write_text(labels)
    store, run = trained(forks, tmp_path, TAG, ["protein/secondary", "--input", tmp_path])
    expected = [row["labels"] for row in of_split(forks, run, store, "test")]
    some = list(made.items())[25:]
    (tmp_path / "a.fasta").write_text("".join(f">{name}\n{text}\n" for name, text in some))
    (tmp_path / "b.txt").write_text("\n".join(text for _, text in some))
    (tmp_path / "c.txt").write_text("\n".join(" ".join(text) for _, text in some))
    for name in ("a.fasta", "b.txt", "c.txt"):
        predicted = predict(forks, run, tmp_path / name)
        assert [row["labels"] for row in predicted] == expected, name
    assert [row["id"] for row in predict(forks, run, tmp_path / "a.fasta")] == [n for n, _ in some]


# ------------------------------------------------------------------------------ odd texts

ODD = [
    "bam\tban",
    'say "bam" ban',
    '"bam',
    "bam\nban",
    "bam\r\nban",
    "bam\rban",
    "",
    "NA",
    " bam ",
    "'bam'",
    "bam,ban",
    "\u2028bam",
]


def same(text: str, expected: Table) -> None:
    """Check that csv, and pandas if it is installed, read the table back unchanged."""
    assert read(text) == expected
    try:
        pandas: Any = import_module("pandas")
    except ImportError:
        return
    frame = pandas.read_csv(
        io.StringIO(text, newline=""), sep="\t", dtype=str, keep_default_na=False
    )
    assert frame.to_dict("records") == expected


def test_odd_texts_in_every_table(
    data: Toys, learned: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    """Tabs, quotes and line ends survive in tables of one text, of two texts and of scores."""
    for name, columns in (
        ("classes", ["text"]),
        ("pairs", ["left", "right"]),
        ("scores", ["text"]),
    ):
        rows = [dict.fromkeys(columns, text) | {"id": text} for text in ODD]
        out = tmp_path / "out.tsv"
        file = write(tmp_path / "odd.jsonl", rows)
        done = good(forks.run("evaluate.py", learned[name], f"input={file}", f"out={out}"))
        empty = sum(not text.strip() for text in ODD)
        assert f"no text in {empty} of the {len(ODD)} rows; the first is {file}:7\n" in done.err
        assert f"wrote {out}\n" in done.err
        with out.open(newline="") as opened:
            text = opened.read()
        table = read(text)
        same(text, table)
        for shown in ["input", "input_b"][: len(columns)]:
            assert [row[shown] for row in table] == ODD
        assert [row["id"] for row in table] == ODD


def test_a_table_of_anything() -> None:
    rows = [{"a": one, "b": two} for one in ODD for two in ODD]
    columns = {name: [row[name] for row in rows] for name in ("a", "b")}
    same(as_table(columns), rows)
