"""How fast raw text becomes a store, compared with the tokenizer library alone and with `datasets`.

    python -m benchmarks.preprocess                       # English of Python's own documentation
    python -m benchmarks.preprocess --data DIR            # DIR/english_wikipedia, DIR/vocabs
    python -m benchmarks.preprocess --data DIR --memory   # two gigabytes with new words throughout

The programs run alternately on the same cores, each time in a new process, and medians are
reported. Our command is measured from its start to its end. The library alone gets the documents in
memory, and its clock starts after the imports. Hugging Face's `datasets` is measured in the same
way. It tokenises with `map` in one process for each core and saves its table to disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bench import ROOT, cores, directory, new_file, require, require_data
from benchmarks.prepare import TEXT
from benchmarks.prepare import VOCABULARY as KNOWN
from xformer.data import published
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.errors import Failure
from xformer.data.store import open_store
from xformer.preprocess.corpora import pydocs
from xformer.preprocess.corpora.documents import TextOptions, read_documents
from xformer.preprocess.vocabulary.tokenizer import learn
from xformer.start import run

CORES = cores()
VOCABULARY = 30_000
LARGE = 2_000_000_000  # bytes of the input of --memory
CHANGED = 0.05  # share of its words with another letter


def prepare(data: Path | None, folder: Path) -> tuple[Path, Path]:
    """(text file, tokenizer directory): from `data` if they are there, otherwise made here."""
    source = data / TEXT if data else folder / "pydocs/english.txt"
    if data is None:
        pydocs.write(folder / "pydocs", overwrite=False)
    words = data / KNOWN if data else None
    if words is not None and words.is_file():
        tokenizer = published.import_tokenizer(words)
    else:
        tokenizer = learn("wordpiece", [source], VOCABULARY, True, TextOptions())
    (folder / "tok").mkdir()
    tokenizer.save(folder / "tok")
    return source, folder / "tok"


# ---------------------------------------------------------------------------------- what is timed


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "preprocess.py"), *map(str, arguments)]


class Spent(NamedTuple):
    """What a process and its children took together: seconds, processor seconds, and peak memory
    in bytes (0: not measured)."""

    seconds: float
    busy: float
    peak: int = 0


def timed(line: list[str]) -> Spent:
    """Measure a command from its start to its end."""
    started = time.monotonic()
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            peak = max(peak, sum(map(resident, family(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    ended.set()
    watcher.join()
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise Failure(f"{' '.join(line)} ended with status {code}")
    return Spent(seconds, usage.ru_utime + usage.ru_stime, peak)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    processes = [pid]
    for parent in processes:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                processes += map(int, children.read_text().split())
            except OSError:
                continue
    return processes


def resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def library(source: Path, tokenizer: Path) -> None:
    """Print the seconds that the tokenizer library takes for all documents in memory."""
    documents, model = _load(source, tokenizer)
    started, busy = time.monotonic(), _busy()
    model.encode_batch_fast(documents, add_special_tokens=False)
    print(time.monotonic() - started, _busy() - busy)


def hugging_face(source: Path, tokenizer: Path) -> None:
    """Print the seconds that `datasets` takes to tokenise all documents and save the table."""
    import datasets

    documents, model = _load(source, tokenizer)
    datasets.disable_progress_bars()
    datasets.disable_caching()

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = model.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    with tempfile.TemporaryDirectory() as folder:
        table = datasets.Dataset.from_dict({"text": documents})
        started, busy = time.monotonic(), _busy()
        table = table.map(encode, batched=True, num_proc=CORES, remove_columns=["text"])
        table.save_to_disk(folder)
        print(time.monotonic() - started, _busy() - busy)


def _busy() -> float:
    """Processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _load(source: Path, tokenizer: Path) -> tuple[list[str], Any]:
    import tokenizers as fast

    documents = [""]
    for segment, ends in read_documents([source], TextOptions(), lambda _: None):
        documents[-1] += segment
        if ends:
            documents.append("")
    whole = [document for document in documents if document]
    return whole, fast.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))


def apart(function: Callable[[Path, Path], None], source: Path, tokenizer: Path) -> Spent:
    """Run a function above in a process of its own, and read the seconds that it prints."""
    line = [sys.executable, "-m", "benchmarks.preprocess", "--only", function.__name__]
    line += [str(source), str(tokenizer)]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    seconds, busy = map(float, done.stdout.split()[-2:])
    return Spent(seconds, busy)


# ---------------------------------------------------------------------------------- the reports


def compare(source: Path, tokenizer: Path, folder: Path, rounds: int) -> list[str]:
    """The lines of a table: seconds and MB/s of each program, relative to our command."""
    size = source.stat().st_size / 1e6
    store = folder / "store"
    ours = ["text", "--input", source, "--tokenizer", tokenizer, "--output", store, "--overwrite"]
    taken: dict[str, list[Spent]] = {"all": [], "one": [], "library": [], "hugging_face": []}
    for _ in range(rounds):
        for name, workers in (("all", CORES), ("one", 1)):
            taken[name].append(timed(command(*ours, "--workers", workers)))
        for function in (library, hugging_face):
            taken[function.__name__].append(apart(function, source, tokenizer))
    middle = {name: median(spent.seconds for spent in all_) for name, all_ in taken.items()}
    busy = {name: median(spent.busy for spent in all_) for name, all_ in taken.items()}
    names = {
        "all": f"text to store, `--workers {CORES}` (the whole command)",
        "one": "text to store, `--workers 1` (the whole command)",
        "library": "`tokenizers.encode_batch_fast` alone, documents in memory",
        "hugging_face": f"`datasets`: `map(num_proc={CORES})` and `save_to_disk`",
    }
    lines = [
        f"{size:.1f} MB of text, {CORES} cores, medians of {rounds} rounds taken in turn:",
        "",
        "| method | seconds (all rounds) | MB/s | over ours | CPU seconds | over ours |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in names.items():
        times = ", ".join(f"{spent.seconds:.2f}" for spent in taken[name])
        lines.append(
            f"| {what} | {times} | {size / middle[name]:.1f} | {middle[name] / middle['all']:.2f} "
            f"| {busy[name]:.2f} | {busy[name] / busy['all']:.2f} |"
        )
    peak = max(spent.peak for spent in [*taken["all"], *taken["one"]])
    lines += ["", f"Peak memory of our command and its processes: {peak / 1e6:.0f} MB."]
    per = "one paragraph per document"
    return [*lines, bytes_a_token(store, per), *as_articles(source, tokenizer, folder)]


def bytes_a_token(path: Path, what: str) -> str:
    """One line: the bytes of a token on disk."""
    split = open_store(path).split("train")
    ids, offsets = (
        (path / f"train/{name}.npy").stat().st_size for name in ("tokens", "tokens.offsets")
    )
    total, tokens = ids + offsets, split.tokens
    return (
        f"Bytes per token, {what}: {total / tokens:.3f} ({ids / tokens:.3f} ids + "
        f"{offsets / tokens:.3f} offsets at {tokens / split.rows:.0f} tokens per row)."
    )


def as_articles(source: Path, tokenizer: Path, folder: Path) -> list[str]:
    """The same text as JSON lines with one article each, if it has headings `= Title =`."""
    articles = re.split(r"(?m)^(?== [^=]+ =$)", source.read_text(encoding="utf-8"))
    if len(articles) < 10:
        return []
    lines = [json.dumps({"text": article}, ensure_ascii=False) for article in articles if article]
    (folder / "articles.jsonl").write_text("\n".join(lines), encoding="utf-8")
    store = folder / "articles"
    spent = timed(
        command(
            "text",
            "--input",
            folder / "articles.jsonl",
            "--tokenizer",
            tokenizer,
            "--output",
            store,
        )
    )
    rate = (folder / "articles.jsonl").stat().st_size / 1e6 / spent.seconds
    note = f"one article per document (JSON lines, {rate:.1f} MB/s)"
    return [bytes_a_token(store, note)]


def large_text(source: Path, path: Path, size: int) -> None:
    """Write `source` repeatedly, each time with changed letters in a share CHANGED of its words."""
    text = np.frombuffer(source.read_bytes(), np.uint8)
    starts = np.flatnonzero((text[1:] > 96) & (text[1:] < 123) & (text[:-1] == 32)) + 1
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        while file.tell() < size:
            copy = text.copy()
            places = generator.choice(starts, int(CHANGED * len(starts)), replace=False)
            copy[places] = generator.integers(97, 123, len(places))
            inner = places[(copy[places + 1] > 96) & (copy[places + 1] < 123)] + 1
            copy[inner] = generator.integers(97, 123, len(inner))
            file.write(copy.data)


def memory(source: Path, tokenizer: Path, folder: Path) -> list[str]:
    """One line: the peak memory and the rate for a large input."""
    path = folder / "large.txt"
    large_text(source, path, LARGE)
    size = path.stat().st_size
    store = folder / "large"
    spent = timed(command("text", "--input", path, "--tokenizer", tokenizer, "--output", store))
    rate = size / 1e6 / spent.seconds
    return [
        f"{size / 1e9:.2f} GB with changed letters in {CHANGED:.0%} of the words: "
        f"{spent.seconds:.0f} s, {rate:.1f} MB/s on {CORES} cores, peak memory "
        f"of all processes {spent.peak / 1e6:.0f} MB.",
        bytes_a_token(store, "one paragraph per document"),
    ]


def main() -> None:
    parser = CommandParser(
        prog="python -m benchmarks.preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"A directory with {TEXT} and, if there is one, {KNOWN} (default: English of "
        "Python's documentation, and a vocabulary trained on it).",
    )
    about = "Also write the report to this file."
    parser.add_argument("--output", type=new_file, metavar="FILE", help=about)
    about = "How often each program runs (default: %(default)s)."
    parser.add_argument("--rounds", type=whole_number(1), default=5, help=about)
    parser.add_argument(
        "--memory", action="store_true", help="Only measure a large input (minutes, 6 GB of disk)."
    )
    about = "The working directory (default: a temporary directory)."
    parser.add_argument("--scratch", type=directory, metavar="DIR", help=about)
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        name, source, tokenizer = arguments.only
        {"library": library, "hugging_face": hugging_face}[name](Path(source), Path(tokenizer))
        return
    if arguments.data:
        require_data(arguments.data, TEXT)
    if not arguments.memory:
        require("datasets")
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as place:
        folder = Path(place).resolve()
        data = arguments.data.resolve() if arguments.data else None
        source, tokenizer = prepare(data, folder)
        if arguments.memory:
            lines = memory(source, tokenizer, folder)
        else:
            lines = compare(source, tokenizer, folder, arguments.rounds)
    print("\n".join(lines))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
