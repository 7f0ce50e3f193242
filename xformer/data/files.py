"""Files that are whole or absent: temporary siblings, fsync, rename, checksums by block."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.display import say
from xformer.data.errors import OF_THE_DISK, BadInput, Failure, typed

BLOCK = 64 * 2**20  # bytes under one checksum
PACKAGE = Path(__file__).parents[1]  # whose micro/ holds encoders that come with it
PIECE = 8 * 2**20  # bytes of it in memory at once
DELETED = ".deleted.partial"  # ends the name of a directory that was replaced and is being deleted
ASIDE = ".old.partial"  # ends the name of a directory that another one is about to replace
PATIENCE = 1.0  # seconds to wait for the two renames of a replacement
RUN_MANIFEST = "run_manifest.json"  # the checksums of what a finished run came to


def installed(path: str | Path) -> Path:
    """The path, or, for micro/NAME where there is none, that of the package's own checkpoint."""
    path = Path(path)
    if path.parent == Path("micro") and not path.exists():
        return PACKAGE / path
    return path


def cache_folder() -> Path:
    """Where what can be had again is kept for all runs: $XFORMER_CACHE, or ~/.cache/xformer."""
    return Path(os.environ.get("XFORMER_CACHE") or Path.home() / ".cache" / "xformer")


def read_json(path: Path) -> Any:
    """The parsed file. Raises BadInput naming the file if it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid JSON: {error}") from None


def read_own_json(path: Path) -> Any:
    """A file of `write_json`; raises BadInput also where no more than its last line end is lost."""
    found = read_json(path)
    if not path.read_bytes().endswith(b"\n"):
        raise BadInput(f"{path} is damaged: it is cut off")
    return found


def read_run_json(path: Path) -> Any:
    """The result.json or config.json of a run. Raises BadInput if it is missing, is not JSON, or
    differs from what the run's end noted in its manifest."""
    found = read_json(path)
    cure = "give overwrite=true to train.py, which makes the run anew"
    if path.name == "result.json":
        cure = "delete it: train.py makes it again, unless train.keep_state=false"
    check_run_file(path.parent, path.name, path, typed(cure))
    return found


def check_run_file(run: Path, name: str, path: Path, cure: str) -> None:
    """Raise BadInput with the `cure` if the file of this name in a run, which is at `path`, differs
    from what the run's end noted in its manifest. Unfinished runs have no manifest, nor have those
    of earlier versions."""
    manifest = run / RUN_MANIFEST
    if not manifest.exists():
        return
    content = read_own_json(manifest)
    sums = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(sums, dict) or name not in sums:
        raise BadInput(f"{manifest} is damaged: it lists no checksum of {name}")
    if sums[name] != file_checksum(path):
        why = f"its checksum is not the one in {manifest.name}"
        raise BadInput(f"{path} is damaged: {why}; restore it from a copy, or {cure}")


def json_text(value: Any) -> str:
    """A value as the text of a JSON file."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the old file or the new one, never a part."""
    write_text(path, json_text(value))


def write_text(path: Path, text: str) -> None:
    """Write a text so that a reader sees the old file or the new one, never a part."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    if path.exists() and not path.is_file():  # a pipe or a device, such as /dev/stdout
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))  # through a link, which stays
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            temporary.write_bytes(content)
            sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        if error.errno not in OF_THE_DISK:  # such as a file in /proc
            why = os.strerror(error.errno or 0)
            raise BadInput(f"{path} cannot be written ({why})") from None
        error.filename, error.filename2 = str(path), None
        raise


def load_array(path: Path, mapped: bool = True) -> np.ndarray:
    """The array of a .npy file, by default mapped from it. Raises BadInput if it is none."""
    try:
        found = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a damaged header fails anywhere: EOFError, TokenError ..
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BadInput(f"{path} is not a .npy file: {reason}") from None
    if not isinstance(found, np.ndarray):
        raise BadInput(f"{path} is not a .npy file but an archive of them")
    return found


def sync(path: Path) -> None:
    """fsync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, key: str = "") -> None:
    """Make a directory and its parents. Raises BadInput where there can be none, as in /proc; `key`
    stands before the path in its message."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in OF_THE_DISK:
            raise
        why = os.strerror(error.errno or 0)
        raise BadInput(f"{key}{path} cannot be made ({why}); give another directory") from None


def is_safe_filename(name: str) -> bool:
    """Whether a file may have this name: it says no directory, is not hidden, and has no character
    that a terminal would act on."""
    return (
        not name.startswith(".")
        and "/" not in name
        and "\\" not in name
        and name.isprintable()
        and 0 < len(name.encode()) <= 200
    )


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise BadInput when an output exists that may not be replaced, or has no parent to lie in."""
    put_back(path)
    if path.exists() and not overwrite:
        raise BadInput(f"{path} exists; give another output, or --overwrite to replace it")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise BadInput(f"{path} cannot be written: {parent} is a file")


@contextmanager
def atomic_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty temporary sibling of `path`; on success fsync it and rename it into place.

    With `overwrite` the old directory is not touched before the new one is whole and on the disk.
    On any error the sibling is removed and `path` is as it was. Leftovers of killed processes are
    removed on the way in; `put_back` says what a kill during the replacement leaves.
    """
    if path.is_symlink():  # the link stays, and leads to the new directory
        path = Path(os.path.realpath(path))
    refuse_existing(path, overwrite)
    make_directory(path.absolute().parent)
    for stale, process in _leftovers(path):
        if not _alive(process):
            shutil.rmtree(stale, ignore_errors=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    make_directory(temporary)
    try:
        yield temporary
        for file in [*temporary.rglob("*"), temporary]:
            sync(file)
        _replace(temporary, path, overwrite)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        # safetensors and tokenizers report a full disk by exceptions of their own
        if not isinstance(error, OSError) and "os error" in str(error):
            raise Failure(f"{path} could not be written: {error}") from None
        raise


def _replace(new: Path, path: Path, overwrite: bool) -> None:
    """Rename a directory to `path`. An old one is renamed aside first and deleted last."""
    aside = path.parent / f".{path.name}.{os.getpid()}{ASIDE}"
    try:
        while True:
            try:
                new.rename(path)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            refuse_existing(path, overwrite)  # another process may have been faster
            shutil.rmtree(aside, ignore_errors=True)
            with suppress(FileNotFoundError):  # another process is replacing it too
                path.rename(aside)
    except BaseException:
        with suppress(OSError):  # nothing lies aside, or the disk refuses all: see `put_back`
            aside.rename(path)
        raise
    sync(path.absolute().parent)
    if aside.exists():
        # A half-deleted directory must not be put back, so it first gets a name of another kind.
        deleted = path.parent / f".{path.name}.{os.getpid()}{DELETED}"
        shutil.rmtree(deleted, ignore_errors=True)
        shutil.rmtree(aside.rename(deleted))


def half_replaced(path: Path) -> bool:
    """Whether there is nothing at `path` and the directory that was there lies aside."""
    return not path.exists() and _lies_aside(path) is not None


def _leftovers(path: Path) -> Iterator[tuple[Path, int]]:
    """The temporary siblings of a directory, each with the number of the process that made it.
    Those of a directory whose name begins alike, such as x.2 beside x, are not among them."""
    name = re.compile(
        rf"\.{re.escape(path.name)}\.(\d+)(?:{re.escape(ASIDE)}|{re.escape(DELETED)}|\.partial)"
    )
    for sibling in path.parent.glob(".*.partial"):
        if match := name.fullmatch(sibling.name):
            yield sibling, int(match[1])


def _lies_aside(path: Path) -> Path | None:
    """The old directory that was renamed aside, the newest of several."""
    found = []
    for sibling, _ in _leftovers(path):
        if sibling.name.endswith(ASIDE):
            with suppress(FileNotFoundError):  # another process has put it back
                found.append((sibling.stat().st_ctime, sibling))
    return max(found)[1] if found else None


def put_back(path: Path) -> None:
    """Undo a replacement that a killed process left half done.

    `atomic_directory` replaces a directory by two renames: the old one aside, the new one into its
    place. Between them nothing is at `path`. All who open or write such a directory call this
    first. It waits until a replacement that is going on is over. After PATIENCE the process that
    began it is dead: the old directory is renamed back, and a line says so. Raises BadInput that
    names the old directory if it cannot be renamed.
    """
    end = time.monotonic() + PATIENCE
    while half_replaced(path):
        aside = _lies_aside(path)
        if time.monotonic() < end or aside is None:
            time.sleep(0.01)
            continue
        try:
            aside.rename(path)
        except FileNotFoundError:  # another process has put it back
            continue
        except OSError as error:
            if path.exists():
                return
            raise BadInput(
                f"{path} is missing: a process was killed while it replaced it, and left the old "
                f"one as {aside}, which cannot be renamed ({os.strerror(error.errno or 0)}); "
                f"rename it to {path.name}"
            ) from None
        say(
            f"{path}: a process was killed while it replaced this directory; the old one, which "
            f"lay aside as {aside.name}, is put back",
            error=True,
        )


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def block_checksums(path: Path) -> Iterator[str]:
    """SHA-256 of every 64 MiB block of a file, in order, each as soon as it is read."""
    piece = memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece[:BLOCK]):
            digest, size = hashlib.sha256(), 0
            while count:
                digest.update(piece[:count])
                size += count
                count = file.readinto(piece[: BLOCK - size])
            yield digest.hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
