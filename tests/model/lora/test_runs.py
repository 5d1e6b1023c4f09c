"""Runs with LoRA: they train adapters only, resume on the same base alone, and export to PEFT and to full weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("peft")
from safetensors.torch import load_file, save_file

from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.model.training.conftest import chats, evaluations_of, short_rows, steps_of, train_here, validation  # noqa: F401
from tests.model.training.plain import plain_loss, write_hf_folder
from vlmdata.model.lora.sites import LoraError
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.weights.hf_files import WeightsError
from vlmdata.preprocess.config import ImageConfig

LORA: dict[str, Any] = {"lora__rank": 4, "lora__alpha": 16, "data__global_batch": 1, "optimizer__lr": 1e-2}


@pytest.fixture(scope="module")
def base(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A small base with experts, as transformers writes it."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    write_hf_folder(folder, chats, "tiny-moe", mtp=False)
    return folder


@pytest.fixture(scope="module")
def whole(
    one_process: None,
    base: Path,
    chats: Path,  # noqa: F811
    validation: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An undisturbed run of four steps."""
    out = tmp_path_factory.mktemp("lora") / "whole"
    train_here(out, chats, **settings_of(base, validation))
    return out


def settings_of(base: Path, data: Path, **changed: Any) -> dict[str, Any]:
    fixed = {"model__hf": str(base), "model__mtp": False, "data__eval_paths": [str(data)], "run__steps": 4}
    return LORA | fixed | changed


def checkpoint(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("step-*"))[-1]


def transformers_of(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_checkpoint_holds_adapters_only(whole: Path) -> None:
    from megatron.core import dist_checkpointing

    stored = dist_checkpointing.load_plain_tensors(str(checkpoint(whole)))
    assert stored
    tensors = [name for name, value in stored.items() if isinstance(value, torch.Tensor)]
    assert [name for name in tensors if ".wrapper." not in name] == []
    assert any(name.startswith("optimizer.state.exp_avg.") for name in stored)
    lines = steps_of(whole)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_resumed_on_its_base_alone(
    whole: Path,
    base: Path,
    chats: Path,  # noqa: F811
    validation: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    same = settings_of(base, validation)
    train_here(tmp_path / "run", chats, **(same | {"run__steps": 2, "optimizer__decay_steps": 12}))
    said = capsys.readouterr().out
    assert re.search(r"LoRA of rank 4 trains [\d,]+ parameters, [\d.]+% of the model's .*experts: 2 gate_up_proj", said)
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(base / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name] * 1.01}, other / "model.safetensors")
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"holds adapters of other weights \(\w{16}\) than those of this run"):
        train_here(tmp_path / "run", chats, resume=True, **(same | {"model__hf": str(other)}))
    with pytest.raises(ConfigError, match=r"lora.targets: \[\] -> \['attention'\]"):
        train_here(tmp_path / "run", chats, resume=True, **(same | {"lora__targets": ["attention"]}))
    with pytest.raises(
        ConfigError, match=r"lora\.alpha: 16\.0 -> 3\.0.*convert .* --merge --out DIR`, and give --weights"
    ):
        train_here(tmp_path / "run", chats, resume=True, **(same | {"lora__alpha": 3.0}))
    with pytest.raises(ConfigError, match=r"weights: fp32 -> bf16.*convert .* --out DIR`, and give --lora-weights DIR"):
        train_here(tmp_path / "run", chats, resume=True, **(same | {"run__precision": "bf16"}))
    train_here(tmp_path / "run", chats, resume=True, **same)
    assert [each["loss"] for each in steps_of(tmp_path / "run")] == [each["loss"] for each in steps_of(whole)]
    with pytest.raises(ConfigError, match="holds adapters, not a model's weights"):
        train_here(tmp_path / "next", chats, **(same | {"model__weights": str(checkpoint(whole))}))


def test_exports_compute_what_the_run_does(
    whole: Path,
    base: Path,
    chats: Path,  # noqa: F811
    validation: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    from peft import PeftModel

    from vlmdata.model.weights.adapter import merge, to_peft

    wanted = evaluations_of(whole)[-1]["loss"]
    to_peft(checkpoint(whole), tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(transformers_of(base), tmp_path / "adapter")
    assert plain_loss(adapted, validation)[0] == pytest.approx(wanted, rel=1e-5)
    assert plain_loss(transformers_of(base), validation)[0] > wanted + 1e-2
    merge(checkpoint(whole), tmp_path / "merged", base)
    assert plain_loss(transformers_of(tmp_path / "merged"), validation)[0] == pytest.approx(wanted, rel=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.endswith("experts.gate_up_proj") for name in changed)
    assert all("proj" in name and "visual" not in name for name in changed)

    # The merged weights are a start for adapters of another form.
    other = {"model__weights": str(tmp_path / "merged"), "lora__rank": 2, "run__steps": 1, "run__eval_every": 1}
    train_here(tmp_path / "other", chats, **settings_of(base, validation, **other))
    assert evaluations_of(tmp_path / "other")[0]["loss"] == pytest.approx(wanted, rel=1e-6)

    # The adapter is a start of another run, which says what does not fit.
    again = settings_of(base, validation, lora__weights=str(tmp_path / "adapter"), run__steps=1, optimizer__lr=0)
    train_here(tmp_path / "again", chats, optimizer__min_lr=0, **again)
    assert evaluations_of(tmp_path / "again")[-1]["loss"] == pytest.approx(wanted, rel=1e-6)
    for changes, message in [
        ({"lora__rank": 8}, "was trained with other settings: give --set lora.rank=4"),
        ({"lora__targets": ["attention"]}, r"have no place in this run, such as \S+in_proj"),
        ({"lora__vision": "lora"}, r"are missing, such as \S+visual"),
    ]:
        with pytest.raises(LoraError, match=message):
            train_here(tmp_path / "refused", chats, **(again | changes))


def test_qwen3_vl_with_experts_and_a_trained_merger(one_process: None, tmp_path: Path) -> None:
    """Its files hold experts transposed, and the merger's own weights are in the checkpoint beside adapters."""
    from peft import PeftModel

    from vlmdata.model.weights.adapter import merge, to_peft

    source = write_jsonl(tmp_path / "chat.jsonl", short_rows(12))
    data = build_dataset(
        source, tmp_path / "chat", recipe="chat", family="qwen3_vl", image=ImageConfig(1024, 16384), pad_multiple=16
    )
    write_hf_folder(tmp_path / "hf", data, "qwen3-vl-tiny-moe")
    vl = LORA | {"model__hf": str(tmp_path / "hf"), "data__eval_paths": [str(data)], "run__steps": 2}
    train_here(tmp_path / "adapters", data, lora__vision="lora", **vl)
    to_peft(checkpoint(tmp_path / "adapters"), tmp_path / "peft")
    adapted = PeftModel.from_pretrained(transformers_of(tmp_path / "hf"), tmp_path / "peft")
    wanted = evaluations_of(tmp_path / "adapters")[-1]["loss"]
    assert plain_loss(adapted, data)[0] == pytest.approx(wanted, rel=1e-5)
    train_here(tmp_path / "both", data, lora__merger="full", **vl)
    merge(checkpoint(tmp_path / "both"), tmp_path / "merged", tmp_path / "hf")
    wanted = evaluations_of(tmp_path / "both")[-1]["loss"]
    assert plain_loss(transformers_of(tmp_path / "merged"), data)[0] == pytest.approx(wanted, rel=1e-5)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "merged"))
    name = "model.visual.deepstack_merger_list.0.linear_fc1.weight"
    assert not torch.equal(before[name], after[name])


def test_merging_into_other_weights_is_refused(whole: Path, base: Path, tmp_path: Path) -> None:
    from vlmdata.model.weights.adapter import merge

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    tensors = load_file(base / "model.safetensors")
    name = "model.language_model.embed_tokens.weight"
    save_file(tensors | {name: tensors[name] + 1e-3}, other / "model.safetensors")
    with pytest.raises(WeightsError, match="holds other weights"):
        merge(checkpoint(whole), tmp_path / "out", other)
    save_file({key: value.to(torch.float8_e4m3fn) for key, value in tensors.items()}, other / "model.safetensors")
    with pytest.raises(WeightsError, match="is F8_E4M3, not one of F32, BF16, F16: convert a checkpoint in bf16"):
        merge(checkpoint(whole), tmp_path / "out", other)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora__targets": ["wq"]}, r"'wq' matches nothing in this model. There are delta_net \(in_proj_qkv, "),
        ({"lora__targets": ["mlp.gate"]}, "matches only weights that cannot have adapters"),
        ({"lora__targets": ["attn.qkv"]}, r"is in the vision tower .* --set lora.vision=lora"),
        ({"lora__dropout": 0.1}, r"adapters of routed experts \(\S+\) have none"),
    ],
)
def test_targets_that_do_not_fit(
    one_process: None,
    base: Path,
    chats: Path,  # noqa: F811
    validation: Path,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(LoraError, match=message):
        train_here(tmp_path / "run", chats, **settings_of(base, validation, **changes))


def test_dropout_recomputation_prediction_and_a_whole_tower(
    one_process: None,
    chats: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Recomputed layers get the same gradients, although nothing before the first adapter is trained."""
    from vlmdata.model.weights.adapter import to_peft

    lora: dict[str, Any] = {"lora__rank": 2, "lora__targets": ["mlp"], "data__global_batch": 1, "run__steps": 2}
    for recompute in ("none", "full"):
        train_here(tmp_path / recompute, chats, model__recompute=recompute, **lora)
    assert all("mtp_loss" in each for each in steps_of(tmp_path / "full"))
    first, second = (steps_of(tmp_path / name) for name in ("none", "full"))
    for one, other in zip(first, second, strict=True):
        assert one["grad_norm"] > 0
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    train_here(tmp_path / "dropped", chats, lora__dropout=0.5, lora__merger="full", **lora)
    assert steps_of(tmp_path / "dropped")[0]["grad_norm"] > first[0]["grad_norm"]
    with pytest.raises(WeightsError, match="trained weights of the part 'merger' beside its adapters"):
        to_peft(checkpoint(tmp_path / "dropped"), tmp_path / "out")
