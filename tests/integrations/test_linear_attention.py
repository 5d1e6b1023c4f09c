"""Linear attention of packs: state and convolution end with each sample, with every kind of kernel."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.integrations.comparing import (
    TOLERANCE,
    Packs,
    Samples,
    assert_same_gradients,
    difference,
    expected_losses,
    linear_models,
    model_of,
    with_images,
)
from tests.integrations.tiny_models import tiny_model
from vlmdata.integrations import delta_net
from vlmdata.integrations.transformers import packed, packed_inputs, token_losses


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
        with packed(together):
            packed(tiny_model(model_type)).remove()
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


@pytest.mark.parametrize("error", [ValueError, TypeError, NotImplementedError])
def test_a_rule_that_refuses_boundaries_follows_none(error: type[Exception]) -> None:
    """As transformers' own code does from some version on, and one without the argument does."""

    def rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool, cu_seqlens: Any) -> Any:
        raise error("no cu_seqlens here")

    assert not delta_net.follows_boundaries(rule, "cpu")
