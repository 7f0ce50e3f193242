"""One file from one address: received in a part that a later attempt resumes, then checked whole.

Resuming follows RFC 9110, sections 13.1.5 (If-Range) and 14 (Range): the rest is asked for only on
the condition that the file is still the one whose beginning is here.
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
TIMEOUT = 30.0  # seconds without a byte until a connection counts as broken
WAITS = (1.0, 2.0, 4.0)  # seconds before another attempt; one more failure in a row ends them
MOST = 2**36  # bytes of a file whose size nobody tells
AGENT = "xformer-preprocess (data for research)"  # some publishers refuse urllib's own name


@dataclass(frozen=True)
class File:
    """A file of a data set; `bytes` and `sha256` are of what is sent, None where not known."""

    url: str
    name: str
    bytes: int | None = None
    sha256: str | None = None


class _BrokenError(Exception):
    """The network failed in a way that another attempt may mend."""


class _UnreachableError(_BrokenError):
    """There was no connection at all: where none was before either, there is no network."""


def download(file: File, folder: Path, expected: str | None, whence: str) -> str:
    """Bring `folder/file.name`, and return its SHA-256. What is there is checked and not fetched.

    `expected` is the SHA-256 it must have (None: any), `whence` says who expects it. Attempts that
    fail leave a part, which the next one resumes. Raises Failure if the network stays broken, the
    disk is too small, or the file is another: then it is set aside as `NAME.refused`.
    """
    whole = folder / file.name
    if not whole.exists():
        _receive(file, folder / f"{file.name}.part")
        (folder / f"{file.name}.part").replace(whole)
    _note(folder / f"{file.name}.part").unlink(missing_ok=True)
    size, found = whole.stat().st_size, file_checksum(whole)
    aside = whole.with_name(f"{file.name}.refused")
    if file.bytes is not None and size != file.bytes:
        whole.replace(aside)
        raise Failure(
            f"{file.url}: {size:,} bytes came where the catalogue expects {file.bytes:,}; "
            f"set aside as {aside}"
        )
    if expected is not None and found != expected:
        whole.replace(aside)
        raise Failure(
            f"{file.url}: its SHA-256 is {found} where {whence} expects {expected}; "
            f"set aside as {aside}"
        )
    return found


def check_space(directory: Path, needed: int) -> None:
    """Raise Failure if `directory` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise Failure(f"{directory} has {free:,} bytes free and {needed:,} are needed")


def _receive(file: File, part: Path) -> None:
    """Complete `part`, in several attempts if must be."""
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
                stays = f"; {size:,} bytes stay, run again to go on" if size else ""
                raise Failure(f"{file.url}: {error}{stays}") from None
            wait = WAITS[failures - 1]
            say(f"{file.name}: {error}; again in {wait:.0f} s", error=True)
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
            # nothing is left to send, or the file is shorter now than the part
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
    part.unlink()  # it is of another file: start over
    _attempt(file, part)


def _state(file: File, part: Path) -> tuple[int, str]:
    """(bytes that are here, what identifies the file they are of); 0 where that is not known."""
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
    """Is this the whole file, or the rest after `start` of the file that `validator` names?"""
    if answer.status == 200:
        return True
    place = answer.headers.get("Content-Range", "")
    return (
        answer.status == 206
        and re.match(rf"bytes {start}-\d+/\d+$", place) is not None
        and _validator(answer.headers) in ("", validator)
    )


def _write(answer: HTTPResponse, file: File, part: Path, start: int) -> None:
    """Write the body behind the first `start` bytes of `part`, or from its beginning."""
    if answer.status == 206:
        total: int | None = int(answer.headers["Content-Range"].rpartition("/")[2])
    else:
        start = 0
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        part.unlink(missing_ok=True)
        write_json(_note(part), {"url": file.url, "validator": _validator(answer.headers)})
    if file.bytes is not None and total not in (None, file.bytes):
        part.unlink(missing_ok=True)
        raise Failure(
            f"{file.url}: the server announces {total:,} bytes where the catalogue expects "
            f"{file.bytes:,}: the publisher has changed it"
        )
    total = total if total is not None else file.bytes
    # what is unpacked or copied from the file takes at least as much again
    check_space(part.parent, 2 * (total or 0) - start)
    came = start
    with part.open("ab") as out, Progress(file.name, total or 0, "B", start) as shown:
        while came != total and (block := _read(answer, file.url)):
            came += len(block)
            if came > (MOST if total is None else total):
                part.unlink()
                raise Failure(f"{file.url}: more bytes come than the {total or MOST:,} allowed")
            out.write(block)
            shown.advance(len(block))
    if total is not None and came < total:
        raise _BrokenError(f"the connection broke after {came:,} of {total:,} bytes")


def _read(answer: HTTPResponse, url: str) -> bytes:
    with _network(url):
        return answer.read1(BLOCK)


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Whatever the network raises becomes _BrokenError, or Failure where no patience helps."""
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
            raise Failure(f"{url}: the server's certificate is not valid: {why}") from None
        kind = _BrokenError if isinstance(error.reason, TimeoutError) else _UnreachableError
        raise kind(f"the server cannot be reached: {error.reason}") from None
    except TimeoutError:
        raise _BrokenError(f"nothing came for {TIMEOUT:.0f} s") from None
    except (HTTPException, OSError, ValueError) as error:  # ValueError: a host that cannot be
        raise _BrokenError(f"the connection broke: {error or type(error).__name__}") from None


class _StaySecure(HTTPRedirectHandler):
    """Follows redirections, but never from https to what anyone on the way can change."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise Failure(f"{req.full_url} leads to {newurl}, which is not encrypted: refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _validator(headers: Any) -> str:
    """What names this very version of a file; weak tags do not ("" where nothing does)."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _note(part: Path) -> Path:
    """Beside a part: of which file it is."""
    return part.with_name(f"{part.name}.json")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
