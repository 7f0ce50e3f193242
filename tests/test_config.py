"""Settings: recipes and their bases, overrides, what is refused, and help."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from xformer.config import (
    SYNONYMS,
    Paths,
    Settings,
    all_keys,
    each,
    flat,
    help_text,
    load,
    merge,
    nearest,
    parse_overrides,
    read_recipe,
    validate,
)
from xformer.data.errors import BadInput
from xformer.evaluate import EvaluateConfig
from xformer.recipe import Recipe


class Inner(Settings):
    """A group."""

    rate: float = Field(0.5, gt=0)
    """How fast."""
    kind: Literal["a", "b"] = "a"
    """Which."""


class Outer(Settings):
    """All of it."""

    data: Paths
    """Where."""
    fraction: float = 1.0
    """How much."""
    inner: Inner = Inner()
    name: str | None = None
    """Its name."""
    count: int = 3
    """How many, in a sentence that is long enough to be broken in two where the hundredth column
    of a line stands."""
    sizes: tuple[int, ...] = ()
    """Some sizes."""


def settings(*overrides: str) -> Outer:
    return validate(Outer, {"data": "x"} | parse_overrides(Outer, list(overrides)))


def test_default_base_recipe_argument_win_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.toml").write_text(
        'name = "base"\ncount = 1\ndata = "a"\n[inner]\nrate = 1\nkind = "b"'
    )
    (tmp_path / "sub/child.toml").write_text(
        'base = "../base.toml"\ncount = 2\nfraction = 0.5\n[inner]\nrate = 2'
    )
    recipe = str(tmp_path / "sub/child.toml")
    loaded = load(Outer, [recipe, "inner.rate=3"])
    assert loaded == Outer(
        data="a", fraction=0.5, inner=Inner(rate=3, kind="b"), name="base", count=2
    )
    assert load(Outer, [recipe, "data=b"]).data == "b"
    assert load(Outer, ["data=b", "count=9"], recipe=False).count == 9


def test_a_value_is_toml_else_a_bare_string() -> None:
    assert settings("inner.rate=1e-4").inner.rate == 1e-4
    assert settings("sizes=[1, 2]").sizes == (1, 2)
    assert settings('name="quoted"').name == "quoted"
    assert settings("name=a=b").name == "a=b"
    assert settings("inner={rate=2, kind='b'}").inner == Inner(rate=2, kind="b")
    for text in ("2026", "2026-11-21", "1e-4", "true", "nan", "", "a b", "1 # 2"):
        assert settings(f"name={text}").name == text  # the key takes a string
        assert settings(f"data={text}").data == text
    assert settings("name=[1]").name == "[1]"
    assert settings('name=1\ndata = "x"').name == '1\ndata = "x"'  # not two settings


def test_paths_are_one_path_or_a_list() -> None:
    """One path stays a string, even if it is given as a list of one. Several are written as a
    list.
    """
    assert settings('data=["a", "b"]').data == ("a", "b")
    assert settings('data=["a", "b"]').model_dump(mode="json")["data"] == ["a", "b"]
    assert settings('data=["a"]').model_dump(mode="json")["data"] == "a"
    assert settings("data=[a").data == "[a"
    both = settings('data=["a", "b"]')
    assert validate(Outer, both.model_dump(mode="json")) == both
    assert (each("a"), each(("a", "b"))) == (("a",), ("a", "b"))


def test_the_last_argument_wins() -> None:
    assert settings("count=1", "count=2").count == 2
    assert settings("inner.rate=1", "inner.kind=b", "inner.rate=2").inner == Inner(rate=2, kind="b")


@given(st.text())
def test_any_argument_is_taken_or_refused_in_one_line(text: str) -> None:
    for argument in (text, f"name={text}", f"inner.rate={text}", f"data={text}", f"{text}=1"):
        try:
            settings(argument)
        except BadInput as refusal:
            message = str(refusal)
            assert message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cuont=1"], "unknown key cuont; did you mean count?"),
        (["rate=1"], "unknown key rate; did you mean inner.rate?"),
        (["iner.rate=1"], "unknown key iner; did you mean inner?"),
        (["xyz=1"], "unknown key xyz"),
        (["inner.rate=0"], "inner.rate=0: input should be greater than 0"),
        (["inner.rate=inf"], "inner.rate=inf: input should be a finite number"),
        (["inner.kind=c"], "inner.kind='c': input should be 'a' or 'b'"),
        (["inner=3"], "inner=3: this is a group of keys; give inner.KEY=VALUE"),
        (["sizes=[1, 'x']"], "sizes.1='x': input should be a valid integer, unable to parse"),
        (["count"], "'count' is not of the form key=value"),
        (["=1"], "'=1' is not of the form key=value"),
        (["a..b=1"], "'a..b=1' is not of the form key=value"),
        (["data=[1]"], "data=[1] must be a path or a list of paths"),
        (["data=[]"], "data=[] must be a path or a list of paths"),
        (['data=["a", "a"]'], "data names a twice; give each path once"),
        (["data={other=1}"], "there is no setting data.other: data is a path or a list of paths"),
        (["data.other=1"], "there is no setting data.other: data is a path or a list of paths"),
        (
            ["data.other=1", "data=y"],
            'data="y" would hide data.other: give either a value or a group of keys',
        ),
        (
            [f"count='{'x' * 999}'"],
            f"count='{'x' * 39} ... {'x' * 39}': input should be a valid integer",
        ),
    ],
)
def test_refusals(overrides: list[str], message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        settings(*overrides)
    assert str(refusal.value).startswith(message)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(BadInput, match=r"^data must be given: data=\.\.\.$"):
        validate(Outer, {})


@pytest.mark.parametrize("text", ["[data]\nother = 0.5", "data = { other = 'x' }"])
def test_a_typed_value_does_not_hide_a_group(tmp_path: Path, text: str) -> None:
    """A wrong key in a group of a recipe is refused, also if `data=` stands on the command line. In
    a study, a list of levels may take the place of named levels."""
    (tmp_path / "old.toml").write_text(text)
    with pytest.raises(BadInput, match=r"^data=.z. would hide data\.other: give either a value"):
        load(Outer, [str(tmp_path / "old.toml"), "data=z"])
    named = {"vary": {"lr": {"low": {"a": 1}, "high": {"a": 2}}}}
    assert merge(named, {"vary": {"lr": [1e-3]}}) == {"vary": {"lr": [1e-3]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base = 'self.toml'", "its chain of `base` recipes is circular"),
        ("base = 'absent.toml'", "absent.toml does not exist"),
        ("base = 3", "base=3 is not the path of a recipe"),
        ("a = ", "is not TOML"),
        ("a = " + "[" * 10_000, "is not TOML"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_bad_recipes(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "self.toml"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(BadInput, match=message):
        read_recipe(path)


def test_a_missing_recipe_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "mini.toml").touch()
    with pytest.raises(BadInput, match=r"minni.toml does not exist; did you mean mini.toml\?"):
        read_recipe(tmp_path / "minni.toml")
    with pytest.raises(BadInput, match="is a directory"):
        read_recipe(tmp_path)


def test_nearest() -> None:
    choices = ["optim.lr", "optim.eps", "train.steps"]
    assert nearest("optim.rl", choices) == "; did you mean optim.lr?"
    assert nearest("lr", choices) == "; did you mean optim.lr?"
    assert nearest("train.lr", choices) == "; did you mean optim.lr?"
    assert nearest("optim.learning_rate", choices) == "; did you mean optim.lr?"
    assert nearest("max_steps", choices) == "; did you mean train.steps?"
    assert nearest("stepps", choices) == "; did you mean train.steps?"
    assert nearest("completely else", choices) == ""


def test_help() -> None:
    lines = help_text(Outer).splitlines()
    lines = lines[lines.index("Keys:") :]
    assert lines == [
        "Keys:",
        "  data: str | list of str (required)",
        "      Where.",
        "  fraction: float = 1.0",
        "      How much.",
        "  name: str (optional)",
        "      Its name.",
        "  count: int = 3",
        "      How many, in a sentence that is long enough to be broken in two where the hundredth "
        "column of",
        "      a line stands.",
        "  sizes: list of int = []",
        "      Some sizes.",
        "",
        "inner.*: A group.",
        "  inner.rate: float = 0.5",
        "      How fast.",
        '  inner.kind: "a" | "b" = "a"',
        "      Which.",
    ]


def test_every_recipe_parses(root: Path) -> None:
    """Each recipe loads with a store and a run. Its header says what it is and names a known
    base.
    """
    recipes = [*root.glob("recipes/pretrain/*.toml"), *root.glob("recipes/finetune/*.toml")]
    assert len(recipes) >= 4
    for path in recipes:
        loaded = load(Recipe, [str(path), "data=x", "run=y"])
        assert loaded.data == "x"
        assert path.read_text().startswith("# ")


def test_settings_are_frozen_and_every_key_has_a_sentence() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings().count = 4  # type: ignore[misc]
    assert list(all_keys(Inner, "inner.")) == ["inner.rate", "inner.kind"]
    lines = help_text(Recipe).splitlines()
    for key in all_keys(Recipe):
        place = next(i for i, line in enumerate(lines) if line.startswith(f"  {key}: "))
        assert lines[place + 1].startswith("      ")
    assert max(map(len, lines[lines.index("Keys:") :])) <= 100


def test_the_names_of_others_lead_to_our_keys() -> None:
    keys = set(flat(Recipe(data="-", run="-", head="mlm").model_dump())) | {"init"}
    keys |= {*all_keys(Recipe), *all_keys(EvaluateConfig)}
    assert {key.partition("=")[0] for key in SYNONYMS} <= keys


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("learning_rate=1e-4", "optim.lr"),
        ("optim.learning_rate=1e-4", "optim.lr"),
        ("lr=1e-4", "optim.lr"),
        ("batch_size=32", "batch.rows"),
        ("train.batch_size=32", "batch.rows"),
        ("batch=32", "batch.rows"),
        ("heads=4", "model.heads"),
        ("resume_from=runs/a", "run"),
        ("data_seed=3", "seed.order"),
        ("epochs=3", "train.epochs"),
        ("num_train_epochs=3", "train.epochs"),
        ("max_length=128", "batch.max_tokens"),
        ("max-seq-length=128", "batch.max_tokens"),
        ("--max_seq_length=128", "batch.max_tokens"),
        ("warmup_steps=10", "optim.warmup"),
        ("output_dir=x", "run"),
        ("model=bert", "init"),
        ("optim=adam", "optim.name"),
        ("masking=0.3", "masking.probability"),
        ("bf16=true", "system.precision=bf16"),
        ("fp16=true", "system.precision"),
        ("dropout=0", "model.dropout"),
        ("num_attention_heads=2", "model.heads"),
        ("save_steps=2", "train.checkpoint_every"),
        ("update_freq=4", "batch.accumulate"),
        ("max_sentences=8", "batch.rows"),
        ("keep_interval_updates=3", "train.keep_last"),
        ("mask_multiple_length=10", "masking.spans"),
        ("pooler_dropout=0", "model.head_dropout"),
        ("encoder_embed_dim=64", "model.hidden"),
        ("tokens_per_sample=512", "batch.max_tokens"),
        ("restore_file=x", "init"),
        ("finetune_from_model=x", "init"),
        ("encoder_attention_heads=2", "model.heads"),
        ("clip_norm=0.1", "optim.clip"),
        ("adam_eps=1e-6", "optim.eps"),
        ("save_interval_updates=2", "train.checkpoint_every"),
        ("log_interval=5", "train.log_every"),
        ("best_checkpoint_metric=loss", "train.metric"),
        ("max_update=100", "train.steps"),
        ("total_num_update=100", "train.steps"),
        ("validate_interval_updates=2", "train.validate_every"),
    ],
)
def test_a_name_of_others_leads_to_our_key(typed: str, key: str) -> None:
    given = parse_overrides(Recipe, [typed])
    with pytest.raises(BadInput) as refusal:
        validate(Recipe, merge({"data": "x", "run": "y", "head": "mlm"}, given))
    assert str(refusal.value).endswith(f"; did you mean {key}?")


def test_a_name_leads_to_the_keys_of_its_command() -> None:
    for typed, end in (
        ("output_file=x", "; did you mean out?"),
        ("dataset=x", "; did you mean data?"),
        ("batch_size=3", "unknown key batch_size; --help lists the keys"),
    ):
        with pytest.raises(BadInput) as refusal:
            validate(EvaluateConfig, parse_overrides(EvaluateConfig, [typed]))
        assert str(refusal.value).endswith(end)
