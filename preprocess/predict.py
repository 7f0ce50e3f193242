"""Raw rows to predict -> a store of one split, through the readers that made the training data.

The checkpoint says which reader: its head records the task of preprocess.py, the task's options and
the columns. A checkpoint that was written before tasks were recorded is read by its columns alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import create_store

from . import choice, dna, glue, music, protein, sequences, squad, tags, tasks, tsv
from .bad import BadRows
from .binarize import check_files, read_lines
from .sequences import FASTA, SEQUENCE, Sequences
from .tables import Form, Table, ending
from .tasks import Row
from .words import Encoder

INPUT = "input"  # the split, and the column of the texts as they were read
KINDS = {"classify": "class", "regress": "score", "tag": "tag", "span": "span", "choice": "choice"}
SEQUENCES = dna.TASKS | protein.TASKS
ENDINGS = ["endings"]
JSON, PARQUET = (".jsonl", ".json"), ".parquet"
BAD = BadRows(skip=False)  # the first row that cannot be read ends the work
Names = Sequence[Sequence[str]]  # of each text, what its column may be called


class Head(NamedTuple):
    """What a checkpoint says of the rows it was trained on."""

    kind: str
    labels: list[str]
    pair: bool
    max_tokens: int
    columns: dict[str, Any]

    @property
    def task(self) -> str:
        """The task of preprocess.py, "" if the checkpoint does not say."""
        return str(self.columns.get("task", ""))

    @property
    def options(self) -> dict[str, Any]:
        """The task's own options."""
        return dict(self.columns.get("options") or {})


def write_rows(path: Path, head: dict[str, Any], tokenizer: Tokenizer, output: Path) -> None:
    """Encode the rows of a file as the split `input` of a new store at `output`.

    `head` is the checkpoint's head as a dict, `tokenizer` that of its training data. The columns
    `input` and `input_b` hold the texts as they were read. Raises BadInput naming file and line of
    a row that cannot be read.
    """
    pair = head["pair"] or head["kind"] == "choice"
    known = Head(
        head["kind"], list(head["labels"]), pair, head["max_tokens"], head["columns"] or {}
    )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise BadInput(f"{path} is a device or a pipe, and it is read more than once; give a file")
    if not path.is_dir() or not _is_music(known):
        check_files([path])
    if known.kind == "span":
        _write_questions(path, known, tokenizer, output)
        return
    rows = list(_rows(path, known, tokenizer))
    if not rows:
        raise BadInput(f"{path} has a header and no row")
    classes, choices = known.labels, 1
    if known.kind == "choice":
        choices = len(rows[0].texts) - 1
        rows, classes = list(tasks.each_ending(rows)), tasks.ending_numbers(choices)
    texts = ["tokens", "tokens_b"] if known.pair else ["tokens"]
    shown = [INPUT, "input_b"] if known.pair else [INPUT]
    label = {"regress": "float32", "tag": "int16"}.get(known.kind, "int64")
    columns = {**dict.fromkeys(texts, ""), "labels" if known.kind == "tag" else "label": label}
    columns |= dict.fromkeys(shown, "uint8")
    columns |= {"id": "uint8"} if any(row.id is not None for row in rows) else {}
    columns |= {"group": "int64"} if any(row.group is not None for row in rows) else {}
    ragged = [*texts, *shown, *(name for name in ("id", "labels") if name in columns)]
    with create_store(output, tokenizer, columns, ragged) as store:
        with store.split(INPUT) as split:
            writer = tasks.RowWriter({INPUT: split}, Encoder(tokenizer), classes)
            for batch in tasks.batches(rows):
                writer.append(batch)
        store.finish(KINDS[known.kind], known.labels, None, {}, choices)


def _rows(path: Path, head: Head, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of a file, by the reader of the checkpoint's task."""
    letters = _alphabet(head, tokenizer)
    if _is_music(head):
        return _music(path, head)
    if letters:
        return _sequences(path, head, letters)
    if ending(path) in (*FASTA, *music.MIDI):
        raise BadInput(f"{path}: this checkpoint was trained on text, not on {ending(path)} files")
    if head.kind == "tag":
        return _sentences(path, head)
    if head.kind == "choice":
        return _endings(path, head)
    return _texts(path, head)


def _is_music(head: Head) -> bool:
    return head.task.startswith("music") or head.columns.get("text") == "pitches"


def _alphabet(head: Head, tokenizer: Tokenizer) -> str:
    """The letters that sequences of the task are made of; "" if its rows are text."""
    if head.task in SEQUENCES:
        return SEQUENCES[head.task].alphabet
    if head.task == "dna/splice":
        return dna.LETTERS
    if not head.columns.get("uppercase"):
        return ""
    single = "".join(piece for piece in tokenizer.pieces if len(piece) == 1)
    return single if tokenizer.kind == "symbols" else protein.LETTERS


# ------------------------------------------------------------------------------ tables


def _texts(path: Path, head: Head) -> Iterator[Row]:
    """One text a row, or two."""
    names: list[Sequence[str]] = []
    if head.task in glue.TASKS:
        task = glue.TASKS[head.task]
        names = [found for found in (task.text, task.text_b) if found]
    else:
        wanted = ("text", "text_b") if head.pair else ("text",)
        names = [[str(head.columns[name])] if head.columns.get(name) else [] for name in wanted]
    form = tsv.form_of(path, Namespace(**head.options)) if head.task == "tsv" else None
    for line, texts, name in _table(path, names, form, loud=True):
        yield Row(INPUT, tuple(texts), None, path, line, name)


def _endings(path: Path, head: Head) -> Iterator[Row]:
    """A question a row, in the columns of training. Without them they are `context` and `endings`,
    a list."""
    options = head.options
    cells = choice.Cells(options.get("context") or ["context"], options.get("endings") or ENDINGS)
    form = tsv.form_of(path, Namespace(**options)) if head.task == "choice" else None
    names = [[name] for name in cells.columns]
    for line, texts, name in _table(path, names, form, loud=True, lists=cells.lists):
        try:
            yield Row(INPUT, cells.texts(texts), None, path, line, name)
        except ValueError as error:
            BAD(path, line, str(error))


def _table(
    path: Path,
    names: Names,
    form: Form | None = None,
    loud: bool = False,
    lists: Sequence[str] = (),
) -> Iterator[tuple[int, list[str], str | None]]:
    """(line, texts, id) of the rows of a table whose columns are called by one of their `names`, or
    of a delimited file without a header that has just these columns.

    `form` is that of the training file. If `loud`, a first line that is taken for a row is told.
    `lists` as in Table. Raises BadInput if the columns are not there.
    """
    table, columns = _open(path, names, form)
    table.lists = lists
    if columns is None:
        for line, row in table.delimited(BAD):
            if len(row) != len(names):
                raise BadInput(f"{path}:{line}: {_columns(len(row))} instead of {len(names)}")
            yield line, row, None
        if loud:
            wanted = " and ".join(repr(them[0]) for them in names if them) or "line"
            say(f"note: {path} has no header {wanted}: line 1 is a row too", error=True)
        return
    name = "id" if "id" in table.columns and "id" not in columns else None
    for line, values in table.rows([*columns, *([name] if name else [])], BAD, ["id"]):
        texts = [value or "" for value in values[: len(columns)]]
        yield line, texts, (values[-1] or "") if name else None


def _open(path: Path, names: Names, form: Form | None) -> tuple[Table, list[str] | None]:
    """A table and its columns. The columns are None if the file has no header and holds just these
    columns; a csv must have a header."""
    if ending(path) in (*JSON, PARQUET):
        table = Table(path)
        found = [table.find(one) for one in names]
        if None in found:
            raise table.missing((names[found.index(None)] or ["text"])[0])
        return table, [column for column in found if column]
    usual = Form.of(path)
    for one in (form or usual, usual):
        there = [name.strip() for name in _first(path, one)]
        if not one.header:  # columns have numbers for names
            there = [str(i) for i in range(1, len(there) + 1)]
        picked = [next((name for name in them if name in there), None) for them in names]
        if None not in picked:
            return Table(path, one), [name for name in picked if name]
    bare, first = replace(usual, header=False), _first(path, usual)
    if numbers := _numbered(names, len(first)):
        return Table(path, bare), numbers
    if len(first) == len(names) and ending(path) != ".csv":
        return Table(path, bare), None
    missing = [them for them in names if not any(name in first for name in them)]
    lacking = " and ".join(repr(them[0]) for them in missing if them)
    has = ", ".join(repr(name if len(name) <= 40 else f"{name[:37]}...") for name in first[:20])
    column = "columns" if " and " in lacking else "column"
    wanted = f"the header lacks the {column} {lacking}; " if lacking else ""
    plain = "" if ending(path) == ".csv" else f"; texts alone are {_columns(len(names))}, no header"
    raise BadInput(f"{path}:1: {wanted}it has {_columns(len(first))}, {has}{plain}")


def _numbered(names: Names, width: int) -> list[str]:
    """The columns if all have a name that is a number up to `width`, as CoLA's have; else none."""
    found = [name for them in names for name in them if name.isdecimal() and int(name) <= width]
    return found if len(found) == len(names) else []


def _first(path: Path, form: Form) -> list[str]:
    """The first row of a delimited file."""
    table = Table(path, replace(form, header=False))
    return next(table.delimited(BadRows(skip=True)), (0, [""]))[1]


def _columns(number: int) -> str:
    return f"{number} column{'s' * (number != 1)}"


# ------------------------------------------------------------------------------ sequences


def _sequences(path: Path, head: Head, letters: str) -> Iterator[Row]:
    """DNA and proteins: FASTA, three lines a record, UCI's file, tables; letters of either case."""
    longest = head.columns.get("longest")
    for line, text, name in _records(path, head, letters):
        sequence = text.strip().upper()
        if head.kind == "tag":  # every letter is a word
            sequence = "".join(sequence.split())
        if wrong := sorted(set(sequence) - set(letters)):
            raise BadInput(f"{path}:{line}: letters other than {letters}: {''.join(wrong)!r}")
        if not sequence:
            raise BadInput(f"{path}:{line}: the sequence is empty")
        sequence = sequences.both_ends(sequence, longest)
        spaced = " ".join(sequence) if head.kind == "tag" else sequence
        yield Row(INPUT, (spaced,), None, path, line, name)


def _records(path: Path, head: Head, letters: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, sequence, id)"""
    first = ""
    if ending(path) not in (*JSON, PARQUET):
        lines = (line.strip() for _, line in read_lines(path, BadRows(skip=True)))
        first = next(filter(None, lines), "")
    splice = head.task == "dna/splice" or head.columns.get("label") == "class"
    if splice and ending(path) != ".csv" and first.count(",") == 2:
        for row in dna.splice_rows(path, BAD):
            yield row.line, row.texts[0], row.id
    elif ending(path) in FASTA or first.startswith(">"):
        for record in sequences.records(path, None, None, Sequences(letters), BAD, None):
            yield record.line, record.sequence, record.id
    else:
        names = dict.fromkeys([str(head.columns.get("text") or SEQUENCE[0]), *SEQUENCE])
        for line, texts, name in _table(path, [list(names)]):
            yield line, texts[0], name


# ------------------------------------------------------------------------------ music


def _music(path: Path, head: Head) -> Iterator[Row]:
    """Pieces cut into segments: a MIDI file, a directory of them, or MAESTRO's table; or a table
    whose rows are pitches."""
    table = music.table_of(path) if path.is_dir() else path
    if path.is_dir() and table is None:
        there = [file for file in sorted(path.rglob("*")) if not file.name.startswith(".")]
        files = [file for file in there if file.suffix.lower() in music.MIDI]
        if not files:
            raise BadInput(f"{path} holds no MIDI file")
        pieces = [(file, str(file.relative_to(path)), file, 1) for file in files]
    elif ending(path) in music.MIDI:
        pieces = [(path, path.name, path, 1)]
    elif (
        table is not None
        and ending(table) in music.TABLES
        and ((names := Table(table)).find(["midi_filename"]))
    ):
        rows = names.rows(["midi_filename"], BAD)
        pieces = [(table.parent / str(v[0]), str(v[0]), table, line) for line, v in rows]
    else:
        yield from _pitches(path)
        return
    segment = int(head.options.get("segment") or min(128, head.max_tokens - 2))
    found = [music.Piece(file, name, "", INPUT, where, line) for file, name, where, line in pieces]
    for row in music.rows(found, segment, BAD):
        yield row._replace(label=None, id=row.group)


def _pitches(path: Path) -> Iterator[Row]:
    known = {str(pitch) for pitch in range(128)}
    for line, texts, name in _table(path, [["pitches"]]):
        if wrong := sorted(set(texts[0].split()) - known):
            raise BadInput(f"{path}:{line}: {wrong[0]!r} is no pitch (0 to 127)")
        yield Row(INPUT, (texts[0],), None, path, line, name)


# ------------------------------------------------------------------------------ words


def _sentences(path: Path, head: Head) -> Iterator[Row]:
    """Sentences in CoNLL's columns, whose labels are passed over, or one a line."""
    if ending(path) in (*JSON, PARQUET, ".csv"):
        raise BadInput(f"{path}: give a sentence a line (.txt), or CoNLL's columns (.conll)")
    word, label = (_number(head.columns.get(name)) for name in ("text", "label"))
    if ending(path) in tags.ENDINGS[:4] or _is_conll(path, label, head.labels):
        columns = tags.columns_of(path, "test", word, label)
        for line, words, _ in tags.sentences(path, columns, BAD):
            yield Row(INPUT, (" ".join(words),), None, path, line)
        return
    lines = list(read_lines(path, BAD))
    if not any(text for _, text in lines):
        raise BadInput(f"{path} is empty")
    for line, text in lines:
        yield Row(INPUT, (text,), None, path, line)


def _number(column: Any) -> int:
    return int(column) if str(column).isdecimal() else 1


def _is_conll(path: Path, label: int, labels: list[str]) -> bool:
    """Whether the file has CoNLL's columns: its first line has tabs, its first block has known
    labels in the column of training, or is a word a line with an empty line after it."""
    block: list[str] = []
    ended = False
    for _, line in islice(read_lines(path, BadRows(skip=True)), 1000):
        ended = bool(block) and not line.strip()
        if ended:
            break
        if line.strip():
            block.append(line)
    if not block or "\t" in block[0]:
        return bool(block)
    fields, known = [line.split() for line in block], {*labels, tags.NO_LABEL}
    if all(len(words) == 1 for words in fields):
        return ended and len(block) > 1
    return all(len(one) >= max(label, 2) and one[label - 1] in known for one in fields)


# ------------------------------------------------------------------------------ questions


def _write_questions(path: Path, head: Head, tokenizer: Tokenizer, output: Path) -> None:
    """Questions and windows of their contexts: SQuAD's JSON, or a table with the columns `question`
    and `context`. The table `question` gets the texts as `question.input`."""
    if ending(path) == ".json" and squad.is_squad(read_json(path)):
        paragraphs = list(squad.read_articles(path, BAD, training=False))
    else:
        paragraphs = [
            ("", context, [squad.Question(str(i) if name is None else name, question, None)])
            for i, (_, (question, context), name) in enumerate(
                _table(path, [["question"], ["context"]])
            )
        ]
    if not any(questions for *_, questions in paragraphs):
        raise BadInput(f"{path} holds no question")
    most = min(head.max_tokens, int(head.options.get("max_tokens") or head.max_tokens))
    question = min(int(head.options.get("max_question") or 64), most // 2)
    stride = min(int(head.options.get("stride") or 128), most - question - 4)
    options = Namespace(max_tokens=most, max_question=question, stride=max(stride, 1))
    columns = squad.COLUMNS | {"question.input": "uint8"}
    ragged = [*squad.RAGGED, "question.input"]
    with create_store(output, tokenizer, columns, ragged) as store:
        with store.split(INPUT) as split:
            squad.Writer(split, tokenizer, options, BAD).write(paragraphs)
        store.finish("span", [], None, {})
