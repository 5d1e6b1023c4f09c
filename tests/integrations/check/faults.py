"""Forward passes for packs with one fault each, as they occur in trainers, planted in healthy ones.

Each function takes a model and returns a forward pass with its fault. What they replace in transformers' modules is
put back after each call.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import cross_entropy, pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmdata.batch import PackedBatch
from vlmdata.families.chat import VIDEO
from vlmdata.integrations.attention import DECODER
from vlmdata.integrations.transformers import packed, packed_forward, packed_inputs

type Forward = Callable[[PackedBatch], Any]


def healthy(model: Any) -> Forward:
    def forward(batch: PackedBatch) -> Any:
        with packed(model):
            return packed_forward(model, batch).losses

    return forward


def _by_segments(function: Callable[..., Any], lengths: list[int], axis: int) -> Callable[..., Any]:
    """A function of tokens, called once per segment: the convolution or the delta rule of a healthy trainer."""

    def call(*args: Any, **kwargs: Any) -> Any:
        total = sum(lengths)

        def split(value: Any) -> list[Any]:
            rows = isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[axis] == total
            return list(value.split(lengths, dim=axis)) if rows else [value] * len(lengths)

        pieces = zip(*map(split, args), strict=True)
        named = [dict(zip(kwargs, each, strict=True)) for each in zip(*map(split, kwargs.values()), strict=True)]
        found = [function(*each, **more) for each, more in zip(pieces, named, strict=True)]
        if isinstance(found[0], tuple):
            return torch.cat([each[0] for each in found], dim=axis), None
        return torch.cat(found, dim=axis)

    return call


def _linear(model: Any, convolution: bool, rule: bool, heard: bool = True) -> Forward:
    """transformers' own code, with its convolution or its delta rule called once per segment, or not.

    ``heard``: whether the layers call the functions by the names that a check listens to.
    """
    module = sys.modules[type(model).__module__]
    own = {name: getattr(module, name) for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")}

    def forward(batch: PackedBatch) -> Any:
        lengths = batch.cu_seqlens_padded.diff().tolist()
        with ExitStack() as stack:
            for (name, plain), axis, right in zip(own.items(), (2, 1), (convolution, rule), strict=True):
                function = getattr(module, name) if heard else plain
                function = _by_segments(function, lengths, axis) if right else function
                stack.enter_context(mock.patch.object(module, name, function))
            return {"logits": model(**packed_inputs(batch)).logits}

    return forward


def no_cu_seqlens_in_the_delta_rule(model: Any) -> Forward:
    return _linear(model, convolution=True, rule=False)


def no_borders_in_the_convolution(model: Any) -> Forward:
    return _linear(model, convolution=False, rule=True)


def no_cu_seqlens_in_an_opaque_layer(model: Any) -> Forward:
    return _linear(model, convolution=True, rule=False, heard=False)


def no_borders_in_an_opaque_layer(model: Any) -> Forward:
    return _linear(model, convolution=False, rule=True, heard=False)


def linear_attention_over_the_pack(model: Any) -> Forward:
    return _linear(model, convolution=False, rule=False)


def an_opaque_layer_over_the_pack(model: Any) -> Forward:
    return _linear(model, convolution=False, rule=False, heard=False)


def _with_inputs(model: Any, change: Callable[[dict[str, Any], PackedBatch], dict[str, Any]]) -> Forward:
    def forward(batch: PackedBatch) -> Any:
        with packed(model):
            return {"logits": model(**change(packed_inputs(batch), batch)).logits}

    return forward


def attention_over_the_pack(model: Any) -> Forward:
    """Attention of the decoder is only causal; the rest is right."""
    functions = ALL_ATTENTION_FUNCTIONS._global_mapping

    def whole(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return functions["sdpa"](module, query, key, value, None, scaling=kwargs["scaling"])

    def forward(batch: PackedBatch) -> Any:
        with packed(model), mock.patch.dict(functions, {DECODER: whole}):
            return {"logits": model(**packed_inputs(batch)).logits}

    return forward


def positions_that_do_not_restart(model: Any) -> Forward:
    """The rotary positions count on through the pack; the row for the mask is right."""

    def change(inputs: dict[str, Any], batch: PackedBatch) -> dict[str, Any]:
        positions = inputs["position_ids"].clone()
        starts = batch.cu_seqlens_padded[:-1].repeat_interleave(batch.cu_seqlens_padded.diff())
        positions[1:] += starts.long()
        return inputs | {"position_ids": positions}

    return _with_inputs(model, change)


def pixels_of_another_sample(model: Any) -> Forward:
    """Patches one image further: the first image has pixels of the last."""

    def change(inputs: dict[str, Any], batch: PackedBatch) -> dict[str, Any]:
        if not len(batch.image_grid_thw):
            return inputs
        shift = int(batch.image_grid_thw[-1].prod())
        return inputs | {"pixel_values": inputs["pixel_values"].roll(shift, dims=0)}

    return _with_inputs(model, change)


def pixels_of_another_clip(model: Any) -> Forward:
    """Patches of videos one video further; images are right."""

    def change(inputs: dict[str, Any], batch: PackedBatch) -> dict[str, Any]:
        if batch.video_grid_thw is None:
            return inputs
        shift = int(batch.video_grid_thw[-1].prod())
        return inputs | {"pixel_values_videos": inputs["pixel_values_videos"].roll(shift, dims=0)}

    return _with_inputs(model, change)


def frames_of_a_patch_swapped(model: Any) -> Forward:
    """The two frames of each patch of a video in the wrong order."""

    def change(inputs: dict[str, Any], batch: PackedBatch) -> dict[str, Any]:
        if batch.video_grid_thw is None:
            return inputs
        pixels = inputs["pixel_values_videos"]
        patches = pixels.reshape(len(pixels), 3, batch.family.temporal_patch_size, -1)
        return inputs | {"pixel_values_videos": patches.flip(2).reshape(pixels.shape)}

    return _with_inputs(model, change)


def positions_of_videos_without_time(model: Any) -> Forward:
    """All temporal patches of a video have the first axis of positions of its first."""

    def change(inputs: dict[str, Any], batch: PackedBatch) -> dict[str, Any]:
        positions = inputs["position_ids"].clone()
        host, factor = batch.host, batch.family.patches_per_token
        for start, grid in zip(host.video_starts.tolist(), host.video_grid_thw.tolist(), strict=True):
            for number, block in enumerate(batch.family.expansion(VIDEO).blocks(tuple(grid))):
                first = host.video_block_starts.tolist().index(start) + number
                begin = int(host.video_block_starts[first])
                positions[1, 0, begin : begin + math.prod(block) // factor] = positions[1, 0, start]
        return inputs | {"position_ids": positions}

    return _with_inputs(model, change)


def swapped_image_features(model: Any) -> Forward:
    """The features of images are put at the image tokens in reverse order."""

    def forward(batch: PackedBatch) -> Any:
        visual, own = model.model.visual, type(model.model).get_image_features

        def swapped(*args: Any, **kwargs: Any) -> Any:
            found = own(model.model, *args, **kwargs)
            found.pooler_output = found.pooler_output[::-1]
            return found

        assert visual is not None
        with packed(model), mock.patch.object(model.model, "get_image_features", swapped):
            return {"logits": model(**packed_inputs(batch)).logits}

    return forward


def deepstack_rows_misplaced(model: Any) -> Forward:
    """Deepstack features are added one image token late."""
    text = model.model.language_model
    own = type(text)._deepstack_process

    def late(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return own(text, hidden, mask, features.roll(1, dims=0))

    def forward(batch: PackedBatch) -> Any:
        with packed(model), mock.patch.object(text, "_deepstack_process", late):
            return {"logits": model(**packed_inputs(batch)).logits}

    return forward


def labels_shifted_again(model: Any) -> Forward:
    """``labels=batch.labels`` of transformers, which shifts them: targets are late, and cross borders."""

    def forward(batch: PackedBatch) -> Any:
        with packed(model):
            return {"loss": model(**packed_inputs(batch), labels=batch.labels).loss}

    return forward


def labels_that_cross_borders(model: Any) -> Forward:
    """Next tokens are targets also over borders; the loss per token."""

    def forward(batch: PackedBatch) -> Any:
        assert batch.labels is not None
        labels, ids = batch.labels[0].clone(), batch.input_ids
        assert ids is not None
        last = batch.cu_seqlens_padded[1:-1].long() - 1
        inside = last - (batch.cu_seqlens_padded.diff() - batch.cu_seqlens.diff())[:-1]
        labels[inside] = ids[0, last + 1]
        with packed(model):
            logits = model(**packed_inputs(batch)).logits[0]
        return {"loss": cross_entropy(logits, labels, reduction="none")}

    return forward


def unweighted_loss(model: Any) -> Forward:
    """The mean over targets, with logits, but without loss weights."""

    def forward(batch: PackedBatch) -> Any:
        assert batch.labels is not None
        with packed(model):
            logits = model(**packed_inputs(batch)).logits
        return {"logits": logits, "loss": cross_entropy(logits[0], batch.labels[0])}

    return forward


def stale_lengths(model: Any) -> Forward:
    """The boundaries of the first pack of several samples serve all later ones."""
    kept: list[torch.Tensor] = []

    def forward(batch: PackedBatch) -> Any:
        if batch.num_samples > 1 and not kept:
            kept.append(batch.cu_seqlens_padded)
        if kept and batch.num_samples > 1:
            batch = dataclasses.replace(batch, cu_seqlens_padded=kept[0], host=None)
        return healthy(model)(batch)

    return forward


class WithMtp(torch.nn.Module):
    """A model with one depth of multi-token prediction: the next token's embedding and the hidden state, mixed."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        width = model.config.text_config.hidden_size
        self.mtp_mix = torch.nn.Linear(2 * width, width)
        torch.nn.init.normal_(self.mtp_mix.weight, std=0.1)


def mtp(model: WithMtp, *, over_borders: bool = False) -> Forward:
    """Predicts the token after the next; ``over_borders``: with tokens and labels of the next sample."""
    inner = model.model

    def shifted(values: torch.Tensor, lengths: list[int], filling: int) -> torch.Tensor:
        pieces = values.split([sum(lengths)] if over_borders else lengths)
        return torch.cat([pad(each[1:], (0, 1), value=filling) for each in pieces])

    def forward(batch: PackedBatch) -> Any:
        assert batch.labels is not None
        assert batch.input_ids is not None
        lengths = batch.cu_seqlens_padded.diff().tolist()
        with packed(inner):
            hidden = inner.model(**packed_inputs(batch)).last_hidden_state
        following = inner.get_input_embeddings()(shifted(batch.input_ids[0], lengths, 0))
        mixed = model.mtp_mix(torch.cat([hidden[0], following], dim=-1))
        labels = shifted(batch.labels[0], lengths, -100)
        losses = cross_entropy(inner.lm_head(mixed), labels, reduction="none")
        return {"logits": inner.lm_head(hidden), "mtp_losses": [losses]}

    return forward
