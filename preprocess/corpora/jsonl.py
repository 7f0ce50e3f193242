"""The text in one field of JSON objects: one object a line, or a .json file with one array."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xformer.data.errors import BadInput

from ..bad import BadRows
from ..binarize import open_binary, read_lines, unpacked_name

_BETWEEN = re.compile(r"[\s,]*")


def read_json_texts(
    path: Path, field: str, bad: BadRows, advance: Callable[[int], None] = lambda _: None
) -> Iterator[str]:
    """Yield the text in `field` of every object. Memory holds the longest line, or a whole array.

    A value goes to `bad` with its line if it is not an object, lacks the field, or has something
    other than text in it. So does a line that is not UTF-8 or not JSON. Raises BadInput if a file
    with an array is not UTF-8 or not JSON. `advance` is called with the size of each block read
    from the disk.
    """
    values = _array(path, advance) if _is_array(path) else _lines(path, bad, advance)
    for line, value in values:
        if not isinstance(value, dict):
            bad(path, line, f'not a JSON object such as {{"{field}": "..."}}')
        elif field not in value:
            names = ", ".join(map(repr, list(value)[:5])) or "nothing"
            bad(path, line, f"no field {field!r}; it has {names}; name another with --field")
        elif not isinstance(value[field], str):
            bad(path, line, f"the field {field!r} is not text: {_shortened(value[field])}")
        elif _is_unicode(value[field]):
            yield value[field]
        else:
            bad(path, line, f"the field {field!r} holds half of a surrogate pair")


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


def _is_array(path: Path) -> bool:
    if unpacked_name(path).suffix.lower() != ".json":
        return False
    with open_binary(path) as file:
        return file.read(2**16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _array(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
    text = "\n".join(line for _, line in read_lines(path, None, advance))
    decoder, place, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while True:
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, place), place
        if text.startswith("]", place):
            break
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}:{line}: not valid JSON: {error}") from None
        yield line, value
    if text[place + 1 :].strip():
        raise BadInput(f"{path}:{line}: not valid JSON: there is more text after the array")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
