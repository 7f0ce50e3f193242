"""What a run promises beyond its steps: which checkpoints it keeps, its record of how it was made,
and repeating it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import CLASSIFY, NO_DROPOUT, SMOKE, Forks, command, good, refused, training
from test_train import AT_STEP, drawn_once, log, same
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import provenance
from xformer.data.errors import Failure
from xformer.data.files import RUN_MANIFEST, read_json, write_json
from xformer.monitor import cut_log, records
from xformer.ops import native
from xformer.parallel import processes, watch
from xformer.writer import BackgroundWriter

STEPS = [
    "train.steps=15",
    "train.checkpoint_every=3",
    "train.log_every=3",
    "train.select=last",
    "train.validate_every=100",
]

# Python that makes the disk full for every checkpoint of some steps
FULL = """
import errno
from xformer import checkpoint
save = checkpoint.save
def full(made, path, *rest):
    if path.name in {steps}:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    save(made, path, *rest)
checkpoint.save = full
"""


def kept(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


# ------------------------------------------------------------------------------- checkpoints


def test_which_checkpoints_are_kept(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", *STEPS, "train.keep_last=1")
    good(forks.run(*line))
    assert kept(tmp_path / "run") == {"step_15"}
    more = ["train.steps=24", "train.keep_last=2", "train.keep_every=6"]
    good(forks.run(*line, *more))
    assert kept(tmp_path / "run") == {"step_15", "step_18", "step_21", "step_24"} - {"step_15"}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_finished_run_that_keeps_no_state(
    forks: Forks, data: Toys, tmp_path: Path, at_once: bool
) -> None:
    """Only the weights of the selected checkpoint stay, whether the state was dropped at the end or
    later.

    They load, other runs can start from them, and this run cannot be made longer.
    """
    run, bare = tmp_path / "run", ["train.keep_state=false"]
    line = training(SMOKE, data.text, run, *STEPS, "train.select=best", "train.validate_every=6")
    good(forks.run(*line, *(bare if at_once else [])))
    if not at_once:
        assert len(kept(run)) == 2
        weights = (
            run / read_json(run / "result.json")["selected"] / "model.safetensors"
        ).read_bytes()
        assert "is finished" in good(forks.run(*line, *bare)).err
        assert weights == (checkpoints.resolve(run) / "model.safetensors").read_bytes()
    selected = checkpoints.resolve(run)
    assert kept(run) == {selected.name}
    assert not {"optimizer.safetensors", "state.json"} & {p.name for p in selected.iterdir()}
    assert checkpoints.load(run).history[-1]["op"] == "train"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    assert "is finished" in good(forks.run(*line)).err
    refused(forks.run(*line, "train.steps=24"), "it cannot be extended")
    assert before == {p: p.stat().st_mtime_ns for p in before}
    good(forks.run(*training(SMOKE, data.text, tmp_path / "next", *STEPS, f"init={run}")))
    with (selected / "model.safetensors").open("r+b") as weights_file:
        weights_file.seek(-1, os.SEEK_END)
        weights_file.write(b"x")
    refused(forks.run(*line), "is damaged", "has no other checkpoint; give overwrite=true")


def test_what_a_run_began_with_may_lose_its_state(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Its weights stay the same, so a run that started from it can continue.

    If dropping the state is interrupted, the small files are gone before the large ones.
    """
    line = training(SMOKE, data.text, tmp_path / "first", *STEPS)
    good(forks.run(*line))
    selected = checkpoints.resolve(tmp_path / "first")
    key = checkpoints.content_key(selected)
    next_line = training(SMOKE, data.text, tmp_path / "next", *STEPS, f"init={tmp_path / 'first'}")
    good(forks.run(*next_line))
    good(forks.run(*line, "train.keep_state=false"))
    assert checkpoints.content_key(selected) == key
    good(forks.run(*next_line, "train.steps=18"))
    # killed between the two files
    shutil.copy(selected / "config.json", selected / "optimizer.safetensors")
    refused(forks.run(*line, "train.steps=18"), "it cannot be extended")
    assert "is finished" in good(forks.run(*line, "train.keep_state=false")).err
    assert not (selected / "optimizer.safetensors").exists()


def test_a_full_disk_costs_a_line_and_nothing_else(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """The disk is full at steps 6 and 9, of which 6 is the best. The run goes on, and selects
    another step as the best. The first failure and the next success are printed once each.
    """
    runs = [tmp_path / "straight", tmp_path / "full"]
    wanted = [*STEPS, "train.select=best", "train.validate_every=6"]
    lines = [training(SMOKE, data.text, run, *wanted) for run in runs]
    good(forks.run(*lines[0]))
    full = FULL.format(steps=["step_6", "step_9"])
    done = good(forks.run(*lines[1], before=full))
    said = [line for line in done.err.splitlines() if "No space left on device" in line]
    assert said == [
        f"No space left on device: {runs[1] / 'checkpoints/step_6'}; the checkpoint of step 6 "
        "was not written; older ones are kept, and the run continues; no checkpoint becomes the "
        "best until one can be written"
    ]
    told = [line for line in done.err.splitlines() if "checkpoint" in line and line not in said]
    assert told == ["the checkpoint of step 12 is now written"]
    assert "step_6 is missing" not in done.err
    assert kept(runs[1]) == {"step_12", "step_15"}
    for name in ("model", "optimizer"):
        a, b = ((run / f"checkpoints/step_15/{name}.safetensors").read_bytes() for run in runs)
        assert a == b
    assert [r for r in log(runs[1]) if r["event"] == "train"][-1]["step"] == 15


def test_the_last_checkpoint_must_be_written(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", *STEPS)
    done = forks.run(*line, before=FULL.format(steps=["step_15"]))
    assert done.status == 1
    last = done.err.splitlines()[-1]
    assert "the checkpoint of step 15 was not written; older ones are kept" in last
    assert kept(tmp_path / "run") == {"step_9", "step_12"}
    stop = AT_STEP.format(step=13, signal="SIGTERM", ranks="0")
    done = forks.run(*line, before=FULL.format(steps=["step_14"]) + stop)
    assert done.status == 1
    assert "the checkpoint of step 14 was not written" in done.err.splitlines()[-1]
    good(forks.run(*line))


def test_a_writer_tries_again_until_newer_work_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xformer.writer.PAUSES", (0.0, 0.01, 60.0))
    said: list[str] = []
    tries = {"first": 0, "second": 0}
    gone_on = threading.Event()

    def work(name: str, failures: int) -> None:
        tries[name] += 1
        if tries[name] <= failures:
            raise OSError(errno.EIO, "Input/output error")
        if name == "second":
            assert gone_on.wait(60)

    with BackgroundWriter(said.append) as writer:
        writer.start("first", lambda: work("first", 2))
        assert writer.task is not None
        writer.task.result(60)
        first = (
            "Input/output error; the first was not written; older ones are kept, and the run "
            "continues; no checkpoint becomes the best until one can be written"
        )
        assert said == [first, "the first is now written"]
        writer.start("second", lambda: work("second", 0))
        assert not writer.task.done()  # starting it did not wait for its end
        gone_on.set()
        # fails; the pause before the next attempt is a minute
        writer.start("third", lambda: work("first", 10**6))
    assert tries["second"] == 1
    assert len(said) == 3
    # many failures print one line, and the success prints one
    with BackgroundWriter(said.append) as writer:
        for _ in range(5):
            writer.start("checkpoint", lambda: work("first", 10**6))
        with pytest.raises(
            Failure, match="Input/output error; the last was not written; older ones are kept"
        ):
            writer.now("last", lambda: work("first", 10**6))
        writer.now("last", lambda: None)
        writer.now("last", lambda: None)
    assert [line.partition(";")[0] for line in said[3:]] == [
        "Input/output error",
        "the last is now written",
    ]
    with pytest.raises(ZeroDivisionError), BackgroundWriter(said.append) as writer:
        writer.start("a mistake of ours", lambda: print(1 // 0))


def test_steps_go_on_while_a_checkpoint_is_written(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """Writing step 3 lasts until step 5 is made. What is written is still the state of step 3."""
    slow = """
import threading
from xformer import checkpoint
from xformer.monitor import Monitor
save, advance, reached = checkpoint.save, Monitor.advance, threading.Event()
def late(made, path, *rest):
    assert path.name != "step_3" or reached.wait(60)
    save(made, path, *rest)
def watched(self, done):
    advance(self, done)
    if done == 5:
        reached.set()
checkpoint.save, Monitor.advance = late, watched
"""
    runs = [tmp_path / "straight", tmp_path / "slow"]
    keep = ["train.keep_last=9"]
    lines = [training(SMOKE, data.text, run, *STEPS, *keep) for run in runs]
    good(forks.run(*lines[0]))
    good(forks.run(*lines[1], before=slow))
    same(runs[1], runs[0])
    assert kept(runs[1]) == kept(runs[0]) == {f"step_{step}" for step in (3, 6, 9, 12, 15)}


# ----------------------------------------------------------------------------------- elastic


def test_a_run_may_change_its_processes_and_micro_batches(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """Without dropout, a run that is continued on 1, 2 and 1 processes with 1, 1 and 4
    micro-batches equals one process with 1, up to rounding.

    2 processes equal 2 micro-batches bit for bit, because both add the same two halves.
    """
    plain = [*STEPS, *NO_DROPOUT, "train.log_every=1"]
    names = ("one", "elastic", "ranks", "batches")
    lines = {name: training(SMOKE, data.text, tmp_path / name, *plain) for name in names}
    good(forks.run(*lines["one"]))
    for step, ranks, batches in ((4, 1, 1), (9, 2, 1), (0, 1, 4)):
        stop = AT_STEP.format(step=step, signal="SIGTERM", ranks="0")
        done = forks.run(*lines["elastic"], f"batch.accumulate={batches}", ranks=ranks, before=stop)
        assert done.status == (128 + 15 if step else 0), done.err
    for one, other in zip(log(tmp_path / "one"), log(tmp_path / "elastic"), strict=True):
        for key in ("loss", "grad_norm", "lr", "accuracy", "epoch"):
            assert other.get(key, 0) == pytest.approx(one.get(key, 0), rel=1e-5), key
    drawn_once(tmp_path / "elastic")
    going = [
        forks.start(*lines["ranks"], ranks=2),
        forks.start(*lines["batches"], "batch.accumulate=2"),
    ]
    for fork in going:
        good(fork.wait())
    runs = [tmp_path / "ranks", tmp_path / "batches"]
    for name in ("model", "optimizer"):
        a, b = ((run / f"checkpoints/step_15/{name}.safetensors").read_bytes() for run in runs)
        assert a == b, name
    steps = [
        [(e["loss"], e["grad_norm"]) for e in log(run) if e["event"] == "train"] for run in runs
    ]
    assert steps[0] == steps[1]  # validation losses may differ: their batches are cut differently


# -------------------------------------------------------------------------------- restarts


def test_a_late_rank_of_a_restart_is_waited_for(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A restart by torchrun does not hang, although torchrun's store still has the addresses of
    dead ranks.
    """
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    start = f"import os, time\nos.environ.update({given})\n"
    line = training(SMOKE, data.text, tmp_path / "run", *STEPS)
    for late, step in (("none", 1), ("0", 2), ("1", 0)):
        wait = f'if os.environ["RANK"] == "{late}":\n    time.sleep(0.5)\n'
        killed = AT_STEP.format(step=step, signal="SIGKILL", ranks="01") if step else ""
        done = forks.run(*line, ranks=2, before=start + wait + killed)
        assert done.status == (-signal.SIGKILL if step else 0), done.err


# ------------------------------------------------------------------------------ origin, repeat


@pytest.mark.slow
def test_a_run_says_what_it_was_made_with_and_is_made_again(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """A run on 2 processes with dropout is repeated. Then come a run whose log has one digit
    changed and one that was made with other versions.
    """
    run = tmp_path / "run"
    going = forks.start(*training(SMOKE, data.text, run, *STEPS), ranks=2)
    good(forks.run(*training(SMOKE, data.text, tmp_path / "other", *STEPS)))
    good(going.wait())
    verify = ("-m", "xformer.study", "verify")
    content = read_json(run / "config.json")
    made = content["environment"]
    assert made["torch"] == torch.__version__
    assert made["world_size"] == 2
    assert made["git"] == provenance.revision()
    assert (run / "code.diff").is_file() == made["git"].endswith("+")
    done = good(forks.run(*verify, run, "steps=6"))
    assert (
        done.out == f"{run}: 6 steps made again, 3 records of its log the same with the same "
        "versions\n"
    )

    run = tmp_path / "other"
    content = read_json(run / "config.json")
    made = content["environment"]
    text = (run / "log.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert (records[2]["event"], records[2]["step"]) == ("train", 6)
    loss = records[2]["loss"]
    records[2]["loss"] = loss + 1e-12
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made["numpy"] = content["starts"][0]["environment"]["numpy"] = "1.0"
    (run / RUN_MANIFEST).unlink()  # as of a run that an earlier version finished
    write_json(run / "config.json", content)
    changed = f"train at step 6: loss {loss + 1e-12} is now {loss}"
    refused(forks.run(*verify, run, "steps=6"), changed, "numpy 1.0 -> ", status=1)
    refused(forks.run(*verify, data.text), "is not a run")


@pytest.mark.slow
def test_a_run_that_starts_from_a_checkpoint_is_made_again(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """Beside `init`, config.json lists the default shape. The checkpoint has another shape."""
    text, run = tmp_path / "text", tmp_path / "next"
    good(forks.run(*training(SMOKE, data.text, text, *STEPS, "model.dropout=0.3")))
    line = ["train.py", CLASSIFY, f"data={data.classes}", f"run={run}", f"init={text}"]
    good(forks.run(*line, "batch.max_tokens=64", "train.log_every=2"))
    done = good(forks.run("-m", "xformer.study", "verify", run, "steps=6"))
    assert "6 steps made again" in done.out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_runs_on_cuda_are_bit_identical_where_that_is_asked_for(
    precision: str, data: Toys, tmp_path: Path
) -> None:
    runs = tmp_path / "one", tmp_path / "two"
    asked = ["system.deterministic=true", f"system.precision={precision}"]
    for run in runs:  # new processes, because CUDA does not survive a fork
        good(command(*training(SMOKE, data.text, run, *STEPS, *asked)))
    same(*runs)


# Python that makes this process seem to run elsewhere
ELSEWHERE = """
import os
from xformer import provenance
from xformer.ops import native
if os.environ.get("RANK", "0") in {ranks!r}:
    versions = provenance.versions()
    provenance.versions = lambda: {{**versions, **{versions!r}}}
    native.cpu_kernels = lambda: {kernels!r}
    provenance.processor_model = lambda: "Abacus 3"
"""


def test_a_start_that_differs_says_so(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """It may differ in versions, kernels, processor, threads or precision.

    It is compared with the start that made the checkpoint, even if a start in between was killed
    before it made one.
    """
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *STEPS)
    elsewhere = ELSEWHERE.format(ranks="0", versions={"torch": "2.11.0"}, kernels="native old")

    def stopped(step: int, *more: str, before: str = "", number: str = "SIGTERM") -> list[str]:
        stop = AT_STEP.format(step=step, signal=number, ranks="0")
        done = forks.run(*line, *more, before=before + stop)
        assert done.status in (128 + signal.SIGTERM, -signal.SIGKILL), done
        return [text for text in done.err.splitlines() if text.startswith("since the last start")]

    assert stopped(2, before=elsewhere) == []
    assert stopped(4, before=elsewhere) == []
    for number, steps in (("SIGKILL", 6), ("SIGTERM", 7)):
        (said,) = stopped(steps, "system.threads=2", "system.precision=bf16", number=number)
        assert f"torch 2.11.0 -> {torch.__version__}, " in said
        assert ", native old -> native kernels " in said or ", native old -> torch" in said
        assert "processor Abacus 3 -> " in said
        assert (
            "threads 1 -> 2, system.precision fp32 -> bf16; results may not be bit-identical"
            in said
        )
    content = read_json(run / "config.json")
    for start in (content, *content["starts"]):
        del start["environment"]["kernels"], start["environment"]["processor"]
    write_json(run / "config.json", content)  # as an earlier version wrote it
    (said,) = stopped(10, "batch.accumulate=2")
    assert said == (
        "since the last start: threads 2 -> 1, system.precision bf16 -> fp32, "
        "batch.accumulate 1 -> 2; results may not be bit-identical to those of an uninterrupted run"
    )
    done = good(forks.run(*line, "batch.accumulate=2"))
    assert "since the last start" not in done.err


@pytest.mark.parametrize("what", ["torch", "xformer", "kernels"])
@pytest.mark.parametrize("door", ["train.py", "evaluate.py"])
def test_ranks_that_differ_are_refused(
    door: str, what: str, forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    versions = {what: "9.9"} if what != "kernels" else {}
    kernels = "other kernels" if what == "kernels" else native.cpu_kernels()
    other = ELSEWHERE.format(ranks="12", versions=versions, kernels=kernels)
    line = training(SMOKE, data.text, tmp_path / "run", *STEPS)
    line = line if door == "train.py" else [door, str(learned["text"]), f"data={data.text}"]
    done = forks.run(*line, ranks=3, before=other)
    value = "other kernels" if what == "kernels" else "9.9"
    refused(done, f"the ranks differ in {what}: ", " on rank 0, ", f"{value} on ranks 1, 2")
    assert not (tmp_path / "run").exists()


def test_ranks_that_read_other_data_are_refused(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Such as nodes with a directory of the same name on their own disks."""
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    (tmp_path / "0/store").symlink_to(data.text)
    (tmp_path / "1/store").symlink_to(data.pairs)
    run = tmp_path / "run"
    line = training("pretrain/smoke", "store", run, *STEPS)
    apart = f"import os; os.chdir(os.path.join({str(tmp_path)!r}, os.environ['RANK']))"
    done = forks.run(*line, ranks=2, before=apart)
    refused(
        done, "the ranks differ in the content of data: ", " on rank 0, ", " on rank 1; use the"
    )
    assert not run.exists()


def test_a_restart_by_torchrun_does_not_overwrite_again(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """The first start deletes the old run, and a later one continues what the first has begun."""
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *STEPS, "train.checkpoint_every=2", "overwrite=true")
    good(forks.run(*line))
    agent = "import os; os.environ['TORCHELASTIC_RESTART_COUNT'] = '0'; os.getppid = lambda: {}\n"
    again = agent.format(1234)  # the process number of torchrun
    stop = AT_STEP.format(step=4, signal="SIGTERM", ranks="0")
    stopped = forks.run(*line, before=again + stop)  # the run there is an old one
    assert stopped.err.splitlines()[-1] == (
        f"stopped at step 5; the same command without overwrite=true continues {run}"
    )
    done = good(forks.run(*line, before=again))
    assert done.err.startswith(f"continuing {run} from step 5\n")
    assert "is finished" in good(forks.run(*line, before=again)).err
    done = good(forks.run(*line, before=agent.format(4321)))  # another torchrun starts anew
    assert "continuing" not in done.err
    assert "is finished" not in done.err


def test_a_store_with_another_metric_is_noticed(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The metric of a store is not part of its content, but selects the best checkpoint."""
    run = tmp_path / "run"
    store = tmp_path / "store"
    raw = ["preprocess.py", "task", "tsv", "--input", str(data.raw / "classes"), "--text", "text"]
    raw += ["--label", "label", "--tokenizer", str(data.tokenizer), "--output", str(store)]
    line = training(CLASSIFY, store, run, "train.epochs=1")
    good(forks.run(*raw, "--metric", "accuracy"))
    good(forks.run(*line))
    good(forks.run(*raw, "--metric", "f1", "--overwrite"))
    refused(
        forks.run(*line),
        "selects its checkpoints by accuracy, but the metric of the store is now f1; give another ",
        "run=, or make the store again with --metric accuracy",
    )
    good(forks.run(*raw, "--metric", "accuracy", "--overwrite"))
    good(forks.run(*line))


def test_changed_steps_of_an_unfinished_run_are_said(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """The message gives the old and the new learning rate, by steps and by epochs.

    It also comes if the start that raised the number of steps was killed before it made a
    checkpoint.
    """
    for name, unit, recipe, store in (
        ("steps", 1, SMOKE, data.text),
        ("epochs", 8, CLASSIFY, data.classes),
    ):
        run = tmp_path / name
        more = ["optim.warmup=0", "optim.schedule=linear", "train.checkpoint_every=4"]
        more += ["train.steps=0", "train.epochs=0.5"] if name == "epochs" else []
        line = training(recipe, store, run, *STEPS, *more)
        before = "0.5" if name == "epochs" else "15"
        after = "2.0" if name == "epochs" else "30"
        share = 4 * unit / (150 if name == "epochs" else 15)
        shares = share, share / (4 if name == "epochs" else 2)
        old, new = (f"{1e-3 * (1 - share):.3g}" for share in shares)
        stop = AT_STEP.format(step=5 * unit, signal="SIGKILL", ranks="0")
        assert forks.run(*line, before=stop).status == -signal.SIGKILL
        for step in (6, 7, 0):
            stop = AT_STEP.format(step=step * unit, signal="SIGKILL", ranks="0")
            done = forks.run(*line, f"train.{name}={after}", before=stop)
            assert done.status == (-signal.SIGKILL if step else 0), done
            said = [text for text in done.err.splitlines() if f"train.{name} was" in text]
            assert len(said) == 1, done.err
            assert said[0].startswith(f"train.{name} was {before} and is now {after}: ")
            assert said[0].endswith(f"the learning rate changes from {old} to {new}")


def _revision() -> str:
    """The revision now, not that of the first call."""
    return provenance.revision.__wrapped__()


def test_where_git_is_absent_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert _revision() == "no git checkout"
    assert provenance.diff(_revision()) == ""
    if shutil.which("git"):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        (tmp_path / "a.py").write_text("one\n")
        (tmp_path / "scores.csv").write_text("1\n")
        for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "one"]):
            subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
        revision = _revision()
        assert len(revision) == 40
        (tmp_path / "scores.csv").write_text("2\n")  # results are not code
        (tmp_path / "new.zip").touch()
        assert _revision() == revision
        (tmp_path / "a.py").write_text("two; $(touch x)\n")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/new.py").touch()
        assert _revision() == f"{revision}+"
        diff = provenance.diff.__wrapped__(f"{revision}+")
        assert "?? folder/" in diff
        assert "new.zip" not in diff
        assert "scores.csv" not in diff
        assert "-one\n+two; $(touch x)" in diff
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _revision() == "git is not installed"


def test_jobs_of_a_study_record_the_code_that_the_study_loaded(tmp_path: Path) -> None:
    """Their server remembers the revision, so that the checkout may change while a study runs."""
    out = tmp_path / "out"
    code = (
        "import os\n"
        "from multiprocessing import get_context\n"
        "from xformer.study import local\n"
        "local._start_server(dict(os.environ))\n"
        "job = 'from xformer import provenance as p\\n'\n"
        f"job += \"open({str(out)!r}, 'w').write(str(p.revision.cache_info().currsize))\"\n"
        "process = get_context('forkserver').Process(target=exec, args=(job,))\n"
        "process.start()\n"
        "process.join()\n"
    )
    good(command("-c", code))
    assert out.read_text() == "1"


def test_a_log_that_was_cut_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    whole = '{"event": "train", "step": 1, "loss": 0.1}\n'
    (tmp_path / "log.jsonl").write_bytes(whole.encode() + b'{"event": "train", "st\xc3')
    assert records(tmp_path) == [{"event": "train", "step": 1, "loss": 0.1}]
    cut_log(tmp_path, 1)
    assert (tmp_path / "log.jsonl").read_text() == whole


# ------------------------------------------------------------------------- damage of a run's files


def test_damaged_lines_of_the_log_are_kept_aside(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Damaged lines up to the checkpoint are kept aside. The rest of the log is that of a run that
    never stopped.
    """
    runs = [tmp_path / "straight", tmp_path / "run"]
    lines = [training(SMOKE, data.text, run, *STEPS) for run in runs]
    path = runs[1] / "log.jsonl"
    good(forks.run(*lines[0]))
    stop = AT_STEP.format(step=11, signal="SIGKILL", ranks="0")
    forks.run(*lines[1], before=stop)
    whole = path.read_bytes().splitlines(keepends=True)
    asides = []
    for number, bad in enumerate((b"\xff\x00{", b'{"event": "train"}', b"[]"), 1):
        actual = path.read_bytes().splitlines(keepends=True)
        actual[1], actual[2] = bad + b"\n", b"{" + actual[2]
        path.write_bytes(b"".join([*actual, b"no event\n", b'{"torn']))
        asides.append(path.read_bytes())
        again = AT_STEP.format(step=10, signal="SIGKILL", ranks="0")
        done = forks.run(*lines[1], before=again)
        name = "log.jsonl.damaged" if number == 1 else f"log.jsonl.damaged.{number}"
        said = f"{path} is damaged: lines 2, 3, 5 cannot be read and are left out; "
        said += f"the damaged log is kept as {name}"
        assert [text for text in done.err.splitlines() if "is damaged" in text] == [said]
        assert (runs[1] / name).read_bytes() == asides[-1]
        path.write_bytes(b"".join(whole))
    assert (runs[1] / "log.jsonl.damaged").read_bytes() == asides[0]  # nothing is overwritten
    # a kill leaves such a line, so no message is printed
    path.write_bytes(b"".join(whole) + b'{"torn')
    done = good(forks.run(*lines[1]))
    assert "is damaged" not in done.err
    assert len(list(runs[1].glob("log.jsonl.damaged*"))) == 3
    same(runs[1], runs[0])
    good(forks.run(*lines[1], "overwrite=true"))
    assert not list(runs[1].glob("log.jsonl.damaged*"))


def test_what_of_a_log_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    events = [f'{{"event": "train", "step": {step}}}\n' for step in (3, 6, 9)]
    for content, step, lines in (
        ("".join(events), 6, ""),
        ("".join(events) + "torn", 9, ""),
        (events[0] + "x\n" + events[2], 9, "line 2"),
        # the damaged line may have been the one of step 6
        (events[0] + "x\n" + events[2], 6, "line 2"),
        (events[0] + events[2] + "x\n", 6, ""),  # the run makes all of that again
        (events[0] + "x\n", 6, "line 2"),
        ("x\n" * 12 + events[1], 6, "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more"),
        ("x\n" + events[0], -1, "line 1"),
        ("", 6, ""),
    ):
        for aside in tmp_path.glob("*.damaged*"):
            aside.unlink()
        path.write_text(content)
        said = cut_log(tmp_path, step)
        assert (f": {lines} cannot be read" in said) if lines else said == "", content
        assert (tmp_path / "log.jsonl.damaged").exists() == bool(lines)
    path.write_text("x\n")
    cut_log(tmp_path, 1)
    path.write_text("x\n")  # as if killed before the log was cut: the same damage is kept once
    cut_log(tmp_path, 1)
    assert len(list(tmp_path.glob("*.damaged*"))) == 1
    path.write_text("y\n")
    cut_log(tmp_path, 1)
    assert len(list(tmp_path.glob("*.damaged*"))) == 2


def test_a_changed_byte_of_a_finished_run_is_noticed(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """A change in result.json or config.json is noticed by every command that reads them. Runs
    without a manifest can still be read.
    """
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *STEPS)
    good(forks.run(*line))
    readers: dict[str, list[list[str | Path]]] = {
        "result.json": [
            [*line],
            [*line, "train.steps=18"],
            ["evaluate.py", run, f"data={data.text}"],
            [*training(SMOKE, data.text, tmp_path / "next", f"init={run}")],
            ["-m", "xformer.convert", "inspect", run],
        ],
        "config.json": [[*line], [*line, "train.steps=18"], ["-m", "xformer.study", "verify", run]],
    }
    for name, commands in readers.items():
        content = (run / name).read_bytes()
        place = content.index(b"0.") + 2  # the first decimal digit, so that it stays valid JSON
        changed = bytearray(content)
        changed[place] = ord("1") + (changed[place] == ord("1"))
        (run / name).write_bytes(changed)
        for words in commands:
            refused(forks.run(*words), f"{run / name} is damaged: its checksum is not")
        (run / name).write_bytes(content)
    manifest = (run / RUN_MANIFEST).read_text()
    (run / RUN_MANIFEST).write_text("{}\n")
    refused(forks.run(*line), f"{run / RUN_MANIFEST} is damaged")
    (run / RUN_MANIFEST).write_text(manifest)
    (run / "result.json").unlink()  # the remedy that the message gives
    good(forks.run(*line))
    (run / RUN_MANIFEST).unlink()  # as of an earlier version
    assert "is finished" in good(forks.run(*line)).err
    good(forks.run("evaluate.py", run, f"data={data.text}"))
    good(forks.run(*line, "train.steps=18"))
    assert (run / RUN_MANIFEST).is_file()
    assert "is finished" in good(forks.run(*line, "train.steps=18")).err


@pytest.mark.slow
def test_a_study_notices_a_changed_result(forks: Forks, data: Toys, tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY.format(recipe=Path(SMOKE).resolve(), data=data.text))
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        study,
        "scale=mini",
        f"output={tmp_path / 'out'}",
        "jobs=1",
    ]
    good(forks.run(*line))
    (result,) = (tmp_path / "out/runs").glob("*/result.json")
    result.write_bytes(result.read_bytes().replace(b"accuracy", b"accurate"))
    refused(forks.run(*line), f"{result} is damaged: its checksum is not")


STUDY = """
title = "t"
question = "?"
paper = "p"
[stages.a]
recipe = "{recipe}"
vary.seed = [0]
[stages.a.settings]
data = "{data}"
model = {{ layers = 1, hidden = 32, heads = 2, intermediate = 64, max_positions = 64 }}
batch = {{ rows = 8, max_tokens = 20 }}
train = {{ steps = 2 }}
[scales.mini]
"""


def test_a_watch_that_is_closed_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would abort if a thread were inside a call of the store while it exits."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(watch.Watch, "_meet", lambda self, device: store)
    monkeypatch.setattr(watch, "BEAT", 0.001)  # so it is almost always inside a call
    for _ in range(20):
        one = watch.Watch(0, 2, torch.device("cpu"))
        one.close()
        assert not any(thread.is_alive() for thread in one.threads)
    assert store.get("0") == watch.ENDED.encode()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_fails_does_not_leave_a_group_of_nccl(
    monkeypatch: pytest.MonkeyPatch, backend: str, fails: bool
) -> None:
    """NCCL's ranks leave it together, so it would wait for the others, and these for it. They end
    when they no longer hear of it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(watch.Watch, "_meet", lambda self, device: store)
    monkeypatch.setattr(processes, "_watches", [watch.Watch(0, 2, torch.device("cpu"))])
    left: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(backend))
    with pytest.raises(Failure) if fails else nullcontext(), processes.group():
        if fails:
            raise Failure("the disk is full")
    stays = fails and backend == "nccl"
    assert left == ([] if stays else [backend])
    assert store.check(["0"]) is not stays  # it says that it ended only if it left
