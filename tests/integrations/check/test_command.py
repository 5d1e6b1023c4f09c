"""``vlmdata check-model``: exit codes, text and JSON, models by folder and by function, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from tests.integrations.check.test_faults import parts_of
from tests.integrations.tiny_models import MODELS, family_of, tiny_model
from tests.loader.synthetic import write_dataset
from vlmdata.cli.check_model import check_model
from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations.check.packs import check_data
from vlmdata.integrations.proof import Verdict
from vlmdata.integrations.reduced import reduced

OWN = """
import torch
from tests.integrations.check.test_faults import parts_of
from tests.integrations.tiny_models import tiny_model
from vlmdata.integrations.transformers import packed_inputs, packed, token_losses

def healthy():
    model = tiny_model("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    def forward(batch):
        with packed(model):
            return token_losses(model, batch)
    return model, forward

def leaking():
    model = tiny_model("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    return model, lambda batch: {"logits": model(**packed_inputs(batch)).logits}

def nothing():
    return 1

def silent():
    return healthy()[0], lambda batch: {"accuracy": 1}

def failing():
    return healthy()[0], lambda batch: 1 / 0

def short():
    return healthy()[0], lambda batch: {"loss": torch.ones(3)}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    app = typer.Typer()
    app.command()(check_model)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments), "--tokens", "640"])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_forwards.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the configuration of a model, and no weights."""

    def of(model_type: str) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        tiny_model(model_type).config.save_pretrained(folder)
        return folder

    return of


@pytest.mark.parametrize("model_type", MODELS)
def test_a_small_model_of_a_folder_has_no_faults(
    model_type: str, folders: Callable[[str], Path], random_data: Callable[[str], Path], run: Callable[..., Result]
) -> None:
    done = run(folders(model_type), "--data", random_data(family_of(model_type)), "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["equal"]
    assert not report["findings"]
    assert report["model_type"] == model_type
    assert (report["weights"], report["dtype"], report["device"]) == ("random", "float32", "cpu")
    assert len(report["samples"]) == 4
    assert all(each["equal"] for each in report["compared"])
    assert {each["part"] for each in report["compared"]} >= parts_of(model_type)
    assert all(each["error"] < each["tolerance"] / 3 for each in report["compared"]), report["compared"]


def test_a_checkpoint_in_bfloat16(
    tmp_path: Path, random_data: Callable[[str], Path], run: Callable[..., Result]
) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    tiny_model("qwen3_5", **layers).save_pretrained(tmp_path)
    done = run(tmp_path, "--data", random_data("qwen3_5"), "--full", "--dtype", "bfloat16", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["weights"], report["layers"]) == ("checkpoint", 2)
    assert max(each["tolerance"] for each in report["compared"]) > 0.01


def test_a_leaking_forward(own: Path, random_data: Callable[[str], Path], run: Callable[..., Result]) -> None:
    done = run(f"{own}:leaking", "--data", random_data("qwen3_5"))
    assert done.exit_code == 1, done.output
    assert "convolution: model.language_model.layers.0.linear_attn.causal_conv1d_fn" in done.stdout
    assert "state: model.language_model.layers.0.linear_attn.torch_chunk_gated_delta_rule" in done.stdout
    assert done.stdout.rstrip().endswith("2 faults: convolution, state")
    found = json.loads(run(f"{own}:leaking", "--data", random_data("qwen3_5"), "--json").stdout)
    assert [each["kind"] for each in found["findings"]] == ["convolution", "state"]
    assert all(each["remedy"] and each["crosses"] for each in found["findings"])


def test_a_healthy_forward(own: Path, random_data: Callable[[str], Path], run: Callable[..., Result]) -> None:
    done = run(f"{own}:healthy", "--data", random_data("qwen3_5"))
    assert done.exit_code == 0, done.output
    assert "equal: each sample of a pack is computed as if it were alone" in done.stdout
    assert "alone: the plain forward of transformers" in done.stdout


class TestRefused:
    @pytest.fixture(autouse=True)
    def _data(self, random_data: Callable[[str], Path], run: Callable[..., Result]) -> None:
        self.data, self.run = random_data, run

    def refused(self, *arguments: Any, family: str = "qwen3_5", data: Any = None) -> str:
        done = self.run(*arguments, "--data", data or self.data(family))
        assert isinstance(done.exception, UsageError), done.output
        return str(done.exception)

    def test_models(self, tmp_path: Path) -> None:
        assert "no such folder: ./nowhere" in self.refused("./nowhere")
        assert "has no config.json" in self.refused(tmp_path)
        assert "the configuration of nobody/nothing cannot be read" in self.refused("nobody/nothing")
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        said = self.refused(tmp_path)
        assert "model_type 'llama'. Supported are qwen2_5_vl" in said
        (tmp_path / "config.json").write_text('{"model_type": "no_such"}')
        assert "no_such" in self.refused(tmp_path)

    def test_a_checkpoint_without_weights(self, folders: Callable[[str], Path]) -> None:
        assert "the weights of" in self.refused(folders("qwen3_5"), "--full")

    def test_functions(self, own: Path) -> None:
        assert "has no function 'missing'" in self.refused(f"{own}:missing")
        assert "cannot load nowhere.py:build" in self.refused("nowhere.py:build")
        assert "cannot load no_such_module:build: No module named" in self.refused("no_such_module:build")
        assert "returned int. Return (model, forward)" in self.refused(f"{own}:nothing")
        assert "neither 'loss' nor 'logits'" in self.refused(f"{own}:silent")
        assert "cannot be computed: ZeroDivisionError: division by zero" in self.refused(f"{own}:failing")
        assert "loss of shape (3,). Return one number per token" in self.refused(f"{own}:short")
        assert "--full has no effect" in self.refused(f"{own}:healthy", "--full")

    def test_data(self, own: Path, folders: Callable[[str], Path], tmp_path: Path) -> None:
        folder = folders("qwen3_5")
        assert "is for the family 'qwen3_vl'" in self.refused(folder, family="qwen3_vl")
        assert "is for the family 'qwen3_vl'" in self.refused(f"{own}:healthy", family="qwen3_vl")
        other = tiny_model("qwen3_5", image_token=7)
        other.config.save_pretrained(tmp_path / "other")
        assert "image_token_id is 7" in self.refused(tmp_path / "other")

    def test_another_token_of_videos(self, random_videos: Callable[[str], Path], tmp_path: Path) -> None:
        other = tiny_model("qwen3_5")
        other.config.video_token_id = 8
        other.config.save_pretrained(tmp_path / "other")
        said = self.refused(tmp_path / "other", data=random_videos("qwen3_5"))
        assert "video_token_id is 8, and videos of" in said

    def test_no_two_samples_fit(self, folders: Callable[[str], Path]) -> None:
        with pytest.raises(UsageError, match=r"a pack of 8 tokens has room for \d of .* raise --tokens"):
            check_data(VlmDataset(self.data("qwen3_5")), 8)

    def test_versions_on_which_packs_differ(
        self, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = folders("qwen3_5")
        monkeypatch.setattr("transformers.__version__", "5.99.0")
        verdict = Verdict("", "packed: logits differ by 0.5", images=True)
        monkeypatch.setattr("vlmdata.integrations.proof.verdict_of", lambda *_: verdict)
        said = self.refused(folder)
        assert "with transformers 5.99.0, packs of qwen3_5 differ from their samples (packed: logits differ" in said

    def test_devices(self, folders: Callable[[str], Path]) -> None:
        assert "--device 'nowhere' cannot be used" in self.refused(folders("qwen3_5"), "--device", "nowhere")


def test_a_small_model_keeps_every_kind_of_layer() -> None:
    """Of configurations as large as those on the hub, without their weights."""
    from transformers import Qwen2_5_VLConfig, Qwen3_5MoeConfig, Qwen3VLConfig

    moe = reduced(Qwen3_5MoeConfig())
    assert moe.text_config.layer_types == ["linear_attention", "full_attention"] * 2
    assert moe.text_config.num_experts == 8
    deep = reduced(Qwen3VLConfig())
    assert deep.vision_config.deepstack_visual_indexes == [0, 1, 2]
    assert deep.text_config.num_hidden_layers > 3
    windows = reduced(Qwen2_5_VLConfig())
    assert (windows.vision_config.depth, windows.vision_config.fullatt_block_indexes) == (4, [1, 3])
    for small, full in ((moe, Qwen3_5MoeConfig()), (deep, Qwen3VLConfig()), (windows, Qwen2_5_VLConfig())):
        assert small.text_config.vocab_size == full.text_config.vocab_size
        assert small.vision_config.patch_size == full.vision_config.patch_size


def test_samples_are_short_and_of_each_kind(tmp_path: Path) -> None:
    dataset = VlmDataset(write_dataset(tmp_path / "data", 2, 8))
    batches = check_data(dataset, 2048)
    images = sorted(each.totals["image"] for each in batches.alone)
    assert images[0] == 0
    assert images[-1] > 1
    assert 1 in images
    one, two = batches.packs
    assert one.batch.total_tokens == two.batch.total_tokens
    assert one.batch.cu_seqlens.tolist() != two.batch.cu_seqlens.tolist()
