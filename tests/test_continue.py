"""Continued pre-training: a recipe's model.* gives way to the checkpoint of init=."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import NO_DROPOUT, SMOKE, Forks, good, refused, training
from tiny import HIDDEN, LAYERS, LETTERS, LONGEST, VOCABULARY, tiny
from toys import Toys

from xformer import checkpoint
from xformer.data.store import open_store
from xformer.preprocess.corpora.text import longest_row

CONTINUE = "pretrain/continue"
QUICK = ("train.epochs=1", "batch.tokens=500", "system.threads=1", "system.precision=fp32")


def write_text(path: Path, kind: str) -> Path:
    """A text of known pieces, in documents that are longer than the model's rows."""
    draw = np.random.default_rng(5)
    words = VOCABULARY[5:] if kind.startswith(("Bert", "Distil")) else LETTERS[20:60]
    path.write_text("\n\n".join(" ".join(draw.choice(words, 40)) for _ in range(40)))
    return path


def imported(forks: Forks, directory: Path, kind: str) -> tuple[Path, Path]:
    """A tiny model of transformers, imported as a user does it, and a store of one's own text."""
    source = directory / "hf"
    source.mkdir()
    tiny(kind, source)
    start, store = directory / "ckpt", directory / "mine"
    good(forks.run("-m", "xformer.convert", "from-hf", source, start))
    text = write_text(directory / "mine.txt", kind)
    made = ("--tokenizer", start, "--output", store)
    done = good(forks.run("preprocess.py", "text", "--input", text, *made))
    assert f"rows of {LONGEST - 2} tokens" in done.err
    return start, store


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Albert", "DistilBert", "XLMRoberta"])
@pytest.mark.slow
def test_an_imported_model_goes_on_at_the_first_attempt(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    """Three commands: import, make a store, train. The store's rows are as long as the model's
    positions allow, and the loss on the same text falls."""
    start, store = imported(forks, tmp_path, f"{name}ForMaskedLM")
    assert open_store(store).split("train").columns["tokens"].lengths(np.arange(40)).max() == 15
    run = tmp_path / "run"
    line = ["train.py", CONTINUE, f"init={start}", f"data={store}", f"run={run}", *QUICK]
    done = good(forks.run(*line, "train.epochs=8", "optim.lr=1e-2", "train.log_every=1"))
    assert "MLM head" not in done.out + done.err
    before, after = checkpoint.load(start), checkpoint.load(run)
    assert after.config == before.config
    assert after.head is not None
    assert (after.head.kind, after.head.max_tokens) == ("mlm", LONGEST)
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "train"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert "is finished" in good(forks.run(*line, "train.epochs=8", "optim.lr=1e-2")).err


def test_a_model_without_an_mlm_head_gets_one(forks: Forks, tmp_path: Path) -> None:
    start, store = imported(forks, tmp_path, "BertModel")
    run = tmp_path / "run"
    line = ["train.py", CONTINUE, f"init={start}", f"data={store}", f"run={run}", *QUICK]
    done = good(forks.run(*line))
    told = [text for text in (done.out + done.err).splitlines() if "mlm_head" in text]
    assert told == [
        "new weights: mlm_head (the checkpoint has no MLM head; its decoder is tied to the word "
        "embeddings)"
    ]


def test_rows_beyond_the_positions_are_refused(forks: Forks, tmp_path: Path) -> None:
    """The line names a remedy, and both remedies work."""
    start, _ = imported(forks, tmp_path, "BertForMaskedLM")
    line = ("preprocess.py", "text", "--input", tmp_path / "mine.txt", "--tokenizer", start)
    long, short = tmp_path / "long", tmp_path / "short"
    good(forks.run(*line, "--max-tokens", "20", "--output", long))
    run = ("train.py", CONTINUE, f"init={start}", f"run={tmp_path / 'run'}", *QUICK)
    refused(
        forks.run(*run, f"data={long}"),
        f"{long}: the longest row of train has 22 tokens",
        "the model takes 17; make the store again with --max-tokens 15, or give "
        "batch.max_tokens=17",
    )
    assert not (tmp_path / "run").exists()
    refused(forks.run(*run, f"data={long}", "batch.max_tokens=18"), "give batch.max_tokens=17")
    refused(forks.run(*run, f"data={long}", "batch.max_tokens=2"), "max_tokens=2 leaves no room")
    truncated = forks.run(*run, f"data={long}", "batch.max_tokens=17", "train.steps=1")
    assert "are truncated" in good(truncated).err + truncated.out
    good(forks.run(*line, "--max-tokens", "15", "--output", short))
    good(forks.run(*run, f"data={short}", "overwrite=true", "train.steps=1"))
    refused(
        forks.run(*run, f"data={short}", "batch.tokens=16", "overwrite=true"),
        "batch.tokens=16 is below batch.max_tokens=17",
    )


def test_the_checkpoint_decides_the_shape(forks: Forks, tmp_path: Path) -> None:
    """A recipe's model.* gives way in one line, except its dropout. What the user typed does not;
    all conflicts are named at once."""
    start, store = imported(forks, tmp_path, "BertForMaskedLM")
    run = tmp_path / "run"
    line = ["train.py", SMOKE, f"data={store}", f"run={run}", f"init={start}", "train.steps=2"]
    line += ["batch.max_tokens=17", "batch.rows=4", "train.select=last"]
    refused(
        forks.run(*line, "model.hidden=64", "model={heads=2, layers=2}"),
        "model.hidden=64, model.heads=2: the checkpoint given as init has 39, 3; leave "
        "model.hidden, model.heads out",
    )
    assert not run.exists()
    done = good(forks.run(*line, f"model.layers={LAYERS}", *NO_DROPOUT))
    told = [text for text in (done.out + done.err).splitlines() if "decides the shape" in text]
    assert told == [
        f"init={start} decides the shape of the model, not the recipe's model.hidden=64, "
        "model.heads=2, model.intermediate=256, model.max_positions=128"
    ]
    config = json.loads((run / "config.json").read_text())["config"]["model"]
    assert (config["layers"], config["hidden"], config["dropout"]) == (LAYERS, HIDDEN, 0)
    trained = checkpoint.load(run).config
    assert (trained.hidden, trained.dropout, trained.attention_dropout) == (HIDDEN, 0, 0)
    good(forks.run(*line, f"model.layers={LAYERS}", *NO_DROPOUT, "train.steps=3"))  # goes on


def test_a_run_decides_the_shape_too(forks: Forks, data: Toys, tmp_path: Path) -> None:
    run = tmp_path / "run"
    good(forks.run(*training(SMOKE, data.text, run, "train.steps=1")))
    line = training(SMOKE, data.text, tmp_path / "next", f"init={run}", "model.layers=3")
    refused(forks.run(*line), "model.layers=3: the checkpoint given as init has 2; leave")


def test_without_a_checkpoint_there_is_nothing_to_continue(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    line = ("train.py", CONTINUE, f"data={data.text}", f"run={tmp_path / 'run'}")
    refused(forks.run(*line), "init must be given: init=CHECKPOINT")
    assert not (tmp_path / "run").exists()


def test_longest_row(data: Toys) -> None:
    assert longest_row("micro/english") == 128
    assert longest_row(data.tokenizer) is None
    assert longest_row(data.text) is None
