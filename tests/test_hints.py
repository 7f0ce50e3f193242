"""What commands say so that a newcomer can go on: about wrong paths and options, about tokens that
are not known, and about labels and weights that training does not use.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xformer import checkpoint as checkpoints
from xformer import config, evaluate, prepare, surgery, texts
from xformer.analysis import pwcca
from xformer.analysis.examples import open_examples
from xformer.analysis.subcommand import parse_arguments
from xformer.checkpoint import Checkpoint
from xformer.convert import __main__ as convert
from xformer.data import vocabularies
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.memory import split_of
from xformer.data.rows import write_store
from xformer.data.store import open_store
from xformer.parallel.processes import ALONE
from xformer.preprocess.tasks import predict
from xformer.preprocess.tasks.tables import Form, RowTable
from xformer.recipe import Recipe
from xformer.session import announce
from xformer.setup import Setup
from xformer.surgery.registry import parse_operation
from xformer.tasks.classify import Classify
from xformer.tasks.task import Head

WORDS = ["a", "word", "is", "a", "good", "thing", "to", "say"]


@pytest.fixture(scope="module")
def english() -> Checkpoint:
    return checkpoints.load("micro/english")


@pytest.fixture(scope="module")
def place(english: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of text, one with classes, a classifier, and labelled DNA."""
    place = tmp_path_factory.mktemp("hints")
    rows = [" ".join(WORDS[i % 8 :]) for i in range(32)]
    write_store(place / "text", english.tokenizer, {"train": rows, "valid": rows[:8]})
    named = [(text, "ab"[i % 2]) for i, text in enumerate(rows)]
    splits = {"train": named, "valid": named[:8]}
    write_store(place / "classes", english.tokenizer, splits, labels=["a", "b"])
    head = Head("classify", labels=("a", "b"), max_tokens=64)
    checkpoints.save(english.with_head(head), place / "classifier")
    draw = np.random.default_rng(3)
    lines = [f"{''.join(draw.choice(list('ACGT'), 80))},{'xy'[i % 2]}\n" for i in range(60)]
    (place / "dna.csv").write_text("sequence,label\n" + "".join(lines))
    return place


def setup(place: Path, recipe: str, *keys: str) -> Setup:
    line = [recipe, *keys, f"run={place / 'run'}", "batch.max_tokens=64", "system.precision=fp32"]
    return prepare.prepare(config.load(Recipe, line), ALONE, ())


# ------------------------------------------------------------------------------ unknown tokens


def test_unknown_tokens_are_never_silent(
    tmp_path: Path, preprocess: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long sequence is one unknown word to a WordPiece of English."""
    records = [f">{i}\n{'MKVL' * (40 if i % 2 else 4)}\n" for i in range(10)]
    (tmp_path / "p.fasta").write_text("".join(records))
    made = ("--tokenizer", "micro/english", "--output", tmp_path / "s")
    preprocess("text", "--input", tmp_path / "p.fasta", *made)
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning")]
    tokens = open_store(tmp_path / "s").split("train").columns["tokens"]
    share = 100 * float(np.mean(tokens.values == 1))
    told = f"does not know {share:.3g} % of the tokens and 90.9 % of the text of train (all tokens "
    assert f"{told}of 5 texts)" in line
    assert "--kind symbols" in line


@pytest.mark.parametrize(("unknown", "told"), [(1, False), (2, True)])
def test_more_than_one_percent_is_told(
    unknown: int, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The split is named, and an ordinary share is not mentioned."""
    rows = ["A" * 50, "C" * (50 - unknown) + "x" * unknown]
    splits = {"train": ["ACGT" * 9], "test": rows}
    write_store(tmp_path / "s", vocabularies.symbols("ACGT"), splits)
    said = capsys.readouterr().err
    assert ("does not know 2 % of the tokens of test, which became [UNK]" in said) is told
    assert bool(said) is told


@pytest.mark.parametrize(("kind", "told"), [("wordpiece", True), ("words", False)])
def test_a_text_of_token_ids_is_pointed_out(
    kind: str, told: bool, tmp_path: Path, preprocess: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as fairseq's encoders write. A tokenizer of words gives each id one id again."""
    (tmp_path / "ids.txt").write_text("11 257 3290 262\n\n" * 50)
    (tmp_path / "text.txt").write_text("we met 11 dogs and 257 cats\n\n" * 50)
    learn = ("--kind", kind, "--vocab-size", 60, "--output", tmp_path / "tok")
    preprocess("tokenizer", "--input", tmp_path / "ids.txt", tmp_path / "text.txt", *learn)
    for name in ("ids", "text"):
        made = ("--tokenizer", tmp_path / "tok", "--output", tmp_path / name)
        preprocess("text", "--input", tmp_path / f"{name}.txt", *made)
        line = "note: 100 % of the words of train are numbers. If they are token ids, they have"
        assert (line in capsys.readouterr().err) is (told and name == "ids")


def test_texts_that_a_model_does_not_know_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Also if they are in no store: texts to encode, and a text with a mask."""
    english = checkpoints.load("micro/english")
    english.encode(["a text", "another one"])
    assert "does not know" not in capsys.readouterr().err
    english.encode(["\u732b"])
    assert "does not know 100 % of the tokens, which became [UNK]" in capsys.readouterr().err
    evaluate.fill_mask(english, "\u732b [MASK] \u732b", 1)
    assert "does not know 40 % of the tokens" in capsys.readouterr().err


# ------------------------------------------------------------------------------ keys of rows


TABLE = "key\tsentence\ttool\n" + "".join(
    f"k{i}\t{' '.join(WORDS[i % 8 :])} {i}\t{'ab'[i % 2]}\n" for i in range(60)
)


def ids(store: Path, split: str) -> list[str]:
    column = open_store(store).split(split).columns["id"]
    return [column.text(i) for i in range(len(column))]


def test_a_key_column_names_the_rows(
    tmp_path: Path, preprocess: Any, english: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--id` keeps a column in the store. For new rows the same column is the default, and `id=`
    names another."""
    (tmp_path / "t.tsv").write_text(TABLE)
    line = ["task", "tsv", "--input", tmp_path / "t.tsv", "--text", "sentence", "--label", "tool"]
    line += ["--tokenizer", "micro/english"]
    preprocess(*line, "--id", "key", "--output", tmp_path / "s")
    kept = [name for split in ("train", "valid", "test") for name in ids(tmp_path / "s", split)]
    assert sorted(kept) == sorted(f"k{i}" for i in range(60))
    with pytest.raises(BadInput, match=r"t.tsv has no column 'kex'.*did you mean 'key'"):
        preprocess(*line, "--id", "kex", "--output", tmp_path / "n")
    with pytest.raises(BadInput, match=r"an earlier row has the id 'a' too"):
        preprocess(
            *line[:6], "--label", "key", "--id", "tool", *line[8:], "--output", tmp_path / "n"
        )

    origin = open_store(tmp_path / "s").meta["origin"]["columns"]
    head = {"kind": "classify", "labels": ["a", "b"], "pair": False, "max_tokens": 64}
    head["columns"] = origin
    file = tmp_path / "new.csv"
    file.write_text("sentence,key,other\na word,k1,o1\na thing,k2,o2\n")

    def read(name: str, key: str) -> list[str]:
        predict.write_rows(file, head, english.tokenizer, tmp_path / name, (), key)
        return ids(tmp_path / name, "input")

    assert read("one", "") == ["k1", "k2"]
    assert read("two", "other") == ["o1", "o2"]
    assert "so the rows get no id" not in capsys.readouterr().err
    other = tmp_path / "renamed.csv"
    other.write_text("sentence,KEY\na word,k1\n")
    predict.write_rows(other, head, english.tokenizer, tmp_path / "three", ())
    assert "renamed.csv has no column 'key', so the rows get no id" in capsys.readouterr().err
    for key, words in (
        ("othr", "id=othr: .* has no column 'othr'; .*did you mean 'other'"),
        ("sentence", "id=sentence is a column of the texts"),
    ):
        with pytest.raises(BadInput, match=words):
            read("none", key)
    bare = tmp_path / "bare.txt"
    bare.write_text("a word\na thing\n")
    with pytest.raises(BadInput, match=r"id=other: .*bare.txt has no header"):
        predict.write_rows(bare, head, english.tokenizer, tmp_path / "none", (), "other")
    assert evaluate.parse_arguments(["x", f"input={file}", "id=3"]).id == "3"
    with pytest.raises(BadInput, match="id= cannot be combined with data="):
        evaluate.parse_arguments(["x", "data=y", "id=key"])


@pytest.mark.parametrize("pair", [False, True])
def test_a_head_made_in_python_needs_the_columns(
    tmp_path: Path, english: Checkpoint, pair: bool
) -> None:
    head = vars(Head("classify", ("a", "b"), pair=pair))
    rows: list[tuple[str, ...]]
    rows = [("label", "text", "text_b"), ("a", "one word", "two"), ("b", "three", "four words")]
    rows = rows if pair else [row[:2] for row in rows]
    file = tmp_path / "rows.tsv"
    file.write_text("".join("\t".join(row) + "\n" for row in rows))
    words = "does not record which of them are the texts: columns= names them"
    with pytest.raises(BadInput, match=words):
        predict.write_rows(file, head, english.tokenizer, tmp_path / "none")
    given = ["text", "text_b"][: 1 + pair]
    predict.write_rows(file, head, english.tokenizer, tmp_path / "store", given)
    columns: Any = open_store(tmp_path / "store").split("input").columns
    for name in ("input", "input_b")[: 1 + pair]:
        own = rows[0].index(name.replace("input", "text"))
        assert [columns[name].text(i) for i in range(2)] == [row[own] for row in rows[1:]]


def test_sequences_keep_their_keys(tmp_path: Path, preprocess: Any, english: Checkpoint) -> None:
    """The column of --id is none of the columns of sequence, label and split, wherever it is."""
    rows = [(f"k{i}", "ACGT"[i % 4] * (i + 2), "xy"[i % 2]) for i in range(60)]
    sequences = {key: sequence for key, sequence, _ in rows}
    (tmp_path / "t.csv").write_text("key,seq,class\n" + "".join(f"{','.join(r)}\n" for r in rows))
    (tmp_path / "test.csv").write_text("seq,key\nGATTACA,k9\n")  # without labels
    line = ["task", "dna", "--input", tmp_path / "t.csv", "--test", tmp_path / "test.csv"]
    preprocess(*line, "--id", "key", "--output", tmp_path / "s")
    store = open_store(tmp_path / "s")
    assert store.meta["origin"]["columns"]["label"] == "class"
    pieces = store.tokenizer().pieces
    for split in ("train", "valid"):
        for row, name in enumerate(ids(tmp_path / "s", split)):
            tokens = store.split(split).columns["tokens"][row]
            assert "".join(pieces[token] for token in tokens) == sequences.pop(name)
    assert not sequences
    assert ids(tmp_path / "s", "test") == ["k9"]
    with pytest.raises(BadInput, match=r"t.csv has no column 'kex'.*did you mean 'key'"):
        preprocess(*line, "--id", "kex", "--output", tmp_path / "n")

    head = {"kind": "classify", "labels": ["x", "y"], "pair": False, "max_tokens": 64}
    head["columns"] = store.meta["origin"]["columns"]
    predict.write_rows(tmp_path / "test.csv", head, english.tokenizer, tmp_path / "new", (), "")
    assert ids(tmp_path / "new", "input") == ["k9"]


def test_questions_keep_their_keys(tmp_path: Path, preprocess: Any, english: Checkpoint) -> None:
    lines = [f"q{i}\t{WORDS[i % 8]} {i}\tyes\tno\t{i % 2}\n" for i in range(60)]
    (tmp_path / "t.tsv").write_text("key\tasked\tA\tB\tright\n" + "".join(lines))
    line = ["task", "choice", "--input", tmp_path / "t.tsv", "--context", "asked", "--endings"]
    line += ["A", "B", "--label", "right", "--id", "key", "--tokenizer", "micro/english"]
    preprocess(*line, "--output", tmp_path / "s")
    split = open_store(tmp_path / "s").split("test")
    task = english.with_head(Head("choice", pair=True)).task
    assert task is not None
    table = task.table(np.zeros((split.rows, 1), np.float32), split)
    assert table["id"] == ids(tmp_path / "s", "test")[::2]
    assert table["id"][0].startswith("q")


# ------------------------------------------------------------------------------ separators


@pytest.mark.parametrize(
    ("name", "content", "form", "words"),
    [
        ("a.tsv", "sentence,tool\nx,y\n", None, "comma-separated: rename the file to end in .csv"),
        ("a.csv", "sentence\ttool\nx\ty\n", None, "tab-separated: rename the file to end in .tsv"),
        ("b.csv", "id;sentence\n1;x\n", None, "semicolon-separated: separate them by commas"),
        ("a.tsv", '"sentence","tool"\nx,y\n', Form("\t", None, hint="; see"), "--delimiter comma"),
        ("a.tsv", "sentances,tool\nx,y\n", None, "its columns look comma-separated"),
        ("a.tsv", "sentences\nx\n", None, "did you mean 'sentences'"),
    ],
)
def test_another_separator_is_recognised(
    name: str, content: str, form: Form | None, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    table = RowTable(tmp_path / name, form)
    assert words in str(table.missing("sentence"))
    assert ("did you mean" in str(table.missing("sentence"))) is ("did you mean" in words)


def test_rows_to_predict_with_another_separator(tmp_path: Path, english: Checkpoint) -> None:
    """The file is not read as one without a header."""
    (tmp_path / "new.tsv").write_text("sentence,tool\na word,b\n")
    columns = {"text": "sentence", "text_b": None, "label": "tool"}
    head = {"kind": "classify", "labels": ["a", "b"], "pair": False, "max_tokens": 64}
    with pytest.raises(BadInput, match=r"'sentence'; its columns look comma-separated.*\.csv$"):
        predict.write_rows(
            tmp_path / "new.tsv", {**head, "columns": columns}, english.tokenizer, tmp_path / "s"
        )


# ------------------------------------------------------------------------------ names and options


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1], "number 0 of the texts is 1, of type int; give a list of strings"),
        (["a", None], "number 1 of the texts is None, of type NoneType"),
        (["a", "caf\udce9"], "number 1 of the texts holds half of a surrogate pair"),
        (5, "encode takes a text or a list of texts, not 5"),
    ],
)
def test_encode_says_what_it_wants(english: Checkpoint, given: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        english.encode(given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("cls", "first"), ("pooler", "first"), ("CLS-token", "first"), ("mean_pooling", "mean")],
)
def test_other_names_of_a_pooling(name: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"must be 'mean' or 'first'; did you mean '{meant}'"):
        texts.check_pooling(name)


def test_an_option_of_a_subcommand_that_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["to-hf", "micro/english", "out", "--licence", "mit"]
    monkeypatch.setattr(sys, "argv", ["convert", *line])
    with pytest.raises(BadInput, match="unrecognized arguments: --licence; did you mean --license"):
        convert.main()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--data", "s"], "'--data' is not of the form key=value; write data=s"),
        (["--learning-rate", "1e-3"], "write optim.lr=1e-3"),
        (["--overwrite"], "write overwrite=true"),
        (["--bf16"], "write system.precision=bf16"),
        (["--zzz", "1"], "'--zzz' is not of the form key=value; --help lists the keys"),
    ],
)
def test_an_option_in_place_of_a_key(option: list[str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        config.parse_overrides(Recipe, option)


def test_an_option_of_an_analysis() -> None:
    for line in (["a", "b", "--data", "s"], ["a", "--data", "s", "out=f"]):
        with pytest.raises(BadInput, match=r"write data=s$"):
            parse_arguments(pwcca.SUBCOMMAND, line)


def test_a_list_is_shown_by_example() -> None:
    for line, words in (
        ("surgery=clean", """give a list, such as surgery='[{op = "clean"}]'"""),
        ("train.only=mlm_head", """give a list, such as train.only='["mlm_head"]'"""),
        ('surgery=[{op="x"}]', """, as in {op = "clean"}"""),
    ):
        with pytest.raises(BadInput) as caught:
            config.load(Recipe, ["pretrain/smoke", "data=s", "run=r", line])
        assert words in str(caught.value)
    with pytest.raises(BadInput, match=r"written like 'keep_layers\(first=6\)'"):
        parse_operation("zzz")


def test_an_alphabet_needs_no_other_option(tmp_path: Path, preprocess: Any) -> None:
    """A tokenizer of symbols takes all characters of a text, if no size is given."""
    preprocess("tokenizer", "--alphabet", "ACGT", "--output", tmp_path / "a")
    (tmp_path / "t.txt").write_text("GATTACA\n")
    line = ["tokenizer", "--kind", "symbols"]
    preprocess(*line, "--input", tmp_path / "t.txt", "--output", tmp_path / "b")
    one, two = (checkpoints.tokenizers.load_tokenizer(tmp_path / name).fingerprint for name in "ab")
    assert one == two
    with pytest.raises(BadInput, match="--input is required for --kind symbols, unless --alphabet"):
        preprocess(*line, "--output", tmp_path / "c")
    with pytest.raises(BadInput, match="--vocab-size is required for --kind bpe"):
        preprocess(*line[:2], "bpe", "--input", tmp_path / "t.txt", "--output", tmp_path / "c")


def test_words_between_white_space_are_symbols(
    tmp_path: Path, preprocess: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frequent words come first, and words that are equally frequent are sorted. `--vocab-size`
    leaves out the rarest words. A special token in the text is not a word."""
    text = tmp_path / "t.txt"
    text.write_text("w7 w5\tw7 B\nw30 w7 w5 [MASK]\n\nb w5 B w7\n")
    line = ["tokenizer", "--kind", "words", "--input", text]
    preprocess(*line, "--output", tmp_path / "all")
    said = capsys.readouterr()
    assert "words tokenizer of 10 pieces, " in said.out
    assert said.err == (
        "note: special tokens in the text become [UNK]: [MASK] (1); spell them otherwise\n"
    )
    words = checkpoints.tokenizers.load_tokenizer(tmp_path / "all")
    assert words.pieces[5:] == ["w7", "w5", "B", "b", "w30"]
    assert words.encode_batch(["w5 w30\nx w7"])[0].tolist() == [6, 9, words.special["unk"], 5]
    preprocess(*line, "--vocab-size", 8, "--output", tmp_path / "few")
    assert "note: 2 of 5 words are left out: 16.7 % of the tokens become [UNK]\n" in (
        capsys.readouterr().err
    )
    few = checkpoints.tokenizers.load_tokenizer(tmp_path / "few")
    assert few.pieces[5:] == ["w7", "w5", "B"]
    assert few.decode(few.encode_batch(["w7 b"])[0]) == "w7 [UNK]"
    preprocess(*line, "--vocab-size", 30, "--output", tmp_path / "fewer")
    assert "words tokenizer of 10 pieces (the text yields no more), " in capsys.readouterr().out
    text.write_text("[MASK] [SEP]\n")
    with pytest.raises(BadInput, match=r"holds only special tokens, such as \[MASK\]"):
        preprocess(*line, "--output", tmp_path / "none")


# ------------------------------------------------------------------------------ paths


def test_paths_that_do_not_exist(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    here = Path(place.name)
    for wrong, right in (
        (here / "clasifier", here / "classifier"),
        (Path(f"{here}x") / "classifier", here / "classifier"),
        (Path("micro/englsh"), Path("micro/english")),
    ):
        with pytest.raises(BadInput, match=rf"does not exist.*; did you mean {right}\?$"):
            checkpoints.resolve(wrong)
        with pytest.raises(BadInput, match=rf"does not exist; did you mean {right}\?$"):
            checkpoints.tokenizers.load_tokenizer(wrong)
    with pytest.raises(BadInput, match=rf"texd is not a store.*; did you mean {here}/text\?$"):
        open_store(here / "texd")
    with pytest.raises(BadInput, match=r"zzz is not a store: it does not exist$"):
        open_store(here / "zzz")


def test_a_path_of_another_kind(place: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"text is not a checkpoint but a store: give the dir"):
        checkpoints.resolve(place / "text")
    with pytest.raises(BadInput, match=r"dna.csv is not a checkpoint but a file"):
        checkpoints.resolve(place / "dna.csv")
    for path in (place / "classifier", Path("micro/english")):
        words = rf"{path} is not a store but a checkpoint \(a model is given as init=\)"
        with pytest.raises(BadInput, match=words):
            open_store(path)
    vocabularies.symbols("AC").save(tmp_path)
    with pytest.raises(BadInput, match="is not a store but a tokenizer"):
        open_store(tmp_path)


# ------------------------------------------------------------------------------ training


def test_what_pretraining_does_not_use(place: Path) -> None:
    """The labels of a store, and the pooler of a checkpoint."""
    plain = setup(place, "pretrain/smoke", f"data={place / 'text'}", "init=micro/english")
    assert not [note for note in plain.notes if "labels" in note or "pooler" in note]
    keys = (f"data={place / 'classes'}", f"init={place / 'classifier'}")
    notes = setup(place, "pretrain/smoke", *keys).notes
    assert f"{place / 'classes'} has labels; head=mlm does not use them, only its texts" in notes
    [line] = [note for note in notes if note.startswith("dropped weights: pooler, task_head (")]
    assert line.endswith("trains no pooler, so a fine-tuning of this run begins with a new one)")


def test_f1_of_two_classes_names_its_class(place: Path) -> None:
    line = 'f1 is that of the class "b", the second label'
    assert line in setup(place, "finetune/classify", f"data={place / 'classes'}").notes
    for labels, hint in (
        (("a c", "b"), "; --labels 'b,a c' at preprocessing changes it"),
        (("a,c", "b"), ""),  # --labels separates them by commas
    ):
        head = Head("classify", labels, columns={"task": "tsv"})
        assert Classify(head).metric_note == line + hint
    assert not Classify(Head("classify", ("a", "b", "c"))).metric_note


def test_a_run_says_its_operations_on_the_weights(place: Path) -> None:
    clean = 'surgery=[{op="clean"}]'
    notes = setup(
        place, "pretrain/smoke", f"data={place / 'text'}", "init=micro/english", clean
    ).notes
    assert "surgery: clean (re-initialise every weight: the from-scratch baseline)" in notes


def test_every_operation_is_described_in_a_few_words() -> None:
    for name in surgery.registry.OPERATIONS:
        words = surgery.registry.in_words(name)
        assert words[:1].islower(), words
        assert 20 < len(words) < 90, words
        assert "(" not in words, words


def test_text_needs_an_mlm_head(place: Path, english: Checkpoint) -> None:
    store = open_store(place / "text")
    classifier = checkpoints.load(place / "classifier")
    for headless in (classifier, replace(english, head=None)):
        with pytest.raises(BadInput, match=r"no MLM head.*continue.*init=CHECKPOINT"):
            evaluate.assembler_for(headless, store, "valid", None)
    with pytest.raises(BadInput, match=r"no MLM head.*continue"):
        evaluate.fill_mask(classifier, "a [MASK]", 1)


def test_an_analysis_names_the_second_mapping(place: Path, tmp_path: Path, preprocess: Any) -> None:
    preprocess("task", "dna", "--input", place / "dna.csv", "--output", tmp_path / "dna")
    settings = pwcca.PwccaConfig(data=str(tmp_path / "dna"), out="f", mapping="symbols:0")
    settings = settings.model_copy(update={"mapping_b": "none"})
    with pytest.raises(BadInput, match=r"mapping=symbols:0.*; mapping_b= is the mapping of all"):
        open_examples(settings, ["micro/english", "micro/english"])


class Recorder:
    """Stands for the monitor of a run, and keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, *lines: str) -> None:
        self.lines += lines

    def event(self, *_: object, **values: object) -> None:
        """The numbers of the start."""


def test_truncated_sequences_can_keep_both_ends(
    place: Path, tmp_path: Path, preprocess: Any, english: Checkpoint
) -> None:
    preprocess("task", "dna", "--input", place / "dna.csv", "--output", tmp_path / "dna")
    keys = (f"data={tmp_path / 'dna'}", "init=micro/english", "mapping=symbols:0")
    made, monitor = setup(place, "finetune/classify", *keys), Recorder()
    announce(made, made.start.model(), monitor)  # type: ignore[arg-type]
    [line] = [x for x in monitor.lines if x.startswith("WARNING")]
    assert line.endswith(
        "preprocess.py task makes with --longest 62 keeps both ends of each sequence"
    )
    text = Assembler(split_of(english.tokenizer, ["a " * 99]), english.tokenizer, 64)
    assert "--longest" not in text.truncation("batch.max_tokens=64", 128)


@pytest.mark.parametrize(("most", "told"), [(126, False), (127, True)])
def test_rows_beyond_the_model_whose_tokenizer_is_used(
    most: int, told: bool, tmp_path: Path, preprocess: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("a word\n")
    line = ("text", "--input", tmp_path / "t.txt", "--tokenizer", "micro/english")
    preprocess(*line, "--max-tokens", most, "--output", tmp_path / "s")
    assert ("for that model give 126 at most" in capsys.readouterr().err) is told


def test_the_summary_of_an_operation_on_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.surgery import __main__ as command

    of_each = {"clean": "58 weights, all of them", "reverse_layers": "58 weights, 0 of them"}
    for name, words in of_each.items():
        monkeypatch.setattr(sys, "argv", ["surgery", "micro/english", str(tmp_path / name), name])
        command.main()
        first, last = capsys.readouterr().out.splitlines()
        assert f"{words} with new values" in last
        assert surgery.registry.in_words(name) in first
    assert torch.equal(
        checkpoints.load(tmp_path / "clean").weights["mlm_head.bias"], torch.zeros(8192)
    )
