"""`fetch`: download public data sets from their publishers into a cache.

The file `catalogue.toml` in this directory lists the data sets with their addresses, checksums,
licences and citations.

In the cache, each data set is a directory with the data set's name. It appears only once it is
complete. Its file `SOURCE.json` records the addresses, the checksums of the downloads and of every
unpacked file, the licence and the date. While a data set is incomplete, its downloads
are in `.fetch/NAME`, along with the first checksum seen of each file for which the catalogue has
none.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from xformer.data.display import say
from xformer.data.errors import BadInput, Failure, Interrupted, typed
from xformer.data.files import (
    atomic_directory,
    file_checksum,
    locks,
    make_directory,
    read_json,
    refuse_existing,
    write_json,
)

from .download import File, download
from .unpack import ENDINGS, Unpacker

CATALOGUE = Path(__file__).with_name("catalogue.toml")
RATIO = 20  # by default, an archive may unpack to this many times its own size
CAP = 2**36  # by default, a data set may unpack to this many bytes
REQUIRED = {"licence", "citation", "source", "then"}
ALLOWED = {*REQUIRED, "files", "unpacked", "directory", "by_hand", "note"}
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")


@dataclass(frozen=True)
class DataSet:
    """An entry of a catalogue. `catalogue.toml` explains the keys; `directory` is in the cache."""

    name: str
    licence: str
    citation: str
    source: str
    then: str
    directory: str
    files: tuple[File, ...] = ()
    unpacked: int | None = None
    by_hand: str = ""
    note: str = ""


def load_catalogue(path: Path) -> dict[str, DataSet]:
    """The data sets of a catalogue by name.

    Raises BadInput naming the file, the entry and the problem if the catalogue is not valid.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise BadInput(f"{path} is not a catalogue in TOML: {error}") from None
    catalogue = {name: _entry(f"{path}: {name!r}", name, entry) for name, entry in table.items()}
    places = {f"{data.directory}/": data.name for data in catalogue.values()}
    for place, name in places.items():
        for other, owner in places.items():
            if owner != name and other.startswith(place):
                raise BadInput(f"{path}: {owner!r} would lie inside {name!r}: give `directory`")
    if len(places) < len(catalogue):
        raise BadInput(f"{path}: two data sets have the same directory: give `directory`")
    return catalogue


def _entry(where: str, name: str, entry: Any) -> DataSet:
    if not isinstance(entry, dict) or not NAME.fullmatch(name):
        raise BadInput(f'{where} is not a data set: write ["group/name"] and its keys below')
    for key in sorted(entry.keys() ^ REQUIRED):
        if key not in ALLOWED:
            near = get_close_matches(key, ALLOWED, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"{where} has the unknown key {key!r}{hint}")
        if key in REQUIRED:
            raise BadInput(f"{where} lacks the key {key!r}")
    kinds = {"unpacked": int, "files": list}
    for key, value in entry.items():
        kind = kinds.get(key, str)
        if type(value) is not kind or not value:
            raise BadInput(f"{where}: {key} = {value!r} must be {_KIND_NAMES[kind]}")
    directory = entry.get("directory", name)
    if not NAME.fullmatch(directory):
        raise BadInput(f"{where}: directory = {directory!r} must be like 'group/name'")
    if ("files" in entry) == ("by_hand" in entry):
        raise BadInput(f"{where} needs either `files` or `by_hand`")
    files = tuple(_file(where, value) for value in entry.get("files", []))
    if len({file.name.casefold() for file in files}) < len(files):
        raise BadInput(f"{where}: two files have the same name: give `name`")
    return DataSet(**{**entry, "name": name, "directory": directory, "files": files})


_KIND_NAMES = {str: "a string", int: "a whole number above 0", list: "a list of files"}


def _file(where: str, value: Any) -> File:
    if not isinstance(value, dict) or not value.keys() <= {"url", "name", "bytes", "sha256"}:
        raise BadInput(f"{where}: a file has url, and may have name, bytes and sha256: {value!r}")
    url = value.get("url", "")
    if not isinstance(url, str) or not re.fullmatch(r"https?://[\w.:-]+/[!-~]*", url, re.ASCII):
        raise BadInput(f"{where}: url = {url!r} is not an address that begins with https://")
    name = value.get("name", unquote(urlsplit(url).path).rpartition("/")[2])
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise BadInput(f"{where}: {name!r} is not a plain file name: give `name`")
    size, checksum = value.get("bytes"), value.get("sha256")
    if size is not None and (type(size) is not int or size < 1):
        raise BadInput(f"{where}: bytes = {size!r} must be a whole number above 0")
    if checksum is not None and not re.fullmatch(r"[0-9a-f]{64}", str(checksum)):
        raise BadInput(f"{where}: sha256 = {checksum!r} must be 64 digits 0-9 and a-f")
    return File(url, name, size, checksum)


def fetch(data: DataSet, cache: Path) -> Path:
    """Download a data set into `cache`, unless it is there already, and return its directory.

    A data set that is there is verified and never changed. Raises Failure if the network fails, a
    checksum is wrong, an archive cannot be unpacked, or the existing files are damaged. Raises
    BadInput if the data set can only be fetched by hand.
    """
    if data.by_hand:
        raise BadInput(f"{data.name} can only be fetched by hand: {data.by_hand}")
    refuse_existing(cache, overwrite=True)
    if cache.exists() and not cache.is_dir():
        raise BadInput(f"--cache {cache} is a file; give a directory")
    target, downloads = cache / data.directory, cache / ".fetch" / data.directory
    if not target.exists():
        make_directory(downloads)
        with _locked(downloads / "lock", data.name):
            if not target.exists():  # another process may have fetched it meanwhile
                _fetch_new(data, target, downloads)
                return target
    _verify(data, target)
    return target


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Let one process in at a time. The operating system removes the lock of a dead process.
    Raises BadInput if the file system has no locks."""
    with path.open("w") as lock:
        if not locks(lock):
            say(f"another process is fetching {name}: waiting for it", error=True)
            locks(lock, wait=True)
        yield


def _fetch_new(data: DataSet, target: Path, downloads: Path) -> None:
    """Download, check, unpack into `target`, and print what was fetched."""
    started = time.monotonic()
    seen_at = downloads / "seen.json"
    seen = read_json(seen_at) if seen_at.exists() else {}
    today = datetime.now(UTC).date().isoformat()
    sent: list[dict[str, Any]] = []
    for file in data.files:
        first = seen.get(file.url, {})
        who = "the catalogue" if file.sha256 else f"{seen_at}, first seen {first.get('date')},"
        checksum = download(file, downloads, file.sha256 or first.get("sha256"), who)
        size = (downloads / file.name).stat().st_size
        sent.append({"url": file.url, "bytes": size, "sha256": checksum})
        say(f"{file.url}: {size:,} bytes, {_trust(file, first, checksum)}")
        if not file.sha256 and not first:
            seen[file.url] = {"sha256": checksum, "date": today}
            write_json(seen_at, seen)
    limit = sum(
        int(item["bytes"]) * (RATIO if file.name.lower().endswith(ENDINGS) else 1)
        for file, item in zip(data.files, sent, strict=True)
    )
    with atomic_directory(target) as directory:
        unpacker = Unpacker(directory, data.unpacked or min(limit, CAP))
        for file in data.files:
            unpacker.add(downloads / file.name)
        record = {
            "name": data.name,
            "date": today,
            "licence": data.licence,
            "citation": data.citation,
            "files": sent,
            "unpacked": _contents(directory),
        }
        write_json(directory / "SOURCE.json", record)
    for file in data.files:
        (downloads / file.name).unlink()
    count = sum(path.is_file() for path in target.rglob("*")) - 1
    seconds = time.monotonic() - started
    say(f"{target}: {count:,} files, {unpacker.limit - unpacker.left:,} bytes; {seconds:.1f} s")


def _trust(file: File, first: dict[str, str], checksum: str) -> str:
    if file.sha256:
        return "SHA-256 as in the catalogue"
    if first:
        return f"SHA-256 as first seen {first['date']}"
    return f"the catalogue has no SHA-256 for this file; the file has {checksum}"


def _contents(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file, by its path relative to the directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": file_checksum(path),
        }
        for path in files
    }


def _verify(data: DataSet, target: Path) -> None:
    """Check that every unpacked file is there and unchanged. Raises BadInput or Failure if not."""
    if not (target / "SOURCE.json").is_file():
        raise BadInput(
            f"{target} exists but was not made by fetch: move it, or give another --cache"
        )
    record = read_json(target / "SOURCE.json")
    try:
        files = {name: (item["bytes"], item["sha256"]) for name, item in record["unpacked"].items()}
    except (KeyError, TypeError, AttributeError):
        raise BadInput(f"{target}/SOURCE.json is damaged: remove {target} and run again") from None
    for name, (size, checksum) in files.items():
        path = target / name
        if not path.is_file():
            what = "is missing"
        elif path.stat().st_size != size or file_checksum(path) != checksum:
            what = "has changed since it was unpacked"
        else:
            continue
        raise Failure(f"{path} {what}: remove {target} and run again")
    say(f"{data.name} is already here: {target}, {len(files):,} files verified")


def table(catalogue: dict[str, DataSet]) -> str:
    """One line for each data set: name, download size in MB, server, licence."""
    rows = [("name", "MB", "from", "licence")]
    for data in catalogue.values():
        sizes = [file.bytes for file in data.files]
        size = "?" if not sizes or None in sizes else f"{sum(filter(None, sizes)) / 1e6:.2f}"
        hosts = sorted({urlsplit(file.url).hostname or "" for file in data.files})
        rows.append((data.name, size, ", ".join(hosts) or "(by hand)", data.licence))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{name:{widths[0]}}  {size:>{widths[1]}}  {host:{widths[2]}}  {licence}"
        for name, size, host, licence in rows
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fetch`."""
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        metavar="NAME",
        help="The data set, named after its task, such as glue/cola (default: list all).",
    )
    add(
        "--list",
        action="store_true",
        help="Print every name with its download size in MB, server and licence; fetch nothing.",
    )
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        help="The directory for data sets, each in a directory with its name (default: "
        "$XFORMER_CACHE, or else ~/.cache/xformer). A data set that is there is verified and never "
        "replaced. An interrupted download is resumed.",
    )
    add(
        "--catalogue",
        type=Path,
        default=CATALOGUE,
        metavar="FILE",
        help="Your own list of data sets in TOML (default: the list that comes with this program, "
        "preprocess/fetch/catalogue.toml, which explains the format).",
    )


def run(arguments: argparse.Namespace) -> None:
    """Fetch one data set and print the command to use it with, or list all data sets."""
    catalogue = load_catalogue(arguments.catalogue)
    if arguments.list or arguments.name is None:
        say(*table(catalogue).split("\n"))
        return
    if arguments.name not in catalogue:
        near = get_close_matches(arguments.name, catalogue, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(f"no data set is named {arguments.name!r}{hint} (fetch --list shows all)")
    data = catalogue[arguments.name]
    try:
        target = fetch(data, arguments.cache or _cache_folder())
    except (KeyboardInterrupt, Interrupted) as stop:
        number = stop.status - 128 if isinstance(stop, Interrupted) else signal.SIGINT
        raise Interrupted(number, "stopped; run again to resume the download") from None
    say(f"licence: {data.licence}", f"cite: {data.citation}")
    if data.note:
        say(f"note: {data.note}")
    then = data.then.replace("{directory}", shlex.quote(str(target)))
    say(f"next: {typed('python preprocess.py')} {then}")


def _cache_folder() -> Path:
    """The folder for files that can be downloaded or made again: $XFORMER_CACHE, or
    ~/.cache/xformer."""
    return Path(os.environ.get("XFORMER_CACHE") or Path.home() / ".cache" / "xformer")
