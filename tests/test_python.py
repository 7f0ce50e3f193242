"""The use from Python: vectors of texts, padded tensors, one's own rows, paths as strings."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tiny
import torch
from helpers import ROOT, command, good
from torch.utils.data import DataLoader, Dataset

from xformer import checkpoint, encode, monitor, predictions, surgery, texts
from xformer.analysis.capture import open_capture
from xformer.checkpoint import Checkpoint
from xformer.convert.describe import describe
from xformer.convert.hf import from_hf, read_shape, to_hf
from xformer.convert.plus import from_plus
from xformer.data import published, tokenizers
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.joined import open_stores
from xformer.data.memory import split_of
from xformer.data.rows import write_store
from xformer.data.store import open_store
from xformer.data.writing import create_store
from xformer.model.config import ModelConfig
from xformer.preprocess.tasks.predict import read_texts
from xformer.study.reading import read_study
from xformer.tasks.task import Head, Model
from xformer.texts import pack, vectors_of

TEXTS = [
    "The packet was sent to the wrong address.",
    "",
    "She shook her head.",
    "A socket waits until the other end has closed the connection. " * 12,
    "Numbers: 1, 2 and 3.",
]


@pytest.fixture(scope="module")
def english() -> Checkpoint:
    return checkpoint.load("micro/english")


# ---------------------------------------------------------------------------------- vectors


@pytest.fixture(scope="module")
def imported(minilm: Path) -> Checkpoint:
    return from_hf(str(minilm)).checkpoint


def theirs(minilm: Path, sentences: list[str], pooling: str, normalize: bool) -> np.ndarray:
    """The vectors that sentence-transformers computes, by `transformers` alone."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    given = tokenizer(sentences, padding=True, truncation=True, max_length=512, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given).last_hidden_state  # (N, L, C)
    mask = given["attention_mask"].unsqueeze(2).float()
    x = (hidden * mask).sum(1) / mask.sum(1) if pooling == "mean" else hidden[:, 0]
    return (torch.nn.functional.normalize(x) if normalize else x).numpy()


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("mean", False), ("first", 0)])
def test_vectors_are_those_of_transformers(
    imported: Checkpoint, minilm: Path, pooling: texts.Pooling, normalize: bool
) -> None:
    vectors = imported.encode(TEXTS, pooling=pooling, normalize=normalize)
    assert vectors.dtype == np.float32
    wanted = theirs(minilm, TEXTS, pooling, normalize)
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-5)
    if normalize:
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_batches_and_order_do_not_change_vectors(english: Checkpoint) -> None:
    together = english.encode(TEXTS)
    alone = np.stack([english.encode(text) for text in TEXTS])  # one text gives one vector
    small = english.encode(iter(TEXTS), batch_tokens=1)
    backwards = english.encode(TEXTS[::-1])[::-1]
    for other in (alone, small, backwards):
        np.testing.assert_allclose(other, together, rtol=0, atol=1e-5)
    assert english.encode([]).shape == (0, 256)


def test_long_texts_are_cut_and_counted(
    english: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = english.encode(TEXTS)
    said = capsys.readouterr().err
    assert "20 % of the 5 texts are longer than 128 tokens and are truncated" in said
    cut = english.encode(TEXTS, max_tokens=8)
    assert "60 % of the 5 texts are longer than 8 tokens" in capsys.readouterr().err
    assert np.allclose(cut[2], whole[2], atol=1e-5)
    assert not np.allclose(cut[0], whole[0], atol=1e-2)
    english.encode(TEXTS[2])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pooling": "max"}, "pooling='max' must be 'mean' or 'first'"),
        ({"max_tokens": 1}, "max_tokens=1 must be from 2 to 128"),
        ({"max_tokens": 129}, "max_tokens=129 must be from 2 to 128"),
        ({"batch_tokens": 0}, "batch_tokens=0 must be at least 1"),
    ],
)
def test_wrong_arguments_of_encode(english: Checkpoint, wrong: dict, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        english.encode(TEXTS, **wrong)


def test_a_checkpoint_with_a_mapping_encodes_its_raw_input(english: Checkpoint) -> None:
    """DNA is read by the tokenizer of the data, and its ids are mapped to the model's."""
    letters = tokenizers.load_tokenizer("micro/brackets")
    table = np.arange(len(letters)) % 100 + 1000
    mapped = checkpoint.replace(english, source=letters, mapping=table)
    text = letters.decode([20, 30, 40])
    ids = [english.tokenizer.special[role] for role in ("cls", "sep")]
    ids[1:1] = table[[20, 30, 40]].tolist()
    hidden = english.model()(torch.tensor([ids]))
    np.testing.assert_allclose(
        mapped.encode(text, pooling="first"), hidden[0, 0].detach(), rtol=0, atol=1e-5
    )


def test_a_model_is_left_as_it_was(english: Checkpoint) -> None:
    model = english.model().train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = vectors_of(model, english.tokenizer, TEXTS[:3])
    assert model.training
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    np.testing.assert_allclose(first, english.encode(TEXTS[:3]), rtol=0, atol=1e-6)


def test_numbers_that_are_not_finite_are_an_error(english: Checkpoint) -> None:
    broken = {**english.weights, "encoder.embeddings.norm.bias": torch.full((256,), torch.nan)}
    with pytest.raises(Exception, match="the vectors are not finite in 1 of 1 rows"):
        checkpoint.replace(english, weights=broken).encode("a")


# ------------------------------------------------------------------------------ the command


@pytest.mark.slow
def test_the_command_writes_three_formats(english: Checkpoint, tmp_path: Path) -> None:
    lines, table = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    lines.write_text("\n".join(TEXTS) + "\n")
    table.write_text("".join(json.dumps({"n": i, "said": t}) + "\n" for i, t in enumerate(TEXTS)))
    run = ["-m", "xformer.command", "encode", "micro/english", f"input={lines}"]
    done = good(command(*run, f"out={tmp_path / 'v.npy'}"))
    assert done.out == f"{tmp_path / 'v.npy'}: 5 vectors of 256 numbers\n"
    assert "20 % of the 5 texts are longer than 128 tokens" in done.err
    wanted = np.load(tmp_path / "v.npy")
    np.testing.assert_allclose(wanted, english.encode(TEXTS), rtol=0, atol=1e-5)
    run[-1] = f"input={table}"
    more = ["column=said", "normalize=true", f"out={tmp_path / 'v.h5'}"]
    good(command(*run, *more))
    with h5py.File(tmp_path / "v.h5") as file:
        read, attributes = file["vectors"][:], dict(file["vectors"].attrs)
    unit = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(read, unit, rtol=0, atol=1e-5)
    assert attributes["checkpoint"] == "micro/english"
    assert attributes["normalize"]
    encode.write_vectors(tmp_path / "v.tsv", wanted, {})
    assert np.array_equal(np.loadtxt(tmp_path / "v.tsv", np.float32, delimiter="\t"), wanted)


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('text,n\n"a, b",1\n')
    (tmp_path / "null.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    (tmp_path / "lines").write_bytes(b"good\n\n\xff\n")
    (tmp_path / "p.fna").write_text(">one a header\nacGT\nAC\n>two\nTT\n")
    assert read_texts(tmp_path / "t.csv") == ["a, b"]
    assert read_texts(tmp_path / "p.fna") == ["ACGTAC", "TT"]
    for file, column, words in (
        ("t.csv", "txt", "has no column 'txt'; it has 'text', 'n'; did you mean 'text'"),
        ("null.jsonl", None, "null.jsonl:2: the column 'text' is null"),
        ("lines", None, "lines:3: not valid UTF-8"),
        ("nothing", None, "nothing does not exist"),
        ("p.fna", "text", "p.fna is FASTA and has no columns: leave out column="),
    ):
        with pytest.raises(BadInput, match=words):
            read_texts(tmp_path / file, column)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "the first argument must be a checkpoint"),
        ("micro/english input=a.txt", "out must be given"),
        ("micro/english input=a.txt out=v.csv", "give a name that ends in .npy, .h5, .tsv"),
        ("micro/english input=a.txt out=v.npy poolin=mean", "did you mean pooling"),
        ("micro/english input=a.txt out=nowhere/v.npy", "nowhere is not a directory"),
        ("micro/english input=README.md out=README.md", "ends in .npy"),
        ("micro/english input=a.txt out=v.npy normalize=maybe", "='maybe': give true or false"),
        ("{store} input=a.txt out=v.npy", "store is a store, but this command encodes a file of"),
        ("micro/english input={store} out=v.npy", "store is a store, but this command encodes a"),
    ],
)
def test_wrong_lines(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/store.json").write_text("{}")
    with pytest.raises(BadInput, match=words):
        encode.parse_arguments(line.format(store=tmp_path / "store").split())


# --------------------------------------------------------------------------- padded tensors


@pytest.mark.parametrize("kind", ["BertModel", "RobertaModel", "AlbertModel", "DistilBertModel"])
def test_padded_tensors_give_the_hidden_states_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = tiny.tiny(kind, tmp_path)
    model = from_hf(str(tmp_path)).checkpoint.model()
    batch = tiny.random_batch()
    given = tiny.padded(batch, tiny.family_of(kind).name)
    with torch.no_grad():
        wanted = tiny.packed(oracle(**given).last_hidden_state, batch)
    mask = given["attention_mask"]
    for form in (mask, mask.bool(), mask.long()):
        hidden = model(given["input_ids"], form, given.get("token_type_ids"))
        assert hidden.shape == (*mask.shape, tiny.HIDDEN)
        assert tiny.distance(tiny.packed(hidden, batch), wanted) < 1e-5
        assert (hidden[mask == 0] == 0).all()


def small_model() -> Model:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50, layers=2, hidden=24, heads=2, intermediate=40, max_positions=16, dropout=0
    )
    model = Model(config).eval()
    for name, weight in model.named_parameters():
        weight.data.normal_(0, 0.3).add_(name.endswith("norm.weight"))
    return model


def test_padding_may_be_on_either_side() -> None:
    model, ids = small_model(), torch.randint(50, (3, 7))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7, [0] * 7])
    right = model(ids, mask)
    left = model(ids.roll(4, 1), mask.roll(4, 1)).roll(-4, 1)
    torch.testing.assert_close(left[0], right[0])
    torch.testing.assert_close(right[0, :3], model(ids[:1, :3])[0])  # without a mask
    assert (right[2] == 0).all()  # a row of padding
    wide, wide_mask = (torch.nn.functional.pad(x, (0, 30)) for x in (ids, mask))  # over 16
    torch.testing.assert_close(model(wide, wide_mask)[:, :7], right)


def test_hidden_states_can_be_differentiated() -> None:
    model, ids = small_model(), torch.randint(50, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    model(ids, mask)[:, 0].square().sum().backward()
    with_padding = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert {n.split(".")[0] for n in with_padding} == {"encoder"}
    model.zero_grad()
    for row, size in ((0, 5), (1, 2)):
        model(ids[row : row + 1, :size])[:, 0].square().sum().backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, with_padding[name], rtol=1e-4, atol=1e-5)


def test_wrong_tensors_are_refused() -> None:
    model, ids = small_model(), torch.randint(50, (2, 5))
    with pytest.raises(ValueError, match=r"\(sequences, length\), not \(2, 5\), \(5,\)"):
        model(ids, torch.ones(5))
    with pytest.raises(ValueError, match="a sequence has 20 tokens, but the model takes 16"):
        model(torch.zeros(1, 20, dtype=torch.long))
    cnn = ModelConfig(architecture="hilbert_cnn", vocab_size=9, letters=(5, 6, 7, 8))
    with pytest.raises(ValueError, match="HilbertCNN has no hidden states"):
        Model(cnn)(ids)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 1000)])
def test_no_tokens_have_no_states(shape: tuple[int, int]) -> None:
    states = small_model()(torch.zeros(shape, dtype=torch.long))
    assert states.shape == (*shape, small_model().config.hidden)


# ------------------------------------------------------------------------- one's own loops


def test_a_batch_of_texts_is_that_of_a_store(english: Checkpoint, tmp_path: Path) -> None:
    rows = [("a b", "c", 1), ("some more words", "", 0), ("x", "y " * 40, 1)]
    write_store(str(tmp_path / "s"), english.tokenizer, {"train": iter(rows)}, ["no", "yes"])
    store = open_store(str(tmp_path / "s"))
    assert (store.kind, store.labels, store.metric) == ("class", ["no", "yes"], "accuracy")
    stored = Assembler(store.split("train"), english.tokenizer, 16).batch(np.arange(3))
    first, second, labels = zip(*rows, strict=True)
    batch = pack(english.tokenizer, first, torch.tensor(labels), texts_b=second, max_tokens=16)
    assert batch.labels is not None
    for name in ("tokens", "positions", "segments", "cu_seqlens", "labels"):
        assert getattr(batch, name).tolist() == getattr(stored, name).tolist(), name


def test_masks_follow_the_generator_of_torch(english: Checkpoint) -> None:
    def masked(seed: int) -> list[int]:
        torch.manual_seed(seed)
        batch = pack(english.tokenizer, TEXTS * 40, masking=0.15)
        assert batch.places is not None
        share = len(batch.places) / (len(batch.tokens) - 2 * 5 * 40)
        assert share == pytest.approx(0.15, abs=0.02)
        return batch.places.tolist()

    assert masked(1) == masked(1) != masked(2)


class Rows(Dataset):
    """A user's own data set: is the first word of a text "yes"?"""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[str, int]:
        return f"{'yes' if i % 2 else 'no'} it is number {i}", i % 2


def test_a_loop_of_ones_own_learns_and_is_saved(english: Checkpoint, tmp_path: Path) -> None:
    start = english.with_head(Head("classify", labels=("no", "yes")), seed=0)
    model = start.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def collate(rows: list[tuple[str, int]]) -> object:
        return pack(start.tokenizer, *zip(*rows, strict=True), max_tokens=32)

    torch.manual_seed(0)
    losses = []
    for _ in range(3):
        for batch in DataLoader(Rows(), batch_size=16, shuffle=True, collate_fn=collate):
            loss = model(batch.to("cpu")).mean
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.3 < losses[0]
    trained = start.with_weights(model)
    checkpoint.save(trained, str(tmp_path / "mine"))
    read = checkpoint.load(str(tmp_path / "mine"))
    assert read.history[-1] == {"op": "with_weights"}
    for name, weight in model.state_dict().items():
        assert torch.equal(read.weights[name], weight), name
    with torch.no_grad():  # later steps do not change the checkpoint
        model.task_head.weight.zero_()
    assert trained.weights["task_head.weight"].any()
    with pytest.raises(BadInput, match="the model"):
        start.with_weights(english.model())


def test_workers_may_make_the_batches(english: Checkpoint) -> None:
    def collate(rows: list[tuple[str, int]]) -> object:
        return pack(english.tokenizer, *zip(*rows, strict=True), masking=0.2)

    loader = DataLoader(Rows(), batch_size=32, collate_fn=collate, num_workers=1)
    model = english.model()
    assert all(torch.isfinite(model(batch).mean) for batch in loader)


def test_rows_of_any_iterator_become_a_store(english: Checkpoint, tmp_path: Path) -> None:
    tokenizer = english.tokenizer
    write_store(tmp_path / "text", tokenizer, {"train": (f"row {i}" for i in range(2500))})
    store = open_store(tmp_path / "text")
    assert (store.kind, store.split("train").rows) == ("text", 2500)
    tokens = store.split("train").columns["tokens"]
    assert tokenizer.decode(tokens[2499]) == "row 2499"
    write_store(tmp_path / "score", tokenizer, {"train": [("a", 1.5)], "valid": [["b", "-2"]]})
    assert open_store(tmp_path / "score").split("valid").columns["label"].tolist() == [-2.0]
    write_store(tmp_path / "class", tokenizer, {"train": [("a", "x"), ("b", 1)]}, labels=["x", "y"])
    assert open_store(tmp_path / "class").split("train").columns["label"].tolist() == [0, 1]
    numbers = (1, 0, True, np.bool_(False), np.int8(1), 1.0, torch.tensor(0))
    rows = [("a", number) for number in numbers]
    write_store(tmp_path / "class", tokenizer, {"train": rows}, labels=["0", "1"], overwrite=True)
    labels = open_store(tmp_path / "class").split("train").columns["label"]
    assert labels.tolist() == [1, 0, 1, 0, 1, 1, 0]


class Table(dict):
    """Like a DataFrame: it has columns, and iterating over it yields their names."""

    columns = ("text", "label")


@pytest.mark.parametrize(
    ("splits", "labels", "words"),
    [
        ({}, (), "there are no rows"),
        ({"train": []}, (), "there are no rows"),
        ({"train": ["a"], "valid": []}, (), "the split 'valid' would be empty"),
        (
            {"train": [3]},
            (),
            r"row 0 of the split 'train' is 3; a row is a text, \(text, label\) or",
        ),
        ({"train": ["a", ("b", 1)]}, (), r"row 1 of the split 'train' is \('b', 1\); it must be"),
        ({"train": [("a", 1), (2, 1)]}, "xy", r"row 1 .*must be \(text, label\)"),
        ({"train": [("a", "z")]}, "xy", "the label 'z' is neither one of x, y nor"),
        ({"train": [("a", 2)]}, "xy", "the label 2 is neither one of x, y nor"),
        ({"train": [("a", "x")]}, (), "the label 'x' is not a number; give the names"),
        ({"train": ["a"]}, "xy", r"labels=\['x', 'y'\]: the rows are texts alone"),
        ({"train": [("a", "x")]}, "xx", r"labels=\['x', 'x'\]: a class is named twice"),
        ({"train": [("a", "x")]}, "x", r"labels=\['x'\]: there is only one class"),
        ({"train": [("a", 1e39)]}, (), "the label 1e\\+39 is too large for a score"),
        ({"train": [("a", "-inf")]}, (), "the label '-inf' is too large for a score"),
        (
            {"train": ["a"], "validation": ["a"]},
            (),
            "the split 'validation' is called 'valid' here",
        ),
        ({"Training": ["a"]}, (), "the split 'Training' is called 'train' here"),
        ({"Test": ["a"]}, (), "the split 'Test' is called 'test' here"),
        ([("a", 1)], (), "give the rows of each split by its name"),
        ({"train": Table()}, (), r"the split 'train' is a table; give its rows, such as table\[\["),
        (
            {"train": [("a", 1)]},
            "10",
            "the label 1 is the name of a class and the number of another",
        ),
        ({"train": [("a", 3)]}, "123", "the label 3 is the name of a class and the number of"),
        ({"train": [("a", np.float64(1))]}, "123", r"the label .*1.0.* is the name of a class"),
        ({"train": [("a", torch.tensor(1))]}, "10", r"the label tensor\(1\) is the name of a"),
        ({"train": [("a", 0.5)]}, "xy", "the label 0.5 is neither one of x, y nor"),
        ({"train": [("a", None)]}, "xy", "the label None is neither one of x, y nor"),
        ({"../train": ["a"]}, (), "letters, digits, '_', '-' and '.', not '../train'"),
    ],
)
def test_rows_that_are_refused(
    english: Checkpoint, tmp_path: Path, splits: Any, labels: str, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        write_store(tmp_path / "s", english.tokenizer, splits, list(labels))
    assert list(tmp_path.iterdir()) == []


def test_texts_and_labels_must_be_equally_many(english: Checkpoint) -> None:
    with pytest.raises(ValueError, match="there are 2 tokens, 1 label"):
        split_of(english.tokenizer, ["a", "b"], labels=[1])
    with pytest.raises(BadInput, match="give a list of texts, not a single text"):
        pack(english.tokenizer, "hello")
    for table in (Table(text=["a"], label=[1]), {"a": 1}, {"a", "b"}):
        with pytest.raises(BadInput, match="give a list of texts, not a"):
            pack(english.tokenizer, table)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="give a list of texts, not a"):
            english.encode(table)
        with pytest.raises(BadInput, match="give a list of names of classes, not a"):
            write_store("s", english.tokenizer, {"train": [("a", 0)]}, table)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"masking=1.5 is not a probability"):
        pack(english.tokenizer, ["hello"], masking=1.5)


# --------------------------------------------------------------------------- paths

TAKE_PATHS = [
    *(checkpoint.load, checkpoint.save, checkpoint.resolve, checkpoint.verify),
    *(checkpoint.content_key, checkpoint.load_tensors, checkpoint.save_tensors),
    *(open_store, open_stores, create_store, write_store),
    *(tokenizers.load_tokenizer, tokenizers.Tokenizer.save),
    *(published.import_tokenizer, published.export_tokenizer),
    *(from_hf, to_hf, from_plus, read_shape, describe),
    *(open_capture, monitor.records, predictions.read, predictions.write, read_study),
]


@pytest.mark.parametrize("function", TAKE_PATHS, ids=lambda function: function.__name__)
def test_a_path_may_be_a_string(function: object) -> None:
    plain = inspect.unwrap(function)  # type: ignore[arg-type]
    types = [t for name, t in plain.__annotations__.items() if "Path" in t and name != "return"]
    assert types
    assert all("str | Path" in t for t in types)


def test_strings_and_paths_are_alike(english: Checkpoint, minilm: Path, tmp_path: Path) -> None:
    for kind in (str, Path):
        place = tmp_path / kind.__name__
        checkpoint.save(english, kind(place / "c"))
        checkpoint.verify(kind(place / "c"))
        assert describe(kind(place / "c"))
        assert checkpoint.content_key(kind(place / "c"))
        weights = checkpoint.load_tensors(kind(place / "c/model.safetensors"))
        checkpoint.save_tensors({"a": weights["mlm_head.bias"]}, kind(place / "one.safetensors"))
        english.tokenizer.save(kind(place))
        to_hf(english, kind(place / "hf"))
        assert read_shape(kind(place / "hf")) == from_hf(kind(place / "hf")).checkpoint.config
        published.export_tokenizer(english.tokenizer, kind(place), 128)
        write_store(kind(place / "s"), english.tokenizer, {"train": ["a"]})
        assert open_stores(kind(place / "s")).key == open_stores([kind(place / "s")]).key
        # its signature is the schema of recipes, where a path is a string
        moved = surgery.transplant(english, source=kind(place / "c"))  # type: ignore[arg-type]
        assert moved.history[-1]["source"] == str(place / "c")
        assert read_study(kind(ROOT / "recipes/studies/demo.toml"), "mini").scale == "mini"


def test_rows_are_cut_to_what_the_model_accepts(english: Checkpoint) -> None:
    """The default of a head that a program makes is longer than the small model accepts."""
    heads = Head("classify", ("a", "b")), Head("classify", ("a", "b"), max_tokens=20)
    assert [english.with_head(head).max_tokens for head in heads] == [128, 20]
    assert checkpoint.replace(english, head=None).max_tokens == 128
