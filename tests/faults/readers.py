"""All readers of files. Each has some valid files, and the call with which a command reads them.

A reader is given a directory in which one file may contain anything. It may accept the file or
refuse it in one clear line. Everything else is a fault.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import CLASSIFY, ROOT, SMOKE, TINY
from safetensors.torch import load_file

from xformer import checkpoint as checkpoints
from xformer import evaluate, monitor, predictions, run, train
from xformer.analysis import curves
from xformer.config import load, parse_overrides
from xformer.convert.hf import from_hf
from xformer.convert.plus import from_plus
from xformer.data import files, mapping, store, tokenizers
from xformer.data.errors import BadInput, Failure
from xformer.preprocess import cli
from xformer.preprocess.fetch import data_sets, unpack
from xformer.preprocess.tasks.predict import write_rows
from xformer.recipe import Recipe
from xformer.study.reading import read_study
from xformer.surgery import parse_operation

LIMIT = 2**22  # bytes to which an archive may unpack
CLEAN = (BadInput, Failure)  # what a command says in one line
WORDS = [f"{a}{b}{c}" for a in "bdfgkp" for b in "ae" for c in "mn"]


class Reader(NamedTuple):
    """In a copy of the ground's directory `base`, the file `file` is hostile.

    `mend` makes checksums and sizes in other files fit, so that the code after those checks is
    reached too.
    """

    name: str
    base: str
    file: str
    read: Callable[[Path], object]
    mend: Callable[[Path, str], None] | None = None
    seeds: tuple[bytes, ...] = ()


def command(*arguments: object) -> None:
    """`preprocess.py ARGUMENTS` in this process."""
    sys.argv = ["preprocess.py", *map(str, arguments)]
    with silent():
        cli.main()


@contextlib.contextmanager
def silent() -> Any:
    with (
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        yield


# ----------------------------------------------------------------------------------- the ground


def text(seed: int, rows: int, form: str = "{}") -> str:
    """Lines of made-up words."""
    draw = np.random.default_rng(seed)
    lines = [" ".join(draw.choice(WORDS, draw.integers(3, 9))) for _ in range(rows)]
    return "\n".join(form.format(line, i=i) for i, line in enumerate(lines)) + "\n"


def midi(pitches: list[int]) -> bytes:
    """A MIDI file of one track whose notes follow one another."""
    events = b"".join(bytes([0, 0x90, pitch, 64, 96, 0x80, pitch, 0]) for pitch in pitches) + bytes(
        [0, 0xFF, 0x2F, 0]
    )
    head = b"MThd" + (6).to_bytes(4, "big") + bytes([0, 0, 0, 1, 0, 96])
    return head + b"MTrk" + len(events).to_bytes(4, "big") + events


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return buffer.getvalue()


def tarred(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def make_ground(ground: Path) -> None:
    """Every directory that a reader starts from."""
    raw, tok = ground / "raw", ground / "tok"
    raw.mkdir(parents=True)
    (raw / "t.txt").write_text("\n\n".join(text(i, 3) for i in range(30)))
    command(
        "tokenizer",
        "--kind",
        "wordpiece",
        "--input",
        raw / "t.txt",
        "--vocab-size",
        90,
        "--output",
        tok,
    )
    for kind in ("bpe", "unigram"):
        command(
            "tokenizer",
            "--kind",
            kind,
            "--input",
            raw / "t.txt",
            "--vocab-size",
            320 if kind == "bpe" else 40,
            "--output",
            ground / kind,
        )
    (raw / "v.txt").write_text(text(99, 20))
    command(
        "text",
        "--input",
        raw / "t.txt",
        "--valid",
        raw / "v.txt",
        "--tokenizer",
        tok,
        "--output",
        ground / "store",
    )
    rows = text(1, 40, "{}\t{i}").splitlines()
    labelled = [f"{row.split(chr(9))[0]}\t{'ab'[i % 2]}" for i, row in enumerate(rows)]
    (raw / "c.tsv").write_text("\n".join(["text\tlabel", *labelled]) + "\n")
    command(
        "task",
        "tsv",
        "--input",
        raw / "c.tsv",
        "--text",
        "text",
        "--label",
        "label",
        "--tokenizer",
        tok,
        "--output",
        ground / "classes",
    )
    quick = [*TINY, "train.steps=2", "train.log_every=1", "train.validate_every=1"]
    for name, recipe, data in (("run", SMOKE, "store"), ("finetuned", CLASSIFY, "classes")):
        sys.argv = [
            "train.py",
            str(ROOT / recipe),
            f"data={ground / data}",
            f"run={ground / name}",
            *quick,
        ]
        with silent():
            train.main()
    newest = checkpoints.resolve(ground / "run")
    shutil.copytree(newest, ground / "checkpoint")
    mapped = ground / "mapped"
    shutil.copytree(newest, mapped)
    (mapped / "input").mkdir()
    for file in ("tokenizer.json", "tokenizer_meta.json"):
        shutil.copy(mapped / file, mapped / "input" / file)
    np.save(mapped / "input/mapping.npy", np.arange(len(tokenizers.load_tokenizer(mapped))))
    mend_checkpoint(mapped, "input/mapping.npy")
    _make_hugging_face(ground)
    _make_raw(ground)


def _make_hugging_face(ground: Path) -> None:
    from xformer.convert import __main__ as convert

    for name, source in (("hf", "checkpoint"), ("hf-bin", "checkpoint")):
        sys.argv = ["convert", "to-hf", str(ground / source), str(ground / name)]
        with silent():
            convert.main()
    weights = load_file(ground / "hf-bin/model.safetensors")
    (ground / "hf-bin/model.safetensors").unlink()
    torch.save(dict(weights), ground / "hf-bin/pytorch_model.bin")
    shards = ground / "hf-shards"
    shutil.copytree(ground / "hf", shards)
    (shards / "model.safetensors").rename(shards / "a.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(shards / "a.safetensors"), "a.safetensors")}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, kind in (("published-bpe", "bpe"), ("published-unigram", "unigram")):
        (ground / name).mkdir()
        from xformer.data import published

        published.export_tokenizer(tokenizers.load_tokenizer(ground / kind), ground / name, 64)
    (ground / "plus").mkdir()
    torch.save(
        {
            "embed.tok_embed.weight": torch.ones(26, 8),
            "decoder_bias": torch.ones(26),
            "blocks.0.pwff.fc1.weight": torch.ones(16, 8),
            "embed.pos_embed.weight": torch.ones(64, 8),
        },
        ground / "plus/w.pt",
    )


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "bam ban bem ben dam dan dem den " * 3,
                    "qas": [
                        {
                            "id": "a",
                            "question": "bam bem?",
                            "is_impossible": False,
                            "answers": [{"text": "bem ben", "answer_start": 8}],
                        },
                        {"id": "b", "question": "ban?", "is_impossible": True, "answers": []},
                    ],
                }
            ],
        }
    ],
}
DNA = "ACGTTGCAACGTTGCAACGGTTAACC"


def _make_raw(ground: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    raw = ground / "raw"
    plain = (raw / "t.txt").read_bytes()[:2000]
    (raw / "t.txt").write_bytes(plain)
    (raw / "t.txt.gz").write_bytes(gzip.compress(plain))
    (raw / "t.txt.zst").write_bytes(zstandard.compress(plain))
    (raw / "t.jsonl").write_text(text(2, 20, '{{"text": "{}"}}'))
    (raw / "t.json").write_text(json.dumps([{"text": line} for line in text(3, 20).split("\n")]))
    (raw / "T.java").write_text(
        '/** Text "of" a class. */\nclass T {\n  // a word\n'
        "  String s = \"bam\\n\"; char c = '\\'';\n}\n"
    )
    (raw / "p.fasta").write_text("".join(f">p{i} fam{i % 2}\nACDEFGHIK\nLMNP\n" for i in range(30)))
    (raw / "c.csv").write_text(text(4, 40, '"{},",{i}').replace("\n", "\r\n"))
    rows = [{"text": line, "label": i % 2} for i, line in enumerate(text(5, 40).split("\n"))]
    (raw / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {n: {str(i): row[n] for i, row in enumerate(rows)} for n in ("text", "label")}
    (raw / "c.json").write_text(json.dumps(columns))
    table = pa.table({n: [row[n] for row in rows] for n in ("text", "label")})
    pq.write_table(table, raw / "c.parquet")
    (raw / "splice.data").write_text(
        "".join(f"{('EI', 'IE', 'N')[i % 3]},X-{i},{DNA[i % 9 :]}\n" for i in range(60))
    )
    (raw / "h3.txt").write_text("".join(f">r{i}\n{DNA[i % 9 :]}\n{i % 2}\n" for i in range(60)))
    (raw / "squad.json").write_text(json.dumps(SQUAD))
    words = "".join(
        f"{w} NN {('O', 'B-X', 'I-X')[i % 3]}\n" + "\n" * (i % 5 == 4)
        for i, w in enumerate(WORDS * 5)
    )
    (raw / "t.conll").write_text(words)
    (raw / "t.conllu").write_text(
        "".join(
            f"{i % 4 + 1}\t{w}\t_\tNOUN\tX\n" + "\n# text\n" * (i % 4 == 3)
            for i, w in enumerate(WORDS * 5)
        )
    )
    flip, music = ground / "flip", ground / "music"
    flip.mkdir()
    for name, body in (("sequences", "ACDEFG"), ("sampled", "CHECHE"), ("mask", "101111")):
        heads = (
            f">s{i} SET={('train', 'test')[i % 4 == 3]} VALIDATION={i % 4 == 2}" for i in range(12)
        )
        (flip / f"{name}.fasta").write_text("".join(f"{h}\n{body}\n" for h in heads))
    music.mkdir()
    (music / "maestro.csv").write_text(
        "canonical_composer,split,midi_filename\n"
        + "".join(
            f"{'AB'[i % 2]},{('train', 'validation', 'test')[i % 3]},{i}.midi\n" for i in range(6)
        )
    )
    for i in range(6):
        (music / f"{i}.midi").write_bytes(midi([60 + i, 62, 64 + i]))
    for name, packed in (
        ("a.zip", zipped(a=plain, b=b"x")),
        ("a.tar", tarred(a=plain, b=b"x")),
        ("a.tar.gz", gzip.compress(tarred(a=plain))),
        ("a.tar.bz2", bz2.compress(tarred(a=plain))),
    ):
        (raw / name).write_bytes(packed)
    (raw / "catalogue.toml").write_bytes(
        (ROOT / "preprocess/fetch/catalogue.toml").read_bytes()[:3000]
    )
    shutil.copytree(ROOT / "recipes", ground / "recipes")


# -------------------------------------------------------------------------------------- mending


def mend_store(path: Path, file: str) -> None:
    """Write the size and the checksums of a column into store.json."""
    meta = json.loads((path / "store.json").read_text())
    for split in meta["splits"].values():
        if file in split["files"]:
            size = (path / file).stat().st_size
            sums = list(files.block_checksums(path / file))
            split["files"][file] = {"bytes": size, "sha256": sums}
    (path / "store.json").write_text(json.dumps(meta))
    mend_sums(path, file)


def mend_sums(path: Path, file: str) -> None:
    """Remove the checksums of a store's small files."""
    (path / store.SUMS).unlink(missing_ok=True)


def mend_checkpoint(path: Path, file: str) -> None:
    """Write the checksum of a file into the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"][file] = hashlib.sha256((path / file).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def mend_run(path: Path, file: str) -> None:
    """Write the checksum of a file of a run's checkpoint into its manifest."""
    place = Path(file).parent
    mend_checkpoint(path / place, Path(file).name)


def mend_finished(path: Path, file: str) -> None:
    """Turn it into a run that finished before runs had a manifest of their own files."""
    (path / files.RUN_MANIFEST).unlink(missing_ok=True)


def mend_meta(path: Path, file: str) -> None:
    """Write the tokenizer's fingerprint into its description, if that has one."""
    with contextlib.suppress(Exception):
        meta = json.loads((path / tokenizers.META).read_text())
        model: Any = meta.get("pieces")
        if (path / "tokenizer.json").is_file():
            model = tokenizers._fast_model(path / "tokenizer.json")
        rest = {
            k: v
            for k, v in meta.items()
            if k not in ("fingerprint", "vocab_size", "pieces", "published")
        }
        meta["fingerprint"] = tokenizers.Tokenizer(rest, model).fingerprint
        (path / tokenizers.META).write_text(json.dumps(meta))


# ------------------------------------------------------------------------------------- the calls


def preprocessed(*arguments: str) -> Callable[[Path], None]:
    """A call that runs a command on the file. Words in braces are names in the ground."""

    def read(path: Path) -> None:
        given = [a.format(path=path, ground=path.parent / "ground") for a in arguments]
        command(*given, "--output", path / "out")

    return read


TSV = ("task", "tsv", "--tokenizer", "{ground}/tok", "--input")
NAMED = ("--text", "text", "--label", "label")
TEXT = ("text", "--tokenizer", "{ground}/tok", "--input")


def read_store(path: Path) -> None:
    """Everything that commands do with a store, except training."""
    opened = store.open_store(path)
    opened.tokenizer()
    list(opened.verify())
    command("stats", path)
    command("verify", path)
    mapping.build_mapping("symbols:1", opened, tokenizers.load_tokenizer(path))


def evaluate_store(path: Path) -> None:
    """Run the rows of a store through a model."""
    sys.argv = [
        "evaluate.py",
        str(path.parent / "ground/checkpoint"),
        f"data={path}",
        "split=train",
        "system.threads=1",
    ]
    with silent():
        evaluate.main()


def read_checkpoint(path: Path) -> None:
    checkpoint = checkpoints.load(path)
    checkpoint.model()
    checkpoints.load_tensors(path / "optimizer.safetensors")
    checkpoint.tokenizer.encode_batch(["bam ban", ""])


def fill_masks(path: Path) -> None:
    sys.argv = ["evaluate.py", str(path), "text=bam [MASK] ban"]
    with silent():
        evaluate.main()


def predict_rows(path: Path) -> None:
    sys.argv = ["evaluate.py", str(path.parent / "ground/finetuned"), f"input={path / 'c.tsv'}"]
    with silent():
        evaluate.main(write_rows)


def resume(path: Path) -> None:
    """What a continued run reads of itself before its first step."""
    newest = run.Run(path).newest()
    if newest is not None:
        run.State.read(newest)
    identity = {"identity": {"seed": 0, "train": {"steps": 2}}}
    with contextlib.suppress(AttributeError):
        opened = run.Run(path)
        opened.open(identity, False)
        opened._lock.close()  # type: ignore[union-attr]
    with contextlib.suppress(FileNotFoundError):
        monitor.cut_log(path, 1)
    with silent(), monitor.Monitor(path, True, 1, 0, 2, "step"):
        pass


def read_result(path: Path) -> None:
    checkpoints.load(path)
    tokenizers.load_tokenizer(path)


def read_predictions(path: Path) -> None:
    predictions.read(path / "predictions/valid.npz").metrics()


def draw_curves(path: Path) -> None:
    with silent():
        groups = curves.grouped([str(path)])
        for runs in groups.values():
            curves.average(runs, "train", "loss")


def unpacked(path: Path) -> None:
    (path / "out").mkdir()
    name = next(n for n in os.listdir(path) if n.startswith("a."))
    unpack.Unpacker(path / "out", LIMIT).add(path / name)


def read_recipe(path: Path) -> None:
    load(Recipe, [str(path / "pretrain/smoke.toml"), "data=x", "run=y"])


def read_words(path: Path) -> None:
    """Parse command-line arguments that are small languages of their own."""
    for line in (path / "words").read_text(encoding="utf-8", errors="replace").split("\n"):
        for call in (lambda w: parse_overrides(Recipe, [w]), mapping.parse, parse_operation):
            with contextlib.suppress(BadInput):
                call(line)
        with contextlib.suppress(BadInput):
            load(Recipe, [str(ROOT / SMOKE), "data=x", "run=y", line])


def bring(path: Path, file: str) -> Callable[[Path], None]:
    return preprocessed("tokenizer", "--from", f"{{path}}/{file}".rstrip("/"))


def _study(path: Path) -> None:
    read_study(path / "studies/zhang2021-operations.toml", "mini")


def _hf(path: Path) -> None:
    from_hf(path).checkpoint.model()


READERS = [
    # raw formats
    *(
        Reader(name, "raw", file, preprocessed(*TEXT, f"{{path}}/{file}", *more))
        for name, file, *more in (
            ("text", "t.txt"),
            ("text with bad rows left out", "t.txt", "--skip-bad"),
            ("gz", "t.txt.gz"),
            ("zst", "t.txt.zst"),
            ("text jsonl", "t.jsonl"),
            ("text json", "t.json"),
            ("java", "T.java"),
            ("text fasta", "p.fasta"),
        )
    ),
    *(
        Reader(name, "raw", file, preprocessed(*TSV, f"{{path}}/{file}", *(more or NAMED)))
        for name, file, *more in (
            ("tsv", "c.tsv"),
            ("tsv with bad rows left out", "c.tsv", *NAMED, "--skip-bad"),
            ("csv", "c.csv", "--no-header", "--text", "1", "--label", "2"),
            ("jsonl", "c.jsonl"),
            ("json", "c.json"),
            ("parquet", "c.parquet"),
        )
    ),
    *(
        Reader(name, base, file, preprocessed("task", *words))
        for name, base, file, *words in (
            ("splice", "raw", "splice.data", "dna/splice", "--input", "{path}/splice.data"),
            ("three lines", "raw", "h3.txt", "dna/h3", "--input", "{path}/h3.txt"),
            ("fasta", "raw", "p.fasta", "protein", "--kind", "class", "--input", "{path}/p.fasta"),
            (
                "squad",
                "raw",
                "squad.json",
                "squad",
                "--train",
                "{path}/squad.json",
                "--tokenizer",
                "{ground}/tok",
            ),
            (
                "conll",
                "raw",
                "t.conll",
                "conll",
                "--input",
                "{path}/t.conll",
                "--tokenizer",
                "{ground}/tok",
            ),
            (
                "conllu",
                "raw",
                "t.conllu",
                "conll",
                "--input",
                "{path}/t.conllu",
                "--tokenizer",
                "{ground}/tok",
                "--word",
                "2",
                "--label",
                "4",
            ),
            ("flip sequences", "flip", "sequences.fasta", "protein/secondary", "--input", "{path}"),
            ("flip labels", "flip", "sampled.fasta", "protein/secondary", "--input", "{path}"),
            ("flip mask", "flip", "mask.fasta", "protein/secondary", "--input", "{path}"),
            ("maestro", "music", "maestro.csv", "music/maestro", "--input", "{path}"),
            ("midi", "music", "2.midi", "music/maestro", "--input", "{path}"),
        )
    ),
    *(
        Reader(f"archive {file}", "raw", file, unpacked)
        for file in ("a.zip", "a.tar", "a.tar.gz", "a.tar.bz2")
    ),
    Reader(
        "catalogue",
        "raw",
        "catalogue.toml",
        lambda path: data_sets.load_catalogue(path / "catalogue.toml"),
    ),
    # tokenizers, published ones and ours
    *(
        Reader(f"from {file}", base, file, bring(Path(), given))
        for base, file, given in (
            ("hf", "vocab.txt", "vocab.txt"),
            ("hf", "tokenizer.json", "tokenizer.json"),
            ("hf", "tokenizer_config.json", ""),
            ("published-bpe", "merges.txt", "vocab.json"),
            ("published-bpe", "vocab.json", "vocab.json"),
            ("published-unigram", "spiece.model", "spiece.model"),
        )
    ),
    *(
        Reader(
            f"{kind} {file}",
            kind,
            file,
            lambda path: tokenizers.load_tokenizer(path).encode_batch(["bam"]),
            mend_meta,
        )
        for kind, file in (
            ("tok", "tokenizer.json"),
            ("tok", "tokenizer_meta.json"),
            ("bpe", "tokenizer.json"),
            ("unigram", "spiece.model"),
        )
    ),
    # stores and checkpoints, with and without mended checksums
    Reader("store.json", "store", "store.json", read_store, mend_sums),
    *(
        Reader(f"{name} {file}", "store", file, read, mend_store)
        for file in ("train/tokens.npy", "train/tokens.offsets.npy")
        for name, read in (("store", read_store), ("evaluated", evaluate_store))
    ),
    Reader("store label", "classes", "train/label.npy", read_store, mend_store),
    Reader("manifest.json", "checkpoint", "manifest.json", read_checkpoint),
    Reader("checkpoint unmended", "checkpoint", "model.safetensors", read_checkpoint),
    *(
        Reader(f"checkpoint {file}", "checkpoint", file, read_checkpoint, mend_checkpoint)
        for file in (
            "config.json",
            "model.safetensors",
            "optimizer.safetensors",
            "tokenizer_meta.json",
        )
    ),
    Reader("masks filled config.json", "checkpoint", "config.json", fill_masks, mend_checkpoint),
    Reader("mapping.npy", "mapped", "input/mapping.npy", fill_masks, mend_checkpoint),
    # from Hugging Face and PLUS
    *(
        Reader(f"import {file}", base, file, _hf)
        for base, file in (
            ("hf", "config.json"),
            ("hf", "model.safetensors"),
            ("hf-bin", "pytorch_model.bin"),
            ("hf-shards", "model.safetensors.index.json"),
        )
    ),
    Reader("PLUS", "plus", "w.pt", lambda path: from_plus(path / "w.pt")),
    # recipes, runs, analyses
    Reader("recipe", "recipes", "pretrain/smoke.toml", read_recipe),
    Reader("study", "recipes", "studies/zhang2021-operations.toml", _study),
    Reader(
        "command line",
        "raw",
        "words",
        read_words,
        None,
        (b"optim.lr=1e-4\nsurgery=[{op='clean'}]\nsymbols:3\nkeep_layers(first=6)\nseed=1",),
    ),
    Reader("run state.json", "run", "checkpoints/step_2/state.json", resume, mend_run),
    Reader("run config.json", "run", "config.json", resume, mend_finished),
    Reader("run log.jsonl", "run", "log.jsonl", resume),
    Reader("run result.json", "run", "result.json", read_result, mend_finished),
    Reader("run_manifest.json", "run", "run_manifest.json", read_result),
    Reader("predictions", "run", "predictions/valid.npz", read_predictions, mend_finished),
    Reader("curves log.jsonl", "run", "log.jsonl", draw_curves),
    Reader("curves config.json", "run", "config.json", draw_curves, mend_finished),
    Reader("rows to predict", "raw", "c.tsv", predict_rows),
]
