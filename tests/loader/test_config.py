"""One set of options: declared once, the same by keyword, in a configuration and on every command line."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from torch.utils.data import DataLoader

import vlmdata.inspect.run
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.loader.rows import chat_rows
from tests.preprocess.command_line import Ended
from vlmdata import Blend, LoaderConfig, StreamingLoader, open_dataset
from vlmdata.errors import UsageError
from vlmdata.loader import config as declared
from vlmdata.loader.config import Packing, Parallelism, Reading, loader_options
from vlmdata.loader.option_types import LoaderOptions
from vlmdata.loader.run_record import RunRecord
from vlmdata.packing import config as packing_config
from vlmdata.packing.cost import cost_model

#: A value of each option that decides packs, other than its default, and the flags that give it.
VALUES: dict[str, tuple[Any, list[str]]] = {
    "capacity": (896, ["--capacity", "896"]),
    "global_batch": (6, ["--global-batch", "6"]),
    "max_patches": (400, ["--max-patches", "400"]),
    "pad_to_capacity": (True, ["--pad-to-capacity"]),
    "pad_multiple": (16, ["--pad-multiple", "16"]),
    "last": ("keep", ["--last", "keep"]),
    "shuffle_window": (2, ["--shuffle-window", "2"]),
    "seed": (7, ["--seed", "7"]),
    "blend": (Blend("epochs", (2.0,)), ["--weights", "2", "--weights-by", "epochs"]),
    "cost": ("2b", ["--cost", "2b"]),
    "context_parallel": (2, ["--cp", "2"]),
    "tensor_parallel": (4, ["--tp", "4", "--sp"]),
    "dp_size": (2, ["--dp", "2"]),
}
SIZES = {"capacity": 896, "global_batch": 1}


@pytest.fixture
def run(vlmdata: Callable[..., Ended]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``vlmdata`` in this process; gives exit code, stdout, and the words of stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code, said, error = vlmdata(*arguments, columns=200)
        return code, said, " ".join(error.split())

    return call


def test_every_option_says_what_it_means() -> None:
    for option in loader_options().values():
        assert re.fullmatch(r"[A-Z].*\.", option.help), option.name
    assert {"capacity", "dp_size", "timeout"} <= set(inspect.signature(StreamingLoader).parameters)
    assert str(inspect.signature(StreamingLoader).parameters["timeout"]) == "timeout: float = 120.0"


def test_what_an_option_declares_is_checked() -> None:
    checked = set()
    for option in loader_options().values():
        wrong: list[tuple[Any, str]] = []
        if {int, float, bool} & set(option.kinds):
            wrong.append(("nonsense", ".*"))
        if option.option.least is not None:
            wrong.append((option.option.least - 1, f"at least {option.option.least}"))
        if option.option.above is not None:
            wrong += [(bad, f"more than {option.option.above} seconds") for bad in (option.option.above, math.nan)]
        if choices := [choice for kind in option.kinds for choice in get_args(kind) if get_origin(kind) is Literal]:
            wrong.append(("nonsense", f"one of {', '.join(choices)}"))
        for value, wanted in wrong:
            with pytest.raises(UsageError, match=rf"^{option.name} is {value!r}; it must be {wanted}$"):
                LoaderConfig.of(**{**SIZES, option.name: value})  # type: ignore[arg-type]
            checked.add(option.name)
    assert {"capacity", "timeout", "hedge", "verify", "last", "fetch", "num_workers", "shared_memory"} <= checked


def test_type_checkers_know_every_option() -> None:
    """A misspelt keyword, or one of another type, is an error of mypy. So is an attribute that a loader has not."""
    types = get_type_hints(LoaderOptions, localns={**vars(packing_config), **vars(declared)})
    assert types == {name: each.kind for name, each in loader_options().items()}
    for function in (StreamingLoader.__init__, LoaderConfig.of, LoaderConfig.with_options):
        assert function.__annotations__["options"] == "Unpack[LoaderOptions]"


def test_code_that_takes_a_loader_for_a_dataloader_is_told_what_to_give(chat: Path) -> None:
    from accelerate import Accelerator

    with StreamingLoader(chat, **SIZES) as loader:
        with pytest.raises(AttributeError, match=r"'dataset'\. .* give DataLoader\(loader\.as_dataset\(\), "):
            Accelerator(cpu=True).prepare_data_loader(loader)
        for given in (DataLoader(loader), DataLoader(loader, batch_size=None)):
            with pytest.raises(TypeError, match=r"not subscriptable\. .*as_dataset"):
                next(iter(given))
        with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
            loader.nonsense  # noqa: B018
        assert not hasattr(loader, "batch_size")
        assert next(iter(DataLoader(loader.as_dataset(), batch_size=None))).holds("input_ids")


def test_keywords_make_a_configuration(chat: Path) -> None:
    config = LoaderConfig(
        Packing(capacity=832, global_batch=2, seed=3), Parallelism(dp_rank=0, dp_size=2), Reading(verify=False)
    )
    by_name = {"capacity": 832, "global_batch": 2, "seed": 3, "dp_rank": 0, "dp_size": 2, "verify": False}
    assert LoaderConfig.of(**by_name) == config
    with StreamingLoader(chat, config) as loader, StreamingLoader(chat, **by_name) as named:
        assert loader.config == named.config
        assert loader.plan_config == named.plan_config == config.plan_config()
    with StreamingLoader(chat, config, seed=4, dp_rank=1) as mixed:
        assert mixed.config == LoaderConfig.of(**{**by_name, "seed": 4, "dp_rank": 1})


@pytest.mark.parametrize("command", ["plan", "inspect"])
@pytest.mark.parametrize("name", VALUES)
def test_commands_make_the_loaders_plan(
    chat: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    value, flags = VALUES[name]
    size = ["--capacity", "896"] if name != "capacity" else []
    more = {"sequence_parallel": True} if name == "tensor_parallel" else {}
    if command == "plan":
        code, said, error = run("plan", chat, *size, *flags, "--json")
        found = json.loads(said)["config"] if not code else error
    else:
        kept: list[StreamingLoader] = []
        describe = vlmdata.inspect.run.describe_step
        monkeypatch.setattr(
            vlmdata.inspect.run, "describe_step", lambda loader, *of: kept.append(loader) or describe(loader, *of)
        )
        code, _, error = run("inspect", chat, "--step", "0:0", *size, *flags, "--json")
        found = kept[0].plan_config.to_dict() if not code else error
    ranks = value if name == "dp_size" else 1
    expected = LoaderConfig.of(**{"capacity": 896, "global_batch": ranks, name: value, **more})
    assert found == expected.plan_config().to_dict()
    if name != "dp_size":  # which decides no pack
        base = LoaderConfig.of(capacity=832, global_batch=1) if name == "capacity" else LoaderConfig.of(**SIZES)
        assert expected.plan_config() != base.plan_config()


def test_costs_are_those_of_the_family_unless_told(
    chat: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """Of the loader, of ``plan``, and of the record that ``--run`` reads."""
    source = write_jsonl(tmp_path / "chat.jsonl", chat_rows(4))
    other = build_dataset(source, tmp_path / "other", recipe="chat", family="qwen3_vl")
    for data, name in ((chat, "4b"), (other, "qwen3-vl-4b")):
        expected = dataclasses.asdict(cost_model(name))
        with StreamingLoader(data, **SIZES | {"dp_rank": 0, "dp_size": 1}) as loader:
            assert dataclasses.asdict(loader.plan_config.cost) == expected
            RunRecord.of(loader, tmp_path).write()
        assert json.loads(run("plan", data, "--capacity", 896, "--json")[1])["config"]["cost"] == expected
        assert json.loads(run("plan", "--run", tmp_path, "--json")[1])["config"]["cost"] == expected
        told = run("plan", data, "--capacity", 896, "--cost", "qwen3-vl-8b", "--json")[1]
        assert json.loads(told)["config"]["cost"] == dataclasses.asdict(cost_model("qwen3-vl-8b"))


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_every_option_of_packs_is_offered(run: Callable[..., tuple[int, str, str]], command: str) -> None:
    said = run(command, "--help")[1]
    for _, flags in VALUES.values():
        for flag in flags[::2]:
            assert f"{flag} " in said
    assert loader_options()["pad_multiple"].summary.split(",")[0] in " ".join(re.sub("[│]", " ", said).split())


def test_plan_shows_the_name_of_a_dataset_as_it_is(
    chat: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    place = tmp_path / "chat[red]"
    place.symlink_to(chat)
    _, said, _ = run("plan", place, chat, "--capacity", 896)
    assert "[red]" in said


def test_plan_estimates_every_split_of_vision_and_language(
    chat: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    arguments = ("plan", chat, "--capacity", 896, "--global-batch", 12, "--vision-gpus")
    _, said, _ = run(*arguments, 2, "--gpus", 4, "--json")
    assert [each["vision_gpus"] for each in json.loads(said)["splits"]] == [1, 2, 3]
    _, said, _ = run(*arguments, 2, "--gpus", 4)
    assert "vision on some of 4 GPUs" in said
    assert said.count("chosen") == said.count("best") == 1
    code, _, error = run(*arguments, 3)
    assert (code, "choose 2, 4, 5, 6, 7" in error) == (2, True)


def test_sequence_parallelism_is_off_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"capacity": 64, "global_batch": 1, "dp_rank": 0, "dp_size": 1}
    declared._warn_that_sequence_parallel_is_off.cache_clear()
    with caplog.at_level(logging.WARNING, "vlmdata.loader"):
        assert LoaderConfig.of(**sizes, tensor_parallel=8, sequence_parallel=True).plan_config().alignment == 8
        assert LoaderConfig.of(**sizes, tensor_parallel=8, sequence_parallel=False).plan_config().alignment == 1
        assert not caplog.records
        assert LoaderConfig.of(**sizes, tensor_parallel=8).plan_config().alignment == 1
        assert "Pass sequence_parallel=True (--sp)" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"seed": 1}, "capacity and global_batch must be given"),
        ({"capacity": 64, "global_batch": 1, "num_workers": -1}, "num_workers is -1"),
        ({"capacity": 64, "global_batch": 1, "timeout": 0}, "timeout is 0"),
        ({"capacity": 64, "global_batch": 1, "parts": ["sound"]}, "parts .* 'sound' is not one of tokens"),
        ({"capacity": 64, "global_batch": 1, "context_parallel_rank": 1}, "context_parallel_rank 1 of context_parall"),
        ({"capacity": 64, "global_batch": 1, "cost": "70b"}, "no cost model for '70b'"),
        ({"capacity": 2**31}, "capacity is 2147483648; it must be at most 2147483647"),
        ({"capacity": 64, "global_batch": 10**20}, "global_batch is 10+; it must be at most 2147483647"),
        ({"capacity": 64, "max_patches": 10**20}, "max_patches is 10+; it must be at most 9223372036854775807"),
        ({"capacity": "64"}, "capacity is '64'; it must be an integer"),
        ({"capacity": 64.0}, "capacity is 64.0; it must be an integer"),
        ({"capacity": True}, "capacity is True; it must be an integer"),
        ({"capacity": 64, "dp_rank": "0", "dp_size": "4"}, "dp_rank is '0'; it must be an integer"),
        ({"capacity": 64, "num_workers": "2"}, "num_workers is '2'; it must be an integer"),
        ({"capacity": 64, "timeout": "60"}, "timeout is '60'; it must be a number"),
        ({"capacity": 64, "pad_to_capacity": "false"}, "pad_to_capacity is 'false'; it must be True or False"),
        ({"capacity": 64, "parts": "tokens"}, r"parts is 'tokens'; it must be a list, such as \['tokens'\]"),
        ({"capacity": 64, "blend": (0.5, 0.5)}, r"blend is \(0.5, 0.5\); it must be a Blend"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LoaderConfig.of(**{"global_batch": 1, **options} if "capacity" in options else options)


def test_numbers_may_be_of_numpy_and_options_none() -> None:
    plain = LoaderConfig.of(capacity=64, global_batch=1, timeout=60, pad_to_capacity=True)
    config = LoaderConfig.of(
        capacity=np.int64(64), global_batch=np.int32(1), timeout=np.float32(60), pad_to_capacity=np.True_, dp_rank=None
    )
    assert config.plan_config() == plain.plan_config()


def test_weights_of_text_are_refused() -> None:
    with pytest.raises(UsageError, match=r"blend weights \['1', '2'\]: need numbers, not text"):
        Blend("tokens", ("1", "2"))  # type: ignore[arg-type]


def test_data_and_configuration_of_other_types_are_refused(chat: Path) -> None:
    for data in (None, 3, [chat, None], open_dataset(chat)):
        with pytest.raises(UsageError, match=r"^data is .*; it must be a folder, a URL, or a list of them$"):
            StreamingLoader(data, capacity=896, global_batch=1)  # type: ignore[arg-type]
    for config in (896, {"capacity": 896}):
        with pytest.raises(UsageError, match=r"^config is .*; it must be a LoaderConfig"):
            StreamingLoader(chat, config)  # type: ignore[arg-type]


def test_an_unknown_option_has_a_nearest_one(chat: Path) -> None:
    with pytest.raises(TypeError, match="no option 'capasity'; the nearest is 'capacity'"):
        StreamingLoader(chat, capasity=64)


def test_options_are_settled_without_reading(tmp_path: Path) -> None:
    config = LoaderConfig.of(capacity=64, global_batch=1, cost=cost_model("4b"))
    assert config.with_options(cost="4b").plan_config() == config.plan_config()
    with pytest.raises(UsageError, match="prefetch_factor is 0"):
        StreamingLoader(tmp_path / "nothing", config, prefetch_factor=0)


def test_an_internal_error_is_no_wrong_option(
    chat: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("lengths")

    monkeypatch.setattr(vlmdata.inspect.run, "describe_step", broken)
    with pytest.raises(KeyError, match="lengths"):
        run("inspect", chat, "--step", "0:0")
    monkeypatch.setattr("vlmdata.packing.plan.run.plan_epoch", broken)
    with pytest.raises(KeyError, match="lengths"):
        run("plan", chat)
