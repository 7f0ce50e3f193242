"""The text in one field of JSON objects: one object a line, or a .json file with one value."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xformer.data.errors import BadInput
from xformer.data.tokenizers import HALF

from ..bad import BadRows
from ..binarize import open_binary, read_lines, unpacked_name

NAME_ANOTHER = "name another with --field"
_BETWEEN = re.compile(r"\s*(,?)\s*")


def read_json_texts(
    path: Path, field: str, bad: BadRows, advance: Callable[[int], None]
) -> Iterator[str]:
    """Yield the texts in `field` of every object. Memory holds the longest line, or a whole file of
    one value.

    `a.b` means: in field `a`, which holds an object or a list of objects, take field `b`. A field
    may hold one text, or a list of texts. A value goes to `bad` with its line if it is not an
    object, lacks the field, or has something other than text in it. So does a line that is not
    UTF-8 or not JSON. Raises BadInput if a file of one value is not UTF-8 or not JSON. `advance` is
    called with the size of each block read from the disk, or of each value of an array.
    """
    values = _whole(path, advance) if _is_whole(path) else _lines(path, bad, advance)
    for line, value in values:
        if not isinstance(value, dict):
            bad(path, line, f'not a JSON object such as {{"{field}": "..."}}')
            continue
        texts = list(_within(value, [field] if field in value else field.split(".")))
        if not texts:
            names = ", ".join(map(repr, list(value)[:5])) or "nothing"
            bad(path, line, f"no field {field!r}; it has {names}; {_remedy(value)}")
        for text in texts:
            if not isinstance(text, str):
                bad(path, line, f"the field {field!r} is not text: {_shortened(text)}")
            elif not text.isascii() and HALF.search(text):
                bad(path, line, f"the field {field!r} holds half of a surrogate pair")
            else:
                yield text


def _within(value: Any, names: list[str]) -> Iterator[Any]:
    """Yield the values in a nested field: each name is a field inside the one before. A list on the
    way stands for all its objects. A list of texts at the end yields its texts."""
    if isinstance(value, list) and (names or (value and all(isinstance(v, str) for v in value))):
        for item in value:
            if not isinstance(item, list):
                yield from _within(item, names)
    elif not names:
        yield value
    elif isinstance(value, dict) and names[0] in value:
        yield from _within(value[names[0]], names[1:])


def _remedy(value: Any) -> str:
    """What to do if an object lacks the field: it names the field of the object's longest text."""
    longest, best = 0, ""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{name}.{key}".lstrip("."), item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(name, item) for item in value[:3] if not isinstance(item, list)]
        elif isinstance(value, str) and len(value) > longest:
            longest, best = len(value), name
    return f"--field {shlex.quote(best)} reaches its longest text" if best else NAME_ANOTHER


def _lines(path: Path, bad: BadRows, advance: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
    for number, line in read_lines(path, bad, advance):
        if line and not line.isspace():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                bad(path, number, f"not valid JSON: {error}")
            else:
                line = ""  # frees a long line before the next one is read
                yield number, value


def _is_whole(path: Path) -> bool:
    """Whether a file is one array, or one object on several lines, and not one object a line."""
    if unpacked_name(path).suffix.lower() != ".json":
        return False
    with open_binary(path) as file:
        start = file.read(2**16).removeprefix(b"\xef\xbb\xbf").lstrip()
    first, line_end, _ = start.partition(b"\n")
    object_goes_on = first[:1] == b"{" and line_end and not first.rstrip().endswith(b"}")
    return first[:1] == b"[" or bool(object_goes_on)


def _whole(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of the values of an array, or an object."""
    text, size, told = "\n".join(line for _, line in read_lines(path)), path.stat().st_size, 0
    if text.lstrip().startswith("{"):
        advance(size)
        try:
            yield 1, json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}: not valid JSON: {error}") from None
        return
    decoder, place, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    first = True
    while True:
        between = _BETWEEN.match(text, place)
        assert between is not None  # it also matches nothing
        comma, place = bool(between[1]), between.end()
        line, counted = line + text.count("\n", counted, place), place
        if text.startswith("]", place) and not comma:
            break
        try:
            if comma == first:
                raise ValueError("one comma must stand between two values, and ] behind the last")
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}:{line}: not valid JSON: {error}") from None
        read = size * place // len(text)
        advance(read - told)
        told, first = read, False
        yield line, value
    advance(size - told)
    if text[place + 1 :].strip():
        raise BadInput(f"{path}:{line}: not valid JSON: there is more text after the array")


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
