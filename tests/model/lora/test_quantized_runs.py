"""Runs on a base in NF4: they resume on the same alone, export adapters, and say what does not go together."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from tests.model.lora.test_runs import checkpoint
from tests.model.training.conftest import chats, evaluations_of, steps_of, train_here, validation  # noqa: F401
from tests.model.training.many_runs import Run, train_all
from tests.model.training.plain import plain_loss, write_hf_folder
from tests.model.workers import run_in_all
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.settings.early_checks import check_early
from vlmdata.model.weights.hf_files import WeightsError

NF4: dict[str, Any] = {"lora__rank": 4, "lora__base": "nf4", "data__global_batch": 2, "optimizer__lr": 1e-2}


@pytest.fixture(scope="module")
def base(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A small dense base, as transformers writes it."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    write_hf_folder(folder, chats, "tiny", mtp=False)
    return folder


def settings_of(base: Path, **changed: Any) -> dict[str, Any]:
    return NF4 | {"model__hf": str(base), "model__mtp": False, "run__steps": 3} | changed


def test_trains_resumes_and_exports(
    one_process: None,
    base: Path,
    chats: Path,  # noqa: F811
    validation: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron.core import dist_checkpointing
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    from vlmdata.model.weights.adapter import base_folder, merge, to_peft

    whole = settings_of(base, data__eval_paths=[str(validation)])
    train_here(tmp_path / "whole", chats, **whole)
    said = capsys.readouterr().out
    assert re.search(r"frozen weights of rank 0: \d+ tensors in float32, 0\.\d+ GB; 8 tensors in NF4, 0.000 GB", said)
    stored = dist_checkpointing.load_plain_tensors(str(checkpoint(tmp_path / "whole")))
    assert [name for name, each in stored.items() if isinstance(each, torch.Tensor) and ".wrapper." not in name] == []

    # As one run, though the base was quantized anew.
    train_here(tmp_path / "run", chats, **(whole | {"run__steps": 2, "optimizer__decay_steps": 12}))
    with pytest.raises(ConfigError, match=r"base with lora.base nf4, but this run has lora.base plain: resume with"):
        train_here(tmp_path / "run", chats, resume=True, **(whole | {"lora__base": "plain"}))
    train_here(tmp_path / "run", chats, resume=True, **whole)
    losses = [each["loss"] for each in steps_of(tmp_path / "whole")]
    assert [each["loss"] for each in steps_of(tmp_path / "run")] == losses
    assert losses[-1] < losses[0]

    # The adapter computes the same with bitsandbytes in transformers.
    last = checkpoint(tmp_path / "whole")
    to_peft(last, tmp_path / "adapter")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["model.visual", "lm_head"]
    )
    theirs = AutoModelForImageTextToText.from_pretrained(
        base, quantization_config=how, dtype=torch.float32, device_map="cpu"
    )
    adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter").train()
    wanted = evaluations_of(tmp_path / "whole")[-1]["loss"]
    assert plain_loss(adapted, validation)[0] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(WeightsError, match=r"quantized to NF4 \(lora.base\)\. .* Leave out --merge"):
        merge(last, tmp_path / "merged", base)
    with pytest.raises(WeightsError, match="quantized to NF4"):  # before it asks for a base
        base_folder(last)
    assert not (tmp_path / "merged").exists()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_a_distributed_checkpoint_is_the_same_base(
    one_process: None,
    base: Path,
    chats: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    from vlmdata.model.weights.convert import to_megatron

    to_megatron(base, tmp_path / "weights")
    states = []
    for name, source in (("hf", base), ("megatron", tmp_path / "weights")):
        train_here(tmp_path / name, chats, **settings_of(base, run__steps=1, model__weights=str(source)))
        states.append(json.loads((checkpoint(tmp_path / name) / "run.json").read_text())["base"])
    assert states[0] == states[1]
    assert [each["loss"] for each in steps_of(tmp_path / "hf")] == [
        each["loss"] for each in steps_of(tmp_path / "megatron")
    ]


@pytest.mark.slow
def test_layouts(chats: Path, tmp_path: Path) -> None:  # noqa: F811
    """A step equals that of one process: blocks are the same in all layouts. So do bases, for resuming."""
    write_hf_folder(tmp_path / "hf", chats, "tiny")
    common: dict[str, Any] = {
        "model.preset": "tiny",
        "model.weights": str(tmp_path / "hf"),
        "optimizer.lr": 2e-2,
        "optimizer.warmup_steps": 0,
        "run.keep": 0,
        "run.steps": 2,
    } | {name.replace("__", "."): value for name, value in NF4.items() if name != "optimizer__lr"}
    layouts = {
        "TP 2 and SP": {"parallel.tp": 2, "parallel.sp": True, "model.recompute": "full"},
        "PP 2": {"parallel.pp": 2},
        "DP 2": {},
    }
    made = [Run("one", 1, common | {"run.save_every": 1})]
    made += [Run(name, 2, common | layout, "one") for name, layout in layouts.items()]
    said = run_in_all(train_all, tmp_path, chats, made, world=2)
    assert {message for each in said for message in each.values()} == {""}
    wanted = steps_of(tmp_path / "one")[1]
    for name in layouts:
        (found,) = steps_of(tmp_path / name)
        for value in ("loss", "grad_norm"):
            assert found[value] == pytest.approx(wanted[value], rel=2e-4), (name, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.rank": None}, "lora.base has no effect without adapters: give --lora-rank"),
        ({"parallel.fsdp": True}, "parallel.fsdp does not go together with lora.base nf4: .* leave out parallel.fsdp"),
        ({"run.fp8": True}, "lora.base 'nf4' does not go together with run.fp8: .* Leave out one"),
        ({"lora.base": "int8"}, "lora.base is 'int8'; it must be one of plain, nf4"),
        ({"lora.load_in_4bit": True}, "unknown setting 'lora.load_in_4bit'; .*lora.base"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str, chats: Path) -> None:  # noqa: F811
    given = {"data.paths": [str(chats)], "lora.rank": 4, "lora.base": "nf4"} | changes
    with pytest.raises(ConfigError, match=message):
        check_early(load_config(None, list(given.items())))


def test_without_the_package(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    config = load_config(None, [("data.paths", [str(chats)]), ("lora.rank", 4), ("lora.base", "nf4")])
    check_early(config)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    with pytest.raises(
        ConfigError, match=r"lora\.base 'nf4' needs the package bitsandbytes, .* pip install bitsandbytes"
    ):
        check_early(config)
