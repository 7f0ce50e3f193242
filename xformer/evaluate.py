"""Score a checkpoint on a split or on minimal pairs, predict the rows of a file, or fill masks."""

from __future__ import annotations

if __name__ == "__main__":  # `python -m xformer.evaluate`: before torch is imported
    from xformer.start import as_command

    as_command("evaluate")

import csv
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import minimal_pairs, provenance
from xformer.checkpoint import Checkpoint
from xformer.config import MaybePaths, Settings, help_text, parse_overrides, validate
from xformer.convert.recorded import Training, training_of
from xformer.data import mapping
from xformer.data.batch import Assembler, Batch
from xformer.data.display import put, say
from xformer.data.errors import BadInput, Failure, typed
from xformer.data.files import write_json, write_text
from xformer.data.joined import open_stores
from xformer.data.outputs import check_writable
from xformer.data.spelled import Spelled
from xformer.data.store import TEXTS, Split, Store, open_store
from xformer.data.tokenizers import Tokenizer, load_tokenizer, unknown_note
from xformer.minimal_pairs import PLL
from xformer.ops import native
from xformer.parallel import processes
from xformer.parallel.precision import fast_on, reason_for_bf16, speed_note
from xformer.parallel.processes import ALONE, Ranks, SystemConfig
from xformer.predictions import write
from xformer.scoring import check_kind, long_windows, longest_remedy, outputs_of, score
from xformer.tasks.known import TASKS
from xformer.tasks.task import Predictions, Task, as_table, check_finite, to_device

# A function that writes the rows of a file as the split `input` of a new store. Arguments: file,
# head, tokenizer, path of the store, columns, id. It is in preprocess/, which this module may not
# import.
WriteRows = Callable[[Path, dict[str, Any], Tokenizer, Path, Sequence[str], str], None]

# the keys that can be combined with each form of the command
FORMS = {
    "data": ("split", "out", "predictions", "threshold", "mapping", "system"),
    "text": ("top", "system"),
    "input": ("columns", "id", "out", "threshold", "system"),
    "blimp": ("pll", "pairs", "tokenizer", "out", "predictions", "system"),
}


def _names(value: Any) -> Any:
    """One column as a list of one. A number is the name of a column without a header."""
    listed = value if isinstance(value, list | tuple) else (value,)
    return tuple(str(name) if isinstance(name, int) else name for name in listed)


class EvaluateConfig(Settings):
    """What to evaluate: give one of data, text, input and blimp."""

    data: MaybePaths = None
    """The store to score the checkpoint on, or a list of stores, whose rows are joined."""
    split: str = "test"
    """The split of the store to score."""
    out: str | None = None
    """Write the scores to this file as JSON. With input=, write the predictions to it instead, as a
    tab-separated table, or, if the name ends in .npz, as arrays (see predictions=). For span heads,
    a name that ends in .json gives JSON for SQuAD's script. With blimp=, a name that ends in .csv
    gives the table that is printed."""
    predictions: str | None = None
    """Write the predictions to this file as a tab-separated table, with one line per row (for
    head=choice: per question) and a column `gold` if the split has labels. Without labels, this
    is all that can be written of a split. For span heads, write
    JSON that maps each question's id to its answer. If the name ends in .npz, write the outputs and
    labels of every row instead, in a file that xformer.predictions.read opens. With blimp=, the
    table has a line per pair with the scores of both sentences."""
    threshold: float | None = None
    """For span heads: leave a question unanswered if "no answer" scores higher than its best span
    by more than this. To find a good value, score the split valid, which prints best_threshold.
    Default: 0 if the split has questions without an answer; otherwise all questions are
    answered."""
    text: str | None = None
    """A text with mask tokens, such as 'The [MASK] sat.'. The likeliest tokens for each mask are
    printed."""
    top: int = Field(5, ge=1)
    """How many tokens to print for each mask."""
    input: str | None = None
    """A file of raw rows to predict, in any format that preprocess.py reads for the checkpoint's
    task: FASTA, csv, tsv, JSON lines, parquet, MIDI, SQuAD, CoNLL's columns. Labels may be missing.
    A file that contains only texts needs no header."""
    columns: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    """The column of input= that holds the text, or a list of columns if a row has several texts:
    the two texts of a pair; a question and its context; a context and its endings. Empty: the
    columns that the training data had."""
    id: str | None = None
    """The column of input= that names each row. The predictions have it as their column `id`.
    Default: the column of --id in training, or `id`, if the file has it."""
    mapping: str | None = None
    """How token ids of the store become those of the model (see `python train.py --help`). Default:
    the mapping that the checkpoint was trained with."""
    blimp: str | None = None
    """Minimal pairs on which to score a masked language model: the archive BLiMP.zip, the
    directory to which it was unpacked, or a single file of JSON lines with sentence_good,
    sentence_bad, UID (the paradigm) and linguistics_term (the phenomenon)."""
    pll: PLL = "word-l2r"
    """The pseudo-log-likelihood (PLL) by which sentences are compared. original: each token is
    predicted while it alone is masked, and the log-probabilities are added up (Salazar et al.
    2020). word-l2r: the tokens that follow in the same word are masked too (Kauf & Ivanova
    2023)."""
    pairs: int = Field(0, ge=0)
    """Score only this many pairs of each paradigm, the first ones. 0: all."""
    tokenizer: str | None = None
    """The tokenizer of the minimal pairs, whose ids are used unchanged as the model's: a tokenizer,
    a store or a checkpoint. Default: the checkpoint's own."""
    system: SystemConfig = SystemConfig()


def fill_mask(
    checkpoint: Checkpoint, text: str, top: int = 5, ranks: Ranks = ALONE, precision: str = "fp32"
) -> list[list[tuple[float, str]]]:
    """For each mask token in `text`, the `top` likeliest pieces as (probability, piece). A
    piece of a byte-level BPE is given as characters, if its bytes are whole ones.

    Raises BadInput if the checkpoint has no MLM head, if the text has no mask token or is too
    long, or if `top` is below 1. Raises Failure if the model's outputs are not finite.
    """
    if top < 1:
        raise BadInput(f"top={top}: give at least 1")
    task, tokenizer = checkpoint.task, checkpoint.tokenizer
    if task is None or not task.predicts_masked:
        raise BadInput(f"this checkpoint has no MLM head, so it cannot fill a mask; {_train_mlm()}")
    batch = _with_masks(tokenizer, text, checkpoint.config.max_positions)
    if note := unknown_note(batch.tokens, tokenizer):
        say(note, error=True)
    model = checkpoint.model().to(ranks.device)
    with torch.no_grad(), ranks.autocast(precision):
        logits = model.logits(to_device(batch, ranks.device)).float().cpu()
    check_finite(logits.numpy(), "the text: the model's outputs at the masks")
    return _likeliest(logits, tokenizer, top)


def _with_masks(tokenizer: Tokenizer, text: str, longest: int) -> Batch[np.ndarray]:
    """A text with mask tokens, as a batch of one row. Its `places` are those of the masks.

    Raises BadInput if the text has no mask token, or more than `longest` tokens.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(
            f"text={text!r} is not UTF-8; type it in a terminal that uses UTF-8"
        ) from None
    mask, mask_token = tokenizer.special["mask"], tokenizer.pieces[tokenizer.special["mask"]]
    parts = text.split(mask_token)
    if len(parts) == 1:
        raise BadInput(f"the text has no mask token: write {mask_token} for each missing word")
    if tokenizer.mask_takes_space:  # RoBERTa
        parts = [*(part.rstrip() for part in parts[:-1]), parts[-1]]
    ids = [tokenizer.special["cls"]]
    for i, encoded in enumerate(tokenizer.encode_batch(parts)):
        ids += ([mask] if i else []) + encoded.tolist()
    ids.append(tokenizer.special["sep"])
    if len(ids) > longest:
        raise BadInput(f"the text has {len(ids)} tokens; the model takes {longest}: shorten it")
    tokens, ends = np.array(ids, np.int64), np.array([0, len(ids)], np.int32)
    return Batch(
        tokens,
        np.arange(len(ids)),
        np.zeros_like(tokens),
        ends,
        len(ids),
        places=np.flatnonzero(tokens == mask),
    )


def _likeliest(logits: Tensor, tokenizer: Tokenizer, top: int) -> list[list[tuple[float, str]]]:
    """Logits of masks (M, V) -> for each mask the `top` likeliest pieces, (probability, piece)."""
    # the embedding table may be padded: its last rows then belong to no piece
    probabilities = torch.softmax(logits, 1)[:, : len(tokenizer)]
    best = probabilities.topk(min(top, probabilities.size(1)))
    return [
        [(float(p), _readable(tokenizer, int(i))) for p, i in zip(*pair, strict=True)]
        for pair in zip(best.values, best.indices, strict=True)
    ]


def _readable(tokenizer: Tokenizer, i: int) -> str:
    """A piece as it is shown. That of a byte-level BPE is shown as the characters that its bytes
    are, with Ġ for a space, unless they are parts of characters or control characters."""
    piece = tokenizer.pieces[i]
    if tokenizer.kind != "bpe" or i in tokenizer.all_special:
        return piece
    text = tokenizer.decode([i]).replace(" ", "Ġ")
    return text if text.isprintable() and "\ufffd" not in text else piece


def _train_mlm() -> str:
    """The remedy for a checkpoint without an MLM head."""
    recipe = typed("recipes/pretrain/continue.toml")
    return f"train one with {recipe} (init=CHECKPOINT data=STORE), or give a checkpoint that has it"


# -------------------------------------------------------------------------------- the command


def main(write_rows: WriteRows | None = None) -> None:
    """`python evaluate.py CHECKPOINT key=value ...`. For input= the caller must give
    `write_rows`."""
    arguments = sys.argv[1:]
    if any(a in ("-h", "--help") for a in arguments):
        say(*help_text(EvaluateConfig).split("\n"))
        return
    with processes.group():
        config = parse_arguments(arguments)
        checkpoint = checkpoints.load(arguments[0])
        ranks = processes.start(config.system)
        provenance.refuse_unlike_ranks(ranks)
        config, precision = with_precision_of_training(config, checkpoint, ranks)
        slower = speed_note(ranks.device, config.system.precision, config.system.tf32)
        for note in filter(None, (slower, native.note(ranks.device))):
            if ranks.rank == 0:
                say(note, error=True)
        if config.data is not None:
            _score_split(checkpoint, config, arguments[0], ranks)
        elif config.blimp is not None:
            _score_pairs(checkpoint, config, arguments[0], ranks)
        elif ranks.rank == 0 and config.text is not None:
            _fill_masks(checkpoint, config, ranks)
        elif ranks.rank == 0:
            _predict_file(checkpoint, config, ranks, write_rows)
        files = [file for file in (config.out, config.predictions) if file]
        if files and ranks.rank == 0:
            say(f"wrote {' and '.join(files)}", error=True)
        if precision and ranks.rank == 0:  # last, so that a failing command does not print it
            say(precision, error=True)


def parse_arguments(arguments: list[str]) -> EvaluateConfig:
    """Parse a command line as `parse` does. Raises BadInput also if a file cannot be written."""
    config = parse(arguments)
    for file in filter(None, (config.out, config.predictions)):
        check_writable(Path(file))
    return config


def parse(arguments: list[str]) -> EvaluateConfig:
    """The settings of a command line. Raises BadInput if they cannot be combined."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        raise BadInput("the first argument must be a checkpoint or a run, such as runs/english")
    values = parse_overrides(EvaluateConfig, arguments[1:])
    config = validate(EvaluateConfig, values)
    if sum(getattr(config, name) is not None for name in FORMS) != 1:
        raise BadInput("give one of data=STORE, text='...', input=FILE and blimp=FILE")
    form = next(name for name in FORMS if getattr(config, name) is not None)
    extra = [key for key in values if key != form and key not in FORMS[form]]
    if extra:
        raise BadInput(
            f"{extra[0]}= cannot be combined with {form}=. With {form}= you can set "
            f"{', '.join(FORMS[form])}"
        )
    table = config.predictions or (config.out if config.input else None)
    of_pairs = config.blimp is not None
    if table and table.lower().endswith((".csv", ".npz") if of_pairs else ".csv"):
        raise BadInput(f"{table}: the table is separated by tabs; give a name that ends in .tsv")
    score_file = "" if config.input else config.out or ""
    if score_file.lower().endswith(".npz" if of_pairs else (".csv", ".npz")):
        raise BadInput(f"{score_file}: scores are written as JSON; give a name that ends in .json")
    files: dict[Path, str] = {}
    for name in ("input", "blimp", "out", "predictions"):
        if file := getattr(config, name):
            if other := files.get(Path(file).resolve()):
                raise BadInput(f"{name}= and {other}= are both {file}; give two different files")
            files[Path(file).resolve()] = name
    return config


def with_precision_of_training(
    config: EvaluateConfig, checkpoint: Checkpoint, ranks: Ranks
) -> tuple[EvaluateConfig, str]:
    """The settings with fp32 or bf16 in place of `system.precision=auto`, and a line about it.

    It is the precision in which the checkpoint was trained, so that a run is scored alike on every
    machine. For a checkpoint that was never trained here, it is the fast one of this machine.
    """
    if config.system.precision != "auto":
        return config, ""
    trained = [record for record in checkpoint.history if record.get("op") == "train"]
    reasons = ranks.gather(reason_for_bf16(ranks.device))
    if trained:  # a record without a precision is one of fp32, or of an earlier version
        precision, why = trained[-1].get("precision", "fp32"), "as in training"
    else:
        precision, why = fast_on(reasons)
    return config.having("system", precision=precision), f"precision {precision} ({why})"


def _fill_masks(checkpoint: Checkpoint, config: EvaluateConfig, ranks: Ranks) -> None:
    precision = config.system.precision
    spelled = Spelled(checkpoint.tokenizer)
    spelled.pieces.remove(checkpoint.tokenizer.meta["special"]["mask"])
    spelled.add([str(config.text)])
    say(*filter(None, [spelled.note()]), error=True)
    fillings = fill_mask(checkpoint, str(config.text), config.top, ranks, precision)
    for i, filling in enumerate(fillings, 1):
        say(f"mask {i}: " + "  ".join(f"{piece} {p:.3f}" for p, piece in filling))


def assembler_for(checkpoint: Checkpoint, store: Store, split: str, spec: str | None) -> Assembler:
    """The assembler that turns rows of a store's split into batches for a trained checkpoint.

    `spec` overrides the mapping of training. Raises BadInput if the store does not fit the
    checkpoint's head or tokenizer.
    """
    task = checkpoint.task
    if store.kind == "text" and (task is None or not task.predicts_masked):
        raise BadInput(f"this checkpoint has no MLM head, and {store.name} is text; {_train_mlm()}")
    if task is None:
        program = typed("train.py")
        raise BadInput(f"this checkpoint has no head to score: fine-tune it with {program} first")
    head = task.head
    check_kind(store.kind, task, store.name)
    _check_classes(store, task)
    if spec is None and checkpoint.source is not None:  # the mapping of training
        if store.fingerprint != checkpoint.source.fingerprint:
            raise BadInput(
                f"{store.name} was made with a different tokenizer from the data this checkpoint "
                "was trained on; make the store again with that tokenizer, or give mapping="
            )
        array = checkpoint.mapping
    else:
        size = checkpoint.config.vocab_size
        array = mapping.build_mapping(spec or head.mapping, store, checkpoint.tokenizer, size)
    return Assembler(store.split(split), checkpoint.tokenizer, checkpoint.max_tokens, array)


def _check_classes(store: Store, task: Task) -> None:
    """Raise BadInput unless the store has the task's classes."""
    if not task.named_classes or tuple(store.labels) == task.head.labels:
        return
    known = task.head.labels
    what = f"not all of the checkpoint's classes: {', '.join(store.labels)}"
    if set(store.labels) == set(known):
        what = f"the checkpoint's classes in another order: {', '.join(store.labels)}"
    if unknown := sorted(set(store.labels) - set(known)):
        what = f"labels that are not classes of the checkpoint: {', '.join(unknown)}"
    line = f"{store.name} has {what}; the checkpoint knows {', '.join(known)}"
    if set(store.labels) == set(known) and store.kind in ("class", "tag"):
        names = StringIO()
        csv.writer(names, lineterminator="").writerow(known)
        line += f": make the store again with {shlex.join(['--labels', names.getvalue()])}"
    elif set(store.labels) & set(known):
        line += ": make the store again with --train FILE, the training file of this checkpoint"
    raise BadInput(line)


def _score_split(checkpoint: Checkpoint, config: EvaluateConfig, name: str, ranks: Ranks) -> None:
    assert config.data is not None
    store = open_stores(config.data)
    assembler = assembler_for(checkpoint, store, config.split, config.mapping)
    task = checkpoint.task
    assert task is not None
    scored = task.has_labels(assembler.split)
    _check_outputs(config, task, scored)
    model = checkpoint.model().to(ranks.device)
    try:
        scores = score(model, assembler, ranks, config.system.precision, config.threshold)
    except (BadInput, Failure, OSError):
        raise
    except Exception as error:  # a damaged store may be the cause
        if line := store.damage():
            raise BadInput(line) from error
        raise
    if ranks.rank != 0:
        return
    _warn(checkpoint, task, store, assembler)
    notes = [] if task.predicts_masked else _trained_on(name, store, assembler.split)
    if task.predicts_masked and store.kind != "text" and not task.head.pair_scale:
        notes.append(f"{store.name} has labels; this checkpoint predicts masked tokens alone")
    try:
        if config.out:
            result = {
                "checkpoint": name,
                "data": config.data,
                "split": config.split,
                "rows": assembler.split.rows,
                **_labels(task, scores.predictions),
                "precision": config.system.precision,
                "metrics": scores.metrics,
                **({"notes": notes} if notes else {}),
            }
            write_json(Path(config.out), result)
        if config.predictions and _is_npz(config.predictions):
            write(Path(config.predictions), scores.predictions, store.key)
        elif config.predictions:
            lines = task.lines(scores.outputs, assembler.split, config.threshold)
            write_text(Path(config.predictions), lines)
    finally:  # after the files, because the output may be cut off; also if they cannot be written
        for metric, value in scores.metrics.items():
            say(f"{config.split} {metric} {value:.4f}")
    if scored:  # last, as the precision
        told = [f"note: {note}" for note in notes]
        told += [task.prediction_note(scores.predictions), task.metric_note]
        say(*filter(None, told), error=True)


def _check_outputs(config: EvaluateConfig, task: Task, scored: bool) -> None:
    """Raise BadInput if the command asks for something that this task does not give, or for scores
    of a split without labels (not `scored`)."""
    if config.predictions and not _is_npz(config.predictions) and task.predicts_masked:
        raise BadInput(
            f"predictions={config.predictions}: an MLM head has no table; give a name that ends in "
            ".npz for the loss of every row"
        )
    _check_threshold(config, task)
    if not scored and (config.out or not config.predictions):
        what, file = ("answers", "the answers") if task.has_questions else ("labels", "a table")
        raise BadInput(
            f"the split {config.split!r} has no {what} to score against; give another split=, or "
            f"predictions=FILE alone for {file} without scores"
        )


def _warn(checkpoint: Checkpoint, task: Task, store: Store, assembler: Assembler) -> None:
    """Print what is lost by truncation, and a warning about the labels of the split."""
    letters = assembler.max_tokens - assembler.extra
    _say_truncated(checkpoint, assembler, longest_remedy(task.head, letters))
    if line := long_windows(task, assembler, store):
        say(f"warning: {line}, or answers are lost", error=True)
    if note := task.label_note(assembler.split):
        say(note, error=True)


def _trained_on(name: str, store: Store, split: Split) -> list[str]:
    """A note for each labelled store whose training split has texts of this split, if the run or
    one that it started from was trained on that store. That store may divide the same file
    differently. What is gone, closed or damaged is left out."""
    notes = []
    with suppress(BadInput, OSError, LookupError):
        for training in _trainings(name):
            of_run, config = training.store, training.config
            if TASKS[config["head"]].predicts_masked:  # it saw no labels
                continue
            if training.remade(store):
                notes.append(
                    f"{store.name} has changed since the training; if its texts are now divided "
                    "otherwise, these scores may be too high"
                )
            if of_run is None or of_run.key == store.key or of_run.fingerprint != store.fingerprint:
                continue
            seen = set(_texts(of_run.split("train")))
            if count := sum(text in seen for text in _texts(split)):
                texts = f"{count:,} of the {split.rows:,} texts of {split.name}"
                share = config.get("fraction", 1)
                part = f" (the run read {share:.4g} of it)" if share != 1 else ""
                where = f"are in the training split of {of_run.name}{part}"
                notes.append(f"{texts} {where}, so these scores may be too high")
    return notes


def _trainings(name: str) -> Iterator[Training]:
    """What is recorded of the run of a checkpoint, then of the run that it started from, and so
    on."""
    known, start = set[Path](), name
    while start and (path := checkpoints.resolve(start)) not in known:
        known.add(path)
        if (training := training_of(path)) is None:
            return
        yield training
        start = training.config.get("init") or ""


def _texts(split: Split) -> Iterator[tuple[bytes, ...]]:
    """The ids of each row, and those of its second text."""
    columns = [split.columns[name] for name in TEXTS if name in split.columns]
    return (tuple(column[row].tobytes() for column in columns) for row in range(split.rows))


def _score_pairs(checkpoint: Checkpoint, config: EvaluateConfig, name: str, ranks: Ranks) -> None:
    pairs = minimal_pairs.read_pairs(Path(str(config.blimp)), config.pairs)
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    precision = config.system.precision
    scores = minimal_pairs.score_pairs(checkpoint, pairs, config.pll, ranks, precision, tokenizer)
    if ranks.rank != 0:
        return
    table = scores.table()
    if config.out and config.out.lower().endswith(".csv"):
        rows = [("phenomenon", "paradigm", "pairs", "accuracy"), *table]
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_text(Path(config.out), text.getvalue())
    elif config.out:
        result = {
            "checkpoint": name,
            "blimp": config.blimp,
            "pll": config.pll,
            "tokenizer": config.tokenizer,
            "precision": precision,
        }
        write_json(Path(config.out), result | scores.summary())
    if config.predictions:
        write_text(Path(config.predictions), as_table(scores.columns()))
    for phenomenon, paradigm, count, accuracy in table:
        say(f"{f'  {paradigm}' if paradigm else phenomenon:<56}{count:>7,}  {accuracy:.4f}")
    ties = f", of which {scores.ties:,} are ties and count as wrong" if scores.ties else ""
    say(
        f"blimp accuracy {scores.accuracy:.4f} ({len(pairs):,} pair{'s' * (len(pairs) != 1)}{ties})"
    )


def _is_npz(file: str) -> bool:
    """Whether to write predictions to this file as arrays, not as a table."""
    return file.lower().endswith(".npz")


def _check_threshold(config: EvaluateConfig, task: Task) -> None:
    if config.threshold is not None and not task.has_questions:
        raise BadInput(
            f"threshold= applies only to span heads, but this checkpoint's head is {task.name}: "
            "leave it out"
        )


def _labels(task: Task, predictions: Predictions) -> dict[str, int]:
    """How many labels the metrics cover, those of questions and words included. Truncated words and
    rows without a label do not count."""
    if task.predicts_masked:
        return {}
    return {"labels": len(next(iter(task.weighted(predictions).values())).labels)}


def _say_truncated(checkpoint: Checkpoint, assembler: Assembler, remedy: str = "") -> None:
    """Say on standard error how many rows are truncated, and the `remedy` if they are many."""
    limit = f"the checkpoint's batch.max_tokens={assembler.max_tokens}"
    if note := assembler.truncation(limit, checkpoint.config.max_positions, remedy):
        say(note, error=True)


def _predict_file(
    checkpoint: Checkpoint, config: EvaluateConfig, ranks: Ranks, write_rows: WriteRows | None
) -> None:
    task, precision = checkpoint.task, config.system.precision
    if task is None or task.predicts_masked:
        raise BadInput("input= needs a checkpoint with a class, score, span, tag or choice head")
    head, as_json = task.head, (config.out or "").lower().endswith(".json")
    _check_threshold(config, task)
    if as_json and not task.has_questions:
        raise BadInput(f"out={config.out}: predictions are a table; give a name that ends in .tsv")
    if write_rows is None:
        raise ValueError("input= needs `write_rows`, which the callers of `main` import")
    with TemporaryDirectory(prefix="xformer-") as directory:
        rows, tokenizer = Path(directory) / "rows", checkpoint.source or checkpoint.tokenizer
        path, key = Path(str(config.input)), config.id or ""
        write_rows(path, asdict(head), tokenizer, rows, config.columns, key)
        store = open_store(rows)
        split = store.split("input")
        assembler = Assembler(
            split, checkpoint.tokenizer, checkpoint.max_tokens, checkpoint.mapping
        )
        _say_truncated(checkpoint, assembler)
        model = checkpoint.model().to(ranks.device)
        alone = replace(ranks, rank=0, world_size=1)  # only rank 0 runs this function
        outputs = outputs_of(model, assembler, alone, precision, "the input: outputs")
        if config.out and _is_npz(config.out):
            write(config.out, task.predictions(outputs, split, config.threshold), store.key)
            return
        if as_json:
            lines = task.lines(outputs, split, config.threshold)
        else:
            lines = as_table(task.table(outputs, split, config.threshold))
    if config.out:
        write_text(Path(config.out), lines)
    else:
        put(lines)
