"""Fetch data sets from a real server on this machine that breaks off, lies and changes its
files.
"""

import bz2
import errno
import fcntl
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import re
import shlex
import shutil
import signal
import ssl
import struct
import subprocess
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
from helpers import command, good, refused, start

from xformer.data.errors import BadInput, Failure
from xformer.preprocess import cli
from xformer.preprocess.fetch import data_sets, download, unpack

BODY = hashlib.shake_256(b"a file").digest(300_000)  # no compressor makes it smaller
OTHER = hashlib.shake_256(b"another").digest(300_000)


@dataclass
class Step:
    """How the server answers one request, if it does not simply answer correctly."""

    status: int = 0
    send: int | None = None  # bytes of the body until the connection is closed
    ignore_range: bool = False
    ignore_condition: bool = False  # sends the rest even if the file has changed
    no_length: bool = False
    chunked: bool = False
    hold: threading.Event | None = None  # sends `send` bytes, waits for this, then sends the rest
    location: str = ""


@dataclass
class Site:
    """What the server has, what it was asked, and what it sent."""

    base: str
    files: dict[str, bytes] = field(default_factory=dict)
    tagged: bool = True
    script: list[Step] = field(default_factory=list)
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def put(self, name: str, body: bytes) -> str:
        self.files[f"/{name}"] = body
        return f"{self.base}/{name}"


def tag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


class Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        step = site.script.pop(0) if site.script else Step()
        wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
        site.asked.append((self.path, wanted, condition))
        body = site.files.get(self.path)
        if step.location:
            self.send_response(302)
            self.send_header("Location", step.location)
            self.end_headers()
            return
        if step.status or body is None:
            self.send_error(step.status or 404)
            return
        first = 0
        if wanted and not step.ignore_range and (condition == tag(body) or step.ignore_condition):
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if first >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        if site.tagged:
            self.send_header("ETag", tag(body))
        if step.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif not step.no_length:
            self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        part = body[first:][: step.send]
        if step.chunked:
            for at in range(0, len(part), 70_000):
                piece = part[at : at + 70_000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if part == body:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(part)
        self.wfile.flush()
        site.sent.append(len(part))
        if step.hold is not None:
            step.hold.wait(60)
            self.wfile.write(body[first:][len(part) :])

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def serve(context: ssl.SSLContext | None = None) -> tuple[http.server.ThreadingHTTPServer, Site]:
    """A server in threads of this process."""
    handler = type("OneSite", (Handler,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "https" if context else "http"
    handler.site = Site(f"{scheme}://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server, handler.site  # type: ignore[attr-defined]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "WAITS", (0.0, 0.0, 0.0))
    server, made = serve()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def data_set(*files: download.File, unpacked: int | None = None) -> data_sets.DataSet:
    return data_sets.DataSet(
        "group/name", "CC0", "Someone 2020", "nowhere", "task x", "group/name", files, unpacked
    )


def one(
    site: Site, name: str = "a.bin", body: bytes = BODY, pinned: bool = True
) -> data_sets.DataSet:
    """A data set of one file that the site serves."""
    size, checksum = (len(body), sha(body)) if pinned else (None, None)
    return data_set(download.File(site.put(name, body), name, size, checksum))


def listed(tmp_path: Path, *files: dict[str, Any], **keys: Any) -> Path:
    """A catalogue that holds `group/name`."""
    inline = ", ".join(
        "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in file.items()) + "}" for file in files
    )
    entry = {
        "licence": "CC0",
        "citation": "Someone 2020",
        "source": "nowhere",
        "then": "text --input {directory}/a.txt",
        **keys,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items() if value is not None]
    path = tmp_path / "catalogue.toml"
    text = "\n".join(['["group/name"]', *lines, *([f"files = [{inline}]"] if files else [])])
    path.write_text(text, encoding="utf-8")
    return path


def fetching(catalogue: Path, cache: Path) -> list[str | Path]:
    return ["preprocess.py", "fetch", "group/name", "--catalogue", catalogue, "--cache", cache]


def part_of(cache: Path, name: str = "a.bin") -> Path:
    return cache / ".fetch" / "group" / "name" / f"{name}.part"


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name.replace("__", "/"), body)
    return buffer.getvalue()


# ---- the network


def test_a_data_set_comes_whole_and_once(
    site: Site, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = zipped(x=b"1")
    body = zipped(In__train__tsv=b"one\n", In__a=b"two\n" * 500, nested=inner)
    url = site.put("a.zip", body)
    extra = site.put("b.txt", b"beside\n")
    catalogue = listed(
        tmp_path,
        {"url": url, "bytes": len(body), "sha256": sha(body)},
        {"url": extra, "name": "c.txt"},
    )
    line = fetching(catalogue, cache)
    first = good(command(*line))
    target = cache / "group" / "name"
    files = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
    assert files == {"In/train/tsv", "In/a", "nested", "c.txt", "SOURCE.json"}
    assert (target / "nested").read_bytes() == inner
    assert (target / "In" / "a").read_bytes() == b"two\n" * 500
    assert f"{url}: {len(body):,} bytes, SHA-256 as in the catalogue" in first.out
    assert f"the file has {sha(b'beside' + bytes([10]))}" in first.out
    assert "licence: CC0\ncite: Someone 2020\n" in first.out
    assert f"next: python preprocess.py text --input {target}/a.txt\n" in first.out
    record = json.loads((target / "SOURCE.json").read_text())
    assert record["files"][0] == {"url": url, "bytes": len(body), "sha256": sha(body)}
    assert record["unpacked"]["In/a"] == {"bytes": 2000, "sha256": sha(b"two\n" * 500)}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    left = sorted(path.name for path in part_of(cache).parent.iterdir())
    assert left == ["lock", "seen.json"]

    monkeypatch.setenv("XFORMER_CACHE", str(cache))
    again = good(command(*line[:-2]))
    assert "already here" in again.out
    assert "4 files verified" in again.out
    assert len(site.asked) == 2


def test_what_broke_off_is_resumed(
    site: Site, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.script = [Step(send=100_000), Step(send=50_000), Step()]
    target = data_sets.fetch(one(site), cache)
    assert (target / "a.bin").read_bytes() == BODY
    assert site.asked == [
        ("/a.bin", None, None),
        ("/a.bin", "bytes=100000-", tag(BODY)),
        ("/a.bin", "bytes=150000-", tag(BODY)),
    ]
    assert site.sent == [100_000, 50_000, 150_000]
    err = capsys.readouterr().err
    assert "the connection broke after 100,000 of 300,000 bytes; trying again in" in err


def test_a_later_run_resumes(site: Site, cache: Path) -> None:
    site.script = [Step(send=7), *[Step(status=503)] * 4]
    with pytest.raises(Failure, match=r"answers 503 .*; 7 bytes are kept; run again"):
        data_sets.fetch(one(site), cache)
    assert part_of(cache).read_bytes() == BODY[:7]
    assert not (cache / "group").exists()
    data_sets.fetch(one(site), cache)
    assert site.asked[-1] == ("/a.bin", "bytes=7-", tag(BODY))
    assert (cache / "group" / "name" / "a.bin").read_bytes() == BODY


def test_progress_forgives_earlier_failures(site: Site, cache: Path) -> None:
    site.script = [Step(send=1000)] * 20
    data_sets.fetch(one(site), cache)
    assert (cache / "group" / "name" / "a.bin").read_bytes() == BODY
    assert len(site.asked) == 21


@pytest.mark.parametrize("again", [Step(ignore_range=True), Step(ignore_condition=True)])
@pytest.mark.parametrize("changed", [False, True])
def test_another_file_is_never_sewn_on(site: Site, cache: Path, again: Step, changed: bool) -> None:
    """Parts of two files are never joined: if the server ignores Range, if it ignores If-Range, or
    if it answers correctly after the file has changed.
    """
    site.script = [Step(send=100_000), *[Step(status=500)] * 4]
    with pytest.raises(Failure):
        data_sets.fetch(one(site, pinned=False), cache)
    site.script = [again]
    body = OTHER if changed else BODY
    target = data_sets.fetch(one(site, body=body, pinned=False), cache)
    assert (target / "a.bin").read_bytes() == body
    resumed = again.ignore_condition and not changed
    # the order may differ, because an answer may be noted late
    assert (300_000 in site.sent) != resumed


def test_a_changed_file_starts_over(site: Site, cache: Path) -> None:
    site.script = [Step(send=100_000), *[Step(status=500)] * 4]
    with pytest.raises(Failure):
        data_sets.fetch(one(site), cache)
    target = data_sets.fetch(one(site, body=OTHER), cache)
    assert (target / "a.bin").read_bytes() == OTHER
    assert site.asked[-1][1:] == ("bytes=100000-", tag(BODY))
    assert site.sent[-1] == 300_000


def test_without_a_tag_nothing_is_resumed(site: Site, cache: Path) -> None:
    site.tagged = False
    site.script = [Step(send=100_000)]
    target = data_sets.fetch(one(site), cache)
    assert (target / "a.bin").read_bytes() == BODY
    assert site.asked == [("/a.bin", None, None)] * 2


def test_416_is_the_end_or_another_file(site: Site, cache: Path) -> None:
    for rest in (b"", b"and more"):
        part = part_of(cache)
        part.parent.mkdir(parents=True)
        data = one(site)
        part.write_bytes(BODY + rest)
        note = {"url": data.files[0].url, "validator": tag(BODY)}
        part.with_name("a.bin.part.json").write_text(json.dumps(note))
        site.sent.clear()
        assert (data_sets.fetch(data, cache) / "a.bin").read_bytes() == BODY
        assert site.sent == ([300_000] if rest else [])
        shutil.rmtree(cache)


def test_a_cache_that_is_a_file_is_refused(site: Site, cache: Path) -> None:
    cache.touch()
    with pytest.raises(BadInput, match=f"--cache {cache} is a file; give a directory"):
        data_sets.fetch(one(site), cache)


def test_a_wrong_checksum_is_refused(site: Site, cache: Path, tmp_path: Path) -> None:
    url = site.put("a.bin", OTHER)
    catalogue = listed(tmp_path, {"url": url, "sha256": sha(BODY)})
    line = fetching(catalogue, cache)
    refused(command(*line), url, sha(OTHER), sha(BODY), "the catalogue expects", status=1)
    assert not (cache / "group").exists()
    aside = part_of(cache).with_name("a.bin.refused")
    assert aside.read_bytes() == OTHER
    site.put("a.bin", BODY)
    good(command(*line))


def test_the_sum_is_over_the_resumed_part_too(site: Site, cache: Path) -> None:
    site.script = [Step(send=100_000), *[Step(status=500)] * 4]
    with pytest.raises(Failure):
        data_sets.fetch(one(site), cache)
    damaged = bytearray(part_of(cache).read_bytes())
    damaged[5] ^= 1
    part_of(cache).write_bytes(damaged)
    with pytest.raises(Failure, match=sha(bytes(damaged) + BODY[100_000:])):
        data_sets.fetch(one(site), cache)
    assert site.sent[-1] == 200_000
    data_sets.fetch(one(site), cache)


def test_the_first_sum_is_remembered(
    site: Site, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = data_sets.fetch(one(site, pinned=False), cache)
    shutil.rmtree(target)
    data_sets.fetch(one(site, pinned=False), cache)
    assert "SHA-256 as first seen 20" in capsys.readouterr().out
    shutil.rmtree(target)
    with pytest.raises(Failure, match=f"is {sha(OTHER)}, but .*first seen.* expects {sha(BODY)}"):
        data_sets.fetch(one(site, body=OTHER, pinned=False), cache)
    assert not target.exists()


def test_a_wrong_size_is_refused(site: Site, cache: Path) -> None:
    url = site.put("a.bin", BODY)
    for size, length, words in (
        (299_999, True, "announces 300,000 bytes, but the catalogue expects 299,999"),
        (299_999, False, "the server sends more than the 299,999 bytes allowed"),
        (300_001, True, "announces 300,000 bytes"),
        (300_001, False, "300,000 bytes arrived, but the catalogue expects 300,001"),
    ):
        site.script = [Step(no_length=not length)] * 4
        with pytest.raises(Failure, match=words):
            data_sets.fetch(data_set(download.File(url, "a.bin", size)), cache)
        assert not (cache / "group").exists()
        shutil.rmtree(cache)


@pytest.mark.parametrize(
    "steps",
    [
        [Step(no_length=True)],
        [Step(chunked=True)],
        [Step(chunked=True, send=100_000)],
    ],
)
def test_an_unknown_length_is_no_hindrance(site: Site, cache: Path, steps: list[Step]) -> None:
    site.script = list(steps)
    target = data_sets.fetch(one(site, pinned=False), cache)
    assert (target / "a.bin").read_bytes() == BODY
    assert [asked[1] for asked in site.asked] == [None, "bytes=100000-"][: len(site.sent)]
    assert len(site.sent) == (1 if steps[0].send is None else 2)


def test_a_network_that_goes_away_is_waited_for(site: Site, cache: Path) -> None:
    """The connection breaks, the server cannot be reached for two attempts, and then it is back."""
    real, closed = download.build_opener, [True, True]

    def opener(*handlers: Any) -> Any:
        if site.asked and closed and closed.pop():
            raise URLError(ConnectionRefusedError(111, "Connection refused"))
        return real(*handlers)

    site.script = [Step(send=1000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "build_opener", opener)
        data_sets.fetch(one(site), cache)
    assert closed == []
    assert site.asked[1][1] == "bytes=1000-"


def test_what_the_server_answers(
    site: Site, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.script = [Step(status=404)]
    with pytest.raises(Failure, match=r"a\.bin: the server answers 404 Not Found$"):
        data_sets.fetch(one(site), cache)
    assert len(site.asked) == 1
    site.script = [Step(status=500), Step(status=429)]
    data_sets.fetch(one(site), cache)
    assert len(site.asked) == 4
    err = capsys.readouterr().err
    assert "answers 500 Internal Server Error; trying again in" in err
    assert "answers 429 Too Many Requests; trying again in" in err


def test_no_server_and_silence(
    site: Site,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dead = data_set(download.File(f"http://127.0.0.1:{free_port}/a.bin", "a.bin"))
    with pytest.raises(Failure, match=r"the server cannot be reached: .*refused"):
        data_sets.fetch(dead, cache)
    with pytest.raises(Failure, match="the server cannot be reached: "):
        data_sets.fetch(data_set(download.File("http://no-such-host.invalid/a", "a")), cache)
    assert capsys.readouterr().err == ""  # without a network, waiting is useless
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    release = threading.Event()
    site.script = [Step(send=1000, hold=release)]
    data_sets.fetch(one(site), cache)
    release.set()
    assert site.asked[1][1] == "bytes=1000-"


@pytest.fixture
def free_port() -> int:
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_port
    server.server_close()
    return port


@pytest.fixture
def secure(tmp_path: Path, site: Site) -> Iterator[tuple[Site, Path]]:
    """A site with a certificate that no authority signed, and that certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    line = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2 "
    line += "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(line.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server, made = serve(context)
    yield made, certificate
    server.shutdown()
    server.server_close()


def test_certificates_are_checked(
    secure: tuple[Site, Path], site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, certificate = secure
    with pytest.raises(Failure, match="the server's certificate is not valid: self"):
        data_sets.fetch(one(hidden), cache)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    hidden.script = [Step(location=site.put("a.bin", BODY))]
    with pytest.raises(Failure, match=r"redirects to http://.*, which is not encrypted: refused"):
        data_sets.fetch(one(hidden), cache)
    assert site.asked == []
    data_sets.fetch(one(hidden), cache)


def test_redirections_are_followed(site: Site, cache: Path) -> None:
    data = one(site)
    moved = site.put("elsewhere", BODY)
    site.script = [Step(location=moved), Step(send=10), Step(location=moved)]
    data_sets.fetch(data, cache)
    assert [path for path, *_ in site.asked] == ["/a.bin", "/elsewhere"] * 2
    assert site.asked[3][1] == "bytes=10-"


def test_a_full_disk_is_seen_before(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=2 * len(BODY) - 1)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Failure, match="has 599,999 bytes free, but 600,000 are needed"):
        data_sets.fetch(one(site), cache)
    assert not part_of(cache).exists()
    usage.free += 1
    data_sets.fetch(one(site), cache)


# ---- the process


def wait_for(true: Callable[[], Any]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_download_goes_on(
    site: Site, cache: Path, tmp_path: Path, number: signal.Signals
) -> None:
    catalogue = listed(tmp_path, {"url": site.put("a.bin", BODY), "sha256": sha(BODY)})
    line = fetching(catalogue, cache)
    release = threading.Event()
    site.script = [Step(send=200_000, hold=release)]
    process = start(*line)
    wait_for(lambda: part_of(cache).exists() and part_of(cache).stat().st_size > 100_000)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    release.set()
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 128 + number
        assert err == "stopped; run again to resume the download\n"
    there = part_of(cache).stat().st_size
    assert 100_000 < there <= 200_000
    good(command(*line))
    assert site.asked[1][1] == f"bytes={there}-"
    assert (cache / "group" / "name" / "a.bin").read_bytes() == BODY


def test_two_at_once_fetch_once(site: Site, cache: Path, tmp_path: Path) -> None:
    catalogue = listed(tmp_path, {"url": site.put("a.bin", BODY)})
    line = fetching(catalogue, cache)
    release = threading.Event()
    site.script = [Step(send=100_000, hold=release)]
    first = start(*line)
    wait_for(lambda: site.asked)
    second = start(*line)
    assert second.stderr is not None
    assert second.stderr.readline() == "another process is fetching group/name: waiting for it\n"
    release.set()
    outs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert "the catalogue has no SHA-256 for this file" in outs[0]
    assert "already here" in outs[1]
    assert len(site.asked) == 1


def test_a_file_system_without_locks(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(BadInput, match=r"lock cannot be locked \(No locks available\); give a dir"):
        data_sets.fetch(one(site), cache)
    assert not site.asked


def test_what_is_there_is_never_replaced(site: Site, cache: Path) -> None:
    data = one(site, "a.zip", zipped(a=b"one", b=b"two"))
    target = data_sets.fetch(data, cache)
    asked = len(site.asked)
    (target / "mine.txt").write_text("my own notes")
    data_sets.fetch(data, cache)
    (target / "a").write_bytes(b"0ne")
    with pytest.raises(Failure, match=rf"a has changed since it was unpacked: remove {target} and"):
        data_sets.fetch(data, cache)
    assert (target / "a").read_bytes() == b"0ne"
    (target / "a").unlink()
    with pytest.raises(Failure, match=r"name/a is missing: remove "):
        data_sets.fetch(data, cache)
    (target / "SOURCE.json").write_text("[1]")
    with pytest.raises(BadInput, match="damaged"):
        data_sets.fetch(data, cache)
    (target / "SOURCE.json").unlink()
    with pytest.raises(BadInput, match="exists but was not made by fetch"):
        data_sets.fetch(data, cache)
    assert sorted(path.name for path in target.iterdir()) == ["b", "mine.txt"]
    assert len(site.asked) == asked


def test_a_cache_that_cannot_be(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="file"):
        data_sets.fetch(one(site), tmp_path / "file" / "cache")


# ---- archives


def tarred(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, body in members:
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def member(name: str, body: bytes = b"x", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, body


def zip_link() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("link")
        info.create_system, info.external_attr = 3, 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


def lying_zip() -> bytes:
    """A megabyte of zeros in a zip whose two headers both declare ten bytes."""
    body = bytearray(zipped(zeros=bytes(2**20)))
    assert body.count(struct.pack("<I", 2**20)) == 2
    return bytes(body.replace(struct.pack("<I", 2**20), struct.pack("<I", 10)))


def lying_tar(size: int) -> bytes:
    """A tar file whose header announces more bytes than follow."""
    info = tarfile.TarInfo("a")
    info.size = size
    return info.tobuf() + bytes(1024)


def undecodable_tar() -> bytes:
    info = tarfile.TarInfo("\udcff")
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + bytes(1024)


def doubled() -> bytes:
    body = zipped(aa=b"1", ab=b"2")
    return body.replace(b"ab", b"aa")


ATTACKS = {
    "up.zip": (zipped(**{"..__evil": b""}), "'../evil' points outside of"),
    "deep.zip": (zipped(**{"a__..__..__evil": b""}), "points outside of"),
    "absolute.zip": (zipped(__evil=b""), "'/evil' points outside of"),
    "backslash.zip": (zipped(**{"..\\evil": b""}), "points outside of"),
    "drive.zip": (zipped(**{"C:evil": b""}), "points outside of"),
    "nameless.zip": (zipped(qq=b"").replace(b"qq", b"\0q"), "'' is not a file name"),
    "latin.zip": (zipped(é=b"").replace(b"\xc3\xa9", b"\xb3\xb3"), "cannot be unpacked: "),
    "latin-inside.zip": (
        zipped(é=b"").replace(b"\xc3\xa9", b"\xb3\xb3", 1),
        "cannot be unpacked: ",
    ),
    "link.zip": (zip_link(), "'link' is neither file nor directory"),
    "bomb.zip": (zipped(zeros=bytes(2**20)), "unpacks to more than"),
    "lying.zip": (lying_zip(), "cannot be unpacked: "),
    "doubled.zip": (doubled(), "'aa' has the name of another member, 'aa'"),
    "case.zip": (zipped(data=b"1", DATA=b"2"), "'DATA' has the name of another member, 'data'"),
    "casedir.zip": (zipped(data__a=b"1", DATA__b=b"2"), "'DATA/b' has the name of another"),
    "both.zip": (zipped(data=b"1", data__a=b"2"), "'data/a' has the name of another"),
    "record.zip": (
        zipped(**{"Source.json": b"{}"}),
        "name of another member, 'SOURCE.json'",
    ),
    "cut.zip": (zipped(a=b"1" * 999)[:-20], "cannot be unpacked: "),
    "up.tar": (tarred(member("../evil")), "evil"),
    "absolute.tar": (tarred(member("/evil")), "'/evil' points outside of"),
    "symlink.tar": (
        tarred(member("link", b"", type=tarfile.SYMTYPE, linkname="/etc"), member("link/evil")),
        "'link' is neither file nor directory",
    ),
    "hardlink.tar": (
        tarred(member("link", b"", type=tarfile.LNKTYPE, linkname="../../x")),
        "'link' is neither file nor directory",
    ),
    "pipe.tar": (tarred(member("p", b"", type=tarfile.FIFOTYPE)), "'p' is neither"),
    "device.tar": (tarred(member("d", b"", type=tarfile.CHRTYPE)), "'d' is neither"),
    "bomb.tar.gz": (gzip.compress(tarred(member("a", bytes(2**20)))), "unpacks to more than"),
    "headers.tar.bz2": (
        bz2.compress(tarred(member("a", pax_headers={"comment": "x" * 2**21}))),
        "headers have more than 1,048,576 bytes",
    ),
    "lying.tar": (lying_tar(2**40), "unpacks to more than"),
    "short.tar": (lying_tar(4000), "cannot be unpacked: "),
    "bytes.tar": (undecodable_tar(), "has a name that is not UTF-8"),
    "bomb.txt.gz": (gzip.compress(bytes(2**20)), "unpacks to more than"),
    "cut.txt.gz": (gzip.compress(BODY)[:-20], "cannot be unpacked: "),
    "not.txt.gz": (BODY, "cannot be unpacked: "),
    "not.tar.bz2": (BODY, "cannot be unpacked: "),
    "not.tar.xz": (BODY, "cannot be unpacked: "),
    "not.tgz": (BODY, "cannot be unpacked: "),
    "not.tar": (BODY, "cannot be unpacked: "),
    "not.zip": (BODY, "cannot be unpacked: "),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_archive_harms(name: str, site: Site, cache: Path) -> None:
    body, words = ATTACKS[name]
    with pytest.raises(Failure) as caught:
        data_sets.fetch(one(site, name, body), cache)
    assert words in str(caught.value)
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)
    downloads = part_of(cache).parent
    everything = {path for path in cache.parent.rglob("*") if path.is_file()}
    assert everything == {downloads / name, downloads / "lock"}
    assert not list((cache / "group").iterdir())
    assert not Path("/evil").exists()


def test_too_many_members(site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "MEMBERS", 3)
    data_sets.fetch(one(site, "a.zip", zipped(a=b"", b=b"", c=b"")), cache)
    with pytest.raises(Failure, match="holds more than 3 members"):
        data_sets.fetch(
            one(site, "a.zip", zipped(a=b"", b=b"", c=b"", d=b"")), cache.with_name("c2")
        )


def test_a_limit_of_its_own(site: Site, cache: Path) -> None:
    body = zipped(zeros=bytes(2**20))
    url = site.put("a.zip", body)
    file = download.File(url, "a.zip")
    with pytest.raises(Failure, match="more than 1,048,575 bytes"):
        data_sets.fetch(data_set(file, unpacked=2**20 - 1), cache)
    target = data_sets.fetch(data_set(file, unpacked=2**20), cache)
    assert (target / "zeros").read_bytes() == bytes(2**20)
    assert len(site.asked) == 1  # the file is not downloaded again


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".tar", bytes),
        (".tar.gz", gzip.compress),
        (".tgz", gzip.compress),
        (".tar.bz2", bz2.compress),
        (".tar.xz", lzma.compress),
    ],
)
def test_tar_files_unpack(
    ending: str, pack: Callable[[bytes], bytes], site: Site, cache: Path
) -> None:
    members = [
        member("./", b"", type=tarfile.DIRTYPE),
        member("./data/", b"", type=tarfile.DIRTYPE, mode=0),
        member("./data/a.txt", BODY, mode=0o4777),
        member("data/empty/b.txt", b""),
        member("x" * 150 + "/c.txt", b"long"),
    ]
    target = data_sets.fetch(one(site, f"a{ending}", pack(tarred(*members))), cache)
    assert (target / "data" / "a.txt").read_bytes() == BODY
    assert (target / "data" / "a.txt").stat().st_mode & 0o7111 == 0
    assert (target / "data" / "empty" / "b.txt").read_bytes() == b""
    assert (target / ("x" * 150) / "c.txt").read_bytes() == b"long"


def test_gz_files_unpack(site: Site, cache: Path) -> None:
    target = data_sets.fetch(one(site, "corpus.txt.gz", gzip.compress(BODY)), cache)
    assert (target / "corpus.txt").read_bytes() == BODY


# ---- the catalogue


CATALOGUE = data_sets.load_catalogue(data_sets.CATALOGUE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_is_well_formed(name: str) -> None:
    data = CATALOGUE[name]
    assert re.search(r"(19|20)\d\d", data.citation), "a citation has a year"
    assert len(data.licence) > 3
    assert len(data.source) > 10
    for file in data.files:
        assert file.url.startswith("https://")
        assert (file.bytes is None) == (file.sha256 is None)
    words = shlex.split(data.then.replace("{directory}", "/there"))
    if data.files:
        assert "{directory}" in data.then
    if name.startswith("corpus/"):
        assert words[0] == "text"
    else:
        assert words[:2] == ["task", name.removesuffix("/v2")]
    # the readers that exist accept these options
    if words[0] == "text" or words[1] in cli.TASK_READERS:
        cli.make_parser().parse_args(words)


GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")


def test_the_promised_names() -> None:
    glue = [
        f"glue/{n}" for n in ["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
    ]
    rest = [
        "squad",
        "squad/v2",
        "dna/splice",
        "dna/h3",
        "dna/h4",
        "dna/h3k9ac",
        "protein/localization",
        "protein/stability",
        "protein/fluorescence",
        "music/maestro",
    ]
    assert set(CATALOGUE) >= {*glue, *rest}
    assert all(CATALOGUE[name].files[0].sha256 for name in [*glue, "squad", "squad/v2"])
    assert len(CATALOGUE["glue/mrpc"].files) == 3


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    done = good(command("preprocess.py", "fetch", "--list"))
    lines = done.out.splitlines()
    assert len(lines) == 1 + len(CATALOGUE)
    assert re.match(r"name +MB +from +licence$", lines[0])
    assert any(
        re.match(r"music/maestro +46\.58 +storage\.googleapis\.com +CC BY-NC-SA 4\.0$", line)
        for line in lines
    )
    assert any(re.match(r"corpus/oscar-kn +\? +\(by hand\) ", line) for line in lines)
    cli_run(["fetch"])
    assert capsys.readouterr().out == done.out


def cli_run(arguments: list[str]) -> None:
    parsed = cli.make_parser().parse_args(arguments)
    parsed.do(parsed)


def test_unknown_names_and_by_hand(tmp_path: Path) -> None:
    refused(
        command("preprocess.py", "fetch", "glue/colla"), "'glue/colla'", "did you mean glue/cola?"
    )
    with pytest.raises(BadInput, match=r"oscar-kn can only be fetched by hand: .*account"):
        cli_run(["fetch", "corpus/oscar-kn", "--cache", str(tmp_path / "cache")])
    assert not (tmp_path / "cache").exists()


FILE = {"url": "https://example.org/a.zip"}
WRONG: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no files": ([], {}, "needs either `files` or `by_hand`"),
    "both": ([FILE], {"by_hand": "ask"}, "needs either"),
    "no licence": ([FILE], {"licence": None}, "lacks the key 'licence'"),
    "unknown key": ([FILE], {"license": "MIT"}, "unknown key 'license'; did you mean licence?"),
    "number": ([FILE], {"licence": 3}, "licence = 3 must be a string"),
    "empty": ([FILE], {"citation": ""}, "citation = '' must be a string"),
    "size": ([FILE], {"unpacked": "9"}, "must be a whole number above 0"),
    "directory": ([FILE], {"directory": "../x"}, "directory = '../x'"),
    "hidden": ([FILE], {"directory": ".fetch"}, "directory = '.fetch'"),
    "scheme": ([{"url": "file:///etc/passwd"}], {}, "is not an address that begins with https://"),
    "space": ([{"url": "https://example.org/a b"}], {}, "is not an address"),
    "host": ([{"url": "https://[/a"}], {}, "is not an address"),
    "no url": ([{"name": "a"}], {}, "url = ''"),
    "name": ([{**FILE, "name": "../a"}], {}, "'../a' is not a plain file name"),
    "no name": ([{"url": "https://example.org/"}], {}, "'' is not a plain file name"),
    "sum": ([{**FILE, "sha256": "abc"}], {}, "sha256 = 'abc' must be 64 digits"),
    "bytes": ([{**FILE, "bytes": 0}], {}, "bytes = 0 must be"),
    "twice": ([FILE, FILE], {}, "two files have the same name"),
    "key": ([{**FILE, "md5": "0"}], {}, "a file has url, and may have"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_catalogue_is_one_line(case: str, tmp_path: Path) -> None:
    files, keys, words = WRONG[case]
    path = listed(tmp_path, *files, **keys)
    with pytest.raises(BadInput) as caught:
        data_sets.load_catalogue(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: 'group/name'")


def test_other_wrong_catalogues(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        data_sets.load_catalogue(tmp_path / "none.toml")
    path = listed(tmp_path, FILE)
    entry = path.read_text() + "\n"
    path.write_text(entry + entry.replace("group/name", "group/name/v2"))
    with pytest.raises(BadInput, match="would lie inside 'group/name': give `directory`"):
        data_sets.load_catalogue(path)
    path.write_text(
        (entry + 'directory = "a"\n') + (entry + 'directory = "a"\n').replace("/name", "/b")
    )
    with pytest.raises(BadInput, match="the same directory"):
        data_sets.load_catalogue(path)
    path.write_text("a = ")
    with pytest.raises(BadInput, match="is not a catalogue in TOML"):
        data_sets.load_catalogue(path)
