"""Writes files and directories atomically, and checks them against their checksums."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from xformer.data.display import say
from xformer.data.errors import OF_THE_DISK, BadInput, Failure, reason, typed


def _namespace() -> str:
    """The namespace of this process's number, as "-" and hex digits; "" if there is no /proc.

    Two containers may have one host name and equal numbers of processes. The low digits of the
    inode are enough: the system numbers its namespaces one after the other.
    """
    try:
        return f"-{Path('/proc/self/ns/pid').stat().st_ino & 0xFFFFF:05x}"
    except OSError:
        return ""


CGROUP = Path("/sys/fs/cgroup")  # what Linux lets this process use
BLOCK = 64 * 2**20  # bytes that one checksum covers
PIECE = 8 * 2**20  # bytes that are read at a time
PACKAGE = Path(__file__).parents[1]  # contains micro/, the encoders that come with the package
# `atomic_directory` renames an old directory to .NAME.HOST-PID.old.partial before a new one takes
# its place, and to .NAME.HOST-PID.deleted.partial before it deletes it.
ASIDE, DELETED = ".old.partial", ".deleted.partial"
HOST = re.sub(r"\W", "-", platform.node()) + _namespace()
PATIENCE = 1.0  # seconds to wait for the two renames of a replacement
RUN_MANIFEST = "run_manifest.json"  # the checksums of a finished run's results
# what a run writes into its directory; the last file marks it as a run's, and only earlier versions
# wrote dropped.json
RUN_FOLDERS = ("checkpoints", "trajectory", "predictions", "tensorboard", "profile")
RUN_FILES = (RUN_MANIFEST, "result.json", "log.jsonl", "dropped.json", "code.diff", "config.json")


def installed(path: str | Path) -> Path:
    """The path itself. If it is micro/NAME and does not exist, the path of the checkpoint NAME that
    comes with the package."""
    path = Path(path)
    if path.parent == Path("micro") and not path.exists():
        return PACKAGE / path
    return path


def near(path: Path, folders: bool = True) -> str:
    """A hint for a path that does not exist: "; did you mean X?", or "" if nothing is near. X
    differs from the path in the name of one part. Files are suggested only if `folders` is
    false."""
    real = installed(path)
    wrong = real
    while not wrong.parent.exists():
        wrong = wrong.parent
    try:
        names = [p.name for p in wrong.parent.iterdir() if not p.name.startswith(".")]
    except OSError:
        return ""
    for name in get_close_matches(wrong.name, names, 5):
        candidate = wrong.parent / name / real.relative_to(wrong)
        if candidate.is_dir() if folders else candidate.exists():
            return f"; did you mean {candidate if real == path else path.parent / name}?"
    return ""


def what_is(path: Path) -> str:
    """What is at a path: "a store", "a checkpoint", "a run", "a tokenizer" or "a file"; "" if it is
    none of these."""
    if path.is_file():
        return "a file"
    marks = {
        "store.json": "a store",
        "manifest.json": "a checkpoint",
        "result.json": "a run",
        "log.jsonl": "a run",
        "tokenizer_meta.json": "a tokenizer",
    }
    return next((what for mark, what in marks.items() if (path / mark).is_file()), "")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises BadInput if it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid JSON: {error}") from None


def read_own_json(path: Path) -> Any:
    """The content of a JSON file that `write_json` wrote. Also raises BadInput if the file does not
    end with a line end: that means that it was cut off."""
    content = read_json(path)
    if not path.read_bytes().endswith(b"\n"):
        raise BadInput(f"{path} is damaged: its end is missing; restore it from a copy")
    return content


def read_sums(manifest: Path, *files: str) -> dict[str, Any]:
    """{file: SHA-256} from a manifest. Raises BadInput if it does not list these files, or if it
    lists one outside its directory."""
    content = read_own_json(manifest)
    sums = content.get("sha256") if isinstance(content, dict) else None
    sums = sums if isinstance(sums, dict) else {}
    if lacking := [name for name in files if name not in sums]:
        raise BadInput(
            f"{manifest} is damaged: it lists no checksum of {lacking[0]}; restore it from a copy"
        )
    if outside := [name for name in sums if name.startswith("/") or ".." in Path(name).parts]:
        raise BadInput(
            f"{manifest} is damaged: it lists {outside[0]}, which is outside its directory; "
            "restore it from a copy"
        )
    return sums


def read_run_json(path: Path) -> Any:
    """The result.json or config.json of a run.

    Raises BadInput if it is missing, is not JSON, or differs from the checksum that the run wrote
    when it finished.
    """
    content = read_json(path)
    remedy = "give overwrite=true to train.py, which repeats the run"
    if path.name == "result.json":
        remedy = "delete it: train.py makes it again, unless train.keep_state=false"
    check_run_file(path.parent, path.name, path, typed(remedy))
    if path.name == "config.json" and isinstance(content, dict) and "identity" in content:
        content.setdefault("starts", [{**content, "step": 0}])  # the first versions had no list
    return content


def is_run(config: Path) -> bool:
    """Whether this config.json belongs to a run. Checkpoints and other libraries also have files of
    this name."""
    if not config.exists():
        return False
    content = read_json(config)
    return isinstance(content, dict) and "identity" in content


def selected(path: Path) -> Path:
    """The checkpoint that a finished run selected; every other path unchanged. Raises BadInput as
    `read_run_json` does, and if result.json names no checkpoint."""
    if not (path / "result.json").is_file():
        return path
    result = read_run_json(path / "result.json")
    name = result.get("selected") if isinstance(result, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"checkpoints/step_[0-9]+", name):
        # a checkpoint elsewhere might be that of another run, which would lose its state
        where = path / "result.json"
        raise BadInput(f"{where} is damaged: it names no selected checkpoint of this run")
    return path / name


def check_run_file(run: Path, name: str, path: Path, remedy: str) -> None:
    """Raise BadInput, with the `remedy`, if the file at `path` differs from the checksum that `run`
    recorded for `name` when it finished. Unfinished runs and those of early versions have no
    checksums, and are not checked."""
    manifest = run / RUN_MANIFEST
    if not manifest.exists():
        return
    if read_sums(manifest, name)[name] != file_checksum(path):
        why = f"its checksum is not the one in {manifest.name}"
        raise BadInput(f"{path} is damaged: {why}; restore it from a copy, or {remedy}")


def json_text(value: Any) -> str:
    """The text of a JSON file that holds `value`."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader sees the whole old file or the whole new one."""
    write_text(path, json_text(value))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, like `write_json`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file of bytes atomically, like `write_json`. Pipes and devices are written directly.

    Raises BadInput if `path` cannot be written, and OSError for an error of the disk.
    """
    if path.exists() and not path.is_file():  # a pipe or a device, such as /dev/stdout
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))  # write through a link, and keep the link
    temporary = path.with_name(f".{path.name}.{owner()}")
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
            raise BadInput(f"{path} cannot be written ({why}); give another path") from None
        error.filename, error.filename2 = str(path), None
        raise


def load_array(path: Path, mapped: bool) -> np.ndarray:
    """The array of a .npy file, memory-mapped or in memory. Raises BadInput for any other file, and
    if the file system cannot map files."""
    try:
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except OSError as error:
        if mapped and error.errno == errno.ENODEV:
            raise BadInput(
                f"{path} is on a file system that cannot map files; put the store on another one"
            ) from None
        raise
    except Exception as error:  # numpy raises EOFError, TokenError and others for a damaged header
        why = str(error).partition("\n")[0] or type(error).__name__
        raise BadInput(f"{path} is not a .npy file: {why}") from None
    if not isinstance(array, np.ndarray):
        raise BadInput(f"{path} is not a .npy file but an archive of them")
    return array


def sync(path: Path) -> None:
    """fsync one file or directory. Some network file systems cannot do it for directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path, key: str = "") -> None:
    """Make a directory and its parents.

    Raises BadInput if the directory cannot be made, as in /proc, or begins with ~. `key` precedes
    the path in the message.
    """
    refuse_tilde(path, key)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in OF_THE_DISK:
            raise
        why = os.strerror(error.errno or 0)
        raise BadInput(f"{key}{path} cannot be made ({why}); give another directory") from None


def refuse_tilde(path: Path, key: str = "") -> None:
    """Raise BadInput for a path such as ~/runs. It would become a directory called ~ here."""
    if path.parts[:1] == ("~",):
        raise BadInput(f"{key}{path}: the shell has not replaced ~; give the whole path")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise BadInput if an output exists and `overwrite` is false, if its parent is a file, or if
    it begins with ~."""
    refuse_tilde(path)
    put_back(path)
    if path.exists() and not overwrite:
        raise BadInput(
            f"{path} exists; give another output, or --overwrite to replace it (in Python, "
            "overwrite=True)"
        )
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise BadInput(f"{path} cannot be written: {parent} is a file; give another output")


def replaceable(path: Path, *files: str) -> bool:
    """Whether nothing is lost if a new directory with these files takes the place of `path`: it
    does not exist, is empty, or has them."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return True
    return all((path / name).is_file() for name in files)


@contextmanager
def atomic_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Write a directory that appears only when it is complete.

    Yields an empty temporary sibling of `path`, and on success syncs it and renames it to `path`.
    With `overwrite` an old directory is not changed until the new one is complete and on the disk.
    On any error the sibling is removed and `path` is not changed. Leftovers of this host's killed
    processes are removed first, but not those of another container. If a process is killed during
    the replacement, `put_back` undoes it later. Raises BadInput as `refuse_existing` does, and
    Failure if the disk is full or only its owner may replace the old directory.
    """
    if path.is_symlink():  # keep the link, and replace the directory that it points to
        path = Path(os.path.realpath(path))
    refuse_existing(path, overwrite)
    make_directory(path.absolute().parent)
    for stale, gone in _leftovers(path):
        if gone:
            shutil.rmtree(stale, ignore_errors=True)
    temporary = path.parent / f".{path.name}.{owner()}.partial"
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
        # safetensors and tokenizers report a full disk with their own exceptions
        if not isinstance(error, OSError) and "os error" in str(error):
            raise Failure(f"{path} could not be written: {error}") from None
        raise


def _replace(new: Path, path: Path, overwrite: bool) -> None:
    """Rename `new` to `path`. An old directory is moved aside first, and deleted at the end.

    Raises Failure if only its owner may move the old directory. If it was moved but cannot be
    deleted, a line says so.
    """
    aside = path.parent / f".{path.name}.{owner()}{ASIDE}"
    try:
        while True:
            try:
                new.rename(path)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            refuse_existing(path, overwrite)  # another process may have written it meanwhile
            shutil.rmtree(aside, ignore_errors=True)
            with suppress(FileNotFoundError):  # another process is replacing it too
                path.rename(aside)
    except BaseException as error:
        # This fails if nothing was moved aside, or if the disk is broken: see `put_back`.
        with suppress(OSError):
            aside.rename(path)
        if isinstance(error, PermissionError) and path.exists():  # as in /tmp
            raise Failure(
                f"{path} cannot be replaced ({os.strerror(error.errno or 0)}): only its "
                "owner may replace it in this directory; let them do it, or give another output"
            ) from None
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # not the temporary directory
        raise
    sync(path.absolute().parent)
    if aside.exists():
        # `put_back` must not restore a half-deleted directory, so rename it before deleting it.
        deleted = path.parent / f".{path.name}.{owner()}{DELETED}"
        shutil.rmtree(deleted, ignore_errors=True)
        try:
            shutil.rmtree(aside.rename(deleted))
        except OSError as error:  # such as files of another member of a group
            left = next(filter(Path.exists, (deleted, aside)), deleted)
            say(
                f"warning: {path} was replaced, but the old directory, {left}, cannot be deleted "
                f"({os.strerror(error.errno or 0)}): its owner must delete it",
                error=True,
            )


def half_replaced(path: Path) -> bool:
    """Whether a replacement of `path` is half done: the old directory has been moved aside, and
    nothing is at `path`."""
    return not path.exists() and _moved_aside(path) is not None


def owner() -> str:
    """This process, for the names of temporary files. Hosts or containers that share a disk may
    have processes of the same number."""
    return f"{HOST}-{os.getpid()}"


def _leftovers(path: Path) -> Iterator[tuple[Path, bool]]:
    """The temporary siblings of a directory, and whether their maker is known to be gone. Nothing
    is known of the processes of other hosts and containers."""
    # the pattern excludes the siblings of a directory with a similar name, such as x.2 beside x
    name = re.compile(
        rf"\.{re.escape(path.name)}\.(?:([^.]*)-)?(\d+)(?:{re.escape(ASIDE)}|{re.escape(DELETED)}|\.partial)"
    )
    for sibling in path.parent.glob(".*.partial"):
        if match := name.fullmatch(sibling.name):
            yield sibling, match[1] in (None, HOST) and not alive(int(match[2]))


def _moved_aside(path: Path) -> Path | None:
    """The newest old directory that was moved aside, or None."""
    candidates = []
    for sibling, _ in _leftovers(path):
        if sibling.name.endswith(ASIDE):
            with suppress(FileNotFoundError):  # another process has put it back
                candidates.append((sibling.stat().st_ctime, sibling))
    return max(candidates)[1] if candidates else None


def put_back(path: Path) -> None:
    """Undo a replacement that a killed process left half done.

    `atomic_directory` replaces a directory with two renames: the first moves the old directory
    aside, the second moves the new one to `path`. In between, nothing is at `path`. Every function
    that opens or writes such a directory therefore calls this first. It waits for a replacement in
    progress. If that takes longer than PATIENCE, it assumes that the process is dead, renames the
    old directory back and prints a line that says so. Raises BadInput that names the old directory
    if it cannot be renamed.
    """
    end = time.monotonic() + PATIENCE
    while not path.exists() and (aside := _moved_aside(path)):
        if time.monotonic() < end:
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
                f"{path} is missing: a process was killed while it replaced this directory, and "
                f"left the old one as {aside}, which cannot be renamed "
                f"({os.strerror(error.errno or 0)}); rename it to {path.name}"
            ) from None
        say(
            f"{path}: a process was killed while it replaced this directory; the old one, "
            f"{aside.name}, has been put back",
            error=True,
        )


def locks(file: TextIO, wait: bool = False) -> bool:
    """Lock an open file for this process, until it is closed. Returns False if another process has
    locked it; with `wait` it waits instead. Raises BadInput if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise BadInput(
            f"{file.name} cannot be locked ({reason(error)}); give a directory on a file system "
            "with locks"
        ) from None
    return True


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if sys.platform == "darwin":  # macOS cannot tie a process to some cores
        return os.cpu_count() or 1
    return max(1, min(len(os.sched_getaffinity(0)), _quota()))


def _quota() -> int:
    """The cores whose time a container may use, as in `docker run --cpus 2`, rounded up. More
    threads would only wait for one another."""
    files = ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # version 2, and 1
    for names in files:
        with suppress(OSError, ValueError):
            words = " ".join((CGROUP / name).read_text(encoding="ascii") for name in names).split()
            quota, period = map(int, words)  # "max" and -1 mean that there is no limit
            return math.ceil(quota / period) if quota > 0 else sys.maxsize
    return sys.maxsize


def alive(process: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def block_checksums(path: Path) -> Iterator[str]:
    """The SHA-256 of every 64 MiB block of a file, in order. Each block is read when its checksum
    is asked for."""
    return (checksum for checksum, _ in checked_blocks(path, lambda piece: True))


def checked_blocks(path: Path, valid: Callable[[memoryview], bool]) -> Iterator[tuple[str, bool]]:
    """The SHA-256 of every 64 MiB block of a file, in order, and whether `valid` is true of all
    pieces of the block. `valid` gets the pieces of the file in order, and each only during the
    call. A block is read once, when it is asked for."""
    buffer = memoryview(bytearray(PIECE))
    with path.open("rb") as file:
        while count := file.readinto(buffer[:BLOCK]):
            digest, size, good = hashlib.sha256(), 0, True
            while count:
                digest.update(buffer[:count])
                good &= valid(buffer[:count])
                size += count
                count = file.readinto(buffer[: BLOCK - size])
            yield digest.hexdigest(), good


def file_checksum(path: Path) -> str:
    """The SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
