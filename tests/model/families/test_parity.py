"""The model of each family equals transformers', in every number that either computes.

Closeness is the Euclidean norm of the difference over that of transformers' value, tensor by tensor, in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.model.conftest import Pair
from tests.model.helpers import Sample, as_in_memory, mixed_samples, pack, relative, video_samples
from vlmdata.batch import IGNORE_INDEX, PackedBatch

TOLERANCE = 1e-5
#: Of gradients, whose sums are longer: float32 on one kind of CPU gives 1.1e-5 where another gives 0.9e-5.
GRADIENT_TOLERANCE = 2e-5
KINDS = [
    "qwen3_5 dense",
    "qwen3_5 moe",
    "qwen3_5 tied",
    "qwen3_vl dense",
    "qwen3_vl moe",
    "qwen3_vl tied",
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    """Of each family dense, with experts, and dense with tied embeddings."""
    family, kind = request.param.split()
    return make_pair(family=family, moe=kind == "moe", tied=kind == "tied", moe_aux_loss=0.0)


@pytest.fixture(scope="module", params=["images", "videos"])
def samples(request: pytest.FixtureRequest) -> list[Sample]:
    return mixed_samples() if request.param == "images" else video_samples()


@pytest.fixture(scope="module")
def batch(samples: list[Sample]) -> PackedBatch:
    return pack(samples, tail=24)


def hidden_states(layers: Any, norm: Any) -> list[torch.Tensor]:
    """Appends what follows every layer, as the next one or the norm gets it, to the result whenever they run."""
    seen: list[torch.Tensor] = []

    def keep(_module: Any, inputs: Any, named: Any) -> None:
        seen.append((inputs[0] if inputs else named["hidden_states"]).detach())

    for module in [*layers[1:], norm]:
        module.register_forward_pre_hook(keep, with_kwargs=True)
    return seen


def split(batch: PackedBatch, samples: list[Sample], values: torch.Tensor) -> list[torch.Tensor]:
    """Values per token of a pack (T, …) to those of the samples' real tokens."""
    starts = batch.cu_seqlens_padded.tolist()
    return [values[start : start + len(sample.ids)] for start, sample in zip(starts, samples, strict=False)]


def test_hidden_states_of_every_layer_and_logits(pair: Pair, samples: list[Sample], batch: PackedBatch) -> None:
    decoders = pair.ours.language.decoder, pair.theirs.model.language_model
    ours = hidden_states(decoders[0].layers, decoders[0].final_layernorm)
    theirs = hidden_states(decoders[1].layers, decoders[1].norm)
    with torch.no_grad():
        logits = pair.ours(dataclasses.replace(batch, labels=None))
        wanted = [pair.theirs(**sample.transformers_inputs(), use_cache=False).logits[0] for sample in samples]
    layers = pair.architecture.language.num_layers
    assert len(ours) == layers
    for layer in range(layers):
        found = split(batch, samples, ours[layer][:, 0])
        for number, value in enumerate(found):
            assert relative(value, theirs[number * layers + layer][0]) < TOLERANCE, (layer, number)
    for number, value in enumerate(split(batch, samples, logits[0])):
        assert relative(value, wanted[number]) < TOLERANCE, number


def test_losses_and_all_gradients(pair: Pair, samples: list[Sample], batch: PackedBatch) -> None:
    from vlmdata.model.weight_names.table import canonical_names

    pair.ours.zero_grad()
    pair.theirs.zero_grad()
    losses = pair.ours(batch)
    losses.sum().backward()
    total = torch.tensor(0.0)
    for sample in samples:
        logits = pair.theirs(**sample.transformers_inputs(), use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, sample.labels, ignore_index=IGNORE_INDEX, reduction="sum")
    total.backward()
    assert losses.shape == batch.input_ids.shape  # type: ignore[union-attr]
    assert losses.dtype == torch.float32
    assert bool((losses[batch.labels == IGNORE_INDEX] == 0).all())
    assert relative(losses.sum(), total) < TOLERANCE
    theirs = as_in_memory(
        pair.architecture, {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    )
    names = canonical_names(pair.ours)
    compared = 0
    for name, parameter in pair.ours.named_parameters():
        entry = pair.maps[names[name]]
        wanted = entry.to_mcore([source.take(theirs[source.name]) for source in entry.sources])
        assert relative(parameter.grad, wanted) < GRADIENT_TOLERANCE, name
        compared += 1
    assert compared == len(pair.maps)


def test_vision_output(pair: Pair, samples: list[Sample]) -> None:
    for sample in samples:
        inputs, wanted = sample.transformers_inputs(), []
        images, videos = ([tuple(grid) for grid in grids.tolist()] for grids in (sample.grids, sample.video_grids))
        floats = [inputs.get(name, torch.zeros(0, 1536)) for name in ("pixel_values", "pixel_values_videos")]
        with torch.no_grad():
            for pixels, grids in zip(floats, (sample.grids, sample.video_grids), strict=True):
                if len(grids):
                    seen = pair.theirs.model.visual(pixels, grids)
                    wanted.append(
                        torch.cat([seen.pooler_output, *(getattr(seen, "deepstack_features", None) or [])], 1)
                    )
            folded = pair.ours.vision(sample.patches, images, sample.video_patches, videos)
            reference = pair.ours.vision(floats[0], images, floats[1], videos)
        if not wanted:
            assert not len(folded)
            continue
        assert relative(folded, torch.cat(wanted)) < TOLERANCE
        assert relative(reference, torch.cat(wanted)) < TOLERANCE


def test_packed_equals_samples_one_by_one(pair: Pair, samples: list[Sample], batch: PackedBatch) -> None:
    def run(packed: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pair.ours.zero_grad()
        losses = pair.ours(packed)
        losses.sum().backward()
        return losses.detach(), {name: p.grad.clone() for name, p in pair.ours.named_parameters()}

    losses, gradients = run(batch)
    summed: dict[str, torch.Tensor] = {}
    for number, value in enumerate(split(batch, samples, losses[0])):
        alone, parts = run(pack([samples[number]], alignment=1))
        assert relative(value, alone[0]) < TOLERANCE or not value.any()
        summed = {name: summed.get(name, 0) + part for name, part in parts.items()}
    for name, gradient in gradients.items():
        assert relative(gradient, summed[name]) < TOLERANCE, name


def test_padding_has_no_influence(pair: Pair, samples: list[Sample]) -> None:
    """Losses and gradients are equal to the last bit, whatever stands in padding.

    Only a weight of an expert has a gradient whose last bit may differ: its sum has zeros at the padding that came to
    the expert, and their number changes how the product is cut.
    """
    results = []
    for padding_id in (0, 17):
        pair.ours.zero_grad()
        packed = pack(samples, tail=24, padding_id=padding_id)
        losses = pair.ours(packed)
        losses.sum().backward()
        results.append((losses.detach(), {name: p.grad.clone() for name, p in pair.ours.named_parameters()}))
    (losses, gradients), (others, other_gradients) = results
    assert torch.equal(losses, others)
    for name in gradients:
        if ".experts." in name:
            assert relative(gradients[name], other_gradients[name]) < 1e-6, name
        else:
            assert torch.equal(gradients[name], other_gradients[name]), name


def test_a_pack_without_images(pair: Pair, samples: list[Sample]) -> None:
    """The tower takes no part in the result, but all its parameters get the gradient zero."""
    pair.ours.zero_grad()
    text = [sample for sample in samples if not len(sample.grids) and not len(sample.video_grids)]
    losses = pair.ours(pack(text))
    losses.sum().backward()
    total = sum(
        F.cross_entropy(
            pair.theirs(**sample.transformers_inputs(), use_cache=False).logits[0],
            sample.labels,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        for sample in text
    )
    assert relative(losses.sum(), torch.as_tensor(total)) < TOLERANCE
    for name, parameter in pair.ours.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith("vision."):
            assert not parameter.grad.any(), name


def test_recomputed_layers_get_the_same_features(make_pair: Callable[..., Pair], batch: PackedBatch) -> None:
    """Deepstack features go through recomputation like hidden states: gradients are equal to the last bit."""
    gradients = []
    for recompute in ("none", "full"):
        pair = make_pair(family="qwen3_vl", recompute=recompute, vision_recompute=recompute == "full")
        pair.ours(batch).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in pair.ours.named_parameters()})
    assert any("deepstack" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
