"""Finished works as small files, KEY.zip each, so that no result depends on a directory of runs.

Of a run a file holds scores, settings, log, predictions and the checksum of its weights, which it
does not hold itself; of a command its result; of both the pictures that the study shows.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

from xformer import checkpoint as checkpoints
from xformer import provenance
from xformer.data.errors import BadInput
from xformer.data.files import (
    RUN_MANIFEST,
    atomic_directory,
    file_checksum,
    is_safe_filename,
    json_text,
    make_directory,
    write_bytes,
)
from xformer.study.plan import UNPACKED, Plan, Work

CONFIG = "config.json"
OF_A_RUN = ("result.json", CONFIG, RUN_MANIFEST, "log.jsonl", "code.diff")
KEY = "key"  # the member that says which work it is
WEIGHTS = "model.sha256"  # in the form of the command sha256sum
MOST = 2**28  # bytes that are unpacked of one file
BEGINNING = (1980, 1, 1, 0, 0, 0)  # the time of every member: the same content is the same file


class Ledger:
    """The directory of the finished works of a plan; without a directory it holds nothing.

    Raises BadInput naming the first file that is damaged or holds what it may not.
    """

    def __init__(self, directory: Path | None, plan: Plan):
        self.directory, self.plan = directory, plan
        if directory is not None and directory.exists() and not directory.is_dir():
            raise BadInput(f"kept={directory} is a file; give a directory")
        self.results: dict[
            str, Any
        ] = {}  # of the works that it holds and that are not here, by key
        for work in plan.works.values():
            path = self._file(work)
            if path is None or not path.exists():
                continue
            members = _read(path)
            name = work.proof.relative_to(work.path).as_posix()
            try:
                result = json.loads(members[name])
            except (KeyError, ValueError, RecursionError):
                raise _damaged(path, f"it holds no {name}") from None
            _check(path, members, work)
            if not _holds(work.path):
                self.results[work.key] = result

    def unpack(self) -> None:
        """Make of each file whose work is not here that work's directory, whole or not at all."""
        for key in self.results:
            work = self.plan.works[key]
            path = self._file(work)
            assert path is not None
            if work.path.is_dir():
                work.path.rmdir()  # it is empty
            with atomic_directory(work.path) as directory:
                for name, content in _read(path).items():
                    make_directory((directory / name).parent)
                    (directory / name).write_bytes(content)
                if work.recipe is None:
                    (directory / UNPACKED).touch()

    def keep(self, work: Work, again: bool) -> str:
        """Write the file of a finished work, unless there is one. Then the line, for a run that was
        made `again`, whether its weights are those of the first time; else nothing."""
        path = self._file(work)
        if path is None:
            return ""
        if not path.exists():
            make_directory(path.parent, "kept=")
            _write(path, self._members(work))
            return ""
        if not again or work.recipe is None:
            return ""
        both = (_read(path).get(WEIGHTS, b""), _checksum(work))
        before, now = (line.decode(errors="replace").split(" ")[0] or "none" for line in both)
        if before == now:
            return f"{work.name}: made again, with the weights that {path} records"
        return (
            f"{work.name}: made again, with other weights than {path} records: {before}, now {now}"
        )

    def _forget_places(self, members: dict[str, bytes]) -> None:
        """Name the directories of this machine in config.json by what they are, OUTPUT and XFORMER,
        and put its new checksum into the manifest."""
        text = members[CONFIG].decode()
        for place, name in ((self.plan.root.absolute(), "OUTPUT"), (provenance.ROOT, "XFORMER")):
            text = text.replace(f"{json.dumps(str(place))[1:-1]}/", f"{name}/")
        members[CONFIG] = text.encode()
        if RUN_MANIFEST in members:
            manifest = json.loads(members[RUN_MANIFEST])
            manifest["sha256"][CONFIG] = sha256(members[CONFIG]).hexdigest()
            members[RUN_MANIFEST] = json_text(manifest).encode()

    def _file(self, work: Work) -> Path | None:
        if self.directory is None or not work.stage:
            return None
        return self.directory / f"{work.key}.zip"

    def _members(self, work: Work) -> dict[str, bytes]:
        """What is kept of a finished work: {name: content}."""
        paths = [work.proof]
        if work.recipe is not None:
            paths += [work.path / name for name in OF_A_RUN]
            paths += (work.path / "predictions").rglob("*")
        for picture in self.plan.study.pictures:
            if picture.stage == work.stage:
                shown = work.path / picture.file
                paths += [shown, shown.with_name(f"{shown.stem}-dark.svg")]
        found = {
            path.relative_to(work.path).as_posix(): path.read_bytes()
            for path in paths
            if path.is_file()
        }
        if work.recipe is not None and (line := _checksum(work)):
            found[WEIGHTS] = line
        if CONFIG in found:
            self._forget_places(found)
        return {**found, KEY: f"{work.key}\n".encode()}


def _check(path: Path, members: dict[str, bytes], work: Work) -> None:
    """Raise BadInput unless the members are a work's, and all that a run's manifest lists."""
    key = members.get(KEY, b"").decode(errors="replace").strip()
    if key != work.key:
        raise _damaged(path, f"it holds the work {key or 'without a key'}")
    if RUN_MANIFEST not in members:
        return
    try:
        sums = dict(json.loads(members[RUN_MANIFEST])["sha256"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _damaged(path, f"its {RUN_MANIFEST} lists no checksums") from None
    for name, expected in sums.items():
        if name not in members:
            raise _damaged(path, f"it holds no {name}")
        if sha256(members[name]).hexdigest() != expected:
            raise _damaged(path, f"its {name} is not as the run wrote it")


def _holds(directory: Path) -> bool:
    """Whether there is anything in a directory."""
    return directory.exists() and not (directory.is_dir() and not any(directory.iterdir()))


def _checksum(work: Work) -> bytes:
    """A line on the weights that a run selected. Of a run that came out of a ledger it is what the
    ledger says; nothing where the weights are gone."""
    weights, known = checkpoints.resolve(work.path) / "model.safetensors", work.path / WEIGHTS
    if not weights.is_file():
        return known.read_bytes() if known.is_file() else b""
    return f"{file_checksum(weights)}  {weights.relative_to(work.path).as_posix()}\n".encode()


def _write(path: Path, members: dict[str, bytes]) -> None:
    """Write a zip so that it is there whole or not at all; the same members make the same bytes."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, BEGINNING)
            info.create_system, info.external_attr = 3, 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, members[name])
    write_bytes(path, memory.getvalue())


def _read(path: Path) -> dict[str, bytes]:
    """The members of a zip, their checksums compared. Raises BadInput naming the file."""
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
            for member in members:
                if not all(map(is_safe_filename, member.filename.split("/"))):
                    raise _damaged(path, f"it holds a file of the name {member.filename!r}")
            if sum(member.file_size for member in members) > MOST:
                raise _damaged(path, f"it holds more than {MOST // 2**20} MiB")
            return {member.filename: file.read(member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> BadInput:
    return BadInput(
        f"{path} is damaged: {why}; restore it from a copy, or delete it: its work is done again"
    )
