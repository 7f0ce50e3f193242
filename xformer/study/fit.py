"""Whether each run of a plan can use what it reads, before anything is made or run.

The rules are those that training, evaluation and the analyses hold to when they start.
"""

from __future__ import annotations

from collections.abc import Sequence

from xformer import checkpoint as checkpoints
from xformer.analysis.examples import check_length
from xformer.config import parse_overrides, validate
from xformer.data import mapping
from xformer.data.errors import BadInput
from xformer.evaluate import EvaluateConfig
from xformer.model.config import ModelConfig
from xformer.prepare import check_data, check_model
from xformer.recipe import Recipe
from xformer.scoring import check_kind
from xformer.study.plan import Plan, Work
from xformer.study.shapes import Shapes
from xformer.study.stores import Stored, Stores, Words
from xformer.surgery.words import check_source, check_width
from xformer.tasks.known import TASKS


def unchecked(works: Sequence[Work], shapes: Shapes) -> int:
    """How many of the works are runs from a model that is not there, so that it is not known what
    it takes."""
    return sum(work.recipe is not None and shapes.start(work) is None for work in works)


def check_plan(plan: Plan, shapes: Shapes) -> None:
    """Raise BadInput naming the first run whose rows, vocabulary, kind of store or head do not fit
    the model that it starts from. What is not known yet is not judged (see `unchecked`)."""
    fit = Fit(plan, shapes)
    for work in plan.works.values():
        try:
            fit.check(work)
        except BadInput as error:
            raise BadInput(f"{plan.study.path}: {work.name}: {error}") from None


class Fit:
    """The works of a plan beside the models and stores that they read."""

    def __init__(self, plan: Plan, shapes: Shapes):
        self.shapes, self.stores = shapes, Stores(plan)
        self._by_path = {str(work.path): work for work in plan.works.values()}

    def check(self, work: Work) -> None:
        """Raise BadInput where a work cannot use what it reads; a finished one could."""
        if work.done:
            return
        if work.recipe is not None:
            self._training(work, validate(Recipe, work.recipe))
        match work.command:
            case ("evaluate.py", source, *settings):
                self._scoring(source, _settings(settings))
            case ("-m", "xformer.analysis", _, *settings):
                self._analysis(settings)

    def _training(self, work: Work, recipe: Recipe) -> None:
        start = self.shapes.start(work)
        store = self.stores.store(recipe.data)
        if start is not None:
            check_model(recipe, start)
        if store.kind is not None:
            known = store.splits if store.splits is not None else ("train", "valid")
            check_data(recipe, store.kind, known, store.name)
        if recipe.init is None:
            if store.words is not None and store.words.size:
                checkpoints.check_vocabulary(recipe.model, store.words.size)
            return
        words = self._surgery(recipe, start)
        shape = self.shapes.of(work)
        pieces = (shape.vocab_size if shape is not None else 0) or words.size
        self._mapping(recipe, store, words, pieces)

    def _mapping(self, recipe: Recipe, store: Stored, own: Words, pieces: int | None) -> None:
        """Raise BadInput where the store's ids, mapped, are not those of the model's tokenizer and
        embeddings."""
        if store.words is None:
            return
        if store.words.is_other(own):
            mapping.check_other(recipe.mapping, store.name)
        mapped = mapping.parse(recipe.mapping)[0] in ("ids", "symbols", "unused")
        if mapped and pieces and store.words.size and store.words.size > pieces:
            raise BadInput(
                f"mapping={recipe.mapping}: {store.name} has {store.words.size} ids, "
                f"the model {pieces} embeddings"
            )

    def _surgery(self, recipe: Recipe, start: ModelConfig | None) -> Words:
        """The model's tokenizer after the operations. Raises BadInput where one cannot be done."""
        assert recipe.init is not None
        words = self.stores.words(recipe.init)
        for operation in recipe.surgery:
            if operation.op == "transplant":
                other = self.shapes.at(operation.arguments["source"])
                if start is not None and other is not None:
                    check_width(operation.arguments["source"], other.width, start.width)
                words = self.stores.words(operation.arguments["source"])
            elif operation.op == "substitute_unused":
                found = self.stores.store(operation.arguments["store"])
                if found.words is not None:
                    check_source(found.name, not found.words.is_other(words))
        return words

    def _scoring(self, source: str, settings: dict[str, str]) -> None:
        """What evaluate.py checks of a run that is planned too."""
        run = self._by_path.get(source)
        if run is None or run.recipe is None or "data" not in settings:
            return
        recipe = validate(Recipe, run.recipe)
        given = parse_overrides(EvaluateConfig, [f"data={settings['data']}"])
        data = validate(EvaluateConfig, given).data
        assert data is not None
        store, trained = self.stores.store(data), self.stores.store(recipe.data)
        if store.kind is not None:
            check_kind(store.kind, TASKS[recipe.head], store.name)
        if "mapping" in settings or store.words is None or trained.words is None:
            return
        if store.words.is_other(trained.words):
            raise BadInput(
                f"{store.name} was made with a different tokenizer from {trained.name}, which the "
                "run is trained on"
            )

    def _analysis(self, arguments: Sequence[str]) -> None:
        """What an analysis checks of the checkpoints that it looks into."""
        most = _settings(arguments).get("max_tokens", "")
        for path in (argument for argument in arguments if "=" not in argument):
            shape = self.shapes.at(path)
            if shape is not None and most.isdigit():
                check_length(int(most), self._name(path), shape.max_positions)

    def _name(self, path: str) -> str:
        return self._by_path[path].name if path in self._by_path else path


def _settings(arguments: Sequence[str]) -> dict[str, str]:
    """The KEY=VALUE among the arguments of a command."""
    return dict(argument.split("=", 1) for argument in arguments if "=" in argument)
