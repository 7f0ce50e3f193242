"""Sharing: model cards say what checkpoint and run know, and a trajectory becomes revisions."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CLASSIFY, SMOKE, Forks, good, refused, training
from safetensors.torch import load_file
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import config
from xformer.checkpoint import Checkpoint
from xformer.convert import hf, share
from xformer.convert.card import Card, _without_paths
from xformer.data import vocabularies
from xformer.data.batch import Assembler
from xformer.data.files import file_checksum, read_json
from xformer.data.memory import split_of
from xformer.data.store import open_store
from xformer.model.config import ModelConfig
from xformer.parallel.processes import ALONE
from xformer.recipe import Recipe
from xformer.tasks.task import Head, to_device

SMALL = {"layers": 1, "hidden": 12, "heads": 2, "intermediate": 8, "max_positions": 20}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "text", "another", "##s"]
PIPELINES = {
    "": "feature-extraction",
    "mlm": "fill-mask",
    "pairs": "fill-mask",
    "classify": "text-classification",
    "regress": "text-classification",
    "span": "question-answering",
    "tag": "token-classification",
    "choice": "multiple-choice",
}


def fresh(kind: str = "", labels: tuple[str, ...] = ("a", "b")) -> Checkpoint:
    tokenizer = vocabularies.wordpiece({word: i for i, word in enumerate(WORDS)}, True)
    made = checkpoints.fresh(ModelConfig(**SMALL), tokenizer, seed=1)
    if not kind:
        return made
    named = kind in ("classify", "tag", "pairs")
    head = Head(kind.replace("pairs", "mlm"), labels if named else (), pair=kind == "classify")
    if kind == "pairs":
        head = Head("mlm", labels, pair=True, pair_scale=1.0)
    return made.with_head(head, seed=2)


def metadata(directory: Path) -> dict[str, Any]:
    """The front matter of a model card, as the hub's own reader sees it."""
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(directory / "README.md")
    assert card.content.startswith("---\n")
    values: dict[str, Any] = card.data.to_dict()
    return values


def text_of(directory: Path) -> str:
    return (directory / "README.md").read_text(encoding="utf-8")


def block(text: str, language: str) -> str:
    """The only block of code in this language."""
    [code] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(code)


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_card_says_how_to_load_each_head(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoints.save(fresh(kind), tmp_path / "ours")
    share.export(tmp_path / "ours", tmp_path / "theirs", "", False)
    assert metadata(tmp_path / "theirs") == {
        "library_name": "transformers",
        "pipeline_tag": PIPELINES[kind],
        "tags": ["xformer"],
    }
    monkeypatch.chdir(tmp_path / "theirs")
    done: dict[str, Any] = {}
    exec(block(text_of(tmp_path / "theirs"), "python"), done)  # what a reader would copy
    config = read_json(tmp_path / "theirs/config.json")
    assert type(done["model"]) is getattr(transformers, config["architectures"][0])
    first = next(iter(done["outputs"].values()))
    assert first.isfinite().all()
    if kind == "choice":
        assert first.shape == (1, 2)
    for absent in ("## Training", "## Scores", "## Revisions", "license"):
        assert absent not in text_of(tmp_path / "theirs")
    assert "1. **fresh**: seed `1`" in text_of(tmp_path / "theirs")


@pytest.mark.parametrize("source", ["letters", "pitches", "words"])
def test_a_card_of_a_model_of_mapped_ids(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its example makes the ids that the model reads, if the alphabet is small enough. A text would
    make ids that mean nothing to it."""
    pytest.importorskip("transformers")
    symbols = [f"s{i}" for i in range(300)] if source == "words" else [*"6018"]
    letters = vocabularies.symbols(symbols, separated=source != "letters")
    table = np.arange(len(letters)) % 3 + 5
    ours = replace(fresh("classify"), source=letters, mapping=table)
    checkpoints.save(ours, tmp_path / "ours")
    share.export(tmp_path / "ours", tmp_path / "theirs", "", False)
    monkeypatch.chdir(tmp_path / "theirs")
    example = block(text_of(tmp_path / "theirs"), "python")
    assert "tokenizer" not in example
    done: dict[str, Any] = {}
    exec(example, done)
    text = "" if source == "words" else " ".join("6018")
    assert done["row"] == [2, *table[letters.encode_batch([text])[0]], 3]
    split = split_of(letters, [text])
    batch = to_device(Assembler(split, ours.tokenizer, 20, table).batch(np.arange(1)), ALONE.device)
    expected = ours.model().logits(batch)
    torch.testing.assert_close(done["outputs"].logits, expected, rtol=0, atol=1e-6)


def test_names_cannot_break_a_card(tmp_path: Path) -> None:
    labels = ("a|b", "`c`\n# d", "--- \x7f\u2028é")
    checkpoints.save(fresh("classify", labels), tmp_path / "ours")
    out = tmp_path / 'x "y": [z] #\x7f'
    share.export(tmp_path / "ours", out, "apache-2.0", False)
    assert metadata(out)["license"] == "apache-2.0"
    lines = text_of(out).splitlines()
    assert '# x "y": \\[z\\] \\# ' in lines
    assert "- classes: `a\\|b`, `'c' # d`, `---   é`" in lines


def test_the_base_model_is_the_repository_that_was_imported(tmp_path: Path) -> None:
    hf.to_hf(fresh("mlm"), tmp_path / "theirs")
    imported = hf.from_hf(tmp_path / "theirs", "someone/bert").checkpoint
    checkpoints.save(imported, tmp_path / "ours")
    share.export(tmp_path / "ours", tmp_path / "again", "", False)
    assert metadata(tmp_path / "again")["base_model"] == "someone/bert"
    assert "repository" not in hf.from_hf(tmp_path / "theirs").checkpoint.history[0]


# ------------------------------------------------------------------------------------- of a run

SETTINGS = ["train.steps=6", "train.validate_every=3", "train.log_every=2"]


@pytest.fixture(scope="module")
def run(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that kept steps 0, 3 and 5."""
    run = tmp_path_factory.mktemp("share") / "text run"
    keep = ["train.keep_at=[0, 3, 5]", "seed={all=7, order=2}", "train.select=last"]
    good(forks.run(*training(SMOKE, data.text, run, *SETTINGS, *keep)))
    return run


def export(forks: Forks, *arguments: str | Path) -> Any:
    return forks.run("-m", "xformer.convert", "to-hf", *arguments)


def test_the_card_of_a_run(forks: Forks, data: Toys, run: Path, tmp_path: Path) -> None:
    tuned, out = tmp_path / "tuned", tmp_path / "shared"
    options = [f"init={run}", 'surgery=[{op="reverse_layers"}]', "seed=3", "model.dropout=0.2"]
    good(forks.run(*training(CLASSIFY, data.classes, tuned, *SETTINGS, *options)))
    good(export(forks, tuned, out, "--license", "openrail++"))
    result = read_json(tuned / "result.json")
    [model] = metadata(out)["model-index"]
    assert model["name"] == "shared"
    listed = {part["dataset"]["split"]: part for part in model["results"]}
    assert listed.keys() == result["metrics"].keys() == {"valid", "test"}
    for split, scores in result["metrics"].items():
        assert listed[split]["dataset"]["name"] == "classes"
        metrics = {m["type"]: m["value"] for m in listed[split]["metrics"]}
        assert metrics == {name: round(value, 4) for name, value in scores.items()}
        text = text_of(out)
        for name, value in metrics.items():
            assert f"| {split} | {name} | {value} | 3 |" in text
    store = open_store(data.classes)
    assert (
        f"Data: `classes`. SHA-256 of the checksums of its token ids and labels: `{store.key}`"
        in text
    )
    for split in store.splits:
        rows = store.split(split)
        assert f"| {split} | {rows.rows:,} | {rows.tokens:,} |" in text
    raw = data.raw / "classes/train.tsv"
    assert f"| `train.tsv` | `{file_checksum(raw)}` |" in text
    environment = read_json(tuned / "config.json")["environment"]
    assert f"xformer {environment['xformer']}, torch {torch.__version__}, numpy " in text
    step = result["selected"].partition("_")[2]
    assert f"| step of these weights | {step} |" in text
    assert "| `train.steps` | `6` |" in text
    assert "- rows of up to 64 tokens; training and its scores cut them to 20\n" in text
    assert "3. **reverse_layers**" in text
    assert str(tmp_path) not in text
    assert str(data.raw.parent) not in text
    settings = tomllib.loads(block(text, "toml"))
    assert (settings["data"], settings["init"]) == ("classes", "text run")
    recipe = config.validate(Recipe, {**settings, "run": str(tuned)}).model_dump(mode="json")
    used = read_json(tuned / "config.json")["config"]
    assert {k: v for k, v in recipe.items() if k not in ("data", "init", "model")} == {
        k: v for k, v in used.items() if k not in ("data", "init", "model")
    }
    # the shape is that of `init`; its dropout can be set
    assert "layers" not in settings["model"]
    dropout = ("dropout", "attention_dropout", "head_dropout")
    assert [recipe["model"][name] for name in dropout] == [used["model"][n] for n in dropout]


def test_what_is_not_known_is_left_out(forks: Forks, data: Toys, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "moved")
    settings = read_json(run / "config.json")
    other = tmp_path / "other"
    shutil.copytree(run / read_json(run / "result.json")["selected"], other)
    share.export(other, tmp_path / "lone", "", False)
    assert "model-index" not in metadata(tmp_path / "lone")
    assert "## Training" not in text_of(tmp_path / "lone")
    # the history of the checkpoint itself is known
    assert f"data `{settings['identity']['data']}`" in text_of(tmp_path / "lone")
    # a store of the same name with another content says nothing about this run
    for file in ("config.json", "run_manifest.json"):
        text = (tmp_path / "moved" / file).read_text()
        (tmp_path / "moved" / file).write_text(text.replace(str(data.text), str(data.classes)))
    (tmp_path / "moved/run_manifest.json").unlink()
    share.export(tmp_path / "moved", tmp_path / "stale", "", False)
    assert "made from" not in text_of(tmp_path / "stale")
    assert "seed | all 7, order 2" in text_of(tmp_path / "stale")
    # a checkpoint that the run neither selected nor validated has no scores
    share.export(run / "trajectory/step_5", tmp_path / "five", "", False)
    assert "model-index" not in metadata(tmp_path / "five")


# ---------------------------------------------------------------------------------- trajectories


class Hub:
    """What upload.py asks of the hub."""

    calls: list[tuple[Any, ...]]

    def create_repo(self, repository: str, exist_ok: bool) -> None:
        self.calls.append(("repo", repository, exist_ok))

    def create_branch(self, repository: str, *, branch: str, exist_ok: bool) -> None:
        self.calls.append(("branch", repository, branch, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: Path, revision: str) -> None:
        assert (folder_path / "README.md").is_file()
        self.calls.append(("upload", repo_id, folder_path.name, revision))


def test_every_kept_checkpoint_becomes_a_revision(
    forks: Forks, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "all of them"
    done = good(export(forks, run, out, "--trajectory"))
    assert f"python '{out}/upload.py' USER/NAME" in done.out
    names = ["step-0", "step-3", "step-5", "main"]
    assert f"{out}: 4 revisions: {', '.join(names)}" in done.out
    assert {path.name for path in out.iterdir()} == {*names, "upload.py"}
    sources = {name: run / "trajectory" / name.replace("-", "_") for name in names[:3]}
    for name, source in {**sources, "main": checkpoints.resolve(run)}.items():
        model, report = transformers.AutoModelForMaskedLM.from_pretrained(
            out / name, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        ours = load_file(source / "model.safetensors")
        assert torch.equal(
            model.get_input_embeddings().weight, ours["encoder.embeddings.word.weight"]
        )
        again = hf.from_hf(out / name).checkpoint.weights
        assert again.keys() == ours.keys()
        assert all(torch.equal(weight, again[each]) for each, weight in ours.items())
        assert f"# all of them, {name}\n" in text_of(out / name)
        assert "checkpoints: `step-0`, `step-3`, `step-5`, `main`" in text_of(out / name)
    # step 3 was validated, steps 0 and 5 were not
    assert ["model-index" in metadata(out / name) for name in names] == [False, True, False, True]
    [model_index] = metadata(out / "step-3")["model-index"]
    logged = [e for e in records(run) if (e["event"], e["step"]) == ("validation", 3)]
    for metric in model_index["results"][0]["metrics"]:
        assert metric["value"] == round(logged[0][metric["type"]], 4)
        assert metric["args"] == {"seed": {"all": 7, "order": 2}}

    Hub.calls = []
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Hub))
    monkeypatch.setattr(sys, "argv", ["upload.py", "me/model"])
    runpy.run_path(str(out / "upload.py"))
    assert Hub.calls[0] == ("repo", "me/model", True)
    pairs = zip(Hub.calls[1:-1:2], Hub.calls[2:-1:2], strict=True)
    for (branch, upload), name in zip(pairs, names[:3], strict=True):
        assert branch == ("branch", "me/model", name, True)
        assert upload == ("upload", "me/model", name, name)
    assert Hub.calls[-1] == ("upload", "me/model", "main", "main")
    monkeypatch.setattr(sys, "argv", ["upload.py"])
    with pytest.raises(SystemExit, match=r"python upload\.py USER/NAME"):
        runpy.run_path(str(out / "upload.py"))

    refused(export(forks, run, out, "--trajectory"), "exists; give another output")
    good(export(forks, run, out, "--trajectory", "--overwrite"))
    # an unfinished run has selected nothing yet
    shutil.copytree(run, tmp_path / "unfinished")
    (tmp_path / "unfinished/result.json").unlink()
    names = share.export_trajectory(tmp_path / "unfinished", tmp_path / "some", "", False)
    assert names == ["step-0", "step-3", "step-5"]
    assert "`main`" not in text_of(tmp_path / "some/step-0")


def records(run: Path) -> list[dict[str, Any]]:
    from xformer.monitor import records as read

    return read(run)


def test_exports_that_are_refused(forks: Forks, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(
        export(forks, "micro/english", out, "--trajectory"),
        "micro/english has no trajectory; --trajectory needs a run that was made with "
        "train.keep_at",
    )
    refused(export(forks, run, out, "--license", "My licence"), "'My licence' is not an identifier")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/upload").write_text("")
    refused(
        export(forks, run, tmp_path / "mine", "--trajectory", "--overwrite"),
        "was not written by this command",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_damaged_run_is_refused_in_one_line(forks: Forks, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    text = (tmp_path / "run/config.json").read_text()
    (tmp_path / "run/config.json").write_text(text.replace("0.001", "0.1", 1))
    refused(export(forks, tmp_path / "run", tmp_path / "out"), "config.json is damaged")
    (tmp_path / "run/run_manifest.json").unlink()
    (tmp_path / "run/config.json").write_text('{"identity": {}}\n')
    refused(export(forks, tmp_path / "run", tmp_path / "out"), "config.json is damaged: KeyError")
    # the checkpoint of a run, so that only its scores are looked up in result.json
    selected = read_json(tmp_path / "run/result.json")["selected"]
    (tmp_path / "run/config.json").write_text(text)
    (tmp_path / "run/result.json").write_text("{}")
    said = "result.json is damaged: it names no selected checkpoint"
    refused(export(forks, tmp_path / "run" / selected, tmp_path / "out"), said)
    assert not (tmp_path / "out").exists()


def test_a_card_has_each_environment_of_a_resumed_run(run: Path) -> None:
    path = checkpoints.resolve(run)
    training = share.training_of(path)
    assert training is not None
    resumed = {**training.starts[0], "step": 4}
    resumed["environment"] = {**resumed["environment"], "torch": "9.9", "world_size": 2}
    both = [training.starts[0], {**training.starts[0], "step": 2}, resumed]
    text = Card(checkpoints.load(path), "x", training=type(training)(both, "k", {}, None)).text()
    assert re.findall(r"- from step (\d):.*torch (\S+),.*; (\d process\w*) on", text) == [
        ("0", torch.__version__, "1 process"),
        ("4", "9.9", "2 processes"),
    ]


def test_a_card_tells_no_place_on_the_disk() -> None:
    told = _without_paths(
        {
            "init": "/somewhere/private/bert",
            "surgery": [{"op": "graft", "source": "/somewhere/else/roberta"}, {"op": "clean"}],
            "data": ("~/corpora/english", "books"),
            "mapping": None,
        }
    )
    assert told == {
        "init": "bert",
        "surgery": [{"op": "graft", "source": "roberta"}, {"op": "clean"}],
        "data": ["english", "books"],
    }
