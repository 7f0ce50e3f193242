"""Answers as spans of a context: from tokens back to the exact text."""

from __future__ import annotations

from xformer.data.store import Split


def answer(split: Split, row: int, first: int, last: int) -> str:
    """The text of the context from token `first` to token `last` of a row's window, both counted
    from 0 and included; "" where they are -1."""
    if first < 0 or last < first:
        return ""
    columns = split.columns
    context = int(columns["question.context"][columns["group"][row]])
    window = int(columns["window"][row])
    start = columns["context.starts"][context][window + first]
    end = columns["context.ends"][context][window + last]
    return columns["context.text"].text(context)[start:end]
