"""The micro-batches of a run: made and copied to the device while the previous step computes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from xformer.data.batch import Assembler, Batch, Masks, Workload, rows_of
from xformer.data.capacity import Capacities, Capacity
from xformer.data.masking import SPREAD, MaskSchedule
from xformer.data.sampler import Stream
from xformer.parallel.processes import Ranks
from xformer.tasks.task import to_device

# Small steps are made together, about this many tokens at once. A token of a small step then costs
# no more than a token of a large one.
TOKENS_AHEAD = 2**17
SHAPES = 8  # at most this many shapes are chosen for filled micro-batches
FILLER = 0.05  # a single shape is chosen if no more of its tokens are filler
LOOKED_AT = 512  # the sizes of this many micro-batches decide the shapes
STEPS_AHEAD = 512  # at most this many steps are made at once; each needs 3 KiB beside its tokens
Item = TypeVar("Item")
Part = tuple[np.ndarray, np.ndarray]  # the examples and the epochs of a micro-batch


@dataclass(frozen=True)
class Step:
    """One step: `batches` are this rank's micro-batches (none if it has no rows), `work` is the
    workload of the step on all ranks, and `end` is the number of the sample after it. In a mixture,
    `given` (2, K) has the rows and the tokens that each store gives."""

    end: int
    batches: list[Batch[np.ndarray]]
    work: Workload
    given: np.ndarray | None = None


def one_thread(device: torch.device) -> ThreadPoolExecutor:
    """A thread that uses a device. Without set_device a new thread uses the first GPU, so every
    rank would take memory there."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))


def made_ahead(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """The items in order. A thread makes the next one while the caller computes."""
    with one_thread(device) as pool:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item


class Feed:
    """Cuts the samples of a stream into steps, and each step into micro-batches.

    Every rank gets `accumulate` micro-batches a step, with about equally many tokens. With
    `masking`, tokens are masked. If `fixed`, every micro-batch is filled up to one of a few shapes,
    for CUDA graphs and compiled code.
    """

    def __init__(
        self,
        assembler: Assembler,
        stream: Stream,
        ranks: Ranks,
        accumulate: int = 1,
        masking: MaskSchedule | None = None,
        fixed: bool = False,
    ):
        self.assembler, self.stream, self.ranks = assembler, stream, ranks
        self.accumulate, self.masking = accumulate, masking
        self.made: dict[int, Step] = {}  # by position
        self.at_once = 1  # tokens made at once; at first one step, because the disk may be cold
        self.side = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self.capacities = self._capacities() if fixed else None

    def take(self, position: int) -> Step:
        """The step that begins at sample `position`."""
        if position not in self.made:
            self.made = self._make(position)
        return self.made[position]

    def steps(self, position: int) -> Generator[tuple[Step, list[Batch[Tensor]]], None, None]:
        """The steps from sample `position` on, with their micro-batches on the device.

        A thread makes the next step while the caller computes.
        """
        for step, packed, copied in made_ahead(self._on_device(position), self.ranks.device):
            if copied is not None:
                _hand_over(packed, copied)
            yield step, packed

    def _on_device(
        self, position: int
    ) -> Iterator[tuple[Step, list[Batch[Tensor]], torch.cuda.Event | None]]:
        """Each step, its micro-batches on the device, and on CUDA the event after the copies.
        Copies have their own stream, so that they need not wait for computations."""
        while position < self.stream.end:
            step = self.take(position)
            # not `torch.cuda.stream(None)`, which would start CUDA for a run on the CPU
            with nullcontext() if self.side is None else torch.cuda.stream(self.side):
                packed = [to_device(batch, self.ranks.device) for batch in step.batches]
                copied = None if self.side is None else self.side.record_event()
            yield step, packed, copied
            position = step.end

    def _make(self, position: int) -> dict[int, Step]:
        """The step at `position` and as many more as TOKENS_AHEAD tokens allow, by position."""
        drafts: list[tuple[int, Step, list[Part]]] = []  # position, step without batches, its parts
        made = 0
        while not drafts or (
            made < self.at_once and position < self.stream.end and len(drafts) < STEPS_AHEAD
        ):
            examples, epochs, sizes = self.stream.take(position)
            end, work = position + len(examples), self._work(examples, sizes)
            step = Step(end, [], work, self.stream.samples.given(examples, sizes))
            bounds = pairwise(self._bounds(sizes))
            parts = [(examples[i:j], epochs[i:j]) for i, j in bounds if i < j]
            drafts.append((position, step, parts))
            position, made = end, made + work.tokens // self.ranks.world_size
        self.at_once = min(TOKENS_AHEAD, 4 * made)
        # all batches are made together, unless each step masks its own share of the tokens
        alone = self.masking is not None and self.masking.changes
        for group in [[draft] for draft in drafts] if alone else [drafts]:
            batches = self._batches([part for *_, parts in group for part in parts], group[0][0])
            for _, step, parts in group:
                step.batches.extend(islice(batches, len(parts)))
        return {at: step for at, step, _ in drafts}

    def _work(self, examples: np.ndarray, sizes: np.ndarray) -> Workload:
        """The workload of a step of these examples, which have `sizes` tokens."""
        if self.assembler.split.together > 1:
            sizes = self.assembler.row_sizes(rows_of(examples, self.assembler.split.together))
        return Workload(int(sizes.sum()), int(sizes @ sizes), len(sizes))

    def _bounds(self, sizes: np.ndarray) -> list[int]:
        """The boundaries of this rank's micro-batches among the examples of a step."""
        pieces = self.ranks.world_size * self.accumulate
        if pieces == 1:
            return [0, len(sizes)]
        ends = np.cumsum(sizes)
        cuts = ends.searchsorted(ends[-1] * np.arange(1, pieces) / pieces).tolist()
        first = self.ranks.rank * self.accumulate
        return [0, *cuts, len(sizes)][first : first + self.accumulate + 1]

    def _batches(self, parts: list[Part], position: int) -> Iterator[Batch[np.ndarray]]:
        """A micro-batch for each part. They are masked as in the step that begins at sample
        `position`."""
        if not parts:
            return iter(())
        rows, epochs = (np.concatenate(both) for both in zip(*parts, strict=True))
        masks = None
        if (plan := self.masking) is not None:
            masks = Masks(plan.seed, plan.share(position), epochs, plan.spans)
        batches = self.assembler.batches(rows, [len(rows) for rows, _ in parts], masks)
        return iter(batches if self.capacities is None else map(self.capacities.fill, batches))

    def _capacities(self) -> Capacities:
        """The shapes for the micro-batches of this run, from the sizes of its first ones."""
        split, pieces = self.assembler.split, self.ranks.world_size * self.accumulate
        position = 0
        tokens: list[int] = []
        rows: list[int] = []
        while position < self.stream.end and len(tokens) < LOOKED_AT:
            examples, _, sizes = self.stream.take(position)
            for i, j in pairwise(self._bounds(sizes)):
                tokens.append(int(sizes[i:j].sum()))
                rows.append((j - i) * split.together)
            position += len(examples)
        if self.stream.tokens and pieces == 1:
            tokens.append(self.stream.tokens)  # no step has more
        filler = 1 - sum(tokens) / (len(tokens) * max(1, *tokens))  # with a single shape
        return Capacities(
            np.array(tokens),
            np.array(rows),
            1 if filler <= FILLER else SHAPES,
            self.assembler.max_tokens,
            split.together,
            self._share_to_predict(sum(tokens), sum(rows)),
            SPREAD if self.masking is not None and self.masking.spans else 1.0,
        )

    @property
    def shapes(self) -> list[Capacity]:
        """The shapes that micro-batches are filled up to."""
        return self.capacities.known if self.capacities else []

    def _share_to_predict(self, tokens: int, rows: int) -> float:
        """The share of tokens to predict, in `rows` rows that have `tokens` tokens in total."""
        if self.masking is None:
            # a labelled word may begin at any token
            return 1.0 if self.assembler.labels_words else 0.0
        # special tokens are never masked; a rank may have no rows at all
        special = self.assembler.extra * rows / max(1, tokens)
        return max(self.masking.first, self.masking.final) * (1 - special)

    def sample(self) -> Batch[Tensor]:
        """The first example as a micro-batch on the device, for a pass that changes nothing."""
        first = np.zeros(1, np.int64)
        return to_device(next(self._batches([(first, first)], 0)), self.ranks.device)


def _hand_over(packed: list[Batch[Tensor]], copied: torch.cuda.Event) -> None:
    """Make the stream that computes wait for the copies. Their memory is kept until this stream has
    used it."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)
    for batch in packed:
        for value in vars(batch).values():
            if isinstance(value, Tensor):
                value.record_stream(stream)
