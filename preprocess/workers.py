"""Encoding in several processes: batches of texts go out, their ids come back in order.

A worker is this module run as a program. It reads requests from its standard input and answers on
its standard output, so that it ends by itself when whoever started it is gone, however that ended.
For each one a thread of the parent hands over a batch and waits for the answer. Ids do not depend
on the number of workers, as an Encoder gives a text the same ids whatever it has met before.
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
from typing import IO

import numpy as np

from xformer.data import tokenizers
from xformer.data.errors import Failure
from xformer.data.tokenizers import Tokenizer

from .words import Encoder

ROOT = str(Path(tokenizers.__file__).parents[2])  # where the package xformer lies
FEW = 8  # batches that are encoded sooner than processes start

Batch = tuple[list[bool], list[str]]  # ends of documents, texts
# ids, their number a text, ends of documents, words of all texts
Encoded = tuple[np.ndarray, np.ndarray, list[bool], int]


class Worker:
    """A process that encodes."""

    def __init__(self, directory: Path, share: int):
        # a group of its own: the terminal's Ctrl-C is for the parent to answer
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")])),
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "xformer.preprocess.workers", str(directory), str(share)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
        """As Encoder.encode, and the number of words. Raises Failure if the process died."""
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        try:
            _send(self.requests, sizes.data, "".join(texts).encode())
            ids, lengths, words = (_receive(self.answers) for _ in range(3))
        except (EOFError, OSError):
            raise Failure(self._how_it_ended()) from None
        count = int.from_bytes(words, "little")
        return np.frombuffer(ids, np.int32), np.frombuffer(lengths, np.int64), count

    def _how_it_ended(self) -> str:
        status = self.process.wait()
        if status >= 0:
            return f"an encoding process ended with status {status}"
        name = signal.Signals(-status).name
        hint = " (out of memory? --workers 1 needs least)" if name == "SIGKILL" else ""
        return f"an encoding process was ended by {name}{hint}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Close the pipes, when no thread uses them any more."""
        for pipe in (self.requests, self.answers):
            with suppress(OSError):  # what was not sent is lost
                pipe.close()


class Encoders:
    """Encodes batches in `count` processes, or in this one where there is little to do or `count`
    is 1. Use as a context manager: no process outlives it.

    `directory` holds the files of `tokenizer`, for the processes to load.
    """

    def __init__(self, tokenizer: Tokenizer, directory: Path, count: int):
        self.tokenizer, self.directory, self.count = tokenizer, directory, count
        self.own: Encoder | None = None
        self.workers: list[Worker] = []
        self.free: SimpleQueue[Worker] = SimpleQueue()
        self.threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.kill()
        self.threads.shutdown()
        for worker in self.workers:
            worker.close()

    def encode(self, batches: Iterable[Batch]) -> Iterator[Encoded]:
        """(ids end to end, how many each text has, ends of documents, words in all the texts) a
        batch, in order; at most two batches a process are held."""
        batches = iter(batches)
        if self.count > 1 and not self.workers:
            first = list(islice(batches, FEW))
            batches = chain(first, batches)
            if len(first) == FEW:
                self._start()
        if not self.workers:
            self.own = self.own or Encoder(self.tokenizer)
            for ends, texts in batches:
                yield *self.own.encode(texts), ends, _words(texts)
            return
        waiting: deque[tuple[Future[tuple[np.ndarray, np.ndarray, int]], list[bool]]] = deque()
        for ends, texts in batches:
            waiting.append((self.threads.submit(self._encode, texts), ends))
            if len(waiting) == 2 * self.count:
                yield _answer(*waiting.popleft())
        for future, ends in waiting:
            yield _answer(future, ends)

    def _start(self) -> None:
        self.own = None  # its table is no longer needed
        for _ in range(self.count):
            self.workers.append(Worker(self.directory, self.count))
            self.free.put(self.workers[-1])

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, int]:
        worker = self.free.get()
        try:
            return worker.encode(texts)
        finally:
            self.free.put(worker)


def _answer(future: Future[tuple[np.ndarray, np.ndarray, int]], ends: list[bool]) -> Encoded:
    ids, lengths, words = future.result()
    return ids, lengths, ends, words


def _words(texts: Sequence[str]) -> int:
    """How many words with white space between them the texts have."""
    return sum(len(text.split()) for text in texts)


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


def serve(directory: Path, share: int) -> None:
    """Encode requests until there are no more; the table of words gets a share of the memory."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not disturb the answers
    encoder = Encoder(tokenizers.load_tokenizer(directory), share)
    try:
        while True:
            sizes = np.frombuffer(_receive(requests), np.int64)
            text = _receive(requests).decode()
            ends = np.cumsum(sizes)
            bounds = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
            texts = [text[start:end] for start, end in bounds]
            ids, lengths = encoder.encode(texts)
            words = _words(texts).to_bytes(8, "little")
            _send(answers, np.ascontiguousarray(ids, np.int32).data, lengths.data, words)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent is done, or gone


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
