"""Packs in Gemma 4 and InternVL equal their samples one by one, and planted faults do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
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
    expected_losses,
    model_of,
    state_of,
    with_images,
)
from tests.integrations.tiny_models import ONE_AXIS, inputs_of_sample, tiny_model
from vlmdata.batch import PackedBatch
from vlmdata.integrations import attention, boundaries, vision
from vlmdata.integrations.segments import Segments
from vlmdata.integrations.transformers import is_packed, packed, packed_forward, packed_inputs, token_losses
from vlmdata.integrations.windows import SlidingWindows

every_model = pytest.mark.parametrize("variant", ONE_AXIS)
gemma_models = pytest.mark.parametrize("variant", [name for name in ONE_AXIS if name.startswith("gemma4")])
#: Gemma 4 whose images see themselves.
SEEING = ("gemma4-dense", "gemma4-experts")


def targets_of(batch: PackedBatch) -> torch.Tensor:
    assert batch.labels is not None
    return batch.labels[0]


def losses_of_own_call(model: Any, batch: PackedBatch, **changes: Any) -> torch.Tensor:
    """As a trainer that calls the prepared model itself: nothing but the arguments is known of the pack."""
    with packed(model), torch.no_grad():
        logits = model(**packed_inputs(batch) | changes).logits[0]
    return cross_entropy(logits, targets_of(batch), reduction="none")


@every_model
class TestEqualToSamples:
    def test_own_calls(self, variant: str, packs: Packs, samples: Samples) -> None:
        model, batch = model_of(variant), with_images(packs(variant))
        assert difference(losses_of_own_call(model, batch), batch, model, samples(variant)) < TOLERANCE
        with packed(model), torch.no_grad():
            found = packed_forward(model, batch)
        assert torch.allclose(found.losses, losses_of_own_call(model, batch), atol=TOLERANCE)

    def test_a_pack_of_text_uses_the_encoder_for_nothing(
        self, variant: str, packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Under several processes, so that none waits for the gradients of its parameters."""
        batch, model = packs(variant)[-1], tiny_model(variant)
        assert not len(batch.image_grid_thw)
        monkeypatch.setattr(vision, "_has_peers", lambda: True)
        with packed(model):
            losses = token_losses(model, batch)
        losses.sum().backward()
        missing = [name for name, each in model.named_parameters() if each.grad is None]
        assert not missing
        assert not any(each.grad.any() for each in model.parameters())


#: Shared keys, images that see themselves, and tiles: all models are compared above.
@pytest.mark.parametrize("variant", ["gemma4-small", "gemma4-experts", "internvl-qwen3"])
class TestInOtherWays:
    def test_eager_attention(self, variant: str, packs: Packs, samples: Samples) -> None:
        """transformers' own masks, of positions that restart."""
        model, batch = tiny_model(variant), with_images(packs(variant))
        model.set_attn_implementation("eager")
        with packed(model), torch.no_grad():
            losses = token_losses(model, batch)
        assert difference(losses, batch, model_of(variant), samples(variant)) < 2 * TOLERANCE

    def test_after_other_calls(self, variant: str, packs: Packs, samples: Samples) -> None:
        """Packs, calls that fail, plain calls and generation leave no trace in each other."""
        model, dataset, (first, *others) = tiny_model(variant), samples(variant), packs(variant)
        before, plain = state_of(model), inputs_of_sample(model, dataset[with_images(others).origins[0].index])
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
        cap = getattr(model.config.text_config, "final_logit_softcapping", None)
        with torch.no_grad():
            generated, logits = model.generate(**plain, **settings), model(**plain).logits
            with packed(model):
                assert is_packed(model)
                for batch in (first, with_images(others)):
                    wrong = packed_inputs(first) | {"input_ids": torch.full_like(first.input_ids, 10**9)}
                    with pytest.raises(IndexError):
                        model(**wrong)
                    assert difference(token_losses(model, batch), batch, model, dataset) < TOLERANCE
                    assert torch.equal(model.generate(**plain, **settings), generated)
                    assert torch.equal(model(**plain).logits, logits)
        assert getattr(model.config.text_config, "final_logit_softcapping", None) == cap
        assert model.config.text_config._attn_implementation == "sdpa"
        assert state_of(model) == before
        assert not is_packed(model)

    def test_gradient_checkpointing(self, variant: str, packs: Packs) -> None:
        """Also of layers that share the keys of others."""
        batch, plain, model = with_images(packs(variant)), tiny_model(variant).train(), tiny_model(variant).train()
        model.gradient_checkpointing_enable()
        for each in (plain, model):
            with packed(each):
                token_losses(each, batch).sum().backward()
        assert_same_gradients(model, plain, at_least=60)


@gemma_models
def test_float64_leaves_no_difference(
    variant: str, packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What float32 shows is rounding: with norms in float64, too, logits are equal to 1e-11."""
    if variant == "gemma4-experts":
        monkeypatch.setattr("transformers.integrations.moe._grouped_mm", _grouped)
    _compute_norms_in_float64(monkeypatch)
    model, batch = tiny_model(variant).double(), with_images(packs(variant))
    with packed(model), torch.no_grad():
        logits = model(**packed_inputs(batch)).logits[0]
    starts = batch.cu_seqlens_padded.tolist()
    for origin, begin in zip(batch.origins, starts, strict=False):
        with torch.no_grad():
            alone = model(**inputs_of_sample(model, samples(variant)[origin.index]), use_cache=False).logits[0]
        assert float((logits[begin : begin + len(alone)] - alone).abs().max()) < 1e-11


def _grouped(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    parts = torch.tensor_split(rows, offs[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _compute_norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma4 import modeling_gemma4

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        found = hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return found * self.weight if self.with_scale else found

    def pool(self: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return own(self, **kwargs)

    own = modeling_gemma4.Gemma4VisionPooler.forward
    monkeypatch.setattr(modeling_gemma4.Gemma4RMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_gemma4.Gemma4VisionPooler, "forward", pool)


class TestWithAKernel:
    """A stand-in for the kernel of GPUs, which knows windows and keys of other lengths than queries."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
        calls: list[tuple[bool, int, int]] = []

        def kernel(
            q: Any,
            k: Any,
            v: Any,
            bounds: torch.Tensor,
            longest: int,
            causal: bool,
            scale: float,
            left: int = -1,
            keys: tuple[torch.Tensor, int] | None = None,
        ) -> Any:
            key_bounds, longest_key = keys or (bounds, longest)
            assert (bounds.dtype, longest) == (torch.int32, int(bounds.diff().max()))
            assert (key_bounds.dtype, longest_key) == (torch.int32, int(key_bounds.diff().max()))
            calls.append((causal, left, len(bounds) - 1))
            lengths = (bounds.diff().tolist(), key_bounds.diff().tolist(), key_bounds.diff().tolist())
            split = [each.transpose(0, 1).split(n, dim=1) for each, n in zip((q, k, v), lengths, strict=True)]
            pieces = [_in_window(*each, causal, left, scale) for each in zip(*split, strict=True)]
            return torch.cat(pieces, dim=1).transpose(0, 1)

        monkeypatch.setattr(attention, "kernel_for", lambda *args: kernel)
        return calls

    @every_model
    def test_losses_and_gradients(
        self, variant: str, packs: Packs, samples: Samples, calls: list[tuple[bool, int, int]]
    ) -> None:
        batch, together, alone = with_images(packs(variant)), tiny_model(variant), tiny_model(variant)
        with packed(together):
            losses = token_losses(together, batch)
        losses.sum().backward()
        assert difference(losses, batch, alone, samples(variant)) < 2 * TOLERANCE
        expected_losses(alone, batch, samples(variant)).sum().backward()
        assert_same_gradients(together, alone, at_least=60)
        kinds = getattr(together.config.text_config, "layer_types", ["full_attention"] * 2)
        segments = len(batch.cu_seqlens_padded) - 1
        assert calls.count((True, -1, segments)) == kinds.count("full_attention")
        assert calls.count((True, 23, segments)) == kinds.count("sliding_attention")
        images = len(batch.image_grid_thw) if variant in SEEING else -1
        assert calls.count((False, 23, images)) == (kinds.count("sliding_attention") if variant in SEEING else 0)

    def test_keys_of_the_sample_before(
        self, packs: Packs, samples: Samples, calls: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A planted fault: images near the start of a sample see the end of the sample before."""
        own = SlidingWindows.seen_keys.func  # type: ignore[attr-defined]
        whole = property(lambda self: own(SlidingWindows(self.size, (sum(self.lengths),), self.runs, self.device)))
        monkeypatch.setattr(SlidingWindows, "seen_keys", whole)
        model, batch = model_of("gemma4-dense"), with_images(packs("gemma4-dense"))
        starts, images = batch.host.cu_seqlens_padded, batch.host.image_starts
        assert any((0 < start < image < start + 23) for start in starts for image in images)
        with packed(model), torch.no_grad():
            losses = token_losses(model, batch)
        assert difference(losses, batch, model, samples("gemma4-dense")) > 100 * TOLERANCE


def _in_window(q: Any, k: Any, v: Any, causal: bool, left: int, scale: float) -> torch.Tensor:
    """Attention of (heads, tokens, width); the last query is at the last key."""
    query = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])[None]
    mask = (key <= query) if causal else torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)
    mask = mask & (key >= query - left) if left >= 0 else mask
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("variant", [*SEEING, "gemma4-small", "internvl-qwen3"])
def test_attention_is_computed_within_segments(
    variant: str, packs: Packs, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask of all tokens is made, and no decoder's attention has more tokens than the longest segment."""
    model, batch, calls = model_of(variant), with_images(packs(variant)), []

    def watched(query: Any, key: Any, value: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        if len(query) == 1:  # else rows of images
            calls.append(key.shape[2])
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    monkeypatch.setattr("transformers.masking_utils.create_causal_mask", None)
    with packed(model), torch.no_grad():
        token_losses(model, batch)
    lengths = [length for length in batch.cu_seqlens_padded.diff().tolist() if length > 1]
    assert set(lengths) <= set(calls)
    assert max(calls) == max(lengths)


def attention_over_the_pack(model: Any, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    def one(decoder: Any, row: torch.Tensor, kwargs: Any) -> Any:
        found = own(decoder, row, kwargs)
        whole = Segments.of_bounds([0, len(row)], row.device, least=1)
        return whole.with_runs(found.runs) if whole else None

    own = boundaries._segments
    monkeypatch.setattr(boundaries, "_segments", one)
    with packed(model), torch.no_grad():
        return token_losses(model, batch)


def positions_that_do_not_restart(model: Any, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    return losses_of_own_call(model, batch, position_ids=torch.arange(batch.total_tokens)[None])


def images_that_do_not_see_themselves(model: Any, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(boundaries, "runs_within", lambda spans, bounds: ())
    with packed(model), torch.no_grad():
        return token_losses(model, batch)


def images_that_see_other_images(model: Any, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """All images of a sample are one group."""

    def joined(spans: Any, bounds: list[int]) -> Any:
        masks = own(spans, bounds)
        by_segment = [[each for each in masks if start <= each[0] < end] for start, end in pairwise(bounds)]
        return tuple((each[0][0], each[-1][1]) for each in by_segment if each)

    own = boundaries.runs_within
    monkeypatch.setattr(boundaries, "runs_within", joined)
    with packed(model), torch.no_grad():
        return token_losses(model, batch)


def images_in_another_order(model: Any, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    def swapped(own: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        features = found.pooler_output
        found.pooler_output = features.flip(0) if isinstance(features, torch.Tensor) else features[::-1]
        return found

    monkeypatch.setattr(model.model, "get_image_features", partial(swapped, model.model.get_image_features))
    with packed(model), torch.no_grad():
        return token_losses(model, batch)


def logits_that_are_not_capped(model: Any, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(model.config.text_config, "final_logit_softcapping", None)
    with packed(model), torch.no_grad():
        losses = token_losses(model, batch)
    monkeypatch.undo()
    return losses


def windows_that_are_ignored(model: Any, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(Segments, "windows", lambda self, size: None)
    with packed(model), torch.no_grad():
        return token_losses(model, batch)


FAULTS: list[tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = [
    (attention_over_the_pack, tuple(ONE_AXIS)),
    (positions_that_do_not_restart, ("gemma4-dense", "gemma4-small", "internvl-qwen3")),
    (images_that_do_not_see_themselves, SEEING),
    (images_that_see_other_images, SEEING),
    (images_in_another_order, ("gemma4-dense", "gemma4-small", "internvl-qwen3")),
    (logits_that_are_not_capped, ("gemma4-dense",)),
    (windows_that_are_ignored, ("gemma4-dense", "gemma4-small")),
]


@pytest.mark.parametrize(("fault", "variant"), [(fault, variant) for fault, variants in FAULTS for variant in variants])
def test_planted_faults_are_found(
    fault: Callable[..., torch.Tensor], variant: str, packs: Packs, samples: Samples
) -> None:
    model, batch = tiny_model(variant), with_images(packs(variant))
    with pytest.MonkeyPatch.context() as patch:
        losses = fault(model, batch, patch)
    assert difference(losses, batch, model, samples(variant)) > 100 * TOLERANCE
