"""Archives from elsewhere -> files of one directory, or one line that says why not.

Nothing in an archive is believed: names stay within the directory, links and devices are refused,
and what comes out is counted while it comes out.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import re
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from xformer.data.errors import Failure

from .download import check_space

MEMBERS = 100_000  # files and directories in one archive
BLOCK = 2**20  # bytes written at once
HEADERS = 2**20  # bytes of headers between two members of a tar file: they are read into memory
TARS: dict[str, Callable[..., Any]] = {
    ".tar": open,
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.bz2": bz2.open,
    ".tar.xz": lzma.open,
}
ENDINGS = (".zip", *TARS, ".gz")


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


class Unpacker:
    """Writes into the empty `directory`, `limit` bytes at most; memory does not grow with them."""

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit, self.left = directory, limit, limit
        # as a file system that ignores case would see them: path -> path ("/" behind directories)
        self.paths = {"source.json": "SOURCE.json"}

    def add(self, path: Path) -> None:
        """Write what the file at `path` holds: its members if it is an archive, else itself.

        Archives within archives stay as they are. Raises Failure naming the archive and the
        member that may not be written.
        """
        try:
            for number, (name, source) in enumerate(self._members(path), 1):
                if number > MEMBERS:
                    raise Failure(f"{path.name} holds more than {MEMBERS:,} members: refused")
                self._write(path.name, name, source)
        except (
            tarfile.TarError,
            zipfile.BadZipFile,
            zlib.error,
            lzma.LZMAError,
            EOFError,
            NotImplementedError,
            RuntimeError,
            UnicodeError,
        ) as error:
            raise Failure(f"{path.name} cannot be unpacked: {error}") from None
        except OSError as error:
            if error.errno not in (None, errno.EINVAL):  # of the disk, not of bz2, gzip or zip
                raise
            raise Failure(f"{path.name} cannot be unpacked: {error}") from None

    def _members(self, path: Path) -> Iterator[tuple[str, _Readable | None]]:
        """(name, its content, None for a directory) in the archive's order."""
        ending = next((e for e in ENDINGS if path.name.lower().endswith(e)), None)
        if ending is None:
            with path.open("rb") as file:
                yield path.name, file
        elif ending == ".zip":
            yield from self._zip_members(path)
        elif ending == ".gz":
            with gzip.open(path) as file:
                yield path.name[: -len(ending)], file
        else:
            yield from self._tar_members(path, ending)

    def _zip_members(self, path: Path) -> Iterator[tuple[str, _Readable | None]]:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            declared = sum(member.file_size for member in members)
            if declared > self.left:
                raise self._too_large(path.name)
            check_space(self.directory, declared)
            for member in members:
                kind = stat.S_IFMT(member.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise _refused(path.name, member.filename, "is neither file nor directory")
                if not member.filename:
                    raise _refused(path.name, "", "is no name of a file")
                if member.is_dir():
                    yield member.filename, None
                else:
                    with archive.open(member) as file:
                        yield member.filename, file

    def _tar_members(self, path: Path, ending: str) -> Iterator[tuple[str, _Readable | None]]:
        with TARS[ending](path, "rb") as file:
            counted = _Counted(file, path.name)
            with tarfile.open(fileobj=counted, mode="r|") as archive:  # type: ignore[call-overload]
                for member in archive:
                    if not (member.isreg() or member.isdir()):
                        raise _refused(path.name, member.name, "is neither file nor directory")
                    if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
                        tarfile.data_filter(member, str(self.directory))
                    if member.size > self.left:
                        raise self._too_large(path.name)
                    counted.left += member.size
                    yield member.name, archive.extractfile(member) if member.isreg() else None
                    counted.left = HEADERS

    def _write(self, archive: str, name: str, source: _Readable | None) -> None:
        target = self.directory / self._claim(archive, name, source is None)
        if source is None:
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as out:
            while block := source.read(BLOCK):
                self.left -= len(block)
                if self.left < 0:
                    raise self._too_large(archive)
                out.write(block)

    def _claim(self, archive: str, name: str, is_directory: bool) -> str:
        """The path of a member below the directory, which no other member may take."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or re.search(r"[\\\0]|^[A-Za-z]:", name):
            raise _refused(archive, name, "leads out of the archive's own directory")
        if not parts and not is_directory:
            raise _refused(archive, name, "is no name of a file")
        if re.search("[\ud800-\udfff]", name):  # where tarfile could not decode a byte
            raise _refused(archive, name, "has a name that is not UTF-8")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            is_file = depth == len(parts) and not is_directory
            kept = path if is_file else f"{path}/"
            folded = unicodedata.normalize("NFC", path).casefold()
            if self.paths.get(folded, kept) != kept or (is_file and folded in self.paths):
                raise _refused(archive, name, f"has the name of another, {self.paths[folded]!r}")
            self.paths[folded] = kept
        return "/".join(parts)

    def _too_large(self, archive: str) -> Failure:
        return Failure(
            f"{archive} unpacks to more than {self.limit:,} bytes: refused (a data set that is "
            "larger says so by `unpacked` in its catalogue)"
        )


class _Counted:
    """A stream of which no more than `left` bytes may be read until `left` is set anew."""

    def __init__(self, file: IO[bytes], name: str):
        self.file, self.name, self.left = file, name, HEADERS

    def read(self, size: int = -1, /) -> bytes:
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise Failure(f"{self.name} cannot be unpacked: headers of more than {HEADERS:,} bytes")
        return data


def _refused(archive: str, name: str, why: str) -> Failure:
    return Failure(f"{archive}: the member {name!r} {why}: refused, nothing is unpacked")
