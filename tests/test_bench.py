"""The benchmarks: both sides get equal models and equal rows, only real tokens count, and the
tables show what was measured.
"""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Forks, command, good
from tiny import padded
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    bench,
    ceiling,
    every_dataset,
    fake_cuda,
    first_hour,
    machine,
    ours,
    prepare,
    preprocess,
    report,
    run,
    waiting,
)
from benchmarks.bench import QUICK, Bench, Ended, Row
from benchmarks.quick import make_data
from benchmarks.report import Measured
from xformer import checkpoint as checkpoints
from xformer.data.batch import Batch
from xformer.data.errors import BadInput, Failure
from xformer.data.files import read_json
from xformer.data.sampler import Samples
from xformer.data.store import open_store
from xformer.ops.padding import padded_count
from xformer.parallel.feed import to_device
from xformer.start import SPINS, WAITING

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A small bench on made-up data, with one thread."""
    folder = tmp_path_factory.mktemp("bench")
    return Bench(make_data(folder / "data"), folder, QUICK, rounds=1, threads=1)


@pytest.fixture
def forked(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs train.py as a fork instead of a new process."""

    def quickly(arguments: list[str], threads: int) -> Ended:
        return Ended(good(forks.run(*arguments)).out, 1.0, 0.0)

    monkeypatch.setattr(ours, "command", quickly)


# ------------------------------------------------------------------------- the same on both sides


def batch_of(quick: Bench, store: Any, rows: int, masked: bool) -> Batch[torch.Tensor]:
    assembler = prepare.assembler(quick, store)
    some, zeros = np.arange(rows), np.zeros(rows, np.int64)
    return to_device(
        assembler.masked_batch(some, zeros, 3, 0.3) if masked else assembler.batch(some), CPU
    )


def test_both_mlm_models_have_one_loss(quick: Bench) -> None:
    our_model, their_model = prepare.model(quick)
    batch = batch_of(quick, prepare.lines(quick), 13, masked=True)
    our_mlm = checkpoints.load(our_model).model()
    loss, logits = our_mlm.loss(batch), our_mlm.logits(batch)
    assert batch.places is not None
    assert batch.targets is not None
    labels = torch.full((len(batch.tokens),), -100)
    labels[batch.places] = batch.targets
    given = padded(batch)
    grid = torch.nn.utils.rnn.pad_sequence(
        labels.split(batch.cu_seqlens.diff().tolist()), True, -100
    )
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(their_model).eval()
    with torch.no_grad():
        out = theirs(**given, labels=grid)
    torch.testing.assert_close(loss.total / loss.count, out.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, out.logits[grid != -100], rtol=1e-4, atol=1e-5)


def test_both_class_models_have_the_same_logits(quick: Bench) -> None:
    store = prepare.task(quick, "mrpc")
    our_model, their_model = prepare.model(quick, tuple(store.labels))
    batch = batch_of(quick, store, 7, masked=False)
    assert int(batch.segments.sum()) > 7  # a second text in every row
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(their_model).eval()
    with torch.no_grad():
        logits = checkpoints.load(our_model).model().logits(batch)
        expected = theirs(**padded(batch)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    dropouts = {m.p for m in theirs.modules() if isinstance(m, torch.nn.Dropout)}
    assert dropouts == {0.1}
    config = checkpoints.load(our_model).config
    assert {config.dropout, config.attention_dropout} == {0.1}


def test_typical_batches_are_whole_grouped_and_spread() -> None:
    sizes = np.random.default_rng(5).integers(3, 99, 1300)
    rows = prepare.typical(sizes, rows=13, warmup=2, steps=7)
    assert len(rows) == len(set(rows.tolist())) == 9 * 13
    batches = sizes[rows].reshape(9, 13)
    padding = 1 - batches.sum() / (13 * batches.max(1)).sum()
    scattered = sizes.reshape(100, 13)
    assert padding < 0.15 < 1 - scattered.sum() / (13 * scattered.max(1)).sum()
    assert (
        abs(batches[2:].mean() / sizes.mean() - 1) < 0.1
    )  # the measured batches are like the whole data


def test_the_table_holds_the_rows_of_the_store(quick: Bench) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets (extra bench) is not here")
    store, table = prepare.trial(quick, prepare.task(quick, "mrpc"), "mrpc", 8)
    assembler = prepare.assembler(quick, open_store(store))
    rows = datasets.load_from_disk(str(table))
    assert len(rows) == assembler.split.rows == 8 * (QUICK.warmup + QUICK.steps)
    for row in range(len(rows)):
        batch = assembler.batch(np.array([row]))
        assert rows[row]["input_ids"] == batch.tokens.tolist()
        assert rows[row]["token_type_ids"] == batch.segments.tolist()
        assert rows[row]["labels"] == batch.labels[0]  # type: ignore[index]


# ------------------------------------------------------------------------------ what is counted


def test_the_trainer_counts_only_real_tokens(quick: Bench) -> None:
    for package in ("accelerate", "datasets"):
        pytest.importorskip(package, reason=f"{package} (extra bench) is not here")
    from benchmarks import theirs

    store, table = prepare.trial(quick, prepare.lines(quick), "lines", 8)
    job = theirs.Job(
        model=str(prepare.model(quick)[1]),
        table=str(table),
        task="mlm",
        rows=8,
        output=str(quick.folder / "trainer"),
        steps=3,
        warmup=1,
    )
    took = theirs.train(job)
    assembler = prepare.assembler(quick, open_store(store))
    sizes = assembler.sizes(np.arange(assembler.split.rows))
    assert took["tokens"] == sizes.sum()  # 3 steps of 8 rows are the whole trial
    assert 0 < took["padding"] < 1
    assert took["rate"] > 0


def test_our_rate_weighs_the_lines_of_the_log_by_their_time() -> None:
    events = [
        {"time": 10.0, "real_tokens_per_second": 1.0},  # the warm-up, whose rate does not count
        {"time": 11.0, "real_tokens_per_second": 100.0},
        {"time": 14.0, "real_tokens_per_second": 300.0},
    ]
    assert ours.rate(events) == (1 * 100 + 3 * 300) / 4


def test_the_feed_is_timed_over_whole_groups_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed makes four steps at once, of 10 tokens each, in 4 seconds."""
    clock, masked = [100.0], SimpleNamespace(places=[0])

    class Feed:
        def __init__(self) -> None:
            self.made: dict[int, Any] = {}

        def take(self, position: int) -> Any:
            if position not in self.made:
                clock[0] += 4
                work = SimpleNamespace(tokens=10)
                self.made = {
                    at: SimpleNamespace(end=at + 1, batches=[masked], work=work)
                    for at in range(position, position + 4)
                }
            return self.made[position]

    store = SimpleNamespace(verify_in_background=lambda told: SimpleNamespace(join=str))
    monkeypatch.setattr(ours, "prepare", lambda *_: SimpleNamespace(feed=Feed, store=store))
    monkeypatch.setattr(ours.time, "perf_counter", lambda: clock[0])
    for count in (1, 5, 10, 43):
        assert ours.batches("a", "b", [], count) == {"rate": 10.0, "a batch": 10.0}


def test_the_ceiling_uses_the_batches_of_training(quick: Bench) -> None:
    pytest.importorskip("datasets", reason="datasets (extra bench) is not here")
    trial, _ = prepare.trial(quick, prepare.lines(quick), "lines", 8)
    init = prepare.model(quick)[0]
    same = {"rows": 8, "length": QUICK.length, "count": 3}
    shapes = ceiling.shapes(trial, init, dtype=torch.float32, **same)
    assembler = prepare.assembler(quick, open_store(trial))
    samples = Samples(assembler.split.rows, seed=0)
    rows, epochs = samples.at(np.arange(8, 16))
    batch = assembler.masked_batch(rows, epochs, 0, 0.15)
    assert batch.places is not None
    assert (shapes[1].tokens, shapes[1].masked) == (len(batch.tokens), len(batch.places))
    half = ceiling.shapes(trial, init, dtype=torch.bfloat16, **same)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert half.tokens == padded_count(shapes[1].tokens, CPU) != shapes[1].tokens
    assert half.runs == shapes[1].runs
    assert sum(n for n, _ in shapes[1].runs) == 8
    assert sum(n * length for n, length in shapes[1].runs) == len(batch.tokens)
    config = checkpoints.load(init).config
    products = ceiling.Products(config, torch.float32, shapes)
    with FlopCounterMode(display=False) as counter:
        products.run(shapes[1])
        ones = torch.ones(3 * len(batch.tokens) * config.hidden)
        ceiling.attend(config, shapes[1], "explicit", ones)
    for form in ("ours", "fused"):
        ceiling.attend(config, shapes[1], form, ones.bfloat16())
    squares = sum(n * length**2 for n, length in shapes[1].runs)
    C, F, V = config.hidden, config.intermediate, config.vocab_size
    layers = config.layers * (6 * C * C * shapes[1].tokens + 4 * C * squares)
    rest = (config.layers - 1) * shapes[1].tokens + shapes[1].masked
    layers += (2 * C * C + 4 * C * F) * rest
    head = (2 * C * C + 2 * C * V) * shapes[1].masked
    assert counter.get_total_flops() == 3 * (layers + head)


def test_a_contestant_waits_as_openmp_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer must not inherit how our commands wait. `waiting` measures what that costs."""
    monkeypatch.setenv("GOMP_SPINCOUNT", SPINS)
    assert not bench.environment(3).keys() & set(WAITING)
    assert bench.environment(3)["OMP_NUM_THREADS"] == "3"


def test_the_machine_is_described_with_the_threads_that_were_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "gflops", lambda dtype: 1.0)
    for threads, words in ((1, "with 1 thread"), (2, "with 2 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert machine.words().endswith(f"in bf16 {words}")


# ----------------------------------------------------------------------------------- the tables


def example(**changes: Any) -> Row:
    return replace(
        Row("a step", "real tokens/s", [30.0, 20.0], "others", [10.0, 10.0], 2.5), **changes
    )


def test_a_row_counts_ratios_round_by_round() -> None:
    assert example().values == [3.0, 2.0]
    assert example().reached  # 2.5, the median
    assert not example(target=2.6).reached
    assert example(unit="s").values == [1 / 3, 0.5]  # fewer seconds are better
    alone = example(theirs=[], ours=[7.0, 9.0], target=8.0, goal="below", unit="s")
    assert alone.reached
    assert alone.share == 1
    assert not replace(alone, ours=[9.0, 9.0]).reached
    line = report.line(example(target=5))
    assert "| 25 (20 to 30) | 10 (10 to 10) | 2.5 (2 to 3)x | 5x | **not reached** (50%) |" in line


def test_the_page_keeps_the_text_outside_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    part = Measured("mixed", "2026-01-02", 0.3, [example(target=5)])
    alone = Measured("settings", "2026-01-02", 0.3, [example(theirs=[], ours=[7.0], unit="rows/s")])
    text = report.section("A machine", "Python 3", [part], [alone])
    assert "| what | measured |\n|---|---|\n| a step (rows/s) | 7 |\n" in text
    report.write(page, text)
    written = page.read_text()
    assert written.startswith("before\n\n")
    assert written.endswith("\n\nafter\n")
    assert "old" not in written
    assert "Furthest from its target: a step, compared with others, at 50% of it." in written
    for wrong in ("nothing of ours\n", f"{report.END}\n{report.BEGIN}\n"):
        page.write_text(wrong)
        with pytest.raises(BadInput, match="no place for the table"):
            report.write(page, text)
        assert page.read_text() == wrong


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: True)

    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmarks.run", *arguments])
        with pytest.raises(BadInput) as caught:
            run.main()
        return str(caught.value)

    assert "--data DIR must be given" in refused()
    assert f"{tmp_path}/english_wikipedia/train.txt does not exist" in refused(
        "--data", str(tmp_path)
    )
    assert "unknown part 'mixde'; the parts are mixed, full" in refused("mixde", "--quick")
    assert "--rounds: 0 is not allowed; it must be at" in refused("--quick", "--rounds", "0")
    assert "is not a directory" in refused("--quick", "--output", str(tmp_path / "absent"))
    quick = ("--quick", "--output", str(tmp_path))
    (tmp_path / "benchmarks.json").write_text('{"machine": "2 cores of an A", "measured": []}')
    assert "has measured rows, which --quick would replace; change --output" in refused(*quick)
    (tmp_path / "benchmarks.md").write_text("nothing of ours\n")
    assert "benchmarks.md has no place for the table" in refused(*quick)
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == "accelerate" else True)
    assert "accelerate not installed: pip install -e '.[bench]'" in refused("--quick")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("scaling --output PAGE", "has no place for the table"),
        ("goals --output PAGE", "has no place for the table"),
        ("launches -v", "unrecognized arguments: -v"),
        ("compare . . --only exact --recipes pretrain", "--only exact does not compare pretrain"),
        ("waiting --rounds 0", "--rounds: 0 is not allowed; it must be at least 1"),
        ("waiting --steps 2", "--steps: 2 is not allowed; it must be at least 3"),
        ("analysis --rounds 0", "--rounds: 0 is not allowed; it must be at least 1"),
        ("preprocess --rounds 0", "--rounds: 0 is not allowed; it must be at least 1"),
        ("preprocess --data DIR", "english_wikipedia/train.txt does not exist; --data needs engl"),
        ("preprocess --output DIR/absent/page.md", "--output: .*/absent is not a directory"),
        ("preprocess --scratch DIR/absent", "--scratch: .*/absent is not a directory; create it"),
        ("precision speed --data DIR --output DIR", "does not exist; --data needs english_wiki"),
        ("precision speed --data DIR --output DIR/absent", "absent is not a directory; create it"),
        ("compare . . --steps 11", "--steps: 11 is not allowed; it must be at least 12"),
        ("compare . . --scratch DIR/absent", "--scratch: .*/absent is not a directory; create it"),
        ("surgery --rounds 0", "--rounds: 0 is not allowed; it must be at least 1"),
        ("surgery --only reverse_heads", "no operation begins with 'reverse_heads': reverse_lay"),
        ("parity --output DIR", "--output: .* is a directory; give a file"),
        ("every_dataset DIR/absent --output DIR/page.md", "absent is not a directory; create it"),
        ("every_dataset DIR --output DIR/absent/page.md", "absent is not a directory; create it"),
    ],
)
def test_each_benchmark_refuses_bad_arguments(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before it measures anything."""
    (tmp_path / "page.md").write_text("nothing of ours\n")
    line = line.replace("PAGE", "DIR/page.md").replace("DIR", str(tmp_path))
    name, *words = line.split()
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(BadInput, match=message):
        import_module(f"benchmarks.{name}").main()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--minutes", "-1"), "--minutes -1 is not allowed; it must be above 0"),
        (("--output", __file__), "test_bench.py is not a directory"),
    ],
)
def test_the_first_hour_refuses_bad_arguments(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.first_hour", "--rehearse", *words])
    with pytest.raises(SystemExit):
        first_hour.main()
    assert message in capsys.readouterr().err


def test_a_command_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as context:
        context.setenv("PATH", str(tmp_path))
        with pytest.raises(Failure, match=r"fake_cuda\.cpp could not be compiled: .*'c\+\+'"):
            fake_cuda.start("benchmarks.launches", tmp_path)
    with pytest.raises(Failure, match=r"^false ended with status 1$"):
        preprocess.timed(["false"])
    code, start = "import sys; sys.exit(f'bad: {sys.argv}')", subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda line, **given: start([sys.executable, "-c", code, *line[1:]], **given),
    )
    settings = Namespace(layers=1, hidden=16, steps=3)
    with pytest.raises(Failure, match=r": bad: .*'model\.heads=1'"):
        waiting.train(1, 0, tmp_path, settings)


def test_missing_data_sets_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = every_dataset.Entry("small", "synthetic uniform --tokens 2000 --vocab-size 99")
    for name, entries in (
        ("TASKS", every_dataset.TASKS[:1]),
        ("CORPORA", []),
        ("SYNTHETIC", [small]),
    ):
        monkeypatch.setattr(every_dataset, name, entries)
    monkeypatch.setattr(every_dataset, "TOKENIZERS", {"uncased": "--from DATA/vocab.txt"})
    page = tmp_path / "data.md"
    monkeypatch.setattr(sys, "argv", ["every_dataset", str(tmp_path), "--output", str(page)])
    with pytest.raises(Failure, match="1 data sets are left out"):
        every_dataset.main()
    text = page.read_text()
    assert "| small |" in text
    assert "## Left out\n\n- GLUE CoLA: " in text
    assert str(tmp_path) not in text


def test_rows_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.json"
    setup = {"machine": "2 cores of an A. Large matrix products reach 3", "versions": "torch 1"}
    page.write_text(json.dumps({**setup, "measured": []}))
    again = {**setup, "machine": "2 cores of an A. Large matrix products reach 4"}
    assert run._kept(page, again) == []
    other = {**setup, "machine": "2 cores of a B. Large matrix products reach 4"}
    with pytest.raises(BadInput, match="measured with 2 cores of an A, not 2 cores of a B"):
        run._kept(page, other)


@pytest.mark.usefixtures("forked")
def test_a_quick_run_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("accelerate", "datasets"):
        pytest.importorskip(package, reason=f"{package} (extra bench) is not here")
    arguments = ["--quick", "--rounds", "1", "--output", str(tmp_path)]
    done = good(command("-m", "benchmarks.run", "mixed", *arguments))
    # a part that is measured later is added to the page
    monkeypatch.setattr(sys, "argv", ["benchmarks.run", "start", *arguments])
    run.main()
    content = read_json(tmp_path / "benchmarks.json")
    assert [part["part"] for part in content["measured"]] == ["mixed", "start"]
    rows = [Row(**row) for part in content["measured"] for row in part["rows"]]
    mixed = [5.5, 5.5, 0.9] * (2 if machine.has_bf16() else 1)
    assert [row.target for row in rows] == [*mixed, 8.0, None, 1.05]
    assert all(value > 0 for row in rows[: len(mixed)] for value in (*row.ours, *row.theirs))
    page = (tmp_path / "benchmarks.md").read_text()
    assert run.MADE_UP in page
    assert all(report.line(row) in page for row in rows)
    assert all(report.line(row) in done.out for row in rows[: len(mixed)])
    for ending in ("svg", "png"):
        assert (tmp_path / f"{report.FIGURE}.{ending}").stat().st_size > 5000
