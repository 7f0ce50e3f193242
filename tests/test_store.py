"""The store: it reads back what was written, is whole or absent, and notices damage."""

import errno
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xformer.data import files, store, vocabularies, writing
from xformer.data.errors import BadInput
from xformer.data.store import Ragged, open_store
from xformer.data.writing import create_store

ROOT = Path(__file__).parents[1]
ROWS: list[list[int]] = [[5, 6, 7], [], [8], [5] * 13]


def write(
    path: Path, rows: list[list[int]] = ROWS, vocabulary: int = 100, overwrite: bool = False
) -> Path:
    words = vocabularies.symbols((f"w{i}" for i in range(5, vocabulary)), separated=True)
    columns = {"tokens": "", "tokens_b": "", "label": "int64"}
    with create_store(path, words, columns, ("tokens", "tokens_b"), overwrite) as new:
        for name in ("train", "valid"):
            with new.split(name) as split:
                for part in (rows[:2], rows[2:]):  # appended piece by piece
                    values = np.array([i for row in part for i in row], np.int32)
                    lengths = np.array([len(row) for row in part])
                    split.append_ragged("tokens", values, lengths)
                    split.append_ragged("tokens_b", values[::-1], lengths[::-1])
                    split.append("label", np.arange(len(part)))
        new.finish("class", ["no", "yes"], "accuracy", {"command": ["made"]})
    return path


def test_what_is_written_is_read_back(tmp_path):
    actual = open_store(write(tmp_path / "s"))
    assert (actual.kind, actual.labels, actual.metric) == ("class", ["no", "yes"], "accuracy")
    assert actual.splits == ["train", "valid"]
    assert actual.vocab_size == len(actual.tokenizer()) == 100
    assert actual.fingerprint == actual.tokenizer().fingerprint
    train = actual.split("train")
    assert (train.rows, train.tokens) == (4, 34)
    tokens = train.columns["tokens"]
    assert isinstance(tokens, Ragged)
    assert [tokens[i].tolist() for i in range(len(tokens))] == ROWS
    assert tokens.lengths(np.array([3, 0])).tolist() == [13, 3]
    assert train.columns["label"].tolist() == [0, 1, 0, 1]
    with pytest.raises(BadInput, match="no split 'test'; it has train, valid"):
        actual.split("test")


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_take_the_space_they_need(tmp_path, size, dtype):
    actual = open_store(write(tmp_path / "s", [[5, size - 1]] * 4, size))
    values = actual.split("train").columns["tokens"].values
    assert values.dtype == dtype
    assert values.max() == size - 1


def test_any_program_reads_the_columns(tmp_path):
    write(tmp_path / "s")
    values = np.load(tmp_path / "s/train/tokens.npy", mmap_mode="r")
    offsets = np.load(tmp_path / "s/train/tokens.offsets.npy", mmap_mode="r")
    assert offsets.tolist() == [0, 3, 3, 4, 17]
    assert values[4:].tolist() == ROWS[3]


@pytest.mark.parametrize(("dtype", "rows"), [("uint16", 0), ("int64", 10**5), ("(2,)i4", 999)])
def test_a_column_is_byte_for_byte_what_numpy_saves(tmp_path, dtype, rows):
    values = np.zeros(rows, dtype)
    values[:] = np.arange(values.size).reshape(values.shape)
    writer = writing.NpyWriter(tmp_path / "x", np.dtype(dtype))
    for part in np.array_split(values, 3):
        writer.append(part)
    writer.close()
    np.save(tmp_path / "y.npy", values)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y.npy").read_bytes()


def test_the_same_input_gives_the_same_bytes(tmp_path):
    one, two = write(tmp_path / "a"), write(tmp_path / "b")
    for path in one.rglob("*.*"):
        assert path.read_bytes() == (two / path.relative_to(one)).read_bytes()
    assert open_store(one).key == open_store(two).key


def test_empty_columns_and_splits(tmp_path):
    actual = open_store(write(tmp_path / "s", [[], [], []]))
    assert actual.split("train").tokens == 0
    assert actual.split("train").columns["tokens"].lengths(np.arange(3)).tolist() == [0, 0, 0]
    with pytest.raises(BadInput, match="'train' would be empty"):
        write(tmp_path / "empty", [])
    assert os.listdir(tmp_path) == ["s"]


def spoil(path: Path, columns: dict[str, str], error: type[BaseException] | None) -> None:
    with (
        create_store(path, vocabularies.symbols("ab"), columns) as new,
        new.split("train") as split,
    ):
        split.append_ragged("tokens", np.array([5]), np.array([1]))
        if error:
            raise error("something else went wrong")


def test_it_is_whole_or_absent(tmp_path):
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error):
            spoil(tmp_path / "s", {"tokens": ""}, error)
        assert not os.listdir(tmp_path)
    with pytest.raises(ValueError, match="different lengths"):
        spoil(tmp_path / "s", {"tokens": "", "label": "int64"}, None)
    assert not os.listdir(tmp_path)


def test_an_output_that_exists(tmp_path):
    path = write(tmp_path / "s")
    before = (path / "store.json").read_bytes()
    with pytest.raises(BadInput, match="exists"):
        write(path)
    with pytest.raises(BadInput, match="would be empty"):
        write(path, [], overwrite=True)
    assert (
        path / "store.json"
    ).read_bytes() == before  # the old store stays until the new one is whole
    write(path, [[9]], overwrite=True)
    assert open_store(path).split("train").rows == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match="not a store"):
        write(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine/thesis.txt").exists()
    with pytest.raises(BadInput, match="is a file"):
        write(tmp_path / "mine/thesis.txt/store")
    assert sorted(os.listdir(tmp_path)) == ["mine", "s"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    dead = tmp_path / f".s.{done.pid}.partial"
    alive = tmp_path / f".s.{os.getppid()}.partial"
    dead.mkdir()
    alive.mkdir()
    write(tmp_path / "s")
    assert not dead.exists()
    assert alive.exists()


def test_a_file_system_that_cannot_map_files(tmp_path, monkeypatch):
    write(tmp_path / "s")

    def refuses(*_, **__):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", refuses)
    words = r"s/train/[\w.]+.npy is on a file system that cannot map files; put the store on"
    with pytest.raises(BadInput, match=words):
        open_store(tmp_path / "s")
    with pytest.raises(BadInput, match=words.replace("s/", r"\.s\..*partial/")):
        write(tmp_path / "s", overwrite=True)


def test_a_replacement_with_old_times_is_noticed(tmp_path, monkeypatch):
    """A copy keeps times of modification (cp -p), and a new file can have the inode of a deleted
    one. A store that changes while it is opened is opened again."""
    path = write(tmp_path / "s")
    meta = path / "store.json"
    load, calls = store.load_array, []

    def load_array(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            old = meta.stat()
            while meta.stat().st_ctime_ns == old.st_ctime_ns:
                meta.write_bytes(meta.read_bytes())
                os.utime(meta, ns=(old.st_atime_ns, old.st_mtime_ns))
            raise FileNotFoundError(args[0])
        return load(*args, **kwargs)

    monkeypatch.setattr(store, "load_array", load_array)
    assert open_store(path).split("train").rows == 4
    assert len(calls) > 1


# ------------------------------------------------------------------------------ damage


def edit(path: Path, change: Callable[[dict], object]) -> None:
    meta = json.loads((path / "store.json").read_text())
    change(meta)
    (path / "store.json").write_text(json.dumps(meta))


def truncate(path: Path) -> None:
    file = path / "train/tokens.npy"
    file.write_bytes(file.read_bytes()[:-2])


def garble_header(path: Path) -> None:
    file = path / "train/label.npy"
    file.write_bytes(b"X" + file.read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "phrase"),
    [
        (truncate, r"tokens\.npy has 160 bytes, not 162"),
        (garble_header, r"label\.npy is not a \.npy file"),
        (lambda p: (p / "train/label.npy").unlink(), r"label\.npy is missing"),
        (lambda p: (p / "store.json").unlink(), "is not a store"),
        (lambda p: (p / "store.json").write_text("{"), "not valid JSON"),
        (lambda p: edit(p, lambda m: m.update(format=99)), "not a store of format 1"),
        (lambda p: edit(p, lambda m: m.pop("labels")), "is damaged"),
        *(
            (lambda p, n=n: edit(p, lambda m: m["tokenizer"].update(vocab_size=n)), "vocab_size is")
            for n in (1.5, "9", True, 0, -1, 2**40, None)
        ),
        (
            lambda p: edit(
                p,
                lambda m: m["splits"]["train"]["files"].update(
                    {"train/x.npy": {"bytes": 1, "sha256": ["0"]}}
                ),
            ),
            "train/x.npy does not belong to any column",
        ),
        (
            lambda p: edit(p, lambda m: m["splits"]["train"].update(rows=3)),
            "contradicts|4 rows, not 3",
        ),
    ],
)
def test_damage_is_refused_on_opening(tmp_path, damage, phrase):
    path = write(tmp_path / "s")
    (path / "sums.json").unlink()  # as in a store of an early version
    damage(path)
    with pytest.raises(BadInput, match=phrase):
        open_store(path)


@pytest.mark.parametrize("piece", [64, 256, 1024])
def test_values_are_checked_across_the_pieces_that_are_read(tmp_path, monkeypatch, piece):
    """Offsets that decrease from one piece to the next, ids beyond the vocabulary in the first and
    the last piece, and a first offset that is not 0. A block of 256 bytes holds 64 offsets or 128
    ids, and the header takes half of the first one."""
    monkeypatch.setattr(files, "BLOCK", 256)
    monkeypatch.setattr(files, "PIECE", piece)
    actual = open_store(write(tmp_path / "s", [[5]] * 100))

    def invalid(name: str, row: int, value: int) -> list[int]:
        values = np.load(actual.path / name)
        values[row] = value
        np.save(tmp_path / "changed.npy", values)
        blocks = files.checked_blocks(tmp_path / "changed.npy", actual._validity(name))
        return [number for number, (_, valid) in enumerate(blocks) if not valid]

    for row, value, bad in ((0, 1, 0), (31, 2, 0), (32, 2, 1), (33, 2, 1), (96, 2, 2), (100, 2, 2)):
        assert invalid("train/tokens.offsets.npy", row, value) == [bad], row
    assert invalid("train/tokens.offsets.npy", 5, 5) == []
    for row, bad in ((0, 0), (63, 0), (64, 1), (99, 1)):
        assert invalid("train/tokens.npy", row, 60_000) == [bad], row


def test_one_flipped_bit_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 256)
    monkeypatch.setattr(store, "BLOCK", 256)
    path = write(tmp_path / "s", [[5, 6, 7] * 200] * 2)
    actual = open_store(path)
    assert all(good for _, _, good in actual.verify())
    file = path / "valid/tokens.npy"
    data = bytearray(file.read_bytes())
    data[1000] ^= 4
    file.write_bytes(data)
    actual = open_store(path)  # sizes and headers are unchanged
    bad = [(name, block) for name, block, good in actual.verify() if not good]
    assert bad == [("valid/tokens.npy", 3)]
    reports: list[str] = []
    actual.verify_in_background(reports.append).join()
    assert reports == [f"{file} is damaged in block 3 of 256 bytes: {store.REMEDY}"]
