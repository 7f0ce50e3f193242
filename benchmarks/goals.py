"""What a training step on a GPU should take, derived from counted work. Nothing here is measured.

    python -m benchmarks.goals                            # print the tables
    python -m benchmarks.goals --output docs/scaling.md   # replace them on this page

The matrix products of a step take their FLOPs over the peak. The work between them takes its bytes
over the bandwidth. The host takes its time for every launch. As long as the host is ahead, the GPU
does the products and the work between them in turn. So a step takes the sum of these two times, or
the host's time if that is longer.

Bytes and launches are counted on tensors without content (benchmarks/fake_cuda.py), twice: as the
step runs without torch.compile, and as if everything between two products were one kernel, which
reads its inputs and writes its results once. The second is a bound that no compiler reaches.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import fake_cuda, launches, report
from benchmarks.bench import require
from benchmarks.fake_cuda import Operation
from xformer.data.arguments import CommandParser
from xformer.start import run

BEGIN, END = "<!-- begin: python -m benchmarks.goals -->", "<!-- end of the goals -->"
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, from NVIDIA's data sheets
PEAK = 989e12  # operations a second of both, in bf16
STREAMED = 0.8  # of the bandwidth, which element-wise kernels reach (an assumption)
WIDE, NARROW = 0.7, 0.5  # of the peak, which products reach: at least 768 wide, narrower (assumed)
# Seconds of the host for an operation, PyTorch's and autograd's work included. Measured beside an
# H100 on a virtual machine: 599 operations of a BERT-base step in 31 ms, 353 of MiniLM's in 17 ms.
LAUNCH = 50e-6
GRAPH = 1e-6  # seconds of the GPU between two kernels of a CUDA graph (an assumption)
PAPER = 200_000  # steps of 150 x 128 (Chiang & Lee 2020)


@dataclass(frozen=True)
class Work:
    """What a step has to do, without torch.compile and, from `fused` on, with perfect fusion."""

    flops: float
    bytes: float
    launches: int
    fused_bytes: float
    fused_launches: int


class Case(NamedTuple):
    """A step, and the goal for it: a share of the peak, or how much faster than transformers."""

    name: str
    model: str
    rows: int
    length: int
    task: str = "mlm"
    share: float = 0.0
    factor: float = 0.0


CASES = (
    Case("BERT-base MLM, 16 x 512", "BERT-base", 16, 512, share=0.5),
    Case("BERT-base MLM, 64 x 512", "BERT-base", 64, 512, share=0.5),
    Case("BERT-base MLM, 64 x 128", "BERT-base", 64, 128, share=0.45, factor=2.5),
    Case("BERT-base MLM, 150 x 128", "BERT-base", 150, 128),
    Case("MiniLM's shape, MLM, 64 x 128", "MiniLM", 64, 128, share=0.25),
    Case("MiniLM's shape, fine-tuning, 32 x 40", "MiniLM", 32, 40, "classify", factor=4.0),
)


def main() -> None:
    """Print the tables, or write them into a page."""
    about = "What a step on a GPU should take, derived."
    parser = CommandParser(prog="python -m benchmarks.goals", description=about)
    words = "Replace the tables on this page (default: print them)."
    parser.add_argument("--output", type=Path, metavar="FILE", help=words)
    output = parser.parse_args().output
    if output:
        report.check_marks(output, BEGIN, END)
    require("transformers")
    if fake_cuda.LIBRARY in os.environ:
        for case in CASES:
            print(json.dumps([asdict(ours(case)), asdict(theirs(case))]))
        return
    with TemporaryDirectory() as folder:
        process = fake_cuda.start("benchmarks.goals", Path(folder))
        lines = process.communicate()[0].splitlines()
    if process.returncode:
        sys.exit(process.returncode)
    pairs = map(json.loads, lines)
    text = tables([(Work(**mine), Work(**peer)) for mine, peer in pairs])
    if output is None:
        print(text)
        return
    report.write(output, f"{BEGIN}\n\n{text}\n\n{END}", BEGIN, END)


# ------------------------------------------------------------------------------- what is counted


def ours(case: Case) -> Work:
    """The work of our step."""
    from benchmarks import bare
    from xformer import cost
    from xformer.data.batch import Workload
    from xformer.tasks.task import Task

    task: Task = launches.task(case.task)
    seen = launches.step(case.model, case.rows, case.length, task)
    config = bare.shape(case.model)
    masked = bare.MASKED if case.task == "mlm" else 0.0
    work = Workload.even(case.rows, case.length, masked)
    return counted(cost.training_flops(config, task, work), seen.operations)


def theirs(case: Case) -> Work:
    """The work of a step of transformers on the same rows without padding: SDPA, autocast, fused
    AdamW, clipping. It projects every token to the vocabulary."""
    import torch
    import transformers
    from torch.nn import functional

    from benchmarks import bare

    layers, hidden, heads, inner = bare.SHAPES[case.model]
    kind = "BertForMaskedLM" if case.task == "mlm" else "BertForSequenceClassification"
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def attend(q: Any, k: Any, v: Any, dropout_p: float = 0.0, **_: Any) -> Any:
        return flash(q, k, v, dropout_p, False, False)[0]

    with fake_cuda.device():
        config = transformers.BertConfig(
            vocab_size=bare.VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=inner,
        )
        config._attn_implementation = "sdpa"
        with torch.device("cuda"):
            model = getattr(transformers, kind)(config).train()
            tokens = torch.zeros(case.rows, case.length, dtype=torch.int64)
            labels = tokens if case.task == "mlm" else tokens[:, 0]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

        def train() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        with mock.patch.object(functional, "scaled_dot_product_attention", attend):
            train()  # makes the moments
            with fake_cuda.Recorder() as seen:
                train()
    T = case.rows * case.length
    products = layers * (8 * hidden**2 + 4 * hidden * inner + 4 * hidden * case.length)
    head = 2 * hidden**2 + 2 * hidden * bare.VOCABULARY if case.task == "mlm" else 0
    return counted(3.0 * T * (products + head), seen.operations)


def counted(flops: float, operations: Sequence[Operation]) -> Work:
    """The work of a step whose operations were recorded."""
    others = [one for one in operations if not one.is_product]
    fused_bytes, fused_launches = fused(operations)
    moved = sum(one.bytes for one in others)
    return Work(flops, moved, len(operations), fused_bytes, fused_launches)


def fused(operations: Sequence[Operation]) -> tuple[int, int]:
    """Bytes between products, and launches, if what lies between two products were one kernel.

    This holds only for what runs before the last product; the optimizer does not change.
    """
    last = max(i for i, one in enumerate(operations) if one.is_product)
    used = {key: i for i, one in enumerate(operations) for key in one.reads}  # the last use
    moved = sum(one.bytes for one in operations[last + 1 :])
    count = len(operations) - last - 1
    begin = 0
    for end in [i for i, one in enumerate(operations) if one.is_product]:
        read: dict[int, int] = {}
        written: dict[int, int] = {}
        for one in operations[begin:end]:
            read |= {key: n for key, n in one.reads.items() if key not in {**written, **read}}
            written |= one.writes
        moved += sum(read.values())
        moved += sum(n for key, n in written.items() if used.get(key, -1) >= end or key in read)
        count += 1 + (end > begin)
        begin = end + 1
    return moved, count


# ------------------------------------------------------------------------------ what follows


class Times(NamedTuple):
    """Milliseconds of products, of the work between them, and of launches."""

    products: float
    others: float
    launches: float

    @property
    def step(self) -> float:
        """Milliseconds of a step."""
        return max(self.products + self.others, self.launches)

    @property
    def limit(self) -> str:
        """What takes the step's time: the host's launches, if the GPU waits for them, or else the
        longer of the GPU's two parts."""
        if self.launches > self.products + self.others:
            return "launches"
        return "products" if self.products > self.others else "others"


def times(case: Case, work: Work, gpu: str, fusion: bool) -> Times:
    """The times of a step. With perfect fusion it is a CUDA graph."""
    share = NARROW if case.model == "MiniLM" else WIDE
    moved = work.fused_bytes if fusion else work.bytes
    launch = work.fused_launches * GRAPH if fusion else work.launches * LAUNCH
    seconds = work.flops / (share * PEAK), moved / (STREAMED * BANDWIDTH[gpu]), launch
    return Times(*(1000 * value for value in seconds))


def tables(works: Sequence[tuple[Work, Work]]) -> str:
    """The tables, in Markdown, from our work and that of transformers in each case."""
    return "\n\n".join([shares(works), counts(works), ratios(works), paper(works)])


def shares(works: Sequence[tuple[Work, Work]]) -> str:
    """How long our step takes, and which share of the peak that is."""
    rows = []
    for case, (mine, _) in zip(CASES, works, strict=True):
        for gpu in BANDWIDTH:
            for fusion, how in ((False, "as written"), (True, "fused")):
                took = times(case, mine, gpu, fusion)
                cells = [f"{value:.1f}" for value in (*took, took.step)]
                share = f"{mine.flops / (took.step / 1000) / PEAK:.0%}"
                goal = f"{case.share:.0%}" if case.share else ""
                rows.append([case.name, gpu, how, *cells, share, goal, took.limit])
    names = "step, GPU, code, products ms, others ms, launches ms, step ms, of peak, goal, limit"
    return table(names.split(", "), rows)


def counts(works: Sequence[tuple[Work, Work]]) -> str:
    """What both programs have to do."""
    rows = []
    for case, pair in zip(CASES, works, strict=True):
        for name, work in zip(("xformer", "transformers"), pair, strict=True):
            moved = [f"{n / 1e9:.1f}" for n in (work.bytes, work.fused_bytes)]
            launched = [str(work.launches), str(work.fused_launches)]
            rows.append([case.name, name, f"{work.flops / 1e12:.2f}", *moved, *launched])
    names = "step, program, TFLOP, GB as written, GB fused, launches as written, launches fused"
    return table(names.split(", "), rows)


def ratios(works: Sequence[tuple[Work, Work]]) -> str:
    """How much faster our step is than that of transformers on an H200."""
    rows = []
    for case, (mine, peer) in zip(CASES, works, strict=True):
        cells = [
            f"{times(case, peer, 'H200', two).step / times(case, mine, 'H200', one).step:.1f}"
            for one, two in ((False, False), (True, True), (True, False))
        ]
        rows.append([case.name, *cells, f"{case.factor:g}" if case.factor else ""])
    names = "step on an H200, both as written, both fused, only ours fused, goal"
    return table(names.split(", "), rows)


def paper(works: Sequence[tuple[Work, Work]]) -> str:
    """Hours of the pre-training of Chiang & Lee 2020."""
    case, (mine, _) = next(one for one in zip(CASES, works, strict=True) if one[0].rows == 150)
    hours = [
        f"{PAPER * times(case, mine, gpu, fusion).step / 3.6e6:.2f} on an {gpu} {how}"
        for gpu in BANDWIDTH
        for fusion, how in ((False, "as written"), (True, "fused"))
    ]
    return f"Hours for {PAPER:,} steps of 150 x 128 (goal: below 1.5): {', '.join(hours)}."


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    run(main)
