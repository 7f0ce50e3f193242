"""The shapes of the models that a study trains, as far as they are known before it runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from xformer.config import validate
from xformer.convert import hf
from xformer.data.errors import BadInput
from xformer.data.files import read_json, read_run_json
from xformer.model.config import ModelConfig
from xformer.prepare import with_settings
from xformer.recipe import Recipe
from xformer.study.plan import Plan, Work
from xformer.surgery.layers import shape_after
from xformer.surgery.registry import Operation, parse_operation


class Shapes:
    """The shape of the model that each work of a plan makes, after its operations on weights.

    Raises BadInput naming the first run with an operation on a layer or head that its initial
    checkpoint does not have.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.known: dict[str, ModelConfig | None] = {}
        self._by_path = {str(work.path): work for work in plan.works.values()}
        for work in plan.works.values():
            self.of(work)

    def of(self, work: Work) -> ModelConfig | None:
        """The shape that a work ends with; None where it makes no model, or of one not known."""
        if work.key not in self.known:
            try:
                self.known[work.key] = self._of(work)
            except BadInput as error:
                raise BadInput(f"{self.plan.study.path}: {work.name}: {error}") from None
        return self.known[work.key]

    def start(self, work: Work) -> ModelConfig | None:
        """The shape that a run starts from, with its own dropout; None where it is not known."""
        assert work.recipe is not None
        recipe = validate(Recipe, work.recipe)
        if recipe.init is None:
            return recipe.model
        found = self.at(recipe.init)
        return None if found is None else with_settings(found, recipe.model)

    def _of(self, work: Work) -> ModelConfig | None:
        start: ModelConfig | None = None
        operations: tuple[Operation, ...] = ()
        if work.recipe is not None:
            start = self.start(work)
            operations = validate(Recipe, work.recipe).surgery
        match work.command:
            case ("-m", "xformer.convert", "from-hf", source, _):
                start = _read(Path(source), of_hf=True)
            case ("-m", "xformer.surgery", before, out, *given) if out == str(work.path):
                start = self.at(before)
                operations = tuple(
                    parse_operation(text)
                    for option, text in pairwise(("", *given))
                    if not text.startswith("--") and option != "--seed"
                )
        if start is None:
            return None
        start = shape_after(start, operations)
        for operation in operations:
            if operation.op == "transplant":  # the words of another, and their number
                other = self.at(operation.arguments["source"])
                size = 0 if other is None else other.vocab_size
                start = start.model_copy(update={"vocab_size": size})
        return start

    def at(self, path: str) -> ModelConfig | None:
        """The shape of a checkpoint: as it lies there, or as the work that will make it says."""
        found = _read(Path(path))
        if found is None and path in self._by_path:
            return self.of(self._by_path[path])
        return found


def _read(path: Path, of_hf: bool = False) -> ModelConfig | None:
    """The shape in a checkpoint's or run's config.json, or a Hugging Face directory's."""
    try:
        if of_hf:
            return hf.read_shape(path)
        if (path / "result.json").is_file():
            path = path / read_run_json(path / "result.json")["selected"]
        return validate(ModelConfig, read_json(path / "config.json")["model"])
    except (BadInput, KeyError, TypeError, OSError):
        return None  # whoever reads it in earnest will say what is wrong
