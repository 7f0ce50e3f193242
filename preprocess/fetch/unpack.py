"""Unpack downloaded archives into one directory, or say in one line why they are refused.

Archives are not trusted. Paths must stay within the directory, links and devices are refused, and
unpacked bytes are counted while they are written.
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

MEMBERS = 100_000  # the most files and directories in one archive
BLOCK = 2**20  # bytes written at once
HEADERS = 2**20  # the most bytes of headers between two members of a tar file, read into memory
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
    """Unpacks archives into the empty `directory`, at most `limit` bytes in all.

    Memory does not grow with the number of bytes.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit, self.left = directory, limit, limit
        # Maps each path, as a file system that ignores case sees it, to the path as written.
        # A directory's path ends in "/".
        self.paths = {"source.json": "SOURCE.json"}

    def add(self, path: Path) -> None:
        """Write the members of the file at `path` if it is an archive, or else the file itself.

        Archives within archives are not unpacked. Raises Failure naming the archive if it cannot be
        unpacked, and the member if that is refused.
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
            if error.errno not in (None, errno.EINVAL):  # from the disk, not from bz2, gzip or zip
                raise
            raise Failure(f"{path.name} cannot be unpacked: {error}") from None

    def _members(self, path: Path) -> Iterator[tuple[str, _Readable | None]]:
        """Yield (name, content) in the archive's order. The content of a directory is None."""
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
                    raise _refused(path.name, "", "is not a file name")
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
        """The relative path of a member. From now on, no other member may have it."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or re.search(r"[\\\0]|^[A-Za-z]:", name):
            raise _refused(archive, name, "points outside of the archive's own directory")
        if not parts and not is_directory:
            raise _refused(archive, name, "is not a file name")
        if re.search("[\ud800-\udfff]", name):  # tarfile puts these in place of undecodable bytes
            raise _refused(archive, name, "has a name that is not UTF-8")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            is_file = depth == len(parts) and not is_directory
            written = path if is_file else f"{path}/"
            folded = unicodedata.normalize("NFC", path).casefold()
            if self.paths.get(folded, written) != written or (is_file and folded in self.paths):
                other = self.paths[folded]
                raise _refused(archive, name, f"has the name of another member, {other!r}")
            self.paths[folded] = written
        return "/".join(parts)

    def _too_large(self, archive: str) -> Failure:
        return Failure(
            f"{archive} unpacks to more than {self.limit:,} bytes: refused (if the data set is "
            "larger, give `unpacked` in its catalogue)"
        )


class _Counted:
    """A stream that raises Failure after `left` bytes are read, unless `left` is set again."""

    def __init__(self, file: IO[bytes], name: str):
        self.file, self.name, self.left = file, name, HEADERS

    def read(self, size: int = -1, /) -> bytes:
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            why = f"its headers have more than {HEADERS:,} bytes"
            raise Failure(f"{self.name} cannot be unpacked: {why}")
        return data


def _refused(archive: str, name: str, why: str) -> Failure:
    return Failure(f"{archive}: the member {name!r} {why}: refused, nothing is unpacked")
