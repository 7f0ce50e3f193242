"""Made-up data in the layout of the raw data, for `--quick`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.prepare import TASKS, TEXT, VOCABULARY

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "mnpr"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_data(folder: Path) -> Path:
    """Write lines of random words, a vocabulary of these words, and two tasks."""
    draw = np.random.default_rng(0)

    def text(longest: int) -> str:
        return " ".join(draw.choice(WORDS, draw.integers(1, longest)))

    for name in (TEXT, VOCABULARY):
        (folder / name).parent.mkdir(parents=True)
    (folder / TEXT).write_text("\n".join(text(40) for _ in range(300)), encoding="utf-8")
    (folder / VOCABULARY).write_text("\n".join([*SPECIAL, *WORDS]) + "\n", encoding="utf-8")
    for name in TASKS.values():
        (folder / name).mkdir(parents=True)
    for split in ("train", "dev"):
        pairs = [f"{i % 2}\t1\t2\t{text(12)}\t{text(12)}" for i in range(80)]
        head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        single = [f"x\t{i % 2}\t\t{text(12)}" for i in range(80)]
        mrpc, cola = (folder / TASKS[name] / f"{split}.tsv" for name in ("mrpc", "cola"))
        mrpc.write_text("\n".join([head, *pairs]) + "\n", encoding="utf-8")
        cola.write_text("\n".join(single) + "\n", encoding="utf-8")
    return folder
