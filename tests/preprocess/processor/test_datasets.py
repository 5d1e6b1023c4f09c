"""Datasets of a processor: what stands in them is what the processor makes of each row, and packs join it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.preprocess.processor.tiny import BOUNDS
from vlmdata import PackedBatch, StreamingLoader, VlmDataset
from vlmdata.cli.main import app
from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig, SpecialText
from vlmdata.preprocess.processor import load_processor
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.dataset import verify_dataset

#: A model of each rule: per token, three axes of positions, along the second axis, filled up to the largest.
MODELS = ("glm4v", "gemma3", "idefics3", "mistral3")


def made(rows: Path, out: Path, **options: Any) -> VlmDataset:
    """Makes a dataset in this process."""
    config = PreprocessConfig(recipe="chat", rows_per_shard=4, **options)
    preprocess_dataset(open_source(str(rows), recipe="chat"), out, config)
    return VlmDataset(out)


def batch_of(dataset: Path | str, **options: Any) -> PackedBatch:
    """The first pack, of all samples."""
    loader = StreamingLoader(str(dataset), capacity=4096, global_batch=1, num_workers=0, **options)
    return next(iter(loader))


@pytest.fixture(scope="module", params=MODELS)
def dataset(request: pytest.FixtureRequest, rows: Path, models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dataset of a model, and its folder."""
    out = tmp_path_factory.mktemp(request.param) / "out"
    folder = models(request.param)
    return made(rows, out, processor=str(folder), family="processor"), folder


def expected(rows: Path, folder: Path) -> list[dict[str, torch.Tensor]]:
    """What the processor itself makes of each row, by ``apply_chat_template`` and a call."""
    from transformers import AutoProcessor

    processor, found = AutoProcessor.from_pretrained(folder), []
    for line in rows.read_text().splitlines():
        talk = json.loads(line)["messages"]
        parts = [part for turn in talk for part in turn["content"] if isinstance(part, dict)]
        images = [Image.open(rows.parent / part["image"]) for part in parts if part["type"] == "image"]
        text = processor.apply_chat_template(talk, tokenize=False)
        given = {"images": [images]} if images else {}
        try:
            made = processor(text=[text], return_mm_token_type_ids=True, return_tensors="pt", **given)
        except TypeError:
            made = processor(text=[text], return_tensors="pt", **given)
        found.append(dict(made))
    return found


def test_every_sample_is_what_the_processor_makes_of_its_row(dataset: Any, rows: Path) -> None:
    opened, folder = dataset
    assert not verify_dataset(opened.directory).faults
    batch = batch_of(opened.directory)
    inputs = batch.model_inputs()
    alone = expected(rows, folder)
    assert batch.num_samples == len(alone) == 7
    order = [origin.row for origin in batch.origins]
    starts, lengths = batch.host.cu_seqlens_padded, np.diff(batch.host.cu_seqlens)
    family = opened.family
    assert set(inputs) == {"input_ids", "position_ids", *(rule.name for rule in family.tensors)}
    cursor = dict.fromkeys(inputs, 0)
    for number, row in enumerate(order):
        own, begin, length = alone[row], int(starts[number]), int(lengths[number])
        assert torch.equal(inputs["input_ids"][:, begin : begin + length], own["input_ids"])
        within = inputs["position_ids"].reshape(-1, batch.total_tokens)[0, begin : begin + length]
        assert torch.equal(within, torch.arange(length))
        for rule in family.tensors:
            value = own.get(rule.name)
            if rule.rule == "token":
                wanted = torch.zeros(1, length, dtype=torch.int64) if value is None else torch.as_tensor(value)
                assert torch.equal(inputs[rule.name][:, begin : begin + length], wanted)
            elif value is not None:
                part = inputs[rule.name].narrow(rule.axis, cursor[rule.name], value.shape[rule.axis])
                assert torch.equal(part[tuple(map(slice, value.shape))], value)
                assert part.dtype == value.dtype
                cursor[rule.name] += value.shape[rule.axis]
    for rule in family.tensors:
        assert rule.rule == "token" or inputs[rule.name].shape[rule.axis] == cursor[rule.name]


def test_targets_are_the_answers_and_what_ends_them(dataset: Any, rows: Path) -> None:
    opened, folder = dataset
    tokenizer = load_processor(str(folder)).runner.processor.tokenizer
    lines, end = rows.read_text().splitlines(), "<|im_end|>" if folder.name == "mistral3" else "<|im_end|>\n"
    for sample in opened:
        talk = json.loads(lines[int(sample.key)])["messages"]
        learned = tokenizer.decode(sample.input_ids[sample.loss_mask == 1].tolist())
        assert learned == "".join(f"{turn['content']}{end}" for turn in talk if turn["role"] == "assistant")


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_the_general_family_equals_a_handwritten_one(name: str, rows: Path, models: Any, tmp_path: Path) -> None:
    folder = str(models(name))
    general = made(rows, tmp_path / "general", processor=folder, family="processor", pixels="zstd")
    known = made(rows, tmp_path / "known", tokenizer=folder, family=name, image=ImageConfig(*BOUNDS))
    for one, other in zip(general, known, strict=True):
        assert one.key == other.key
        assert (one.input_ids == other.input_ids).all()
        assert (one.loss_mask == other.loss_mask).all()
        assert (one.position_ids == other.position_ids).all()
    ours, theirs = (batch_of(each.directory).model_inputs() for each in (general, known))
    assert ours.keys() - theirs.keys() == {"mm_token_type_ids"}
    for argument, value in theirs.items():
        assert torch.equal(ours[argument], value), argument


def test_a_known_model_takes_its_family_and_others_the_general_one(rows: Path, models: Any, tmp_path: Path) -> None:
    for name, family in (("qwen3_vl", "qwen3_vl"), ("mistral3", "processor")):
        out = tmp_path / name
        command = ["preprocess", str(rows), "--processor", str(models(name)), "--out", str(out), "-j", "1"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert VlmDataset(out).manifest.family == family


@pytest.mark.parametrize("special_text", list(SpecialText))
def test_rows_that_the_processor_would_misread_are_rejected(
    special_text: SpecialText, models: Any, tmp_path: Path, rows: Path
) -> None:
    image = {"type": "image", "image": str(rows.parent / "1_0.png")}
    for name in ("1_0.png",):
        shutil.copy(rows.parent / name, tmp_path / name)
    talks = [
        [{"type": "text", "text": "A literal [IMG] here."}],
        [{**image, "image": "1_0.png"}, {"type": "text", "text": "and [IMG_END]"}],
        [{**image, "image": "1_0.png", "max_pixels": 5000}, {"type": "text", "text": "small"}],
        [{**image, "image": "1_0.png"}, {"type": "text", "text": "fine"}],
    ]
    lines = [
        {"messages": [{"role": "user", "content": talk}, {"role": "assistant", "content": "Yes."}]} for talk in talks
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    opened = made(
        source, tmp_path / "out", processor=str(models("mistral3")), family="processor", special_text=special_text
    )
    assert [sample.key for sample in opened] == ["000000003"]
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert reasons == ["special_token_text", "special_token_text", "unsupported_content"]


@pytest.mark.parametrize("dataset", ["mistral3"], indirect=True)
def test_other_commands_take_the_dataset(dataset: Any, tmp_path: Path) -> None:
    opened, _ = dataset
    run = lambda *words: CliRunner().invoke(app, [str(word) for word in words])  # noqa: E731
    source = opened.directory
    for command in (
        ("recode", source, "--pixels", "zstd", "--out", tmp_path / "zstd"),
        ("select", source, "--where", "length > 60", "--out", tmp_path / "some"),
        ("inspect", source),
        ("inspect", source, "--sample", "000000002"),
    ):
        result = run(*command)
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert "pixel_values" in result.output
    for name in ("zstd", "some"):
        assert not verify_dataset(tmp_path / name).faults
    whole, recoded = batch_of(source).model_inputs(), batch_of(tmp_path / "zstd").model_inputs()
    assert all(torch.equal(recoded[name], value) for name, value in whole.items())
    refused = run("retokenize", source, "--tokenizer", "embedded", "--out", tmp_path / "again")
    assert isinstance(refused.exception, UsageError)
    assert "family processor" in str(refused.exception)


@pytest.mark.parametrize("dataset", ["mistral3"], indirect=True)
def test_what_the_general_family_lacks_is_refused_by_name(dataset: Any) -> None:
    opened, folder = dataset
    for options, what in (
        ({"pixels": "bfloat16"}, "pixels"),
        ({"context_parallel": 2, "context_parallel_rank": 0}, "context_parallel_rank"),
    ):
        with pytest.raises(UsageError, match=what):
            batch_of(opened.directory, **options)
    common: dict[str, Any] = {"processor": str(folder), "family": "processor"}
    for more in ({"pixels": "jxl"}, {"variants": 2}, {"overlong": Overlong.SHRINK_IMAGES}, {"tokenizer": "other"}):
        with pytest.raises(ValueError, match=next(iter(more))):
            PreprocessConfig(**common, **more)
    with pytest.raises(UsageError, match="max_pixels"):
        PreprocessConfig(**common, image=ImageConfig(None, 5000)).to_json()
    with pytest.raises(ValueError, match="no dataset may name"):
        PreprocessConfig.from_json(opened.manifest.config["options"])


@pytest.mark.parametrize("dataset", ["mistral3"], indirect=True)
def test_a_strangers_description_of_tensors_is_refused_as_damage(dataset: Any, tmp_path: Path) -> None:
    opened, _ = dataset
    copy = tmp_path / "copy"
    shutil.copytree(opened.directory, copy)
    fields = json.loads((copy / "manifest.json").read_text())
    for change in (
        {"position_axes": 7},
        {"tensors": [{**fields["processor"]["tensors"][0], "dtype": "object"}]},
        {"tensors": [{**fields["processor"]["tensors"][0], "axis": 9}]},
        {"chat": {}},
        {"colours": [[1.0]]},
    ):
        changed = {**fields, "processor": {**fields["processor"], **change}}
        (copy / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(DatasetFormatError, match=r"manifest\.json"):
            VlmDataset(copy)
