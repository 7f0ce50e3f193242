"""Typed settings: a TOML recipe, `key=value` overrides, and help that comes from the fields.

Precedence: default < base recipe < recipe < override. Every settings class is frozen and refuses
keys it does not know; each stands beside the code that owns it.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from xformer.data.errors import BadInput

SettingsType = TypeVar("SettingsType", bound="Settings")


class Settings(BaseModel):
    """Base of every group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def load(schema: type[SettingsType], arguments: list[str], recipe: bool = True) -> SettingsType:
    """Settings from the command line: the path of a recipe (if `recipe`), then key=value.

    A bare `--help` prints every key and exits. Raises BadInput naming the key, the value and the
    nearest valid key.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text(schema))
        sys.exit(0)
    values: dict[str, Any] = {}
    if recipe:
        if not arguments or "=" in arguments[0]:
            raise BadInput(
                "the first argument must be a recipe, such as recipes/pretrain/mini.toml"
            )
        values, arguments = read_recipe(Path(arguments[0])), arguments[1:]
    return validate(schema, merge(schema, values, parse_overrides(arguments)))


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's values over those of its `base`, a path relative to the recipe."""
    if path.resolve() in seen:
        raise BadInput(f"{path}: its chain of `base` recipes is a circle")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.toml")])
        raise BadInput(f"the recipe {path} does not exist{near}") from None
    except IsADirectoryError:
        raise BadInput(f"the recipe {path} is a directory") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from None
    base = values.pop("base", None)
    if base is None:
        return values
    parent = read_recipe(path.parent / base, (*seen, path.resolve()))
    return merge(None, parent, values)


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """{"optim": {"lr": 1e-4}} of ["optim.lr=1e-4"]: values are TOML, else bare strings."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise BadInput(f"{argument!r} is not of the form key=value")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merge(None, values, value)
    return values


def merge(
    schema: type[Settings] | None, low: dict[str, Any], high: dict[str, Any]
) -> dict[str, Any]:
    """`high` over `low`, group by group."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        if key == "data":  # `data=STORE` is short for `data.store=STORE`
            old = {"store": old} if isinstance(old, str) else old
            value = {"store": value} if isinstance(value, str) else value
        if isinstance(old, dict) and isinstance(value, dict):
            value = merge(None, old, value)
        merged[key] = value
    if schema is not None and isinstance(merged.get("data"), str):
        merged["data"] = {"store": merged["data"]}
    return merged


def validate(schema: type[SettingsType], values: dict[str, Any]) -> SettingsType:
    """The settings of plain values. Raises BadInput with one line for the first thing wrong."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        location = [str(part) for part in first["loc"]]
        name = ".".join(location)
        if first["type"] == "extra_forbidden":
            keys = all_keys(schema)
            raise BadInput(f"unknown key {name}{nearest(name, keys)}") from None
        if first["type"] == "missing":
            raise BadInput(f"{name} must be given: {name}=...") from None
        message = first["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        where = f"{name}={first['input']!r}: " if name else ""
        raise BadInput(f"{where}{message}") from None


def nearest(name: str, choices: list[str]) -> str:
    """ "; did you mean X?" for the choice nearest to a misspelt name, or nothing."""
    last = {choice: choice.rpartition(".")[2] for choice in choices}
    close = difflib.get_close_matches(name, choices, 1)
    close = close or [c for c in choices if last[c] == name.rpartition(".")[2]]
    close = close or difflib.get_close_matches(name.rpartition(".")[2], list(last.values()), 1)
    if not close:
        return ""
    full = next((c for c in choices if close[0] in (c, last[c])), close[0])
    return f"; did you mean {full}?"


def all_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a settings class."""
    keys = []
    for name, field in schema.model_fields.items():
        group = _group(field.annotation)
        keys += all_keys(group, f"{prefix}{name}.") if group else [f"{prefix}{name}"]
    return keys


def _group(annotation: Any) -> type[BaseModel] | None:
    is_group = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_group else None


def help_text(schema: type[BaseModel], prefix: str = "") -> str:
    """One line a key: name, type, default, and the sentence written beside the field."""
    lines = [] if prefix else [(sys.modules["__main__"].__doc__ or "").strip(), "", "Keys:"]
    for name, field in schema.model_fields.items():
        group = _group(field.annotation)
        if group:
            lines += ["", f"  {prefix}{name}.*  {field.description or ''}".rstrip()]
            lines.append(help_text(group, f"{prefix}{name}."))
            continue
        default = (
            ""
            if field.is_required()
            else f" = {_show(field.get_default(call_default_factory=True))}"
        )
        lines.append(f"    {prefix}{name}: {_type_name(field.annotation)}{default}")
        if field.description:
            lines.append(f"        {field.description}")
    return "\n".join(lines)


def _show(value: Any) -> str:
    return (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if value in (True, False)
        else str(value)
    )


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None:
        return (
            "nothing"
            if annotation is type(None)
            else getattr(annotation, "__name__", str(annotation))
        )
    if str(origin).endswith("Literal"):
        return " | ".join(_show(a) for a in arguments)
    if origin is Union or str(origin).endswith("UnionType"):
        return " | ".join(_type_name(a) for a in arguments)
    if str(origin).endswith("Annotated"):
        return _type_name(arguments[0])
    return f"{origin.__name__} of {' | '.join(_type_name(a) for a in arguments if a is not ...)}"
