"""Untrusted files and names: each is read or refused in one line, and none is executed."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import fuzz
from faults.readers import READERS, command, make_ground, zipped
from helpers import CLASSIFY, ROOT, SMOKE, Done, Forks, good, refused, training
from hypothesis import given
from hypothesis import strategies as st

from xformer.data.display import escaped, one_line, put
from xformer.data.errors import BadInput
from xformer.data.store import open_store
from xformer.data.writing import create_store

INPUTS = 3  # random inputs for each reader
DEEP = 10_000
MORE = int(os.environ.get("FAULTS_INPUTS", INPUTS))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Valid files of every kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [""])
        threads = torch.get_num_threads()
        path = tmp_path_factory.mktemp("hostile") / "ground"
        make_ground(path)
        torch.set_num_threads(threads)
    return path


@pytest.fixture
def trial(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], fuzz.Trial]]:
    """A function that makes the Trial of a reader, given its name."""
    monkeypatch.setattr("sys.argv", [""])
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    threads = torch.get_num_threads()
    yield lambda name: fuzz.Trial(name, ground, tmp_path / "trial")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [reader.name for reader in READERS])
def test_a_damaged_file_is_read_or_refused_in_one_line(
    name: str, trial: Callable[[str], fuzz.Trial]
) -> None:
    """A sample of what `python -m faults.fuzz` tries by the million."""
    reads, draw = trial(name), random.Random(name)
    for seed in reads.seeds:
        assert reads(seed) == ""  # a valid one
    for number in range(MORE):
        data = fuzz.mutated(draw, reads.seeds)
        assert (fault := reads(data)) == "", (number, fault, data[:200])


# ------------------------------------------------------------------------- nothing of theirs runs


class Payload:
    """What a pickle would do: make a directory."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def pickles(marker: Path) -> dict[str, bytes]:
    """The payload in every form that a loader of arrays or weights might open."""
    forms = {"pickle": pickle.dumps(Payload(marker))}
    for name, legacy in (("torch", False), ("old torch", True)):
        buffer = io.BytesIO()
        torch.save({"w": Payload(marker)}, buffer, _use_new_zipfile_serialization=not legacy)
        forms[name] = buffer.getvalue()
    for name, save in (("npy", np.save), ("npz", np.savez)):
        buffer = io.BytesIO()
        save(buffer, np.array([Payload(marker)], object))
        forms[name] = buffer.getvalue()
    forms["zip"] = zipped(**{"archive/data.pkl": forms["pickle"], "archive/version": b"3"})
    return forms


@pytest.mark.parametrize(
    "name",
    [
        "import pytorch_model.bin",
        "PLUS",
        "mapping.npy",
        "store label",
        "store train/tokens.npy",
        "checkpoint model.safetensors",
        "from spiece.model",
        "import model.safetensors",
        "predictions",
    ],
)
def test_no_pickle_runs(name: str, trial: Callable[[str], fuzz.Trial], tmp_path: Path) -> None:
    reads, marker = trial(name), tmp_path / "owned"
    for form, data in pickles(marker).items():
        assert reads(data) == "", form
        assert not marker.exists(), form
    pickle.loads(pickles(marker)["pickle"])  # this shows that the payload works
    assert marker.exists()


DANGEROUS = {"eval", "exec", "compile", "os.system", "os.popen", "pickle.loads", "__import__"}


SOURCES = sorted(p for name in ("xformer", "preprocess") for p in (ROOT / name).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_nothing_is_interpreted(path: Path) -> None:
    """No source file calls what runs a text as a program, or hands a text to a shell."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in DANGEROUS, ast.unparse(node)
            assert not any(k.arg == "shell" for k in node.keywords), ast.unparse(node)


EVIL = "\x1b[31m\x9b2J\rred\u202e\x07"  # colours, clears, overwrites, turns round, rings


def harmless(done: Done, *lines: str) -> None:
    """Assert that a command printed these texts and nothing that steers a terminal."""
    assert "Traceback" not in done.err
    for text in (done.out, done.err):
        assert all(line.isprintable() for line in text.split("\n")), text
    for line in lines:
        assert line in done.out + done.err, (line, done)


@pytest.mark.slow
def test_hostile_labels_and_titles_are_escaped(
    ground: Path, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is in labels of a csv, in file names, in a checkpoint's classes, in a recipe or in a
    study.
    """
    monkeypatch.chdir(tmp_path)
    shown, folder = escaped(EVIL), tmp_path / f"store{EVIL}"
    rows = [f'bam{i},"{EVIL}{"ab"[i % 2]}"' for i in range(40)]
    (tmp_path / f"{EVIL}.csv").write_text("text,label\n" + "\n".join(rows) + "\n", newline="")
    made: list[str | Path] = [
        "--text",
        "text",
        "--label",
        "label",
        "--tokenizer",
        ground / "tok",
        "--output",
        folder,
    ]
    table = tmp_path / f"{EVIL}.csv"
    harmless(good(forks.run("preprocess.py", "task", "tsv", "--input", table, *made)), shown)
    harmless(good(forks.run("preprocess.py", "stats", folder)), f"labels: {shown}a ", f"{shown}b ")
    harmless(good(forks.run("preprocess.py", "verify", folder)))
    wrong = forks.run("preprocess.py", "stats", tmp_path / f"none{EVIL}")
    assert wrong.status == 2
    harmless(wrong, f"none{shown}")
    run = tmp_path / f"run{EVIL}"
    done = good(forks.run(*training(CLASSIFY, folder, run, "train.steps=1")))
    harmless(done)
    harmless(good(forks.run(*training(CLASSIFY, folder, run, "train.steps=1"))), f"run{shown}")
    inspected = forks.run("-m", "xformer.convert", "inspect", run)
    harmless(good(inspected), f"2 classes: {shown}a, {shown}b", f"run{shown}")
    recipe = tmp_path / "bad.toml"
    recipe.write_text(f"{json.dumps(EVIL)} = 1\n")
    harmless(forks.run(*training(str(recipe), folder, run, "head=mlm")), f"unknown key {shown}")
    study = tmp_path / "study.toml"
    study.write_text(STUDY.format(evil=json.dumps(EVIL)[1:-1]))
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        study,
        "scale=mini",
        f"output={tmp_path / 'studies'}",
    ]
    harmless(good(forks.run(*line, "--dry-run")), f"stop word={shown}")
    done = forks.run(*line, "jobs=1")
    assert done.status == 1
    harmless(
        done,
        f"# title {shown}",
        f"stop word={shown}: failed",
        f"cannot stop {escaped(EVIL.split(chr(13))[0])}",
    )


def test_data_on_a_terminal_is_escaped_and_in_a_pipe_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Predictions keep their tabs and line ends in both."""
    for terminal, wanted in ((True, f"a\t{escaped(EVIL)}\nb\n"), (False, f"a\t{EVIL}\nb\n")):
        shown = io.StringIO()
        monkeypatch.setattr(shown, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr("sys.stdout", shown)
        put(f"a\t{EVIL}\nb\n")
        assert shown.getvalue() == wanted


STUDY = """
title = "title {evil}"
question = "?"
paper = "paper {evil}"
[stages.stop]
command = ["-c", "import sys; sys.exit('cannot stop ' + sys.argv[1])", "{{word}}", "{{out}}"]
vary.word = {{ "{evil}" = {{}} }}
[scales.mini]
"""

NAMES = [
    "a b",
    'it\'s "so"',
    "$(touch owned)",
    "`touch owned`; touch owned",
    "line\nbreak",
    "-rf",
    "%s {0} {text}",
    "\x1b[31mred",
    "[ab]",
    "é\u202eback",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_names(
    name: str, ground: Path, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, an output and a run may be called anything; a shell never sees it."""
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.txt").write_text((ground / "raw/t.txt").read_text() * 3)
    Path("v.txt").write_text((ground / "raw/v.txt").read_text())
    command(
        "text",
        f"--input={name}.txt",
        "--valid",
        "v.txt",
        "--tokenizer",
        ground / "tok",
        f"--output={name}",
    )
    assert open_store(name).split("train").rows > 0
    line = training(SMOKE, tmp_path / name, tmp_path / f"run {name}", "train.steps=1")
    good(forks.run(*line))
    assert (tmp_path / f"run {name}/result.json").is_file()
    again = forks.run(*line, "optim.lr=0.5")
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert again.err.rstrip("\n").isprintable()
    kept = {name, f"{name}.txt", "v.txt", f"run {name}"}
    assert {path.name for path in tmp_path.iterdir()} == kept


# --------------------------------------------------------------------------- bugs that were found


@pytest.mark.parametrize(
    "name", [r.name for r in READERS if r.file.endswith((".json", ".jsonl", ".toml", "words"))]
)
@pytest.mark.slow
def test_ten_thousand_levels(name: str, trial: Callable[[str], fuzz.Trial]) -> None:
    reads = trial(name)
    for data in (
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b"a = " + b"[" * DEEP,
        b"a." * DEEP + b"b = 1",
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    ):
        assert reads(data) == "", data[:10]


HEAD = b"\x93NUMPY\x01\x00v\x00"
FOUND: list[tuple[str, bytes]] = [
    ("archive a.zip", zipped(a=b"x" * 99)[10:]),  # its table points to before the file's start
    ("store train/tokens.offsets.npy", b""),
    ("store train/tokens.offsets.npy", HEAD + b"{'descr': '<i4', (".ljust(118)),
    ("evaluated train/tokens.offsets.npy", HEAD + b"{'descr': '<i4', (".ljust(118)),
    ("splice", b"E" * 10**5 + b",x,ACGT\n"),  # a class of 100,000 letters
]


@pytest.mark.parametrize(("name", "data"), FOUND, ids=lambda v: v if isinstance(v, str) else "")
def test_what_was_found(name: str, data: bytes, trial: Callable[[str], fuzz.Trial]) -> None:
    assert trial(name)(data) == ""


@given(st.text())
def test_a_message_is_one_line_of_letters_and_signs(text: str) -> None:
    line = one_line(text * 3000, most=500)
    assert line.isprintable()
    assert len(line) <= 10 * 510
    assert one_line("plain words, 5 %: é北") == "plain words, 5 %: é北"


# --------------------------------------------------------------------- paths, devices and names


@pytest.mark.parametrize("key", ["run", "init", "data", "mapping"])
def test_a_nul_in_a_setting_is_refused(
    key: str, ground: Path, tmp_path: Path, forks: Forks
) -> None:
    """A TOML string can hold a NUL character, which no path can."""
    line = training(SMOKE, ground / "store", tmp_path / "run")
    setting, recipe = f'{key}="a\\u0000b"', tmp_path / "r.toml"
    refused(forks.run(*line, setting), f"{key}='a\\x00b' holds a NUL character")
    recipe.write_text(f"{setting}\n")
    rest = [word for word in line[2:] if not word.startswith(f"{key}=")]
    refused(forks.run("train.py", recipe, *rest), f"{key}='a\\x00b' holds a NUL character")
    recipe.write_text(setting.replace(key, "base", 1))
    refused(forks.run("train.py", recipe), "base='a\\x00b' is not the path of a recipe")
    if key in ("data", "mapping"):
        refused(forks.run("evaluate.py", ground / "run", setting), f"{key}='a\\x00b' holds a NUL")


def test_a_nul_in_an_argument_is_refused(ground: Path, tmp_path: Path, forks: Forks) -> None:
    """A NUL in an argument is refused; only another program can pass one."""
    words = {
        "--input": f"{ground / 'raw/t.txt'}",
        "--output": f"{tmp_path / 's'}",
        "--tokenizer": f"{ground / 'tok'}",
    }
    for option in words:
        given = {**words, option: "a\0b"}
        done = forks.run("preprocess.py", "text", *(x for pair in given.items() for x in pair))
        refused(done, "'a\\x00b' holds a NUL character")


def test_places_where_nothing_can_be_made(ground: Path, tmp_path: Path, forks: Forks) -> None:
    line = training(SMOKE, ground / "store", Path("/proc/x"), "train.steps=1")
    refused(forks.run(*line), "run=/proc/x cannot be made", "give another directory")
    done = forks.run(
        "preprocess.py",
        "text",
        "--input",
        ground / "raw/t.txt",
        "--tokenizer",
        ground / "tok",
        "--output",
        "/proc/x",
    )
    refused(done, "/proc", "cannot be made", "give another directory")


def test_a_recipe_that_never_ends_is_refused(tmp_path: Path, forks: Forks) -> None:
    """Devices, pipes and files that are too large are refused as recipes."""
    pipe, large, recipe = (tmp_path / name for name in ("pipe", "large", "r.toml"))
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2**40)
    for path, words in (
        ("/dev/zero", "is a device or a pipe; give a file"),
        (pipe, "is a device or a pipe; give a file"),
        (large, "; give a TOML file"),
    ):
        recipe.write_text(f'base = "{path}"\n')
        for first in (path, recipe):
            refused(forks.run("train.py", first, "data=x", "run=y"), f"the recipe {path}", words)
        if path != "/dev/zero":
            continue
        study = ("-m", "xformer.study", recipe, "scale=mini")
        refused(forks.run(*study), "the recipe /dev/zero", words)


def test_a_table_of_very_many_columns_is_read(ground: Path, tmp_path: Path, forks: Forks) -> None:
    """Names are counted in one pass. (With a pass for each this took a minute.)"""
    wide = ",c".join(map(str, range(200_000)))
    cells = ",0" * 200_000
    rows = [f"text,label,c{wide}", *(f"bam{i},{'ab'[i % 2]}{cells}" for i in range(25))]
    (tmp_path / "wide.csv").write_text("\n".join(rows) + "\n")
    line: list[str | Path] = ["task", "tsv", "--input", tmp_path / "wide.csv"]
    line += ["--tokenizer", ground / "tok", "--output", tmp_path / "s", "--text", "text", "--label"]
    refused(forks.run("preprocess.py", *line, "lable"), "has no column 'lable'", "'label'?")
    good(forks.run("preprocess.py", *line, "label"))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_without_a_row_is_refused(
    split: str, ground: Path, tmp_path: Path, forks: Forks
) -> None:
    """A store of another program with a bad offset is refused."""
    old = open_store(ground / "store")
    path = tmp_path / "store"
    with create_store(path, old.tokenizer(), {"tokens": "uint16"}, ["tokens"]) as writer:
        for name in ("train", "valid", "test"):
            with suppress(BadInput), writer.split(name) as made:
                rows = 20 if name != split else 0
                made.append_ragged("tokens", np.full(3 * rows, 7), np.full(rows, 3))
        writer.finish("text", [], None, {})
    what = f"has no rows in its split '{split}'"
    refused(forks.run(*training(SMOKE, path, tmp_path / "run")), str(path), what)
    line: list[str | Path] = ["evaluate.py", ground / "run", f"data={path}", f"split={split}"]
    refused(forks.run(*line), str(path), what)
    refused(forks.run("preprocess.py", "stats", path), str(path), what)
    assert not (tmp_path / "run").exists()


OUTSIDE = """
title = "t"
question = "?"
paper = "p"
[scales.mini]
{part}
"""
STAGE = (
    '[stages.{name}]\ncommand = ["-c", "pass", "{{{{out}}}}"]\nresult = "{result}"\n'
    'vary.seed = ["0"]\n'
)
PLAIN = STAGE.format(name="a", result="r.json")
SHOWS = {
    "curves": '[needs.d]\nabout = "x"\n[stages.a]\nrecipe = "pretrain/smoke"\nvary.seed = [0]\n'
    'settings.data = "{{need.d}}"\n[[curves]]\nname = "{name}"\ntitle = "t"\nstage = "a"\n'
    'panels = "seed"\nlines = "seed"\n',
    "pictures": f'{PLAIN}[[pictures]]\nname = "{{name}}"\ntitle = "t"\nstage = "a"\n'
    'file = "f.svg"\n',
    "tables": f'{PLAIN}[[tables]]\nname = "{{name}}"\ntitle = "t"\nstage = "a"\nrows = "seed"\n'
    'columns = "metric"\nmetric.loss = "loss"\n',
    "stages": STAGE.format(name='"{name}"', result="r.json"),
    "made": f'{PLAIN}[made."{{name}}"]\ncommand = ["-c", "{{{{out}}}}"]\n',
}


@pytest.mark.parametrize("what", SHOWS)
def test_a_study_names_no_file_outside(what: str, tmp_path: Path, forks: Forks) -> None:
    study = tmp_path / "study.toml"
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        study,
        "scale=mini",
        f"output={tmp_path / 'out'}",
    ]
    for name in (
        "../../owned",
        "/owned",
        "a/b",
        "..",
        ".hidden",
        "a\\\\b",
        "x" * 300,
        "\\u001b[2J",
    ):
        study.write_text(OUTSIDE.format(part=SHOWS[what].format(name=name)))
        refused(forks.run(*line), f"{what}: the name ", "is not a plain file name")
    study.write_text(OUTSIDE.format(part=SHOWS[what].format(name="good-name")))
    good(forks.run(*line, "--dry-run"))
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


@pytest.mark.slow
def test_a_picture_needs_no_dark_one(tmp_path: Path, forks: Forks) -> None:
    draws = (
        "import sys, json, pathlib as p; o = p.Path(sys.argv[1]); "
        "(o / 'f.svg').write_text('<svg/>'); "
        "(o / 'r.json').write_text(json.dumps({'metrics': {'test': {'loss': 1.0}}}))"
    )
    part = SHOWS["pictures"].format(name="shown").replace('"pass"', f'"{draws}"')
    (tmp_path / "study.toml").write_text(OUTSIDE.format(part=part))
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        tmp_path / "study.toml",
        "scale=mini",
        "jobs=1",
    ]
    good(forks.run(*line, f"output={tmp_path / 'out'}"))
    assert (tmp_path / "out/study-mini/shown.svg").read_text() == "<svg/>"
    assert "<img" in (tmp_path / "out/study-mini/report.html").read_text()


def test_a_study_reads_no_file_outside(tmp_path: Path, forks: Forks) -> None:
    study = tmp_path / "study.toml"
    for part in (
        STAGE.format(name="a", result="../r.json"),
        SHOWS["pictures"].format(name="n").replace("f.svg", "../../f.svg"),
    ):
        study.write_text(OUTSIDE.format(part=part))
        line: list[str | Path] = [
            "-m",
            "xformer.study",
            study,
            "scale=mini",
            f"output={tmp_path / 'out'}",
        ]
        refused(forks.run(*line), "does not lie inside {out}")
