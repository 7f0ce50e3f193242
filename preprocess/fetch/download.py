"""Download one file from one address. A later attempt resumes a partial download.

Resuming follows RFC 9110, sections 13.1.5 (If-Range) and 14 (Range): the rest is requested on the
condition that the file on the server has not changed. The complete file is checked.
"""

from __future__ import annotations

import re
import shutil
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from xformer.data.display import Progress, say
from xformer.data.errors import BadInput, Failure
from xformer.data.files import file_checksum, read_json, sync, write_json

BLOCK = 2**20  # bytes read at once
TIMEOUT = 30.0  # seconds without data after which a connection counts as broken
WAITS = (1.0, 2.0, 4.0)  # seconds before each new attempt; then the download fails
MAX_BYTES = 2**36  # the most that is accepted of a file whose size is not known
AGENT = "xformer-preprocess (data for research)"  # some publishers refuse urllib's own name


@dataclass(frozen=True)
class File:
    """A file of a data set. `bytes` and `sha256` describe the download; None if not known."""

    url: str
    name: str
    bytes: int | None = None
    sha256: str | None = None


class _BrokenError(Exception):
    """The network failed, and another attempt may succeed."""


class _UnreachableError(_BrokenError):
    """No connection could be made. If that is the first error, the download fails at once."""


def download(file: File, folder: Path, expected: str | None, who: str) -> str:
    """Download `folder/file.name` unless it is there, check it, and return its SHA-256.

    `expected` is the SHA-256 that it must have (None: any). `who` names the source of `expected` in
    messages. A failed attempt leaves a partial file, which the next attempt resumes. Raises Failure
    if the network stays broken, if the disk is too small, or if size or SHA-256 are wrong. A wrong
    file is renamed to `NAME.refused`.
    """
    whole = folder / file.name
    if not whole.exists():
        _receive(file, folder / f"{file.name}.part")
        (folder / f"{file.name}.part").replace(whole)
    _note(folder / f"{file.name}.part").unlink(missing_ok=True)
    size, checksum = whole.stat().st_size, file_checksum(whole)
    aside = whole.with_name(f"{file.name}.refused")
    if file.bytes is not None and size != file.bytes:
        whole.replace(aside)
        raise Failure(
            f"{file.url}: {size:,} bytes arrived, but the catalogue expects {file.bytes:,}; the "
            f"file is kept as {aside}"
        )
    if expected is not None and checksum != expected:
        whole.replace(aside)
        raise Failure(
            f"{file.url}: its SHA-256 is {checksum}, but {who} expects {expected}; the file is "
            f"kept as {aside}"
        )
    return checksum


def check_space(directory: Path, needed: int) -> None:
    """Raise Failure if `directory` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise Failure(f"{directory} has {free:,} bytes free, but {needed:,} are needed; make room")


def _receive(file: File, part: Path) -> None:
    """Complete `part`, in several attempts if necessary."""
    failures = 0
    while True:
        before = _size(part)
        try:
            _attempt(file, part)
        except _BrokenError as error:
            size = _size(part)
            lost = isinstance(error, _UnreachableError) and not failures
            failures = 1 if size > before else failures + 1
            if lost or failures > len(WAITS):
                stays = f"; {size:,} bytes are kept; run again to resume" if size else ""
                raise Failure(f"{file.url}: {error}{stays}") from None
            wait = WAITS[failures - 1]
            say(f"{file.name}: {error}; trying again in {wait:.0f} s", error=True)
            time.sleep(wait)
        else:
            sync(part)
            return


def _attempt(file: File, part: Path) -> None:
    start, validator = _state(file, part)
    headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    request = Request(file.url, headers=headers)
    with _network(file.url):
        try:
            answer = build_opener(_StaySecure).open(request, timeout=TIMEOUT)
        except HTTPError as error:
            if error.code != 416 or not start:
                raise
            # Either the part is complete, or the file on the server is now shorter.
            if re.fullmatch(rf"bytes \*/{start}", error.headers.get("Content-Range", "")):
                return
            answer = None
    if answer is not None:
        with answer:
            if _continues(answer, start, validator):
                _write(answer, file, part, start)
                return
            if not start:
                raise Failure(f"{file.url}: the server answers {answer.status} {answer.reason}")
    part.unlink()  # the file on the server has changed: start again
    _attempt(file, part)


def _state(file: File, part: Path) -> tuple[int, str]:
    """The number of bytes received so far, and the validator that identifies their file.

    Without a validator the partial file is useless. It is removed, and the number is 0.
    """
    try:
        note = read_json(_note(part))
        start = _size(part)
        if start and note["url"] == file.url and note["validator"]:
            return start, note["validator"]
    except (BadInput, KeyError, TypeError):
        pass
    part.unlink(missing_ok=True)
    return 0, ""


def _continues(answer: HTTPResponse, start: int, validator: str) -> bool:
    """Whether the answer is the whole file, or the rest after `start` of the same file."""
    if answer.status == 200:
        return True
    place = answer.headers.get("Content-Range", "")
    return (
        answer.status == 206
        and re.match(rf"bytes {start}-\d+/\d+$", place) is not None
        and _validator(answer.headers) in ("", validator)
    )


def _write(answer: HTTPResponse, file: File, part: Path, start: int) -> None:
    """Write the body to `part`: after its first `start` bytes, or from its beginning."""
    if answer.status == 206:
        total: int | None = int(answer.headers["Content-Range"].rpartition("/")[2])
    else:
        start = 0
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        part.unlink(missing_ok=True)
        write_json(_note(part), {"url": file.url, "validator": _validator(answer.headers)})
    if file.bytes is not None and total not in (None, file.bytes):
        part.unlink(missing_ok=True)
        raise Failure(
            f"{file.url}: the server announces {total:,} bytes, but the catalogue expects "
            f"{file.bytes:,}: the publisher has changed the file"
        )
    total = total if total is not None else file.bytes
    # Unpacking or copying the file needs at least as much space again.
    check_space(part.parent, 2 * (total or 0) - start)
    came = start
    with part.open("ab") as out, Progress(file.name, total or 0, "B", start) as bar:
        while came != total and (block := _read(answer, file.url)):
            came += len(block)
            if came > (MAX_BYTES if total is None else total):
                part.unlink()
                allowed = f"{total or MAX_BYTES:,} bytes allowed"
                raise Failure(f"{file.url}: the server sends more than the {allowed}")
            out.write(block)
            bar.advance(len(block))
    if total is not None and came < total:
        raise _BrokenError(f"the connection broke after {came:,} of {total:,} bytes")


def _read(answer: HTTPResponse, url: str) -> bytes:
    with _network(url):
        return answer.read1(BLOCK)


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Turn the network's errors into _BrokenError, or into Failure if another try cannot help."""
    try:
        yield
    except HTTPError as error:
        says = f"the server answers {error.code} {error.reason}".strip()
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _BrokenError(says) from None
        raise Failure(f"{url}: {says}") from None
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            why = error.reason.verify_message
            raise Failure(
                f"{url}: the server's certificate is not valid: {why}; SSL_CERT_FILE=FILE names "
                "other certificates to trust"
            ) from None
        kind = _BrokenError if isinstance(error.reason, TimeoutError) else _UnreachableError
        raise kind(f"the server cannot be reached: {error.reason}") from None
    except TimeoutError:
        raise _BrokenError(f"no data for {TIMEOUT:.0f} s") from None
    except (HTTPException, OSError, ValueError) as error:  # ValueError: an impossible host name
        raise _BrokenError(f"the connection broke: {error or type(error).__name__}") from None


class _StaySecure(HTTPRedirectHandler):
    """Follows redirections, but never from https to an unencrypted address."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise Failure(f"{req.full_url} redirects to {newurl}, which is not encrypted: refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _validator(headers: Any) -> str:
    """The header value that identifies a version of a file, or "" if there is none.

    Weak tags do not identify a version.
    """
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _note(part: Path) -> Path:
    """The path of the note that says to which file a part belongs."""
    return part.with_name(f"{part.name}.json")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
