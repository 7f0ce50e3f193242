"""Ranks that watch one another, so that none waits long for one that is gone.

A collective waits for all ranks; where one is killed, stopped, or its machine is lost, the others
would wait for the collective's own time limit, half an hour. So every rank says each second that it
is alive and at which step, through a small server on rank 0, and where one is not heard of for
SILENCE seconds the others end with a line that names it. What they had done is in the newest
checkpoint; `torchrun --max-restarts N` goes on from it by itself.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from xformer.data.display import say

BEAT = 1.0  # seconds between two signs of life
LEAVE = 2.0  # seconds that a thread may take to come out of a call of the store
SILENCE = 30.0  # seconds after which a rank counts as gone
SOON = 5.0  # the same, where a collective has failed already
ENDED = "ended"


class Watch:
    """The signs of life of all ranks. `step` is this rank's, for the others to name."""

    def __init__(self, rank: int, world_size: int, device: torch.device):
        self.rank, self.world_size, self.step = rank, world_size, 0
        self.over = threading.Event()
        now = time.monotonic()
        self.heard = {other: (b"0", now) for other in range(world_size) if other != rank}
        self.through = now  # when the server answered last
        self.store = self._meet(device)
        self.threads = [
            threading.Thread(target=work, name="watch", daemon=True)
            for work in (self._tell, self._guard)
        ]
        for thread in self.threads:
            thread.start()

    def _meet(self, device: torch.device) -> dist.TCPStore:
        """The server of rank 0, whose port it tells the others."""
        host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=SILENCE)
        port = torch.zeros(1, dtype=torch.int64, device=device)
        if self.rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            port += store.port
        dist.broadcast(port, 0)
        if self.rank == 0:
            return store
        return dist.TCPStore(host, int(port), wait_for_workers=False, timeout=limit)

    def _tell(self) -> None:
        """Say that this rank is alive, and hear of the others."""
        number = 0
        while not self.over.wait(BEAT):
            number += 1
            try:
                self.store.set(str(self.rank), f"{self.step} {number}")
                for other, (before, _) in list(self.heard.items()):
                    if self.store.check([str(other)]):
                        said = self.store.get(str(other))
                        if said != before:
                            self.heard[other] = said, time.monotonic()
                self.through = time.monotonic()
            except RuntimeError:  # rank 0 is gone, and the server with it
                continue

    def silent(self, seconds: float) -> dict[int, int]:
        """The ranks that were not heard of for so long, and the step that each was at."""
        now = time.monotonic()
        if self.rank and now - self.through > seconds:  # it is the server that is silent
            return {0: _step(self.heard[0][0])}
        return {
            other: _step(said)
            for other, (said, when) in self.heard.items()
            if now - when > seconds and said != ENDED.encode()
        }

    def _guard(self) -> None:
        """End this process where another is gone: the collective it waits in cannot be left."""
        while not self.over.wait(BEAT):
            if gone := self.silent(SILENCE):
                self._end(gone)

    def _end(self, gone: dict[int, int]) -> None:
        if self.rank == min(set(range(self.world_size)) - set(gone)):
            say(f"error: {self.said(gone)}", error=True)
        else:
            time.sleep(2 * BEAT)  # torchrun ends all when one ends: first it is to be said
        os._exit(1)

    def said(self, gone: dict[int, int]) -> str:
        """The line about ranks that are gone."""
        ranks = ", ".join(f"rank {rank} at step {step}" for rank, step in sorted(gone.items()))
        return (
            f"{ranks} ended or hangs: nothing is heard of it; the same command continues from the "
            "newest checkpoint"
        )

    def explain(self) -> str:
        """Why a collective failed: the line about who is gone, or nothing. Rank 0 is to end with
        it; other ranks end here, as nobody would speak for them."""
        for _ in range(int(2 * SOON / BEAT)):
            if gone := self.silent(SOON):
                if self.rank:
                    self._end(gone)
                return self.said(gone)
            time.sleep(BEAT)
        return ""

    def close(self) -> None:
        """This rank ends as it should, and is not to be missed.

        Its threads end first: one that is in a call of the store while Python ends aborts the
        process.
        """
        self.over.set()
        for thread in self.threads:
            thread.join(LEAVE)  # longer only if rank 0 is gone
        with suppress(RuntimeError):
            self.store.set(str(self.rank), ENDED)


def _step(said: bytes) -> int:
    return int(said.split()[0]) if said != ENDED.encode() else 0
