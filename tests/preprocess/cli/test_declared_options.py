"""Options are declared once: the command line makes the configuration that its options declare, and nothing else."""

from __future__ import annotations

import json
from enum import EnumType
from typing import Any
from unittest import mock

import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.media.codecs import RAW
from vlmdata.options import declared_fields, filled, option_table
from vlmdata.preprocess.cli import run_command
from vlmdata.preprocess.cli.command import PreprocessCommand
from vlmdata.preprocess.cli.preprocess import preprocess
from vlmdata.preprocess.config import SHORTENING, Overlong, PreprocessConfig, VariantKind

APP = typer.Typer()
APP.command()(preprocess)
DECLARED = {each.name: each for each in declared_fields(PreprocessCommand)}
WORD = st.text("abc/.:", min_size=1, max_size=8).filter(lambda text: text.strip("-") == text)
HOST = st.from_regex(r"[a-z]{1,8}(:[0-9]{2})?", fullmatch=True)
OWN_OPTIONS = st.dictionaries(st.text("abc", min_size=1), st.text("xyz="))
#: Values of options that not every value of their type fits.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "family": st.sampled_from(sorted({*FAMILIES} - {"processor"})),
    "pixels": st.sampled_from([RAW, "zstd"]),
    "video_pixels": st.sampled_from([RAW, "zstd"]),
    "recipe_option": OWN_OPTIONS,
    "engine_option": OWN_OPTIONS,
    "keep_columns": st.lists(st.text("ab.", min_size=1, max_size=3), unique=True).map(tuple),
    "allow_private_host": st.lists(HOST).map(tuple),
    "variants": st.just(1),  # more exclude some pixels, and kinds need more
    "variant_kinds": st.permutations([VariantKind.SCALE, VariantKind.CROP]).map(tuple),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "x"]), st.booleans()),
    "overlong": st.sampled_from([each for each in Overlong if each not in SHORTENING]),  # they refuse other turns
    "holdout": st.floats(0.01, 0.99),
    "max_reject_rate": st.floats(0, 1),
}
BY_TYPE = {
    str: WORD,
    str | None: WORD,
    int: st.integers(1, 10**9),
    int | None: st.integers(1, 10**9),
    bool: st.booleans(),
    float | None: st.floats(0.01, 1e6),
}
#: Options that refuse some others.
ALONE = ("part", "trace", "lengths", "as_json", "overwrite", "overlong_min_pixels", "processor", "trust_remote_code")
ALONE += ("holdout_by",)  # needs --holdout


def values_of(name: str) -> st.SearchStrategy[Any]:
    kind = DECLARED[name].kinds[0]
    if name in VALUES:
        return VALUES[name]
    return st.sampled_from(kind) if isinstance(kind, EnumType) else BY_TYPE[DECLARED[name].kind]


GIVEN = st.fixed_dictionaries({}, optional={name: values_of(name) for name in DECLARED if name not in ALONE})


def arguments_of(name: str, value: Any) -> list[str]:
    flag = DECLARED[name].flags[-1]
    if isinstance(value, bool):
        return [flag] if value else []
    if name == "chat_template_kwargs":
        return [flag, json.dumps(value)]
    texts = [f"{key}={text}" for key, text in value.items()] if isinstance(value, dict) else value
    return [word for text in (texts if isinstance(texts, tuple | list) else [texts]) for word in (flag, str(text))]


def parsed(arguments: list[str]) -> PreprocessCommand:
    with mock.patch.object(run_command, "run_command", return_value=0) as called:
        ended = CliRunner().invoke(APP, arguments, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    (command,) = called.call_args.args
    assert isinstance(command, PreprocessCommand)
    return command


@given(GIVEN)
def test_the_command_line_makes_what_its_options_declare(values: dict[str, Any]) -> None:
    values |= {"out": values.get("out", "out"), "allow_urls": True}
    if "holdout_by" in values:
        values.setdefault("holdout", 0.5)
    command = parsed(["rows.jsonl", *(word for name, value in values.items() for word in arguments_of(name, value))])
    defaults = {name: each.default for name, each in DECLARED.items()}
    expected = filled(PreprocessCommand, defaults | values)
    assert command.config == expected.config
    assert {name: getattr(command, name) for name in vars(expected)} == {
        **vars(expected),
        "source": "rows.jsonl",
        "given": frozenset(name for name, value in values.items() if arguments_of(name, value)) | {"source"},
    }


def test_without_options_the_configuration_is_the_default() -> None:
    assert parsed(["--out", "out"]).config == PreprocessConfig()


def test_the_table_of_the_docs_has_every_option_of_the_configuration() -> None:
    flags = [each.flags[0] for each in declared_fields(PreprocessConfig)]
    assert [line.split("`")[1] for line in option_table(PreprocessConfig).splitlines()[2:]] == flags
    assert len(flags) > 35
