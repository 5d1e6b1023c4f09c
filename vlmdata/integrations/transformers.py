"""Packed batches in the models of transformers: Qwen3.5, Qwen3-VL, Qwen2.5-VL, Gemma 4 and InternVL.

A pack is one row of several samples. :func:`packed` prepares a model, so that each sample is computed as if it were
alone. :func:`token_losses` computes a batch with it. No state is kept between calls: the hooks of
:func:`packed` read from the positions of a call where its samples begin.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.errors import UsageError
from vlmdata.integrations import attention, delta_net, general, proof, vision
from vlmdata.integrations.boundaries import keep_apart
from vlmdata.integrations.head import losses_for_logits
from vlmdata.integrations.reduced import reduced
from vlmdata.integrations.segments import PACK
from vlmdata.integrations.supported import (
    MARK_IMAGES,
    PROVEN,
    check_configuration,
    conditional_model,
    decoder_of,
    delta_nets,
    encoder_of,
    has_one_axis,
    is_general,
    is_recorded,
    pixel_dtype,
)
from vlmdata.integrations.windows import image_spans, to_device


class Packed[Model: torch.nn.Module]:
    """What :func:`packed` did to a model. As a context manager, it gives the model and undoes that at the end.

    Attributes:
        model: The model, as given.
    """

    def __init__(self, model: Model, undo: ExitStack):
        self.model = model
        self._undo = undo

    def remove(self) -> None:
        """Leaves the model as it was before."""
        self._undo.close()

    def __enter__(self) -> Model:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def packed[Model: torch.nn.Module](model: Model, *, allow_unproven: bool = False) -> Packed[Model]:
    """Prepares a model for packs, at once. Other calls of it, such as ``generate()``, stay what they are.

    Call it before or after the model is wrapped (DDP, FSDP, Accelerate, PEFT): it adds hooks to modules of the model
    itself. To prepare a model twice is harmless. With gradient checkpointing, backward passes must end before the
    preparation does.

    Args:
        model: A ``…ForConditionalGeneration`` of transformers with a ``text_config``, or a wrapper of one. Those
            outside :data:`~supported.MODEL_TYPES` are proven on every version (:mod:`~vlmdata.integrations.general`).
        allow_unproven: Whether to skip the proof on versions of transformers outside :data:`~supported.PROVEN`. The
            first call on such a version computes a small random model on the CPU, packed and alone, and remembers the
            verdict (:mod:`~vlmdata.integrations.proof`).

    Returns:
        ``with packed(model): …`` undoes the preparation at the end; ``packed(model)`` alone leaves the model prepared.

    Raises:
        UsageError: If the model or its attention is not supported, or packs differ from their samples on the installed
            version of transformers.
    """
    inner = conditional_model(model)
    if is_general(inner):
        done = is_packed(inner)
        return Packed(model, ExitStack() if done else general.prepare_general(inner, allow_unproven))
    check_configuration(inner)
    if not allow_unproven:
        _require_proof(inner)
    if is_packed(inner):
        return Packed(model, ExitStack())
    undo = ExitStack()
    encoder, in_rows = encoder_of(inner), has_one_axis(inner)
    handles = [
        inner.model.register_forward_pre_hook(vision.before_model, with_kwargs=True),
        decoder_of(inner).register_forward_pre_hook(keep_apart, with_kwargs=True),
    ]
    if not in_rows:
        handles.append(encoder.register_forward_pre_hook(vision.before_encoder, with_kwargs=True))
        undo.callback(vision.exchange_deepstack(inner.model.language_model))
    delta_net.follows_boundaries.cache_clear()  # kernels may have been exchanged since an earlier model
    for layer in delta_nets(inner):
        handles.append(layer.register_forward_pre_hook(delta_net.take_apart, with_kwargs=True))
        handles.append(layer.register_forward_hook(delta_net.join, with_kwargs=True))
        undo.callback(delta_net.exchange_convolution(layer))
    for handle in handles:
        undo.callback(handle.remove)
    undo.callback(attention.exchange(inner.config.get_text_config(), None if in_rows else encoder.config))
    return Packed(model, undo)


def _require_proof(inner: Any) -> None:
    """Proves packs of a model, unless tests did on the installed version of transformers.

    Raises:
        UsageError: If packs differ from their samples.
    """
    import transformers

    if is_recorded(inner):
        return
    found = proof.verdict_of(inner, reduced, {"packed": lambda model: packed(model, allow_unproven=True)})
    if not found.way:
        raise UsageError(
            f"packed: with transformers {transformers.__version__}, packs of {inner.config.model_type} differ from "
            f"their samples ({found.difference}, in a small random model). Install transformers {PROVEN}, or pass "
            "allow_unproven=True and compare losses."
        )


def is_packed(model: torch.nn.Module) -> bool:
    """Whether :func:`packed` has prepared a model."""
    inner = conditional_model(model)
    if is_general(inner):
        return general.is_prepared(inner)
    return keep_apart in decoder_of(inner)._forward_pre_hooks.values()


@dataclass(frozen=True, eq=False)
class PackedOutput:
    """What a model computes of a batch.

    Attributes:
        losses: float32 (T,), the loss of each token; 0 where ``batch.labels`` has no target. Not weighted.
        output: What the model returned. Its logits are those of targets alone, (1, targets, vocabulary). ``aux_loss``,
            with ``output_router_logits=True``, is the model's own: over all tokens of the pack, padding included.
    """

    losses: torch.Tensor
    output: Any


def packed_forward(model: torch.nn.Module, batch: PackedBatch, **kwargs: Any) -> PackedOutput:
    """Computes a pack with a prepared model.

    Args:
        model: The model or its wrapper.
        batch: A whole pack with tokens and labels, and with pixels if it has images or videos. On any device.
        **kwargs: More arguments of the model's forward, such as ``output_router_logits``.

    Raises:
        UsageError: If the model is not prepared, or the batch is of another family or lacks a part.
    """
    return _forward(model, batch, True, kwargs)


def token_losses(model: torch.nn.Module, batch: PackedBatch, **kwargs: Any) -> torch.Tensor:
    """Returns the ``losses`` of :func:`packed_forward`: float32 (T,), 0 where there is no target, not weighted.

    It computes the logits of a part of the targets at a time, which spares memory.
    """
    return _forward(model, batch, False, kwargs).losses


def _forward(model: torch.nn.Module, batch: PackedBatch, with_logits: bool, kwargs: dict[str, Any]) -> PackedOutput:
    inner = conditional_model(model)
    _check_batch(inner, batch)
    assert batch.labels is not None
    targets = (batch.labels[0] != IGNORE_INDEX).nonzero().flatten()  # waits for the device if the batch is there
    if (device := inner.device).type != "meta":  # else accelerate moves weights and tensors
        batch, targets = batch.to(device), targets.to(device)
    assert batch.labels is not None
    labels = batch.labels[0, targets]
    inputs = packed_inputs(batch, pixel_dtype(inner)) | {"logits_to_keep": targets} | kwargs
    text = inner.config.get_text_config()
    token = PACK.set(batch)
    try:
        with nullcontext(False) if with_logits else losses_for_logits(inner.lm_head, labels, text) as are_losses:
            output = model(**inputs)
    finally:
        PACK.reset(token)
    found = output.logits[0].float()
    if not are_losses:
        found = cross_entropy(found, labels.to(found.device), reduction="none")
    losses = found.new_zeros(batch.total_tokens).index_copy(0, targets.to(found.device), found)
    return PackedOutput(losses, output)


def packed_inputs(batch: PackedBatch, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Returns the arguments of a prepared model's forward, for trainers that call it themselves.

    They have no labels, since the model would shift them again, and no attention mask, since transformers would then
    not look for samples.

    Args:
        batch: A whole pack.
        dtype: Dtype of the pixels; by default float32. Give that of the vision encoder to save memory, but not for
            Gemma 4, which computes with pixels before it casts them.

    Returns:
        ``input_ids`` (1, T), ``position_ids``, ``use_cache=False``, what :meth:`PackedBatch.image_inputs` returns if
        there are images, and ``pixel_values_videos`` and ``video_grid_thw`` if there are videos. The positions hold the
        times of videos, so models need no ``second_per_grid_ts``. Positions are (4, 1, T), whose first row counts from
        0 in each segment; in families with one axis, they are that row, (1, T). For Gemma 4, ``mm_token_type_ids``
        (1, T) are 1 at the tokens of images.
    """
    starts, total = batch.cu_seqlens_padded.long(), batch.total_tokens
    first = starts[:-1].repeat_interleave(starts.diff(), output_size=total)
    within = (torch.arange(total, device=starts.device) - first).view(1, -1)
    one_axis = len(batch.family.position_axes) == 1
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": within if one_axis else torch.cat([within[None], batch.position_ids]),
        "use_cache": False,
    }
    if set(batch.family.model_types) & set(MARK_IMAGES):
        inputs["mm_token_type_ids"] = _image_marks(batch)
    if len(batch.host.image_grid_thw):
        inputs |= batch.image_inputs(dtype)
    if batch.video_grid_thw is not None:
        inputs["pixel_values_videos"] = batch.pixel_values_videos(dtype)
        inputs["video_grid_thw"] = batch.video_grid_thw
    return inputs


def _image_marks(batch: PackedBatch) -> torch.Tensor:
    """int64 (1, T), 1 at the tokens of images."""
    marks = np.zeros((1, batch.total_tokens), np.int64)
    for begin, end in image_spans(batch):
        marks[0, begin:end] = 1
    return to_device(torch.from_numpy(marks), batch.cu_seqlens.device)


def _check_batch(inner: Any, batch: PackedBatch) -> None:
    if not is_packed(inner):
        raise UsageError(f"packed: {type(inner).__name__} is not prepared. Call it within `with packed(model):`.")
    if is_general(inner):
        raise UsageError(
            f"packed: losses per token of {type(inner).__name__} are not computed here. Call "
            "model(**batch.model_inputs(), use_cache=False), and compute the loss of its logits with batch.labels[0]."
        )
    if inner.config.model_type not in batch.family.model_types:
        raise UsageError(
            f"packed: the model's model_type is {inner.config.model_type!r}, and the batch is for the family "
            f"{batch.family.name!r} ({', '.join(batch.family.model_types)}). Preprocess for the model's tokenizer."
        )
    if batch.context_parallel is not None:
        part = batch.context_parallel
        raise UsageError(f"packed: the batch is slice {part.rank} of {part.size}. Load whole packs.")
    if batch.input_ids is None or batch.labels is None:
        raise UsageError("packed: the batch was loaded without the parts 'tokens' and 'labels'. Load both.")
