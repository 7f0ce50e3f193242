"""The pages: their links, their commands, and what is generated from the code.

A command is parsed by its own parser and stopped before it opens a file.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers import ROOT, script

from xformer import command as commands
from xformer import config
from xformer.config import all_keys, recipes
from xformer.data.arguments import CommandParser
from xformer.data.errors import BadInput
from xformer.evaluate import EvaluateConfig
from xformer.recipe import Recipe
from xformer.study.__main__ import Arguments as StudyArguments
from xformer.surgery.registry import Operation, parse_operation
from xformer.tasks.known import TASKS

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PRESENT = [page for page in PAGES if page.name not in ("CHANGELOG.md", "log.md")]  # no history
NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}


@cache
def generated() -> dict[Path, str]:
    """The text of each page that the hook writes, by the path that it has among the others."""
    pages = {DOCS / path: write() for path, _, write in script("reference").PAGES}
    return pages | {DOCS / "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")}


def text_of(page: Path) -> str:
    return generated()[page] if page in generated() else page.read_text(encoding="utf-8")


# -------------------------------------------------------------------------------------- links


def prose_of(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^```.*?^```", "", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page: those that it gives, and those of its headings."""
    ids = set(re.findall(r"\{ #(\S+) \}", text))
    for title in re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text)):
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        ids.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return ids


def broken(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(text_of(page))):
        path, _, anchor = link.partition("#")
        if re.match(r"https?:|mailto:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if (target not in generated() and not target.exists()) or (
            anchor and anchor not in anchors(text_of(target))
        ):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_generated_pages_link_to_pages() -> None:
    # the links of the changelog are seen from the top of the checkout, and were checked there
    pages = [page for page in generated() if page.name != "changelog.md"]
    assert {str(page): list(broken(page)) for page in pages} == {str(page): [] for page in pages}


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b!\n[x](#a-b) [x](#c) [x](none.md) `[x](code.md)`\n\n```\n# c\n```\n")
    assert list(broken(page)) == ["#c", "none.md"]


# ----------------------------------------------------------------------------------- commands

PROGRAM = re.compile(r"(?:\S*/)?(?:python3?|xformer|torchrun|make)")
SCRIPT = re.compile(r"(?:train|evaluate|preprocess)\.py")  # sentences name a script without python
DOORS = ("preprocess", "train", "evaluate")
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b")


# a whole file in a page: its name, and its content in the block that follows
FILE = re.compile(r"`([\w-]+\.toml)`:\n\n```toml\n(.*?)```", re.DOTALL)


class Parsed(Exception):
    """Raised when a command has parsed its arguments, before it works."""


def statements(text: str) -> Iterator[tuple[str, bool]]:
    """The commands in a page, and whether each is complete: one inside a sentence need not be."""
    for language, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text):
        if language in ("", "text", "sh", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line, True
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text)):
        yield code.replace(r"\|", "|"), False


def pieces(line: str, complete: bool) -> Iterator[list[str]]:
    """The words of each program that a line of shell starts, from the program's name on."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote in a sentence
        return
    ends = [i for i, word in enumerate(words) if re.fullmatch(r"[();<>|&]+", word)]
    for first, last in zip([-1, *ends], [*ends, len(words)], strict=True):
        part = words[first + 1 : last]
        start = next((i for i, word in enumerate(part[:4]) if PROGRAM.fullmatch(word)), None)
        if start is not None:
            yield part[start:]
        elif part and not complete and SCRIPT.fullmatch(part[0]):
            yield part


def called(words: list[str]) -> list[str] | None:
    """A program of this project as `xformer`'s arguments; None for any other."""
    program = Path(words[0]).name
    if program == "xformer":
        return words[1:]
    for i, word in enumerate(words):
        if word.removesuffix(".py") in DOORS and word.endswith(".py"):
            return [word.removesuffix(".py"), *words[i + 1 :]]
        if word == "-m" and words[i + 1].startswith("xformer."):
            name = words[i + 1].removeprefix("xformer.").replace("analysis", "analyze")
            return [name, *words[i + 2 :]]
    return None


def found_in(page: Path) -> list[tuple[str, bool]]:
    text = page.read_text(encoding="utf-8")
    return [
        (shlex.join(w), complete) for s, complete in statements(text) for w in pieces(s, complete)
    ]


LINES = sorted({(*line, NAMES[page]) for page in PRESENT for line in found_in(page)})
OURS = [line for line in LINES if called(shlex.split(line[0])) is not None]


def optional(parser: CommandParser) -> None:
    """Let a parser accept command lines that lack arguments."""
    for action in parser._actions:
        action.required = False
        if action.nargs in (None, "+") and not action.option_strings:
            action.nargs = "?" if action.nargs is None else "*"
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                optional(one)


def stopping(complete: bool) -> ExitStack:
    """A context in which a command raises Parsed when its arguments are parsed."""
    depth = 0
    plain_parse, plain_validate = CommandParser.parse_known_args, config.validate

    def parse(self: CommandParser, args: Any = None, namespace: Any = None) -> Any:
        nonlocal depth
        if not complete and not depth:
            optional(self)
        depth += 1
        values, unknown = plain_parse(self, args, namespace)
        depth -= 1
        if depth:
            return values, unknown
        if unknown:
            raise BadInput(f"unrecognized arguments: {unknown[0]}")
        for operation in getattr(values, "operations", None) or ():
            parse_operation(operation)
        raise Parsed

    @wraps(plain_validate)
    def validate(schema: Any, values: dict[str, Any]) -> Any:
        if not complete:
            given = {n: "x" for n, field in schema.model_fields.items() if field.is_required()}
            values = given | ({"head": "mlm"} if "head" in given else {}) | values
        settings = plain_validate(schema, values)
        if issubclass(schema, Operation | EvaluateConfig | StudyArguments):
            return settings  # these are followed by further checks of the arguments
        raise Parsed

    stack = ExitStack()
    stack.enter_context(patch.object(CommandParser, "parse_known_args", parse))
    stack.callback(script("reference").put, validate, plain_validate)
    script("reference").put(plain_validate, validate)
    # the first things that `evaluate` and `study` do with their arguments
    stack.enter_context(patch("xformer.checkpoint.load", side_effect=Parsed))
    stack.enter_context(patch("xformer.study.__main__.Plan", side_effect=Parsed))
    return stack


def filled(arguments: list[str], complete: bool) -> list[str]:
    """The arguments with values in place of shell variables. A command line that is not complete
    gets the first arguments that its command needs."""
    words = [a for a in arguments if not re.search(r"=\$\w+$", a)]
    words = [
        re.sub(r"\$(\w+|\{.*?\})|\{\w+\}/", "", word.replace(":$seed", ":0")) for word in words
    ]
    name, *rest = words or ["--help"]
    if "--help" in rest:
        return [name, *rest]
    if name == "train" and (not rest or "=" in rest[0] or PLACEHOLDER.fullmatch(rest[0])):
        rest = ["pretrain/mini", *(a for a in rest if "=" in a)]
    if complete:
        return [name, *rest]
    if name in ("evaluate", "study") and (not rest or "=" in rest[0]):
        rest = ["demo", *rest]
    if name == "evaluate" and not any(re.match("(data|text|input|blimp)=", a) for a in rest):
        rest = [*rest, "data=STORE"]
    if name == "study" and not any(a.startswith("scale=") for a in rest):
        rest = [*rest, "scale=mini"]
    return [name, *rest]


def parse(arguments: list[str], complete: bool) -> None:
    """Raise BadInput if `xformer ARGUMENTS` is no valid command line."""
    words = [a for a in arguments if a != "..."]
    complete = complete and words == arguments
    title = sys.modules["__main__"].__doc__
    argv = ["xformer", *filled(words, complete)]
    try:
        with stopping(complete), patch.object(sys, "argv", argv):
            commands._dispatch()
    except (Parsed, SystemExit):
        pass
    except BadInput as error:
        names = set() if complete else set(PLACEHOLDER.findall(" ".join(words)))
        if not any(name in str(error) for name in names):
            raise
    finally:
        sys.modules["__main__"].__doc__ = title


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    for name in ("train", "evaluate", "study.__main__", "verify", "surgery.__main__"):
        import_module(f"xformer.{name}")
    import_module("xformer.analysis.subcommand")


@pytest.mark.parametrize(("line", "complete", "page"), OURS)
def test_every_command_parses(
    line: str, complete: bool, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for name, content in FILE.findall((ROOT / page).read_text(encoding="utf-8")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    arguments = called(shlex.split(line))
    assert arguments is not None
    parse(arguments, complete)


@pytest.mark.parametrize(
    "line",
    [
        "train pretrain/mimi data=a run=b",
        "train pretrain/mini data=a run=b optim.rate=1",
        "train pretrain/mini data=a",
        "evaluate RUN data=a top=10",
        "evaluate RUN input=a splits=b",
        "preprocess tsk tsv",
        "preprocess text --input a --tokeniser b --output c",
        "surgery a b keep_layer",
        "surgery a b keep_layers(firsts=1)",
        "convert from-hf a",
        "analyze pwca a b data=c out=d",
        "analyze pwcca a b data=c out=d layer=last",
        "study kao2021-figure3 scale=mini",
        "study kao2021-figure2 scale=tiny",
        "inspect a",
    ],
)
def test_a_wrong_command_is_noticed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(BadInput):
        parse(line.split(), True)


def test_functions_are_put_back() -> None:
    parse(["train", "pretrain/mini", "data=a", "run=b"], True)
    script("reference").help_of("evaluate")
    modules = [module for name, module in sys.modules.items() if name.startswith("xformer.")]
    for name in ("validate", "help_text"):
        given = {getattr(module, name) for module in modules if hasattr(module, name)}
        assert {f.__module__ for f in given if f.__name__ == name} >= {"xformer.config"}
        assert not any(hasattr(function, "__wrapped__") for function in given)


def test_pages_have_commands() -> None:
    """The extraction works: most pages that teach have several commands."""
    per_page = {name: sum(line[2] == name for line in OURS) for name in NAMES.values()}
    assert per_page["README.md"] > 25
    assert all(n >= 3 for name, n in per_page.items() if name.startswith("docs/howto/"))


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    used = {words[1] for line, _, _ in LINES if (words := shlex.split(line))[0] == "make"}
    assert used
    assert used <= targets


def test_every_benchmark_exists_with_its_options() -> None:
    used = 0
    for line, _, page in LINES:
        if match := re.search(r"(?:-m benchmarks\.(\w+)|benchmarks/(\w+)\.py)(.*)", line):
            text = (ROOT / f"benchmarks/{match[1] or match[2]}.py").read_text(encoding="utf-8")
            for option in re.findall(r"(--[\w-]+)", match[3]):
                assert f'"{option}"' in text, (page, line)
            used += 1
    assert used > 5


@pytest.mark.parametrize("page", PRESENT, ids=NAMES.get)
def test_what_python_imports_exists(page: Path) -> None:
    for block in re.findall(r"(?ms)^```python\n(.*?)^```", page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("xformer"):
                module = import_module(str(node.module))
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or import_module(name)


# ------------------------------------------------------------------------------ single pages


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every row of the tables in a page, headings left out."""
    for table in re.findall(r"(?m)(?:^\|.*\n)+", text):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def exists_here(code: str) -> bool:
    """Whether a code on the right-hand side of docs/coming-from.md exists: a command (which another
    test parses), a key with or without a value, or a file that docs/formats.md describes."""
    if code.startswith(("xformer ", "torchrun ")) or code in ("STORE", "RUN", "none"):
        return True
    if match := re.fullmatch(r"(?:STORE|RUN)/([\w/.]+)", code):
        formats = (DOCS / "formats.md").read_text(encoding="utf-8")
        parts = re.sub(r"step_\w+", "step_N", match[1]).replace(
            "predictions/valid", "predictions/SPLIT"
        )
        return all(part in formats for part in parts.split("/"))
    key, _, value = code.partition("=")
    if key == "head":
        return value in TASKS
    if key not in all_keys(Recipe) and key not in Recipe.model_fields:
        return False
    return not value or bool(config.load(Recipe, ["pretrain/mini", "data=a", "run=b", code]))


def test_what_others_call_a_thing_is_called_so_here() -> None:
    text = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    table = list(rows(text))
    assert len(table) > 80
    wrong = [c for row in table for c in re.findall(r"`([^`]+)`", row[1]) if not exists_here(c)]
    assert wrong == []
    assert all(len(row) == 3 and (row[1] == "none" or "`" in row[1]) for row in table), table
    assert not exists_here("optim.rate")
    with pytest.raises(BadInput, match="post"):
        exists_here("model.norm=middle")
    assert not exists_here("RUN/nothing.json")


def test_names_of_transformers_are_its_own() -> None:
    """TrainingArguments has these names, and an error message hints at the same key as the page."""
    arguments = pytest.importorskip("transformers").TrainingArguments
    fields = {field.name for field in dataclasses.fields(arguments)}
    text = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    part = text.partition("### TrainingArguments")[2].partition("###")[0]
    ours = {name: row[1] for row in rows(part) for name in re.findall(r"`(\w+)`", row[0])}
    assert ours.keys() <= fields
    for name in ("learning_rate", "num_train_epochs", "max_grad_norm", "bf16", "output_dir"):
        hint = config.nearest(name, list(all_keys(Recipe)))
        assert ours[name].strip("`") in hint, (name, hint)


def test_every_recipe_has_a_row() -> None:
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    name = re.compile(r"`((?:pretrain|finetune)/[\w-]+)`")
    listed = {code for row in rows(text) for code in name.findall(row[0])}
    shipped = {name for name in recipes() if not name.startswith("studies/")}
    assert listed == shipped, "docs/recipes.md needs a row for each recipe"


def test_the_reference_is_complete() -> None:
    pages = {path.name: text for path, text in generated().items()}
    for key in all_keys(Recipe):
        group = key.rpartition(".")[0]
        assert f"### `{key}`" in pages["keys.md"] or f"### `{group}`" in pages["keys.md"], key
    for task, kind in TASKS.items():
        assert f"## head={task}" in pages["tasks.md"]
        assert all(f"`{metric}`" in pages["tasks.md"] for metric in kind.metrics)
    assert "### keep_layers" in pages["surgery.md"]
    assert "Keep this many layers, starting at the first." in pages["surgery.md"]
    for option in (
        "--skip-lines REGEX",
        "## preprocess task squad",
        "### preprocess synthetic nesting",
    ):
        assert option in pages["preprocess.md"], option
    for heading in ("## analyze pwcca", "## analyze capture", "`what`", "`examples`"):
        assert heading in pages["analyze.md"]
    assert "## study verify" in pages["study.md"]
    for name in commands.COMMANDS:
        assert name == "recipes" or len(pages[f"{name}.md"]) > 500, name


def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    """MkDocs is strict: a warning is an error."""
    pytest.importorskip("material", reason="mkdocs-material is not here (make docs installs it)")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"""<(script|img|iframe)[^>]* src="?https?:""", text), page
        assert not re.search(
            r"""<link[^>]* rel="?(stylesheet|preconnect)[^>]* href="?https?:""", text
        )
