"""Whole runs of Qwen3-VL: on data of its family, resumed, with frozen parts, exported to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.chat_rows import write_jsonl
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import evaluations_of, short_rows, steps_of, train_here
from tests.model.training.plain import plain_loss, write_checkpoint
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.preprocess.config import ImageConfig

pytestmark = pytest.mark.slow

EXACT = ("loss", "grad_norm", "targets", "tokens", "images", "patches", "samples", "epoch")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with no, one or two images, of the family qwen3_vl."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    source = write_jsonl(folder / "chat.jsonl", short_rows(60))
    image = ImageConfig(1024, 16384)
    return build_chats(source, folder / "chat", family="qwen3_vl", image=image, rows_per_shard=12, pad_multiple=16)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats without images, of the family qwen3_vl."""
    folder = tmp_path_factory.mktemp("qwen3_vl_texts")
    rows = [
        row
        for row in short_rows(60)
        if not any(item["type"] == "image" for message in row["messages"] for item in message["content"])
    ]
    source = write_jsonl(folder / "chat.jsonl", rows)
    return build_chats(source, folder / "chat", family="qwen3_vl", pad_multiple=16)


def exact(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in EXACT} for line in steps_of(out)]


def checkpoint(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("step-*"))[-1]


def test_a_run_learns_resumes_and_exports(one_process: None, data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    from vlmdata.model.weights.convert import to_hf

    vl = {"model__preset": "qwen3-vl-tiny", "data__eval_paths": [str(data)]}
    train_here(tmp_path / "whole", data, **vl)
    train_here(tmp_path / "parts", data, run__steps=2, **vl)
    train_here(tmp_path / "parts", data, resume=True, **vl)
    assert exact(tmp_path / "parts") == exact(tmp_path / "whole")
    lines = steps_of(tmp_path / "whole")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert "mtp_loss" not in lines[0]
    to_hf(checkpoint(tmp_path / "whole"), tmp_path / "hf")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(exported).__name__ == "Qwen3VLForConditionalGeneration"
    (found,) = evaluations_of(tmp_path / "whole")
    assert (found["loss"], found["targets"]) == pytest.approx(plain_loss(exported, data), rel=1e-5)
    # What was written is where another run begins.
    train_here(tmp_path / "further", data, model__hf=str(tmp_path / "hf"), run__steps=1, data__eval_paths=[str(data)])
    assert steps_of(tmp_path / "further")[0]["loss"] < lines[0]["loss"] - 0.5


@pytest.mark.parametrize("part", ["merger", "language"])
def test_frozen_parts_stay_as_they_are(one_process: None, data: Path, tmp_path: Path, part: str) -> None:
    """Also with experts, and the mergers of deepstack belong to the part "merger"."""
    from megatron.core import dist_checkpointing

    from vlmdata.model.training.optimizer.learner import part_of

    vl = {"model__preset": "qwen3-vl-tiny-moe", "model__freeze": [part], "data__global_batch": 1}
    train_here(tmp_path / "run", data, run__steps=2, run__save_every=1, run__keep=0, **vl)
    assert "moe_aux_loss" in steps_of(tmp_path / "run")[0]
    first, end = (
        dist_checkpointing.load_plain_tensors(str(tmp_path / "run/checkpoints" / f"step-0000000{step}"))
        for step in (1, 2)
    )
    names = [name for name in first if name.startswith(("vision.", "language."))]
    assert any(name.startswith("vision.deepstack_mergers.1.") for name in names)
    changed = {part_of(name) for name in names if not torch.equal(first[name], end[name])}
    assert changed == {"vision", "merger", "language"} - {part}


def test_the_language_model_alone_goes_back_to_its_tower(one_process: None, texts: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from vlmdata.model.weights.convert import to_hf
    from vlmdata.model.weights.hf_files import WeightsError

    write_checkpoint(tmp_path / "hf", texts, "qwen3-vl-tiny")
    alone = {"model__hf": str(tmp_path / "hf"), "model__language_only": True, "data__global_batch": 1}
    train_here(tmp_path / "run", texts, run__steps=2, **alone)
    saved = checkpoint(tmp_path / "run")
    with pytest.raises(WeightsError, match="holds the language model alone: give the folder"):
        to_hf(saved, tmp_path / "refused")
    to_hf(saved, tmp_path / "back", like=tmp_path / "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    equal = {name for name in before if torch.equal(before[name], after[name])}
    assert equal >= {name for name in before if name.startswith("model.visual.")}
    assert not any(name.endswith("proj.weight") for name in equal if ".layers." in name)


def test_data_and_model_of_different_families_are_refused(one_process: None, data: Path, tmp_path: Path) -> None:
    message = "for the model family qwen3_vl, but the model needs qwen3_5: preprocess it with --family qwen3_5, or"
    with pytest.raises(ConfigError, match=message):
        train_here(tmp_path / "run", data, model__preset="tiny")
