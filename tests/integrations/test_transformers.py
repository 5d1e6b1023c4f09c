"""A pack in transformers' models equals its samples one by one, whatever was computed before, and is refused if not."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tests.integrations.tiny_models import MODELS, family_of, inputs_of_sample, losses_of_sample, tiny_model
from tests.loader.helpers import epoch_of
from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations import attention, delta_net
from vlmdata.integrations.transformers import is_packed, packed, packed_forward, packed_inputs, token_losses

#: Some 20 units in the last place of a loss of 8 in float32.
TOLERANCE = 2e-5
Packs = Callable[[str], list[PackedBatch]]
Samples = Callable[[str], VlmDataset]
every_model = pytest.mark.parametrize("model_type", MODELS)
linear_models = pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])

model_of = cache(tiny_model)


def expected_losses(model: Any, batch: PackedBatch, dataset: VlmDataset) -> torch.Tensor:
    """The losses of a pack, from its samples one by one."""
    losses = torch.zeros(batch.total_tokens)
    for origin, begin in zip(batch.origins, batch.cu_seqlens_padded.tolist(), strict=False):
        alone = losses_of_sample(model, dataset[origin.index])
        losses = torch.cat([losses[:begin], alone, losses[begin + len(alone) :]])
    return losses


def difference(losses: torch.Tensor, batch: PackedBatch, model: Any, dataset: VlmDataset) -> float:
    with torch.no_grad():
        return float((losses.detach() - expected_losses(model, batch, dataset)).abs().max())


def assert_same_gradients(one: Any, other: Any, at_least: int) -> None:
    compared = 0
    for (name, together), alone in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (together.grad is None) == (alone.grad is None), name
        if alone.grad is not None:
            scale = float(alone.grad.abs().max())
            # The decay of a delta net is a sum over all tokens that cancels: float32 alone gives 1e-4.
            most = 4e-4 if name.endswith(("A_log", "dt_bias")) else 1e-4
            assert float((together.grad - alone.grad).abs().max()) <= most * scale + 1e-6, name
            compared += scale > 0
    assert compared >= at_least


def with_images(batches: list[PackedBatch]) -> PackedBatch:
    """A pack of several samples and images, with unequal weights."""
    return next(each for each in batches if each.num_samples > 2 and len(each.image_grid_thw) > 2)


def state_of(model: Any) -> list[tuple[int, ...]]:
    """How many hooks each module has, and what else stands in its attributes."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    return [(len(vars(each)), *(len(getattr(each, hook)) for hook in hooks)) for each in model.modules()]


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


@every_model
class TestEqualToSamples:
    def test_losses(self, model_type: str, packs: Packs, samples: Samples) -> None:
        model, batches = model_of(model_type), packs(model_type)
        assert max(each.num_samples for each in batches) > 4
        for batch in batches:
            with packed(model), torch.no_grad():
                losses = token_losses(model, batch)
            assert losses.shape == (batch.total_tokens,)
            assert losses.dtype == torch.float32
            assert float(losses.max()) > 5  # there is something to compare
            assert difference(losses, batch, model, samples(model_type)) < TOLERANCE

    def test_gradients_of_the_weighted_loss(self, model_type: str, packs: Packs, samples: Samples) -> None:
        batch, dataset = with_images(packs(model_type)), samples(model_type)
        together, alone = tiny_model(model_type), tiny_model(model_type)
        assert batch.loss_weights is not None
        with packed(together):
            (token_losses(together, batch) * batch.loss_weights[0]).sum().backward()
        (expected_losses(alone, batch, dataset) * batch.loss_weights[0]).sum().backward()
        assert_same_gradients(together, alone, at_least=50)

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


@linear_models
class TestLinearAttention:
    def test_the_hooks_are_what_keeps_samples_apart(self, model_type: str, packs: Packs, samples: Samples) -> None:
        """So the tests above prove something."""
        model, batch = model_of(model_type), with_images(packs(model_type))
        assert batch.labels is not None
        with torch.no_grad():
            logits = model(**packed_inputs(batch)).logits[0]
        losses = cross_entropy(logits, batch.labels[0], reduction="none")
        assert difference(losses, batch, model, samples(model_type)) > 100 * TOLERANCE

    def test_kernels_that_follow_boundaries_run_once(
        self, model_type: str, packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the convolution of transformers, which follows none. Losses and gradients."""
        together, alone = tiny_model(model_type), tiny_model(model_type)
        batch, dataset = with_images(packs(model_type)), samples(model_type)
        module = sys.modules[type(together).__module__]
        own, calls = module.torch_chunk_gated_delta_rule, []

        def kernel(q: Any, k: Any, v: Any, *, g: Any, beta: Any, cu_seqlens: Any, **kwargs: Any) -> Any:
            calls.append(len(cu_seqlens) - 1)
            lengths = cu_seqlens.diff().tolist()
            pieces = zip(*(each.split(lengths, dim=1) for each in (q, k, v, g, beta)), strict=True)
            return torch.cat([own(*each[:3], g=each[3], beta=each[4], **kwargs)[0] for each in pieces], dim=1), None

        assert not delta_net.follows_boundaries(own, "cpu")
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", kernel)
        assert delta_net.follows_boundaries(kernel, "cpu")
        with packed(together):
            calls.clear()
            losses = token_losses(together, batch)
            assert calls[-2:] == [len(batch.cu_seqlens_padded) - 1] * 2
            losses.sum().backward()
        monkeypatch.undo()
        assert difference(losses, batch, alone, dataset) < TOLERANCE
        expected_losses(alone, batch, dataset).sum().backward()
        assert_same_gradients(together, alone, at_least=50)

    def test_the_convolution_of_a_package(
        self, model_type: str, packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stand-ins for flash-linear-attention: nothing is taken apart, and layers share one tensor of boundaries."""
        together, alone = tiny_model(model_type), tiny_model(model_type)
        batch, module, seen = with_images(packs(model_type)), sys.modules[type(together).__module__], []
        rule, convolution = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn

        def kernel(q: Any, k: Any, v: Any, *, g: Any, beta: Any, cu_seqlens: Any, **kwargs: Any) -> Any:
            lengths = cu_seqlens.diff().tolist()
            seen.append(cu_seqlens)
            pieces = zip(*(each.split(lengths, dim=1) for each in (q, k, v, g, beta)), strict=True)
            return torch.cat([rule(*each[:3], g=each[3], beta=each[4], **kwargs)[0] for each in pieces], dim=1), None

        def convolve(x: Any, weight: Any, bias: Any, activation: str, cu_seqlens: Any, cu_seqlens_cpu: Any) -> Any:
            assert torch.equal(cu_seqlens, cu_seqlens_cpu)
            seen.append(cu_seqlens)
            pieces = x.transpose(1, 2).split(cu_seqlens.diff().tolist(), dim=2)
            out = [convolution(each, weight, bias, activation=activation) for each in pieces]
            return torch.cat(out, dim=2).transpose(1, 2), None

        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", kernel)
        monkeypatch.setattr(delta_net, "_convolution_kernel", lambda: convolve)
        with packed(together), packed(tiny_model(model_type)):
            seen.clear()
            losses = token_losses(together, batch)
            losses.sum().backward()
        assert module.causal_conv1d_fn is convolution
        own = seen[2:]  # after the trial whether the rule follows boundaries
        assert [each is own[0] for each in own] == [True] * 4
        monkeypatch.undo()
        assert difference(losses, batch, alone, samples(model_type)) < TOLERANCE
        expected_losses(alone, batch, samples(model_type)).sum().backward()
        assert_same_gradients(together, alone, at_least=50)

    def test_gradient_checkpointing(self, model_type: str, packs: Packs, samples: Samples) -> None:
        together, alone = tiny_model(model_type).train(), tiny_model(model_type)
        batch = with_images(packs(model_type))
        together.gradient_checkpointing_enable()
        with packed(together):
            token_losses(together, batch).sum().backward()
        expected_losses(alone, batch, samples(model_type)).sum().backward()
        assert_same_gradients(together, alone, at_least=50)
        with packed(together):
            late = token_losses(together, batch).sum()
        with pytest.raises(RuntimeError, match=r"call backward\(\) before `with packed\(model\)` ends"):
            late.backward()


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


class TestRefused:
    @pytest.fixture
    def model(self) -> Any:
        return tiny_model("qwen3_5")

    @pytest.fixture
    def batch(self, packs: Packs) -> PackedBatch:
        return with_images(packs("qwen3_5"))

    def test_a_model_that_is_not_prepared(self, model: Any, batch: PackedBatch) -> None:
        with pytest.raises(UsageError, match=r"Qwen3_5ForConditionalGeneration is not prepared.*with packed\(model\)"):
            token_losses(model, batch)

    def test_other_models(self) -> None:
        with pytest.raises(UsageError, match=r"Linear has no ForConditionalGeneration.*qwen3_5_moe"):
            packed(torch.nn.Linear(1, 1))

    @pytest.mark.parametrize("version", ["5.15.1", "5.19.0", "6.0.0.dev0"])
    def test_versions_that_were_not_proven(self, model: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transformers.__version__", version)
        with pytest.raises(UsageError, match=f"transformers {version} is installed.*>=5.16,<5.19.*allow_unproven=True"):
            packed(model)
        packed(model, allow_unproven=True).remove()
        monkeypatch.setattr("transformers.__version__", "5.18.1")
        packed(model).remove()

    def test_attention_that_may_not_see_boundaries(self, model: Any) -> None:
        model.config.text_config._attn_implementation = "my_attention"
        with pytest.raises(UsageError, match="attn_implementation='my_attention'"):
            packed(model)

    @pytest.mark.parametrize("extra", [{"attention_mask": True}, {"use_cache": True}])
    def test_arguments_with_which_transformers_mixes_samples(
        self, model: Any, batch: PackedBatch, extra: dict[str, Any]
    ) -> None:
        if "attention_mask" in extra:
            extra = {"attention_mask": torch.ones_like(batch.padding_mask, dtype=torch.long)}
        with packed(model), pytest.raises(UsageError, match=r"pack of \d+ segments.*Pass neither"):
            model(**packed_inputs(batch) | extra)

    def test_packs_in_several_rows(self, model: Any, batch: PackedBatch) -> None:
        inputs = {"position_ids": packed_inputs(batch)["position_ids"].expand(4, 2, -1)}
        with packed(model), pytest.raises(UsageError, match="in 2 rows"):
            model(input_ids=torch.ones(2, batch.total_tokens, dtype=torch.long), use_cache=False, **inputs)

    def test_a_batch_of_another_family(self, model: Any, packs: Packs) -> None:
        with packed(model), pytest.raises(UsageError, match="'qwen3_5', and the batch is for the family 'qwen2_5_vl'"):
            token_losses(model, packs("qwen2_5_vl")[0])

    def test_a_slice_of_a_pack(self, model: Any, batch: PackedBatch) -> None:
        with packed(model), pytest.raises(UsageError, match="slice 0 of 2"):
            token_losses(model, batch.context_parallel_shard(0, 2))

    def test_a_batch_without_labels(self, model: Any, batch: PackedBatch) -> None:
        object.__setattr__(batch := batch.clone(), "labels", None)
        with packed(model), pytest.raises(UsageError, match="'tokens' and 'labels'"):
            token_losses(model, batch)

    def test_a_batch_without_pixels(self, model: Any, batch: PackedBatch) -> None:
        object.__setattr__(batch := batch.clone(), "patches", None)
        with packed(model), pytest.raises(ValueError, match="without the part 'pixels'"):
            token_losses(model, batch)
