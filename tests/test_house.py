"""The rules of the house: which module may import which, names that nothing uses, recipes that
build.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from xformer import config
from xformer.recipe import Recipe
from xformer.tasks.known import TASKS
from xformer.tasks.task import Head, Model

# The floors of the house, from the ground up: what belongs there, and its modules. A module may
# import from its own floor and from those below.
FLOORS: dict[str, tuple[str, ...]] = {
    "Stores, tokenizers, batches, files and messages; torch is never imported.": ("xformer.data",),
    "How every command starts and ends.": ("xformer.start",),
    "Typed settings, recipe files and their help.": ("xformer.config",),
    "Loading the compiled C++, and registering operations with torch.": (
        "xformer.ops.native",
        "xformer.ops.library",
    ),
    "Operations that other operations use.": (
        "xformer.ops.cast_weights",
        "xformer.ops.dropout",
        "xformer.ops.padding",
    ),
    "Operations of the model.": (
        "xformer.ops.add_norm",
        "xformer.ops.attention",
        "xformer.ops.rotary",
        "xformer.ops.vocabulary_loss",
    ),
    "The shape of a model.": ("xformer.model.config",),
    "The encoder, and padded tensors as packed batches.": (
        "xformer.model.encoder",
        "xformer.model.packing",
    ),
    "The convolutional network that can replace the encoder.": ("xformer.model.hilbert",),
    "The interface of a task, and the model with a task's heads; metrics of resampled examples.": (
        "xformer.tasks.task",
        "xformer.tasks.weighted",
    ),
    "Tasks from which others inherit or borrow.": (
        "xformer.tasks.classify",
        "xformer.tasks.mlm",
        "xformer.tasks.span",
        "xformer.tasks.tag",
    ),
    "Tasks that use those.": (
        "xformer.tasks.choice",
        "xformer.tasks.pairs",
        "xformer.tasks.regress",
    ),
    "All tasks by name.": ("xformer.tasks.known",),
    "Texts that are not in a store: batches and vectors.": ("xformer.texts",),
    "Weights with everything that is needed to use them.": ("xformer.checkpoint",),
    "Detecting lost ranks.": ("xformer.parallel.watch",),
    "Which precision is fast on a device.": ("xformer.parallel.precision",),
    "Ranks and devices.": ("xformer.parallel.processes",),
    "One model on several ranks, batches on their way to the device, and compiled code.": (
        "xformer.parallel.compiled",
        "xformer.parallel.feed",
        "xformer.parallel.graphs",
        "xformer.parallel.replicas",
    ),
    "Optimizers, learning rates, clip and step.": ("xformer.optim",),
    "Import and export of foreign checkpoints; operations on weights.": (
        "xformer.convert",
        "xformer.surgery",
    ),
    "At which steps a run keeps its weights, and which weights it trains.": (
        "xformer.trajectory",
        "xformer.freeze",
    ),
    "All settings of a run.": ("xformer.recipe",),
    "What a run logs, costs and saves, one file each.": (
        "xformer.cost",
        "xformer.monitor",
        "xformer.predictions",
        "xformer.profile",
        "xformer.provenance",
        "xformer.snapshot",
        "xformer.writer",
    ),
    "The directory of a run.": ("xformer.run",),
    "Scores of a model on a split, and on minimal pairs.": (
        "xformer.scoring",
        "xformer.minimal_pairs",
    ),
    "The command that scores and predicts.": ("xformer.evaluate",),
    "The command that writes vectors.": ("xformer.encode",),
    "A recipe with everything that it names, and what follows from the two.": ("xformer.setup",),
    "What the user may not expect of a run.": ("xformer.notes",),
    "Opening and checking everything that a recipe names.": ("xformer.prepare",),
    "Runs that go on from a checkpoint of another run.": ("xformer.branch",),
    "A run while it trains: what is due, logged and saved after a step.": ("xformer.session",),
    "Numerical trouble: where it arises, and what to do.": ("xformer.tracing", "xformer.guard"),
    "The training loop.": ("xformer.train",),
    "Child processes that run the same copy of the package.": ("xformer.children",),
    "Listing, comparing and repeating runs; the rows of a training step.": (
        "xformer.rows",
        "xformer.runs",
        "xformer.verify",
    ),
    "Looking inside models and runs.": ("xformer.analysis",),
    # only studies and the command import it, and it imports only xformer.data
    "From raw files to stores.": ("xformer.preprocess",),
    "Studies of many runs, with their tables and claims; the study that checks an installation.": (
        "xformer.study",
        "xformer.reproduce",
    ),
    "The command `xformer`.": ("xformer.command", "xformer.__main__"),
}
LINES_OF_TRAINING = 9_700
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
HOME = re.compile(
    r"(?<![\w.:~}$-])(?:/(?:home|root|Users|work|mnt|media|scratch|tmp)/\w|[A-Z]:\\\w)"
)


def modules() -> dict[str, Path]:
    """Every module by its dotted name. The folder preprocess/ is the package xformer.preprocess."""
    bridge = ROOT / "xformer/preprocess/__init__.py"
    places = {file: file.relative_to(ROOT) for file in (ROOT / "xformer").rglob("*.py")}
    del places[bridge]
    places |= {f: "xformer" / f.relative_to(ROOT) for f in (ROOT / "preprocess").rglob("*.py")}
    names = {file: ".".join(place.with_suffix("").parts) for file, place in places.items()}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


MODULES = modules()
TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in MODULES.items()}
DOORS = ("train", "evaluate", "preprocess")


def imports(name: str) -> Iterator[str]:
    """Everything that a module imports, also inside functions: modules of this project by their
    dotted name, and names from other packages."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = str(node.module)
            if node.level:
                parents = name.split(".")[: -node.level + is_package(name) or None]
                source = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield source if source in MODULES and full not in MODULES else full


def floor(name: str) -> int | None:
    """The number of a module's floor."""
    for number, packages in enumerate(FLOORS.values()):
        if any(name == package or name.startswith(f"{package}.") for package in packages):
            return number
    return None


def is_package(name: str) -> bool:
    return MODULES[name].name == "__init__.py"


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("xformer.")])
def test_imports_only_descend(name: str) -> None:
    own = floor(name)
    if own is None:
        assert is_package(name), f"give {name} a floor in {Path(__file__).name}"
        return
    for source in imports(name):
        assert source.split(".")[0] not in DOORS, f"{name} imports the door {source}"
        if source.startswith("xformer."):
            below = floor(source)
            assert below is not None, f"{name} imports {source}, which stands on no floor"
            assert below <= own, f"{name} imports {source} from below"


def test_preprocess_imports_the_data_alone() -> None:
    for name in MODULES:
        if name.startswith("xformer.preprocess."):
            ours = [s for s in imports(name) if s.split(".")[0] == "xformer"]
            allowed = ("xformer.data.", "xformer.preprocess")
            assert all(s.startswith(allowed) for s in ours), (name, ours)


def test_preprocess_has_one_name() -> None:
    """Its modules import each other relatively, so that a type checker can follow them in the
    checkout. All others write xformer.preprocess, so that no module is imported twice."""
    for name, tree in TREES.items():
        of_preprocess = name.startswith("xformer.preprocess.")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert of_preprocess or node.level == 0, f"{name} imports relatively"
                if of_preprocess and node.level == 0:
                    assert "preprocess" not in str(node.module), f"{name}: import relatively"
    files = [*ROOT.glob("*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    twice = re.compile(r"^\s*(from|import) preprocess\b", re.MULTILINE)
    for file in [*MODULES.values(), *files]:
        assert not twice.search(file.read_text(encoding="utf-8")), file


def test_there_are_no_circles() -> None:
    graph = {name: set(imports(name)) & set(MODULES) for name in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError naming the circle
    assert graph["xformer.train"] > {"xformer.checkpoint", "xformer.data.batch"}


def code_lines(name: str) -> int:
    """The lines of a module without comments, docstrings and empty lines."""
    lines: set[int] = set()
    with tokenize.open(MODULES[name]) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_training_needs_no_more_code_than_it_did() -> None:
    """The code that `xformer train` loads, whatever the recipe. Who needs more lines raises the
    limit, and says in docs/log.md what they are for."""
    loaded, new = set(), {"xformer.train"}
    while new:
        loaded |= new
        new = {name for module in new for name in imports(module) if name in MODULES} - loaded
    lines = sum(map(code_lines, loaded))
    assert lines <= LINES_OF_TRAINING, (
        f"{lines:,} lines in {len(loaded)} modules: raise LINES_OF_TRAINING, and say in "
        "docs/log.md what the lines are for"
    )


def test_the_data_needs_no_torch() -> None:
    for name in MODULES:
        if name.startswith(("xformer.data.", "xformer.preprocess.")):
            roots = {source.split(".")[0] for source in imports(name)}
            assert not roots & {"torch", "safetensors", "transformers", "triton"}, name


def test_preprocessing_never_imports_torch() -> None:
    wanted = [n for n in MODULES if n.startswith(("xformer.data", "xformer.preprocess"))]
    code = f"import sys, {', '.join(wanted)}; print([m for m in sys.modules if 'torch' in m])"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def test_the_model_does_not_know_the_machine() -> None:
    """The model calls operations, which choose the kernel for a device."""
    for name in ("xformer.model.config", "xformer.model.encoder"):
        ours = {source for source in imports(name) if source.startswith("xformer.ops")}
        assert not ours & {"xformer.ops.native", "xformer.ops.library"}, name
        text = MODULES[name].read_text(encoding="utf-8").lower()
        assert not re.search(r"autograd|kernel|native|sparse|stream|cuda|triton", text), name


def test_only_a_task_knows_its_kind() -> None:
    """Everything that depends on the kind of output is an attribute or method of a task. No other
    module compares with the name or the class of a task."""
    kinds = set(TASKS) | {task.__name__ for task in TASKS.values()} | {"Pairs"}
    # readers of foreign formats must name the tasks that they find in them
    allowed = {"xformer.convert.hf", "xformer.convert.plus", "xformer.predictions"}
    for name, tree in TREES.items():
        if not name.startswith("xformer.") or name.startswith("xformer.tasks.") or name in allowed:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and "kind" not in ast.unparse(node.left):
                words = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                named = {str(word) for word in words} & {"mlm", "classify", "regress", "tag"}
                assert not named, f"{name}:{node.lineno}: {ast.unparse(node)}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                assert ast.unparse(node.args[1]) not in kinds, f"{name}:{node.lineno}"


# modules that may use a standard stream, and why; all others call say, put or Progress
STREAMS = {
    "xformer.data.display": "it prints and escapes",
    "xformer.start": "it points a broken standard output at the null device",
}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "xformer.data.display"])
def test_one_place_prints(name: str) -> None:
    """xformer.data.display escapes what it prints, and keeps messages and progress bars apart."""
    assert not {source.split(".")[0] for source in imports(name)} & {"tqdm"}, "use Progress"
    assert not {"sys.stdout", "sys.stderr"} & set(imports(name)), "use say or put"
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) != "print", f"line {node.lineno}: use say"
        if isinstance(node, ast.Attribute) and name not in STREAMS:
            stream = re.fullmatch(r"sys\.(__)?(stdout|stderr)(__)?", ast.unparse(node))
            assert not stream, f"line {node.lineno}: use say, put or Progress of display"


def test_init_files_are_empty() -> None:
    for name in filter(is_package, MODULES):
        statements = [ast.unparse(statement) for statement in TREES[name].body]
        if name == "xformer.surgery":  # which exports its operations and nothing else
            exported = re.compile(r"from xformer\.surgery\.\w+ import (\w+) as \1")
            statements = [line for line in statements if not exported.fullmatch(line)]
        if name == "xformer":  # before torch is imported; see xformer.start
            prepared = ["share_cores()", "allow_more_files()"]
            imported = "from xformer.start import allow_more_files, share_cores"
            assert statements[1:] == [imported, *prepared]
            statements = []
        assert statements == [], name


@pytest.mark.parametrize("name", MODULES)
def test_no_pickle_is_loaded(name: str) -> None:
    assert not {source.split(".")[0] for source in imports(name)} & PICKLES
    for call in (node for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)):
        keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert keywords.get("allow_pickle", "False") == "False", ast.unparse(call)
        if ast.unparse(call.func) == "torch.load":
            assert keywords.get("weights_only") == "True", ast.unparse(call)
    assert not {"torch.serialization", "torch.load"} & set(imports(name))


RECIPES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("pretrain", "finetune")
    for path in (ROOT / "recipes" / folder).glob("*.toml")
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_parses_and_builds(recipe: str) -> None:
    settings = config.load(Recipe, [str(ROOT / recipe), "data=some/store", "run=runs/some"])
    shape = settings.model.model_copy(update={"vocab_size": settings.model.vocab_size or 101})
    with torch.device("meta"):
        model = Model(shape, TASKS[settings.head](Head(settings.head, ("a", "b", "c"))))
    assert sum(p.numel() for p in model.parameters()) > 0
    assert settings.batch.max_tokens <= shape.max_positions
    assert (ROOT / recipe).read_text(encoding="utf-8").startswith("# "), "a recipe says what it is"


def test_the_promised_recipes_are_there() -> None:
    promised = (
        "pretrain/smoke",
        "pretrain/mini",
        "pretrain/bert-base",
        "pretrain/roberta-base-chiang2020",
        "finetune/classify",
        "finetune/regress",
        "finetune/hilbert-cnn",
    )
    assert {f"recipes/{name}.toml" for name in promised} <= set(RECIPES)


def text_files() -> Iterator[tuple[str, str]]:
    """(name, content) of the text files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("this is no git checkout")
    for name in filter(None, listing.stdout.split("\0")):
        try:
            yield name, (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue


def test_no_file_names_a_place_on_one_machine() -> None:
    places = [
        f"{name}:{number}: {line.strip()}"
        for name, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if HOME.search(line)
    ]
    assert places == []
    assert HOME.search("cd /" + "home/me")


def test_the_formatter_is_on_everywhere() -> None:
    off = [
        f"{name}:{number}"
        for name, text in text_files()
        if name.endswith(".py") and name != "tests/test_house.py"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"#\s*fmt:", line)
    ]
    assert len(off) <= 10, f"only tables of data may switch the formatter off: {off}"


def test_no_class_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("name", MODULES)
def test_no_imported_name_is_shadowed(name: str) -> None:
    """A reader who has seen `from x import y` takes every later `y` for the imported one."""
    tree = TREES[name]
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    fields = {  # x.mean of a dataclass shadows nothing
        id(statement.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    assigned = {
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        if id(node) not in fields
    }
    assert imported & assigned == set()
    assert "found" not in assigned, "say what was found"


def test_no_variable_is_called_found() -> None:
    """Also in tests and benchmarks. The recorded programs in tests/golden stay as they are."""
    files = [
        *ROOT.glob("tests/*.py"),
        *ROOT.glob("tests/faults/*.py"),
        *ROOT.glob("benchmarks/*.py"),
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assert node.id != "found", f"{file.name}:{node.lineno}: say what was found"
