"""What would otherwise go wrong without a word: a line names it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import CLASSIFY, ROOT, SMOKE, TINY, Forks, command, good, refused, training
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import config as settings
from xformer.analysis.examples import ExamplesConfig, open_examples
from xformer.checkpoint import Checkpoint
from xformer.data.errors import BadInput
from xformer.data.store import open_store
from xformer.data.tokenizers import load_tokenizer
from xformer.evaluate import assembler_for
from xformer.model.config import ModelConfig
from xformer.parallel.processes import ALONE
from xformer.predictions import read
from xformer.prepare import prepare
from xformer.preprocess.corpora.text import LONG, repeated_rows
from xformer.recipe import Recipe
from xformer.setup import Setup
from xformer.study import sweep
from xformer.study.plan import Plan
from xformer.study.reading import read_study
from xformer.study.report import build_report, render
from xformer.study.results import Results
from xformer.tasks.task import Head

PLAIN = "batch.max_tokens=16"


def setup(recipe: str, typed: tuple[str, ...], *more: str) -> Setup:
    """What `prepare` makes of a command line. `typed` are the keys that it counts as typed."""
    return prepare(
        settings.load(Recipe, [str(ROOT / recipe), *more, *typed]),
        ALONE,
        [part.partition("=")[0] for part in typed],
    )


@pytest.mark.parametrize(
    ("recipe", "store", "typed", "because"),
    [
        (SMOKE, "text", "train.epochs=2", "train.steps="),
        ("recipes/pretrain/demo.toml", "text", "batch.rows=2", "batch.tokens="),
    ],
)
def test_a_typed_length_has_an_effect(
    recipe: str, store: str, typed: str, because: str, data: Toys, forks: Forks, tmp_path: Path
) -> None:
    line = [f"data={getattr(data, store)}", f"run={tmp_path / 'run'}"]
    key, other = typed.partition("=")[0], because.rstrip("=")
    refused(
        forks.run("train.py", recipe, *line, typed),
        f"{key} is not used, because the recipe has {because}",
        f"give {other}=0, too",
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(BadInput, match=f"{key} is not used"):
        setup(recipe, (typed,), *line)
    setup(recipe, (typed, f"{other}=0"), *line)
    sweep = ["-m", "xformer.study", "sweep", recipe, *line[:1], f"{key}=2,3", "--dry-run"]
    refused(forks.run(*sweep), f"{key} is not used, because the recipe has {because}")


def test_a_small_encoder_needs_a_higher_rate(data: Toys, learned: dict[str, Path]) -> None:
    line = (f"data={data.classes}", "run=runs/x", f"init={learned['text']}", PLAIN)
    word = "optim.lr=2e-05 is for large encoders; for one 32 wide optim.lr=3e-4 is common"
    wide = checkpoints.load(learned["text"]).config.hidden
    word = word.replace("32 wide", f"{wide} wide")
    assert word in setup(CLASSIFY, ("seed=1",), *line).notes
    assert word not in setup(CLASSIFY, (), *line).notes  # a run of a study
    for typed in (("optim.lr=2e-5",), ("optim.lr=3e-4",)):
        assert not [n for n in setup(CLASSIFY, typed, *line).notes if "large encoders" in n]


def test_validations_that_take_longer_than_the_training_are_said(
    data: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = open_store(data.text).split("valid").tokens

    def note(*more: str) -> str:
        steps = ("train.steps=50", "batch.tokens=64")
        return setup(SMOKE, (), f"data={data.text}", "run=runs/x", *steps, *more).validation_note()

    assert note("train.validate_every=1") == ""  # the split is small
    monkeypatch.setattr("xformer.setup.LONG", 1)
    said = re.fullmatch(
        rf"each validation reads the {read:,} tokens of valid, but the run trains on only about "
        r"(\d+) between two: .* larger train\.validate_every saves time",
        note("train.validate_every=1"),
    )
    assert said is not None
    assert 32 <= int(said[1]) <= 64  # a step, without special tokens
    assert note("train.validate_every=1000") == ""
    assert note("train.validate_every=0") == ""  # after each epoch


def test_a_run_that_always_predicts_one_class(
    data: Toys, learned: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    """The line names the class and its share of the labels, in training and in evaluation."""
    run, words = tmp_path / "run", r'every row is predicted as "(no|yes)", the label of ([\d.]+)%'
    done = good(forks.run(*training(CLASSIFY, data.classes, run, PLAIN, "optim.lr=1e-12")))
    for split in ("valid", "test"):
        assert (told := re.search(rf"{split}: {words}", done.err)), done.err
        predictions = read(run / f"predictions/{split}.npz")
        labels = np.array(["no", "yes"])[predictions.arrays["label"]]
        assert f"{(labels == told[1]).mean():.1%}" == f"{told[2]}%"
    scored = good(forks.run("evaluate.py", str(run), f"data={data.classes}", "split=test"))
    assert re.search(words, scored.err)
    line = [str(learned["classes"]), f"data={data.classes}", "split=test"]
    assert "every row" not in good(forks.run("evaluate.py", *line)).err


def test_rows_of_the_training_split_in_another_store(
    data: Toys, learned: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    """The file of the training split is divided anew, together with rows that were held out."""
    train, test = (
        (data.raw / "classes" / f"{split}.tsv").read_text().splitlines()
        for split in ("train", "test")
    )
    (tmp_path / "all.tsv").write_text("\n".join([*train, *test[1:]]) + "\n")
    line = ["preprocess.py", "task", "tsv", "--input", str(tmp_path / "all.tsv")]
    line += ["--text", "text", "--label", "label", "--tokenizer", str(data.tokenizer)]
    good(forks.run(*line, "--output", tmp_path / "store"))
    line = ["evaluate.py", str(learned["classes"]), "split=valid"]
    done = good(forks.run(*line, f"data={tmp_path / 'store'}"))
    rows = open_store(tmp_path / "store").split("valid")
    known = {tuple(row) for row in _ids(data.classes, "train")}
    count = sum(tuple(row) in known for row in _ids(tmp_path / "store", "valid"))
    assert 0 < count < rows.rows
    assert (
        f"note: {count} of the {rows.rows} texts of valid are in the training split of "
        f"{data.classes}, so these scores may be too high\n"
    ) in done.err
    assert "training split" not in good(forks.run(*line, f"data={data.classes}")).err

    # a store that was made again where the run's was
    remade = tmp_path / "remade"
    shutil.copytree(data.classes, remade)
    other = tmp_path / "other"
    good(forks.run(*training(CLASSIFY, remade, other, "train.steps=1")))
    again = ["evaluate.py", str(other), "split=valid", f"data={remade}"]
    assert "has changed" not in good(forks.run(*again)).err
    shutil.rmtree(remade)
    shutil.copytree(tmp_path / "store", remade)
    assert f"note: {remade} has changed since the training" in good(forks.run(*again)).err

    # a run on the other store that started from this run, and that saw a share of its rows
    run, out = tmp_path / "run", tmp_path / "scores.json"
    start = [f"init={learned['classes']}", "batch.max_tokens=20", "fraction=0.5"]
    good(forks.run(*training(CLASSIFY, tmp_path / "store", run, *start)))
    line = ["evaluate.py", str(run), f"out={out}"]
    good(forks.run(*line, f"data={tmp_path / 'store'}", "split=valid"))
    (note,) = json.loads(out.read_text())["notes"]
    assert note.startswith(f"{count} of the {rows.rows} texts of valid")
    good(forks.run(*line, f"data={data.classes}", "split=test"))
    (note,) = json.loads(out.read_text())["notes"]
    assert f"the training split of {tmp_path / 'store'} (the run read 0.5 of it), so these" in note


def _ids(store: Path, split: str) -> list[list[int]]:
    tokens = open_store(store).split(split).columns["tokens"]
    return [tokens[row].tolist() for row in range(len(tokens))]


def test_the_loss_of_masked_tokens_names_their_share(
    data: Toys, learned: dict[str, Path], forks: Forks
) -> None:
    line = [str(learned["text"]), f"data={data.text}", "split=test"]
    head = checkpoints.load(learned["text"]).head
    assert head is not None
    share = f"{100 * head.masking:.3g} % of all tokens"
    words = f"{share} are masked: compare this loss only with losses at the same share"
    assert words in good(forks.run("evaluate.py", *line)).err
    line = [str(learned["text"]), f"data={data.classes}", "split=test"]
    words = "classes has labels; this checkpoint predicts masked tokens alone"
    assert words in good(forks.run("evaluate.py", *line)).err


def ids_of(checkpoint: Checkpoint) -> dict[str, int]:
    """The id that the model reads for each symbol."""
    assert checkpoint.source is not None
    assert checkpoint.mapping is not None
    return dict(zip(checkpoint.source.pieces, checkpoint.mapping.tolist(), strict=True))


def test_the_mapping_of_the_first_training(data: Toys, learned: dict[str, Path]) -> None:
    """It must be given again; another one is named, and a run without any forgets it."""
    line = (f"data={data.splice}", "run=runs/x", f"init={learned['splice']}", "batch.max_tokens=64")
    with pytest.raises(BadInput, match="was trained with mapping=symbols:3; give it here, too"):
        setup(CLASSIFY, (), *line)
    same = setup(CLASSIFY, ("mapping=symbols:3",), *line)
    assert not [note for note in same.notes if "other ids" in note]
    other = setup(CLASSIFY, ("mapping=symbols:4",), *line)
    (note,) = [note for note in other.notes if "other ids" in note]
    old, new = map(ids_of, (same.start, other.start))
    letter = next(piece for piece in old if old[piece] != new[piece])
    assert f"({letter}: {new[letter]}, not {old[letter]})" in note
    assert note.endswith("give a store made with the same tokenizer, and mapping=symbols:3")

    plain = (f"data={data.classes}", "run=runs/x", f"init={learned['splice']}", PLAIN)
    again = setup(CLASSIFY, (), *plain).start
    assert again.source is None
    assert again.mapping is None
    rows = assembler_for(again, open_store(data.classes), "test", None)
    batch = rows.batch(np.arange(3))
    raw = replace(rows, mapping=None).batch(np.arange(3))
    assert batch.tokens.tolist() == raw.tokens.tolist()


def test_analyses_say_what_they_do_not_read(
    data: Toys, learned: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**more: int) -> str:
        config = ExamplesConfig(data=str(data.splice), out="x", **more)
        open_examples(config, [str(learned["splice"])], 20)
        return capsys.readouterr().err

    assert "rows are longer than max_tokens=20 and are truncated; the longest needs 62" in said()
    assert said(max_tokens=20) == ""


def test_rows_of_valid_that_train_has(preprocess, tmp_path: Path, data: Toys, capsys) -> None:  # type: ignore[no-untyped-def]
    """Counted one by one, too. Short rows, and few repeated ones, are not told."""
    draw = np.random.default_rng(0)
    words = ["bam", "dan", "foo", "bar", "baz"]
    lines = [" ".join(draw.choice(words, draw.integers(2, 60))) for _ in range(400)]
    (tmp_path / "train.txt").write_text("\n".join(lines[:300]))

    def made(*held_out: str) -> tuple[str, list[str]]:
        (tmp_path / "valid.txt").write_text("\n".join(held_out))
        line = ["--valid", tmp_path / "valid.txt", "--tokenizer", data.tokenizer, "--lines"]
        line += ["--overwrite", "--output", tmp_path / "store"]
        capsys.readouterr()
        preprocess("text", "--input", tmp_path / "train.txt", *line)
        return capsys.readouterr().err, repeated_rows(open_store(tmp_path / "store"))

    err, notes = made(*lines[290:])
    store = open_store(tmp_path / "store")
    train, valid = (
        [tuple(column[i].tolist()) for i in range(len(column))]
        for column in (store.split(name).columns["tokens"] for name in ("train", "valid"))
    )
    long = [row for row in valid if len(row) >= LONG]
    count = sum(row in train for row in long)
    assert 0 < count <= 10
    assert notes == [
        f"note: {count} of the {len(long)} rows of valid with at least {LONG} tokens are in train, "
        "too, so the loss on valid says less"
    ]
    assert notes[0] in err
    assert made(*lines[300:])[1] == []
    assert made(*(line for line in lines[:300] if len(line.split()) < 4))[1] == []


def test_lines_of_conll_that_are_no_words(  # type: ignore[no-untyped-def]
    preprocess, tmp_path: Path, data: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    good_lines = ["bam B-X", "dan I-X", "foo O", "", "bar O", "# O", "baz O", "", *["foo O"] * 9]

    def said(*lines: str) -> list[str]:
        (tmp_path / "train.txt").write_text("\n".join(lines))
        (tmp_path / "dev.txt").write_text("\n".join(good_lines))
        arguments = ["--input", tmp_path, "--tokenizer", data.tokenizer, "--overwrite"]
        capsys.readouterr()
        preprocess("task", "conll", *arguments, "--output", tmp_path / "store")
        start = f"warning: {tmp_path / 'train.txt'}: "
        told.append(capsys.readouterr().err)
        err = told[-1].splitlines()
        return [line.removeprefix(start) for line in err if line.startswith(start)]

    assert said(*good_lines) == []
    assert said("Word Tag", *good_lines) == [
        "its first line, 'Word Tag', is read as a word; delete it if it is a header",
        "1 label, such as 'Tag' in the sentence at line 1, is not O, B-X or I-X, so entities "
        "cannot be scored",
    ]
    commented = ["# = s1", *good_lines[:4], "# id s2", *good_lines[4:], "", "# O"]
    assert said(*commented) == []
    note = f"note: {tmp_path / 'train.txt'}: lines that begin with '# ' before a sentence are "
    assert note in told[-1]
    store = open_store(tmp_path / "store").split("train")
    assert store.rows == 3
    assert [len(store.columns["labels"][row]) for row in range(3)] == [
        len(store.columns["tokens"][row]) for row in range(3)
    ]
    assert said(*good_lines[:4], "# s1", *good_lines[4:], "", "# s2", *["foo O"] * 9) == [
        "2 sentences, such as the one at line 5, begin with #; delete such lines if they are "
        "comments",
        "2 labels, such as 's1' in the sentence at line 5, are not O, B-X or I-X, so entities "
        "cannot be scored",
    ]
    assert said("bam ADJ", "dan NOUN", "", "foo NOUN") == []


def test_scores_that_are_read_as_classes(  # type: ignore[no-untyped-def]
    preprocess, tmp_path: Path, data: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values within another JSON object have paths."""
    rows = [
        {"doc": {"text": f"bam {i}"}, "y": {"score": i % 20 / 4, "n": i % 3}} for i in range(80)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    line = ["--input", file, "--tokenizer", data.tokenizer, "--text", "doc.text", "--overwrite"]
    line += ["--output", tmp_path / "store"]
    preprocess("task", "tsv", *line, "--label", "y.score")
    words = "warning: the 20 classes are numbers, such as 0.0; for scores give --kind score"
    assert words in capsys.readouterr().err
    preprocess("task", "tsv", *line, "--label", "y.score", "--kind", "score")
    preprocess("task", "tsv", *line, "--label", "y.n")
    assert "are numbers" not in capsys.readouterr().err
    with pytest.raises(BadInput, match=r"no column 'doc.txt'; it has .* did you mean 'doc.text'"):
        preprocess("task", "tsv", *line, "--text", "doc.txt", "--label", "y.n")
    file.write_text("\n".join(json.dumps({"text": "a", "y": "1,98"}) for _ in range(80)))
    with pytest.raises(BadInput, match="the score '1,98' has a comma; write a decimal point"):
        preprocess("task", "tsv", *line, "--text", "text", "--label", "y", "--kind", "score")


def test_a_study_repeats_the_warnings_of_its_runs(data: Toys, forks: Forks, tmp_path: Path) -> None:
    """Each once while it runs; in the report with the number of runs."""
    line = ["-m", "xformer.study", "sweep", CLASSIFY, f"data={data.classes}", "seed=0,1"]
    line += ["batch.max_tokens=6", "train.epochs=1", "optim.lr=1e-12", "jobs=1"]
    line += [part for part in TINY if part.startswith("model.")]
    done = good(forks.run(*line, f"output={tmp_path / 'runs'}"))
    (report,) = (tmp_path / "runs").glob("*/report.md")
    text = report.read_text()
    assert done.err.count("    WARNING: ") == 1
    assert "2 of 2 runs of run, such as run seed=0: WARNING: " in text
    assert "every row is predicted as " in text


@pytest.mark.parametrize(
    ("keys", "compares"),
    [(["masking.probability=0.1,0.5"], False), (["optim.lr=1e-3,1e-4"], True)],
)
def test_a_sweep_does_not_rank_losses_of_other_tasks(
    keys: list[str], compares: bool, data: Toys, tmp_path: Path
) -> None:
    study = sweep.read([SMOKE, f"data={data.text}", *keys, "seed=0,1"])
    file = tmp_path / "x.toml"
    study.write(file)
    plan = Plan(read_study(file, ""), tmp_path / "studies", {})
    for number, run in enumerate(plan.runs("run")):
        run.path.mkdir(parents=True)
        metrics = {"valid": {"loss": 1.0 + number, "accuracy": 0.1}}
        run.proof.write_text(json.dumps({"metrics": metrics, "seconds": 2.0}))
    text = render(build_report(Results(plan), {}, plan.root / "x"), "md")
    assert ("Best on valid: " in text) == compares
    other = "These losses cannot be compared between levels of masking.probability."
    assert (other in text) != compares


def test_the_second_model_keeps_the_mapping_of_its_training(
    data: Toys, learned: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def read_as(**more: str) -> tuple[list[list[int]], str]:
        config = ExamplesConfig(data=str(data.splice), out="x", max_tokens=64, **more)
        paths = [str(learned["text"]), str(learned["splice"])]
        models = open_examples(config, paths).models
        ids = [model.assembler.batch(np.arange(1)).tokens.tolist() for model in models]
        return ids, capsys.readouterr().err

    (first, second), said = read_as(mapping="symbols:9")
    assert said == ""
    assert first != second
    assert second == read_as(mapping="symbols:3")[0][1]
    (first, second), said = read_as(mapping="symbols:9", mapping_b="symbols:9")
    assert first == second
    assert "was trained with mapping=symbols:3, not symbols:9" in said


def test_vectors_as_the_model_was_published(minilm: Path, forks: Forks, tmp_path: Path) -> None:
    good(forks.run("-m", "xformer.convert", "from-hf", str(minilm), str(tmp_path / "m")))
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    line = ["-m", "xformer.encode", str(tmp_path / "m"), f"input={tmp_path / 'texts.txt'}"]
    line.append(f"out={tmp_path / 'x.npy'}")
    words = "makes this model's vectors with pooling=mean normalize=true max_tokens=256"
    assert words in good(command(*line)).err
    assert words not in good(command(*line, "normalize=true")).err


def test_scores_with_a_foreign_tokenizer(shared: Path, forks: Forks, tmp_path: Path) -> None:
    """An encoder of text with another tokenizer is named, an encoder of brackets is not."""
    vocabulary = shared / "vocabs/bert-base-uncased.vocab.txt"
    made = ["preprocess.py", "tokenizer", "--from", str(vocabulary), "--output"]
    good(forks.run(*made, str(tmp_path / "bert")))
    shape = ModelConfig(vocab_size=30522, layers=1, hidden=16, heads=2, intermediate=16)
    other = checkpoints.fresh(shape, load_tokenizer(tmp_path / "bert"), 0)
    checkpoints.save(other.with_head(Head("mlm")), tmp_path / "other")
    line = ["-m", "xformer.analysis", "blimp", "micro/brackets", str(tmp_path / "other"), "pairs=1"]
    line += [f"data={shared / 'blimp/BLiMP.zip'}", f"out={tmp_path / 'out'}", "threads=1"]
    err = good(command(*line, "tokenizer=micro/english")).err
    words = (
        "was trained with another tokenizer; with tokenizer=micro/english its ids stand for other"
    )
    assert [f"{tmp_path / 'other'} {words}" in err, f"brackets {words}" in err] == [True, False]


@pytest.fixture
def task(preprocess, capsys, data: Toys, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A function that runs `preprocess.py task` and returns the lines on standard error."""

    def run(name: str, *options: object, letters: bool = False) -> str:
        capsys.readouterr()
        more = [] if letters else ["--tokenizer", data.tokenizer]
        preprocess("task", name, *options, *more, "--overwrite", "--output", tmp_path / "store")
        return str(capsys.readouterr().err)

    return run


def test_rows_that_share_a_text(task, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Three hypotheses of a premise are in several splits; --group keeps them together. Pairs of
    different texts are not told."""
    file, rows = tmp_path / "pairs.tsv", range(600)
    file.write_text(
        "premise\thypothesis\tlabel\n"
        + "".join(f"w{i // 3} bam\tfoo w{i} dan\t{'yn'[i % 2]}\n" for i in rows)
    )
    line = ["--input", file, "--text", "premise", "--text-b", "hypothesis", "--label", "label"]
    words = r"warning: (\d+) of the 30 rows of (?:test|valid) share a text with train; --group COL"
    counts = re.findall(words, task("tsv", *line))
    assert len(counts) == 2
    assert all(int(count) > 15 for count in counts)
    assert "share a text" not in task("tsv", *line, "--group", "premise")
    file.write_text(
        "premise\thypothesis\tlabel\n"
        + "".join(f"w{i} bam\tfoo w{i} dan\t{'yn'[i % 2]}\n" for i in rows)
    )
    assert "share a text" not in task("tsv", *line)


def test_odd_classes(task, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def told(*labels: str) -> str:
        rows = (f"bam w{i}\t{labels[i % len(labels)]}\n" for i in range(200))
        (tmp_path / "x.tsv").write_text("text\tlabel\n" + "".join(rows))
        return str(task("tsv", "--input", tmp_path / "x.tsv", "--text", "text", "--label", "label"))

    for missing in ("-1", "-", "?", "N/A"):
        assert f"warning: {missing!r} is a class" in told("0", "1", missing)
    assert "is a class" not in told("-1", "1") + told("-", "+")
    alike = ("cafe\u0301", "caf\u00e9", "no  ok", "no ok", "zero\u200b", "zero")
    err = told("other", *alike)
    assert err.count(" rows) and ") == 3
    assert "differ only in case, white space, or how their characters are written" in err
    assert "differ only" not in told("a", "b")
    words = (f"bam{i}\tB-{alike[i % 2]}\n\n" for i in range(200))
    (tmp_path / "x.conll").write_text("".join(words))
    err = task("conll", "--input", tmp_path / "x.conll")
    assert "some classes differ only in case, white space, or how" in err


def test_texts_that_look_the_same_stay_in_one_split(task, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """An accent may be a character of its own."""
    forms = ("caf\u00e9 w{0}\t{0}a\ty\n", "cafe\u0301 w{0}\t{0}b\tn\n")
    rows = "".join(form.format(i) for form in forms for i in range(100))
    (tmp_path / "x.tsv").write_text("text\tkey\tlabel\n" + rows)
    names = ["--text", "text", "--label", "label", "--id", "key"]
    task("tsv", "--input", tmp_path / "x.tsv", *names)
    store = open_store(tmp_path / "store")
    for split in store.splits:
        keys = {bytes(key).decode() for key in store.split(split).columns["id"]}
        assert {key.replace("a", "b") for key in keys} == {key for key in keys if "b" in key}


def test_a_header_that_is_read_as_a_row(task, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def told(*lines: str) -> str:
        rows = (f"bam w{i}\t{'yn'[i % 2]}\n" for i in range(60))
        (tmp_path / "x.tsv").write_text("".join(lines) + "".join(rows))
        line = ["--input", tmp_path / "x.tsv", "--no-header", "--text", "1", "--label", "2"]
        return str(task("tsv", *line))

    words = 'line 1 looks like a header (its label is "Label"), but with --no-header it is a row'
    assert words in told("text\tLabel\n")
    assert "looks like" not in told() + told("a text\tlabel\n")


def test_files_named_after_splits(task, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    table, place = "text\tlabel\nbam\ty\ndan\tn\n", tmp_path / "tables"
    place.mkdir()
    for name in ("train.tsv", "val.tsv", "validation_matched.tsv", "notes.md"):
        (place / name).write_text(table)
    err = task("tsv", "--input", place, "--text", "text", "--label", "label")
    assert sorted(open_store(tmp_path / "store").splits) == ["train", "valid"]
    assert "note: not read, because they name no split: validation_matched.tsv" in err
    fasta = tmp_path / "fasta"
    fasta.mkdir()
    for name in ("pos", "neg", "test"):
        records = (f">{name}{i}\nM{name[0]}{'KV' * (i + 1)}\n" for i in range(30))
        (fasta / f"{name}.fasta").write_text("".join(records))
    with pytest.raises(BadInput, match="test would be a class, but it is named after a split"):
        task("protein", "--input", fasta, letters=True)
    (fasta / "test.fasta").unlink()
    task("protein", "--input", fasta, letters=True)
    assert open_store(tmp_path / "store").labels == ["neg", "pos"]
