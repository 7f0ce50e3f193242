"""What every preprocess command makes from the raw files of `inputs`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from golden.exact import inputs
from golden.exact.commands import run
from xformer.data import tokenizers
from xformer.data.store import open_store

TEXTS = ["The naïve model reads 1984 words, don't it? 東京 😀", "a  café\tof [MASK] tokens."]
# a library compresses these files, so their bytes are not the same everywhere
PACKED = (".gz", ".zst", ".parquet")
TOK = "--tokenizer {out}/wordpiece"
GLUE = {
    f"glue/{name}": f"task glue/{name} --input {{raw}}/{name} {TOK}"
    for name in ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")
}
# NAME: the arguments of `preprocess.py`, without --output {out}/NAME. {raw} holds the raw files,
# {out} what the commands make, {sources} the published checkpoints
STORES = {
    "text": f"text --input {{raw}}/text/a.txt {{raw}}/text/b.txt --valid {{raw}}/text/valid.txt "
    f"--test {{raw}}/test.txt.gz {TOK}",
    "text-long": "text --input {raw}/long.txt --tokenizer {out}/bpe --max-tokens 16",
    "text-lines": r"text --lines --skip-lines ^\[\d+\] --input {raw}/long.txt "
    "--valid {raw}/test.txt.zst --tokenizer {out}/cased --max-tokens 9",
    "text-documents": f"text --documents --max-tokens 6 --input {{raw}}/text {TOK}",
    "text-skip-bad": f"text --skip-bad --input {{raw}}/bad.txt {TOK}",
    "text-jsonl": f"text --input {{raw}}/documents.jsonl {TOK} --workers 2",
    "text-json": f"text --input {{raw}}/documents.json --field body {TOK}",
    "text-java": "text --input {raw}/java --tokenizer {out}/bpe",
    "text-fasta": "text --input {raw}/plus.fasta --tokenizer {out}/acids",
    "text-bert": "text --input {raw}/text/b.txt --tokenizer {out}/from-bert",
    "text-roberta": "text --input {raw}/text/b.txt --tokenizer {out}/from-roberta",
    "text-albert": "text --input {raw}/text/b.txt --tokenizer {out}/from-albert",
    "text-xlm": "text --input {raw}/text/b.txt --tokenizer {out}/from-xlm",
    "text-spiece": "text --input {raw}/long.txt --tokenizer {out}/from-spiece",
    "pairs-next": "pairs {out}/text-documents --kind next --rounds 2 --seed 3",
    "pairs-order": "pairs {out}/text-documents --kind order",
    "pairs-family": "pairs {out}/protein-family --kind family --seed 1",
    "synthetic-uniform": "synthetic uniform --tokens 400 --lengths 5:12 --vocab-size 40 --seed 1",
    "synthetic-zipf": "synthetic zipf --tokens 400 --lengths 5:12 --frequencies {out}/text",
    "synthetic-nesting": "synthetic nesting --tokens 400 --lengths 5:20 --vocab-size 40 --push 0.5",
    "synthetic-flat": "synthetic flat --tokens 400 --lengths 20 --frequencies {out}/text "
    "--distinct 7",
    "synthetic-shuffle": "synthetic shuffle --tokens 400 --lengths 9:30 --vocab-size 40 "
    "--distinct 6 --depth 3 --workers 2",
    "tsv": f"task tsv --input {{raw}}/tsv --text left --label label {TOK}",
    "tsv-pairs": f"task tsv --input {{raw}}/tsv --text left --text-b right --label label "
    f"--labels good,none,bad --metric f1 {TOK}",
    # it can be read as one store with the one above
    "tsv-again": f"task tsv --train {{raw}}/tsv/test.tsv --valid {{raw}}/tsv/valid.tsv "
    f"--text right --text-b left --label label --labels good,none,bad --metric f1 {TOK}",
    "tsv-score": f"task tsv --input {{raw}}/tsv --text right --label score --kind score {TOK}",
    "tsv-csv": f"task tsv --input {{raw}}/one.csv --no-header --text 1 --label 2 --seed 5 "
    f"--stratify {TOK}",
    "tsv-jsonl": "task tsv --input {raw}/one.jsonl --text text --label label "
    "--tokenizer {out}/cased",
    "tsv-parquet": f"task tsv --input {{raw}}/one.parquet --text text --label label "
    f"--split-column none {TOK}",
    **{name.replace("/", "-"): words for name, words in GLUE.items()},
    "dna-splice": "task dna/splice --input {raw}/splice.data",
    "dna": "task dna --input {raw}/dna.csv --kind score --longest 30 --seed 2",
    "dna-h3": "task dna/h3 --input {raw}/h3.txt",
    "dna-h4": "task dna/h4 --input {raw}/h3.txt --stratify",
    "dna-h3k9ac": "task dna/h3k9ac --input {raw}/h3.txt --seed 9",
    "protein": "task protein --input {raw}/by_class",
    "protein-family": "task protein/family --input {raw}/pfam.fasta --split-column none",
    "protein-localization": "task protein/localization --input {raw}/deeploc.fasta --longest 20",
    "protein-stability": "task protein/stability --input {raw}/stability",
    "protein-fluorescence": "task protein/fluorescence --input {raw}/flip.fasta",
    "protein-secondary": "task protein/secondary --input {raw}/secondary",
    "protein-conservation": "task protein/conservation --input {raw}/conservation",
    "music": "task music/maestro --input {raw}/maestro --segment 12",
    "choice": f"task choice --input {{raw}}/choice --context setting start --endings a b c "
    f"--label right {TOK}",
    "choice-list": "task choice --input {raw}/choice.jsonl --context setting --endings endings "
    "--label right --first 1 --seed 3 --tokenizer {out}/cased",
    "conll": f"task conll --input {{raw}}/conll {TOK}",
    "conllu": "task conll --input {raw}/conllu --word 2 --label 4 --tokenizer {out}/bpe",
    "squad": f"task squad --input {{raw}}/squad --max-tokens 40 --stride 12 --max-question 7 {TOK}",
    "squad-bpe": "task squad --train {raw}/squad/train.json --max-tokens 96 --stride 20 "
    "--tokenizer {out}/bpe",
}
LEARN = "--input {raw}/text {raw}/long.txt --vocab-size"
TOKENIZERS = {
    "wordpiece": f"tokenizer --kind wordpiece {LEARN} 130",
    "cased": f"tokenizer --kind wordpiece --cased {LEARN} 150 --skip-lines footnote",
    "bpe": f"tokenizer --kind bpe {LEARN} 320",
    "symbols": f"tokenizer --kind symbols {LEARN} 90",
    "acids": "tokenizer --kind symbols --alphabet ACDEFGHIKLMNPQRSTVWY",
    "from-bert": "tokenizer --from {sources}/bert",
    "from-vocab": "tokenizer --cased --from {sources}/bert/vocab.txt",
    "from-roberta": "tokenizer --from {sources}/roberta/vocab.json",
    "from-albert": "tokenizer --from {sources}/albert",
    "from-xlm": "tokenizer --from {sources}/xlm-roberta",
    "from-spiece": "tokenizer --from {sources}/spiece.model",
    "from-json": "tokenizer --from {sources}/albert/tokenizer.json",
}
# SentencePiece learns with floats, whose last bits depend on the processor: only the size is kept
LOOSE = {"unigram": f"tokenizer --kind unigram {LEARN} 90"}
# commands that print numbers; they also write them to --json {out}/NAME
FIGURES = {
    "stats-text.json": "stats {out}/text",
    "stats-music.json": "stats {out}/music",
    "overlap.json": "vocab-overlap {out}/cased {sources}/roberta",
    "contexts.json": "english-contexts {out}/text",
}
OTHERS = {"verify": "verify {out}/squad", "pydocs": "pydocs"}
COMMANDS = {**TOKENIZERS, **LOOSE, **STORES, **FIGURES, **OTHERS}


def digest(content: bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def make(directory: Path, sources: Path, names: Collection[str] = ()) -> Path:
    """Run the commands with these names (default: all), and those they need. Returns the directory
    of the results.
    """
    raw, out = directory / "raw", directory / "out"
    inputs.write(raw)
    out.mkdir()
    places = {"raw": str(raw), "out": str(out), "sources": str(sources)}
    for name in names or COMMANDS:
        _make(name, places)
    return out


def _make(name: str, places: dict[str, str]) -> None:
    """Run a command, after those it needs, unless its result exists."""
    result = Path(places["out"]) / name
    if result.exists():
        return
    for other in re.findall(r"\{out\}/([\w-]+)", COMMANDS[name]):
        _make(other, places)
    words = [word.format(**places) for word in COMMANDS[name].split()]
    if name == "verify":
        result.write_text(run("preprocess", *words))
    elif name == "pydocs":
        with _library(Path(places["raw"]) / "library"):
            run("preprocess", *words, "--output", result)
    else:
        run("preprocess", *words, "--json" if name in FIGURES else "--output", result)


@contextmanager
def _library(path: Path) -> Iterator[None]:
    """Make `pydocs` read a library and a reference that are the same for every Python."""
    reference = ModuleType("pydoc_data.topics")
    reference.topics = inputs.TOPICS  # type: ignore[attr-defined]
    with (
        mock.patch("sysconfig.get_path", return_value=str(path)),
        mock.patch.dict(sys.modules, {"pydoc_data.topics": reference}),
    ):
        yield


def found(out: Path) -> dict[str, Any]:
    """What all the commands made, by name."""
    return {path.name: result(path) for path in sorted(out.iterdir())}


def result(path: Path) -> Any:
    """What one command made, as a JSON value."""
    if path.name in LOOSE:
        made = tokenizers.load_tokenizer(path)
        return {"kind": made.kind, "pieces": len(made), "special": made.special}
    if path.name in TOKENIZERS:
        return tokenizer(path)
    if path.name in STORES:
        return store(path)
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        return {file.relative_to(path).as_posix(): digest(file.read_bytes()) for file in files}
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else text.splitlines()


def tokenizer(path: Path) -> dict[str, Any]:
    """What distinguishes a tokenizer from others, and the ids of two texts."""
    made = tokenizers.load_tokenizer(path)
    return {
        "kind": made.kind,
        "fingerprint": made.fingerprint,
        "pieces": digest(json.dumps(made.pieces).encode()),
        "special": made.special,
        "ids": [ids.tolist() for ids in made.encode_batch(TEXTS)],
        "spans": [
            [digest(np.asarray(array, "<i8").tobytes()) for array in spans]
            for spans in made.encode_with_offsets(TEXTS)
        ],
        "decoded": [made.decode(ids) for ids in made.encode_batch(TEXTS)],
    }


def store(path: Path) -> dict[str, Any]:
    """store.json without the command line, the store's key, and a digest of each column's file."""
    meta = json.loads((path / "store.json").read_text())
    del meta["origin"]["command"]
    for source in meta["origin"].get("sources", []):
        if source["file"].endswith(PACKED):
            del source["sha256"], source["bytes"]
    for split in meta["splits"].values():
        split["files"] = {name: digest((path / name).read_bytes()) for name in split["files"]}
    columns = {file.relative_to(path).as_posix() for file in path.rglob("*.npy")}
    listed = {name for split in meta["splits"].values() for name in split["files"]}
    return {**meta, "key": open_store(path).key, "not listed": sorted(columns ^ listed)}
