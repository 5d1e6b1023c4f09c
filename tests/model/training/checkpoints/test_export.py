"""A trained model as a Hugging Face folder that transformers takes as it is: processor, model, generation."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from PIL import Image
from typer.testing import CliRunner

from tests.model.helpers import relative
from tests.model.small_vocabulary import TOKENS
from tests.model.training.conftest import ROOT, evaluations_of, short_rows, train_here
from tests.model.training.plain import plain_logits, plain_loss
from vlmdata import StreamingLoader
from vlmdata.errors import DatasetFormatError
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.dataset import VlmDataset
from vlmdata.model.weights.convert import to_hf
from vlmdata.model.weights.hf_files import WeightsError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(one_process: None, chats: Path, validation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two steps of training."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train_here(out, chats, run__steps=2, data__eval_paths=[str(validation)])
    return out / "checkpoints" / "step-00000002"


@pytest.fixture(scope="module")
def folder(checkpoint: Path) -> Path:
    """What is exported of it when nothing is said but where to."""
    out = checkpoint.parents[1] / "hf"
    done = to_hf(checkpoint, out)
    assert done.data == json.loads((checkpoint / "run.json").read_text())["config"]["data"]["paths"][0]
    assert done.notes == ()
    return out


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def chat_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the source with its images opened, as a processor takes it."""

    def item(content: dict[str, Any]) -> dict[str, Any]:
        if content["type"] != "image":
            return content
        data = base64.b64decode(content["image"].partition(",")[2])
        return {"type": "image", "image": Image.open(io.BytesIO(data)).convert("RGB")}

    return [{**message, "content": [item(each) for each in message["content"]]} for message in row["messages"]]


def test_the_processor_makes_what_the_model_was_trained_on(processor: Any, chats: Path) -> None:
    """Ids and pixels of the dataset, bit by bit: its tokenizer, template, image bounds and constants."""
    dataset = VlmDataset(chats)
    with_images = [number for number in range(20) if len(dataset[number].image_grid_thw)][:3]
    for number in with_images:
        sample, row = dataset[number], short_rows(160)[number]
        made = processor.apply_chat_template(chat_of(row), tokenize=True, return_dict=True, return_tensors="pt")
        assert made["input_ids"][0].tolist() == sample.input_ids[: sample.length].tolist()
        assert torch.equal(made["image_grid_thw"], torch.from_numpy(sample.image_grid_thw.astype("int64")))
        pixels = FAMILY.pixel_values(torch.from_numpy(sample.patches.copy()), torch.float32)
        assert torch.equal(made["pixel_values"], pixels)


def test_it_generates_until_the_turn_ends(processor: Any, model: Any, chats: Path) -> None:
    row = next(row for row in short_rows(20) if row["messages"][0]["content"][0]["type"] == "image")
    made = processor.apply_chat_template(
        chat_of(row)[:1],
        add_generation_prompt=True,
        enable_thinking=False,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    asked = made["input_ids"].shape[1]
    assert model.generate(**made, max_new_tokens=4).shape[1] > asked
    tokenizer = VlmDataset(chats).manifest.tokenizer
    assert processor.tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.turns.end
    ended = model.generate(**made, max_new_tokens=4, prefix_allowed_tokens_fn=lambda *_: [tokenizer.turns.end])
    assert ended.shape[1] == asked + 1


def test_the_example_of_the_docs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    (example,) = [block.partition("```")[0] for block in page.split("```python\n")[1:] if "AutoProcessor" in block]
    Image.new("RGB", (96, 64), "grey").save(tmp_path / "receipt.png")
    for old, new in (("models/cord", folder), ("receipt.png", tmp_path / "receipt.png"), ("=200", "=2")):
        assert old in example
        example = example.replace(old, str(new))
    exec(example, {})
    said = capsys.readouterr().out.replace("\\n", "\n")
    assert "Describe this image.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n" in said


def test_it_computes_what_ours_does(model: Any, checkpoint: Path, validation: Path) -> None:
    from megatron.core import dist_checkpointing

    from vlmdata.model.families.qwen3_5.build import build_model
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.weights.convert import read_architecture

    (found,) = evaluations_of(checkpoint.parents[1])
    assert (found["loss"], found["targets"]) == pytest.approx(plain_loss(model, validation), rel=1e-5)
    ours = build_model(read_architecture(checkpoint), ModelSettings())
    ours.load_state_dict(dist_checkpointing.load(ours.sharded_state_dict(), str(checkpoint)), strict=False)
    with StreamingLoader(validation, capacity=448, global_batch=1, parts=("tokens", "pixels")) as loader:
        batch = next(batch for batch in loader if len(batch.image_grid_thw))
    dataset, starts = VlmDataset(validation), batch.cu_seqlens_padded.tolist()
    with torch.no_grad():
        logits = ours(batch)[0]
    for origin, start in zip(batch.origins, starts, strict=False):
        theirs = plain_logits(model, dataset[origin.index])
        assert relative(logits[start : start + len(theirs), : theirs.shape[1]], theirs) < 1e-4


def test_it_can_be_trained_further(
    folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "run", chats, run__steps=1, model__hf=str(folder))
    assert f"weights: Hugging Face checkpoint {folder}" in capsys.readouterr().out


class TestWhereTheFilesComeFrom:
    @pytest.fixture
    def weights(self, checkpoint: Path, tmp_path: Path) -> Path:
        """As `vlmdata convert` makes them: they know of no data."""
        shutil.copytree(checkpoint, tmp_path / "weights")
        state = json.loads((tmp_path / "weights" / "run.json").read_text())
        (tmp_path / "weights" / "run.json").write_text(json.dumps({"architecture": state["architecture"]}))
        return tmp_path / "weights"

    def test_no_data_is_reported(self, weights: Path, tmp_path: Path) -> None:
        done = to_hf(weights, tmp_path / "hf")
        assert done.notes == ("without tokenizer and processor: add --data DATASET or --like FOLDER to write them",)
        assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]

    def test_data_of_a_run_that_is_gone_is_reported(self, checkpoint: Path, weights: Path, tmp_path: Path) -> None:
        state = json.loads((checkpoint / "run.json").read_text())
        del state["checksum"]
        state["config"]["data"]["paths"] = ["gone"]
        (weights / "run.json").write_text(json.dumps(state))
        done = to_hf(weights, tmp_path / "hf")
        assert done.notes[0].startswith("the run's dataset gone is not used: gone: no such directory")

    def test_a_folder_without_a_tokenizer_has_that_of_the_run(
        self, checkpoint: Path, weights: Path, folder: Path, chats: Path, tmp_path: Path
    ) -> None:
        like = tmp_path / "like"
        shutil.copytree(folder, like)
        for file in like.glob("*token*"):
            file.unlink()
        done = to_hf(checkpoint, tmp_path / "hf", like=like)
        assert done.data == str(chats)
        assert done.notes == (f"{like} has no tokenizer: tokenizer and processor are those of {chats}",)
        for file in folder.iterdir():
            assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
        (like / "preprocessor_config.json").unlink()
        done = to_hf(weights, tmp_path / "without", like=like)
        assert (done.data, done.notes) == (
            None,
            (f"without tokenizer and processor: {like} has none. Add --data DATASET to write them",),
        )

    def test_a_join_of_different_bounds_is_reported(
        self, checkpoint: Path, weights: Path, chats: Path, tmp_path: Path
    ) -> None:
        joined = Path(shutil.copytree(chats, tmp_path / "joined"))
        manifest = json.loads((joined / "manifest.json").read_text())
        del manifest["config"]["options"]["image"]["max_pixels"]
        (joined / "manifest.json").write_text(json.dumps(manifest))
        state = json.loads((checkpoint / "run.json").read_text())
        del state["checksum"]
        state["config"]["data"]["paths"] = [str(joined)]
        (weights / "run.json").write_text(json.dumps(state))
        message = f"{joined} joins datasets with different pixel bounds: give one of them with --data"
        assert to_hf(weights, tmp_path / "hf").notes[0] == f"the run's dataset {joined} is not used: {message}"
        with pytest.raises(WeightsError, match=f"^{message}"):
            to_hf(weights, tmp_path / "two", data=str(joined))
        assert not (tmp_path / "two").exists()

    @pytest.mark.parametrize("url", [False, True])
    def test_data_can_be_named(self, weights: Path, chats: Path, folder: Path, tmp_path: Path, url: bool) -> None:
        to_hf(weights, tmp_path / "hf", data=f"file://{chats}" if url else str(chats))
        for file in folder.iterdir():
            assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name

    def test_other_bounds_than_those_of_like_are_reported(
        self, checkpoint: Path, folder: Path, chats: Path, tmp_path: Path
    ) -> None:
        like = tmp_path / "like"
        shutil.copytree(folder, like)
        size = {"shortest_edge": 65536, "longest_edge": 16777216}
        (like / "preprocessor_config.json").write_text(json.dumps({"size": size}))
        (like / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": 1}))
        done = to_hf(checkpoint, tmp_path / "one", like=like)
        assert done.notes == (
            f"images: the processor of {like} has 65,536 to 16,777,216 pixels, but the model was trained with 1,024 to "
            f"16,384 pixels; --data {chats} writes the latter",
        )
        assert json.loads((tmp_path / "one" / "preprocessor_config.json").read_text()) == {"size": size}
        assert to_hf(checkpoint, tmp_path / "two", like=like, data=str(chats)).notes == ()
        written = json.loads((tmp_path / "two" / "preprocessor_config.json").read_text())
        assert written["size"] == {"shortest_edge": 1024, "longest_edge": 16384}
        kept = json.loads((tmp_path / "two" / "generation_config.json").read_text())
        tokenizer = VlmDataset(chats).manifest.tokenizer
        assert kept == {
            "temperature": 0.7,
            "eos_token_id": [tokenizer.turns.end, tokenizer.pad],
            "pad_token_id": tokenizer.pad,
        }

    def test_data_of_another_tokenizer_is_refused(self, weights: Path, chats: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        shutil.copytree(chats, other)
        manifest = json.loads((other / "manifest.json").read_text())
        manifest["tokenizer"]["items"]["image"]["token"] = 3
        (other / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(
            WeightsError, match=rf"other has {TOKENS} ids and image token 3, the weights have {TOKENS} ids and image"
        ):
            to_hf(weights, tmp_path / "hf", data=str(other))
        (other / "tokenizer" / "tokenizer.json").unlink()
        with pytest.raises(WeightsError, match=r"other/tokenizer/tokenizer\.json: file not found"):
            to_hf(weights, tmp_path / "hf", data=str(other))
        with pytest.raises(DatasetFormatError, match="nowhere: no such directory"):
            to_hf(weights, tmp_path / "hf", data="nowhere")
        assert not (tmp_path / "hf").exists()


def test_the_command_says_where_from(
    checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmdata.cli.main import app
    from vlmdata.model.parallel import groups

    monkeypatch.setattr(groups, "initialize", lambda **options: None)  # those of this process exist
    monkeypatch.setattr(groups, "destroy", lambda: None)
    done = CliRunner().invoke(app, ["convert", str(checkpoint), "--out", str(tmp_path / "hf")])
    assert done.exit_code == 0, done.output
    assert f"tokenizer, processor and generation settings from {chats}" in done.output
