"""Replacing directories loses nothing if a process is killed or a disk fails."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import ROOT
from looking import checkpoint, store

from xformer import checkpoint as checkpoints
from xformer.data import files, tokenizers
from xformer.data.errors import BadInput, Failure
from xformer.data.files import ASIDE, atomic_directory, file_checksum, put_back
from xformer.data.store import open_store
from xformer.run import Run


def killed(path: Path, pid: int = 999_999_999) -> Path:
    """Leave a directory behind as a process does that is killed between its two renames."""
    return path.rename(path.with_name(f".{path.name}.{pid}{ASIDE}"))


def wrote(path: Path, text: str = "new", overwrite: bool = True) -> Path:
    """Write a directory that holds one file."""
    with atomic_directory(path, overwrite) as directory:
        (directory / "a").write_text(text)
    return path


def content(path: Path) -> tuple[str, list[str]]:
    """The content of the file in a directory, and the names of everything beside the directory."""
    return (path / "a").read_text(), sorted(p.name for p in path.parent.iterdir())


def test_a_replaced_directory(tmp_path: Path) -> None:
    path = wrote(tmp_path / "x[1]", "old")  # a name with characters that are special for glob
    assert content(wrote(path)) == ("new", ["x[1]"])
    with pytest.raises(BadInput, match="exists"):
        wrote(path, overwrite=False)


OPENED: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "store": (store, open_store),
    "checkpoint": (checkpoint, checkpoints.load),
    "tokenizer": (checkpoint, tokenizers.load_tokenizer),
}


@pytest.mark.parametrize("kind", OPENED)
def test_who_opens_what_a_killed_process_moved_aside_puts_it_back(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    make, read = OPENED[kind]
    path = tmp_path / kind
    make(path)
    aside = killed(path)
    read(path)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"the old one, {aside.name}, has been put back" in said
    assert not aside.exists()
    read(path)
    assert not capsys.readouterr().err


def test_who_writes_puts_it_back_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    path = wrote(tmp_path / "x", "old")
    killed(path)
    with pytest.raises(BadInput, match="exists"):
        wrote(path, overwrite=False)
    assert content(path) == ("old", ["x"])
    killed(path)
    assert content(wrote(path)) == ("new", ["x"])
    wrote(tmp_path / "y", "old")
    killed(tmp_path / "y").rename(tmp_path / f".x.999999999{ASIDE}")
    assert content(wrote(path, "newer")) == ("newer", ["x"])  # killed before it deleted the old one


def test_names_that_begin_alike_are_kept_apart(tmp_path: Path) -> None:
    """Writing or opening x leaves the leftovers of its neighbour x.5 alone."""
    aside = killed(wrote(tmp_path / "x.999999999", "old"))
    being_written = tmp_path / f".x.999999999.{files.owner()}.partial"
    being_written.mkdir()
    put_back(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    wrote(tmp_path / "x")
    assert (aside / "a").read_text() == "old"
    assert being_written.is_dir()


def test_another_host_that_writes_the_same_directory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are not known here, and may have the number of one here."""
    other = tmp_path / f".x.node7-{os.getpid()}.partial"
    dead = tmp_path / ".x.node7-999999999.partial"
    for directory in (other, dead):
        directory.mkdir()
    wrote(tmp_path / "x")
    assert content(tmp_path / "x") == ("new", sorted(["x", other.name, dead.name]))
    monkeypatch.setattr(files, "HOST", "node7")  # now they are processes of this host
    wrote(tmp_path / "x", "newer")
    assert content(tmp_path / "x") == ("newer", ["x"])


WRITES = """
import sys
from pathlib import Path
from xformer.data.files import atomic_directory
with atomic_directory(Path(sys.argv[1])) as directory:
    (directory / "a").write_text("other")
"""


@pytest.mark.slow
def test_another_container_with_the_same_host_name_is_left_alone(tmp_path: Path) -> None:
    """It does not see this process, and may have another one of the same number."""
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    tried = shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True)
    if not tried or tried.returncode:
        pytest.skip("namespaces cannot be made here")
    with atomic_directory(tmp_path / "x", overwrite=True) as directory:
        (directory / "a").write_text("here")
        line = [*alone, sys.executable, "-c", WRITES, str(tmp_path / "x")]
        subprocess.run(line, cwd=ROOT, check=True)
        assert content(tmp_path / "x") == ("other", [directory.name, "x"])
    assert content(tmp_path / "x") == ("here", ["x"])


def test_what_is_being_deleted_is_not_put_back(tmp_path: Path) -> None:
    """A process that is killed while it deletes the old directory leaves a part of it."""
    path = wrote(tmp_path / "x", "old")

    def killed_there(directory: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed_there)
        with pytest.raises(KeyboardInterrupt):
            wrote(path)
    assert (path / "a").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2
    shutil.rmtree(path)
    put_back(path)
    assert not path.exists()


def test_the_directory_put_back_is_the_newest(tmp_path: Path) -> None:
    for process, text in (("999999999", "old"), ("1000000000", "older"), ("999999998", "newest")):
        killed(wrote(tmp_path / "x", text), int(process))
    put_back(tmp_path / "x")
    assert (tmp_path / "x/a").read_text() == "newest"


def test_an_old_directory_that_only_its_owner_may_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a directory of a group, whose members may replace each other's directories but not
    delete the files in them."""
    path, delete = wrote(tmp_path / "x", "old"), shutil.rmtree

    def refuses(directory: Path, ignore_errors: bool = False) -> None:
        if directory.name.endswith(files.DELETED) and not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", "a")
        delete(directory, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    left = f".x.{files.owner()}{files.DELETED}"
    assert content(wrote(path)) == ("new", [left, "x"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"warning: {path} was replaced, but the old directory, ")
    assert f"{left}, cannot be deleted (Permission denied): its owner must delete it" in said


def test_a_directory_that_only_its_owner_may_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in /tmp, where nobody can rename what belongs to others."""
    path, rename = wrote(tmp_path / "x", "old"), Path.rename

    def refuses(source: Path, target: Path) -> Path:
        if path in (source, target):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(source), str(target))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(Failure, match=f"^{path} cannot be replaced .*: only its owner may replace"):
        wrote(path)
    assert content(path) == ("old", ["x"])


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_flush_directories(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is ignored for directories only. Another error is one of the disk."""
    refused = [True]  # whether the object is a directory

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) in refused:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            wrote(tmp_path / "x")
        return
    files.write_text(wrote(tmp_path / "x") / "a", "newer")
    assert content(tmp_path / "x") == ("newer", ["x"])
    refused[:] = [False]
    with pytest.raises(OSError, match=os.strerror(number)):
        wrote(tmp_path / "x")


def test_a_link_to_a_directory_stays(tmp_path: Path) -> None:
    real = wrote(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(real)
    wrote(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (real / "a").read_text() == "new"


def test_a_run_goes_on_from_a_checkpoint_that_lies_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    run = Run(tmp_path)
    for step in (2, 4):
        checkpoint(run.checkpoint_path(step))
    killed(run.checkpoint_path(4))
    assert run.newest() == run.checkpoint_path(4)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_only_a_checkpoint_that_the_disk_cannot_read_is_put_aside(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without free file handles, for example, the checkpoint is as good as before."""
    run = Run(tmp_path)
    older, newer = (checkpoint(run.checkpoint_path(step)) for step in (2, 4))
    verify = checkpoints.verify

    def reading(path: Path) -> None:
        if path == newer:
            raise OSError(number, os.strerror(number))
        verify(path)

    monkeypatch.setattr(checkpoints, "verify", reading)
    if number == errno.EIO:
        assert run.newest() == older
        assert (newer.parent / "damaged_step_4").is_dir()
    else:
        with pytest.raises(OSError, match="Too many open files"):
            run.newest()
        assert newer.is_dir()


def test_a_replacement_that_is_going_on_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 60.0)
    new, path = wrote(tmp_path / "new"), wrote(tmp_path / "x", "old")
    aside = killed(path)

    def second_rename() -> None:
        time.sleep(0.1)
        new.rename(path)

    thread = threading.Thread(target=second_rename)
    thread.start()
    put_back(path)
    thread.join()
    assert content(path) == ("new", [aside.name, "x"])


def failing(monkeypatch: pytest.MonkeyPatch, *endings: str) -> None:
    """Make renames to a free name fail for directories whose names end with this."""
    rename = Path.rename

    def refuses(source: Path, target: Path) -> Path:
        if source.name.endswith(endings) and not target.exists():
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refuses)


def test_a_disk_that_fails_between_the_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old directory is put back at once. If the disk refuses that too, the next process that
    looks for it is told where it is.
    """
    path, new = wrote(tmp_path / "x", "old"), f"{files.owner()}.partial"
    with monkeypatch.context() as patch:
        failing(patch, new)
        with pytest.raises(OSError, match="Input/output error"):
            wrote(path)
    assert content(path) == ("old", ["x"])
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    with monkeypatch.context() as patch:
        failing(patch, new, ASIDE)
        with pytest.raises(OSError, match="Input/output error"):
            wrote(path)
        aside = f".x.{files.owner()}{ASIDE}"
        with pytest.raises(BadInput, match=f"the old one as .*{aside}, which cannot be renamed"):
            put_back(path)
    put_back(path)
    assert content(path) == ("old", ["x"])


def test_checksums(tmp_path: Path) -> None:
    for size in (0, 1, 2**18, 2**18 + 1):
        (tmp_path / "x").write_bytes(b"7" * size)
        assert file_checksum(tmp_path / "x") == hashlib.sha256(b"7" * size).hexdigest()
