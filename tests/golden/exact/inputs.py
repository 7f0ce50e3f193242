"""Small raw files in every form that the preprocess commands read, the same on every machine."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

WORDS = re.findall(
    r"\S+",
    "the a of and to in model word layer token mask learns reads writes small large deep shallow "
    "attention gradient loss seed corpus language protein music Berlin Łódź naïve café don't "
    "state-of-the-art 1984 3.14 (brackets) 東京 e\u0301t\u00e9 UPPER tokenization 😀 end.",
)
ACIDS, BASES, STATES = "ACDEFGHIKLMNPQRSTVWY", "ACGT", "HEC"
MODULES = re.findall(
    r"\w+", "asyncio decimal difflib doctest email http importlib logging typing unittest xml json"
)


def sentences(seed: int, rows: int, least: int = 3, most: int = 9) -> list[str]:
    """Rows of `least` to `most` words."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(least, most + 1))) for _ in range(rows)]


def letters(seed: int, rows: int, alphabet: str, least: int = 12, most: int = 30) -> list[str]:
    """Rows of `least` to `most` letters of an alphabet."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(least, most + 1, rows)
    return ["".join(draw.choice(list(alphabet), length)) for length in lengths]


def put(path: Path, content: str | bytes) -> None:
    """Write a file and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def table(path: Path, head: list[str], rows: list[list[Any]], delimiter: str = "\t") -> None:
    """Write a file of columns. Without a `head`, the first line is a row."""
    lines = [*([head] if head else []), *rows]
    put(path, "\n".join(delimiter.join(map(str, line)) for line in lines) + "\n")


def write(raw: Path) -> None:
    """Write all raw files below a directory."""
    for part in (
        _text,
        _code,
        _tables,
        _glue,
        _choice,
        _sequences,
        _words,
        _squad,
        _music,
        _library,
    ):
        part(raw)


def _text(raw: Path) -> None:
    for name, seed, documents in (("a", 1, 40), ("b", 2, 12), ("valid", 3, 10)):
        found = ["\n".join(sentences(100 * seed + i, 1 + i % 4)) for i in range(documents)]
        put(raw / f"text/{name}.txt", "\n\n".join(found) + "\n")
    long = "\ufeffFirst document.\r\n[1] a footnote\r\n" + " ".join(sentences(4, 60)) + "\r\n\r\n"
    put(raw / "long.txt", long + "\r\n \r\n".join(sentences(5, 12)))
    put(raw / "bad.txt", "\n\n".join(sentences(6, 9)).encode() + b"\n\nbroken \xff line\n\nlast\n")
    put(raw / "test.txt.gz", gzip.compress("\n\n".join(sentences(7, 8)).encode(), mtime=0))
    # one uncompressed block of zstd: the magic number, a frame of known size, the block
    plain = "\n\n".join(sentences(8, 4)).encode()[:200]
    block = (len(plain) << 3 | 1).to_bytes(3, "little")
    put(raw / "test.txt.zst", b"\x28\xb5\x2f\xfd\x20" + bytes([len(plain)]) + block + plain)
    put(
        raw / "documents.jsonl",
        "".join(
            json.dumps({"id": i, "text": line}) + "\n" for i, line in enumerate(sentences(9, 15))
        ),
    )
    put(raw / "documents.json", json.dumps([{"body": line} for line in sentences(10, 6)], indent=1))


def _code(raw: Path) -> None:
    put(
        raw / "java/A.java",
        '/** Text "of" a class. */\nclass A {\n  // a word\n'
        '  String s = "no // comment\\n"; /* x */\n'
        "  char c = '\\'';\n  int f(int x) { return x /* y */ + 1; }\n}\n",
    )
    put(raw / "java/deep/B.java", "package deep;\n\n\\u002f* gone */ interface B { int g(); }\n")


def _tables(raw: Path) -> None:
    for split, rows in (("train", 40), ("valid", 9), ("test", 9)):
        a, b = sentences(len(split) + 20, rows), sentences(len(split) + 30, rows)
        kinds = [("good", "bad", "none")[i * i % 3] for i in range(rows)]
        scores = [f"{i * 7 % 11 / 2:.2f}" for i in range(rows)]
        columns = ["left", "right", "label", "score"]
        cells = zip(a, b, kinds, scores, strict=True)
        table(raw / f"tsv/{split}.tsv", columns, [*map(list, cells)])
    quoted = [[f'"{text}, with ""quotes"""', i % 2] for i, text in enumerate(sentences(40, 60))]
    table(raw / "one.csv", [], quoted, ",")
    lines = [
        {"text": text, "label": "xyz"[i % 3], "split": ("train", "dev", "test", "train")[i % 4]}
        for i, text in enumerate(sentences(41, 40))
    ]
    put(raw / "one.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(lines), raw / "one.parquet")


def _choice(raw: Path) -> None:
    for split, rows in (("train", 12), ("valid", 5), ("test", 4)):
        texts = [sentences(70 + len(split) + i, rows) for i in range(5)]
        right = ["" if split == "test" else "ABC"[i * i % 3] for i in range(rows)]
        columns = ["setting", "start", "a", "b", "c", "right"]
        cells = zip(*texts, right, strict=True)
        table(raw / f"choice/{split}.tsv", columns, [*map(list, cells)])
    lines = [
        {"setting": a, "endings": [b, c], "right": 1 + i % 2}
        for i, (a, b, c) in enumerate(zip(*(sentences(80 + i, 40) for i in range(3)), strict=True))
    ]
    put(raw / "choice.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def _glue(raw: Path) -> None:
    labels = ("entailment", "neutral", "contradiction")
    for split, rows in (("train", 12), ("dev", 6), ("test", 5)):
        a, b = sentences(len(split) + 50, rows), sentences(len(split) + 60, rows)
        both, none = [*zip(a, b, strict=True)], split == "test"
        end = [] if none else ["label"]

        def row(i: int, *cells: Any, none: bool = none) -> list[Any]:
            return [*cells] if none else [*cells, i % 2]

        cola = [["gj04", i % 2, "*", text] for i, text in enumerate(a)]
        if none:
            table(raw / f"cola/{split}.tsv", ["index", "sentence"], [*map(list, enumerate(a))])
        else:
            table(raw / f"cola/{split}.tsv", [], cola)
        table(raw / f"sst2/{split}.tsv", ["sentence", *end], [row(i, t) for i, t in enumerate(a)])
        mrpc = [[i % 2, i, i + 100, x, y] for i, (x, y) in enumerate(both)]
        heads = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
        if split != "dev":
            table(raw / f"mrpc/msr_paraphrase_{split}.txt", heads, mrpc)
        qqp = [row(i, i, i, i, x, y) for i, (x, y) in enumerate(both)]
        names = ["id", "qid1", "qid2", "question1", "question2"]
        broken = [] if none else [["7", "8"]]
        table(raw / f"qqp/{split}.tsv", [*names, *([] if none else ["is_duplicate"])], qqp + broken)
        stsb = [[i, x, y, *([] if none else [i % 6])] for i, (x, y) in enumerate(both)]
        stsb_end = [] if none else ["score"]
        table(raw / f"stsb/{split}.tsv", ["index", "sentence1", "sentence2", *stsb_end], stsb)
        for kind in [""] if split == "train" else ["_matched", "_mismatched"]:
            gold = [] if none else ["gold_label"]
            mnli = [
                [i, x + kind, y, *([] if none else [labels[i % 3]])]
                for i, (x, y) in enumerate(both)
            ]
            table(raw / f"mnli/{split}{kind}.tsv", ["index", "sentence1", "sentence2", *gold], mnli)
        for name, heads in (
            ("qnli", ["question", "sentence"]),
            ("rte", ["sentence1", "sentence2"]),
            ("wnli", ["sentence1", "sentence2"]),
        ):
            told = ("not_entailment", "entailment")
            found = [
                [i, x, y, *([] if none else [i % 2 if name == "wnli" else told[i % 2]])]
                for i, (x, y) in enumerate(both)
            ]
            table(raw / f"{name}/{split}.tsv", ["index", *heads, *end], found)
    put(raw / "mrpc/dev_ids.tsv", "".join(f"{i}\t{i + 100}\n" for i in (2, 5, 9)))


def flip_split(i: int) -> str:
    """The fields of a FASTA header that name the split of record `i`, as FLIP writes them."""
    return f"SET={('train', 'test')[i % 4 == 3]} VALIDATION={i % 4 == 2}"


def _sequences(raw: Path) -> None:
    proteins, bases = letters(70, 60, ACIDS), letters(71, 60, BASES, 20, 40)
    sixty = letters(72, 60, BASES + "N", 60, 60)
    kinds = ("EI", "IE", "N")
    put(
        raw / "splice.data",
        "".join(f"{kinds[i % 3]},  X-{i},   {s}\n" for i, s in enumerate(sixty)),
    )
    put(raw / "h3.txt", "".join(f">r{i}\n{s}\n{i % 2}\n" for i, s in enumerate(bases)))
    table(raw / "dna.csv", ["seq", "target"], [[s, i / 4] for i, s in enumerate(bases)], ",")
    put(raw / "plus.fasta", "".join(f">p{i} fam{i % 3}\n{s}\n" for i, s in enumerate(proteins)))
    put(
        raw / "pfam.fasta",
        "".join(
            f">Q{i}/1-9 Q{i}.1 PF0{i % 4}.9;{'abcd'[i % 4]}-fam;\n{s}\n"
            for i, s in enumerate(proteins)
        ),
    )
    places = ("Nucleus-U", "Cell.membrane-M", "Cytoplasm-Nucleus", "Golgi-S", "Nucleus-M")
    put(
        raw / "deeploc.fasta",
        "".join(
            f">d{i} {places[i % 5]}{' test' * (i % 4 == 3)}\n{s}\n" for i, s in enumerate(proteins)
        ),
    )
    heads = [f"TARGET={i / 8} {flip_split(i)}" for i in range(len(proteins))]
    both = enumerate(zip(heads, proteins, strict=True))
    put(raw / "flip.fasta", "".join(f">f{i} {head}\n{s}\n" for i, (head, s) in both))
    for split, rows in (("train", 20), ("valid", 5), ("test", 5)):
        lines = [
            json.dumps({"primary": s, "stability_score": i / 16, "id": i})
            for i, s in enumerate(letters(len(split) + 73, rows, ACIDS))
        ]
        put(raw / f"stability/{split}.jsonl", "\n".join(lines) + "\n")
    for name in ("alpha", "beta"):
        found = letters(len(name) + 80, 40, ACIDS)
        put(
            raw / f"by_class/{name}.fasta",
            "".join(f">{name}{i}\n{s}\n" for i, s in enumerate(found)),
        )
    for folder, alphabet in (("secondary", STATES), ("conservation", "123456789")):
        for name, used in (("sequences", ACIDS), ("sampled", alphabet), ("mask", "0111")):
            # the same lengths in all three files
            found = letters(90, 16, "x")
            draw = np.random.default_rng(len(name))
            found = ["".join(draw.choice(list(used), len(text))) for text in found]
            heads = [f">s{i} {flip_split(i)}" for i in range(len(found))]
            lines = [f"{head}\n{text}\n" for head, text in zip(heads, found, strict=True)]
            put(raw / folder / f"{name}.fasta", "".join(lines))


def _words(raw: Path) -> None:
    for split, rows in (("train", 16), ("valid", 5), ("test", 5)):
        lines, universal = ["-DOCSTART- -X- O\n"], list[str]()
        for i, text in enumerate(sentences(len(split) + 100, rows)):
            words = text.split()
            tags = [("O", "B-PER", "I-PER", "B-LOC")[(i + j) % 4] for j in range(len(words))]
            lines.append("".join(f"{w} NN {t}\n" for w, t in zip(words, tags, strict=True)))
            numbered = [f"{j + 1}\t{w}\t_\tP{(i + j) % 3}\tX\n" for j, w in enumerate(words)]
            universal.append("# text\n" + "".join(["1-2\tab\t_\t_\t_\n", *numbered]))
        put(raw / f"conll/{split}.conll", "\n".join(lines))
        put(raw / f"conllu/{split}.conllu", "\n".join(universal))


def _squad(raw: Path) -> None:
    for split, rows in (("train", 6), ("dev", 3)):
        paragraphs = []
        for i in range(rows):
            context = " ".join(sentences(110 + i + len(split), 5))
            words = context.split(" ")
            answer = " ".join(words[i + 2 : i + 4])
            asked = [
                {
                    "id": f"{split}{i}a",
                    "question": sentences(120 + i, 1)[0],
                    "is_impossible": False,
                    "answers": [{"text": answer, "answer_start": context.index(answer)}] * 2,
                },
                {"id": f"{split}{i}b", "question": "no?", "is_impossible": True, "answers": []},
            ]
            paragraphs.append({"context": context, "qas": asked})
        data = [{"title": f"t{i}", "paragraphs": [p]} for i, p in enumerate(paragraphs)]
        put(raw / f"squad/{split}.json", json.dumps({"version": "v2.0", "data": data}))


def midi(pitches: list[int]) -> bytes:
    """A MIDI file of one track whose notes follow one another."""
    events = b"".join(bytes([0, 0x90, pitch, 64, 96, 0x80, pitch, 0]) for pitch in pitches)
    events += bytes([0, 0xFF, 0x2F, 0])
    head = b"MThd" + (6).to_bytes(4, "big") + bytes([0, 0, 0, 1, 0, 96])
    return head + b"MTrk" + len(events).to_bytes(4, "big") + events


def _music(raw: Path) -> None:
    splits = ("train", "train", "validation", "test")
    rows = [["AB"[i % 2], splits[i // 2 % 4], f"{i}.midi"] for i in range(16)]
    table(raw / "maestro/maestro.csv", ["canonical_composer", "split", "midi_filename"], rows, ",")
    draw = np.random.default_rng(130)
    for i in range(16):
        put(raw / f"maestro/{i}.midi", midi(draw.integers(40, 90, 5 + 3 * i).tolist()))


def _library(raw: Path) -> None:
    """A library of Python files whose docstrings `pydocs` reads in place of this Python's own."""
    draw = np.random.default_rng(140)
    common = re.findall(r"\w+", "the of to and is for in that this when")
    nouns = re.findall(r"\w+", "value object name string list method result caller module error")
    for module in MODULES:
        lines = [f'"""The module {module} is for the values of this test."""']
        for i in range(95):
            said = []
            for _ in range(2):
                pairs = zip(draw.choice(common, 12), draw.choice(nouns, 12), strict=True)
                words = [word for pair in pairs for word in pair]
                said.append(" ".join(words).capitalize() + ".")
            text = "\n\n    ".join(said)
            lines.append(f'def f{i}():\n    """{text}\n    """')
        put(raw / f"library/{module}.py", "\n\n".join(lines) + "\n")


TOPICS = {
    f"topic{i}": f"Topic\n*****\n\nThe language is read by this test, and its part {i} is for the "
    "reader that looks at a word and then at the next word of it. It may not be empty.\n"
    for i in range(40)
}
