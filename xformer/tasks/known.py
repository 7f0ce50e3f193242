"""All tasks there are, by their names."""

from __future__ import annotations

from xformer.tasks.choice import Choice
from xformer.tasks.classify import Classify
from xformer.tasks.mlm import MLM
from xformer.tasks.pairs import Pairs
from xformer.tasks.regress import Regress
from xformer.tasks.span import Span
from xformer.tasks.tag import Tag
from xformer.tasks.task import Head, Task

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (MLM, Classify, Regress, Span, Tag, Choice)
}


def kind_of(name: str, pairs: bool = False) -> type[Task]:
    """The task of this name; with `pairs` the one that trains a pair head beside it."""
    return Pairs if pairs and TASKS[name].predicts_masked else TASKS[name]


def task_of(head: Head | None) -> Task | None:
    """The task that a head was trained for."""
    if head is None:
        return None
    return kind_of(head.kind, head.pair_scale > 0)(head)
