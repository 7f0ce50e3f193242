"""Corpora: which files, which formats, what is refused or skipped; encoding in processes."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xformer.data import tokenizers, vocabularies
from xformer.data.errors import BadInput, Failure
from xformer.data.store import open_store
from xformer.preprocess import cli, workers
from xformer.preprocess.bad import BadRows
from xformer.preprocess.binarize import open_binary, read_lines
from xformer.preprocess.corpora import documents, text
from xformer.preprocess.corpora.documents import TextOptions, read_documents
from xformer.preprocess.corpora.fasta import read_fasta
from xformer.preprocess.corpora.inputs import check_distinct, find_files
from xformer.preprocess.corpora.java import Unterminated, remove_comments
from xformer.preprocess.words import CachedEncoder
from xformer.preprocess.workers import in_order

ROOT = Path(__file__).parents[1]
DOOR = str(ROOT / "preprocess.py")
ENGLISH = "The quick brown fox jumps over the lazy dog. Don't they repeat, these words?"
CHINESE = "我們都是中國人。你好嗎？「很好」，他說：日本語のテキストは、長い。"  # noqa: RUF001


def here(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Run the command within this process."""
    monkeypatch.setattr(sys, "argv", ["preprocess.py", *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    cli.main()


def made(*paths: Path, **options: Any) -> list[str]:
    """The documents that files are divided into."""
    whole: list[str] = []
    new = True
    for segment, ends in read_documents(paths, TextOptions(**options), lambda _: None):
        whole[len(whole) - (not new) :] = [segment if new else whole[-1] + segment]
        new = ends
    return whole


@pytest.fixture(scope="module")
def toks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one tokenizer of each of the four kinds."""
    folder = tmp_path_factory.mktemp("toks")
    corpus = [ENGLISH, CHINESE] * 5
    for kind, size in (("wordpiece", 150), ("bpe", 320), ("unigram", 69), ("symbols", 200)):
        (folder / kind).mkdir()
        vocabularies.learn(kind, corpus, size, True, set("".join(corpus))).save(folder / kind)
    return folder


# ------------------------------------------------------------------------------ packed files


def packed(path: Path, data: bytes) -> Path:
    if path.suffix.lower() == ".gz":
        data = gzip.compress(data[:7]) + gzip.compress(data[7:]) + b"\0" * 100
    elif path.suffix.lower() == ".zst":
        zstandard = pytest.importorskip("zstandard")
        data = zstandard.compress(data[:7]) + zstandard.compress(data[7:])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz", "t.txt.zst", "T.TXT.GZ", "t.txt.Zst"])
def test_packed_files_are_read_as_they_were(tmp_path, name):
    data = np.random.default_rng(0).integers(97, 103, 300_000).astype(np.uint8)
    data[::70] = 10
    path = packed(tmp_path / name, data.tobytes())
    seen: list[int] = []
    with open_binary(path, seen.append) as file:
        assert file.read() == data.tobytes()
    assert sum(seen) == path.stat().st_size
    lines = data.tobytes().decode().split("\n")
    assert list(read_lines(path)) == list(enumerate(lines, 1))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_damaged_packed_files_are_named(tmp_path, ending):
    data = np.random.default_rng(0).bytes(50_000)
    whole = packed(tmp_path / f"t{ending}", data).read_bytes()
    path = tmp_path / f"cut{ending}"
    for cut in (0, 1, 20, 30_000, whole.rstrip(b"\0").__len__() - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(BadInput, match=rf"cut{ending} ends too early"):
            open_binary(path).read()
    path.write_bytes(b"this was never packed")
    with pytest.raises(BadInput, match=rf"cut{ending} is damaged, or not a {ending} file"):
        open_binary(path).read()


def test_zst_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "t.txt.zst").write_bytes(b"x")
    with pytest.raises(
        BadInput, match=r"t.txt.zst needs the package zstandard, .*: pip install zstandard"
    ):
        open_binary(tmp_path / "t.txt.zst")


# ------------------------------------------------------------------------------ which files


def test_files_directories_and_globs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    taken = "d/b.txt d/a/z.jsonl.gz d/a/A.TXT d/c.fa d/a/x.java.zst e/one.md e/f/two.md"
    left = "d/n.md d/m.json d/k d/.git/x.txt d/.h.txt"
    for name in [*taken.split(), *left.split()]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    Path("d/empty.txt").touch()
    Path("d/l").symlink_to("../e")
    files = find_files(["e/one.md", "d", "e/**/*.md"])
    names = ["d/a/A.TXT", "d/a/x.java.zst", "d/a/z.jsonl.gz", "d/b.txt", "d/c.fa"]
    assert list(map(str, files)) == ["e/one.md", *names, "e/f/two.md", "e/one.md"]
    said = capsys.readouterr().err
    assert "d: 5 entries left out (" in said
    kinds = ("1 .md", "1 .json", "1 no ending", "1 hidden", "1 linked folder")
    assert all(part in said for part in kinds)
    assert "d: 1 empty files left out" in said
    assert Path("d/m.json") in find_files(["d"], "text")
    assert find_files(["d/m.json"]) == [Path("d/m.json")]
    Path("none").mkdir()
    for argument, phrase in [
        ("none", "none holds no non-empty file"),
        ("*.xyz", r"\*.xyz matches no non-empty file"),
        ("no.txt", "no.txt does not exist"),
        ("d/empty.txt", "is empty"),
    ]:
        with pytest.raises(BadInput, match=phrase):
            find_files([argument])


def test_one_file_is_not_used_twice(tmp_path, toks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text(ENGLISH)
    Path("u.txt").write_text(ENGLISH)
    Path("link.txt").symlink_to("t.txt")
    command = ["text", "--tokenizer", toks / "bpe", "--output", "s", "--input", "t.txt"]
    for more, phrase in [
        (["--valid", "t.txt"], "t.txt is in both train and valid: a held-out file must not be"),
        (["--valid", "u.txt", "--test", "link.txt"], "link.txt is in both train and test"),
        (["./t.txt"], "t.txt is given twice for train"),
        (["*t.txt"], "t.txt is given twice for train"),
    ]:
        with pytest.raises(BadInput, match=phrase):
            here(monkeypatch, *command, *more)
    tokenizer = ["tokenizer", "--kind", "bpe", "--vocab-size", 300, "--output", "s", "--input"]
    with pytest.raises(BadInput, match=r"t\.txt is given twice"):
        here(monkeypatch, *tokenizer, "t.txt", "t.txt")
    assert sorted(os.listdir()) == ["link.txt", "t.txt", "u.txt"]


# ------------------------------------------------------------------------------ formats

JAVA = 'class A { String s = "/* no */"; // a comment\n}\n'
FILES = {
    "a.txt": "one\ntwo\n\nthree",
    "b.jsonl": '\n{"text": "four\\n\\nfive", "n": 1}\r\n{"text": "six"}',
    "c.json": '[{"text": "seven"},\n {"text": "eight"}]',
    "d.java": JAVA,
    "e.fasta": ">sp|X name\nMkv\n L*\n\n>second\nAC\n",
}
DOCUMENTS = [
    "one\ntwo",
    "three",
    "four\n\nfive",
    "six",
    "seven",
    "eight",
    'class A { String s = "/* no */";\n}\n',
    "MKVL*",
    "AC",
]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_every_format_gives_its_documents(tmp_path, ending):
    paths = [packed(tmp_path / f"{n}{ending}", FILES[n].encode("utf-8-sig")) for n in FILES]
    assert made(*paths) == DOCUMENTS
    assert made(paths[1], format="text")[0].startswith('{"text": "four')
    (tmp_path / "odd").write_text('{"body": "x"}')
    assert made(tmp_path / "odd", format="jsonl", json_field="body") == ["x"]


SQUAD = {"version": 2, "data": [{"title": "t", "paragraphs": [{"context": c} for c in "xy"]}] * 2}


@pytest.mark.parametrize(
    ("name", "content", "field", "documents"),
    [
        ("t.jsonl", json.dumps({"data": {"body": "x"}, "id": "1"}), "data.body", ["x"]),
        ("t.jsonl", json.dumps({"a.b": "literal", "a": {"b": "x"}}), "a.b", ["literal"]),
        ("t.jsonl", json.dumps({"body": ["x", "y"]}), "body", ["x", "y"]),
        ("t.json", json.dumps(SQUAD), "data.paragraphs.context", ["x", "y"] * 2),
        ("t.json", json.dumps(SQUAD, indent=1), "data.paragraphs.context", ["x", "y"] * 2),
        ("t.csv", 'id,body\n1,"x, y"\n2,\n3,"a\nb"\n', "body", ["x, y", "a\nb"]),
        ("t.tsv", 'id\tbody\n1\t"x\n', "body", ['"x']),
    ],
)
def test_a_field_is_reached(tmp_path, name, content, field, documents):
    (tmp_path / name).write_text(content)
    assert made(tmp_path / name, json_field=field) == documents


@pytest.mark.parametrize(
    ("name", "content", "phrase"),
    [
        (
            "t.jsonl",
            json.dumps({"id": "1", "data": {"url": "u", "my body": "longer"}}),
            "t.jsonl:1: no field 'text'; it has 'id', 'data'; --field 'data.my body' reaches its "
            "longest text",
        ),
        (
            "t.json",
            json.dumps(SQUAD, indent=1),
            "t.json:1: no field 'text'; it has 'version', 'data'; --field data.paragraphs.context "
            "reaches its longest text",
        ),
        ("t.json", '{\n"a":\n', "t.json: not valid JSON"),
        (
            "t.csv",
            "id,body\n1,x\n",
            "has no column 'text'; it has 'id', 'body'; name one with --fi",
        ),
    ],
)
def test_what_reaches_no_text_names_what_does(tmp_path, name, content, phrase):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=re.escape(phrase)):
        made(tmp_path / name)


def test_a_store_and_a_vocabulary_of_a_directory(tmp_path, toks, monkeypatch):
    (tmp_path / "d").mkdir()
    for name, content in FILES.items():
        (tmp_path / "d" / name).write_text(content)
    (tmp_path / "d/c.json").unlink()
    (tmp_path / "d/c.ndjson").write_text('{"text": "seven"}\n{"text": "eight"}')
    monkeypatch.chdir(tmp_path)
    here(monkeypatch, "text", "--input", "d", "--tokenizer", toks / "bpe", "--output", "s")
    store = open_store(tmp_path / "s")
    wanted = store.tokenizer().encode_batch(DOCUMENTS)
    column = store.split("train").columns["tokens"]
    assert [column[i].tolist() for i in range(len(column))] == [ids.tolist() for ids in wanted]
    names = [source["file"] for source in store.meta["origin"]["sources"]]
    assert names == ["a.txt", "b.jsonl", "c.ndjson", "d.java", "e.fasta"]
    here(
        monkeypatch,
        "tokenizer",
        "--kind",
        "symbols",
        "--vocab-size",
        99,
        "--output",
        "t",
        "--input",
        "d/*",
    )
    letters = set("".join(DOCUMENTS)) - set(" \n")
    assert tokenizers.load_tokenizer("t").pieces[5:] == sorted(letters)


BAD = [
    ("t.jsonl", '{"text": "a"}\n[1]\n', r"t.jsonl:2: not a JSON object such as"),
    ("t.jsonl", '[{"text": "b"}]\n{"text": "a"}\n', r"t.jsonl:1: not a JSON object"),
    ("t.jsonl", '{"text": "a"}\n\n"x"\n', r"t.jsonl:3: not a JSON object"),
    ("t.jsonl", '{"text": "a"}\n{"body": 1}\n', r":2: no field 'text'; it has 'body'; name"),
    ("t.jsonl", '{"text": "a"}\n{"text": [2]}\n', r":2: the field 'text' is not text: \[2\]"),
    ("t.jsonl", '{"text": "a"}\n{"text": "\n', r"t.jsonl:2: not valid JSON: Unterminated"),
    ("t.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', r":2: the field 'text' holds half of"),
    ("t.jsonl.gz", '{"text": "a"}\n{"text": "\udcff"}\n', r"t.jsonl.gz:2: not valid UTF-8"),
    ("t.json", '[{"text": "a"},\n\n{"text": 3}]', r"t.json:3: the field 'text' is not text"),
    ("t.txt", "a\n\nb\udcffc\n\nd\n", r"t.txt:3: not valid UTF-8"),
    ("t.txt.gz", "a\n\nb\udcffc\n\nd\n", r"t.txt.gz:3: not valid UTF-8"),
    ("t.fa", ">a\nACX\n>b\nAC-G\n", r"t.fa:4: '-' is not a letter of a sequence"),
    ("t.fa", ">a\nACX\n>b\n>c\nA\n", r"t.fa:3: a record without a sequence"),
    ("t.fa", ">a\nACX\n>b", r"t.fa:3: a record without a sequence"),
    ("t.fa", ">a\nACX\n>\udcff\nA\n", r"t.fa:3: not valid UTF-8"),
    ("t.fa", ">a\nACX\n>b\nA\udcff\n", r"t.fa:4: not valid UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "phrase"), BAD)
def test_a_bad_row_ends_the_work_or_is_left_out(
    tmp_path, toks, monkeypatch, capsys, name, content, phrase
):
    packed(tmp_path / name, content.encode(errors="surrogateescape"))
    monkeypatch.chdir(tmp_path)
    command = ["text", "--input", name, "--tokenizer", toks / "bpe", "--output", "s"]
    with pytest.raises(BadInput, match=phrase) as caught:
        here(monkeypatch, *command)
    assert "\n" not in str(caught.value)
    assert os.listdir() == [name]
    here(monkeypatch, *command, "--skip-bad")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "1 bad row was left out:"
    assert said[1] == f"  {caught.value}"
    store = open_store(tmp_path / "s")
    assert store.meta["origin"]["skipped_rows"] == 1
    column = store.split("train").columns["tokens"]
    kept = [store.tokenizer().decode(column[i]) for i in range(len(column))]
    assert kept in (["a"], ["a", "d"], ["ACX"], ["ACX", "A"])


def test_what_cannot_be_left_out(tmp_path):
    bad = BadRows(skip=True)
    for name, content, phrase in [
        ("t.fa", "ACGT\n>a\nA", r"t.fa:1: text before the first header"),
        ("t.fa", "\n\n", r"t.fa holds no FASTA record"),
        ("t.json", '[{"text": "a"},\n{"text"}]', r"t.json:2: not valid JSON"),
        ("t.json", '[{"text": "a"}', r"t.json:1: not valid JSON"),
        ("t.json", '[{"text": "a"}]\n{}', r"t.json:1: not valid JSON: there is more text after"),
        ("t.json", '[{"text": "a"}\n{"text": "b"}]', r"t.json:2: not valid JSON: one comma must"),
        ("t.json", '[{"text": "a"},, {"text": "b"}]', r"t.json:1: not valid JSON: Expecting value"),
        ("t.json", '[{"text": "a"},\n]', r"t.json:2: not valid JSON: Expecting value"),
        ("t.json", '[, {"text": "a"}]', r"t.json:1: not valid JSON: one comma must"),
        ("t.txt", "a\r\rb\r", r"t.txt: its lines end in a carriage return alone; end them in LF"),
    ]:
        (tmp_path / name).write_bytes(content.encode())
        with pytest.raises(BadInput, match=phrase):
            made(tmp_path / name, bad=bad)
    for name in FILES:  # the file is cut off before its end
        path = packed(tmp_path / f"{name}.gz", FILES[name].encode())
        path.write_bytes(path.read_bytes().rstrip(b"\0")[:-5])
        with pytest.raises(BadInput, match=rf"{name}.gz ends too early: it was cut off"):
            made(path, bad=bad)
    assert bad.count == 0


def test_the_first_bad_rows_are_listed(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text("{}\n" * 25 + '{"text": "good"}\n')
    with BadRows(skip=True) as bad:
        for _ in range(2):  # a file read twice
            assert made(path, bad=bad) == ["good"]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "25 bad rows were left out; the first 10 are:"
    assert [line.split(": ")[0].strip() for line in said[1:]] == [
        f"{path}:{i}" for i in range(1, 11)
    ]
    assert bad.as_origin() == {"skipped_rows": 25}
    assert BadRows(skip=False).as_origin() == {}


def test_bad_lines_are_left_out_of_documents(tmp_path, monkeypatch):
    """A bad line is left out whole. Of a line longer than a segment, only the bad pieces are left
    out. The lines around it are not joined.
    """
    path = tmp_path / "t.txt"
    path.write_bytes(b"one\nt\xffo\nthree\n\xff\n\nfour\n" + b"word " * 30 + b"\xfe end\nlast")
    bad = BadRows(skip=True)
    monkeypatch.setattr(documents, "READ", 11)
    assert made(path, bad=bad)[0] == "one\nthree"
    assert sorted(bad.lines[path]) == [2, 4, 7]
    monkeypatch.setattr(documents, "SEGMENT", 40)
    assert made(path, bad=bad)[-1] == "four\n" + ("word " * 28).rstrip() + "\nlast"


def test_fasta_as_it_is_published(shared):
    folder = shared / "protein/localization_multiloc/multiloc"
    counts = {"cytoplasmic": 1411, "plasma_membrane": 1238, "vacuolar": 63}
    for name, count in counts.items():
        path = folder / f"{name}.fasta"
        records = list(read_fasta(path))
        assert len(records) == count
        content = path.read_text(encoding="utf-8")
        blocks = [block.partition("\n") for block in ("\n" + content).split("\n>")[1:]]
        assert [header for _, header, _ in records] == [head.strip() for head, _, _ in blocks]
        wanted = ["".join(body.split()).upper() for _, _, body in blocks]
        assert [sequence for _, _, sequence in records] == wanted
        lines = content.splitlines()
        assert all(lines[line - 1].startswith(">") for line, _, _ in records)


def test_lines_are_for_plain_text(tmp_path, toks, monkeypatch):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}')
    with pytest.raises(BadInput, match="--lines is for plain text"):
        here(
            monkeypatch,
            "text",
            "--input",
            tmp_path / "t.jsonl",
            "--lines",
            "--tokenizer",
            toks / "bpe",
            "--output",
            tmp_path / "s",
        )


# ------------------------------------------------------------------------------ Java


def characters(source: str) -> list[tuple[str, int, int]]:
    """(character as Java reads it, its start, its end in the file), by JLS 3.3, letter by
    letter.
    """
    letters, i, backslashes = [], 0, 0
    while i < len(source):
        j = i + 1
        if source[i] == "\\" and backslashes % 2 == 0:
            while source[j : j + 1] == "u":
                j += 1
        digits = source[j : j + 4]
        if j > i + 1 and len(digits) == 4 and set(digits) <= set("0123456789abcdefABCDEF"):
            letters.append((chr(int(digits, 16)), i, j + 4))
            backslashes, i = 0, j + 4
        else:
            letters.append((source[i], i, i + 1))
            backslashes, i = (backslashes + 1 if source[i] == "\\" else 0), i + 1
    return letters


def slow_comments(source: str) -> list[tuple[int, int]]:
    """The spans of the comments, from reading one character after another. Raises Unterminated."""
    read = characters(source)
    logical = "".join(c for c, _, _ in read)
    spans, i, state, start = [], 0, "code", 0
    while i < len(read):
        c, step = logical[i], 1
        if state == "code":
            if c == "/" and logical[i + 1 : i + 2] in ("/", "*"):
                start, step = i, 2
                state = "line" if logical[i + 1] == "/" else "comment"
            elif c in "\"'":
                start, state = i, "string" if c == '"' else "character"
                behind = i + 3
                while logical[behind : behind + 1] in (" ", "\t", "\f"):
                    behind += 1
                if logical.startswith('"' * 3, i) and logical[behind : behind + 1] in ("\n", "\r"):
                    state, step = "text block", 3
        elif state == "line":
            if c in "\r\n":
                spans.append((read[start][1], read[i][1]))
                state = "code"
        elif state == "comment":
            if logical.startswith("*/", i):
                spans.append((read[start][1], read[i + 1][2]))
                state, step = "code", 2
        elif state == "text block":
            if c == "\\":
                step = 2
            elif logical.startswith('"' * 3, i):
                state, step = "code", 3
        elif c in "\r\n" or (c == "\\" and logical[i + 1 : i + 2] in ("", "\r", "\n")):
            break
        elif c == "\\":
            step = 2
        elif c == ('"' if state == "string" else "'"):
            state = "code"
        i += step
    if state == "line":
        spans.append((read[start][1], len(source)))
    elif state != "code":
        raise Unterminated(state, read[start][1])
    return spans


def slow(source: str) -> str:
    """What `remove_comments` promises, computed line by line."""
    items: list[str | None] = []  # None: a comment
    end = 0
    spans = slow_comments(source)
    for start, stop in spans:
        items += [*source[end:start], None]
        end = stop
    items += source[end:]
    if not spans:
        return source
    lines: list[list[str | None]] = [[]]
    for item in items:
        if item == "\n":
            lines.append([])
        else:
            lines[-1].append(item)
    kept = []
    for number, line in enumerate(lines):
        last = number == len(lines) - 1
        body = line[:-1] if line[-1:] == ["\r"] and not last else line
        if None in body and all(item in (None, " ", "\t", "\f") for item in body):
            continue
        ended = "" if last else "\n"
        parts: list[list[str | None]] = [[]]
        for item in line:
            if item == "\r":
                parts.append([])
            else:
                parts[-1].append(item)
        for part in parts:
            tail = len(part)
            while tail and part[tail - 1] in (None, " ", "\t", "\f"):
                tail -= 1
            if None in part[tail:]:
                del part[tail:]
        kept.append("\r".join("".join(item or " " for item in part) for part in parts) + ended)
    return "".join(kept)


LOOKALIKES = {
    'a = "/*"; b = "*/"; // c': 'a = "/*"; b = "*/";',
    "a = '\"'; // b\nc = '\\''; /* d */": "a = '\"';\nc = '\\'';",
    "/* // */ a /* // */": "  a",
    "a; // /*\nb; // */": "a;\nb;",
    'a = "\\\\"; // b': 'a = "\\\\";',
    'a = """\n // no "" /* no \\""" // no\n """; // yes': (
        'a = """\n // no "" /* no \\""" // no\n """;'
    ),
    'a = """" /* b */ + """""";': 'a = """"   + """""";',
    "int/**/a;": "int a;",
    "{\n  /** doc\n   * doc */\n  // more\n  a;\n}": "{\n  a;\n}",
    "a;\n\n// b\n\nc;": "a;\n\n\nc;",
    "a \\u002f* b *\\uu002F c": "a   c",
    's = "\\u0022; // b': 's = "\\u0022;',
    's = "\\\\u0022; // b";': 's = "\\\\u0022; // b";',
    "// a \\u000a b;": " \\u000a b;",
    "c = '\\u005c''; // d": "c = '\\u005c'';",
    "a; /* b */\r\n// c\r\nd;\r\n": "a;\r\nd;\r\n",
}


@pytest.mark.parametrize(("source", "wanted"), LOOKALIKES.items())
def test_java_look_alikes(source, wanted):
    assert remove_comments(source) == wanted
    assert slow(source) == wanted


@pytest.mark.parametrize(
    ("source", "what", "line"),
    [
        ("a;\n/* b\n", "a comment", 2),
        ('a = "b;\n', "a string", 1),
        ("a;\n\nb = 'c;\n'", "a character", 3),
        ('a = """\n b "" \\"""', "a text block", 1),
        ("a;\n\\u002f* b", "a comment", 2),
    ],
)
def test_java_without_an_end(tmp_path, source, what, line):
    (tmp_path / "A.java").write_text(source)
    with pytest.raises(BadInput, match=rf"A.java:{line}: {what} that begins here is never"):
        made(tmp_path / "A.java")
    bad = BadRows(skip=True)
    assert made(tmp_path / "A.java", bad=bad) == []
    assert bad.count == 1


def outcome(remove: Any, source: str) -> Any:
    try:
        return remove(source)
    except Unterminated as error:
        return error.start


def test_java_like_soup():
    tokens = [
        '"',
        "'",
        "/",
        "*",
        "//",
        "/*",
        "*/",
        '"""',
        '"""\n',
        "\\",
        "\\\\",
        "\\u0022",
        " ",
        "\\u002f",
        "\\uu002A",
        "\\u005c",
        "\\u000a",
        "\r\n",
        "\r",
        "\t",
        "a",
        "\\n",
        "\\u",
        "\n",
        "\u00e9",
        '"a"',
        "'b'",
        "/* c */",
        "// d\n",
        "{\n",
    ]

    @settings(max_examples=1500, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from(tokens), max_size=25).map("".join))
    def check(source):
        assert outcome(remove_comments, source) == outcome(slow, source)

    check()


@pytest.mark.slow
def test_java_on_real_source(shared):
    files = sorted((shared / "java").rglob("*.java"))
    assert len(files) == 264
    sources = [path.read_text(encoding="utf-8") for path in files]
    stripped = [remove_comments(source) for source in sources]
    assert stripped == [slow(source) for source in sources]
    assert all(text_ == remove_comments(text_) for text_ in stripped)
    assert 0.3 < sum(map(len, stripped)) / sum(map(len, sources)) < 0.6
    assert not any("Licensed to the Apache" in text_ for text_ in stripped)


# ------------------------------------------------------------------------------ text without spaces


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_text_without_spaces_has_the_ids_of_the_whole(toks, tmp_path, monkeypatch, kind):
    tokenizer = tokenizers.load_tokenizer(toks / kind)
    generator = random.Random(0)
    parts = CHINESE.replace("。", "。|").replace("，", "，|").split("|")  # noqa: RUF001
    content = "".join(generator.choice(parts) for _ in range(2000))
    (tmp_path / "t.txt").write_text(content, encoding="utf-8")
    monkeypatch.setattr(documents, "READ", 1000)
    monkeypatch.setattr(documents, "SEGMENT", 100)
    segments = [s for s, _ in read_documents([tmp_path / "t.txt"], TextOptions(), lambda _: None)]
    assert max(map(len, segments)) <= 200
    assert "".join(segments) == content
    ids = CachedEncoder(tokenizer).encode(segments)[0]
    np.testing.assert_array_equal(ids, tokenizer.encode_batch([content])[0])


@pytest.mark.parametrize("chinese", [True, False])
@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_chinese_and_marks_have_the_tokenizers_own_ids(toks, kind, chinese):
    tokenizer = tokenizers.load_tokenizer(toks / kind)
    if kind == "wordpiece":
        vocabulary = dict(tokenizer.ids)
        for piece in ("中國", "##國", "##中"):
            vocabulary.setdefault(piece, len(vocabulary))
        tokenizer = vocabularies.wordpiece(vocabulary, lowercase=True, chinese=chinese)
    encoder = CachedEncoder(tokenizer)
    assert encoder.rules is not None
    letters = "中國人我々〇のテー・、。「」（）：；？！“”‘’—…‰ é́.'s 1a１Ａ\ufa30\u200d한"  # noqa: RUF001

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(st.text(st.sampled_from(letters), max_size=20), max_size=3))
    def check(texts):
        direct = tokenizer.encode_batch(texts)
        ids, lengths = encoder.encode(texts)
        assert lengths.tolist() == [len(part) for part in direct]
        assert ids.tolist() == [i for part in direct for i in part.tolist()]

    check()


def test_chinese_as_it_is_printed(shared):
    lines = (shared / "vocabs/bert-base-chinese.vocab.txt").read_text(encoding="utf-8").split("\n")
    tokenizer = vocabularies.wordpiece({p: i for i, p in enumerate(lines) if p}, lowercase=True)
    books = json.loads((shared / "lang/zh/zh_ncv.json").read_text(encoding="utf-8-sig"))
    verses = [v for book in books for chapter in book["chapters"] for v in chapter][::10]
    ids, _ = CachedEncoder(tokenizer).encode(verses)
    np.testing.assert_array_equal(ids, np.concatenate(tokenizer.encode_batch(verses)))


# ------------------------------------------------------------------------------ processes


def files_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def batches(number: int) -> Iterator[text.TextBatch]:
    for i in range(number):
        texts = [f"{ENGLISH} {i}{j}" for j in range(i % 5)] + [CHINESE[i:], ""]
        yield [j % 2 == 0 for j in range(len(texts))], texts


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "symbols"])
def test_processes_give_the_tokenizers_own_ids_in_order(toks, monkeypatch, kind):
    monkeypatch.setattr(workers, "FEW", 2)
    tokenizer = tokenizers.load_tokenizer(toks / kind)
    answers = list(in_order(text.batch_encoder(tokenizer, 2), batches(30), 2))
    for encoded, (ends, texts) in zip(answers, batches(30), strict=True):
        direct = tokenizer.encode_batch(texts)
        assert encoded.ends == ends
        assert encoded.words == sum(len(text.split()) for text in texts)
        assert encoded.characters == len("".join(texts))
        assert encoded.lengths.tolist() == [len(part) for part in direct]
        assert encoded.ids.tolist() == [i for part in direct for i in part.tolist()]


def test_the_store_does_not_depend_on_the_number_of_processes(toks, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "FEW", 2)
    monkeypatch.setattr(text, "BATCH", 3000)
    lines = [f"{ENGLISH} {CHINESE[i % 20 :]} {i}" + "\n" * (i % 3) for i in range(500)]
    (tmp_path / "t.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "v.txt").write_text(ENGLISH)
    tokenizer = tokenizers.load_tokenizer(toks / "wordpiece")
    splits = {"train": [tmp_path / "t.txt"], "valid": [tmp_path / "v.txt"]}
    for count in (1, 2, 3):
        output = tmp_path / str(count)
        text.write_text_store(output, splits, tokenizer, TextOptions(), 17, {}, False, count)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "3")


@pytest.mark.parametrize("segment", [7, 40, 2**15])
@pytest.mark.parametrize("count", [1, 2])
def test_words_are_those_of_the_whole_text(toks, tmp_path, monkeypatch, segment, count):
    """The count does not depend on where documents are cut, also within words, nor on which process
    encodes them.
    """
    monkeypatch.setattr(documents, "SEGMENT", segment)
    monkeypatch.setattr(documents, "READ", 13)
    monkeypatch.setattr(text, "BATCH", 500)
    monkeypatch.setattr(workers, "FEW", 2)
    draw = random.Random(segment)
    words = ["a", "Über", "don't", CHINESE, "x" * 30, "(so)", "end.", "\u2003", "e\u0301"]
    gaps = [" "] * 6 + ["\n", "\r\n", "\n\n", "  ", "\n  ", "\t", " \n \n", "\u3000", "\x85"]
    content = "".join(draw.choice(words) + draw.choice(gaps) for _ in range(600))
    (tmp_path / "t.txt").write_bytes(content.encode())
    (tmp_path / "v.txt").write_text(ENGLISH)
    splits = {"train": [tmp_path / "t.txt"], "valid": [tmp_path / "v.txt"]}
    for lines in (False, True):
        tokenizer, output = tokenizers.load_tokenizer(toks / "bpe"), tmp_path / f"{lines}"
        text.write_text_store(output, splits, tokenizer, TextOptions(lines), 17, {}, False, count)
        store = open_store(output)
        assert store.split("train").words == len(content.split())
        assert store.split("valid").words == len(ENGLISH.split())


def process_of(_: int) -> int:
    return os.getpid()


def test_few_items_start_no_process() -> None:
    assert set(in_order(process_of, range(workers.FEW - 1), 3)) == {os.getpid()}
    others = set(in_order(process_of, range(workers.FEW), 3))
    assert os.getpid() not in others
    assert 1 <= len(others) <= 3


def test_one_item_for_each_process_and_one_more_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FEW", 1)
    taken = 0

    def counted() -> Iterator[int]:
        nonlocal taken
        for item in range(40):
            taken += 1
            yield item

    for number, item in enumerate(in_order(abs, counted(), 2)):
        assert item == number
        assert taken - number <= 3


@pytest.mark.parametrize("number", [8, 9, 11, 40])
def test_more_processes_than_items(number: int) -> None:
    assert list(in_order(abs, range(number), 10)) == list(range(number))


def large(item: int) -> bytes:
    return bytes(2**22)


def test_a_process_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it dies while it sends its result."""
    monkeypatch.setattr(workers, "FEW", 1)
    before = set(children(os.getpid()))
    words = r"^a worker process was ended by SIGKILL \(out of memory\? --workers 1 .*$"
    for i in range(20):
        results = in_order(large, range(500), 2)
        next(results)
        victim = min(set(children(os.getpid())) - before)
        killer = threading.Timer(i / 2000, os.kill, (victim, signal.SIGKILL))
        killer.start()
        with pytest.raises(Failure, match=words):
            list(results)
        killer.join()
        assert set(children(os.getpid())) <= before


def test_a_process_that_fails_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FEW", 1)

    def fails(item: int) -> int:
        if item == 20:
            raise ValueError("bad")
        return item

    before = set(children(os.getpid()))
    with pytest.raises(Failure, match="a worker process ended with status 1"):
        list(in_order(fails, range(50), 2))
    assert set(children(os.getpid())) <= before


SMALL_BATCHES = """
import sys
from xformer.preprocess import workers
from xformer.preprocess.corpora import text
from xformer.preprocess.cli import main
from xformer import start
workers.FEW, text.BATCH = 1, 10_000
"""


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """Text of new words in every line, so that it takes a while."""
    generator = np.random.default_rng(0)
    block = "\n\n".join(
        " ".join(line) for line in generator.integers(10**8, size=(1000, 10)).astype(str)
    )
    with (tmp_path / "t.txt").open("w") as file:
        for i in range(24):
            file.write(block.replace("1", f"x{i}") + "\n\n")
    (tmp_path / "out").mkdir()
    return tmp_path / "t.txt"


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", script, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, text=True, stdout=pipe, stderr=pipe)


def children(pid: int) -> list[int]:
    """The living processes that `pid` has started."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            pids.append(int(entry.parent.name))
    return pids


def wait_for(what: Any) -> Any:
    for _ in range(1200):
        if result := what():
            return result
        time.sleep(0.02)
    raise AssertionError("it never came")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_no_process_stays_behind(toks, long_text, number, status):
    output = long_text.parent / "out/s"
    process = start(
        SMALL_BATCHES + "start.run(main)",
        "text",
        "--input",
        long_text,
        "--workers",
        2,
        "--tokenizer",
        toks / "wordpiece",
        "--output",
        output,
    )
    pids = wait_for(lambda: len(workers_pids := children(process.pid)) == 2 and workers_pids)
    wait_for(lambda: any(path.stat().st_size for path in output.parent.rglob("tokens.npy")))
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == status, said
    assert said.count("\n") == (number != signal.SIGKILL), said
    wait_for(lambda: not any(map(alive, pids)))
    assert not output.exists()
    if number != signal.SIGKILL:
        assert os.listdir(output.parent) == []


def test_a_file_and_its_packed_copy_are_one(tmp_path: Path) -> None:
    """`gzip --keep` leaves both, and the text would be read twice."""
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text"))
    with pytest.raises(BadInput, match=r"a\.txt\.gz have the same name apart from compression"):
        check_distinct({"train": find_files([str(tmp_path)], None)})


def test_a_long_document_is_cut_as_its_parts_would_be() -> None:
    """The time grows with its length, because each part is looked at once."""
    words = "".join(f"w{i} " for i in range(200_000))
    segments = [segment for segment, _ in documents.whole_document(words, TextOptions())]
    assert "".join(segments) == words
    assert max(map(len, segments)) <= documents.SEGMENT
    assert all(segment.startswith(" w") for segment in segments[1:])
    for gap in ("\t", "  ", "\n"):  # no single space
        text = gap.join(f"w-{i}" for i in range(20_000))
        segments = [segment for segment, _ in documents.whole_document(text, TextOptions())]
        assert "".join(segments) == text
        assert len(segments) > 3
        assert all(segment.startswith(f"{gap}w-") for segment in segments[1:])
