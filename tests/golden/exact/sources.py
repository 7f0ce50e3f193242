"""Tiny published checkpoints of every family. They were made once with transformers and
committed.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np

from golden.exact.inputs import WORDS, sentences

HERE = Path(__file__).parent
ARCHIVE = HERE / "sources.zip"
MODELS = {
    "bert": "BertForPreTraining",
    "roberta": "RobertaForMaskedLM",
    "albert": "AlbertForMaskedLM",
    "distilbert": "DistilBertForQuestionAnswering",
    "xlm-roberta": "XLMRobertaForTokenClassification",
    "bert-classes": "BertForSequenceClassification",
}
BEGINNING = (1980, 1, 1, 0, 0, 0)  # the time of every member: equal content gives equal files


def pack(directory: Path, archive: Path) -> None:
    """Write a directory as a zip whose bytes depend only on its content."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                info = zipfile.ZipInfo(path.relative_to(directory).as_posix(), BEGINNING)
                info.create_system, info.external_attr = 3, 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(info, path.read_bytes())
    archive.write_bytes(memory.getvalue())


def unpack(archive: Path, directory: Path) -> Path:
    """Unpack a committed zip into a directory."""
    with zipfile.ZipFile(archive) as file:
        file.extractall(directory)
    return directory


def make(directory: Path) -> None:
    """Write the published checkpoints. numpy draws their weights, in the order of their names."""
    import torch
    from tiny import tiny

    for number, (name, kind) in enumerate(MODELS.items()):
        inner, heads, width, layers = (
            ("hidden_dim", "n_heads", "dim", "n_layers")
            if name == "distilbert"
            else ("intermediate_size", "num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        sizes = {inner: 12, heads: 2, width: 8, layers: 4 if name == "bert" else 2}
        pieces = {"bert": _wordpieces, "roberta": _byte_pairs}.get(name.partition("-")[0])
        if pieces is not None:
            sizes["vocab_size"] = len(pieces(directory))
        model = tiny(kind, directory / name, **sizes)
        draw = np.random.default_rng(number)
        for _, weight in sorted(model.named_parameters()):
            values = draw.standard_normal(tuple(weight.shape), dtype=np.float32)
            weight.data = torch.from_numpy(values)
        model.save_pretrained(directory / name)
        if pieces is not None:
            pieces(directory / name)
    (directory / "spiece.model").write_bytes(_sentencepiece())
    for file in ("vocab.txt", "vocab.json", "merges.txt"):
        (directory / file).unlink(missing_ok=True)


def _wordpieces(directory: Path) -> list[str]:
    """BERT's vocabulary: unused entries, letters, some words."""
    letters = [chr(i) for i in range(97, 123)]
    words = [word for word in dict.fromkeys(map(str.lower, WORDS)) if word.isalpha()]
    pieces = ["[PAD]", *(f"[unused{i}]" for i in range(40)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces += [*letters, *(f"##{letter}" for letter in letters), *(w for w in words if len(w) > 1)]
    directory.mkdir(exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return pieces


def _byte_pairs(directory: Path) -> list[str]:
    """RoBERTa's vocabulary: all bytes, and some pairs."""
    from tokenizers import pre_tokenizers

    merges = ["t h", "Ġ th", "Ġth e", "e r", "i n", "Ġ a", "o n"]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*special, *bytes_, *(pair.replace(" ", "") for pair in merges), "<mask>"]
    directory.mkdir(exist_ok=True)
    table = {piece: i for i, piece in enumerate(pieces)}
    (directory / "vocab.json").write_text(json.dumps(table), encoding="utf-8")
    text = "\n".join(["#version: 0.2", *merges]) + "\n"
    (directory / "merges.txt").write_text(text, encoding="utf-8")
    return pieces


def _sentencepiece() -> bytes:
    """A SentencePiece model."""
    import sentencepiece

    memory = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(150, 80)),
        model_writer=memory,
        vocab_size=90,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        normalization_rule_name="identity",  # the table of another rule takes 240 KB
        minloglevel=2,
    )
    return memory.getvalue()
