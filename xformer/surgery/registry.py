"""The decorator `operation`, which lets Python, recipes and the shell call one plain function.

The function's signature is the schema of its arguments, and its docstring is their help. None of
the three needs a list of operations. (The forecast of a study knows some by name.)
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import ConfigDict, Field, create_model, model_validator

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.config import Settings, all_keys, nearest, toml_value, validate
from xformer.data.errors import BadInput
from xformer.data.joined import open_stores

Function = TypeVar("Function", bound=Callable[..., Checkpoint])
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# one argument of "a=1, b=[2, 3]": everything up to a comma outside brackets and quotes
ARGUMENT = re.compile(r"""(?:\[[^\]]*\]|"[^"]*"|'[^']*'|[^,])+""")
FIRST = ("seed", "op")  # config.json has always written these fields first, so they stay first


class Operation(Settings):
    """One operation with its arguments, checked as far as that is possible without a checkpoint.

    `operation` makes a subclass for each function. Its fields are `op`, the name of the function,
    and the arguments.
    """

    model_config = ConfigDict(use_attribute_docstrings=False)
    if TYPE_CHECKING:
        op: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, as JSON values. A `seed` of None means the run's."""
        return self.model_dump(mode="json", exclude={"op"})

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if check := OPERATIONS[self.op].check:
            with naming(self.op):
                check(**self.arguments)
        return self


class Registered(NamedTuple):
    """An operation in the table: its plain function, the schema of its arguments, and a check that
    the arguments do not contradict each other. Calls of the plain function are not recorded."""

    function: Callable[..., Checkpoint]
    schema: type[Operation]
    check: Callable[..., None] | None


OPERATIONS: dict[str, Registered] = {}


def operation(function: Function, check: Callable[..., None] | None = None) -> Function:
    """Register a function that takes a checkpoint and arguments, and returns another checkpoint.

    Each argument needs a type annotation and an entry `name: Sentence.` in the section `Args:` of
    the docstring. `check` gets the arguments by name and raises BadInput if they contradict each
    other.

    A call of the decorated function checks its arguments in the same way as arguments in a recipe
    are checked. It adds the operation to the history of the checkpoint that it returns.
    """
    name = function.__name__
    signature = inspect.signature(function, eval_str=True)
    before = OPERATIONS.get(name)
    if before and before.function.__module__ != function.__module__:
        raise TypeError(f"there is an operation {name} already, in {before.function.__module__}")
    OPERATIONS[name] = Registered(function, _schema(function, signature), check)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Checkpoint:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            takes = ", ".join(signature.parameters)
            raise TypeError(f"{name}: {error}; its arguments are {takes}") from None
        given = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
        checkpoint = given.pop("checkpoint")
        if not isinstance(checkpoint, Checkpoint):
            what = type(checkpoint).__name__
            raise BadInput(
                f"{name} takes a checkpoint, such as checkpoint.load(PATH), not a {what}"
            )
        return apply(checkpoint, [make_operation(name, given)])

    return cast(Function, recorded)


def _schema(function: Callable[..., Checkpoint], signature: inspect.Signature) -> type[Operation]:
    """The settings class of an operation, built from its signature and docstring."""
    name = function.__name__
    about, sentences = split_docstring(function)
    fields: dict[str, Any] = {"op": (Literal[name], name)}
    for argument in list(signature.parameters.values())[1:]:
        annotation = argument.annotation
        if annotation is argument.empty or argument.name not in sentences:
            raise TypeError(
                f"operation {name}: the argument {argument.name} needs a type annotation and, in "
                f"the docstring, an entry '{argument.name}: Sentence.' under 'Args:'"
            )
        default = ... if argument.default is argument.empty else argument.default
        if argument.name == "seed":  # None: the seed of the recipe or of the command line
            annotation = annotation | None
            default = None
        fields[argument.name] = annotation, Field(default, description=sentences[argument.name])
    return create_model(
        name,
        __base__=Operation,
        __doc__=about.partition("\n\n")[0],
        __module__=function.__module__,
        **{field: fields[field] for field in (*FIRST, *fields) if field in fields},
    )


def split_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description in an operation's docstring, and the entries under `Args:` by name."""
    about, _, rest = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", rest.partition("\n\n")[0], re.MULTILINE)
    return about, dict(entries)


def in_words(name: str) -> str:
    """What an operation does, in a few words: "re-initialise the word embeddings and nothing else"
    for clean_embeddings."""
    about = " ".join(split_docstring(OPERATIONS[name].function)[0].split())
    words = re.split(r" \(|\.", about)[0]
    return words[:1].lower() + words[1:]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the operation's name in front of a BadInput that does not start with it."""
    try:
        yield
    except BadInput as error:
        text = str(error)
        raise BadInput(text if text.startswith(name) else f"{name}: {text}") from None


def make_operation(name: str, values: dict[str, Any]) -> Operation:
    """An operation with these arguments. Raises BadInput if an argument is unknown, missing or not
    allowed."""
    with naming(name):
        return validate(OPERATIONS[name].schema, values)


def apply(checkpoint: Checkpoint, operations: Sequence[Operation], seed: int = 0) -> Checkpoint:
    """Apply operations in order and record each in the history of the checkpoint returned.

    `seed` is for operations that set none. The given checkpoint does not change; weights that no
    operation changes are shared with it, not copied. Raises BadInput, naming the operation, if it
    cannot be applied to this model.
    """
    for step in operations:
        arguments = step.arguments
        if "seed" in arguments and arguments["seed"] is None:
            arguments["seed"] = seed
        with naming(step.op):
            checkpoint = OPERATIONS[step.op].function(checkpoint, **arguments)
        given = {name: value for name, value in arguments.items() if value is not None}
        record = {"op": step.op, **given, **content(step)}
        checkpoint = replace(checkpoint, history=(*checkpoint.history, record))
    return checkpoint


def content(step: Operation) -> dict[str, str]:
    """{"sha256": key} of the checkpoint or store that an operation reads; {} if it reads none."""
    if step.op == "transplant":
        return {"sha256": checkpoints.content_key(checkpoints.resolve(step.arguments["source"]))}
    if step.op == "substitute_unused":
        return {"sha256": open_stores(step.arguments["store"]).key}
    return {}


def parse_operation(text: str) -> Operation:
    """Parse an operation as it is written on the command line: "shuffle_embeddings(seed=1)".

    Values are TOML, or bare strings if they are not valid TOML. Raises BadInput that names the
    operation and the argument, and suggests the nearest valid name.
    """
    if not (match := re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\)\s*)?", text, re.DOTALL)):
        raise BadInput(f"{text!r} is not of the form name or name(argument=value, ...)")
    name, inside = match[1], match[2] or ""
    if inside.count("[") != inside.count("]"):
        raise BadInput(f"{text!r} has unbalanced brackets")
    if name not in OPERATIONS:
        there = f"; the operations are {', '.join(OPERATIONS)}, written like 'keep_layers(first=6)'"
        hint = nearest(name, list(OPERATIONS)) or there
        raise BadInput(f"unknown operation {name!r}{hint}")
    types = all_keys(OPERATIONS[name].schema)
    del types["op"]
    values: dict[str, Any] = {}
    for argument in filter(str.strip, ARGUMENT.findall(inside)):
        key, equals, value = (part.strip() for part in argument.partition("="))
        if not equals or not key:
            takes = ", ".join(f"{key}=..." for key in types) or "no arguments"
            raise BadInput(f"{name}: {argument.strip()!r} is not argument=value; it takes {takes}")
        if key in values:
            raise BadInput(f"{name}: {key} is given twice")
        values[key] = _value(value, types.get(key))
    return make_operation(name, values)


def _value(text: str, wanted: Any) -> Any:
    """The value of the text as TOML, or the text itself if it is not TOML.

    If the argument is a string, TOML of another type, such as 2026, stays text. If the argument is
    not a boolean, `true` stays text too, because pydantic would read it as the number 1.
    """
    value = toml_value(text)
    if wanted is str and not isinstance(value, str):
        return text
    if isinstance(value, bool) and wanted is not bool:
        return text
    return value
