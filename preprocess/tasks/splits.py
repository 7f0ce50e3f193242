"""Reads which split a row belongs to, if its source says so.

The source may have a column `split` or `set`, and a column `validation`. FASTA headers may have
fields with the same names (FLIP: `SET=train VALIDATION=True`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.store import SPLIT_NAMES

from ..bad import BadRows
from .tables import RowTable

SPLIT, MARK = ("split", "set"), "validation"
NONE = "none"  # the value of --split-column that reads no column
TRUE = ("true", "1", "1.0", "yes")
FALSE = ("false", "0", "0.0", "no", "", "nan", "none")


def split_of(name: str | None, mark: str | None, where: Sequence[str]) -> str:
    """The split of a row, from the name of its split and from the mark of rows for validation.

    Either is None if the source does not have it. `where` holds the names that the source has for
    the two, for messages. Raises ValueError if the values are unknown or contradict each other.
    """
    split = "train"
    if name is not None:
        split = SPLIT_NAMES.get(name.strip().lower(), "")
        if not split:
            raise ValueError(
                f"{where[0]} is {name!r}, which is not one of {', '.join(SPLIT_NAMES)}"
            )
    if mark is None or mark.strip().lower() in FALSE:
        return split
    if mark.strip().lower() not in TRUE:
        raise ValueError(f"{where[1]} is {mark!r}, which is neither true nor false")
    if split == "test":
        raise ValueError(f"{where[0]} is {name!r}, but {where[1]} is {mark!r}")
    return "valid"


@dataclass
class SplitColumns:
    """The columns of one table that name the split of its rows.

    If there are none, every row belongs to the split `whole`. In JSON lines the first row decides
    which columns exist. Later rows may omit `mark`, but may not add a column listed in `absent`.
    `used` collects the columns that were read.
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
        self, table: RowTable, columns: Sequence[str], bad: BadRows
    ) -> Iterator[tuple[str, int, list[str | None]]]:
        """Yield (split, line, values of `columns`) of the table's rows.

        A row whose split cannot be read goes to `bad`.
        """
        width = len(columns)
        for line, values in table.rows([*columns, *self.names], bad, self.optional):
            try:
                split = self.read(values[width:])
            except ValueError as error:
                bad(table.path, line, str(error))
            else:
                yield split, line, values[:width]

    def read(self, values: Sequence[str | None]) -> str:
        """The split of a row, from its values of the columns `names`.

        Raises ValueError if the values are unknown or contradict each other.
        """
        by_name = dict(zip(self.names, values, strict=True))
        if late := [name for name in self.absent if by_name[name] is not None]:
            raise ValueError(
                f"this row has {late[0]!r}, but the first row does not: write it in every row, or "
                f"give --split-column {NONE}"
            )
        if not (self.split or self.mark):
            return self.whole
        name = (by_name[self.split] or "") if self.split else None
        mark = (by_name[self.mark] or "") if self.mark else None
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
    table: RowTable, given: str | None, others: Sequence[str], split: str, used: set[str]
) -> SplitColumns:
    """The columns of a table that name the split of its rows.

    This is the column `given` by --split-column, or else the columns called `split`, `set` and
    `validation` that are not among the `others` in use. No column is read if the table was given as
    the file of one `split`. Raises BadInput if `given` is not a column, or if two columns could
    name the split.
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
                f"--split-column {given}: {table.path} is already given as a file of the split "
                f"{split}; give it as --input FILE instead"
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
    """Say that the splits a file names are ignored, because the file was given as one split."""
    line = f"{path} was given as the split {split}, so all its rows belong to it"
    say(f"note: {line}; its {what} is not read", error=True)


def refuse_columns(given: str | None, path: Path) -> None:
    """Raise BadInput if --split-column names a column, but the file has no named columns."""
    if given not in (None, NONE):
        raise BadInput(f"--split-column {given}: {path} has no named columns; leave the option out")


def of_header(fields: Sequence[str]) -> dict[str, str]:
    """The values of the fields `KEY=VALUE` of a FASTA header that have FLIP's names: the label as
    `target`, the split as `set` or `split`, and `validation`."""
    values = dict(field.split("=", 1) for field in fields if "=" in field)
    known = (*SPLIT, MARK, "target")
    return {key.lower(): value for key, value in values.items() if key.lower() in known}


def of_record(values: dict[str, str]) -> str:
    """The split that the values of `of_header` name, or "" if they name none.

    Raises ValueError if they are unknown or contradict each other.
    """
    names = [name for name in SPLIT if name in values]
    if len(names) > 1:
        raise ValueError("its header has both SET= and SPLIT=")
    if not names and MARK not in values:
        return ""
    name = values[names[0]] if names else None
    return split_of(name, values.get(MARK), (names[0].upper() if names else "", MARK.upper()))
