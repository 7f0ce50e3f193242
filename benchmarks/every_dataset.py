"""Make a store from every data set in a directory, and write a table of the results.

    python -m benchmarks.every_dataset DATA --output docs/data.md

DATA holds real data under the names below (GLUE's tasks, SQuAD, DNA, protein, music, text in five
languages, Java). The table shows the commands that ran. Data sets whose files are missing are left
out and listed below it, and then the exit status is 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.bench import ROOT, directory, new_file
from xformer.data.arguments import CommandParser
from xformer.data.errors import Failure
from xformer.data.store import UNLABELLED, UNSEEN, Split, Store, open_store
from xformer.start import run

SKIP = r"^\[\d+\]"  # footnotes of the Wikipedia text


class Entry(NamedTuple):
    """A data set, and the arguments of `preprocess.py`, in which DATA, MADE and TOK stand for
    directories."""

    name: str
    arguments: str


TASKS = [
    *(
        Entry(
            f"GLUE {name}",
            f"task glue/{name.lower().replace('-', '')} --input DATA/glue/{name} "
            "--tokenizer TOK/uncased",
        )
        for name in ("CoLA", "SST-2", "MRPC", "RTE", "WNLI", "STS-B")
    ),
    Entry(
        "GLUE MRPC, test labels",
        "task glue/mrpc --input DATA/glue/MRPC "
        "--test DATA/glue/MRPC/msr_paraphrase_test.txt --tokenizer TOK/uncased",
    ),
    Entry(
        "GLUE SST-2, test labels",
        "task glue/sst2 --input DATA/glue/SST-2 "
        "--test DATA/glue/SST-2/test-labeled.tsv --tokenizer TOK/uncased",
    ),
    Entry(
        "STS-B, clean copy",
        "task tsv --input DATA/glue/STS-B/stsb-multi-mt --no-header "
        "--text 1 --text-b 2 --label 3 --kind score --tokenizer TOK/uncased",
    ),
    Entry(
        "STS-B, original",
        "task tsv --input DATA/glue/STS-B/original --no-header --text 6 "
        "--text-b 7 --label 5 --kind score --tokenizer TOK/uncased",
    ),
    Entry(
        "SQuAD 2.0",
        "task squad --train DATA/squad/train-subset-1.json "
        "--valid DATA/squad/dev-v2.0.rebuilt.json --tokenizer TOK/uncased",
    ),
    Entry(
        "SQuAD 1.1", "task squad --valid DATA/squad/dev-v1.1.rebuilt.json --tokenizer TOK/uncased"
    ),
    Entry("DNA splice", "task dna/splice --input DATA/dna/uci_splice"),
    *(
        Entry(
            f"DNA {name}",
            f"task dna/{name.lower()} --train DATA/dna/GUE/EMP/{name}/dev.csv "
            f"--test DATA/dna/GUE/EMP/{name}/test.csv",
        )
        for name in ("H3", "H4", "H3K9ac")
    ),
    Entry("DNA core promoters", "task dna --input DATA/dna/GUE/prom/prom_core_all"),
    Entry("DNA E. coli promoters", "task dna --input DATA/dna/ecoli_promoter/v9d3.csv"),
    Entry("DNA enhancers", "task dna --input DATA/dna/enhancer/bert_enhancer_dataset.csv"),
    Entry(
        "Protein localization",
        "task protein/localization --input DATA/protein/localization_multiloc/multiloc",
    ),
    Entry("Protein fluorescence", "task protein/fluorescence --input DATA/protein/fluorescence"),
    Entry(
        "Protein stability",
        "task protein/stability --label stabilityscore_cnn_calibrated "
        "--input DATA/protein/stability_rocklin/stability_designs.csv",
    ),
    Entry("Music MAESTRO", "task music/maestro --input DATA/music/maestro-v1-subset"),
    Entry(
        "German articles",
        "task tsv --input DATA/lang/de/10kGNAD_test.csv --no-header --text 2 "
        "--label 1 --delimiter semicolon --quoting ' --tokenizer TOK/cased",
    ),
]
CORPORA = [
    Entry(
        "English Wikipedia",
        "text --input DATA/english_wikipedia/train.txt "
        "--valid DATA/english_wikipedia/valid.txt --test DATA/english_wikipedia/test.txt "
        f"--skip-lines {SKIP} --tokenizer TOK/uncased",
    ),
    Entry(
        "English, RoBERTa's pieces",
        f"text --input DATA/english_wikipedia/train.txt --skip-lines {SKIP} --tokenizer TOK/gpt2",
    ),
    Entry("Java", "text --input DATA/java --tokenizer TOK/cased"),
    Entry("Amino acids", "text --input MADE/amino --tokenizer TOK/amino"),
    Entry("Japanese", "text --input MADE/ja.txt --lines --tokenizer TOK/chinese"),
    Entry("Chinese", "text --input MADE/zh.jsonl --field text --tokenizer TOK/chinese"),
    Entry("Kannada", "text --input DATA/lang/kn/allama.json --field name --tokenizer TOK/kannada"),
    Entry(
        "Kannada lines",
        "text --input DATA/lang/kn/entity_kannada.txt --lines --tokenizer TOK/kannada",
    ),
]
SYNTHETIC = [
    *(
        Entry(f"synthetic {name}", f"synthetic {name} --tokens 23500000 --vocab-size 28996")
        for name in ("uniform", "zipf", "nesting", "flat")
    ),
    *(
        Entry(
            f"synthetic nesting, {n} tokens",
            f"synthetic nesting --tokens 23500000 --distinct {n} --vocab-size 28996",
        )
        for n in (50, 500, 5000)
    ),
]
TOKENIZERS = {
    "uncased": "--from DATA/vocabs/bert-base-uncased.vocab.txt",
    "cased": "--from DATA/vocabs/bert-base-cased.vocab.txt --cased",
    "chinese": "--from DATA/vocabs/bert-base-chinese.vocab.txt",
    "gpt2": "--from DATA/vocabs/gpt2.vocab.json",
    "amino": "--kind symbols --alphabet ACDEFGHIKLMNPQRSTVWYBJOUXZ*",
    "kannada": "--kind wordpiece --cased --vocab-size 2000 --input DATA/lang/kn/entity_kannada.txt",
}


def main() -> None:
    """Run everything and write the table."""
    about = str(__doc__).split("\n")[0]
    parser = CommandParser(prog="python -m benchmarks.every_dataset", description=about)
    parser.add_argument("data", type=directory, metavar="DATA", help="The directory of raw data.")
    about = "The file to write, in Markdown."
    parser.add_argument("--output", type=new_file, metavar="FILE", required=True, help=about)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made = Path(place)
        places = {"DATA": arguments.data.resolve(), "TOK": made / "tok", "MADE": made}
        (made / "tok").mkdir()
        for make in (_make_amino, _make_japanese, _make_chinese):
            with suppress(FileNotFoundError):
                make(places["DATA"], made)
        for name, options in TOKENIZERS.items():
            with suppress(Failure):
                _run(f"tokenizer {options}", places, made / "tok" / name)
        lines, absent = ["# Every data set", "", *_INTRODUCTION], []
        for title, entries in (("Tasks", TASKS), ("Corpora", CORPORA), ("Synthetic", SYNTHETIC)):
            lines += ["", f"## {title}", "", *_HEAD]
            for entry in entries:
                store = made / "stores" / entry.name
                try:
                    seconds = _run(entry.arguments, places, store)
                except Failure as error:
                    absent.append(f"- {entry.name}: {error}")
                    print(absent[-1], flush=True)
                    continue
                lines.append(_line(entry, open_store(store), seconds))
                print(lines[-1], flush=True)
    lines += ["", "## Left out", "", *absent] if absent else []
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if absent:
        raise Failure(f"{len(absent)} data sets are left out; {arguments.output} says why")


_INTRODUCTION = [
    "Made by `python -m benchmarks.every_dataset DATA --output docs/data.md`. Rows of train /",
    "valid / test; if the source has no splits, they are drawn 90/5/5. A number after `of` counts",
    "questions or MIDI pieces, which are divided into several rows. Labels are those of the",
    "training split, or of all rows if the splits were drawn; a test set with `-` has no labels.",
    "Seconds are those of the whole command on two cores, including its start.",
]
_HEAD = ["| data set | rows | labels | tokens | s | `preprocess.py` |", "|---|---|---|---|---|---|"]


# These convert those of the publishers' files that no command can read directly.


def _make_amino(data: Path, made: Path) -> None:
    texts = {}
    for name in ("conservation", "secondary_structure"):
        with zipfile.ZipFile(data / f"protein/flip/{name}_splits.zip") as packed:
            texts[name] = packed.read("splits/sequences.fasta")
    (made / "amino").mkdir()
    for name, text in texts.items():
        (made / "amino" / f"{name}.fasta").write_bytes(text)


def _make_japanese(data: Path, made: Path) -> None:
    japanese = (data / "lang/ja/train.ja").read_text(encoding="utf-8")
    (made / "ja.txt").write_text(japanese.replace(" ", ""), encoding="utf-8")


def _make_chinese(data: Path, made: Path) -> None:
    books = json.loads((data / "lang/zh/zh_ncv.json").read_text(encoding="utf-8-sig"))
    with (made / "zh.jsonl").open("w", encoding="utf-8") as file:
        for book in books:
            for chapter in book["chapters"]:
                file.write(json.dumps({"text": "\n".join(chapter)}, ensure_ascii=False) + "\n")


def _run(options: str, places: dict[str, Path], output: Path) -> float:
    """Run preprocess.py and return its seconds. Raises Failure with its last line if it fails."""
    arguments = []
    for word in options.split():
        head, _, rest = word.partition("/")
        arguments.append(str(places[head] / rest) if head in places else word)
    command = [sys.executable, "preprocess.py", *arguments, "--output", str(output)]
    started = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        reason = (ended.stderr.strip() or f"status {ended.returncode}").splitlines()[-1]
        for name, place in places.items():
            reason = reason.replace(str(place), name)
        raise Failure(reason.removeprefix("error: "))
    return time.monotonic() - started


def _line(entry: Entry, store: Store, seconds: float) -> str:
    splits = {name: store.split(name) for name in store.splits}
    rows = " / ".join(f"{split.rows:,}" for split in splits.values())
    if "group" in splits[store.splits[0]].columns:
        groups = (len(np.unique(split.columns["group"])) for split in splits.values())
        rows += " of " + " / ".join(f"{n:,}" for n in groups)
    tokens = sum(split.tokens for split in splits.values())
    labels = _labels(store, splits)
    return (
        f"| {entry.name} | {rows} | {labels} | {tokens:,} | {seconds:.1f} | `{entry.arguments}` |"
    )


def _labels(store: Store, splits: dict[str, Split]) -> str:
    """The number of rows, or of groups, with each label: in the training split, or in all splits
    together if they were drawn."""
    if store.kind == "text":
        return ""
    split = splits.get("train") or next(iter(splits.values()))
    labels = np.asarray(split.columns["label"])
    if store.kind == "span":
        answers = split.columns["question.answers"]
        answerable = sum(answers.text(i) != "[]" for i in range(len(answers)))
        return f"{answerable:,} answerable, {len(answers) - answerable:,} not"
    if store.kind == "score":
        return f"{np.nanmin(labels):.2f} to {np.nanmax(labels):.2f}"
    drawn = "seed" in store.meta["origin"]
    if drawn:
        labels = np.concatenate([np.asarray(part.columns["label"]) for part in splits.values()])
    if "group" in split.columns:
        labels = labels[np.unique(split.columns["group"], return_index=True)[1]]
    text = ", ".join(f"{name} {(labels == i).sum():,}" for i, name in enumerate(store.labels))
    test = splits.get("test")
    hidden = test is not None and (np.asarray(test.columns["label"]) == UNLABELLED).all()
    unseen = sum(int((np.asarray(s.columns["label"]) == UNSEEN).sum()) for s in splits.values())
    text = f"all: {text}" if drawn else text
    return text + ("; test -" if hidden else "") + (f"; unseen {unseen}" if unseen else "")


if __name__ == "__main__":
    run(main)
