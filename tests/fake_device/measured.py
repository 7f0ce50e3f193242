"""The training step that `python -m xformer.analysis cost` times, to find where the host waits.

    benchmarks.fake_cuda.start("fake_device.measured", FOLDER)

prints the operations at which the host would wait for a fake device, as a line of JSON.
"""

from __future__ import annotations

import json

from benchmarks import fake_cuda
from benchmarks.steps import CASES
from xformer.analysis.cost import CostConfig, training_step


def main() -> None:
    """Print the line."""
    with fake_cuda.device():
        case, config = CASES["mlm, fp32"], CostConfig(out="x")
        trainer, (batch,) = case.trainer(), case.batches()
        with fake_cuda.Recorder() as seen:
            training_step(trainer.model.model, batch, config, trainer.ranks, trainer.optimizer)
    print(json.dumps(["a step", seen.waits]))


if __name__ == "__main__":
    main()
