"""The pages of the site that are generated from the code, made by a hook of MkDocs (mkdocs.yml).

The hook makes a page for each command, one for the keys of a recipe, one for the tasks and one for
the recipes. They have the texts of `--help`, and exist only in the site. The hook also inserts
sections of README.md into docs/index.md.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import wraps
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from unittest.mock import patch

from pydantic import BaseModel

if TYPE_CHECKING:  # the tests read the pages without MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from xformer import command as commands  # noqa: E402
from xformer import config as settings  # noqa: E402
from xformer.config import HIDDEN, read_recipe, recipes, type_and_default  # noqa: E402
from xformer.data.arguments import CommandParser  # noqa: E402
from xformer.data.errors import BadInput, typed  # noqa: E402
from xformer.recipe import Recipe  # noqa: E402
from xformer.surgery.registry import OPERATIONS, split_docstring  # noqa: E402
from xformer.tasks.known import TASKS  # noqa: E402

# ------------------------------------------------------------------------------- MkDocs calls


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation with the generated pages, and with the pages of docs/ that mkdocs.yml
    does not name. The latter become guides."""
    assert config.nav is not None
    parts = {name: part for entry in config.nav for name, part in entry.items()}
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    others = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name not in named)
    parts["Guides"].extend(others)
    parts["Reference"].extend({title: path} for path, title, _ in PAGES)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those in docs/."""
    from mkdocs.structure.files import File

    for path, _, write in PAGES:
        files.append(File.generated(config, path, content=write()))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=changes))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert sections of README.md where docs/index.md names them, and let links to README.md lead
    to the home page. A page that is alone in its part needs no list of pages beside it."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri == "index.md":
        sections = readme()
        markdown = re.sub(r"<!-- README: (.*?) -->", lambda m: sections[m[1]], markdown)
    return re.sub(r"\]\(\.\./README\.md", "](index.md", markdown)


def readme() -> dict[str, str]:
    """The sections of README.md by heading, with links relative to docs/. The first section is
    returned without its heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text).replace("](CHANGELOG.md", "](changelog.md")
    parts = re.split(r"(?m)^#+ (.*)\n", text)
    sections = {title: f"## {title}\n{body}" for title, body in zip(*[iter(parts[1:])] * 2)}  # noqa: B905
    title = next(iter(sections))
    return sections | {title: sections[title].partition("\n")[2]}


# ------------------------------------------------------------------------ what a command shows


class Shown(Exception):
    """Raised instead of printing a help. `what` is the parser of argparse, or the settings class;
    `text` is the text above its arguments or keys."""

    def __init__(self, what: CommandParser | type[BaseModel], text: str = ""):
        super().__init__()
        self.what, self.text = what, text


class Help(NamedTuple):
    """The help of a command: its description, and the parser or settings class that explains its
    arguments, if it has any."""

    text: str
    what: CommandParser | type[BaseModel] | None = None


def help_of(*words: str) -> Help:
    """What `xformer WORDS --help` shows. The command runs until it would print its help."""
    output = io.StringIO()
    name = sys.modules["__main__"].__doc__
    try:
        with showing(), redirect_stdout(output), patch.object(sys, "argv", ["", *words, "--help"]):
            commands._dispatch()
    except Shown as shown:
        return Help(shown.text, shown.what)
    except SystemExit:
        pass
    finally:
        sys.modules["__main__"].__doc__ = name
    return Help(output.getvalue())


@contextmanager
def showing() -> Iterator[None]:
    """In this context, a command that is asked for its help raises Shown."""

    def parser(self: CommandParser, *_: Any) -> None:
        raise Shown(self, self.description or "")

    plain_help = settings.help_text

    @wraps(plain_help)
    def keys(schema: type[BaseModel], title: str | None = None) -> None:
        raise Shown(schema, typed(title or sys.modules["__main__"].__doc__ or ""))

    with patch.object(CommandParser, "parse_known_args", parser):
        put(plain_help, keys)
        try:
            yield
        finally:
            put(keys, plain_help)


def put(before: Any, after: Any) -> None:
    """Replace a function of xformer.config in all modules that have imported it. A module that is
    imported later gets the function that xformer.config has then."""
    attribute: str = before.__name__
    for name, module in list(sys.modules.items()):
        if name.startswith("xformer.") and getattr(module, attribute, None) is before:
            setattr(module, attribute, after)


def below(name: str, own: Help) -> dict[str, Help]:
    """The sub-commands of a command without argparse. They are words of its help, after the
    command's name or at the start of an indented line, that have a help of their own."""
    words = dict.fromkeys(re.findall(rf"xformer {name} ([a-z]+)\b(?![/-])", own.text))
    words |= dict.fromkeys(re.findall(r"(?m)^    ([a-z]+) {2,}\S", own.text))
    helps: dict[str, Help] = {}
    for word in words:
        with suppress(BadInput):
            one = help_of(name, word)
            if one != own:
                helps[word] = one
    return helps


# ----------------------------------------------------------------------------------- Markdown


def plain(text: str) -> str:
    """A text of a help as Markdown. Only text between backticks is code."""
    parts = text.replace("%%", "%").split("`")
    parts[::2] = [re.sub(r"([\\*_<>|\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def prose(text: str) -> str:
    """The text of a docstring as Markdown: indented lines and lines of commands become code."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        if all(re.match(r" {4}|xformer |$", line) for line in lines):
            inner = "\n".join(line.removeprefix("    ") for line in lines)
            blocks.append(f"```text\n{inner}\n```" if "  " in inner else f"```\n{inner}\n```")
        else:
            blocks.append(plain(" ".join(block.split())))
    return "\n\n".join(blocks)


def term(name: str, about: str, detail: str = "") -> str:
    """An entry of a definition list."""
    return f"`{name}`\n:   {' '.join(filter(None, [detail, plain(about)]))}\n"


def kind(field: Any) -> str:
    """A field's type and default as one piece of code."""
    return f"`{' '.join(type_and_default(field).split())}`."


def keys_of(schema: type[BaseModel], prefix: str = "") -> str:
    """The keys of a settings class as a definition list, groups included."""
    lines = []
    for name, field in schema.model_fields.items():
        if field.json_schema_extra == HIDDEN:
            continue
        if group_of(field.annotation):
            lines.append(keys_of(field.annotation, f"{prefix}{name}."))
        else:
            lines.append(term(f"{prefix}{name}", field.description or "", kind(field)))
    return "\n".join(lines)


def options_of(parser: argparse.ArgumentParser) -> str:
    """The arguments of a parser as a definition list."""
    lines = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        if action.help == argparse.SUPPRESS:
            continue
        name = str(action.metavar or action.dest).strip("()'").replace("', '", " ")
        if action.option_strings:
            value = "" if action.nargs == 0 else f" {name}"
            if action.choices:
                value = f" {'|'.join(map(str, action.choices))}"
            elif action.nargs in ("+", "*"):
                value += " ..."
            name = f"{', '.join(action.option_strings)}{value}"
        needed = "Required." if action.option_strings and action.required else ""
        lines.append(term(name, (action.help or "") % {"default": action.default}, needed))
    return "\n".join(lines)


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and all parsers of its sub-commands, with how each is called."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from parsers(one)


def usage_of(parser: argparse.ArgumentParser) -> str:
    """The usage of a command in one line, because a page wraps it again."""
    words = parser.format_usage().removeprefix("usage: ").split()
    return " ".join(word for word in words if word != "[-h]")


# -------------------------------------------------------------------------------------- pages


def keys_page() -> str:
    """Every key of a recipe."""
    groups = {name: f for name, f in Recipe.model_fields.items() if group_of(f.annotation)}
    lines = ["# Keys of a recipe", "", KEYS, ""]
    lines += ["## The run", "", *key_entries(Recipe, "", skip=groups)]
    for name, field in groups.items():
        schema: Any = field.annotation
        lines += [f"## {name}.*", "", plain(getdoc(schema) or ""), ""]
        lines += key_entries(schema, f"{name}.")
    return "\n".join(lines)


KEYS = """A recipe is a TOML file of these keys, and `key=value` on the command line overrides one:

```
xformer train pretrain/mini data=stores/english run=runs/english optim.lr=5e-4
```

Each key is followed by its type and its default. A key `optim.lr` is the key `lr` of the table
`[optim]` in the file."""


def group_of(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def key_entries(schema: type[BaseModel], prefix: str, skip: Any = ()) -> Iterator[str]:
    """A section for each key, so that the search leads to it."""
    for name, field in schema.model_fields.items():
        if field.json_schema_extra != HIDDEN and name not in skip:
            yield f"### `{prefix}{name}` {{ #{prefix}{name} }}\n"
            yield f"{kind(field)} {plain(field.description or '')}\n"
            if name == "surgery":
                yield "[surgery](surgery.md) lists the operations and their arguments.\n"


def command_page(name: str) -> str:
    """A command with its sub-commands."""
    own = help_of(name)
    lines = [f"# xformer {name}", ""]
    if isinstance(own.what, CommandParser):
        for called, parser in parsers(own.what):
            if called != own.what.prog:
                depth = "#" * min(4, len(called.split()) - len(own.what.prog.split()) + 1)
                lines += [f"{depth} {called.removeprefix('xformer ')}", ""]
            lines += [prose(parser.description or ""), "", f"```text\n{usage_of(parser)}\n```", ""]
            lines += [options_of(parser), ""]
    else:
        lines += [prose(own.text), ""]
        if own.what is not None:
            lines += key_list(own.what)
        for word, one in below(name, own).items():
            lines += [f"## {name} {word}", "", prose(one.text), ""]
            if one.what is not None:
                lines += [keys_of(one.what), ""]  # type: ignore[arg-type]
    if name == "surgery":
        lines += ["## Operations", "", *operations()]
    return "\n".join(lines)


def key_list(schema: Any) -> list[str]:
    """The keys of a command, or a link to the page that has them."""
    if schema is Recipe:
        return ["[Keys of a recipe](keys.md) explains every key.", ""]
    return ["## Keys", "", keys_of(schema), ""]


def operations() -> Iterator[str]:
    """Every operation on weights."""
    for name, known in OPERATIONS.items():
        fields = {key: f for key, f in known.schema.model_fields.items() if key != "op"}
        yield f"### {name}\n"
        yield f"`{name}({', '.join(fields)})`\n" if fields else f"`{name}`\n"
        yield f"{prose(split_docstring(known.function)[0])}\n"
        for key, field in fields.items():
            yield term(key, field.description or "", kind(field))


def tasks_page() -> str:
    """Every task: what it predicts, from which stores, how it is scored, and its recipes."""
    heads: dict[str, list[str]] = {}
    for name, path in recipes().items():
        if not name.startswith("studies/"):
            heads.setdefault(read_recipe(path)["head"], []).append(name)
    lines = ["# Tasks", "", TASKS_ABOUT, ""]
    for name, task in TASKS.items():
        best = [
            f"`{metric}` ({'higher' if way > 0 else 'lower'} is better)"
            for metric, way in task.metrics.items()
        ]
        named = [f"[`{one}`](recipes.md#{one.replace('/', '')})" for one in heads.get(name, [])]
        about = (getdoc(task) or "").split("\n\n")[0]
        lines += [f"## head={name}", "", prose(about), ""]
        lines += [f"`{name}` learns from\n:   {stores(task.stores)}\n"]
        lines += [f"metrics\n:   {', '.join(best)}\n"]
        lines += [f"recipes\n:   {', '.join(named)}\n"]
    return "\n".join(lines)


TASKS_ABOUT = """`head=` in a recipe names what a model predicts. A task learns from stores of
certain kinds. [preprocess](preprocess.md) makes the stores. `STORE/store.json` names the kind."""


def stores(kinds: tuple[str, ...]) -> str:
    return f"stores of the kind{'s' if len(kinds) > 1 else ''} " + ", ".join(
        f"`{one}`" for one in kinds
    )


def recipes_page() -> str:
    """The text of every recipe that trains one model."""
    lines = ["# Recipes as files", "", RECIPES, ""]
    for name in recipes():
        if not name.startswith("studies/"):
            text = commands.portable(recipes()[name])
            lines += [f"## {name}", "", f"```toml\n{text}```", ""]
    return "\n".join(lines)


RECIPES = """These recipes come with the package. `xformer recipes show NAME > mine.toml` copies one
to change it. [Recipes, measured](../recipes.md) says what each takes and scores."""

PAGES: list[tuple[str, str, Callable[[], str]]] = [
    ("reference/keys.md", "Keys of a recipe", keys_page),
    ("reference/tasks.md", "Tasks", tasks_page),
    ("reference/recipes.md", "Recipes as files", recipes_page),
    *(
        (f"reference/{name}.md", f"xformer {name}", lambda name=name: command_page(name))
        for name in commands.COMMANDS
        if name != "recipes"
    ),
]
