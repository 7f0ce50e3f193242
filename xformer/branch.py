"""Branches: a new run that goes on from a checkpoint of another run, with a shorter or longer
schedule.

With optim.schedule=wsd the rate of a step before the decay does not depend on the length of the
run. So one long run is the beginning of many shorter ones, and each of these trains only its own
decay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xformer import checkpoint as checkpoints
from xformer.config import validate
from xformer.data.errors import BadInput
from xformer.data.files import is_run, near, read_run_json
from xformer.recipe import Recipe
from xformer.run import MAY_CHANGE, State, changes, completed, differences
from xformer.setup import Setup

# A branch may differ from the other run in these settings, because they do not change a step before
# the decay.
MAY_CHANGE_IN_BRANCH = MAY_CHANGE | {"train.branch_from", "optim.decay"}
MAY_CHANGE_IN_BRANCH |= {f"train.{n}" for n in ("steps", "epochs", "select", "metric", "patience")}


def check_branch(setup: Setup) -> None:
    """Raise BadInput unless the run can branch from the checkpoint of `train.branch_from`. It can
    if both runs take the same steps up to this checkpoint. Does nothing without
    `train.branch_from`, or if the run has a checkpoint of its own."""
    recipe, given = setup.recipe, f"train.branch_from={setup.recipe.train.branch_from}"
    continues = checkpoints.by_step(Path(recipe.run) / "checkpoints") and not recipe.overwrite
    if not recipe.train.branch_from or continues:
        return
    path = Path(recipe.train.branch_from)
    run = path.absolute().parent.parent
    if not path.exists():
        kept = ", ".join(map(str, checkpoints.by_step(path.parent)))
        hint = f"; that run has the steps {kept}" if kept else near(path)
        raise BadInput(f"{given} does not exist{hint}")
    if not (path / "state.json").is_file() or not is_run(run / "config.json"):
        raise BadInput(
            f"{given} is not a checkpoint with the state of a run: give "
            "RUN/checkpoints/step_N, which train.keep_every keeps"
        )
    if recipe.overwrite and run.resolve() == Path(recipe.run).resolve():
        raise BadInput(f"overwrite=true would delete {given}: give another run=")
    checkpoints.verify(path)
    old = read_run_json(run / "config.json")
    pairs = differences(completed(old["identity"]), setup.identity)
    if others := {name: pair for name, pair in pairs.items() if name not in MAY_CHANGE_IN_BRANCH}:
        what = changes(others, old, {"config": recipe.model_dump(mode="json")})
        raise BadInput(f"{given} was made with other settings: {what}")
    _check_schedule(setup, path, old, given)


def _check_schedule(setup: Setup, path: Path, old: dict[str, Any], given: str) -> None:
    """Raise BadInput unless both runs have the same learning rate at each step up to the checkpoint
    `path`. `old` is the other run's config.json."""
    recipe, state, run = setup.recipe, State.read(path), path.absolute().parent.parent
    if recipe.optim.schedule != "wsd":
        raise BadInput(f"{given}: a branch needs optim.schedule=wsd, also in the run it comes from")
    # The other run's recipe at each of its starts up to the checkpoint: a run may be made longer.
    # What each of these recipes trained must lie before the decay that it planned, too.
    starts = [start for start in old["starts"] if start["step"] < state.step]
    earlier = [
        validate(Recipe, {**start["config"], "data": recipe.data, "model": {}}) for start in starts
    ]
    if bool(earlier[0].train.steps) != bool(recipe.train.steps):
        other, this = ("steps" if each.train.steps else "epochs" for each in (earlier[0], recipe))
        raise BadInput(
            f"{given}: that run counts train.{other}, but this one train.{this}; count both alike "
            "(with train.steps=0 a run counts train.epochs)"
        )
    warmup, end = setup.stable_phase
    if (done := setup.done_at(state.step, state.position)) > end:
        raise BadInput(_in_decay(given, recipe.run))
    untils = [*(_done(setup, start["step"]) for start in starts[1:]), done]
    for their_recipe, until in zip(earlier, untils, strict=True):
        their_warmup, their_end = setup.with_length_of(their_recipe).stable_phase
        if their_warmup != warmup:
            raise BadInput(f"{given} has another warm-up: give optim.warmup in steps, in both runs")
        if until > their_end:
            raise BadInput(_in_decay(given, f"{run} when it had {_length(their_recipe)}"))


def _in_decay(given: str, run: str) -> str:
    return (
        f"{given} lies in or after the decay of {run}: branch from an earlier step, or give other "
        "train.steps or optim.decay"
    )


def _length(recipe: Recipe) -> str:
    """The setting that decides how long a run is."""
    train = recipe.train
    return f"train.steps={train.steps}" if train.steps else f"train.epochs={train.epochs:g}"


def _done(setup: Setup, step: int) -> int:
    """How far the run is after this many steps; see `Setup.done_at`."""
    stream, position = setup.feed().stream, 0
    for _ in range(0 if setup.recipe.train.steps else step):
        position += len(stream.take(position)[0])
    return setup.done_at(step, position)


def forget_validations(state: State) -> None:
    """Forget the best validation and the log of the run that a branch comes from."""
    state.best_step, state.best_scores, state.worse, state.logged = 0, {}, 0, 0
