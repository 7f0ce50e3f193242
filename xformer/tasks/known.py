"""All tasks, by name."""

from __future__ import annotations

from xformer.data.errors import BadInput
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
    """The class of the task with this name. With `pairs`, MLM becomes its variant with a pair
    head. Raises BadInput if there is no such task."""
    if name not in TASKS:
        raise BadInput(f"there is no head {name!r}; give one of {', '.join(TASKS)}")
    return Pairs if pairs and TASKS[name].predicts_masked else TASKS[name]


def task_of(head: Head) -> Task:
    """The task of a head."""
    return kind_of(head.kind, head.pair_scale > 0)(head)
