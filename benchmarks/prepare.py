"""Prepares the same weights and data for both sides: stores and checkpoints for ours, Hugging Face
directories and tables of `datasets` for theirs. Our commands make all of them from the raw data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.bench import Bench, command
from xformer import checkpoint as checkpoints
from xformer.checkpoint import Head
from xformer.convert.hf import to_hf
from xformer.data import published
from xformer.data.batch import Assembler
from xformer.data.store import Store, open_store
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store
from xformer.model.config import ModelConfig

TEXT = "english_wikipedia/train.txt"
VOCABULARY = "vocabs/bert-base-uncased.vocab.txt"
TASKS = {"mrpc": "glue/MRPC", "cola": "glue/CoLA"}
FOOTNOTE = r"^\[\d+\]"  # lines of this form in Wikipedia's text are footnotes
BLOCK = 2_000_000  # tokens that are written at once
SEED = 1


def tokenizer(bench: Bench) -> Tokenizer:
    return published.import_tokenizer(bench.data / VOCABULARY)


def model(bench: Bench, labels: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Make (our checkpoint, a Hugging Face directory with the same weights).

    The head is for the classes `labels`, or for MLM without labels. Dropout is 0.1 everywhere, as
    in BERT.
    """
    folder = bench.folder / ("mlm" if not labels else f"classes{len(labels)}")
    ours, theirs = folder / "ours", folder / "theirs"
    if not folder.exists():
        folder.mkdir()
        checkpoint = checkpoints.fresh(ModelConfig(**bench.size.model), tokenizer(bench), SEED)
        head = Head("classify", labels) if labels else Head("mlm")
        checkpoint = checkpoint.with_head(head, SEED)
        checkpoints.save(checkpoint, ours)
        to_hf(checkpoint, theirs)
    return ours, theirs


# --------------------------------------------------------------------------------- the stores


def lines(bench: Bench) -> Store:
    """English Wikipedia, one row for each line."""
    text = str(bench.data / TEXT)
    return _made(bench, "lines", "text", "--input", text, "--lines", "--skip-lines", FOOTNOTE)


def task(bench: Bench, name: str) -> Store:
    """A task of GLUE with all its splits."""
    return _made(bench, name, "task", f"glue/{name}", "--input", str(bench.data / TASKS[name]))


def _made(bench: Bench, name: str, *words: str) -> Store:
    """The store `name`, which preprocess.py makes with these words if it does not exist."""
    path = bench.folder / name
    if not path.exists():
        more = ["--tokenizer", _tokenizer_directory(bench), "--output", str(path)]
        command(["preprocess.py", *words, *more], bench.threads)
    return open_store(path)


def full_rows(bench: Bench) -> Store:
    """The same text, joined and cut into full rows."""
    return joined(bench, lines(bench), bench.folder / "full")


def joined(bench: Bench, store: Store, path: Path) -> Store:
    """A store of the split `train` of another one, joined and cut into full rows."""
    if not path.exists():
        bare = bench.size.length - 2
        ids = np.asarray(store.split("train").columns["tokens"].values)
        count = len(ids) // bare
        with create_store(path, store.tokenizer(), {"tokens": ""}) as writer:
            with writer.split("train") as split:
                split.append_ragged("tokens", ids[: count * bare], np.full(count, bare))
            writer.finish("text", (), None, {"of": store.path.name})
    return open_store(path)


def made(bench: Bench, tokens: int) -> Store:
    """A store of about `tokens` random tokens, in rows from a quarter of the longest to the
    longest."""
    path = bench.folder / f"made{tokens}"
    if not path.exists():
        draw = np.random.default_rng(SEED)
        words, longest = tokenizer(bench), bench.size.length - 2
        with create_store(path, words, {"tokens": ""}) as store:
            with store.split("train") as split:
                _append_random(split, draw, tokens, len(words), longest)
            store.finish("text", (), None, {"made": "at random"})
    return open_store(path)


def _append_random(
    split: SplitWriter, draw: np.random.Generator, tokens: int, pieces: int, longest: int
) -> None:
    lengths = draw.integers(longest // 4, longest + 1, min(tokens, BLOCK) // longest)
    block = draw.integers(pieces, size=int(lengths.sum())).astype(np.uint32)
    # the same block each time, because only the size matters
    for _ in range(max(1, tokens // len(block))):
        split.append_ragged("tokens", block, lengths)


def _tokenizer_directory(bench: Bench) -> str:
    path = bench.folder / "tokenizer"
    if not path.exists():
        path.mkdir()
        tokenizer(bench).save(path)
    return str(path)


# ------------------------------------------------------------- what both sides train on


def assembler(bench: Bench, store: Store, split: str = "train") -> Assembler:
    return Assembler(store.split(split), store.tokenizer(), bench.size.length)


def trial(bench: Bench, store: Store, name: str, rows: int) -> tuple[Path, Path]:
    """Make (store, table) with the same rows of `store`: as many as the warm-up and the measured
    steps need, in the same order.

    The Trainer's length-grouped sampler divides all rows into batches. These rows are some of its
    whole batches, evenly spread from the shortest to the longest. The table has them batch by batch
    in random order, so that a sequential reader gets typical batches of that sampler. (The sampler
    itself starts with its longest batch, so its first steps would not be typical.)
    """
    path = bench.folder / f"trial-{name}"
    if not path.exists():
        path.mkdir()
        chosen = typical(
            assembler(bench, store).sizes(np.arange(store.split("train").rows)),
            rows,
            bench.size.warmup,
            bench.size.steps,
        )
        subset(store, chosen, path / "store")
        table(assembler(bench, open_store(path / "store")), path / "table")
    return path / "store", path / "table"


def typical(sizes: np.ndarray, rows: int, warmup: int, steps: int) -> np.ndarray:
    """The row numbers of warmup + steps length-grouped batches.

    Both the warm-up batches and the measured ones are evenly spread over the lengths.
    """
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(SEED)
    order = get_length_grouped_indices(sizes.tolist(), rows, generator=generator)
    batches = np.asarray(order)[: len(order) // rows * rows].reshape(-1, rows)
    batches = batches[np.argsort(sizes[batches].sum(1), kind="stable")]
    draw = np.random.default_rng(SEED)
    # the middle of each of n equal parts
    spread = [((np.arange(n) + 0.5) * len(batches) / n).astype(int) for n in (warmup, steps)]
    return np.concatenate([batches[draw.permutation(part)] for part in spread]).ravel()


def subset(store: Store, rows: np.ndarray, path: Path) -> None:
    """Write a store with only these rows of the split `train`, in this order."""
    split = store.split("train")
    texts = [name for name in ("tokens", "tokens_b") if name in split.columns]
    columns: dict[str, str] = dict.fromkeys(map(str, texts), "")
    if "label" in split.columns:
        columns["label"] = str(split.columns["label"].dtype)
    with create_store(path, store.tokenizer(), columns, texts) as writer:
        with writer.split("train") as new:
            for name in texts:
                parts = [np.asarray(split.columns[name][row]) for row in rows]
                new.append_ragged(name, np.concatenate(parts), np.array([len(p) for p in parts]))
            if "label" in columns:
                new.append("label", np.asarray(split.columns["label"])[rows])
        writer.finish(store.kind, store.labels, store.metric, {"of": store.path.name})


def table(rows: Assembler, path: Path) -> None:
    """Write the rows of our batches as a table of `datasets` that the Trainer reads."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_generator(
        lambda: _examples(rows), cache_dir=str(path.with_name(f"{path.name}.cache"))
    ).save_to_disk(str(path))


def _examples(rows: Assembler) -> Iterator[dict[str, object]]:
    for row in range(rows.split.rows):
        batch = rows.batch(np.array([row]))
        example: dict[str, object] = {
            "input_ids": batch.tokens.astype(np.int32),  # the types that their tokenizers give
            "token_type_ids": batch.segments.astype(np.int8),
            "attention_mask": np.ones_like(batch.tokens, np.int8),
        }
        if batch.labels is not None:
            example["labels"] = int(batch.labels[0])
        yield example
