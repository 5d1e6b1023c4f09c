"""Losses from hidden states against torch's cross-entropy of logits, and which output layers compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from tests.integrations.comparing import Packs, with_images
from tests.integrations.tiny_models import tiny_model
from vlmdata.integrations import head
from vlmdata.integrations.head import linear_cross_entropy, losses_for_logits
from vlmdata.integrations.transformers import packed, packed_forward, token_losses


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 50, (count,), generator=generator)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", rows * 50)
    hidden, weight, labels = numbers(7, dtype)
    factors = torch.arange(7.0)
    (linear_cross_entropy(hidden, weight, labels) * factors).sum().backward()
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    wanted = cross_entropy(linear(*exact), labels, reduction="none")
    (wanted * factors).sum().backward()
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 8e-2}
    losses = linear_cross_entropy(hidden, weight, labels)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), wanted, **near)
    for found, true in zip((hidden, weight), exact, strict=True):
        assert found.grad is not None
        assert found.grad.dtype == dtype
        torch.testing.assert_close(found.grad.double(), true.grad, **near)


def test_logits_of_few_targets_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", 2 * 50)
    shapes: list[tuple[int, ...]] = []

    def watched(*args: Any) -> torch.Tensor:
        found = linear(*args)
        shapes.append(tuple(found.shape))
        return found

    monkeypatch.setattr(head, "linear", watched)
    hidden, weight, labels = numbers(7, torch.float32)
    linear_cross_entropy(hidden, weight, labels).sum().backward()
    assert shapes == [(2, 50), (2, 50), (2, 50), (1, 50)] * 2


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_part_gets_no_gradient(frozen: int) -> None:
    *parts, labels = numbers(5, torch.float32)
    parts[frozen].requires_grad_(False)
    linear_cross_entropy(parts[0], parts[1], labels).sum().backward()
    assert parts[frozen].grad is None
    assert parts[1 - frozen].grad is not None


def test_no_targets() -> None:
    hidden, weight, labels = numbers(0, torch.float32)
    losses = linear_cross_entropy(hidden, weight, labels)
    losses.sum().backward()
    assert losses.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def with_hook(layer: torch.nn.Linear) -> torch.nn.Module:
    layer.register_forward_hook(lambda module, args, output: output)
    return layer


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (lambda layer: layer, True),
        (with_hook, False),
        (lambda layer: torch.nn.Linear(16, 50), False),
        (lambda layer: type("Adapted", (torch.nn.Linear,), {})(16, 50, bias=False), False),
        (lambda layer: torch.nn.Sequential(layer), False),
    ],
)
def test_only_plain_layers_return_losses(change: Callable[[Any], torch.nn.Module], plain: bool) -> None:
    hidden, _, labels = numbers(5, torch.float32)
    layer = change(torch.nn.Linear(16, 50, bias=False))
    with losses_for_logits(layer, labels) as are_losses:
        assert are_losses is plain
        assert layer(hidden[None]).shape == ((1, 5) if plain else (1, 5, 50))
    assert layer(hidden[None]).shape == (1, 5, 50)


def test_errors_leave_no_hooks(packs: Packs) -> None:
    model = tiny_model("qwen3_vl")
    with pytest.raises(ZeroDivisionError), losses_for_logits(model.lm_head, torch.zeros(1, dtype=torch.long)):
        raise ZeroDivisionError
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_logits_are_there_if_asked_for(packs: Packs) -> None:
    model, batch = tiny_model("qwen3_vl"), with_images(packs("qwen3_vl"))
    assert batch.labels is not None
    with packed(model), torch.no_grad():
        found = packed_forward(model, batch)
        assert found.output.logits.shape == (1, int((batch.labels != -100).sum()), 1024)
        assert torch.allclose(found.losses, token_losses(model, batch), atol=2e-5)
