"""Run the project's commands in tests: as a user types them, or as forks of one process that has
already imported the package.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xformer.tasks.task import Task

ROOT = Path(__file__).parents[1]
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # tests share two cores
# seconds until a command that hangs is ended
PATIENCE = int(os.environ.get("PATIENCE", "240"))

SMOKE, CLASSIFY, REGRESS = (
    f"recipes/{name}.toml" for name in ("pretrain/smoke", "finetune/classify", "finetune/regress")
)
TINY = [
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.intermediate=64",
    "model.max_positions=64",
    "batch.rows=8",
    "batch.max_tokens=20",
    "system.threads=1",
    "system.precision=fp32",  # the same numbers on every machine
    "optim.lr=1e-3",
]
NO_DROPOUT = ["model.dropout=0", "model.attention_dropout=0"]


@cache
def script(name: str) -> ModuleType:
    """A Python file of docs/ as a module."""
    spec = spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def task(kind: str, outputs: int = 0, pair_scale: float = 0.0, **more: Any) -> Task:
    """The task of a head, with a class name for each output; `more` are other fields of Head."""
    from xformer.tasks.known import task_of
    from xformer.tasks.task import Head

    labels = tuple(f"class {i}" for i in range(outputs))
    return task_of(Head(kind, labels, pair_scale=pair_scale, **more))


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status (-9 after SIGKILL) and its output."""

    status: int
    out: str
    err: str


def training(recipe: str, data: str | Path, run: Path, *overrides: str) -> list[str]:
    """The arguments of a training command with a tiny model."""
    return ["train.py", recipe, f"data={data}", f"run={run}", *TINY, *overrides]


def good(done: Done) -> Done:
    """Assert that the command succeeded, and return it."""
    assert done.status == 0, done.err
    return done


def refused(done: Done, *words: str, status: int = 2) -> None:
    """Assert that a command ended with a single line that contains `words`."""
    lines = done.err.splitlines()
    assert (done.status, len(lines)) == (status, 1), done
    assert lines[0].startswith("error: "), done
    for word in words:
        assert word in lines[0], (word, lines[0])


def kept_as_scored(run: Path) -> None:
    """Check the predictions that a finished run keeps for each split that it scored.

    They must give the scores of the run. Those of the split 'valid' must also be the scores in the
    log, from the validation of the selected checkpoint.
    """
    from xformer.predictions import read

    result = json.loads((run / "result.json").read_text())
    files = {path.stem: path for path in (run / "predictions").iterdir()}
    assert files.keys() == result["metrics"].keys()
    for split, path in files.items():
        assert read(path).split == split
        assert read(path).metrics() == result["metrics"][split]
        resamples_as_scored(read(path))
    step = int(result["selected"].partition("step_")[2])
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    events = [e for e in lines if e["event"] == "validation" and e["step"] == step]
    assert result["metrics"]["valid"].items() <= events[-1].items()


def resamples_as_scored(predictions: Any) -> None:
    """Check the metrics that can be resampled: if each example counts once, they must equal the
    scores."""
    without = ("loss", "perplexity", "entity_f1", "pair_", "best_", "answerable_", "unanswerable_")
    weighted = predictions.task.weighted(predictions)
    for name, score in predictions.metrics().items():
        assert name in weighted or name.startswith(without), name
        if name in weighted:
            assert abs(weighted[name].value - score) < 1e-6, name


def command(*arguments: str | Path, ranks: int = 1, cwd: Path = ROOT) -> Done:
    """Run `python ARGUMENTS` as a user types it, or `torchrun ARGUMENTS` if `ranks` is above 1."""
    ended = start(*arguments, ranks=ranks, cwd=cwd)
    out, err = ended.communicate(timeout=PATIENCE)
    return Done(ended.returncode, out, err)


def start(*arguments: str | Path, ranks: int = 1, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """Like `command`, but do not wait for the end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    line = [sys.executable, *(launcher if ranks > 1 else []), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        line, cwd=cwd, env={**os.environ, **QUIET}, text=True, stdout=pipe, stderr=pipe
    )


class Forks:
    """Starts commands as forks of one process, so that they need not import the package again.

    A fork runs the same main function as the command. With several `ranks`, each fork gets the
    environment that torchrun would give it. Use it as a context manager.
    """

    def __init__(self, directory: Path):
        self.directory, self.started = directory, 0

    def __enter__(self) -> Forks:
        line = [sys.executable, __file__]
        pipe = subprocess.PIPE
        environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
        self.server = subprocess.Popen(
            line, cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=pipe
        )
        assert self._ask(None) == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.kill()
        self.server.communicate()

    def start(self, *arguments: str | Path, ranks: int = 1, before: str = "") -> Fork:
        """Start `train.py ...`, `-m xformer.study ...` or another command that the server knows.

        `before` is Python code that the fork runs first.
        """
        port = _free_port()
        pids, files = [], []
        for rank in range(ranks):
            self.started += 1
            outputs = [str(self.directory / f"{self.started}.{kind}") for kind in ("out", "err")]
            for file in outputs:
                Path(file).touch()  # the command may be killed before it opens them
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            request = {
                "arguments": [str(a) for a in arguments],
                "outputs": outputs,
                "environment": environment if ranks > 1 else {},
                "before": before,
            }
            pids.append(self._ask(request))
            files.append(outputs)
        return Fork(self, pids, files)

    def run(self, *arguments: str | Path, ranks: int = 1, before: str = "") -> Done:
        """Start a command, wait for it, and return what rank 0 printed."""
        return self.start(*arguments, ranks=ranks, before=before).wait()

    def _ask(self, request: Any) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        if request is not None:
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())


@dataclass(frozen=True)
class Fork:
    """A running command, with one process for each rank."""

    forks: Forks
    pids: list[int]
    outputs: list[list[str]]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every rank."""
        for pid in self.pids:
            os.kill(pid, number)

    def wait(self) -> Done:
        """Wait for all ranks. The status is the first one that is not 0; the output is that of rank
        0.
        """
        ends = [self.forks._ask({"wait": pid}) for pid in self.pids]
        out, err = (Path(file).read_text(encoding="utf-8") for file in self.outputs[0])
        return Done(next((status for status in ends if status), 0), out, err)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def serve() -> None:
    """Fork a process for each request line, or wait for one."""
    from xformer import evaluate, train
    from xformer.preprocess import cli
    from xformer.preprocess.tasks.predict import write_rows

    for late in (
        "tensorboard.compat.proto.event_pb2",
        "tensorboard.summary.writer.record_writer",
        "torch._dynamo",
    ):
        import_module(late)
    mains = {
        "train.py": train.main,
        "evaluate.py": partial(evaluate.main, write_rows),
        "preprocess.py": cli.main,
    }
    for name in ("xformer.convert", "xformer.study", "xformer.surgery"):
        mains[f"-m {name}"] = import_module(f"{name}.__main__").main
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _become(request, mains)
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any], mains: dict[str, Any]) -> None:
    """Become the requested command. It never returns."""
    from xformer import start as starting

    status = 1
    try:
        signal.alarm(PATIENCE)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(request["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        os.environ.update(request["environment"])
        words = 2 if request["arguments"][0] == "-m" else 1
        sys.argv = request["arguments"][words - 1 :]
        exec(request["before"], {})
        starting.run(mains[" ".join(request["arguments"][:words])])
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
