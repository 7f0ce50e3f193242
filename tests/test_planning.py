"""What a study says before it runs: notes whose numbers come from the settings, deviations,
checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import looking
import numpy as np
import pytest
import test_study
import torch
from helpers import CLASSIFY, ROOT, SMOKE, Forks, good, refused, task, training
from plans import SCALES
from test_study import changed, finish, html_of, markdown_of, plan_of
from toys import Toys

from xformer.config import each, read_recipe
from xformer.data.batch import Batch
from xformer.data.errors import BadInput
from xformer.data.files import write_json
from xformer.model.config import ModelConfig
from xformer.preprocess import cli
from xformer.preprocess.tasks import dna, glue, protein, tags
from xformer.study.forecast import Forecast, TokenizerFacts, made_kind
from xformer.study.notes import PLACEHOLDER, Notes, in_words, listed
from xformer.study.plan import Plan
from xformer.study.reading import read_study
from xformer.study.results import Results
from xformer.tasks.task import Model

file, letters = test_study.file, test_study.data  # fixtures: the study "Letters"


# --------------------------------------------------------------------- numbers in sentences


def notes_of(plan: Plan) -> Notes:
    return Notes(Forecast(plan))


@pytest.mark.parametrize(
    ("note", "wanted"),
    [
        ("{finetune: batch.rows} rows", "32 rows"),
        ("{finetune: optim.lr}; {finetune(rate=high): optim.lr}", "1e-5 or 0.001; 0.001"),
        ("{finetune: train.epochs}", "1"),  # a whole number has no decimals
        ("{finetune: optim.betas}", "0.9 and 0.999"),
        # the model that the runs start from, which another stage makes
        ("{finetune: model.hidden} {finetune: model.layers}", "16 1"),
        ("{finetune: model.vocab_size}", "?"),  # decided by the tokenizer, which does not exist yet
        ("{made.task: model.layers}", "?"),  # made.task is not a checkpoint
        ("{finetune(start=scratch, rate=low): runs}", "2"),
        ("{finetune: count.seed} {finetune: levels.start}", "2 pretrained and scratch"),
        ("{made.letters: --valid}", None),  # a path that is not filled in
        ("{made.task: --output}", None),
        ("{paper: 200,000 steps}", "200,000 steps"),
    ],
)
def test_a_note_has_the_numbers_of_what_runs(
    file: Path, tmp_path: Path, note: str, wanted: str | None
) -> None:
    changed(file, ("[needs.data]", f"notes = ['{note}']\n[needs.data]"))
    plan = plan_of(file, tmp_path)
    if wanted is None:
        with pytest.raises(BadInput, match="has no value of"):
            notes_of(plan)
    else:
        assert notes_of(plan).notes == (wanted,)


def test_values_are_listed_as_sentences_have_them() -> None:
    assert listed([32, 16, 128, 16]) == "16, 32 or 128"
    assert listed([5, 1, 2, 3, 4]) == "1 to 5"
    assert listed([0.0, 5e-5]) == "0 or 5e-5"
    assert listed(["adamw", "adam"]) == "adamw or adam"
    assert listed([2, None]) == "?"
    assert [in_words(v) for v in (200_000, 2.5e-5, 0.01, True, "23500000", "90:120", 1e-12)] == [
        "200,000",
        "2.5e-5",
        "0.01",
        "true",
        "23,500,000",
        "90:120",
        "1e-12",
    ]
    assert in_words("²") == "²"  # a digit, but not a number for `int`


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ("{fintune: runs}", "there is no stage 'fintune'; did you mean finetune?"),
        ("{finetune: optim.rate}", "there is no key 'optim.rate'"),
        ("{finetune: optim}", "there is no key 'optim'"),
        ("{pretrain: train.epochs}", "does not use train.epochs, as it has train.steps"),
        ("{finetune: count.sed}", "does not vary by 'sed'; did you mean seed?"),
        ("{finetune(rate=middle): optim.lr}", "no run of the stage finetune at rate=middle"),
        ("{finetune(rate): optim.lr}", "'rate' is not of the form FACTOR=LEVEL"),
        ("{made.lettres: --lines}", "there is no made.lettres; did you mean letters?"),
        ("{need.data}", "a brace outside a placeholder"),
        ("{paper: a", "a brace outside a placeholder"),
    ],
)
def test_a_wrong_placeholder_is_refused_at_planning(
    forks: Forks, file: Path, tmp_path: Path, note: str, words: str
) -> None:
    changed(file, ("[needs.data]", f"notes = ['{note}']\n[needs.data]"))
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        file,
        "scale=mini",
        "--dry-run",
        f"output={tmp_path / 's'}",
    ]
    ended = forks.run(*line)
    refused(ended, f"{file}: notes: ", words)


DEVIATIONS = """
[[deviations]]
what = "seeds"
paper = "5"
ours = "{finetune: count.seed}"
why = "time | <money>"
[[deviations]]
what = "the curve's"
paper = "p"
ours = "o"
why = "w"
curves = ["loss"]
[[curves]]
name = "loss"
title = "Loss"
stage = "finetune"
panels = "rate"
lines = "start"
[[scales.mini.deviations]]
what = "{finetune: optim.lr}"
paper = "{paper: 10} of them"
ours = "these"
why = "mini"
tables = ["main"]
[[scales.paper.deviations]]
what = "of another scale"
paper = "p"
ours = "o"
why = "w"
[needs.data]"""


def test_deviations_stand_below_what_they_concern(
    file: Path, letters: Path, tmp_path: Path
) -> None:
    changed(file, ("[needs.data]", DEVIATIONS))
    plan = plan_of(file, tmp_path, data=str(letters))
    finish(plan, lambda **_: 0.5)
    for run in plan.runs("finetune"):
        lines = [f'{{"event": "train", "step": {i}, "loss": 1}}' for i in (1, 2)]
        (run.path / "log.jsonl").write_text("\n".join(lines))
    results = Results(plan)
    text = markdown_of(results)
    table, _, curves = text.partition("## Accuracy")[2].partition("## Loss")
    assert "| where we differ | the paper | here | why |" in table
    assert "| seeds | 5 | 2 | time \\| <money> |" in table
    assert "| 1e-5 or 0.001 | 10 of them | these | mini |" in table
    assert table.index("| scratch |") < table.index("| seeds |") < table.index("Every score")
    assert "the curve's" not in table
    assert "| the curve's | p | o | w |" in curves
    assert "| seeds |" in curves
    assert "1e-5 or 0.001" not in curves
    assert "of another scale" not in text
    html = html_of(results, {}, tmp_path)
    assert "<td class=words>seeds<td class=words>5<td class=words>2" in html
    assert "time | &lt;money&gt;" in html


def test_a_deviation_of_no_table_is_refused(file: Path, tmp_path: Path) -> None:
    changed(file, ("[needs.data]", DEVIATIONS.replace('["main"]', '["mian"]')))
    with pytest.raises(BadInput, match="there is no 'mian'; did you mean main"):
        plan_of(file, tmp_path)
    # a study laid over another shows other tables, and inherits the deviations
    other = file.with_name("other.toml")
    other.write_text(f'base = "{file.name}"\ntitle = "Other"\n')
    assert len(read_study(other, "mini").deviations) == 3


# names and citations that contain a number
NAMES = re.compile(
    r"\b(tables?|figures?|sections?|appendi(x|ces)) [A-Z]?[\d.]*\d(( to|,| and) [\d.]*\d)*"
    r"|\b[A-Z][a-z]+ (et al\. )?(19|20)\d\d\b"  # Devlin et al. 2019, Chiang & Lee 2020
    r"|\b[a-z]+20\d\d(-\w+)+"  # studies: kao2021-figure2
    r"|\bSST-2\b|\bMAESTRO v1\b|\bH3K9ac\b|\bH[34]\b"
)
WORDS = "two three four five six seven eight nine ten eleven twelve twenty hundred thousand million"
NUMBER = re.compile(rf"\d|\b({WORDS.replace(' ', '|')})\b", re.IGNORECASE)


def typed(text: str) -> str:
    """The first number that is typed by hand in a sentence; empty if there is none."""
    match = NUMBER.search(NAMES.sub("", PLACEHOLDER.sub("", text)))
    return match[0] if match else ""


def test_typed_numbers_are_seen() -> None:
    assert typed("{finetune: runs} runs of {paper: 3 tasks} of SST-2, table 5, appendix A.3") == ""
    assert typed("weights of Devlin et al. 2019, figures 2 and 3, kao2021-figure2") == ""
    assert typed("{finetune: runs} runs, 3 seeds") == "3"
    assert typed("Six mappings") == "Six"
    assert typed("a rate of 1e-4") == "1"


# ------------------------------------------------------------- runs and the models they start from


FITS = f"""
[made.words]
command = ["preprocess.py", "tokenizer", "--kind", "wordpiece", "--vocab-size", "90", "--input",
           "{{need.data}}/train.txt", "--output", "{{out}}"]
[made.wordy]
command = ["preprocess.py", "text", "--input", "{{need.data}}/train.txt", "--tokenizer",
           "{{made.words}}", "--output", "{{out}}"]
[made.paired]
command = ["preprocess.py", "pairs", "{{made.wordy}}", "--kind", "next", "--output", "{{out}}"]
[made.alphabet]
command = ["preprocess.py", "tokenizer", "--kind", "symbols", "--alphabet", "ACGT", "--output",
           "{{out}}"]
[made.four]
command = ["preprocess.py", "text", "--input", "{{need.data}}/train.txt", "--tokenizer",
           "{{made.alphabet}}", "--output", "{{out}}"]
[stages.wide]
recipe = "{ROOT}/recipes/pretrain/smoke.toml"
settings.data = "{{made.four}}"
settings.model = {{ hidden = 32, intermediate = 16, layers = 1 }}
[stages.look]
command = ["-m", "xformer.analysis", "capture", "{{stage.pretrain}}", "max_tokens=64",
           "data={{made.letters}}", "out={{out}}/x.h5"]
vary.seed = [0]
[stages.score]
command = ["evaluate.py", "{{stage.finetune(rate=low)}}", "data={{made.task}}",
           "out={{out}}/result.json"]
vary.seed.0 = {{}}
vary.start.pretrained = {{}}
vary.rate.low = {{}}
"""
for stage in ("look", "score"):
    FITS += f"""
[[pictures]]
name = "{stage}"
title = "{stage}"
stage = "{stage}"
file = "x.svg"
"""


def finetune(setting: str) -> tuple[str, str]:
    """A change that gives the fine-tuning another setting."""
    return "settings.train.epochs = 1", f"settings.train.epochs = 1\nsettings.{setting}"


def pretrain(setting: str) -> tuple[str, str]:
    return "settings.train = { steps = 4 }", f"settings.train.steps = 4\nsettings.{setting}"


def metric(name: str) -> tuple[str, str]:
    return 'columns = "rate"\n', f'columns = "rate"\nmetric = "{name}"\n'


def corpus(name: str) -> tuple[str, str]:
    """A change that makes the pre-training use another store."""
    return 'settings.data = "{made.letters}"', f'settings.data = "{{made.{name}}}"'


def surgery(operation: str) -> tuple[str, str]:
    return '{ op = "clean" }', operation


TRANSPLANT = '{ op = "transplant", source = "{stage.wide}" }'
SUBSTITUTE = '{ op = "substitute_unused", store = "{made.wordy}" }'
OTHER = "made.task was made with a different tokenizer from the checkpoint's"
BY_WORDS = ('"dna", "--input"', '"dna", "--tokenizer", "{made.words}", "--input"')
TINY = ("{ hidden = 16, intermediate = 16, layers = 1 }", "{ vocab_size = 8 }")
CUT = (
    "[made.alphabet]",
    """[made.cut]
command = ["-m", "xformer.surgery", "{need.data}/m", "{out}", "reverse_layers", "--seed", "3"]
[made.alphabet]""",
)
OF_CUT = 'init = "{stage.pretrain}"', 'init = "{made.cut}"'
MISFITS: list[tuple[list[tuple[str, str]], list[str]]] = [
    ([], []),  # without a change everything fits
    # the model that another stage makes
    ([finetune("batch.max_tokens = 129")], ["batch.max_tokens=129: the model takes 128 at most"]),
    ([finetune("probe.layer = 2")], ["probe.layer=2: the model has 1 layer; give 0 (the"]),
    ([finetune("model.layers = 2")], ["model.layers=2: the checkpoint given as init has 1"]),
    ([finetune("model.hidden = 32")], ["model.hidden=32 is not a multiple of model.heads=12"]),
    ([pretrain("batch.tokens = 32")], ["batch.tokens=32 is below batch.max_tokens="]),
    (
        [finetune('train.metric = "acc"')],
        ["train.metric='acc' is not a metric of classify, which has loss, accuracy, f1, mcc"],
    ),
    # the arguments of an analysis, and of evaluate.py
    ([("out={out}/result.json", "ou={out}/r.json")], ["unknown key ou; did you mean out?"]),
    ([("out={out}/result.json", "out={out}/r.csv")], ["scores are written as JSON; give a name"]),
    (
        [('"out={out}/result.json"', '"top=3", "out={out}/r.json"')],
        ["top= cannot be combined with data=. With data= you can set split, out, "],
    ),
    ([('"capture"', '"captur"')], ["unknown analysis 'captur'; did you mean capture?"]),
    ([("max_tokens=64", "max_token=64")], ["unknown key max_token; did you mean max_tokens?"]),
    ([('"capture"', '"pwcca"')], ["pwcca takes 2 checkpoints first, then key=value; given: "]),
    # kinds of stores and heads
    (
        [("classify.toml", "regress.toml"), metric("spearman")],
        ["head=regress needs a store of kind score, which ", "; made.task is of kind class"],
    ),
    (
        [("classify.toml", "squad.toml"), finetune("batch.max_tokens = 64"), metric("f1")],
        ["head=span needs a store of kind span, which ", "; made.task is of kind class"],
    ),
    (
        [('data = "{made.task}"', 'data = "{made.letters}"')],
        ["head=classify needs a store of kind class, which ", "; made.letters is of kind text"],
    ),
    # what is typed and is not there, or is not kept
    (
        [('init = "{stage.pretrain}"', 'init = "micro/englsh"')],
        ["finetune seed=0", "micro/englsh does not exist", "did you mean micro/english?"],
    ),
    ([surgery('{ op = "transplant", source = "no/model" }')], ["no/model does not exist"]),
    ([('data = "{made.letters}"', 'data = "no/store"')], ["pretrain: no/store is not a store"]),
    (
        [('init = "{stage.pretrain}"', 'init = "{stage.pretrain}/trajectory/step_3"')],
        ["finetune seed=0", "pretrain keeps no weights at step 3 (train.keep_at=[])"],
    ),
    (
        [
            ('init = "{stage.pretrain}"', 'init = "{stage.pretrain}/trajectory/step_3"'),
            pretrain("train.keep_at = 'log:2'"),
        ],
        ["pretrain keeps no weights at step 3 (train.keep_at=log:2): add this step"],
    ),
    (
        [
            ('init = "{stage.pretrain}"', 'init = "{stage.pretrain}/trajectory/step_4"'),
            pretrain("train.keep_at = 'log:2'"),
        ],
        [],
    ),
    # splits
    (
        [('rows = "start"', 'rows = "start"\nminus = "wide"'), metric("f1")],
        ["table main: wide will have no 'f1'"],
    ),
    ([metric("train+valid.accuracy")], ["split 'train+valid': train is the last training line"]),
    ([("vary.seed = [0, 1]", "vary.seed = [0, 1, 1]")], ["vary.seed has the level '1' twice"]),
    (
        [('columns = "rate"\n', 'columns = "rate"\nsplit = "tset"\n')],
        ["table main: finetune seed=0", "no split 'tset'; it can have train, valid, "],
    ),
    ([metric("tset.accuracy")], ["table main: finetune seed=0", "no split 'tset'; it can have "]),
    (
        [('"data={made.task}"', '"data={made.task}", "split=tset"')],
        ["score seed=0", "split=tset: made.task can have train, valid, "],
    ),
    # vocabularies: a model of words, or of four letters and five special tokens
    ([corpus("wordy")], [OTHER, "give mapping=symbols:0, "]),
    ([corpus("wordy"), finetune("mapping = 'shift:5'")], ["mapping=shift:5 needs a store"]),
    (
        [corpus("four"), BY_WORDS, finetune("mapping = 'ids'")],
        ["mapping=ids: made.task has 90 ids, the model 9 embeddings"],
    ),
    ([corpus("four"), TINY], ["pretrain: model.vocab_size=8 is below the tokenizer's 9"]),
    ([surgery(TRANSPLANT)], ["start=scratch", "has word embeddings 32 wide, the checkpoint 16"]),
    ([surgery(SUBSTITUTE)], ["store=made.wordy was made with a different tokenizer"]),
    (
        [surgery(SUBSTITUTE.replace("wordy", "paired"))],
        ["store=made.paired was made with a different tokenizer"],
    ),
    # commands
    ([('"dna", "--input"', '"dna", "--inputs"')], ["made.task: unrecognized arguments: --inputs"]),
    ([('"task", "dna"', '"task", "dan"')], ["made.task: NAME: 'dan' is not one of tsv, "]),
    (
        [
            ('"symbols", "--alphabet"', '"symbols", "--vocab-size", "many", "--alphabet"'),
            corpus("four"),
        ],
        ["made.alphabet: argument --vocab-size: 'many' is not a whole number"],
    ),
    (
        [('["preprocess.py", "pairs"', '["preproces.py", "pairs"'), corpus("paired")],
        ["made.paired: there is no script 'preproces.py'; did you mean preprocess.py?"],
    ),
    (
        [('"xformer.analysis", "capture"', '"xformer.analyze", "capture"')],
        ["look seed=0: there is no module 'xformer.analyze'; did you mean xformer.analysis?"],
    ),
    (
        [('"{stage.pretrain}", "max_t', '"{stage.pretrain}/trajectory/step_3", "max_t')],
        ["look seed=0: pretrain keeps no weights at step 3 (train.keep_at=[]): add this step"],
    ),
    ([CUT, OF_CUT], []),
    ([(CUT[0], CUT[1].replace("--seed", "--sede")), OF_CUT], ["arguments: --sede"]),
    (
        [(CUT[0], CUT[1].replace('"{need.data}/m", "{out}"', '"{out}", "{need.data}/m"')), OF_CUT],
        ["made.cut reads {out}, which it is to write"],
    ),
    (
        [("max_tokens=64", "max_tokens=200")],
        ["max_tokens=200: pretrain takes rows of at most 128 tokens"],
    ),
    ([("max_tokens=64", "layers=2")], ["layers=2: pretrain has the layers 0 to 1; give all, "]),
    ([("max_tokens=64", "split=dev")], ["split=dev: made.letters can have train, valid, "]),
    ([("max_tokens=64", "names=a,b")], ["names=a,b: give 1 different names, one for each"]),
    (
        [('"data={made.task}"', '"data={made.letters}"')],
        [
            "score seed=0",
            "head=classify needs a store of kind class, which ",
            "; made.letters is of kind text",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "words"), MISFITS)
def test_what_does_not_fit_is_refused_before_anything_is_made(
    forks: Forks,
    file: Path,
    letters: Path,
    tmp_path: Path,
    changes: list[tuple[str, str]],
    words: list[str],
) -> None:
    file.write_text(file.read_text().replace("[scales.mini]", f"{FITS}\n[scales.mini]"))
    changed(file, *changes)
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        file,
        "scale=mini",
        "--dry-run",
        f"output={tmp_path / 's'}",
    ]
    for needs in ([], [f"needs.data={letters}"]):
        ended = forks.run(*line, *needs)
        if words:
            refused(ended, f"{file}: ", *words)
        else:
            assert "jobs" in good(ended).out
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("size", [[], ["--vocab-size", "8192"]])
def test_a_tokenizer_of_words_may_be_the_one_of_a_checkpoint(file: Path, size: list[str]) -> None:
    """It is saved as one of symbols, and its text may have fewer words than --vocab-size."""
    options = [*size, "--kind", "words", "--input", "{need.data}/train.txt"]
    command = ["preprocess.py", "tokenizer", *options, "--output", "{out}"]
    changed(
        file,
        ("[made.task]", f"[made.own]\ncommand = {command}\n[made.task]"),
        ('"--tokenizer", "{made.task}"', '"--tokenizer", "{made.own}"'),
    )
    plan = plan_of(file, file.parent)
    own = Forecast(plan).made(next(job for job in plan.jobs.values() if job.name == "made.own"))
    trained = TokenizerFacts("runs/pre", 64, "words", fingerprint="1")
    assert not own.tokenizer.is_other(trained)
    for other in (replace(trained, symbols=""), replace(trained, symbols="letters")):
        assert own.tokenizer.is_other(other)


def test_a_split_that_a_store_lacks_is_refused(file: Path, tmp_path: Path) -> None:
    """preprocess.py could write a split test, but this store has none."""
    splits = {name: {"rows": 2, "tokens": 9} for name in ("train", "valid")}
    (tmp_path / "store").mkdir()
    store = {"kind": "class", "metric": "accuracy", "splits": splits}
    write_json(tmp_path / "store/store.json", store)
    need = f'[needs.task]\nabout = "x"\npath = "{tmp_path}/store"\n[needs.data]'
    task = 'settings.data = "{made.task}"', 'settings.data = "{need.task}"'
    changed(file, ("[needs.data]", need), task)
    words = "letters.toml: table main: finetune seed=0 start=pretrained rate=low will have no split"
    with pytest.raises(BadInput, match=f"{words} 'test'; it can have train, valid$"):
        Forecast(plan_of(file, tmp_path)).check()
    changed(file, metric("train.loss"))  # in the log
    Forecast(plan_of(file, tmp_path)).check()


def test_a_split_without_labels_is_refused(forks: Forks, file: Path, tmp_path: Path) -> None:
    """The store has a split test, but its rows have no labels."""
    raw, store = tmp_path / "raw", tmp_path / "store"
    raw.mkdir()
    rows = "".join(f"ACGT\t{'yes' if i % 2 else 'no'}\n" for i in range(8))
    for name in ("train.tsv", "valid.tsv"):
        (raw / name).write_text(f"sequence\tlabel\n{rows}")
    (raw / "test.tsv").write_text("sequence\nACGT\nCCGT\n")
    good(forks.run("preprocess.py", "task", "dna", "--input", raw, "--output", store))
    need = f'[needs.task]\nabout = "x"\npath = "{store}"\n[needs.data]'
    task = 'settings.data = "{made.task}"', 'settings.data = "{need.task}"'
    changed(file, ("[needs.data]", need), task)
    words = "rate=low will have no scores on 'test', which has no labels in "
    with pytest.raises(BadInput, match=f"{words}{store}$"):
        Forecast(plan_of(file, tmp_path)).check()
    changed(file, metric("train.loss"))  # in the log
    Forecast(plan_of(file, tmp_path)).check()


def test_a_checkpoint_that_is_there_is_read_and_one_that_is_not_is_not_judged(
    forks: Forks, file: Path, tmp_path: Path
) -> None:
    need = '[needs.model]\nabout = "x"\nget = "x"\n[needs.data]'
    changed(file, ("[needs.data]", need), ("{stage.pretrain}", "{need.model}"))
    looking.checkpoint(tmp_path / "model", max_positions=20)
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        file,
        "scale=mini",
        "--dry-run",
        f"output={tmp_path / 's'}",
    ]
    shown = good(forks.run(*line)).out
    assert "missing: model" in shown
    assert "not checked yet, because the model to start from is missing: " in shown
    ended = forks.run(*line, f"needs.model={tmp_path / 'model'}")
    refused(ended, "finetune seed=0", "batch.max_tokens=128: the model takes 20 at most")
    changed(file, finetune("batch.max_tokens = 20"))
    refused(forks.run(*line, f"needs.model={tmp_path / 'model'}"), "a different tokenizer")
    changed(file, finetune("mapping = 'symbols:0'"))
    good(forks.run(*line, f"needs.model={tmp_path / 'model'}"))


@pytest.mark.slow
def test_a_transplant_reads_what_its_tokenizer_wrote(
    forks: Forks, learned: dict[str, Path], data: Toys, tmp_path: Path
) -> None:
    """If an encoder of letters gets the word embeddings of another encoder, it can read that
    encoder's store.
    """
    start = training(SMOKE, data.splice, tmp_path / "letters", "train.steps=1")
    good(forks.run(*start))
    line = training(
        CLASSIFY, data.classes, tmp_path / "run", f"init={tmp_path / 'letters'}", "train.steps=1"
    )
    refused(forks.run(*line), "made with a different tokenizer from the checkpoint's")
    words = f"surgery=[{{op='transplant', source='{learned['text']}'}}]"
    good(forks.run(*line, words))


# ------------------------------------------------------------- every study, every stage, one batch


def imported(path: Path, family: str, **sizes: int) -> Path:
    """A Hugging Face directory with the only file that planning reads, config.json."""
    layers, hidden = sizes.get("layers", 12), sizes.get("hidden", 768)
    config = {
        "model_type": family,
        "vocab_size": sizes.get("vocab", 30522),
        "max_position_embeddings": 514 if family == "roberta" else 512,
        "type_vocab_size": 1 if family == "roberta" else 2,
        "pad_token_id": 1 if family == "roberta" else 0,
        "hidden_act": "gelu_new" if family == "albert" else "gelu",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64 if layers > 6 else 12,
        "intermediate_size": 4 * hidden,
        "embedding_size": 128,
    }
    if family == "distilbert":
        config |= {"n_layers": layers, "dim": hidden, "n_heads": 12, "hidden_dim": 4 * hidden}
        config |= {"activation": "gelu", "sinusoidal_pos_embds": False}
    path.mkdir()
    write_json(path / "config.json", config)
    return path


def micro(path: Path) -> Path:
    """An encoder of the micro family with the only files that planning looks at."""
    model = read_recipe(ROOT / "recipes/pretrain/micro.toml")["model"]
    path.mkdir()
    write_json(path / "manifest.json", {})
    write_json(path / "config.json", {"model": {**model, "vocab_size": 8192}})
    return path


FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "bert": ("bert", {}),
    "bert-large": ("bert", {"layers": 24, "hidden": 1024}),
    "roberta": ("roberta", {"vocab": 50265}),
    "albert": ("albert", {"vocab": 30000}),
    "bert-chinese": ("bert", {"vocab": 21128}),
    "distilbert": ("distilbert", {"layers": 6}),
    "minilm": ("bert", {"layers": 6, "hidden": 384}),
    "de": ("bert", {"vocab": 30000}),
    "zh": ("bert", {"vocab": 21128}),
    "es": ("bert", {"vocab": 31002}),
    "jp": ("bert", {"vocab": 32000}),
}


# encoders of the micro family, by the names of their needs
MICRO = ("english-encoder", "brackets-encoder", "nesting-encoder")
Planned = Callable[[Path, str], Forecast]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The plan of each study at each scale. The shapes of the models are known, and there is no
    data.
    """
    root = tmp_path_factory.mktemp("models")
    models = {name: imported(root / name, of, **sizes) for name, (of, sizes) in FAMILIES.items()}
    models |= {name: micro(root / name) for name in MICRO}

    @cache
    def planned(path: Path, scale: str) -> Forecast:
        study = read_study(path, scale)
        # at the scale mini, studies call MiniLM `bert`
        mini = {"bert": models["minilm"]} if scale == "mini" else {}
        known = {name: str(place) for name, place in (models | mini).items() if name in study.needs}
        return Forecast(Plan(study, root / "studies", known))

    return planned


@pytest.mark.parametrize(("path", "scale"), SCALES, ids=lambda part: getattr(part, "stem", part))
@pytest.mark.slow
def test_no_number_is_typed_by_hand(path: Path, scale: str, plans: Planned) -> None:
    study = plans(path, scale).plan.study
    for text in (*study.notes, *(one.ours for one in study.deviations)):
        assert not typed(text), f"{typed(text)} in {text!r}"
    filled = Notes(plans(path, scale))
    said = [*filled.notes, *(text for one in filled.deviations for text in one.cells())]
    assert "?" not in "".join(said)  # every value is known if the models are


def longest_rows(config: ModelConfig, head: str, length: int) -> tuple[Model, Batch[torch.Tensor]]:
    """A model without storage, and a batch of two rows of `length` tokens for it."""
    assert length <= config.max_positions
    ids = np.full(2 * length, config.vocab_size - 1)
    places = np.tile(np.arange(length), 2)
    second = (places >= length // 2).astype(np.int64)
    some = np.arange(0, 2 * length, 7) if head in ("mlm", "tag") else None
    labels: dict[str, np.ndarray] = {
        "regress": np.zeros(2, np.float32),
        "span": np.zeros((2, 2), np.int64),
    }
    label = labels.get(head, np.zeros(2, np.int64))

    def meta(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to("meta")

    asked = None if some is None else meta(some)
    ends = meta(np.array([0, length, 2 * length], np.int32))
    with torch.device("meta"):
        model = Model(config, task(head, 3)).eval()
    table = model.encoder.embeddings.position
    assert table is None or config.first_position + length <= table.num_embeddings
    rows = meta(ids), meta(places), meta(second), ends
    return model, Batch(*rows, length, meta(label), asked, asked)


@pytest.mark.parametrize("scale", ["mini", "small", "full", "short", "paper"])
def test_every_stage_of_every_study_takes_a_batch(scale: str, plans: Planned) -> None:
    """The longest rows of each stage go through the model that it trains, once for each shape."""
    kinds: set[tuple[ModelConfig, str, int]] = set()
    for path in (path for path, of in SCALES if of == scale):
        forecast = plans(path, scale)
        forecast.check()
        for job in forecast.plan.jobs.values():
            if job.recipe is None:
                continue
            recipe = forecast.recipe(job)
            config, store = forecast.made(job).shape, forecast.store(recipe.data)
            if config is None and "/trajectory/" in (recipe.init or ""):
                continue  # known when the run that keeps it has begun
            assert config is not None, f"{path}: {job.name}: its model is not known"
            assert store.kind is not None
            if config.vocab_size == 0:  # the tokenizer's
                size = forecast.at(str(job.path)).tokenizer.size
                assert size, f"{path}: {job.name}: its vocabulary is not known"
                config = config.model_copy(update={"vocab_size": size})
            # all layers are alike
            config = config.model_copy(update={"layers": min(2, config.layers)})
            kinds.add((config, recipe.head, recipe.batch.max_tokens))
    assert len(kinds) > (1 if scale in ("full", "short") else 5)
    for config, head, length in kinds:
        model, batch = longest_rows(config, head, length)
        loss = model.loss(batch)
        assert loss.total.shape == ()


@pytest.mark.parametrize(("path", "scale"), SCALES, ids=lambda part: getattr(part, "stem", part))
def test_no_row_of_a_corpus_is_cut(path: Path, scale: str, plans: Planned) -> None:
    """A store's longest row and two special tokens fit into a row of a batch."""
    forecast = plans(path, scale)
    plan = forecast.plan
    commands = {str(job.path): job.command for job in plan.jobs.values()}
    for job in plan.jobs.values():
        if job.recipe is not None and job.recipe["head"] == "mlm":
            recipe = forecast.recipe(job)
            for store in each(recipe.data):
                options = dict(pairwise(commands[store]))
                longest = options.get("--max-tokens") or options["--lengths"].partition(":")[2]
                assert int(longest) + 2 <= recipe.batch.max_tokens, job.name


def test_kinds_of_stores_are_those_that_the_commands_make() -> None:
    forms = {name: form.kind for name, form in (dna.DNA_TASKS | protein.PROTEIN_TASKS).items()}
    kinds = forms | {
        name: "class" if task.labels else "score" for name, task in glue.GLUE_TASKS.items()
    }
    kinds |= dict.fromkeys(tags.ABOUTS, "tag") | {"tsv": None}
    kinds |= {"dna/splice": "class", "music/maestro": "class", "choice": "choice"}
    assert set(kinds) == set(cli.TASK_READERS)
    for name, kind in kinds.items():
        command = ["preprocess.py", "task", name, "--input", "x"]
        assert made_kind(command) == (kind or "class")
        if kind is None:  # the user says
            assert made_kind([*command, "--kind", "score"]) == "score"
    assert made_kind(["preprocess.py", "task", "squad"]) == "span"
    assert made_kind(["preprocess.py", "tokenizer"]) is None
