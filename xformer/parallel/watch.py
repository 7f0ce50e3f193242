"""Ranks watch one another, so that none waits long for a rank that is gone.

A collective waits for all ranks. If one of them is killed or stopped, or its machine is lost, the
others would wait for the collective's time limit, half an hour. So every rank reports once a second
that it is alive, and its step, to a small server on rank 0. If a rank has not reported for SILENCE
seconds, the others end with a line that names it. Their work is in the newest checkpoint, from
which `torchrun --max-restarts N` continues automatically.
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

BEAT = 1.0  # seconds between two reports
LEAVE = 2.0  # seconds that a thread may need to return from a call of the store
SILENCE = 30.0  # seconds without a report after which a rank counts as gone
SOON = 5.0  # the same after a collective has failed
ENDED = "ended"


class Watch:
    """Exchanges reports with the other ranks. `step` is this rank's newest step."""

    def __init__(self, rank: int, world_size: int, device: torch.device):
        self.rank, self.world_size, self.step = rank, world_size, 0
        self.over = threading.Event()
        now = time.monotonic()
        self.heard = {other: (b"0", now) for other in range(world_size) if other != rank}
        self.answered = now  # when the server answered last
        self.store = self._meet(device)
        self.threads = [
            threading.Thread(target=work, name="watch", daemon=True)
            for work in (self._report, self._guard)
        ]
        for thread in self.threads:
            thread.start()

    def _meet(self, device: torch.device) -> dist.TCPStore:
        """Connect to the server of rank 0, which broadcasts its port."""
        host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=SILENCE)
        port = torch.zeros(1, dtype=torch.int64, device=device)
        if self.rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            port += store.port
        dist.broadcast(port, 0)
        if self.rank == 0:
            return store
        return dist.TCPStore(host, int(port), wait_for_workers=False, timeout=limit)

    def _report(self) -> None:
        """Report that this rank is alive, and read the reports of the others."""
        number = 0
        while not self.over.wait(BEAT):
            number += 1
            try:
                self.store.set(str(self.rank), f"{self.step} {number}")
                for other, (before, _) in list(self.heard.items()):
                    if self.store.check([str(other)]):
                        report = self.store.get(str(other))
                        if report != before:
                            self.heard[other] = report, time.monotonic()
                self.answered = time.monotonic()
            except RuntimeError:  # rank 0 is gone, and its server too
                continue

    def silent(self, seconds: float) -> dict[int, int]:
        """The ranks that have not reported for `seconds`, with the last step of each."""
        now = time.monotonic()
        if self.rank and now - self.answered > seconds:  # the server itself is silent
            return {0: _step(self.heard[0][0])}
        return {
            other: _step(report)
            for other, (report, when) in self.heard.items()
            if now - when > seconds and report != ENDED.encode()
        }

    def _guard(self) -> None:
        """End this process if another is gone: a collective that waits for it cannot be left."""
        while not self.over.wait(BEAT):
            if gone := self.silent(SILENCE):
                self._end(gone)

    def _end(self, gone: dict[int, int]) -> None:
        if self.rank == min(set(range(self.world_size)) - set(gone)):
            say(f"error: {self.message(gone)}", error=True)
        else:
            # torchrun ends all ranks when one ends: let the message appear first
            time.sleep(2 * BEAT)
        os._exit(1)

    def message(self, gone: dict[int, int]) -> str:
        """The line about the ranks that are gone."""
        ranks = ", ".join(f"rank {rank} at step {step}" for rank, step in sorted(gone.items()))
        return (
            f"{ranks} ended or hangs: it no longer reports; the same command continues from the "
            "newest checkpoint"
        )

    def explain(self) -> str:
        """Why a collective failed: the line about the ranks that are gone, or "". Rank 0 returns;
        the other ranks end here, because no rank would report it for them."""
        for _ in range(int(2 * SOON / BEAT)):
            if gone := self.silent(SOON):
                if self.rank:
                    self._end(gone)
                return self.message(gone)
            time.sleep(BEAT)
        return ""

    def close(self, says_so: bool = True) -> None:
        """Stop, and report that this rank ends normally if `says_so` is true.

        Its threads end first: if one is in a call of the store while Python ends, the process
        aborts.
        """
        self.over.set()
        for thread in self.threads:
            thread.join(LEAVE)  # it takes longer only if rank 0 is gone
        with suppress(RuntimeError):
            if says_so:
                self.store.set(str(self.rank), ENDED)


def _step(report: bytes) -> int:
    return int(report.split()[0]) if report != ENDED.encode() else 0
