"""Encoding in several processes: batches of texts go out, and their ids come back in order.

A worker is this module run as a program. It reads requests from its standard input and answers on
its standard output, so it exits when its parent is gone, for whatever reason. For each worker, a
thread of the parent sends a batch and waits for the answer. The ids do not depend on the number of
workers: each has its own table of known words, but the table never changes an id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple

import numpy as np

from xformer.data import tokenizers
from xformer.data.errors import Failure
from xformer.data.tokenizers import Tokenizer

from .words import CachedEncoder

ROOT = str(Path(tokenizers.__file__).parents[2])  # the directory that contains the package xformer
FEW = 8  # with fewer batches, this process is done before worker processes would have started

TextBatch = tuple[list[bool], list[str]]  # does each text end its document?, the texts


class BatchCounts(NamedTuple):
    """What is counted in the texts of a batch: words between white space, characters, and the
    characters that became unknown tokens."""

    words: int
    characters: int
    unknown: int


# ids, number of ids of each text, does each text end its document?, what the texts hold
EncodedBatch = tuple[np.ndarray, np.ndarray, list[bool], BatchCounts]
PROGRAM = (sys.executable, "-P", "-m", "xformer.preprocess.workers")


class EncodingProcess:
    """A child process that encodes texts."""

    def __init__(self, directory: Path, processes: int):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")])),
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [*PROGRAM, str(directory), str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # only the parent handles Ctrl-C
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, BatchCounts]:
        """Like CachedEncoder.encode, with what is counted in the texts as a third value.

        Raises Failure if the process died.
        """
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        try:
            _send(self.requests, sizes.data, "".join(texts).encode())
            ids, lengths, counts = (_receive(self.answers) for _ in range(3))
        except (EOFError, OSError):
            raise Failure(self._how_it_ended()) from None
        counted = BatchCounts(*np.frombuffer(counts, np.int64).tolist())
        return np.frombuffer(ids, np.int32), np.frombuffer(lengths, np.int64), counted

    def _how_it_ended(self) -> str:
        status = self.process.wait()
        if status >= 0:
            return f"an encoding process ended with status {status}"
        name = signal.Signals(-status).name
        hint = " (out of memory? --workers 1 needs the least)" if name == "SIGKILL" else ""
        return f"an encoding process was ended by {name}{hint}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Close the pipes. No thread may use them any more."""
        for pipe in (self.requests, self.answers):
            with suppress(OSError):  # unsent data may be lost
                pipe.close()


class EncodingPool:
    """Encodes batches in `count` processes. Use it as a context manager: it ends all processes.

    If `count` is 1 or there are few batches, this process encodes them itself. The processes load
    the tokenizer from `directory`.
    """

    def __init__(self, tokenizer: Tokenizer, directory: Path, count: int):
        self.tokenizer, self.directory, self.count = tokenizer, directory, count
        self.own: CachedEncoder | None = None
        self.workers: list[EncodingProcess] = []
        self.free: SimpleQueue[EncodingProcess] = SimpleQueue()
        self.threads = ThreadPoolExecutor(count)

    def __enter__(self) -> EncodingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.kill()
        self.threads.shutdown()
        for worker in self.workers:
            worker.close()

    def encode(self, batches: Iterable[TextBatch]) -> Iterator[EncodedBatch]:
        """Yield each batch encoded, in order. Memory holds at most two batches for each process."""
        batches = iter(batches)
        if self.count > 1 and not self.workers:
            first = list(islice(batches, FEW))
            batches = chain(first, batches)
            if len(first) == FEW:
                self._start()
        if not self.workers:
            self.own = self.own or CachedEncoder(self.tokenizer)
            for ends, texts in batches:
                ids, lengths, counts = _encode(self.own, texts)
                yield ids, lengths, ends, counts
            return
        waiting: deque[tuple[Future[tuple[np.ndarray, np.ndarray, BatchCounts]], list[bool]]] = (
            deque()
        )
        for ends, texts in batches:
            waiting.append((self.threads.submit(self._encode, texts), ends))
            if len(waiting) == 2 * self.count:
                yield _answer(*waiting.popleft())
        for future, ends in waiting:
            yield _answer(future, ends)

    def _start(self) -> None:
        self.own = None  # its table is no longer needed
        for _ in range(self.count):
            self.workers.append(EncodingProcess(self.directory, self.count))
            self.free.put(self.workers[-1])

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, BatchCounts]:
        worker = self.free.get()
        try:
            return worker.encode(texts)
        finally:
            self.free.put(worker)


def _answer(
    future: Future[tuple[np.ndarray, np.ndarray, BatchCounts]], ends: list[bool]
) -> EncodedBatch:
    ids, lengths, counts = future.result()
    return ids, lengths, ends, counts


def _encode(
    encoder: CachedEncoder, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, BatchCounts]:
    """The ids of all texts, the number of ids of each, and what is counted in them."""
    before = encoder.unknown
    ids, lengths = encoder.encode(texts)
    words = sum(len(text.split()) for text in texts)
    return ids, lengths, BatchCounts(words, sum(map(len, texts)), encoder.unknown - before)


def _send(file: IO[bytes], *parts: bytes | memoryview) -> None:
    for part in parts:
        file.write(memoryview(part).nbytes.to_bytes(8, "little"))
        file.write(part)
    file.flush()


def _receive(file: IO[bytes]) -> bytes:
    size = int.from_bytes(head := file.read(8), "little")
    data = file.read(size)
    if len(head) < 8 or len(data) < size:
        raise EOFError
    return data


def serve(directory: Path, processes: int) -> None:
    """Answer requests as one of `processes` workers, until the input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed goes to standard error, not between the answers
    encoder = CachedEncoder(tokenizers.load_tokenizer(directory), processes)
    try:
        while True:
            sizes = np.frombuffer(_receive(requests), np.int64)
            text = _receive(requests).decode()
            ends = np.cumsum(sizes)
            bounds = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
            texts = [text[start:end] for start, end in bounds]
            ids, lengths, counts = _encode(encoder, texts)
            counted = np.array(counts, np.int64).data
            _send(answers, np.ascontiguousarray(ids, np.int32).data, lengths.data, counted)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent has finished, or died


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
