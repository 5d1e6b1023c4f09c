"""``check`` finds nothing wrong with healthy models, and names each planted fault, for every family it applies to."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.check import faults
from tests.integrations.tiny_models import family_of, tiny_model
from tests.loader.synthetic import IMAGE_TOKEN, VIDEO_TOKEN
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations.check import Checked, Leak, Result, check, check_data
from vlmdata.integrations.check.packs import CheckData

LINEAR, DEEPSTACK = ("qwen3_5", "qwen3_5_moe"), ("qwen3_vl", "qwen3_vl_moe")
Data = Callable[[str], CheckData]

#: Each fault, the models it is planted in, the kinds that it is named, and whether samples reach each other. A fault
#: that all may have is planted in one or two of them; each model has several, with and without experts.
PLANTED: list[tuple[Callable[[Any], faults.Forward], tuple[str, ...], list[Leak], bool | None]] = [
    (faults.no_cu_seqlens_in_the_delta_rule, ("qwen3_5",), [Leak.STATE], True),
    (faults.no_borders_in_the_convolution, ("qwen3_5_moe",), [Leak.CONVOLUTION], True),
    (faults.linear_attention_over_the_pack, ("qwen3_5",), [Leak.CONVOLUTION, Leak.STATE], True),
    (faults.no_cu_seqlens_in_an_opaque_layer, ("qwen3_5",), [Leak.STATE], True),
    (faults.no_borders_in_an_opaque_layer, ("qwen3_5_moe",), [Leak.CONVOLUTION], True),
    (faults.an_opaque_layer_over_the_pack, ("qwen3_5",), [Leak.STATE, Leak.CONVOLUTION], True),
    (faults.attention_over_the_pack, ("qwen2_5_vl", "qwen3_5"), [Leak.ATTENTION], True),
    (faults.positions_that_do_not_restart, ("qwen3_vl", "qwen3_5_moe"), [Leak.POSITION], None),
    (faults.pixels_of_another_sample, ("qwen2_5_vl", "qwen3_vl_moe"), [Leak.PIXELS], None),
    (faults.swapped_image_features, ("qwen2_5_vl", "qwen3_vl"), [Leak.PIXELS], True),
    (faults.deepstack_rows_misplaced, ("qwen3_vl_moe",), [Leak.DEEPSTACK], None),
    (faults.labels_shifted_again, ("qwen3_vl_moe",), [Leak.LABELS], None),
    (faults.labels_that_cross_borders, ("qwen2_5_vl",), [Leak.LABELS], True),
    (faults.unweighted_loss, ("qwen3_vl",), [Leak.LABELS], False),
    (faults.stale_lengths, ("qwen3_vl",), [Leak.STALE], True),
]


@pytest.fixture(scope="session")
def data(random_data: Callable[[str], Path]) -> Data:
    """Three or four samples of 512 tokens together, with no to two images."""

    @cache
    def of(model_type: str) -> CheckData:
        return check_data(VlmDataset(random_data(family_of(model_type))), 512)

    return of


def checked(model_type: str, fault: Callable[[Any], faults.Forward], data: Data, **options: Any) -> Result:
    def build() -> Checked:
        model = tiny_model(model_type, num_hidden_layers=2, **_two_kinds(model_type))
        return Checked(model, fault(model))

    return check(build, data(model_type), **options)


def _two_kinds(model_type: str) -> dict[str, Any]:
    return {"layer_types": ["linear_attention", "full_attention"]} if model_type in LINEAR else {}


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe"])
def test_a_healthy_forward_has_no_faults(model_type: str, data: Data) -> None:
    """One of the user's own; test_command.py has that of vlmdata, for all models."""
    result = checked(model_type, faults.healthy, data)
    assert not result.findings, result.findings
    assert {each.part for each in result.comparisons} >= parts_of(model_type)
    assert all(each.error < each.tolerance / 3 for each in result.comparisons), result.comparisons


def parts_of(model_type: str) -> set[str]:
    """What is compared of a model."""
    found = {"tokens", "images", "positions", "attention", "loss", "gradients"}
    found |= {"linear attention"} if model_type in LINEAR else set()
    return found | ({"deepstack"} if model_type in DEEPSTACK else set())


@pytest.mark.parametrize(
    ("fault", "model_type", "kinds", "crosses"),
    [
        pytest.param(fault, model_type, kinds, crosses, id=f"{fault.__name__}-{model_type}")
        for fault, model_types, kinds, crosses in PLANTED
        for model_type in model_types
    ],
)
def test_a_planted_fault_is_named(
    fault: Callable[[Any], faults.Forward], model_type: str, kinds: list[Leak], crosses: bool | None, data: Data
) -> None:
    result = checked(model_type, fault, data, gradients=False)
    assert [each.kind for each in result.findings] == kinds, result.findings
    for finding in result.findings:
        assert finding.error > 10 * finding.tolerance
        assert crosses is None or finding.crosses is crosses, finding


@pytest.fixture(scope="session")
def clips(random_videos: Callable[[str], Path]) -> Data:
    """Three or four samples of 768 tokens together, some with videos, some with both."""

    @cache
    def of(model_type: str) -> CheckData:
        return check_data(VlmDataset(random_videos(family_of(model_type))), 768)

    return of


def test_chosen_samples_have_videos_and_images(clips: Data) -> None:
    for model_type in ("qwen3_5", "qwen2_5_vl"):
        for pack in clips(model_type).packs:
            counts = [[rows.count(unit) for unit in ("video", "image")] for rows in pack.rows]
            assert sum(videos > 0 for videos, _ in counts) > 1
            assert any(videos and images for videos, images in counts)
            assert len(pack.seconds) == len(pack.batch.video_grid_thw)
            batch, ids = pack.batch, pack.batch.input_ids[0]
            placeholders = torch.isin(ids, torch.tensor([IMAGE_TOKEN, VIDEO_TOKEN]))
            assert torch.equal(pack.vision_tokens, placeholders)
            # As the loader makes them.
            frames = 2 * int(batch.video_grid_thw.prod(dim=1).sum())
            assert (len(batch.video_patches), batch.pixel_values_videos().shape[0]) == (frames, frames // 2)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl", "qwen2_5_vl"])
def test_a_healthy_model_has_no_faults_with_videos(model_type: str, clips: Data) -> None:
    result = checked(model_type, faults.healthy, clips)
    assert not result.findings, result.findings
    images = next(each for each in result.comparisons if each.part == "images")
    assert images.places > 5
    assert all(each.error < each.tolerance / 3 for each in result.comparisons), result.comparisons


@pytest.mark.parametrize(
    ("fault", "kind", "model_type"),
    [
        (faults.pixels_of_another_clip, Leak.PIXELS, "qwen3_5"),
        (faults.frames_of_a_patch_swapped, Leak.PIXELS, "qwen2_5_vl"),
        (faults.positions_of_videos_without_time, Leak.POSITION, "qwen3_5"),
        (faults.positions_of_videos_without_time, Leak.POSITION, "qwen2_5_vl"),
        (faults.pixels_of_another_sample, Leak.PIXELS, "qwen3_vl"),
        (faults.attention_over_the_pack, Leak.ATTENTION, "qwen2_5_vl"),
    ],
)
def test_a_fault_planted_in_videos_is_named(
    fault: Callable[[Any], faults.Forward], kind: Leak, model_type: str, clips: Data
) -> None:
    result = checked(model_type, fault, clips, gradients=False)
    assert [each.kind for each in result.findings] == [kind], result.findings
    assert result.findings[0].error > 10 * result.findings[0].tolerance


def test_bfloat16_is_compared_with_its_own_error(data: Data) -> None:
    result = checked("qwen3_5_moe", faults.healthy, data, dtype=torch.bfloat16)
    assert not result.findings, result.findings
    loss = next(each for each in result.comparisons if each.part == "loss")
    assert loss.tolerance > 0.001


@pytest.mark.parametrize("fault", [faults.no_cu_seqlens_in_the_delta_rule, faults.no_borders_in_the_convolution])
def test_leaks_are_found_in_bfloat16(fault: Callable[[Any], faults.Forward], data: Data) -> None:
    result = checked("qwen3_5", fault, data, dtype=torch.bfloat16, gradients=False)
    expected = Leak.STATE if fault is faults.no_cu_seqlens_in_the_delta_rule else Leak.CONVOLUTION
    assert [each.kind for each in result.findings] == [expected]


@pytest.mark.parametrize("over_borders", [False, True])
def test_multi_token_prediction(over_borders: bool, data: Data) -> None:
    def build() -> Checked:
        torch.manual_seed(0)
        model = faults.WithMtp(tiny_model("qwen3_vl", num_hidden_layers=2))
        return Checked(model, faults.mtp(model, over_borders=over_borders))

    result = check(build, data("qwen3_vl"))
    assert "multi-token prediction" in {each.part for each in result.comparisons}
    assert {each.kind for each in result.findings} == ({Leak.MTP} if over_borders else set())
    if over_borders:
        assert result.findings[0].place == "forward"


def test_a_leak_of_the_backward_pass(data: Data) -> None:
    def build() -> Checked:
        model = tiny_model("qwen3_vl", num_hidden_layers=2)
        inside = faults.healthy(model)

        def forward(batch: PackedBatch) -> Any:
            with _doubled_gradients(model.model.language_model.layers[0].self_attn, batch.num_samples > 1):
                return inside(batch)

        return Checked(model, forward)

    (finding,) = check(build, data("qwen3_vl")).findings
    assert (finding.kind, finding.phase) == (Leak.ATTENTION, "backward")
    assert finding.place == "model.language_model.layers.0.self_attn"


@contextmanager
def _doubled_gradients(layer: torch.nn.Module, doubled: bool) -> Iterator[None]:
    def double(module: Any, args: Any, output: Any) -> Any:
        hidden, weights = output
        if doubled and hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)
        return hidden, weights

    handle = layer.register_forward_hook(double)
    yield
    handle.remove()


def test_a_forward_that_shows_no_modules(data: Data) -> None:
    """The computation is in a copy of the model, as if compiled: that samples leak is known, but not where."""

    def build() -> Checked:
        model = tiny_model("qwen3_vl", num_hidden_layers=2)
        return Checked(model, faults.attention_over_the_pack(copy.deepcopy(model)))

    (finding,) = check(build, data("qwen3_vl"), gradients=False).findings
    assert (finding.kind, finding.place, finding.crosses) == (Leak.OTHER, "forward", True)
    assert "no module shows a difference" in finding.detail


class _Cumulated(torch.nn.Module):
    """A model that is not of transformers: means over the earlier tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(1024, 16), torch.nn.Linear(16, 1024)

    def forward(self, ids: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        pieces = self.embedding(ids[0]).tensor_split(bounds[1:-1])
        return self.head(torch.cat([each.cumsum(0) / 100 for each in pieces]))


@pytest.mark.parametrize(("fault", "kinds"), [("none", []), ("whole", [Leak.OTHER]), ("stale", [Leak.STALE])])
def test_a_model_that_transformers_does_not_know(fault: str, kinds: list[Leak], data: Data) -> None:
    def build() -> Checked:
        torch.manual_seed(0)
        model, kept = _Cumulated(), []

        def forward(batch: PackedBatch) -> Any:
            bounds = batch.cu_seqlens_padded.tolist()
            if batch.num_samples > 1 and fault == "stale":
                kept.append(bounds)
                bounds = kept[0]
            return {"logits": model(batch.input_ids, bounds if fault != "whole" else bounds[:: len(bounds) - 1])}

        return Checked(model, forward)

    result = check(build, data("qwen3_vl"))
    assert result.reference == "the model's own forward, one sample per batch"
    assert [each.kind for each in result.findings] == kinds


class _Layers(torch.nn.Module):
    """A model of two layers, of which a pack skips the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(1024, 16), torch.nn.Linear(16, 1024)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor, skipping: bool) -> torch.Tensor:
        hidden = self.first(self.embedding(ids))
        return self.head(hidden if skipping else self.second(hidden))


def test_a_right_tensor_in_the_place_of_another(data: Data) -> None:
    """The output of a layer was compared and is right, but the head should have another."""

    def build() -> Checked:
        torch.manual_seed(0)
        model = _Layers()
        return Checked(model, lambda batch: {"logits": model(batch.input_ids, batch.num_samples > 1)})

    (finding,) = check(build, data("qwen3_vl"), gradients=False).findings
    assert (finding.kind, finding.detail) == (Leak.OTHER, "argument input of head")


def test_the_model_stays_as_it_was(data: Data) -> None:
    model = tiny_model("qwen3_5", num_hidden_layers=2, **_two_kinds("qwen3_5"))
    module, call = sys.modules[type(model).__module__], torch.nn.Module.__call__
    before = (module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    check(lambda: Checked(model, faults.linear_attention_over_the_pack(model)), data("qwen3_5"))
    assert (module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule) == before
    assert torch.nn.Module.__call__ is call
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
