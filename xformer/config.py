"""Typed settings from TOML recipes and `key=value` overrides, and the text of --help.

Overrides take precedence over the recipe, the recipe over its base, and the base over defaults.
Every settings class is frozen, refuses unknown keys, and is defined next to the code that uses it.
"""

from __future__ import annotations

import difflib
import json
import re
import stat
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import getdoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from xformer.data.display import one_line, say
from xformer.data.errors import BadInput, typed

WIDTH = 100  # width of help texts in columns
SHORT = {"seed": "all"}  # `seed = N` is short for `seed.all = N`
LARGEST = 2**24  # largest size of a recipe in bytes
OPERATION = '{op = "clean"}'  # the example in messages
HIDDEN: JsonDict = {"hidden": True}  # as json_schema_extra: --help leaves the key out

SettingsType = TypeVar("SettingsType", bound="Settings")


class Settings(BaseModel):
    """The base class of every group of settings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def having(self, group: str, **values: Any) -> Self:
        """These settings with other values in one group."""
        return self.model_copy(update={group: getattr(self, group).model_copy(update=values)})


def _paths(value: Any, info: ValidationInfo) -> Any:
    """One path as a string, even if it was given as a list; several as a tuple."""
    name = info.field_name
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        if twice := [path for path in value if value.count(path) > 1]:
            raise ValueError(f"{name} names {twice[0]} twice; give each path once")
        return value[0] if len(value) == 1 else tuple(value)
    if isinstance(value, dict) and value:
        key = f"{name}.{next(iter(value))}"
        raise ValueError(f"there is no setting {key}: {name} is a path or a list of paths")
    if not isinstance(value, str | None):
        raise ValueError(f"{name}={_repr(value)[:80]} must be a path or a list of paths")
    return value


Paths = Annotated[str | tuple[str, ...], BeforeValidator(_paths)]  # a path, or a list of paths
MaybePaths = Annotated[str | tuple[str, ...] | None, BeforeValidator(_paths)]
# types of fields that take strings, and the types in Paths and MaybePaths
TEXT = (str, str | None)
PATHS = (str | tuple[str, ...], str | tuple[str, ...] | None)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A value with each string in it changed, but not the keys of its groups."""
    if isinstance(value, dict):
        return {key: each_text(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [each_text(part, change) for part in value]
    return change(value) if isinstance(value, str) else value


def each(paths: str | Sequence[str]) -> tuple[str, ...]:
    """The paths of a setting of type `Paths`, always as a tuple."""
    return (paths,) if isinstance(paths, str) else tuple(paths)


def follows(key: str, values: dict[str, Any], other: Any, **limits: Any) -> Any:
    """A field whose default depends on the value of `key`, an earlier field of the same group. The
    default is the entry of `values` for that value, or `other` if there is none. --help shows all
    defaults. `limits` are passed to Field."""
    choices = [f"{show(value)} for {name}" for name, value in values.items()]
    shown = f"{', '.join(choices)}, {show(other)} for all others"
    return Field(
        default_factory=lambda before: values.get(before.get(key), other),
        json_schema_extra={"shown": shown},
        **limits,
    )


def load(
    schema: type[SettingsType],
    arguments: list[str],
    recipe: bool = True,
    title: str | None = None,
) -> SettingsType:
    """Settings from command-line arguments: a recipe by path or name (if `recipe`), then key=value.

    With --help, prints every key (see `help_text`) and exits. Raises BadInput that names the wrong
    key, its value and the nearest valid key.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        say(*help_text(schema, title).split("\n"))
        sys.exit(0)
    values: dict[str, Any] = {}
    if isinstance(arguments, str):
        raise BadInput(f"give a list of arguments: [{arguments!r}, ...]")
    if recipe:
        if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
            such = typed("such as recipes/pretrain/mini.toml")
            lists = "`xformer recipes` lists them"
            raise BadInput(f"the first argument must be a recipe, {such}; {lists}")
        values, name, *arguments = read_recipe(find_recipe(arguments[0])), *arguments
        if "scales" in values:
            study = typed("python -m xformer.study")
            raise BadInput(f"{name} is a study, not a recipe: run it with {study} {name} scale=...")
    overrides = parse_overrides(schema, arguments)
    _refuse_hiding(values, overrides)
    return validate(schema, merge(values, overrides))


def recipes() -> dict[str, Path]:
    """The recipes that come with the package: {"pretrain/mini": its file, ...}.

    An installed package contains the recipes. In a checkout they are next to the package.
    """
    own = Path(__file__).parent / "recipes"
    files = (own if own.is_dir() else own.parents[1] / "recipes").glob("*/*.toml")
    return {f"{file.parent.name}/{file.stem}": file for file in sorted(files)}


def find_recipe(text: str, beside: Path = Path(), kind: str = "") -> Path:
    """The file of a recipe, given by its path relative to `beside` or by its name in `recipes()`.
    With a `kind` such as "studies", the name may omit that folder. If there is no such recipe, the
    text is returned as a path, which `read_recipe` refuses."""
    path = beside / text
    if path.exists() and not path.is_dir():
        return path
    named = recipes()
    return named.get(text) or named.get(f"{kind}/{text}") or path


def _nearest_recipe(path: Path, studies: bool) -> str:
    """ "; did you mean X?" for a recipe that does not exist. X is a file beside it, or a name. If
    none is near, the recipes of its folder, or the `studies`, or all but the studies."""
    names = list(recipes())
    beside = {file.stem: file.name for file in path.parent.glob("*.toml")}
    in_folder = [name for name in names if name.startswith(f"{path.parent.name}/")]
    stems = [{n.partition("/")[2]: n for n in some} for some in (in_folder, reversed(names))]
    for known in (beside, *stems):  # if stems are equal, a study's comes last
        if close := difflib.get_close_matches(path.stem, known, 1):
            return f"; did you mean {known[close[0]]}?"
    folders = (path.parent.name, path.stem)
    listed = [name for name in names if name.partition("/")[0] in folders]
    listed = listed or [name for name in names if name.startswith("studies/") == studies]
    return f"; there are {', '.join(listed)}" if listed else ""


def read_recipe(path: Path, seen: tuple[Path, ...] = (), what: str = "recipe") -> dict[str, Any]:
    """The values of a recipe, merged over those of its `base`: a path relative to the recipe, or a
    name. Raises BadInput if a file is missing or is not a recipe; the message calls it `what`."""
    try:
        if path.resolve() in seen:
            raise BadInput(f"{path}: its chain of `base` recipes is circular; remove one base")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise BadInput(f"the {what} {path} is a device or a pipe; give a file")
        if status.st_size > LARGEST:
            size = f"{status.st_size:,} bytes"
            raise BadInput(f"the {what} {path} has {size}, more than {LARGEST:,}; give a TOML file")
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        near = _nearest_recipe(path, what != "recipe")
        raise BadInput(f"the {what} {path} does not exist{near}") from None
    except IsADirectoryError:
        raise BadInput(f"the {what} {path} is a directory; give a file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8; save it in this encoding") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from None
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str) or "\0" in base:
        raise BadInput(f"{path}: base={base!r} is not the path of a recipe")
    file = find_recipe(base, path.parent)
    below = read_recipe(file, (*seen, path.resolve()))
    if file.resolve().parent != path.resolve().parent:
        _make_absolute(below, file.parent)
    return merge(below, values)


def _make_absolute(values: dict[str, Any], folder: Path) -> None:
    """Make the recipe paths in a study's stages absolute. They are relative to the study's
    `folder`, but a study that is based on this one may be in another folder."""
    scales = values.get("scales")
    parts = [values, *(scales.values() if isinstance(scales, dict) else ())]
    for part in filter(lambda part: isinstance(part, dict), parts):
        stages = part.get("stages")
        for stage in stages.values() if isinstance(stages, dict) else ():
            if isinstance(stage, dict) and isinstance(stage.get("recipe"), str):
                stage["recipe"] = str(find_recipe(stage["recipe"], folder).absolute())


def parse_overrides(schema: type[Settings], arguments: list[str]) -> dict[str, Any]:
    """Overrides as nested values: ["optim.lr=1e-4"] -> {"optim": {"lr": 1e-4}}.

    Values are parsed as TOML; values that are not TOML are strings. For keys that take strings, a
    value such as 2026 remains a string. Raises BadInput if an argument is not KEY=VALUE.
    """
    types = all_keys(schema)
    values: dict[str, Any] = {}
    for number, argument in enumerate(arguments):
        if argument.startswith("-") and "=" not in argument:
            raise _as_key(argument, arguments[number + 1 :], types)
        key, equals, text = argument.partition("=")
        if not equals or not all(key.split(".")):
            raise BadInput(f"{argument!r} is not of the form key=value, such as optim.lr=1e-4")
        value = toml_value(text)
        if types.get(key) in TEXT and not isinstance(value, str | dict):
            value = text
        if types.get(key) in PATHS and not isinstance(value, str | dict | list):
            value = text
        for part in reversed(key.split(".")):
            value = {part: value}
        _refuse_hiding(values, value)
        values = merge(values, value)
    return values


def _as_key(option: str, following: list[str], types: dict[str, Any]) -> BadInput:
    """The error for an option such as --data X in place of the setting data=X."""
    name = option.lstrip("-").replace("-", "_")
    if not (key := name if name in types else closest(name, list(types))):
        return BadInput(f"{option!r} is not of the form key=value; --help lists the keys")
    value = next((text for text in following[:1] if not text.startswith("-")), "...")
    value = "true" if types.get(key) is bool else value
    write = key if "=" in key else f"{key}={value}"
    return BadInput(f"{option!r} is not of the form key=value; write {write}")


def toml_value(text: str) -> Any:
    """A value that is written as TOML, or the text itself if it is not valid TOML."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text  # the text may have several lines


def merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """The values of `low` and `high`, merged group by group; those of `high` take precedence.
    `seed = N` is short for `seed.all = N`."""
    merged: dict[str, Any] = {}
    for key in [*low, *(key for key in high if key not in low)]:
        pair = [values[key] for values in (low, high) if key in values]
        if key in SHORT and any(isinstance(value, dict) for value in pair):
            pair = [value if isinstance(value, dict) else {SHORT[key]: value} for value in pair]
        if len(pair) == 2 and isinstance(pair[0], dict) and isinstance(pair[1], dict):
            merged[key] = merge(pair[0], pair[1])
        else:
            merged[key] = pair[-1]
    return merged


def _refuse_hiding(low: dict[str, Any], high: dict[str, Any], group: str = "") -> None:
    """Raise BadInput if a value of `high` would hide a whole group of `low`. `group` precedes the
    keys in the message."""
    for key, value in high.items():
        below, name = low.get(key), group + key
        if not isinstance(below, dict) or key in SHORT:
            continue
        if isinstance(value, dict):
            _refuse_hiding(below, value, f"{name}.")
        elif below:
            raise BadInput(
                f"{name}={show(value)} would hide {name}.{next(iter(below))}: give either a value "
                f"or a group of keys, {name}.KEY=VALUE"
            )


def validate(schema: type[SettingsType], values: dict[str, Any]) -> SettingsType:
    """The settings with these values. Raises BadInput with a line for each mistake."""
    _refuse_nul(values)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise BadInput(*_complaints(schema, values, error.errors())) from None


def _refuse_nul(values: dict[str, Any]) -> None:
    """Raise BadInput if a text contains a NUL character, which no path can contain. The message
    names the key."""
    left: list[tuple[str, Any]] = [("", values)]
    while left:  # a loop, because values may be nested too deeply for a recursion
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{name}.{key}" if name else str(key), v) for key, v in value.items()]
        elif isinstance(value, list | tuple):
            left += [(name, v) for v in value]
        elif isinstance(value, str) and "\0" in value:
            raise BadInput(f"{name}={value[:80]!r} holds a NUL character; leave it out")


def _complaints(
    schema: type[Settings], values: dict[str, Any], errors: list[ErrorDetails]
) -> list[str]:
    """pydantic's errors as lines, at most one for each value. pydantic reports an error for every
    type that a value may have. An error about a part of the value is preferred to one about the
    whole; of several, the first is kept."""
    lines: dict[tuple[str | int, ...], str] = {}
    for error in errors:
        place = _place(values, error)
        lines.setdefault(place, _complaint(schema, error, list(place)))
    inner = {place[:n] for place in lines for n in range(len(place))}
    return [line for place, line in lines.items() if place not in inner]


def _place(values: Any, error: ErrorDetails) -> tuple[str | int, ...]:
    """The keys and indices that lead to an error. pydantic adds the names of types to them."""
    place: list[str | int] = []
    for part in error["loc"]:
        try:
            values = values[part]
        except (LookupError, TypeError):
            continue
        place.append(part)
    return (*place, *error["loc"][-1:]) if error["type"] == "missing" else tuple(place)


def _complaint(schema: type[Settings], error: ErrorDetails, place: list[str | int]) -> str:
    """pydantic's error as one line: the key, the value, and what a correct value is."""
    kind, value = error["type"], _repr(error["input"])
    message = error["msg"].replace("tuple", "list").replace("Tuple", "list")
    if kind == "missing" and isinstance(last := place[-1], int):
        kind, message = "too_short", f"this list needs at least {last + 1} values"
        place.pop()
    name = ".".join(map(str, place))
    if kind == "extra_forbidden":
        keys = all_keys(schema)
        choices = [*keys, *sorted({key.rpartition(".")[0] for key in keys})]  # keys and groups
        in_list = any(isinstance(part, int) for part in place)
        near = "" if in_list else nearest(name, choices) or "; --help lists the keys"
        return f"unknown key {name}{near}"
    if kind == "missing":
        return f"{name} must be given: {name}=..."
    if kind == "value_error":  # from one of our validators, whose messages name the key
        return message.removeprefix("Value error, ")
    if kind == "model_type":
        near = _synonym(name, all_keys(schema))
        hint = f"; did you mean {near}?" if near else ""
        message = f"this is a group of keys; give {name}.KEY=VALUE{hint}"
    elif kind == "union_tag_invalid":
        message = f"its op must be one of {error['ctx']['expected_tags']}, as in {OPERATION}"
    elif kind in ("union_tag_not_found", "model_attributes_type"):
        message = f"an operation is written like {OPERATION}"
    elif kind.startswith("bool"):
        message = "give true or false"
    elif kind == "tuple_type" and isinstance(error["input"], str | int | float):
        of_operations = _operations(all_keys(schema).get(name))
        example = f"[{OPERATION}]" if of_operations else show([error["input"]])
        message = f"give a list, such as {name}='{example}'"
    return f"{name}={one_line(value, 80)}: {message[:1].lower()}{message[1:]}"


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except RecursionError:
        return "{... very deep ...}"


# a key, or a key with its value -> the names that other programs use for it
SYNONYMS = {
    "batch.accumulate": "gradient_accumulation_steps grad_accum accumulate_grad_batches "
    "update_freq",
    "batch.max_tokens": "max_length max_len max_seq_length max_seq_len seq_length seq_len "
    "model_max_length block_size tokens_per_sample",
    "batch.rows": "batch bs batch_size train_batch_size per_device_train_batch_size max_sentences",
    "batch.tokens": "tokens_per_batch max_tokens_per_batch",
    "data": "dataset dataset_name data_dir store train train_data train_file",
    "head": "task task_name",
    "init": "checkpoint from model model_name model_name_or_path model_path pretrained "
    "restore_file finetune_from_model",
    "input": "file input_file test_file",
    "loss.label_smoothing": "label_smoothing_factor",
    "masking.spans": "mask_multiple_length",
    "masking.probability": "masking mask_prob mask_rate mlm_prob mlm_probability",
    "model.dropout": "dropout hidden_dropout_prob",
    "model.attention_dropout": "attention_probs_dropout_prob",
    "model.head_dropout": "classifier_dropout pooler_dropout",
    "model.heads": "heads num_heads num_attention_heads n_heads encoder_attention_heads",
    "model.hidden": "encoder_embed_dim",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.clip": "max_grad_norm gradient_clip_val grad_norm_clip clip_norm",
    "optim.eps": "adam_epsilon adam_eps",
    "optim.lr": "learning_rate peak_lr rate",
    "optim.name": "optim optimizer",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optim.warmup": "warmup_ratio warmup_steps num_warmup_steps",
    "optim.weight_decay": "wd",
    "out": "output output_file output_dir",
    "overwrite": "overwrite_output_dir",
    "run": "out output output_dir resume resume_from resume_from_checkpoint run_dir run_name "
    "save_dir",
    "seed": "random_seed",
    "seed.order": "data_seed",
    "system.precision": "amp dtype fp16 mixed_precision torch_dtype",
    "system.precision=bf16": "bf16",
    "train.checkpoint_every": "save_every save_steps save_interval_updates",
    "train.epochs": "epochs num_epochs n_epochs num_train_epochs max_epochs",
    "train.keep_every": "keep_interval_updates_pattern",
    "train.keep_last": "save_total_limit keep_interval_updates keep_last_epochs",
    "train.log_every": "logging_steps log_steps log_interval",
    "train.metric": "metric metric_for_best_model best_checkpoint_metric",
    "train.only": "freeze",
    "train.patience": "early_stopping early_stopping_patience",
    "train.select": "load_best_model_at_end",
    "train.steps": "max_steps num_steps num_train_steps total_steps max_update total_num_update",
    "train.validate_every": "eval_every eval_steps val_check_interval validate_interval_updates",
}


def _synonym(name: str, choices: Collection[str]) -> str:
    """The key among the choices that other programs call by this name, or "" if there is none."""
    own = name.rpartition(".")[2].lower().replace("-", "_").lstrip("_")
    for key, names in SYNONYMS.items():
        if own in names.split() and key.partition("=")[0] in choices and key != name:
            return key
    return ""


def nearest(name: str, choices: list[str]) -> str:
    """ "; did you mean X?" with the choice nearest to a misspelt name, or "" if none is near."""
    near = closest(name, choices)
    return f"; did you mean {near}?" if near else ""


def closest(name: str, choices: list[str]) -> str:
    """The choice nearest to a misspelt name, or "" if none is near."""
    if synonym := _synonym(name, choices):
        return synonym
    own, last = name.rpartition(".")[2], {c: c.rpartition(".")[2] for c in choices}
    close = difflib.get_close_matches(name, choices, 1, cutoff=0.8)
    close = close or [c for c in choices if last[c] == own]
    close = close or difflib.get_close_matches(name, choices, 1)
    close = close or difflib.get_close_matches(own, list(last.values()), 1)
    if not close:
        return ""
    return next((c for c in choices if close[0] in (c, last[c])), close[0])


def all_keys(schema: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """{dotted key: its type} of a settings class."""
    keys: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        if _is_group(field.annotation):
            keys |= all_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = field.annotation
    return keys


def _is_group(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


# ---------------------------------------------------------------------------------- --help


def help_text(schema: type[BaseModel], title: str | None = None) -> str:
    """The text of --help: the docstring of the running program (or `title`), then the type, the
    default and the description of each key. Commands are spelt as the user has typed this one:
    `xformer train` or `python train.py`."""
    title = sys.modules["__main__"].__doc__ if title is None else title
    return typed("\n".join([(title or "").strip(), "", "Keys:", *_help_lines(schema, "")]))


def _help_lines(schema: type[BaseModel], prefix: str) -> list[str]:
    """The lines of help for the keys of a group, then for its sub-groups."""
    lines: list[str] = []
    groups: list[str] = []
    for name, field in schema.model_fields.items():
        if field.json_schema_extra == HIDDEN:
            continue
        if _is_group(field.annotation):
            title = f"{prefix}{name}.*: {getdoc(field.annotation) or ''}"
            groups += ["", *wrapped(title, 0)]
            groups += _help_lines(field.annotation, f"{prefix}{name}.")
            continue
        lines.append(f"  {prefix}{name}: {type_and_default(field)}")
        lines += wrapped(field.description, 6)
        for operation in _operations(field.annotation):
            lines += _operation_help(operation)
    return lines + groups


def type_and_default(field: FieldInfo) -> str:
    """What --help says of a field's value: "int = 3", "int (required)" or "int (optional)"."""
    kind = type_name(field.annotation)
    if isinstance(field.json_schema_extra, dict):
        return f"{kind} = {field.json_schema_extra['shown']}"
    if field.is_required():
        return f"{kind} (required)"
    value = field.get_default(call_default_factory=True)
    return f"{kind} (optional)" if value is None else f"{kind} = {show(value)}"


def _operation_help(operation: type[BaseModel]) -> list[str]:
    fields = dict(operation.model_fields)
    inside = [f"op = {show(fields.pop('op').default)}"]
    inside += [f"{name} = {type_name(field.annotation)}" for name, field in fields.items()]
    sentences = [getdoc(operation) or ""]
    sentences += [f"{name}: {field.description}" for name, field in fields.items()]
    return wrapped(f"{{{', '.join(inside)}}}", 8) + wrapped(" ".join(sentences), 12)


def wrapped(text: str | None, indent: int) -> list[str]:
    """A text as the lines of a paragraph, at most WIDTH characters wide, indent included."""
    margin = " " * indent
    words = " ".join((text or "").split())
    return textwrap.wrap(words, WIDTH, initial_indent=margin, subsequent_indent=margin)


def _operations(annotation: Any) -> list[type[BaseModel]]:
    """The classes of operations (groups with a field `op`) in the type of a list."""
    if _is_group(annotation):
        return [annotation] if "op" in annotation.model_fields else []
    return [kind for argument in get_args(annotation) for kind in _operations(argument)]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key: {"optim": {"lr": 1e-4}} -> {"optim.lr": 1e-4}. Dotted keys are not
    changed."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


def toml_text(values: dict[str, Any]) -> str:
    """Values as a TOML file that `read_recipe` reads: one line per key, groups as inline tables."""
    return "".join(f"{quoted(key)} = {show(value)}\n" for key, value in values.items())


def quoted(key: str) -> str:
    """A key of TOML, in quotes if it needs them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else show(key)


def show(value: Any) -> str:
    """A value written as TOML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{quoted(key)} = {show(v)}" for key, v in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def type_name(annotation: Any) -> str:
    """A type as --help shows it: "int", "[float, float]", "list of operations", '"a" | "b"'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(show, arguments))
    if origin is tuple:
        one_type = arguments[-1] is Ellipsis
        of = "operations" if _operations(annotation) else type_name(arguments[0])
        return f"list of {of}" if one_type else f"[{', '.join(map(type_name, arguments))}]"
    if origin in (Union, UnionType):
        return " | ".join(type_name(a) for a in arguments if a is not NoneType)
    return "true | false" if annotation is bool else annotation.__name__
