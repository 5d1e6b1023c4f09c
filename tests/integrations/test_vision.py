"""Vision encoders with grids on the host: the same numbers as without, and no value is read from a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.integrations.comparing import Packs, every_model, with_images
from tests.integrations.tiny_models import tiny_model
from vlmdata.integrations import attention, vision
from vlmdata.integrations.transformers import packed, token_losses

#: Functions for whose result the host would wait on a CUDA device.
WAITING = {
    "tolist",
    "item",
    "__bool__",
    "__int__",
    "__index__",
    "nonzero",
    "unique_consecutive",
    "masked_select",
    "cpu",
}


class Waits(TorchFunctionMode):
    """Notes the functions that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        indices = args[1] if name in ("__getitem__", "__setitem__") else ()
        masks = [each.dtype == torch.bool for each in _several(indices) if isinstance(each, torch.Tensor)]
        repeats = name == "repeat_interleave" and "output_size" not in (kwargs or {})
        if name in WAITING or any(masks) or repeats:
            self.found.append(name)
        return func(*args, **kwargs or {})


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def features_of(model: Any, batch: Any) -> list[torch.Tensor]:
    found = model.model.get_image_features(batch.pixel_values(), batch.image_grid_thw, return_dict=True)
    layers = getattr(found, "deepstack_features", None) or ()
    # One tensor per layer, or from transformers 5.24 on, one of each image per layer.
    deep = [layer if torch.is_tensor(layer) else torch.cat(layer) for layer in layers]
    return [torch.cat(list(found.pooler_output)), *deep]


@every_model
def test_encoders_return_the_same_to_the_last_bit(model_type: str, packs: Packs, monkeypatch: Any) -> None:
    batch, model = with_images(packs(model_type)), tiny_model(model_type)
    derived: list[int] = []
    own = vision._derived
    monkeypatch.setattr(vision, "_derived", lambda visual, grids: (derived.append(len(grids)), own(visual, grids))[1])
    before = features_of(model, batch)
    gradients = torch.autograd.grad(
        sum(each.square().sum() for each in before), model.model.visual.blocks[0].parameters()
    )
    with packed(model):
        after = features_of(model, batch)
        again = torch.autograd.grad(
            sum(each.square().sum() for each in after), model.model.visual.blocks[0].parameters()
        )
    assert derived == [len(batch.image_grid_thw)]
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))


@every_model
def test_a_forward_pass_reads_no_value_from_the_device(model_type: str, packs: Packs, monkeypatch: Any) -> None:
    """Within the encoder and the decoder's deepstack. Attention and delta nets have kernels there; see test_gpu."""
    batch, model, waits = with_images(packs(model_type)), tiny_model(model_type), Waits()

    def kernel(query: Any, key: Any, value: Any, *_: Any) -> Any:
        return query + key.sum() + value.sum()

    monkeypatch.setattr(attention, "kernel_for", lambda *args: kernel)
    visual, text = model.model.visual, model.model.language_model
    with packed(model):
        modes = [visual.register_forward_pre_hook(lambda *_: (waits.__enter__(), None)[1])]
        modes += [visual.register_forward_hook(lambda *_: (waits.__exit__(None, None, None), None)[1])]
        if (deepstack := vars(text).get("_deepstack_process")) is not None:

            def watched(*args: Any) -> Any:
                with waits:
                    return deepstack(*args)

            text._deepstack_process = watched
        token_losses(model, batch)
        assert waits.found == []
        for each in modes:
            each.remove()
    with waits:
        features_of(model, batch)
    assert "tolist" in waits.found, "transformers reads grids by itself"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deepstack_adds_the_same_to_the_last_bit(dtype: torch.dtype) -> None:
    text = tiny_model("qwen3_vl").model.language_model
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 9, generator=generator) < 0.5
    results = []
    for add in (text._deepstack_process, vision._deepstack):
        hidden = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        embeds = torch.randn(int(mask.sum()), 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = add(hidden, mask, embeds)
        out.float().square().sum().backward()
        results.append([out, hidden.grad, embeds.grad])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_decoder_gets_its_own_function_back() -> None:
    model = tiny_model("qwen3_vl")
    with packed(model):
        assert model.model.language_model._deepstack_process is vision._deepstack
    assert "_deepstack_process" not in vars(model.model.language_model)
