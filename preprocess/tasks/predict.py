"""Raw rows to predict -> a store of one split, by the readers that made the training data.

A checkpoint's head records the task of preprocess.py, its options and its columns. They decide how
the rows are read. Older checkpoints record only the columns.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from xformer.data.display import many, say
from xformer.data.errors import BadInput
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import create_store

from ..bad import STRICT, BadRows
from ..binarize import check_files, read_lines
from ..corpora.fasta import FASTA, read_fasta
from ..words import CachedEncoder
from . import choice, dna, glue, labelled, music, protein, sequences, squad, tags, tsv
from .remarks import say_empty
from .sequences import SEQUENCE, Sequences
from .source import Row
from .tables import Form, RowTable, extension, other_separator

INPUT = "input"  # the name of the split, and of the column with the texts as they were read
KINDS = {"classify": "class", "regress": "score", "tag": "tag", "span": "span", "choice": "choice"}
SEQUENCES = dna.DNA_TASKS | protein.PROTEIN_TASKS
JSON, PARQUET = (".jsonl", ".json"), ".parquet"
TABLES = (".csv", ".tsv", *JSON, PARQUET)
OTHERS = "columns= names other columns"
NOT_RECORDED = "the checkpoint does not record which of them are the texts: columns= names them"
Names = Sequence[Sequence[str]]  # for each text, the names that its column may have


class HeadRecord(NamedTuple):
    """What a checkpoint's head records about the rows it was trained on."""

    kind: str
    labels: list[str]
    pair: bool  # whether a row has two texts
    max_tokens: int
    columns: dict[str, Any]
    given: Sequence[str] = ()  # what the file calls the columns of the texts, if the user says so
    key: str = ""  # the column that names each row, if the user says so

    @property
    def task(self) -> str:
        """The task of preprocess.py, "" if the checkpoint does not say."""
        return str(self.columns.get("task", ""))

    @property
    def options(self) -> dict[str, Any]:
        """The task's own options."""
        return dict(self.columns.get("options") or {})


def write_rows(
    path: Path,
    head: dict[str, Any],
    tokenizer: Tokenizer,
    output: Path,
    given: Sequence[str] = (),
    key: str = "",
) -> None:
    """Encode the rows of a file as the split `input` of a new store at `output`.

    `head` is the checkpoint's head as a dict, `tokenizer` that of its training data. `given` are
    the columns of the file that hold the texts, if they are not those of training. An imported head
    records no columns: two that are given make its rows pairs. `key` names the column of row
    ids. By default it is training's --id column, or else `id` if the file has one. The columns
    `input` and `input_b` hold the texts as they were read. Raises BadInput naming file and line of
    a row that cannot be read.
    """
    labels, recorded = list(head["labels"]), head["columns"] or {}
    pair = head["pair"] or head["kind"] == "choice"
    if not recorded and head["kind"] in ("classify", "regress"):  # an imported head: the user says
        pair = pair or len(given) == 2
    record = HeadRecord(head["kind"], labels, pair, head["max_tokens"], recorded, given, key)
    if not path.is_dir() or not _is_music(record):
        check_files([path])
    if record.kind == "span":
        _write_questions(path, record, tokenizer, output)
        return
    rows = list(_rows(path, record, tokenizer))
    if not rows:
        raise BadInput(f"{path} has a header and no row")
    empty = [row for row in rows if not any(map(str.strip, row.texts))]
    say_empty(len(empty), len(rows), f"{path}:{empty[0].line}" if empty else "")
    classes, choices = record.labels, 1
    if record.kind == "choice":
        choices = len(rows[0].texts) - 1
        rows, classes = list(labelled.each_ending(rows)), labelled.ending_numbers(choices)
    ids = any(row.id is not None for row in rows)
    groups = any(row.group is not None for row in rows)
    inputs = [INPUT, "input_b"] if record.pair else [INPUT]
    kind = KINDS[record.kind]
    columns, ragged = labelled.store_columns(kind, record.pair, ids, groups, inputs)
    with create_store(output, tokenizer, columns, ragged) as store:
        with store.split(INPUT) as split:
            writer = labelled.RowWriter({INPUT: split}, CachedEncoder(tokenizer), classes)
            for batch in labelled.row_batches(rows):
                writer.append(batch)
        say(*filter(None, [writer.spelled.note()]), error=True)
        store.finish(kind, record.labels, None, {}, choices)


def read_texts(path: Path, column: str | None = None) -> list[str]:
    """The texts of a file: its lines; the sequences of FASTA; or a column of a table (csv, tsv,
    JSON lines, parquet), by default `text`.

    A file with another ending is a table only if `column` is given. Raises BadInput if the column
    is missing, or naming file and line of a text that cannot be read.
    """
    check_files([path])
    if extension(path) in FASTA:
        if column is not None:
            raise BadInput(f"{path} is FASTA and has no columns: leave out column=")
        return [sequence for _, _, sequence in read_fasta(path)]
    if column is None and extension(path) not in TABLES:
        return [line for _, line in read_lines(path)]
    table, name = RowTable(path), column or "text"
    if name not in table.columns:
        message = str(table.missing(name))
        if column is None:
            joint = " Name" if message.endswith("?") else "; name"
            message += f"{joint} the column of the texts with column="
        raise BadInput(message)
    texts = []
    for line, (text,) in table.rows([name], STRICT):
        if text is None:
            STRICT(path, line, f"the column {name!r} is null")
        texts.append(text or "")
    return texts


def _rows(path: Path, head: HeadRecord, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of a file, read as the checkpoint's task reads them."""
    if _is_music(head):
        return _music(path, head)
    if letters := _alphabet(head, tokenizer):
        return _sequences(path, head, letters)
    if extension(path) in (*FASTA, *music.MIDI):
        raise BadInput(
            f"{path}: this checkpoint was trained on text, not on {extension(path)} files"
        )
    if head.kind == "tag":
        return _sentences(path, head)
    if head.kind == "choice":
        return _choice_questions(path, head)
    return _texts(path, head)


def _is_music(head: HeadRecord) -> bool:
    return head.task.startswith("music") or (
        not head.task and head.columns.get("text") == "pitches"
    )


def _alphabet(head: HeadRecord, tokenizer: Tokenizer) -> str:
    """The letters of the task's sequences; "" if its rows are text."""
    if head.task in SEQUENCES:
        return SEQUENCES[head.task].alphabet
    if head.task == "dna/splice":
        return dna.LETTERS
    if not head.columns.get("uppercase"):
        return ""
    single = "".join(piece for piece in tokenizer.pieces if len(piece) == 1)
    return single if tokenizer.kind == "symbols" else protein.LETTERS


# ------------------------------------------------------------------------------ tables


def _texts(path: Path, head: HeadRecord) -> Iterator[Row]:
    """Rows with one text or two, in the columns of training."""
    names: Names
    if head.task in glue.GLUE_TASKS:
        task = glue.GLUE_TASKS[head.task]
        options = head.options  # of a column that has another name than in GLUE
        both = ((options.get("text"), task.text), (options.get("text_b"), task.text_b))
        names = [[own] if own else known for own, known in both if known]
    else:
        recorded = ("text", "text_b") if head.pair else ("text",)
        names = [[str(head.columns[key])] if head.columns.get(key) else [] for key in recorded]
    form = _form_of_training(path, head) if head.task == "tsv" else None
    for line, texts, id_ in _table(path, head, names, form, True, empty_rows=True):
        yield Row(INPUT, tuple(texts), None, path, line, id_)


def _choice_questions(path: Path, head: HeadRecord) -> Iterator[Row]:
    """Rows with a context and its endings, in the columns of training.

    If the checkpoint does not record them, they are those that the user gives, the context first.
    Without these they are `context`, and `endings` with a list.
    """
    options, given = head.options, head.given if len(head.given) > 1 else ("context", "endings")
    columns = choice.QuestionColumns(
        options.get("context") or given[:1], options.get("endings") or given[1:]
    )
    form = _form_of_training(path, head) if head.task == "choice" else None
    names = [[name] for name in columns.names]
    lists = head.given[-1:] if head.given and columns.lists else columns.lists
    for line, values, id_ in _table(path, head, names, form, True, lists):
        try:
            yield Row(INPUT, columns.texts(values), None, path, line, id_)
        except ValueError as error:
            STRICT(path, line, str(error))


def _form_of_training(path: Path, head: HeadRecord) -> Form:
    """The form that the options of training give to this file. No hint names these options."""
    return replace(tsv.form_of(path, Namespace(**head.options)), hint="")


def _table(
    path: Path,
    head: HeadRecord,
    names: Names,
    form: Form | None = None,
    report_no_header: bool = False,
    lists: Sequence[str] = (),
    empty_rows: bool = False,
) -> Iterator[tuple[int, list[str], str | None]]:
    """(line, texts, id) of the rows of a table.

    The table has a column for each of `names`, or it is a delimited file without a header that has
    exactly these columns. If the user gives columns, they are read instead of those called `names`.
    `form` is the form of the training file. `lists` is passed on to `RowTable`. With
    `report_no_header`, a note says that the first line is read as a row. With `empty_rows`, an
    empty line before a text is an empty text, if there is no header and a row is one text. Raises
    BadInput if the columns are missing.
    """
    given = head.given
    if given and len(given) != len(names):
        needed = " and ".join(repr(options[0]) if options else "the text" for options in names)
        raise BadInput(
            f"columns= names {many(len(given), 'column')}, but a row needs {len(names)}, for "
            f"{needed}"
        )
    names = [[name] for name in given] or names
    table, columns = _open(path, names, form)
    table.lists = lists
    if columns is None and given:
        raise _wrong_header(path, _first_row(path, table.form), names)
    if columns is None:
        _refuse_key(path, head, "has no header")
        empty: list[int] = []  # they are rows only if a text follows
        for line, row in table.delimited(STRICT, empty=empty_rows and len(names) == 1):
            if row == [""]:
                empty.append(line)
                continue
            yield from ((number, [""], None) for number in empty)
            empty = []
            if len(row) != len(names):
                raise BadInput(f"{path}:{line}: {many(len(row), 'column')} instead of {len(names)}")
            yield line, row, None
        if report_no_header:
            header = " and ".join(repr(options[0]) for options in names if options) or "line"
            say(f"note: {path} has no header {header}; line 1 is read as a row", error=True)
        return
    if head.key and head.key not in table.columns:
        raise BadInput(f"id={head.key}: {table.missing(head.key)}")
    if head.key in columns:
        raise BadInput(f"id={head.key} is a column of the texts; name another, or leave id= out")
    key = head.key or str(head.options.get("id") or "id")
    id_column = [key] if key in table.columns and key not in columns else []
    if not id_column and head.options.get("id"):
        say(
            f"note: {path} has no column {key!r}, so the rows get no id; give id=COLUMN", error=True
        )
    for line, values in table.rows([*columns, *id_column], STRICT, id_column):
        texts = [value or "" for value in values[: len(columns)]]
        yield line, texts, (values[-1] or "") if id_column else None


def _refuse_key(path: Path, head: HeadRecord, why: str) -> None:
    """Raise BadInput if the user gives a column `id=` for a file without named columns."""
    if head.key:
        raise BadInput(f"id={head.key}: {path} {why}, so it has no such column; leave id= out")


def _open(path: Path, names: Names, form: Form | None) -> tuple[RowTable, list[str] | None]:
    """A table, and its column for each of `names`.

    The columns are None if the file has no header and holds exactly these columns. A csv file must
    have a header.
    """
    if extension(path) in (*JSON, PARQUET):
        table = RowTable(path)
        columns = [table.find(options) for options in names]
        if None in columns:
            lacking = table.missing((names[columns.index(None)] or ["text"])[0])
            raise BadInput(f"{lacking}; {OTHERS}")
        return table, [column for column in columns if column]
    usual = Form.of(path)
    for candidate in (form or usual, usual):
        try:
            header = [name.strip() for name in _first_row(path, candidate)]
        except BadInput:
            if candidate == usual:
                raise
            continue  # a file of texts that begins with a quote, for example
        if not candidate.header:  # columns have numbers for names
            header = [str(i) for i in range(1, len(header) + 1)]
        columns = [next((name for name in options if name in header), None) for options in names]
        if None not in columns:
            if not candidate.header:
                mark, places = candidate.delimiter, " and ".join(map(str, columns))
                say(
                    f"note: {path} is read as in training: without a header, separated by "
                    f"{mark!r}, column {places}",
                    error=True,
                )
            return RowTable(path, candidate), [column for column in columns if column]
    bare, first = replace(usual, header=False), _first_row(path, usual)
    for name in (name for options in names for name in options):
        if hint := other_separator(usual, usual.delimiter.join(first), name):
            raise BadInput(f"{path}:1: the header lacks the column {name!r}{hint}")
    if numbers := _numbered(names, len(first)):
        return RowTable(path, bare), numbers
    if len(first) == len(names) and extension(path) != ".csv":
        return RowTable(path, bare), None
    raise _wrong_header(path, first, names)


def _wrong_header(path: Path, header: list[str], names: Names) -> BadInput:
    """The error to raise if a header lacks some of the columns. It lists the columns that exist."""
    lacking = [repr(options[0]) for options in names if options and not set(options) & set(header)]
    lacks = ""
    if lacking:
        lacks = f"the header lacks the column{'s' * (len(lacking) > 1)} {' and '.join(lacking)}; "
    has = ", ".join(repr(name if len(name) <= 40 else f"{name[:37]}...") for name in header[:20])
    hint = f"; a file without a header must have {many(len(names), 'column')}"
    hint = "" if extension(path) == ".csv" else hint
    others = OTHERS if any(names) else NOT_RECORDED
    return BadInput(f"{path}:1: {lacks}it has {many(len(header), 'column')}, {has}{hint}; {others}")


def _numbered(names: Names, width: int) -> list[str]:
    """The numbers of the columns, if every column may be called by a number up to `width`, as in
    CoLA. Otherwise an empty list.
    """
    numbers = [
        name for options in names for name in options if name.isdecimal() and int(name) <= width
    ]
    return numbers if len(numbers) == len(names) else []


def _first_row(path: Path, form: Form) -> list[str]:
    """The first row of a delimited file, which may be its header. Raises BadInput if it cannot be
    read."""
    table = RowTable(path, replace(form, header=False))
    return next(table.delimited(STRICT), (0, [""]))[1]


# ------------------------------------------------------------------------------ sequences


def _sequences(path: Path, head: HeadRecord, letters: str) -> Iterator[Row]:
    """DNA and proteins, in upper or lower case."""
    longest = head.columns.get("longest")
    for line, text, id_ in _records(path, head, letters):
        sequence = text.strip().upper()
        if head.kind == "tag":  # every letter is a word
            sequence = "".join(sequence.split())
        if fault := sequences.sequence_fault(sequence, letters):
            STRICT(path, line, fault)
        sequence = sequences.both_ends(sequence, longest)
        spaced = " ".join(sequence) if head.kind == "tag" else sequence
        yield Row(INPUT, (spaced,), None, path, line, id_)


def _records(path: Path, head: HeadRecord, letters: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, sequence, id) of FASTA, three lines per record, UCI's splice file, or a table."""
    first = ""
    if extension(path) not in (*JSON, PARQUET):
        first = sequences.first_line(path)
    splice = head.task == "dna/splice" or head.columns.get("label") == "class"
    if splice and extension(path) != ".csv" and first.count(",") == 2:
        _refuse_key(path, head, "is UCI's file")
        for row in dna.splice_rows(path, STRICT):
            yield row.line, row.texts[0], row.id
    elif extension(path) in FASTA or first.startswith(">"):
        _refuse_key(path, head, "is FASTA, whose records have names")
        for record in sequences.sequence_records(
            path, None, None, Sequences("a table of the user", letters), STRICT, None
        ):
            yield record.line, record.sequence, record.id
    else:
        options = dict.fromkeys([str(head.columns.get("text") or SEQUENCE[0]), *SEQUENCE])
        for line, texts, id_ in _table(path, head, [list(options)]):
            yield line, texts[0], id_


# ------------------------------------------------------------------------------ music


def _music(path: Path, head: HeadRecord) -> Iterator[Row]:
    """The segments of pieces, or the rows of a table of pitches."""
    pieces = _pieces(path, head)
    if pieces is None:
        yield from _pitches(path, head)
        return
    _refuse_key(path, head, "names MIDI files, and their names are the ids")
    segment = int(head.options.get("segment") or min(128, head.max_tokens - 2))
    for row in music.segment_rows(pieces, segment, STRICT):
        yield row._replace(label=None, id=row.group)


def _pieces(path: Path, head: HeadRecord) -> list[music.Piece] | None:
    """The pieces that a path names: a MIDI file, a directory of them, or MAESTRO's table (or its
    directory). None if it is a file of another kind."""
    if extension(path) in music.MIDI and not path.is_dir():
        return [music.Piece(path, path.name, "", INPUT, path, 1)]
    table = music.table_of(path) if path.is_dir() else path
    if table is None:
        visible = [file for file in sorted(path.rglob("*")) if not file.name.startswith(".")]
        files = [file for file in visible if file.suffix.lower() in music.MIDI]
        if not files:
            raise BadInput(f"{path} holds no MIDI file")
        music.refuse_foreign_names([file.relative_to(path) for file in files])
        return [
            music.Piece(file, str(file.relative_to(path)), "", INPUT, file, 1) for file in files
        ]
    if extension(table) not in music.TABLES:
        return None
    opened = RowTable(table)
    column = opened.find([*head.given, str(head.options.get("midi") or music.MIDI_COLUMN)])
    if column is None:
        return None
    _, (first,) = next(opened.rows([column], STRICT), (0, ["x.mid"]))
    if column in head.given and Path(str(first)).suffix.lower() not in music.MIDI:
        return None  # a column of pitches
    return [
        music.Piece(table.parent / str(name), str(name), "", INPUT, table, line)
        for line, (name,) in opened.rows([column], STRICT)
    ]


def _pitches(path: Path, head: HeadRecord) -> Iterator[Row]:
    """The rows of a table whose texts are pitches, separated by spaces."""
    valid = {str(pitch) for pitch in range(128)}
    for line, texts, id_ in _table(path, head, [["pitches"]]):
        if wrong := sorted(set(texts[0].split()) - valid):
            raise BadInput(
                f"{path}:{line}: {wrong[0]!r} is not a pitch; give numbers from 0 to 127"
            )
        yield Row(INPUT, (texts[0],), None, path, line, id_)


# ------------------------------------------------------------------------------ words


def _sentences(path: Path, head: HeadRecord) -> Iterator[Row]:
    """Sentences in CoNLL's columns, whose labels are ignored, one sentence per line, or those in a
    column of a table that the user names."""
    if head.given:
        for line, texts, id_ in _table(path, head, [["sentence"]]):
            yield Row(INPUT, (texts[0],), None, path, line, id_)
        return
    _refuse_key(path, head, "is read without a header unless columns= names the sentences")
    if extension(path) in (*JSON, PARQUET, ".csv"):
        raise BadInput(
            f"{path}: this checkpoint labels words; give one sentence per line (.txt), or CoNLL's "
            "columns (.conll), or the column of the sentences with columns="
        )
    word, label = (_column_number(head.columns.get(name)) for name in ("text", "label"))
    if extension(path) in tags.ENDINGS[:4] or _is_conll(path, label, head.labels):
        columns = tags.columns_of(path, "test", word, label)
        for line, words, _ in tags.sentences(path, columns, STRICT):
            yield Row(INPUT, (" ".join(words),), None, path, line)
        return
    lines = list(read_lines(path, STRICT))
    if not any(text for _, text in lines):
        raise BadInput(f"{path} is empty")
    if extension(path) == ".tsv":
        told = "line 1 is read as a sentence, too; columns= names the column of a table"
        say(f"note: {path}: {told}", error=True)
    for line, text in lines:
        yield Row(INPUT, (text,), None, path, line)


def _column_number(column: Any) -> int:
    """The number of a column as a checkpoint records it; the first if it records none."""
    return int(column) if str(column).isdecimal() else 1


def _is_conll(path: Path, label: int, labels: list[str]) -> bool:
    """Whether a file has CoNLL's columns rather than one sentence per line.

    It has them in three cases: its first line has tabs; or each line of its first block has a known
    label in the label column of training; or the block has one word per line and an empty line
    after it.
    """
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
    lines, known = [line.split() for line in block], {*labels, tags.NO_LABEL}
    if all(len(words) == 1 for words in lines):
        if ended and len(block) > 1:
            note = "it has one word in each line, and empty lines"
            say(f"note: {path} is read as CoNLL's columns: {note}", error=True)
        return ended and len(block) > 1
    return all(len(words) >= max(label, 2) and words[label - 1] in known for words in lines)


# ------------------------------------------------------------------------------ questions


def _write_questions(path: Path, head: HeadRecord, tokenizer: Tokenizer, output: Path) -> None:
    """Write questions and windows of their contexts. They come from SQuAD's JSON, or from a table
    with the columns `question` and `context`. The column `question.input` gets the questions."""
    if _is_squad(path):
        _refuse_key(path, head, "is SQuAD's file, whose questions have ids")
        paragraphs = list(squad.read_articles(path, STRICT, training=False))
    else:
        paragraphs = [
            ("", context, [squad.Question(str(i) if id_ is None else id_, question, None)])
            for i, (_, (question, context), id_) in enumerate(
                _table(path, head, [["question"], ["context"]])
            )
        ]
        times = Counter(question.id for *_, (question,) in paragraphs)
        if repeated := [name for name, count in times.items() if count > 1]:
            raise BadInput(f"{path}: {times[repeated[0]]} questions have the id {repeated[0]!r}")
    if not any(questions for *_, questions in paragraphs):
        raise BadInput(f"{path} holds no question")
    # the options of training, as far as they fit into the checkpoint's rows
    max_tokens = min(head.max_tokens, int(head.options.get("max_tokens") or head.max_tokens))
    max_question = min(int(head.options.get("max_question") or 64), max_tokens // 2)
    stride = min(int(head.options.get("stride") or 128), max_tokens - max_question - 4)
    options = squad.WindowOptions(max_tokens, max(stride, 1), max_question)
    columns = squad.COLUMNS | {"question.input": "uint8"}
    ragged = [*squad.RAGGED, "question.input"]
    with create_store(output, tokenizer, columns, ragged) as store:
        with store.split(INPUT) as split:
            counts = squad.WindowWriter(split, tokenizer, options).write(paragraphs)
        store.finish("span", [], None, {})
    for line in counts.warnings(max_question):
        say(f"warning: {line}", error=True)


def _is_squad(path: Path) -> bool:
    """Whether a file is SQuAD's: one JSON object in its form. Otherwise it is read as a table."""
    if extension(path) != ".json":
        return False
    try:
        return squad.is_squad(squad.load(path))
    except BadInput:  # such as JSON lines; whatever else is wrong, the table says it
        return False
