"""Artefacts of the code that recorded them, which later code must open, continue, evaluate and
report: two runs stopped half way, a finished run, a checkpoint, a finished study.

KEPT.zip holds STORE and STORE-raw, two stores; RECIPE.toml, what the runs were started with;
half-adamw and half-novograd, stopped at step 6 of 12; finished, a run whose checkpoint maps the
letters of DNA to subwords; study, a directory in which a study ran. All paths in it are relative to
the directory that holds it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

from helpers import ROOT, Done, Forks, good

from golden.exact.commands import run
from golden.exact.sources import HERE
from golden.exact.stores import digest, make
from xformer import checkpoint as checkpoints
from xformer.predictions import read

ARCHIVE = HERE / "kept.zip"
HALVES = ("adamw", "novograd")
RECIPE = """head = "mlm"
seed = 3

[model]
layers = 2
hidden = 8
heads = 2
intermediate = 16
max_positions = 32
dropout = 0.0
attention_dropout = 0.0

[batch]
rows = 8
max_tokens = 20

[optim]
lr = 1e-2
warmup = 0.2

[train]
steps = 12
log_every = 1
validate_every = 4

[system]
precision = "fp32"
threads = 1
"""
CLASSES = """head = "classify"
init = "bert"
mapping = "symbols:3"

[model]
dropout = 0.0
attention_dropout = 0.0

[batch]
rows = 8
max_tokens = 17

[optim]
lr = 1e-3

[train]
epochs = 2.0
keep_state = false
log_every = 2

[system]
precision = "fp32"
threads = 1
"""
STUDY = """title = "Letters"
question = "Does pre-training on letters help to find the letters?"
paper = "Nobody 2026"
notes = ["Trained for {finetune: train.epochs} epochs on {finetune: runs} runs."]

[needs.data]
about = "a directory of DNA"
get = "write it"

[made.task]
command = ["preprocess.py", "task", "dna", "--input", "{need.data}/x.tsv", "--output", "{out}"]

[made.letters]
command = ["preprocess.py", "text", "--lines", "--input", "{need.data}/train.txt", "--valid",
           "{need.data}/valid.txt", "--tokenizer", "{made.task}", "--output", "{out}"]

[stages.pretrain]
recipe = "RECIPE.toml"
settings.data = "{made.letters}"

[stages.finetune]
recipe = "CLASSES.toml"
settings.data = "{made.task}"
settings.init = "{stage.pretrain}"
settings.mapping = "none"
settings.optim.lr = 1e-2
vary.seed = [0, 1]
vary.start.pretrained = {}
vary.start.scratch = { surgery = [{ op = "clean" }] }

[[tables]]
name = "main"
title = "Accuracy"
stage = "finetune"
rows = "start"
columns = "metric"
metric.accuracy = "accuracy"
metric.mcc = "mcc"
chance.accuracy = 0.5
[tables.published]
source = "Nobody 2026, table 1"
columns = ["accuracy", "mcc"]
rows.pretrained = [50.0, 9.0]
rows.none = [50.0, ""]

[[summaries]]
title = "Over all starts"
table = "main"
by = "start"

[[curves]]
name = "losses"
title = "Losses"
stage = "finetune"
panels = "start"
lines = "start"

[[claims]]
text = "pre-training helps"
table = "main"
better.start = "pretrained"
than.start = "scratch"
each = "metric"

[[deviations]]
what = "the rate"
paper = "not said"
ours = "{finetune: optim.lr}"
why = "it is small"

[scales.mini]
like.scratch = "none"
"""
# Python that makes a run stop in step 6, after its checkpoint
STOP = """
import os, signal
from xformer.monitor import Monitor
plain = Monitor.advance
def advance(self, done):
    plain(self, done)
    if done == 5: os.kill(os.getpid(), signal.SIGTERM)
Monitor.advance = advance
"""
STUDYING = ("-m", "xformer.study", "study.toml", "scale=mini", "needs.data=data")


def there(place: Path) -> str:
    """Python that makes a command run in a directory, without recording a revision of the code."""
    return f"import os; os.chdir({str(place)!r}); os.environ['GIT_DIR'] = '/dev/null'\n"


# --------------------------------------------------------------------------------- recording


def record(forks: Forks, place: Path, sources: Path) -> None:
    """Make the artefacts anew, below an empty directory."""
    made = make(place / ".made", sources, ("text", "dna-splice"))
    shutil.copytree(made / "text", place / "text")
    shutil.copytree(made / "dna-splice", place / "dna")
    run("convert", "from-hf", sources / "bert", place / "bert")
    (place / "RECIPE.toml").write_text(RECIPE)
    (place / "CLASSES.toml").write_text(CLASSES)
    for name in HALVES:
        done = train(forks, place, f"half-{name}", f"optim.name={name}", before=STOP)
        assert done.status == 128 + signal.SIGTERM, done.err
    good(train(forks, place, "finished", recipe="CLASSES.toml", data="dna"))
    study = place / "study"
    study.mkdir()
    for name, text in (("study", STUDY), ("RECIPE", RECIPE), ("CLASSES", CLASSES)):
        (study / f"{name}.toml").write_text(text.replace("steps = 12", "steps = 4"))
    _letters(study / "data")
    good(forks.run(*STUDYING, "output=studies", "kept=kept", before=there(study)))
    _tidy(place)


def _letters(directory: Path) -> None:
    from golden.exact.inputs import letters, put

    rows = letters(200, 240, "ACGT", 12, 12)
    put(directory / "train.txt", "\n".join(rows[:40]) + "\n")
    put(directory / "valid.txt", "\n".join(rows[40:60]) + "\n")
    added = ("", "TTTT")
    lines = [f"{row[:4]}{added[i % 2]}{row[4:]}\t{'ab'[i % 2]}" for i, row in enumerate(rows)]
    put(directory / "x.tsv", "\n".join(["sequence\tlabel", *lines]) + "\n")


def _tidy(place: Path) -> None:
    """Delete what later code does not need, and make paths relative."""
    for name in (".made", "bert"):
        shutil.rmtree(place / name)
    for path in [*place.rglob("tensorboard")]:
        shutil.rmtree(path)
    for pattern in (".lock", "*.log", "code.diff", "digests.json", "report.html"):
        for path in [*place.rglob(pattern)]:
            path.unlink()
    for name, sums in (("config.json", "run_manifest.json"), ("store.json", "sums.json")):
        for path in place.rglob(name):
            _make_relative(path, path.with_name(sums), place)


def _make_relative(path: Path, sums: Path, place: Path) -> None:
    """Write the paths in a file relative to the artefacts' directory, and update its checksum."""
    old = path.read_text()
    new = old.replace(f"{place}/.made/", "").replace(f"{place}/", "").replace(f"{ROOT}/", "")
    if new == old:
        return
    path.write_text(new)
    if sums.exists():
        content = json.loads(sums.read_text())
        content["sha256"][path.name] = hashlib.sha256(new.encode()).hexdigest()
        sums.write_text(json.dumps(content, indent=1) + "\n")


# ------------------------------------------------------------------------------------- asking


def train(
    forks: Forks,
    place: Path,
    name: str,
    *overrides: str,
    recipe: str = "RECIPE.toml",
    data: str = "text",
    before: str = "",
) -> Done:
    """Start or continue a run."""
    words = ("train.py", recipe, f"data={data}", f"run={name}", *overrides)
    return forks.run(*words, before=there(place) + before)


def continued(forks: Forks, place: Path, name: str) -> dict[str, Any]:
    """Continue a run that was stopped half way, until its end."""
    done = good(train(forks, place, f"half-{name}", f"optim.name={name}"))
    assert f"continuing half-{name} from step 6\n" in done.err, done.err
    return ended(place / f"half-{name}")


def ended(path: Path) -> dict[str, Any]:
    """The log of a run without values that depend on the clock, and its scores."""
    events = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    lines = [
        {key: event[key] for key in ("event", "step", "loss", "accuracy", "lr") if key in event}
        for event in events
        if event["event"] in ("train", "validation")
    ]
    result = json.loads((path / "result.json").read_text())
    return {"log": lines, "metrics": result["metrics"], "selected": result["selected"]}


def evaluated(forks: Forks, place: Path) -> dict[str, Any]:
    """The scores of a finished run, from its predictions and from evaluation, and what it
    predicts.
    """
    kept = {
        path.stem: read(path).metrics()
        for path in sorted((place / "finished/predictions").glob("*.npz"))
    }
    scores = {}
    for split in kept:
        words = ("evaluate.py", "finished", "data=dna", f"split={split}", f"out={split}.json")
        good(forks.run(*words, f"predictions={split}.tsv", before=there(place)))
        scores[split] = json.loads((place / f"{split}.json").read_text())["metrics"]
    head, *rows = (place / "test.tsv").read_text().splitlines()
    cells = [dict(zip(head.split("\t"), row.split("\t"), strict=True)) for row in rows]
    return {
        "kept": kept,
        "scores": scores,
        "labels": [cell["label"] for cell in cells],
        "probabilities": [float(cell["probability"]) for cell in cells],
        **opened(checkpoints.resolve(place / "finished")),
    }


def opened(path: Path) -> dict[str, Any]:
    """The content of a checkpoint after loading it."""
    found = checkpoints.load(path)
    assert found.source is not None
    assert found.mapping is not None
    assert found.head is not None
    return {
        "config": found.config.model_dump(exclude_defaults=True),
        "head": [found.head.kind, found.head.mapping, list(found.head.labels)],
        "history": json.loads(json.dumps(found.history)),
        "tokenizers": [found.tokenizer.fingerprint, found.source.fingerprint],
        "mapping": found.mapping.tolist(),
        "ids": found.tokenizer.encode_batch(["the model"])[0].tolist(),
        "weights": {
            name: f"{list(weight.shape)} {digest(weight.numpy().tobytes())}"
            for name, weight in found.weights.items()
        },
    }


def started(forks: Forks, place: Path) -> dict[str, Any]:
    """A run that starts from the checkpoint of the finished run."""
    words = ("init=finished", "mapping=symbols:3", "train.epochs=1", "seed=5")
    good(train(forks, place, "further", *words, recipe="CLASSES.toml", data="dna"))
    return ended(place / "further")


def reported(forks: Forks, place: Path) -> dict[str, Any]:
    """How much of the finished study is left to do: with its runs, and with only its kept results.

    Also its report, made again.
    """
    before = there(place / "study")
    lists = {}
    for output, kept in (("studies", ""), ("elsewhere", "kept")):
        given = (f"output={output}", f"kept={kept}")
        lists[output] = good(forks.run(*STUDYING, *given, "--dry-run", before=before)).out
    folder = place / "study/studies/study-mini"
    shutil.rmtree(folder, ignore_errors=True)
    good(forks.run(*STUDYING, "output=studies", before=before))
    return {
        "to do": {name: text.splitlines() for name, text in lists.items()},
        "report": (folder / "report.md").read_text().splitlines(),
        "results": (folder / "results.csv").read_text().splitlines(),
        "files": sorted(path.name for path in folder.iterdir()),
    }
