"""The derived tables of docs/scaling.md: what models, nodes and the papers' grids cost.

    python -m benchmarks.scaling --output docs/scaling.md    # replaces the text between the markers
    python -m benchmarks.scaling                             # prints the tables

Nothing is timed here. Operations follow from shapes (xformer/cost.py). Seconds follow from the
operations, the peaks that the makers state, and the shares of the peak that are assumed below.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from xformer import cost
from xformer.analysis.cost import parameters
from xformer.data.arguments import CommandParser
from xformer.data.batch import Workload
from xformer.model.config import ModelConfig
from xformer.start import run
from xformer.tasks.classify import Classify
from xformer.tasks.mlm import MLM
from xformer.tasks.span import Span
from xformer.tasks.task import Head

BEGIN, END = "<!-- begin: python -m benchmarks.scaling -->", "<!-- end -->"
MASKING = 0.15
MASKED, SPANS = MLM(Head("mlm")), Span(Head("span"))
CLASSES = Classify(Head("classify", ("no", "yes")))
BYTES = 4  # of a weight, its gradient and each of Adam's two moments, all in fp32
# These are assumed, not measured: the share of the peak that is reached in pre-training and in
# fine-tuning, and bytes per second between GPUs of a machine and to the network (200 Gbit/s).
PRETRAIN, FINETUNE = 0.45, 0.30
NVLINK, NETWORK, PER_NODE = 300e9, 25e9, 8
GPUS = {"H200": 989e12, "A100": 312e12}
H200 = GPUS["H200"]

BASE = ModelConfig(vocab_size=30522)
LARGE = BASE.model_copy(update={"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096})
ROBERTA = ModelConfig(vocab_size=30000, max_positions=126, first_position=2, token_types=1)


def shape(layers: int, hidden: int, heads: int) -> ModelConfig:
    update = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": 4 * hidden}
    return BASE.model_copy(update=update)


MODELS = {
    "4 x 256 (`mini`)": shape(4, 256, 4),
    "6 x 384 (MiniLM's shape)": shape(6, 384, 12),
    "12 x 768 (BERT-base)": BASE,
    "24 x 1024 (BERT-large)": LARGE,
}

# ------------------------------------------------------------------------------- the papers


class Task(NamedTuple):
    """The training rows of a task, and its mean number of tokens per row.

    Tokens include special tokens, and rows are cut at the longest length that the papers use.
    """

    rows: int
    tokens: int


# The numbers of rows are those of Kao & Lee 2021, appendix G (of DNA, 90 %), and SQuAD 2.0's
# training questions. MAESTRO's are segments of 128 notes from 954 pieces of 5,220 notes (6.18 M
# notes in 1,184 pieces, Hawthorne et al. 2019). The tokens are means over the data in docs/data.md,
# in pieces of bert-base-uncased; those with * are assumed.
TASKS = {
    "cola": Task(8551, 11),
    "sst2": Task(67349, 14),
    "mrpc": Task(3668, 53),
    "stsb": Task(5749, 28),
    "rte": Task(2490, 68),
    "wnli": Task(635, 41),
    "qqp": Task(363849, 30),  # *
    "mnli": Task(392702, 40),  # *
    "qnli": Task(104743, 50),  # *
    "squad": Task(130319, 184),
    "localization": Task(9977, 361),
    "stability": Task(53614, 44),
    "fluorescence": Task(21446, 239),
    "h3": Task(13468, 502),
    "h4": Task(13141, 502),
    "h3k9ac": Task(25004, 502),
    "splice": Task(2871, 62),
    "maestro": Task(38906, 130),
}
GLUE8 = ("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
GLUE9 = (*GLUE8, "wnli")
NON_TEXT = ("localization", "stability", "fluorescence", "h3", "h4", "h3k9ac", "splice", "maestro")
PROTEIN = NON_TEXT[:3]
# from Chiang & Lee 2020, table 5: batch size and steps
CHIANG = {
    "cola": (16, 5336),
    "stsb": (16, 3598),
    "sst2": (32, 20935),
    "mnli": (128, 10000),
    "qnli": (32, 33112),
    "qqp": (128, 14000),
    "rte": (32, 800),
    "mrpc": (32, 800),
}


class Part(NamedTuple):
    """A part of a paper's experiments.

    `runs` trainings have `flops` operations together, and reach `share` of the peak.
    """

    paper: str
    what: str
    runs: int
    flops: float
    share: float = FINETUNE


def pretraining(config: ModelConfig, steps: int, rows: int, length: int) -> float:
    """The operations of a pre-training on full rows."""
    return steps * cost.training_flops(config, MASKED, Workload.even(rows, length, MASKING))


def finetuning(config: ModelConfig, tasks: Iterable[str], epochs: float, share: float = 1) -> float:
    """The operations of one fine-tuning on each of the tasks."""
    return sum(epochs * share * _row_flops(config, task) * TASKS[task].rows for task in tasks)


def _row_flops(config: ModelConfig, task: str) -> float:
    work = Workload.even(1, TASKS[task].tokens)
    return cost.training_flops(config, SPANS if task == "squad" else CLASSES, work)


def chiang() -> list[Part]:
    """Chiang & Lee 2020: the pre-training of tables 2 and 3, and GLUE with the steps of table 5.

    The models on GLUE are the 13 rows of table 1, the 7 of table 6 that are not in table 1, and
    amino acids with substituted embeddings (section 4.3).
    """
    glue = sum(batch * steps * _row_flops(ROBERTA, task) for task, (batch, steps) in CHIANG.items())
    paper, sets = "Chiang & Lee 2020", 13 + 7 + 1
    return [
        Part(
            paper,
            "pre-training, 11 corpora (table 3)",
            11,
            11 * pretraining(ROBERTA, 200_000, 150, 126),
            PRETRAIN,
        ),
        Part(paper, "GLUE, 8 tasks x 21 models (tables 1, 6)", 8 * sets, sets * glue),
    ]


def kao(epochs: int, epochs_non_text: int) -> list[Part]:
    """Kao & Lee 2021: tables 2 to 8, figures 4, 8 and 9, and the grid of appendix A.

    Table 3 has 9 systems of base size and 2 large ones, with 3 seeds each. Tables 5 to 8 have 6 and
    2 such systems with 6 mappings each, and PLUS-TFM.
    """
    paper = "Kao & Lee 2021"
    one_percent = [task for task in NON_TEXT if task not in ("splice", "maestro")]
    grid = finetuning(BASE, ["mrpc"], epochs), finetuning(BASE, ["fluorescence"], epochs_non_text)
    return [
        Part(
            paper,
            "pre-training, 4 corpora (table 2)",
            4,
            4 * pretraining(ROBERTA, 200_000, 150, 126),
            PRETRAIN,
        ),
        Part(
            paper, "protein, 5 starts (table 2)", 15, 5 * finetuning(BASE, PROTEIN, epochs_non_text)
        ),
        Part(
            paper,
            "GLUE, 9 base and 2 large systems x 3 (table 3)",
            8 * 11 * 3,
            27 * finetuning(BASE, GLUE8, epochs) + 6 * finetuning(LARGE, GLUE8, epochs),
        ),
        Part(
            paper,
            "non-text, 6 base and 2 large systems x 6 (tables 5-8)",
            8 * 8 * 6,
            36 * finetuning(BASE, NON_TEXT, epochs_non_text)
            + 12 * finetuning(LARGE, NON_TEXT, epochs_non_text),
        ),
        Part(
            paper,
            "PLUS-TFM on protein x 6 (table 5)",
            18,
            6 * finetuning(BASE, PROTEIN, epochs_non_text),
        ),
        Part(
            paper,
            "1 % of the data, 2 systems x 6 (figures 4, 8, 9)",
            2 * 6 * 14,
            12
            * (
                finetuning(BASE, GLUE8, epochs, 0.01)
                + finetuning(BASE, one_percent, epochs_non_text, 0.01)
            ),
        ),
        Part(
            paper,
            "grid: 5 optimizers x 10 rates x 3, 10 rates x 3 (appendix A)",
            180,
            150 * grid[0] + 30 * grid[1],
        ),
    ]


def zhang(epochs: int) -> list[Part]:
    """Zhang 2021: the systems of each table that are not in an earlier one.

    Sections 3 and 4 have three runs of each, and sections 5 and 6 have one (section 7).
    """
    glue = finetuning(BASE, GLUE9, epochs)
    half = finetuning(BASE.model_copy(update={"layers": 6}), GLUE9, epochs)
    paper = "Zhang 2021"
    return [
        Part(paper, "English, reversed, clean x 3 (table 1)", 81, 9 * glue),
        Part(paper, "4 foreign languages x 3 (table 3)", 108, 12 * glue),
        Part(paper, "5 languages shuffled, 5 cleaned x 3 (table 4)", 270, 30 * glue),
        Part(paper, "English embeddings in 4 languages x 3 (table 5)", 108, 12 * glue),
        Part(paper, "variance, magnitude, oracle (section 5, table 6)", 27, 3 * glue),
        Part(paper, "DistilBERT and two of 6 layers (table 8)", 27, 3 * half),
    ]


def huang(epochs: int = 3) -> list[Part]:
    """Huang et al. 2021: every experiment is run twice (section 7.1), with 3 epochs (section 5.3).

    These are 4 tasks, each directly and after each of 3 others; 12 numbers of re-initialised layers
    and a baseline on 4 tasks and a tenth of SQuAD; and 48 re-initialised heads and a baseline on 2
    tasks.
    """
    paper, four = "Huang et al. 2021", ("cola", "mrpc", "rte", "wnli")
    cuts = finetuning(BASE, ("rte", "stsb", "cola", "mrpc"), epochs) + finetuning(
        BASE, ["squad"], epochs, 0.1
    )
    return [
        Part(paper, "sequences of tasks (figure 2)", 32, 8 * finetuning(BASE, four, epochs)),
        Part(paper, "layers re-initialised (figure 3)", 130, 26 * cuts),
        Part(
            paper,
            "heads re-initialised (figures 5, 6)",
            196,
            98 * finetuning(BASE, ("cola", "stsb"), epochs),
        ),
    ]


# ------------------------------------------------------------------------------- the tables


def table(header: str, rows: Iterable[Iterable[str]]) -> list[str]:
    names = header.split(" | ")
    align = ["---", *["---:"] * (len(names) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (names, align, *rows)]


def number(value: float) -> str:
    """A number with three significant digits, or two below 0.1."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{3 if value >= 0.1 else 2}g}"


def count(config: ModelConfig) -> int:
    return sum(parameters(config, MASKED).values())


def models() -> list[str]:
    rows = []
    for name, config in MODELS.items():
        parts, whole = parameters(config, MASKED), count(config)
        flops = [
            cost.training_flops(config, MASKED, Workload.even(64, length, MASKING)) / (64 * length)
            for length in (128, 512)
        ]
        rows.append(
            [
                name,
                number(whole / 1e6),
                number(parts["word embeddings"] / 1e6),
                *(number(f / 1e9) for f in flops),
                number(4 * BYTES * whole / 2**30),
            ]
        )
    header = "model | parameters, M | word embeddings, M | GFLOP a token, 128 | 512 | state, GiB"
    return table(header, rows)


def reduction_seconds(parameters: int, ranks: int, bytes_per_second: float) -> float:
    """The seconds in which a ring of ranks sums the gradient, at the speed of its slowest link.

    Each rank sends and receives 2 (ranks - 1) / ranks times the gradient (Patarasuk & Yuan 2009).
    """
    return 2 * (ranks - 1) / ranks * parameters * BYTES / bytes_per_second


def step_seconds(config: ModelConfig, tokens: int, length: int, gpus: int) -> tuple[float, float]:
    """(computing, reducing) seconds of a step of this many tokens on this many H200."""
    work = Workload.even(tokens // length, length, MASKING)
    flops = cost.training_flops(config, MASKED, work)
    speed = NVLINK if gpus <= PER_NODE else NETWORK
    return flops / (gpus * H200 * PRETRAIN), reduction_seconds(count(config), gpus, speed)


def batches() -> list[str]:
    rows = []
    for name, config in list(MODELS.items())[1:]:
        for tokens, length in ((19_200, 128), (131_072, 512)):
            seconds, _ = step_seconds(config, tokens, length, 1)
            long = [seconds * H200 / peak * 1e5 / 3600 for peak in GPUS.values()]
            rows.append(
                [
                    f"{name}, {tokens:,} tokens of {length}",
                    number(1000 * seconds),
                    f"{tokens / seconds:,.0f}",
                    *map(number, long),
                ]
            )
    hours = " | ".join(f"{gpu}-hours of 100 K steps" for gpu in GPUS)
    return table(f"step | ms on one H200 | tokens a second | {hours}", rows)


def nodes() -> list[str]:
    rows = []
    base, large = "12 x 768 (BERT-base)", "24 x 1024 (BERT-large)"
    for name, tokens in ((base, 19_200), (base, 1_048_576), (large, 1_048_576)):
        alone = sum(step_seconds(MODELS[name], tokens, 128, 1))
        for gpus in (1, 2, 8, 16, 64):
            computing, reducing = step_seconds(MODELS[name], tokens, 128, gpus)
            gain = alone / (computing + reducing)
            times = (number(1000 * s) for s in (computing, reducing, computing + reducing))
            shown = (f"{gain:.1f}", f"{100 * gain / gpus:.0f} %")
            rows.append([f"{name}, {tokens:,} tokens", f"{gpus}", *times, *shown])
    header = "step | GPUs | computing, ms | reducing, ms | step, ms | speed-up | efficiency"
    return table(header, rows)


def papers() -> list[str]:
    parts = [*chiang(), *kao(3, 10), *zhang(3), *huang()]
    rows = []
    for name in dict.fromkeys(part.paper for part in parts):
        own = [part for part in parts if part.paper == name]
        rows += [[f"{name}: {part.what}", *costs([part])] for part in own]
        rows.append([f"**{cell}**" for cell in (name, *costs(own))])
    gpus = " | ".join(f"{gpu}-hours" for gpu in GPUS)
    return table(f"experiments | runs | EFLOP | {gpus}", rows)


def costs(parts: list[Part]) -> list[str]:
    """The cells of a row: the number of runs, 10^18 operations, and hours on each GPU."""
    hours = (sum(p.flops / (peak * p.share) for p in parts) / 3600 for peak in GPUS.values())
    flops = sum(part.flops for part in parts)
    return [f"{sum(p.runs for p in parts):,}", number(flops / 1e18), *map(number, hours)]


def published() -> list[str]:
    """Hours of one pre-training of Chiang & Lee 2020 on each GPU, and in the paper."""
    flops = pretraining(ROBERTA, 200_000, 150, 126)
    rows = [
        [
            f"{gpu}, bf16, {PRETRAIN:.0%} of its peak (derived)",
            number(flops / (peak * PRETRAIN) / 3600),
        ]
        for gpu, peak in GPUS.items()
    ]
    share = flops / (60 * 3600 * 125e12)
    rows.append([f"V100 in the paper (appendix A.5), {share:.1%} of its peak", "60"])
    return [
        f"{number(flops / 1e18)} EFLOP: 200,000 steps of 150 rows of 126 tokens.",
        "",
        *table("one pre-training on | hours", rows),
    ]


def text() -> str:
    """All tables as Markdown."""
    sections = (
        ("Models", models()),
        ("Batches", batches()),
        ("Nodes", nodes()),
        ("One pre-training of Chiang and Lee 2020", published()),
        ("The papers' grids", papers()),
    )
    return "\n".join("\n".join([f"### {title}", "", *lines, ""]) for title, lines in sections)


def main() -> None:
    about = "The derived tables of docs/scaling.md."
    parser = CommandParser(prog="python -m benchmarks.scaling", description=about)
    words = "Replace the text between the markers of this page (default: print the tables)."
    parser.add_argument("--output", type=Path, metavar="FILE", help=words)
    page = parser.parse_args().output
    if page is None:
        print(text())
    else:
        report.check_marks(page, BEGIN, END)
        report.write(page, f"{BEGIN}\n\n{text()}\n{END}", BEGIN, END)


if __name__ == "__main__":
    run(main)
