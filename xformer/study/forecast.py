"""What is known of a plan before it runs: models, stores and tokenizers.

Things that exist on disk are read. The properties of a thing that a command will make are inferred
from the command. A property that is still not known is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xformer import checkpoint as checkpoints
from xformer import evaluate, trajectory
from xformer.analysis import __main__ as analyses
from xformer.analysis.examples import ExamplesConfig, check_length, names_of, parse_layers
from xformer.analysis.subcommand import parse
from xformer.config import each, nearest, validate
from xformer.convert import hf
from xformer.data import mapping
from xformer.data.arguments import CommandParser
from xformer.data.errors import BadInput
from xformer.data.files import installed, read_json, read_run_json
from xformer.data.joined import open_stores
from xformer.data.store import ORDER, no_store
from xformer.data.tokenizers import META, symbols_of
from xformer.model.config import DROPOUT, ModelConfig
from xformer.prepare import check_data, check_model, with_dropout
from xformer.preprocess import cli
from xformer.recipe import Recipe
from xformer.scoring import check_kind
from xformer.study.plan import SCRIPTS, Job, Plan
from xformer.study.spec import ScoreTable, within
from xformer.surgery import layers
from xformer.surgery.__main__ import make_parser as surgery_parser
from xformer.surgery.embeddings import check_source, check_width
from xformer.surgery.registry import Operation, naming, parse_operation
from xformer.tasks.known import TASKS, kind_of
from xformer.tasks.task import HIGHER, Head, Task

# The tasks of `preprocess.py task NAME` that make scores and tags. Those in OPEN make what --kind
# says, squad makes spans, choice makes choices, and all others make classes.
SCORES = ("glue/stsb", "protein/stability", "protein/fluorescence")
TAGS = ("conll", "protein/secondary", "protein/conservation")
OPEN = ("tsv", "dna", "protein")
ALPHABETS = {"dna": "letters", "protein": "letters", "music": "words"}  # of a task's own tokenizer
# what reading a file can raise if it is missing or damaged
UNREADABLE = (BadInput, KeyError, TypeError, ValueError, OSError)
HELP = {"-h", "--help"}
SPECIAL = 5  # tokens that every tokenizer of `preprocess.py tokenizer` has beside its letters


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer. Two with the same `maker` are equal. `size` is the number of its pieces, special
    ones included. `symbols` is that of a Tokenizer, and `learned` says whether `preprocess.py
    tokenizer` trains it."""

    maker: str
    size: int | None = None
    symbols: str | None = None
    learned: bool = False
    fingerprint: str | None = None

    def is_same(self, other: TokenizerFacts) -> bool:
        """Whether the two are known to be equal."""
        return self.fingerprint is not None and self.fingerprint == other.fingerprint

    def is_other(self, than: TokenizerFacts) -> bool:
        """Whether the two are known to be different tokenizers."""
        if self.fingerprint and than.fingerprint:
            return self.fingerprint != than.fingerprint
        if self.maker == than.maker:
            return False
        pairs = ((self.size, than.size), (self.symbols, than.symbols))
        differ = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        return differ or (self.learned and than.learned)


@dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint, a store or a tokenizer that exists or will be made: its name
    in messages, the shape of a model, the kind and splits of a store, and the tokenizer."""

    name: str
    tokenizer: TokenizerFacts
    shape: ModelConfig | None = None
    kind: str | None = None
    sizes: Mapping[str, tuple[int, int]] | None = None  # rows and tokens of each split, once made
    metric: str | None = None  # that the store names


class Forecast:
    """What the jobs of a plan make, and what lies at the paths that they read.

    Raises BadInput naming the first run with an operation on a layer or head that its initial
    checkpoint does not have.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self._by_path = {str(job.path): job for job in plan.jobs.values()}
        self._recipes: dict[str, Recipe] = {}
        self._made: dict[str, Facts] = {}
        self._making = set[str]()  # keys of the jobs asked for, to detect one that reads its output
        self._there: dict[str, Facts] = {}
        self._labelled: set[tuple[Any, ...]] = set()  # splits that can be scored
        for job in plan.jobs.values():
            with within(plan.study.path), within(job.name):
                self.made(job)

    def recipe(self, job: Job) -> Recipe:
        """The recipe of a run, with its defaults."""
        assert job.recipe is not None
        if job.key not in self._recipes:
            self._recipes[job.key] = validate(Recipe, job.recipe)
        return self._recipes[job.key]

    def at(self, path: str) -> Facts:
        """What lies at a path, or what a job will make there."""
        if path not in self._there:
            job = self._maker(path)
            facts = Facts(path, TokenizerFacts(path)) if job is None else self.made(job)
            self._there[path] = _read(installed(path), facts)
        return self._there[path]

    def _maker(self, path: str) -> Job | None:
        """The job that makes what lies at a path: a job's output, or a checkpoint of a run."""
        if job := self._by_path.get(path):
            return job
        run = self._by_path.get(str(Path(path).parent.parent))
        return run if run is not None and run.recipe is not None else None

    def made(self, job: Job) -> Facts:
        """What a job makes, by its recipe or command alone."""
        if job.key not in self._made:
            if job.key in self._making:
                raise BadInput(f"{job.name} reads {{out}}, which it is to write")
            self._making.add(job.key)
            self._made[job.key] = self._of_command(job) if job.recipe is None else self._of_run(job)
        return self._made[job.key]

    def start(self, job: Job) -> ModelConfig | None:
        """The shape that a run starts from, with its own dropout; None if it is not known."""
        return self._start(self.recipe(job))

    def _start(self, recipe: Recipe) -> ModelConfig | None:
        if recipe.init is None:
            return recipe.model
        shape = self.at(recipe.init).shape
        return None if shape is None else with_dropout(shape, recipe.model)

    def store(self, paths: str | Sequence[str]) -> Facts:
        """The facts about a store, or about several stores that are read as one. Raises BadInput
        naming two of them that are known to differ in kind or tokenizer."""
        first, *others = every = [self.at(path) for path in each(paths)]
        for other in others:
            line = f"{first.name} and {other.name} cannot be read as one: they differ in"
            if first.kind and other.kind and first.kind != other.kind:
                raise BadInput(f"{line} kind ({first.kind}; {other.kind})")
            if first.tokenizer.is_other(other.tokenizer):
                raise BadInput(f"{line} tokenizer")
        kind = next((store.kind for store in every if store.kind), None)
        name = " and ".join(store.name for store in every)
        return replace(first, name=name, kind=kind, sizes=self.sizes(paths))

    def sizes(self, paths: str | Sequence[str]) -> Mapping[str, tuple[int, int]] | None:
        """Rows and tokens of each split of stores that are read as one; None if not all exist."""
        total: dict[str, tuple[int, int]] = {}
        for sizes in (self.at(path).sizes for path in each(paths)):
            if sizes is None:
                return None
            for split, (rows, tokens) in sizes.items():
                before = total.get(split, (0, 0))
                total[split] = (before[0] + rows, before[1] + tokens)
        return total

    def splits(self, paths: str | Sequence[str]) -> list[str]:
        """The splits of stores that are read as one, or those that preprocess.py can give to a
        store that is not made yet; [] if they are not known."""
        facts = [self.at(path) for path in each(paths)]
        if not all(store.sizes or store.kind for store in facts):
            return []
        return list(dict.fromkeys(split for store in facts for split in store.sizes or ORDER))

    def metric(self, job: Job) -> tuple[str, int]:
        """The metric that selects the checkpoint of a run, and HIGHER or LOWER."""
        recipe, task = self.recipe(job), self.task(job)
        of_store = self.at(each(recipe.data)[0]).metric
        name = recipe.train.metric or task.default_metric(of_store)
        return name, task.metrics.get(name, HIGHER)

    def task(self, job: Job) -> Task:
        """What a run predicts."""
        recipe = self.recipe(job)
        return kind_of(recipe.head, recipe.masking.pair_weight > 0)(Head(recipe.head))

    def unchecked(self, jobs: Iterable[Job]) -> int:
        """The number of jobs whose initial model has a shape that is not known yet. `check` cannot
        check them."""
        return sum(job.recipe is not None and self.start(job) is None for job in jobs)

    def _of_run(self, job: Job) -> Facts:
        recipe = self.recipe(job)
        tokenizer = self.at(recipe.init or each(recipe.data)[0]).tokenizer
        return self._after(Facts(job.name, tokenizer, self.start(job)), recipe.surgery)

    def _of_command(self, job: Job) -> Facts:
        tokenizer, shape = TokenizerFacts(job.key), None
        source: str | None = None  # where the tokenizer comes from
        match job.command:
            case ("-m", "xformer.convert", "from-hf", directory, *_):
                tokenizer = replace(tokenizer, symbols="")
                with suppress(*UNREADABLE):
                    shape = hf.read_shape(Path(directory))
            case ("-m", "xformer.surgery", *arguments) if not HELP & {*arguments}:
                given = surgery_parser().parse_args(arguments)
                operations = [parse_operation(text) for text in given.operations]
                return self._after(replace(self.at(given.checkpoint), name=job.name), operations)
            case ("preprocess.py", "tokenizer", *options):
                tokenizer = _learned(tokenizer, options)
            case ("preprocess.py", "synthetic", _, *options):
                size, other = (option_of(options, o) for o in ("--vocab-size", "--frequencies"))
                most = int(size) if size else self.at(other).tokenizer.size if other else None
                tokenizer = TokenizerFacts(f"numbers {most or job.key}", most, symbols="words")
            case ("preprocess.py", "pairs", store, *_) if not store.startswith("-"):
                source = store
            case ("preprocess.py", "text" | "task", *options):
                family = options[0].split("/")[0] if options else ""
                tokenizer = replace(tokenizer, symbols=ALPHABETS.get(family))
                source = option_of(options, "--tokenizer")
        tokenizer = self.at(source).tokenizer if source else tokenizer
        return Facts(job.name, tokenizer, shape, made_kind(job.command))

    def _after(self, facts: Facts, operations: Sequence[Operation]) -> Facts:
        """A checkpoint after operations on its weights."""
        shape = facts.shape and shape_after(facts.shape, operations)
        for operation in operations:
            if operation.op == "transplant":  # takes another model's tokenizer and vocabulary size
                other = self.at(operation.arguments["source"])
                size = other.shape.vocab_size if other.shape else 0
                shape = shape and shape.model_copy(update={"vocab_size": size})
                facts = replace(facts, tokenizer=other.tokenizer)
        return replace(facts, shape=shape)

    # ------------------------------------------------------- can each run use what it reads?

    def check(self) -> None:
        """Raise BadInput naming the first table of a split that its runs will not have or that has
        no labels, or the first run that does not fit the model that it starts from, in its rows,
        vocabulary, kind of store or head. What is not known yet is not checked (see `unchecked`).

        The checks are those of training, evaluation and the analyses. Finished jobs are skipped.
        """
        for table in self.plan.study.tables:
            with within(self.plan.study.path), within(f"table {table.name}"):
                self._check_splits(table)
        for jobs in self.plan.twins:
            with within(self.plan.study.path):
                self._check_twins(jobs)
        for job in self.plan.jobs.values():
            with within(self.plan.study.path), within(job.name):
                self._check_dropout(job)
                if not job.done:
                    self._check(job)

    def _check_splits(self, table: ScoreTable) -> None:
        for job, metric in self.plan.shown_in(table):
            known = self.splits(self.recipe(job).data)
            for split in table.split_of(metric).split("+"):
                if known and split not in known:
                    raise BadInput(
                        f"{job.name} will have no split {split!r}; it can have {', '.join(known)}"
                    )
                if known and not job.done and not self._has_labels(job, split):
                    raise BadInput(
                        f"{job.name} will have no scores on {split!r}, which has no labels in "
                        f"{self.store(self.recipe(job).data).name}"
                    )

    def _has_labels(self, job: Job, split: str) -> bool:
        """Whether a split of a run's data can be scored; True if that cannot be read yet."""
        recipe = self.recipe(job)
        known = recipe.data, recipe.head, recipe.masking.pair_weight > 0, split
        if known not in self._labelled:
            with suppress(*UNREADABLE):
                store = open_stores(recipe.data)
                if not self.task(job).has_labels(store.split(split)):
                    return False
            self._labelled.add(known)
        return True

    def _check(self, job: Job) -> None:
        if job.recipe is not None:
            self._check_training(job, self.recipe(job))
        else:
            self._check_program(job)
        for path in map(Path, job.command[1:]):
            maker = self._maker(str(path))
            if path.parent.name == "trajectory" and maker is not None and path != maker.path:
                self._check_kept(maker, path)
        match job.command:
            case ("preprocess.py", *arguments) if not HELP & {*arguments}:
                _preprocess_parser().parse_args(arguments)
            case ("evaluate.py", source, *arguments):
                evaluate.parse([source, *arguments])
                self._check_scoring(source, settings_of(arguments))
            case ("-m", "xformer.analysis", name, *arguments):
                self._check_analysis(job, name, arguments)

    def _check_dropout(self, job: Job) -> None:
        """Raise BadInput if an existing run was made with a dropout other than the study's.
        Finished runs are checked too, because the runs that start from them keep their keys."""
        if job.recipe is None or not self.recipe(job).init or not (wanted := self.start(job)):
            return
        had = _known_dropout(job.path)
        for name, value in wanted.model_dump(mode="json", include=set(had)).items():
            if value != had[name]:
                raise BadInput(
                    f"{job.path} was made with model.{name}={had[name]}, the study asks for "
                    f"{value}; give another output=, and no kept="
                )

    def _check_twins(self, jobs: tuple[Job, Job]) -> None:
        """Raise BadInput if two runs that have one key have different dropout."""
        starts = [self._start(validate(Recipe, job.recipe or {})) for job in jobs]
        for name in DROPOUT:
            values = [getattr(start, name, None) for start in starts]
            if values[0] != values[1]:
                default = ModelConfig.model_fields[name].default
                other, by = next(
                    (v, job.name) for v, job in zip(values, jobs, strict=True) if v != default
                )
                raise BadInput(
                    f"{jobs[0].name} and {jobs[1].name} would be one run, with model.{name}="
                    f"{values[0]} and {values[1]}, because a run's key does not tell a default "
                    "that was typed from the dropout of the checkpoint; type "
                    f"model.{name}={other} for {by}"
                )

    def _check_program(self, job: Job) -> None:
        """Raise BadInput if a command is a script or module of ours with a wrong name."""
        first, second, *_ = (*job.command, "")
        if first == "-m" and second.startswith("xformer."):
            with suppress(ImportError, ValueError):  # the package of a module may be missing
                if find_spec(second) is not None:
                    return
            ours = [f"xformer.{name}" for name in ("analysis", "convert", "surgery", "study")]
            raise BadInput(f"there is no module {second!r}{nearest(second, ours)}")
        near = get_close_matches(first, SCRIPTS, 1, 0.8)
        if first not in SCRIPTS and near and not Path(first).is_file():
            raise BadInput(f"there is no script {first!r}; did you mean {near[0]}?")

    def _check_inputs(self, job: Job, recipe: Recipe) -> None:
        """Raise BadInput if a run reads a store or a checkpoint that is not there, and that is
        neither made by a job nor part of a missing need."""
        given = [self.plan.paths[name] for name in job.missing]
        missing = [installed(path) for path in given if path]

        def must_exist(path: str) -> bool:
            below = any(Path(path).is_relative_to(need) for need in missing)
            return self._maker(path) is None and not below and not path.startswith("{need.")

        for path in filter(must_exist, each(recipe.data)):
            if not (installed(path) / "store.json").is_file():
                raise no_store(Path(path))
        sources = [op.arguments["source"] for op in recipe.surgery if op.op == "transplant"]
        for path in filter(None, (recipe.init, *sources)):
            maker = self._maker(path)
            if must_exist(path):
                checkpoints.resolve(path)
            elif maker is not None and maker.recipe is not None and str(maker.path) != path:
                self._check_kept(maker, Path(path))

    def _check_kept(self, run: Job, path: Path) -> None:
        """Raise BadInput if a run does not keep the checkpoint that another run starts from."""
        recipe, step = self.recipe(run), path.name.removeprefix("step_")
        if path.parent.name == "checkpoints":  # which of them a run keeps may depend on its data
            return
        if path.parent.name != "trajectory" or step == path.name or not step.isdecimal():
            raise BadInput(
                f"{path} is no checkpoint of {run.name}; write its step as trajectory/step_100"
            )
        steps = trajectory.steps_without_data(recipe.train.keep_at, recipe.train.steps)
        if steps is not None and int(step) not in steps:
            wanted = recipe.train.keep_at
            kept = wanted if isinstance(wanted, str) else [*wanted]
            raise BadInput(
                f"{run.name} keeps no weights at step {step} (train.keep_at={kept}): add this step"
            )
        if run.whole and not path.exists():
            raise BadInput(
                f"{run.name} is finished, but {path} does not exist: delete {run.path} to make "
                "it again"
            )

    def _check_training(self, job: Job, recipe: Recipe) -> None:
        self._check_inputs(job, recipe)
        start, store = self.start(job), self.store(recipe.data)
        size = store.tokenizer.size
        metric, metrics = recipe.train.metric, self.task(job).metrics
        if metric and metric not in metrics:
            raise BadInput(
                f"train.metric={metric!r} is not a metric of {recipe.head}, which has "
                f"{', '.join(metrics)}"
            )
        if start is not None:
            check_model(recipe, start)
        if store.kind is not None:
            known = ("train", "valid") if store.sizes is None else tuple(store.sizes)
            check_data(recipe, store.kind, known, store.name)
        if recipe.init is None:
            if size:
                checkpoints.check_vocabulary(recipe.model, size)
            return
        self._check_surgery(self.at(recipe.init), recipe.surgery)
        model = self.made(job)
        if store.tokenizer.is_other(model.tokenizer):
            symbols = store.tokenizer.symbols, model.tokenizer.symbols
            mapping.check_foreign_store(recipe.mapping, store.name, *symbols)
        elif store.tokenizer.is_same(model.tokenizer):
            mapping.check_own_store(recipe.mapping, store.name)
        pieces = (model.shape.vocab_size if model.shape else 0) or model.tokenizer.size
        mapped = mapping.parse(recipe.mapping)[0] in ("ids", "symbols", "unused")
        if mapped and pieces and size and size > pieces:
            raise BadInput(
                f"mapping={recipe.mapping}: {store.name} has {size} ids, "
                f"the model {pieces} embeddings"
            )

    def _check_surgery(self, model: Facts, operations: Sequence[Operation]) -> None:
        """Raise BadInput if another model or a store that an operation reads does not fit."""
        for operation in operations:
            if operation.op == "transplant":
                source = operation.arguments["source"]
                other = self.at(source).shape
                if model.shape is not None and other is not None:
                    check_width(source, other.width, model.shape.width)
            elif operation.op == "substitute_unused":
                store = self.store(operation.arguments["store"])
                check_source(store.name, not store.tokenizer.is_other(model.tokenizer))
            model = self._after(model, [operation])

    def _check_scoring(self, source: str, settings: dict[str, str]) -> None:
        """What evaluate.py would check, if the run that it scores is part of the plan."""
        run = self._by_path.get(source)
        if run is None or run.recipe is None or "data" not in settings:
            return
        recipe = self.recipe(run)
        data = evaluate.parse([source, f"data={settings['data']}"]).data
        assert data is not None
        store, trained = self.store(data), self.store(recipe.data)
        if store.kind is not None:
            check_kind(store.kind, TASKS[recipe.head], store.name)
        known, split = self.splits(data), settings.get("split", "test")
        if known and split not in known:
            raise BadInput(f"split={split}: {store.name} can have {', '.join(known)}")
        if "mapping" not in settings and store.tokenizer.is_other(trained.tokenizer):
            raise BadInput(
                f"{store.name} was made with a different tokenizer from {trained.name}, which the "
                "run is trained on"
            )

    def _check_analysis(self, job: Job, name: str, arguments: Sequence[str]) -> None:
        """What an analysis checks of its arguments and of the checkpoints that it reads, and that
        the study reads the result which it writes."""
        command = analyses.module_of(name).SUBCOMMAND
        paths, config = parse(command, arguments)
        if job.stage and command.directory and job.proof.name != f"{name}.json":
            raise BadInput(f"stages.{job.stage}.result must be {name}.json, which {name} writes")
        if not isinstance(config, ExamplesConfig):
            return
        names_of(paths, config.names)
        known = self.splits(config.data)
        if known and config.split not in known:
            raise BadInput(
                f"split={config.split}: {self.store(config.data).name} can have {', '.join(known)}"
            )
        first = getattr(config, "layers", None)
        second = getattr(config, "layers_b", None) or first
        for path, chosen in zip(paths, (first, second), strict=False):
            facts = self.at(path)
            if facts.shape is not None and chosen is not None:
                parse_layers(chosen, facts.shape.layers, facts.name)
        for facts in map(self.at, paths):
            if facts.shape is not None and config.max_tokens is not None:
                check_length(config.max_tokens, facts.name, facts.shape.max_positions)


@cache
def _preprocess_parser() -> CommandParser:
    return cli.make_parser()


def _read(path: Path, facts: Facts) -> Facts:
    """The facts about a store or checkpoint, replaced by what its files say. A damaged file is
    ignored here; the job that uses it reports the error."""
    with suppress(*UNREADABLE):
        meta = read_json(path / "store.json")
        facts = replace(facts, kind=meta["kind"], metric=meta["metric"])
        sizes = {k: (max(1, v["rows"]), v["tokens"]) for k, v in meta["splits"].items()}
        facts = replace(facts, sizes=sizes)
    with suppress(*UNREADABLE):
        if (path / "result.json").is_file():
            path = checkpoints.resolve(path)
    with suppress(*UNREADABLE):
        shape = validate(ModelConfig, read_json(path / "config.json")["model"])
        facts = replace(facts, shape=shape)
    with suppress(*UNREADABLE):
        meta = read_json(path / META)
        size, fingerprint = int(meta["vocab_size"]), str(meta["fingerprint"])
        sure = TokenizerFacts(str(path), size, symbols_of(meta), fingerprint=fingerprint)
        facts = replace(facts, tokenizer=sure)
    return facts


def shape_after(config: ModelConfig, steps: Sequence[Operation]) -> ModelConfig:
    """The config of a model after these operations, with its new number of layers. Other changes to
    the config, such as the vocabulary of a transplant, are not tracked.

    Raises BadInput that names the first operation on a layer or head that does not exist.
    """
    for step in steps:
        with naming(step.op):
            if step.op == "keep_layers":
                count = len(layers.layers_to_keep(config, **step.arguments))
                config = config.model_copy(update={"layers": count})
            elif step.op == "reverse_layers":
                layers.check_order(config, range(layers.count_layers(config), 0, -1))
            elif step.op == "reinit_last_layers":
                layers.check_from_layer(config, step.arguments["from_layer"])
            elif step.op == "reinit_head":
                layers.check_attention_head(config, step.arguments["layer"], step.arguments["head"])
    return config


def made_kind(command: Sequence[str]) -> str | None:
    """The kind of the store that a command of preprocess.py makes; None if it makes none."""
    match command:
        case ("preprocess.py", "text" | "synthetic", *_):
            return "text"
        case ("preprocess.py", "pairs", *_):
            return "class"
        case ("preprocess.py", "task", "squad", *_):
            return "span"
        case ("preprocess.py", "task", "choice", *_):
            return "choice"
        case ("preprocess.py", "task", task, *options) if task in OPEN:
            return option_of(options, "--kind") or "class"
        case ("preprocess.py", "task", task, *_):
            return "score" if task in SCORES else "tag" if task in TAGS else "class"
    return None


def _learned(unknown: TokenizerFacts, options: Sequence[str]) -> TokenizerFacts:
    """The tokenizer that `preprocess.py tokenizer` makes. From a small text it may have fewer
    pieces than the command asks for."""
    kind, size = option_of(options, "--kind"), option_of(options, "--vocab-size")
    alphabet = option_of(options, "--alphabet")
    pieces = len(set(alphabet)) + SPECIAL if alphabet else int(size) if size else None
    symbols: str | None = ""
    if kind == "words":
        symbols, pieces = "words", None  # a text usually has fewer than --vocab-size
    elif kind == "symbols" or alphabet:
        symbols = "letters"
    elif kind is None:  # imported
        symbols = None
    return replace(unknown, size=pieces, symbols=symbols, learned="--from" not in options)


def option_of(command: Sequence[str], name: str) -> str | None:
    """The word after an option of a command."""
    return next((value for before, value in pairwise(command) if before == name), None)


def settings_of(arguments: Sequence[str]) -> dict[str, str]:
    """The KEY=VALUE among the arguments of a command."""
    return dict(argument.split("=", 1) for argument in arguments if "=" in argument)


def _known_dropout(run: Path) -> dict[str, Any]:
    """The dropout settings that a run is known to have used, or {} if there is no run.

    They are those of its first checkpoint. A run without one, such as a kept result, only has
    recorded settings. Some kept results recorded the default although the checkpoint of `init` had
    another value, so a recorded default is left out.
    """
    for trained in checkpoints.by_step(run / "checkpoints").values():
        with suppress(BadInput, KeyError, TypeError, ValidationError):
            model = ModelConfig(**read_json(trained / "config.json")["model"])
            return model.model_dump(mode="json", include=set(DROPOUT))
    defaults = ModelConfig().model_dump(mode="json", include=set(DROPOUT))
    with suppress(BadInput, KeyError, TypeError, AttributeError):
        recorded = read_run_json(run / "config.json")["identity"]["model"]
        return {k: recorded[k] for k in defaults if recorded.get(k, defaults[k]) != defaults[k]}
    return {}
