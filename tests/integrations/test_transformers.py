"""A pack in transformers' models equals its samples one by one, whatever was computed before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tests.integrations.comparing import (
    TOLERANCE,
    Packs,
    Samples,
    assert_same_gradients,
    difference,
    every_model,
    expected_losses,
    model_of,
    state_of,
    with_images,
)
from tests.integrations.tiny_models import MODELS, ONE_AXIS, family_of, inputs_of_sample, tiny_model
from tests.loader.helpers import epoch_of
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations import attention
from vlmdata.integrations.transformers import is_packed, packed, packed_forward, packed_inputs, token_losses


@every_model
class TestVideos:
    """Packs with images and videos equal their samples, whose positions transformers computes itself."""

    @pytest.fixture
    def dataset(self, model_type: str, random_videos: Callable[[str], Path]) -> Path:
        return random_videos(family_of(model_type))

    @pytest.fixture
    def batches(self, dataset: Path) -> list[PackedBatch]:
        made = epoch_of(dataset, capacity=1024, max_patches=None, global_batch=2, pad_multiple=4)
        return [batch.clone() for batch in made]

    def test_losses(self, model_type: str, dataset: Path, batches: list[PackedBatch]) -> None:
        model, compared = model_of(model_type), 0
        for batch in batches:
            with packed(model), torch.no_grad():
                losses = token_losses(model, batch)
            assert float(losses.max()) > 5 or not batch.num_samples
            assert difference(losses, batch, model, VlmDataset(dataset)) < TOLERANCE
            compared += bool(len(batch.host.image_starts) and (batch.host.video_grid_thw[:, 0] > 1).sum() > 1)
        assert compared > 1

    def test_gradients(self, model_type: str, dataset: Path, batches: list[PackedBatch]) -> None:
        together, alone = tiny_model(model_type), tiny_model(model_type)
        batch = max(batches, key=lambda each: min(len(each.host.image_starts), len(each.host.video_starts)))
        assert batch.loss_weights is not None
        with packed(together):
            (token_losses(together, batch) * batch.loss_weights[0]).sum().backward()
        (expected_losses(alone, batch, VlmDataset(dataset)) * batch.loss_weights[0]).sum().backward()
        assert_same_gradients(together, alone, at_least=50)

    def test_arguments(self, model_type: str, batches: list[PackedBatch]) -> None:
        for batch in batches:
            inputs = packed_inputs(batch)
            assert (
                ("video_grid_thw" in inputs) == ("pixel_values_videos" in inputs) == (len(batch.host.video_starts) > 0)
            )


@pytest.mark.parametrize("model_type", [*MODELS, *ONE_AXIS])
class TestEqualToSamples:
    def test_losses(self, model_type: str, packs: Packs, samples: Samples) -> None:
        model, batches = model_of(model_type), packs(model_type)
        assert max(each.num_samples for each in batches) > 4
        for batch in batches:
            with packed(model), torch.no_grad():
                losses = token_losses(model, batch)
            assert losses.shape == (batch.total_tokens,)
            assert losses.dtype == torch.float32
            assert float(losses.max()) > 5 or not batch.num_samples  # there is something to compare
            assert difference(losses, batch, model, samples(model_type)) < TOLERANCE

    def test_gradients_of_the_weighted_loss(self, model_type: str, packs: Packs, samples: Samples) -> None:
        batch, dataset = with_images(packs(model_type)), samples(model_type)
        together, alone = tiny_model(model_type), tiny_model(model_type)
        assert batch.loss_weights is not None
        with packed(together):
            (token_losses(together, batch) * batch.loss_weights[0]).sum().backward()
        (expected_losses(alone, batch, dataset) * batch.loss_weights[0]).sum().backward()
        assert_same_gradients(together, alone, at_least=50)


#: Each family, with experts where it has them: all models are compared above.
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe"])
class TestPackedModels:
    def test_after_other_calls(self, model_type: str, packs: Packs, samples: Samples) -> None:
        """Packs of other lengths, calls that fail, plain calls and generation leave no trace in each other."""
        model, dataset, (first, *others) = tiny_model(model_type), samples(model_type), packs(model_type)
        before, sample = state_of(model), dataset[with_images(others).origins[0].index]
        plain = inputs_of_sample(model, sample)
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
        with torch.no_grad():
            generated, logits = model.generate(**plain, **settings), model(**plain).logits
            with packed(model) as prepared:
                assert prepared is model
                for batch in (first, with_images(others), first):
                    token_losses(model, batch)
                    wrong = packed_inputs(first) | {"input_ids": torch.full_like(first.input_ids, 10**9)}
                    with pytest.raises(IndexError):
                        model(**wrong)
                    assert difference(token_losses(model, batch), batch, model, dataset) < TOLERANCE
                    assert torch.equal(model.generate(**plain, **settings), generated)
                    assert torch.equal(model(**plain).logits, logits)
            assert torch.equal(model.generate(**plain, **settings), generated)
            assert torch.equal(model(**plain).logits, logits)
        model.model.rope_deltas = None
        assert state_of(model) == before
        assert not is_packed(model)

    def test_attention_is_computed_within_segments(
        self, model_type: str, packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No mask is made, and no attention has more tokens than the longest segment or image."""
        model, batch, calls = model_of(model_type), with_images(packs(model_type)), []

        def watched(query: Any, key: Any, value: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
            assert attn_mask is None
            calls.append((key.shape[2], kwargs["is_causal"]))
            return scaled_dot_product_attention(query, key, value, **kwargs)

        monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
        monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
        with packed(model), torch.no_grad():
            token_losses(model, batch)
        lengths = [length for length in batch.cu_seqlens_padded.diff().tolist() if length > 1]
        assert set(lengths) <= {length for length, causal in calls if causal}
        assert max(length for length, causal in calls if causal) == max(lengths)
        assert max(length for length, causal in calls if not causal) <= int(batch.image_grid_thw.prod(1).max())

    def test_with_a_kernel(
        self, model_type: str, packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stand-in for the kernel of GPUs: decoder and encoder, losses and gradients."""
        together, alone, calls = tiny_model(model_type), tiny_model(model_type), []
        batch = with_images(packs(model_type))

        def kernel(q: Any, k: Any, v: Any, bounds: torch.Tensor, longest: int, causal: bool, scale: float) -> Any:
            assert (q.ndim, bounds.dtype, longest) == (3, torch.int32, int(bounds.diff().max()))
            calls.append((causal, bounds.tolist()))
            rows = zip(*(each.transpose(0, 1).split(bounds.diff().tolist(), dim=1) for each in (q, k, v)), strict=True)
            pieces = [
                scaled_dot_product_attention(*each, is_causal=causal, scale=scale, enable_gqa=True) for each in rows
            ]
            return torch.cat(pieces, dim=1).transpose(0, 1)

        monkeypatch.setattr(attention, "kernel_for", lambda *args: kernel)
        with packed(together):
            losses = token_losses(together, batch)
            losses.sum().backward()
        kinds = getattr(together.config.text_config, "layer_types", ["full_attention"] * 4)
        assert calls.count((True, batch.cu_seqlens_padded.tolist())) == kinds.count("full_attention")
        assert sum(not causal for causal, _ in calls) == 2
        assert difference(losses, batch, alone, samples(model_type)) < TOLERANCE
        expected_losses(alone, batch, samples(model_type)).sum().backward()
        assert_same_gradients(together, alone, at_least=50)

    def test_with_masks(self, model_type: str, packs: Packs, samples: Samples) -> None:
        """The user's own choice of attention stays."""
        model, batch = tiny_model(model_type), with_images(packs(model_type))
        model.set_attn_implementation("eager")
        with packed(model), torch.no_grad():
            assert model.config.text_config._attn_implementation == "eager"
            losses = token_losses(model, batch)
        assert difference(losses, batch, model_of(model_type), samples(model_type)) < TOLERANCE

    def test_with_flash_attention(
        self, model_type: str, packs: Packs, samples: Samples, flash_attention: list[list[int]]
    ) -> None:
        """A stand-in that sees boundaries alone, and no mask: for the decoder, and for the images of the encoder."""
        model, batch = tiny_model(model_type), with_images(packs(model_type))
        for config in (model.config, model.config.text_config, model.config.vision_config):
            config._attn_implementation = "flash_attention_2"
        with packed(model), torch.no_grad():
            losses = token_losses(model, batch)
        kinds = getattr(model.config.text_config, "layer_types", ["full_attention"] * 4)
        assert flash_attention.count(batch.cu_seqlens_padded.tolist()) == kinds.count("full_attention")
        assert difference(losses, batch, model_of(model_type), samples(model_type)) < TOLERANCE

    def test_a_batch_without_targets(self, model_type: str, packs: Packs) -> None:
        model, batch = tiny_model(model_type), packs(model_type)[0].clone()
        assert batch.labels is not None
        batch.labels.fill_(-100)
        with packed(model):
            losses = token_losses(model, batch)
        losses.sum().backward()
        assert not losses.any()
        assert not model.lm_head.weight.grad.any()


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Attention by ``cu_seq_lens``, in the place of a library for GPUs. Records the boundaries of each call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[list[int]] = []

    def attention(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, scaling: float, **kwargs: Any) -> Any:
        assert attention_mask is None
        assert kwargs["cu_seq_lens_q"] is kwargs["cu_seq_lens_k"]
        lengths = kwargs["cu_seq_lens_q"].diff().tolist()
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(lengths)
        calls.append(kwargs["cu_seq_lens_q"].tolist())
        causal = kwargs.get("is_causal", module.is_causal)
        pieces = [
            scaled_dot_product_attention(*each, is_causal=causal, scale=scaling, enable_gqa=True)
            for each in zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
        ]
        return torch.cat(pieces, dim=2).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", attention)
    return calls


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_late_backward_passes_of_attention_fail(implementation: str, packs: Packs) -> None:
    """Instead of attending to the whole pack."""
    model = tiny_model("qwen3_vl").train()
    model.gradient_checkpointing_enable()
    with packed(model):
        late = token_losses(model, with_images(packs("qwen3_vl"))).sum()
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match=r"call backward\(\) before `with packed\(model\)` ends"):
        late.backward()


def test_attention_is_put_back(packs: Packs) -> None:
    model = tiny_model("qwen3_vl")
    configs = (model.config.text_config, model.config.vision_config)
    with packed(model):
        assert [each._attn_implementation for each in configs] == [attention.DECODER, attention.ENCODER]
        assert "vlmdata" not in model.config.to_json_string()
    assert [each._attn_implementation for each in configs] == ["sdpa", "sdpa"]
    with packed(model):
        model.set_attn_implementation("eager")
    assert [each._attn_implementation for each in configs] == ["eager", "eager"]


def test_a_prepared_model_in_a_process_that_knows_no_packs(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, batch = tiny_model("qwen3_vl"), with_images(packs("qwen3_vl"))
    with packed(model), torch.no_grad():
        before = token_losses(model, batch)
        for name in (attention.DECODER, attention.ENCODER):
            monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name)
        assert torch.equal(token_losses(model, batch), before)


def test_sliding_windows_keep_their_masks(packs: Packs, samples: Samples) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    model, batch = tiny_model("qwen2_5_vl", **windows), with_images(packs("qwen2_5_vl"))
    assert "sliding_attention" in model.config.text_config.layer_types
    with packed(model), torch.no_grad():
        losses = token_losses(model, batch)
    assert difference(losses, batch, model, samples("qwen2_5_vl")) < TOLERANCE
    assert difference(losses, batch, model_of("qwen2_5_vl"), samples("qwen2_5_vl")) > 100 * TOLERANCE


def test_autocast(packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are float32 there, and values are not. Kernels want one dtype."""
    kinds = set()
    monkeypatch.setattr(attention, "kernel_for", lambda query, value, dropout: kinds.add((query.dtype, value.dtype)))
    model, batch = tiny_model("qwen3_vl"), with_images(packs("qwen3_vl"))
    exact = expected_losses(model, batch, samples("qwen3_vl")).detach()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            rounded = expected_losses(model, batch, samples("qwen3_vl"))
        with packed(model):
            losses = token_losses(model, batch)
    assert kinds == {(torch.bfloat16, torch.bfloat16)}
    assert losses.dtype == torch.float32
    assert float((losses.detach() - exact).norm()) < 2 * float((rounded - exact).norm())
    losses.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_prepared_model_computes_with_its_own_weights(
    make: Callable[[Any], Any], packs: Packs, samples: Samples
) -> None:
    model, batch = tiny_model("qwen3_5", seed=1), packs("qwen3_5")[0]
    with packed(model):
        other = make(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        losses = token_losses(other, batch)
    assert difference(losses, batch, tiny_model("qwen3_5", seed=1), samples("qwen3_5")) < TOLERANCE


def test_to_prepare_twice_is_harmless(packs: Packs, samples: Samples) -> None:
    model, batch = tiny_model("qwen3_5"), packs("qwen3_5")[0]
    with packed(model), torch.no_grad():
        with packed(torch.nn.ModuleDict({"wrapped": model})):
            inside = token_losses(model, batch)
        assert is_packed(model)
        after = token_losses(model, batch)
    assert torch.equal(inside, after)
    assert difference(after, batch, model, samples("qwen3_5")) < TOLERANCE


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_the_auxiliary_loss_is_the_models_own(model_type: str, packs: Packs) -> None:
    model, batch = tiny_model(model_type), with_images(packs(model_type))
    with packed(model):
        found = packed_forward(model, batch, output_router_logits=True)
        own = model(**packed_inputs(batch), output_router_logits=True)
        assert torch.allclose(found.losses, token_losses(model, batch), atol=TOLERANCE)
    assert torch.equal(found.output.aux_loss, own.aux_loss)
    assert found.output.aux_loss > 0
    found.output.aux_loss.backward()
    assert model.model.language_model.layers[0].mlp.gate.weight.grad.any()


def test_positions_of_two_rows_are_completed(packs: Packs, samples: Samples) -> None:
    """Qwen2.5-VL would take (1, T) positions of a pack for those of a single sample."""
    batch = next(each for each in packs("qwen2_5_vl") if not len(each.image_grid_thw))
    model = model_of("qwen2_5_vl")
    assert batch.labels is not None
    inputs = packed_inputs(batch)
    inputs["position_ids"] = inputs["position_ids"][0]
    with packed(model), torch.no_grad():
        logits = model(**inputs).logits[0]
    losses = cross_entropy(logits, batch.labels[0], reduction="none")
    assert difference(losses, batch, model, samples("qwen2_5_vl")) < TOLERANCE


def test_lora(packs: Packs, samples: Samples) -> None:
    """Losses and the gradients of adapters, for two packs of different lengths, prepared before and after wrapping."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "in_proj_qkv", "out_proj", "qkv"], init_lora_weights=False, task_type="CAUSAL_LM"
    )

    def with_adapters(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    first, second, *_ = sorted(packs("qwen3_5"), key=lambda each: each.num_samples)
    alone = with_adapters(tiny_model("qwen3_5"))
    for batch in (first, second):
        expected_losses(alone.base_model.model, batch, samples("qwen3_5")).sum().backward()
    for together in (with_adapters(tiny_model("qwen3_5")), with_adapters(packed(tiny_model("qwen3_5")).model)):
        with packed(together):
            for batch in (first, second):
                losses = token_losses(together, batch)
                assert difference(losses, batch, alone.base_model.model, samples("qwen3_5")) < TOLERANCE
                losses.sum().backward()
        assert_same_gradients(together, alone, at_least=8)
