"""The split of a row, where the source itself names it: columns `split` or `set`, and `validation`,
or the same words in FASTA headers (FLIP: `SET=train VALIDATION=True`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xformer.data.display import say
from xformer.data.errors import BadInput

from ..bad import BadRows
from .tables import Table

SPLIT, MARK = ("split", "set"), "validation"
NONE = "none"  # the value of --split-column that reads no column
NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
TRUE = ("true", "1", "1.0", "yes")
FALSE = ("false", "0", "0.0", "no", "", "nan", "none")


def split_of(name: str | None, mark: str | None, where: Sequence[str]) -> str:
    """The split that a row's `name` says, or its `mark` (whether it is a row for validation); None
    is what the source does not have. `where` says what the two are called, for messages.

    Raises ValueError saying what is wrong with the values.
    """
    split = "train"
    if name is not None:
        split = NAMES.get(name.strip().lower(), "")
        if not split:
            raise ValueError(f"{where[0]} is {name!r}, which is none of {', '.join(NAMES)}")
    if mark is None or mark.strip().lower() in FALSE:
        return split
    if mark.strip().lower() not in TRUE:
        raise ValueError(f"{where[1]} is {mark!r}, which is neither true nor false")
    if split == "test":
        raise ValueError(f"{where[0]} is {name!r}, but {where[1]} is {mark!r}")
    return "valid"


@dataclass
class SplitColumns:
    """The columns of one table that name the split of its rows. If there is none, every row is of
    the split `whole`.

    The first row of JSON lines says which columns there are: `absent` are those that no later row
    may bring. A row of JSON lines may leave out `mark`. `used` gathers the columns that were read.
    """

    used: set[str]
    whole: str = ""
    split: str | None = None
    mark: str | None = None
    absent: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The columns to read."""
        return [name for name in (self.split, self.mark, *self.absent) if name]

    @property
    def optional(self) -> list[str]:
        """Those of `names` that a row of JSON lines may leave out."""
        return [name for name in (self.mark, *self.absent) if name]

    def rows(
        self, table: Table, columns: Sequence[str], bad: BadRows
    ) -> Iterator[tuple[str, int, list[str | None]]]:
        """(split, line, the values of `columns`) of the table's rows. A row whose split cannot be
        read goes to `bad`."""
        width = len(columns)
        for line, values in table.rows([*columns, *self.names], bad, self.optional):
            try:
                split = self.read(values[width:])
            except ValueError as error:
                bad(table.path, line, str(error))
            else:
                yield split, line, values[:width]

    def read(self, values: Sequence[str | None]) -> str:
        """The split of a row, from its values of `names`. Raises ValueError for wrong ones."""
        found = dict(zip(self.names, values, strict=True))
        if late := [name for name in self.absent if found[name] is not None]:
            raise ValueError(
                f"this row has {late[0]!r}, which the first row has not: write it in every row, or "
                f"give --split-column {NONE}"
            )
        if not (self.split or self.mark):
            return self.whole
        name = (found[self.split] or "") if self.split else None
        mark = (found[self.mark] or "") if self.mark else None
        self.used |= {column for column in (self.split,) if column}
        self.used |= {column for column in (self.mark,) if column and mark}
        try:
            return split_of(name, mark, (f"column {self.split!r}", f"column {self.mark!r}"))
        except ValueError as error:
            raise ValueError(
                f"{error}; --split-column NAME reads another column; --split-column {NONE} "
                "draws the splits at random"
            ) from None


def find(
    table: Table, given: str | None, others: Sequence[str], split: str, used: set[str]
) -> SplitColumns:
    """The columns of a table that name the split of its rows: the one `given` by --split-column, or
    those called `split`, `set` and `validation` that are not among the `others` in use.

    A table that is given as the file of one `split` needs none. Raises BadInput where `given` is no
    column, and where two columns could name the split.
    """
    if given == NONE:
        return SplitColumns(used, split)
    if given is not None and given not in table.columns:
        raise table.missing(given)
    there = {name.lower(): name for name in table.columns if name not in others}
    named = [there[name] for name in SPLIT if name in there]
    mark = there.get(MARK)
    if split:
        if given is not None:
            raise BadInput(
                f"--split-column {given}: {table.path} is named as a file of the split {split}; "
                "give the file alone, as --input FILE"
            )
        if named or mark:
            note_unread(table.path, f"column {named[0] if named else mark!r}", split)
        return SplitColumns(used, split)
    if given is None and len(named) > 1:
        raise BadInput(
            f"{table.path} has the columns {named[0]!r} and {named[1]!r}: which names the splits? "
            f"Give --split-column NAME, or --split-column {NONE} to draw them"
        )
    name = given or (named[0] if named else None)
    if given is not None and given.lower() == MARK:
        name, mark = None, given
    if table.kind not in (".jsonl", ".json"):
        return SplitColumns(used, "", name, mark)
    absent = [other for other in (*SPLIT, MARK) if other not in (*others, *there)]
    if name:
        return SplitColumns(used, "", name, mark or (MARK if MARK in absent else None))
    return SplitColumns(used, "", None, mark, tuple(absent))


def note_unread(path: Path, what: str, split: str) -> None:
    """Say that a file's own marks are not read, because the file is given as one split."""
    line = f"all rows of {path} are of the split {split}, as the file is given"
    say(f"note: {line}: its {what} is not read", error=True)


def refuse_columns(given: str | None, path: Path) -> None:
    """Raise BadInput if --split-column names a column of a file that has none."""
    if given not in (None, NONE):
        raise BadInput(f"--split-column {given}: {path} has no named columns")


def of_header(fields: Sequence[str]) -> dict[str, str]:
    """What the fields `KEY=VALUE` of a FASTA header say: the label as `target`, the split as `set`
    or `split`, and `validation` (FLIP's names)."""
    said = dict(field.split("=", 1) for field in fields if "=" in field)
    known = (*SPLIT, MARK, "target")
    return {key.lower(): value for key, value in said.items() if key.lower() in known}


def of_record(said: dict[str, str]) -> str:
    """The split that `of_header` names, "" if it names none. Raises ValueError saying what is
    wrong."""
    names = [name for name in SPLIT if name in said]
    if len(names) > 1:
        raise ValueError("its header has both SET= and SPLIT=")
    if not names and MARK not in said:
        return ""
    name = said[names[0]] if names else None
    return split_of(name, said.get(MARK), (names[0].upper() if names else "", MARK.upper()))
