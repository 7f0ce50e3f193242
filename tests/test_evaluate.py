"""evaluate.py as users run it: scores, predictions, filled masks, raw rows and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.inject import KILL, armed
from helpers import Done, Forks, command, good, refused
from scipy.stats import spearmanr
from toys import TOPICS, Toys

from xformer import checkpoint as checkpoints
from xformer.config import all_keys
from xformer.convert.describe import describe
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.store import open_store
from xformer.data.vocabularies import symbols
from xformer.data.writing import create_store
from xformer.evaluate import EvaluateConfig, parse_arguments
from xformer.parallel.precision import speed_note
from xformer.tasks import classify

Runs = dict[str, Path]


def evaluate(forks: Forks, checkpoint: Path, *overrides: str, ranks: int = 1) -> Done:
    return forks.run("evaluate.py", checkpoint, *overrides, "system.threads=1", ranks=ranks)


def table(text: str) -> list[list[str]]:
    """The rows of a tab-separated table, without its header."""
    return [line.split("\t") for line in text.splitlines()[1:]]


def raw(data: Toys, store: str, split: str = "test") -> list[list[str]]:
    return table((data.raw / store / f"{split}.tsv").read_text())


@pytest.mark.parametrize("name", ["text", "classes", "scores", "pairs", "splice"])
def test_scores_are_those_of_the_run(
    name: str, forks: Forks, data: Toys, learned: Runs, tmp_path: Path
) -> None:
    """The scores of both splits are those of the run, with 1 and 2 processes, on the screen and as
    JSON.
    """
    store, expected = getattr(data, name), read_json(learned[name] / "result.json")["metrics"]
    for split, ranks in (("test", 1), ("valid", 1), ("test", 2)):
        out = tmp_path / f"{split}-{ranks}.json"
        done = good(
            evaluate(
                forks, learned[name], f"data={store}", f"split={split}", f"out={out}", ranks=ranks
            )
        )
        written = read_json(out)
        assert written == {
            "checkpoint": str(learned[name]),
            "data": str(store),
            "split": split,
            "rows": (rows := open_store(store).split(split).rows),
            "precision": "fp32",
            "metrics": expected[split],
        } | ({} if name == "text" else {"labels": rows})
        shown = [f"{split} {metric} {value:.4f}" for metric, value in expected[split].items()]
        assert done.out.splitlines() == shown


def test_predictions_have_a_line_a_row(
    forks: Forks, data: Toys, learned: Runs, tmp_path: Path
) -> None:
    out = tmp_path / "rows.tsv"
    good(evaluate(forks, learned["classes"], f"data={data.classes}", f"predictions={out}"))
    assert out.read_text().startswith("label\tprobability\trow\tgold\n")
    rows, labels = table(out.read_text()), [label for _, label in raw(data, "classes")]
    assert [row[2] for row in rows] == [str(i) for i in range(60)]
    assert [row[3] for row in rows] == labels
    right = np.mean([row[0] == label for row, label in zip(rows, labels, strict=True)])
    scores = read_json(learned["classes"] / "result.json")["metrics"]["test"]
    assert right == pytest.approx(scores["accuracy"])
    assert all(0.5 <= float(row[1]) <= 1 for row in rows)

    good(evaluate(forks, learned["scores"], f"data={data.scores}", f"predictions={out}"))
    assert out.read_text().startswith("score\trow\tgold\n")
    actual = [float(row[0]) for row in table(out.read_text())]
    truth = [float(row[1]) for row in raw(data, "scores")]
    assert [float(row[2]) for row in table(out.read_text())] == pytest.approx(truth, rel=1e-6)
    scores = read_json(learned["scores"] / "result.json")["metrics"]["test"]
    assert spearmanr(actual, truth)[0] == pytest.approx(scores["spearman"], abs=1e-3)


def test_rows_whose_outputs_are_not_finite_are_named(
    forks: Forks, data: Toys, learned: Runs, tmp_path: Path
) -> None:
    """The vector of one word is broken, so the scores of all rows with this word are."""
    learnt, out = checkpoints.load(learned["classes"]), tmp_path / "scores.json"
    tokens = open_store(data.classes).split("test").columns["tokens"]
    word = int(tokens[9][0])
    rows = [row for row in range(60) if word in tokens[row]]
    assert 9 in rows
    assert len(rows) < 60
    broken = learnt.weights["encoder.embeddings.word.weight"].clone()
    broken[word] = torch.nan
    weights = {**learnt.weights, "encoder.embeddings.word.weight": broken}
    checkpoints.save(replace(learnt, weights=weights), tmp_path / "broken")
    done = evaluate(forks, tmp_path / "broken", f"data={data.classes}", f"out={out}")
    shown = ", ".join(map(str, rows[:8]))
    words = f"the split 'test': outputs are not finite in {len(rows)} of 60 rows: {shown}"
    refused(done, words, status=1)
    assert not out.exists()


def test_fillings(forks: Forks, data: Toys, learned: Runs) -> None:
    """The model has learned which words share a topic, and fills masks with them."""
    one, two = TOPICS[1][0], TOPICS[1][1]
    text = f"text={one} [MASK] {two} {one} [MASK] {two}"
    done = good(evaluate(forks, learned["text"], text, "top=4"))
    lines = done.out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["mask 1", "mask 2"]
    for line in lines:
        words = line.split(": ")[1].split()
        assert set(words[::2]) == set(TOPICS[1])
        chances = [float(p) for p in words[1::2]]
        assert chances == sorted(chances, reverse=True)
        assert 0.5 < sum(chances) <= 1.001
    assert good(evaluate(forks, learned["text"], text, "top=4", ranks=2)).out == done.out


def test_raw_rows(forks: Forks, data: Toys, learned: Runs, tmp_path: Path) -> None:
    """A file gives the predictions of the store whether it has the header of training, more
    columns, or no header.
    """
    rows, predictions = raw(data, "classes"), tmp_path / "predictions.tsv"
    good(evaluate(forks, learned["classes"], f"data={data.classes}", f"predictions={predictions}"))
    expected = [row[:2] for row in table(predictions.read_text())]
    file, out = tmp_path / "rows.tsv", tmp_path / "out.tsv"
    texts = [text for text, _ in rows]
    for content in (
        (data.raw / "classes/test.tsv").read_text(),
        "\n".join(["id\ttext", *(f"{i}\t{text}" for i, text in enumerate(texts))]),
        "\n".join(texts) + "\n\n",
        "\ufeff" + "\r\n".join(["text", *texts]),
    ):
        file.write_text(content, encoding="utf-8", newline="")
        done = good(evaluate(forks, learned["classes"], f"input={file}"))
        assert [row[:2] for row in table(done.out)] == expected
        assert [row[2] for row in table(done.out)] == texts
        good(evaluate(forks, learned["classes"], f"input={file}", f"out={out}", ranks=2))
        assert out.read_text() == done.out


def test_raw_pairs_and_scores(forks: Forks, data: Toys, learned: Runs, tmp_path: Path) -> None:
    predictions = tmp_path / "predictions.tsv"
    for name, texts in (("pairs", 2), ("scores", 1)):
        store = getattr(data, name)
        good(evaluate(forks, learned[name], f"data={store}", f"predictions={predictions}"))
        expected = [row[:-2] for row in table(predictions.read_text())]
        done = good(evaluate(forks, learned[name], f"input={data.raw / name / 'test.tsv'}"))
        assert [row[:-texts] for row in table(done.out)] == expected
        assert [row[-texts:] for row in table(done.out)] == [r[:texts] for r in raw(data, name)]


def test_raw_symbols_go_the_way_of_training(
    forks: Forks, data: Toys, learned: Runs, tmp_path: Path
) -> None:
    """With mapping=symbols the checkpoint contains the alphabet and its mapping to subwords."""
    predictions, file = tmp_path / "predictions.tsv", tmp_path / "sequences.tsv"
    run, store = learned["splice"], open_store(data.splice)
    split = "split=train"
    good(evaluate(forks, run, f"data={data.splice}", f"predictions={predictions}", split))
    expected = [row[:2] for row in table(predictions.read_text())]
    tokens = store.split("train").columns["tokens"]
    texts = [store.tokenizer().decode(tokens[row]) for row in range(len(tokens))]
    file.write_text("\n".join(["sequence", *texts]))
    done = good(evaluate(forks, run, f"input={file}"))
    assert [row[:2] for row in table(done.out)] == expected
    assert len(set(map(tuple, expected))) > 3
    out = tmp_path / "scores.json"  # another mapping gives the model other ids
    good(evaluate(forks, run, f"data={data.splice}", split, "mapping=symbols:4", f"out={out}"))
    labels = store.split("train").columns["label"]
    right = np.mean([row[0] == store.labels[i] for row, i in zip(expected, labels, strict=True)])
    assert read_json(out)["metrics"]["accuracy"] != pytest.approx(right)


def test_a_checkpoint_in_a_run_and_its_precision(
    forks: Forks, data: Toys, learned: Runs, tmp_path: Path
) -> None:
    """The path of the selected checkpoint gives the scores of the run; bf16 differs a little."""
    out, losses = tmp_path / "out.json", []
    chosen = learned["text"] / read_json(learned["text"] / "result.json")["selected"]
    for path, precision in ((learned["text"], "fp32"), (chosen, "fp32"), (chosen, "bf16")):
        overrides = [f"data={data.text}", f"out={out}", f"system.precision={precision}"]
        good(evaluate(forks, path, *overrides))
        losses.append(read_json(out)["metrics"]["loss"])
    assert losses[0] == losses[1]
    assert losses[2] != losses[1]
    assert losses[2] == pytest.approx(losses[1], abs=0.02)


def test_every_form_knows_precision(forks: Forks, data: Toys, learned: Runs) -> None:
    """The command says if bf16 is slow on this device. Raw rows and masks can be predicted in bf16
    too.
    """
    shown = []
    text = f"text={TOPICS[1][0]} [MASK] {TOPICS[1][1]}"
    rows = f"input={data.raw / 'scores/test.tsv'}"
    for name, form in (("text", text), ("scores", rows)):
        done = [
            good(evaluate(forks, learned[name], form, f"system.precision={precision}"))
            for precision in ("fp32", "bf16")
        ]
        shown.append([one.out for one in done])
        slow = speed_note(torch.device("cpu"), "bf16")
        assert slow in done[1].err
        assert "bf16" not in done[0].err
    scores = [[float(row[0]) for row in table(out)] for out in shown[1]]
    assert scores[0] != scores[1]
    assert scores[0] == pytest.approx(scores[1], abs=0.05)


# -------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="session")
def others(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores with other classes, an unfinished run, and files without rows are refused."""
    place = tmp_path_factory.mktemp("others")
    (place / "raw").mkdir()
    for split in ("train", "valid", "test"):
        text = (data.raw / f"classes/{split}.tsv").read_text()
        (place / f"raw/{split}.tsv").write_text(text.replace("\tno", "\tmaybe"))
    make = (
        "preprocess.py",
        "task",
        "tsv",
        "--text",
        "text",
        "--label",
        "label",
        "--tokenizer",
        data.tokenizer,
        "--input",
    )
    good(forks.run(*make, place / "raw", "--output", place / "maybe"))
    swapped = (data.raw / "classes", "--labels", "yes,no", "--output", place / "swapped")
    good(forks.run(*make, *swapped))
    (place / "run/checkpoints/step_3").mkdir(parents=True)
    (place / "header.tsv").write_text("text\n")
    (place / "empty.tsv").write_text("")
    (place / "three.tsv").write_text("a\tb\tc\n")
    (place / "short.tsv").write_text("id\ttext\n1\tbam\n2\n")
    (place / "latin.tsv").write_bytes(b"bam\ncaf\xe9\n")
    return place


# the run, the arguments, and words of the error
BAD_INPUT: list[tuple[str, list[str], list[str]]] = [
    ("classes", [], ["give one of data=STORE, text='...', input=FILE and blimp=FILE"]),
    ("classes", ["data=x", "text=y"], ["give one of data=STORE"]),
    ("classes", ["data={data}/absent"], ["absent is not a store"]),
    ("classes", ["data={data}/classes", "split=dev"], ["no split 'dev'", "train, valid, test"]),
    ("classes", ["data={data}/classes", "splt=test"], ["unknown key splt; did you mean split?"]),
    ("classes", ["data={data}/classes", "top=0"], ["top=0"]),
    ("classes", ["data={data}/classes", "threshold=0"], ["threshold= applies only to span heads"]),
    (
        "classes",
        ["input={others}/short.tsv", "threshold=0"],
        ["this checkpoint's head is classify"],
    ),
    ("classes", ["data={data}/classes", "out={others}/absent/x.json"], ["absent/x.json cannot be"]),
    ("classes", ["data={data}/classes", "out={others}"], ["others0 cannot be written"]),
    (
        "classes",
        ["data={data}/splice"],
        ["splice has labels that are not classes of the checkpoint", "EI, IE, N"],
    ),
    (
        "classes",
        ["data={others}/maybe"],
        ["labels that are not classes of the checkpoint: maybe", "the checkpoint knows no, yes"],
    ),
    (
        "classes",
        ["data={others}/swapped"],
        [
            "swapped has the checkpoint's classes in another order: yes, no",
            "make the store again with --labels no,yes",
        ],
    ),
    ("classes", ["data={data}/scores"], ["head=classify needs a store of kind class"]),
    ("scores", ["data={data}/classes"], ["head=regress needs a store of kind score"]),
    ("text", ["data={data}/splice"], ["splice was made with a different tokenizer"]),
    ("splice", ["data={data}/splice", "mapping=symbol:1"], ["mapping='symbol:1'"]),
    ("splice", ["data={data}/splice", "mapping=none"], ["made with a different tokenizer"]),
    ("text", ["data={data}/text", "predictions={others}/p.tsv"], ["an MLM head has no table"]),
    ("text", ["text=no mask"], ["write [MASK] for each missing word"]),
    ("text", ["text="], ["write [MASK] for each missing word"]),
    ("text", ["text=[MASK] {long}"], ["tokens; the model takes 64"]),
    ("classes", ["text=bam [MASK]"], ["no MLM head"]),
    (
        "text",
        ["input={others}/header.tsv"],
        ["with a class, score, span, tag or choice head"],
    ),
    ("classes", ["input={others}/absent.tsv"], ["absent.tsv does not exist"]),
    ("classes", ["input={others}"], ["is a directory"]),
    (
        "classes",
        ["input={others}/three.tsv", "out={others}/../{name}/three.tsv"],
        ["out= and input= are both", "give two different files"],
    ),
    (
        "classes",
        ["input={others}/three.tsv", "out={others}/three.csv"],
        ["the table is separated by tabs; give a name that ends in .tsv"],
    ),
    ("classes", ["input={others}/empty.tsv"], ["empty.tsv is empty"]),
    ("classes", ["input={others}/header.tsv"], ["header.tsv has a header and no row"]),
    (
        "classes",
        ["input={others}/three.tsv"],
        ["three.tsv:1: the header lacks the column 'text'", "it has 3 columns, 'a', 'b', 'c'"],
    ),
    ("classes", ["input={others}/short.tsv"], ["short.tsv:3: 1 column instead of 2"]),
    ("classes", ["input={others}/latin.tsv"], ["latin.tsv:2: not valid UTF-8"]),
    ("pairs", ["input={others}/three.tsv"], ["three.tsv:1", "'left' and 'right'", "2 columns"]),
]


@pytest.mark.parametrize("case", BAD_INPUT, ids=lambda case: " ".join([case[0], *case[1]]))
def test_bad_input_costs_one_line(
    case: tuple[str, list[str], list[str]], forks: Forks, data: Toys, learned: Runs, others: Path
) -> None:
    run, overrides, words = case
    places = {
        "data": data.text.parent,
        "others": others,
        "name": others.name,
        "long": "bam " * 90,
    }
    done = evaluate(forks, learned[run], *(o.format(**places) for o in overrides))
    refused(done, *words)
    assert done.out == ""


def test_bad_checkpoints(forks: Forks, data: Toys, learned: Runs, others: Path) -> None:
    for path, words in (
        (others / "absent", "absent does not exist"),
        (data.text, "is not a checkpoint but a store"),
        (others / "run", "is not finished; name one of its checkpoints: step_3"),
    ):
        refused(evaluate(forks, path, f"data={data.text}"), str(path), words)
    refused(forks.run("evaluate.py"), "the first argument must be a checkpoint")
    refused(forks.run("evaluate.py", "data=x"), "the first argument must be a checkpoint")


@pytest.mark.parametrize("fault", ["full", KILL])
@pytest.mark.parametrize("key", ["out", "predictions", "out of input"])
def test_what_is_written_is_whole_or_as_before(
    key: str, fault: str, forks: Forks, data: Toys, learned: Runs, tmp_path: Path
) -> None:
    """If the disk is full, or the process is killed at any operation on the file, the predictions
    are complete or absent.
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    out, rows = folder / "out", data.raw / "classes/test.tsv"
    given = [f"data={data.classes}", f"{key}={out}"]
    given = [f"input={rows}", f"out={out}"] if key == "out of input" else given
    good(evaluate(forks, learned["classes"], *given))
    whole = out.read_text()
    for number in range(50):
        out.write_text("before")
        before = armed(folder, fault, number, once=True)
        done = forks.run("evaluate.py", learned["classes"], *given, before=before)
        assert out.read_text() in ("before", whole), number
        if done.status == 0:
            break
        if fault == "full":
            assert done.err.splitlines() == [f"error: No space left on device: {out}"], done
            assert [path.name for path in folder.iterdir()] == ["out"]
    assert done.status == 0
    assert number >= 3
    assert out.read_text() == whole


def test_out_may_be_a_pipe_or_a_link(
    forks: Forks, data: Toys, learned: Runs, tmp_path: Path
) -> None:
    """Pipes, devices and links are written to, not replaced."""
    (tmp_path / "link").symlink_to("file")
    good(evaluate(forks, learned["classes"], f"data={data.classes}", f"out={tmp_path / 'link'}"))
    assert (tmp_path / "link").is_symlink()
    assert read_json(tmp_path / "file")["split"] == "test"
    good(evaluate(forks, learned["classes"], f"data={data.classes}", "out=/dev/null"))
    assert not Path("/dev/null").is_file()
    done = evaluate(forks, learned["classes"], f"data={data.classes}", "out=/proc/x")
    refused(done, "/proc/x cannot be written")


def test_as_a_user_types_it(forks: Forks, data: Toys, learned: Runs) -> None:
    done = good(command("evaluate.py", learned["classes"], f"data={data.classes}"))
    assert done.out.startswith("test loss ")
    assert done.err == (
        'f1 is that of the class "yes", the second label; --labels yes,no at preprocessing changes '
        "it\nprecision fp32 (as in training)\n"
    )
    lines = good(forks.run("evaluate.py", "--help")).out.splitlines()
    assert max(map(len, lines)) <= 100
    for key in all_keys(EvaluateConfig):
        place = next(i for i, line in enumerate(lines) if line.startswith(f"  {key}: "))
        assert lines[place + 1].startswith("      "), key


def test_a_mapping_belongs_to_its_tokenizer(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    """A store whose letters have other ids is refused."""
    checkpoint = checkpoints.load(learned["splice"])
    assert checkpoint.source is not None
    letters = [p for p in checkpoint.source.pieces if len(p) == 1]
    with create_store(
        tmp_path / "other", symbols(reversed(letters)), {"tokens": "", "label": "int64"}
    ) as store:
        with store.split("test") as split:
            split.append_ragged("tokens", np.array([5, 6, 7]), np.array([3]))
            split.append("label", np.zeros(1, np.int64))
        store.finish("class", checkpoint.head.labels if checkpoint.head else [], "accuracy", {})
    done = evaluate(forks, learned["splice"], f"data={tmp_path / 'other'}")
    refused(done, "a different tokenizer from the data this checkpoint")


def test_keys_of_another_form_are_refused(forks: Forks, learned: dict[str, Path]) -> None:
    refused(evaluate(forks, learned["text"], "text=[MASK]", "split=valid"), "split=", "text=")
    with pytest.raises(BadInput, match=r"^split= cannot be combined with text="):  # the first one
        parse_arguments(["runs/english", "text=[MASK]", "split=valid", "out=scores.json"])


def test_a_folder_of_predictions_may_be_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the files that will be written are checked."""
    below = tmp_path / "predictions/figures"
    below.mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"identity": {}}')
    monkeypatch.chdir(below)
    assert parse_arguments([".", "data=store"]).out is None
    for own in ("../valid.json", "../../config.json", "../../checkpoints/step_1/model.safetensors"):
        (below / own).parent.mkdir(parents=True, exist_ok=True)
        with pytest.raises(BadInput, match="only the run itself writes"):
            parse_arguments([".", "data=store", f"out={own}"])
    assert parse_arguments([".", "data=store", "out=../../mine.json"]).out == "../../mine.json"


@pytest.mark.parametrize(
    ("mark", "own"),
    [
        ("store.json", "train/tokens.npy"),
        ("store.json", "store.json"),
        ("manifest.json", "config.json"),
        ("tokenizer_meta.json", "tokenizer.json"),
    ],
)
def test_stores_and_checkpoints_keep_their_files(tmp_path: Path, mark: str, own: str) -> None:
    """Also if the output is a link to one of them. Other files may lie beside them."""
    (tmp_path / "x/train").mkdir(parents=True)
    content = {"splits": {"train": {}}, "sha256": {"config.json": ""}}
    (tmp_path / f"x/{mark}").write_text(json.dumps(content))
    (tmp_path / "link.json").symlink_to(tmp_path / "x" / own)
    for out in (tmp_path / "x" / own, tmp_path / "link.json"):
        with pytest.raises(BadInput, match=r"cannot be written: .* belongs to a"):
            parse_arguments([".", "data=store", f"out={out}"])
    beside = f"out={tmp_path}/x/scores.json"
    assert parse_arguments([".", "data=store", beside]).out == beside[4:]


def test_files_of_another_form_than_their_name_are_refused() -> None:
    for given in (["data=s", "out=a.csv"], ["data=s", "out=a.npz"], ["blimp=b", "out=a.npz"]):
        with pytest.raises(BadInput, match=r"a.(csv|npz): scores are written as JSON; give a name"):
            parse_arguments([".", *given])
    for given in (["input=i", "out=a.csv"], ["blimp=b", "predictions=a.npz"]):
        with pytest.raises(BadInput, match=r"a.(csv|npz): the table is separated by tabs; give a"):
            parse_arguments([".", *given])
    for given in (
        ["data=s", "predictions=a.npz"],
        ["input=i", "out=a.npz"],
        ["blimp=b", "out=a.csv"],
    ):
        assert parse_arguments([".", *given])


def test_votes_are_those_of_a_plain_loop() -> None:
    """Each segment votes for a class, and the mean probability breaks ties."""
    draw = np.random.default_rng(0)
    scores = draw.dirichlet(np.full(4, 0.3), 300)
    # some groups have two or four rows, so there are ties
    groups = draw.integers(0, 90, 300) * 7 - 20
    actual = classify.vote(np.log(scores), groups).argmax(1)
    ties = 0
    expected = []
    for group in sorted(set(groups.tolist())):
        rows = [scores[i].tolist() for i in range(300) if groups[i] == group]
        count = [sum(row.index(max(row)) == k for row in rows) for k in range(4)]
        ties += count.count(max(count)) > 1
        mean = [sum(row[k] for row in rows) / len(rows) for k in range(4)]
        expected.append(max(range(4), key=lambda k: (count[k], mean[k])))
    assert actual.tolist() == expected
    assert ties > 10
    sure = np.log(np.array([[1 - 1e-12, 1e-12], [0.51, 0.49], [0.51, 0.49], [1e-12, 1 - 1e-12]]))
    assert classify.vote(sure, np.array([0, 1, 1, 1])).argmax(1).tolist() == [0, 0]
    assert classify.vote(sure, np.zeros(4, int)).argmax(1).tolist() == [0]


def test_groups_of_scores() -> None:
    values = np.array([[1.0], [2.0], [6.0], [4.0]])
    groups = np.array([5, 3, 5, 3])
    assert classify.mean_by_group(values, groups).tolist() == [[3.0], [3.5]]
    assert classify.first_by_group(np.array([10, 20, 10, 20]), groups).tolist() == [20, 10]


def test_inspect_looks_into_a_run(learned: dict[str, Path]) -> None:
    said = "\n".join(describe(learned["text"]))
    assert f"selected by the run {learned['text']}" in said
    assert "mlm, rows of up to 20 tokens" in said


def test_scores_and_predictions_need_a_file_each(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    """Two outputs with the same path are refused, because one would overwrite the other."""
    same = tmp_path / "same"
    line = ["evaluate.py", str(learned["classes"]), f"data={data.classes}"]
    refused(forks.run(*line, f"out={same}", f"predictions={same}"), "are both", str(same))
    assert not same.exists()
