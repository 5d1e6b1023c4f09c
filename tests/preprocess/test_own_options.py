"""Options of recipes and engines: declared by a dataclass, given by name, checked; on the command line too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.preprocess.command_line import TOKENIZER, Ended
from vlmdata.errors import SourceError
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.conversation import Conversation, Message, TextPart
from vlmdata.preprocess.own_options import NoOptions, declared_options, make_options
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.registries import RECIPES
from vlmdata.preprocess.row import Row
from vlmdata.registry import Registry, not_callable


class Tone(StrEnum):
    CALM = "calm"
    LOUD = "loud"


@dataclass(frozen=True)
class Every:
    """A field of each type there may be."""

    text: Annotated[str, "A text."] = "none"
    flag: Annotated[bool, "A flag."] = False
    count: Annotated[int, "A count."] = 3
    share: Annotated[float, "A share."] = 0.5
    tone: Annotated[Tone, "A tone."] = Tone.CALM
    way: Annotated[Literal["up", "down"], "A way."] = "up"
    most: Annotated[int | None, "A limit."] = None
    names: Annotated[tuple[str, ...], "Names."] = ()
    bare: int = 1


@dataclass(frozen=True)
class Needy:
    rate: Annotated[float, "A rate."]

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}, below 0")


class EveryRecipe:
    Options = Every


class NeedyRecipe:
    Options = Needy


class PlainRecipe:
    """It has no options."""


def made(name: str, given: dict[str, Any]) -> Any:
    """Makes the options of a recipe."""
    built_in = {each: f"{__name__}:{each.capitalize()}Recipe" for each in ("every", "needy", "plain")}
    registry = Registry[Any]("recipe", "vlmdata.none", "--recipe", not_callable, built_in, SourceError)
    return make_options(registry, name, given)


#: Any options, as values.
EVERY = st.builds(
    Every,
    text=st.text(),
    flag=st.booleans(),
    count=st.integers(),
    share=st.floats(allow_nan=False),
    tone=st.sampled_from(Tone),
    way=st.sampled_from(["up", "down"]),
    most=st.none() | st.integers(),
    names=st.lists(st.text(alphabet="abc", min_size=1), min_size=1).map(tuple),
)


@given(EVERY)
def test_options_are_the_same_from_values_as_from_what_is_typed(options: Every) -> None:
    values = {name: getattr(options, name) for name in Every.__dataclass_fields__}
    typed = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in values.items()}
    assert made("every", values) == options
    assert made("every", typed) == options
    assert made("every", json.loads(json.dumps(values))) == options


def test_options_left_out_have_their_defaults() -> None:
    assert made("every", {}) == Every()
    assert made("plain", {}) == NoOptions()


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("flag", "yes", "true or false"),
        ("flag", 1, "true or false"),
        ("count", "3.5", "a whole number"),
        ("count", 3.5, "a whole number"),
        ("count", True, "a whole number"),
        ("share", "half", "a number"),
        ("tone", "soft", "calm or loud"),
        ("way", "left", "up or down"),
        ("most", "few", "a whole number or none"),
        ("text", 3, "text"),
    ],
)
def test_a_wrong_value_is_reported_with_what_it_must_be(name: str, value: Any, must: str) -> None:
    with pytest.raises(SourceError) as wrong:
        made("every", {name: value})
    assert f"--recipe-option {name}={value}: it must be {must}. Options of recipe every:\n" in str(wrong.value)


def test_an_unknown_option_is_reported_with_name_type_default_and_meaning_of_the_others() -> None:
    with pytest.raises(SourceError) as wrong:
        made("every", {"colour": "red"})
    first, *lines = str(wrong.value).splitlines()
    assert first == "--recipe-option colour=red: recipe every has no option colour. Options of recipe every:"
    assert lines[:2] == ["  text: text, default 'none'. A text.", "  flag: true or false, default 'false'. A flag."]
    assert lines[4] == "  tone: calm or loud, default 'calm'. A tone."
    assert len(lines) == len(declared_options(Every)) == 9


def test_an_option_without_default_must_be_given() -> None:
    with pytest.raises(SourceError, match=r"give --recipe-option rate=….*\n  rate: a number, required. A rate."):
        made("needy", {})


def test_the_check_of_the_dataclass_is_reported() -> None:
    with pytest.raises(SourceError, match=r"--recipe needy, its options: rate is -1\.0, below 0"):
        made("needy", {"rate": "-1"})


class Answering:
    """A recipe of one's own with an option."""

    @dataclass(frozen=True)
    class Options:
        """Its option."""

        times: Annotated[int, "How often the answer is given."] = 1

    def __init__(self, options: Options):
        self._options = options

    def __call__(self, row: Row) -> Conversation:
        """Asks and answers."""
        answer = " ".join([row.values["answer"]] * self._options.times)
        return Conversation((Message("user", (TextPart("?"),)), Message("assistant", (TextPart(answer),))))


class Deaf(Answering):
    def __init__(self) -> None:
        super().__init__(self.Options())


class Demanding:
    def __init__(self, config: Any):
        pass


OWN = f"{__name__}:Answering"


def test_a_recipe_of_ones_own_gets_its_options() -> None:
    conversation = load_recipe(OWN, {"times": "2"})(Row(0, {"answer": "Yes."}))
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1].text == "Yes. Yes."
    assert make_options(RECIPES, OWN, {}) == Answering.Options(1)


def test_options_that_the_constructor_does_not_take_are_reported() -> None:
    with pytest.raises(SourceError, match="declares Options, but its constructor does not take `options`"):
        load_recipe(f"{__name__}:Deaf")


def test_a_constructor_that_needs_anything_else_is_reported() -> None:
    with pytest.raises(SourceError, match=r"its constructor needs `config`\. It may take `options`"):
        load_recipe(f"{__name__}:Demanding")


class TestCommand:
    def test_records_all_options_of_the_recipe(self, vlmdata: Callable[..., Ended], tmp_path: Path) -> None:
        source = tmp_path / "rows.jsonl"
        source.write_text('{"answer": "Yes."}\n')
        command = ("preprocess", source, "--recipe", OWN, "-j", 1, *TOKENIZER, "--out", tmp_path / "out")
        assert vlmdata(*command).code == 0
        assert Manifest.read(tmp_path / "out").config["options"]["recipe_options"] == {"times": 1}
        changed = vlmdata(*command, "--recipe-option", "times=2")
        assert changed.code == 2
        assert "config.options.recipe_options.times: 1 there, 2 now" in changed.stderr
        assert vlmdata(*command, "-O", "times=2", "--overwrite").code == 0

    def test_lists_options_of_all_recipes_or_of_the_named_one(self, vlmdata: Callable[..., Ended]) -> None:
        every, own = vlmdata("preprocess", "-O", "help"), vlmdata("preprocess", "--recipe", OWN, "-O", "help")
        assert "Options of recipe cord_v2:\n  prompt: text, default 'Describe this image.'. " in every.stdout
        assert own.stdout.splitlines()[1:] == ["  times: a whole number, default '1'. How often the answer is given."]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["-O", "prompt"], "give each option once, as NAME=VALUE"),
            (["-O", "prompt=a", "-O", "prompt=b"], "give each option once, as NAME=VALUE"),
            (["--target", "json"], "-O target="),
            (["--stray-marks", "plain"], "-O stray_marks="),
        ],
        ids=str,
    )
    def test_refuses_options_of_another_form(
        self, vlmdata: Callable[..., Ended], tmp_path: Path, options: list[str], words: str
    ) -> None:
        ended = vlmdata("preprocess", "demo", "--out", tmp_path / "out", *options)
        assert ended.code == 2
        assert words in " ".join(ended.stderr.replace("│", " ").split())
