"""Packed batches in the models of transformers: Qwen3.5, Qwen3-VL (both also with experts) and Qwen2.5-VL.

A pack is one row of several samples. :func:`packed` prepares a model, so that each sample is computed as if it were
alone. :func:`token_losses` computes a batch with it. No state is kept between calls: the hooks of
:func:`packed` read from the positions of a call where its samples begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.errors import UsageError
from vlmdata.integrations import attention, delta_net, vision
from vlmdata.integrations.head import losses_for_logits
from vlmdata.integrations.segments import PACK, SEGMENTS, Segments, SegmentsMask

#: Versions of transformers whose models were compared with their samples one by one (tests/integrations).
PROVEN = ">=5.16,<5.19"
#: ``model_type`` of the configurations of supported models.
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


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
        model: A ``…ForConditionalGeneration`` of transformers of one of :data:`MODEL_TYPES`, or a wrapper of one.
        allow_unproven: Whether to accept versions of transformers outside :data:`PROVEN`. Compare losses yourself then.

    Returns:
        ``with packed(model): …`` undoes the preparation at the end; ``packed(model)`` alone leaves the model prepared.

    Raises:
        UsageError: If the model, its attention or the version of transformers is not supported.
    """
    _check_version(allow_unproven)
    inner = conditional_model(model)
    _check_attention(inner)
    if is_packed(inner):
        return Packed(model, ExitStack())
    delta_net.follows_boundaries.cache_clear()  # kernels may have been exchanged since an earlier model
    text = _text_model(inner)
    handles = [
        inner.model.register_forward_pre_hook(vision.before_model, with_kwargs=True),
        inner.model.visual.register_forward_pre_hook(vision.before_encoder, with_kwargs=True),
        text.register_forward_pre_hook(_keep_apart, with_kwargs=True),
    ]
    for layer in _delta_nets(inner):
        handles.append(layer.register_forward_pre_hook(delta_net.take_apart, with_kwargs=True))
        handles.append(layer.register_forward_hook(delta_net.join, with_kwargs=True))
    undo = ExitStack()
    for handle in handles:
        undo.callback(handle.remove)
    for layer in _delta_nets(inner):
        undo.callback(delta_net.exchange_convolution(layer))
    undo.callback(vision.exchange_deepstack(text))
    undo.callback(attention.exchange(text.config, inner.model.visual.config))
    return Packed(model, undo)


def is_packed(model: torch.nn.Module) -> bool:
    """Whether :func:`packed` has prepared a model."""
    return _keep_apart in _text_model(conditional_model(model))._forward_pre_hooks.values()


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
    inputs = packed_inputs(batch, inner.model.visual.dtype) | {"logits_to_keep": targets} | kwargs
    token = PACK.set(batch)
    try:
        with nullcontext(False) if with_logits else losses_for_logits(inner.lm_head, labels) as are_losses:
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
        dtype: Dtype of the pixels; by default float32. Give that of the vision encoder to save memory.

    Returns:
        ``input_ids`` (1, T), ``position_ids`` (4, 1, T), whose first row counts from 0 in each segment,
        ``use_cache=False``, ``pixel_values`` and ``image_grid_thw`` if there are images, and ``pixel_values_videos``
        and ``video_grid_thw`` if there are videos. The positions hold the times of videos, so models need no
        ``second_per_grid_ts``.
    """
    starts, total = batch.cu_seqlens_padded.long(), batch.total_tokens
    first = starts[:-1].repeat_interleave(starts.diff(), output_size=total)
    within = torch.arange(total, device=starts.device) - first
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": torch.cat([within.view(1, 1, -1), batch.position_ids]),
        "use_cache": False,
    }
    if len(batch.host.image_grid_thw):
        inputs["pixel_values"] = batch.pixel_values(dtype)
        inputs["image_grid_thw"] = batch.image_grid_thw
    if batch.video_grid_thw is not None:
        inputs["pixel_values_videos"] = batch.pixel_values_videos(dtype)
        inputs["video_grid_thw"] = batch.video_grid_thw
    return inputs


def conditional_model(model: torch.nn.Module) -> Any:
    """Finds the model of transformers in a wrapper.

    Raises:
        UsageError: If there is none that is supported.
    """
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if kind in MODEL_TYPES and _is_a(module, "ForConditionalGeneration"):
            return module
    raise UsageError(
        f"packed: {type(model).__name__} has no ForConditionalGeneration model of transformers with one of the model "
        f"types {', '.join(MODEL_TYPES)}. Give such a model, or its wrapper."
    )


def _is_a(module: torch.nn.Module, suffix: str) -> bool:
    """Whether a class of transformers with such a name is among the module's own."""
    kinds = type(module).__mro__  # FSDP2 makes a subclass
    return any(each.__module__.startswith("transformers.models.") and each.__name__.endswith(suffix) for each in kinds)


def _text_model(inner: Any) -> Any:
    return next(module for module in inner.model.modules() if _is_a(module, "TextModel"))


def _delta_nets(inner: Any) -> Iterator[torch.nn.Module]:
    return (module for module in inner.model.modules() if _is_a(module, "GatedDeltaNet"))


def _keep_apart(text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of the language model: if the positions are of a pack, every layer gets its boundaries."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is None or kwargs.get("past_key_values") is not None or isinstance(mask, dict):
        return None
    if positions.ndim == 3 and len(positions) != 4:
        return None  # three rows do not say where samples begin: transformers takes them for one sample, too
    row = positions[0] if positions.ndim == 3 else positions
    if mask is not None and (mask.ndim != 2 or not mask.all()):
        return None  # a padded row, whose positions rise by other steps
    if len(row) > 1 and bool((row.diff() != 1).any()):
        raise UsageError(f"packed: position_ids are of packs in {len(row)} rows. Pass each pack in a call of its own.")
    segments = _segments(row[0]) if len(row) == 1 else None
    if segments is None:
        return None
    if mask is not None or kwargs.get("use_cache"):
        raise UsageError(
            f"packed: position_ids are of a pack of {len(segments.lengths)} segments, but attention_mask or use_cache "
            "is set, with which transformers mixes samples. Pass neither."
        )
    kwargs = kwargs | {"use_cache": False, "position_ids": positions if positions.ndim == 3 else row.expand(4, 1, -1)}
    return args, kwargs | _boundaries(text, row, segments, kwargs["inputs_embeds"])


def _segments(row: torch.Tensor) -> Segments | None:
    batch = PACK.get()
    if batch is not None and batch.total_tokens == len(row):
        return Segments.of_bounds(batch.host.cu_seqlens_padded.tolist(), row.device)
    return Segments.of(row)


def _boundaries(text: Any, row: torch.Tensor, segments: Segments, inputs_embeds: torch.Tensor) -> dict[str, Any]:
    """The arguments by which the layers of a language model know where samples begin."""
    from transformers.masking_utils import create_causal_mask
    from transformers.utils.generic import is_flash_attention_requested

    found: dict[str, Any] = {}
    linear = "linear_attention" in getattr(text.config, "layer_types", ())
    if text.config._attn_implementation == attention.DECODER:
        mask = SegmentsMask.make(row.device)
        found[SEGMENTS] = segments
        found["attention_mask"] = {"full_attention": mask, "linear_attention": segments} if linear else mask
        return found
    if is_flash_attention_requested(text.config):  # else each layer finds them from the positions, and waits for it
        found |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), segments.cu_seqlens)
        found |= dict.fromkeys(("max_length_q", "max_length_k"), max(segments.lengths))
    if linear:
        full = create_causal_mask(
            config=text.config, inputs_embeds=inputs_embeds, attention_mask=None, past_key_values=None, position_ids=row
        )
        found["attention_mask"] = {"full_attention": full, "linear_attention": segments}
    return found


def _check_version(allow_unproven: bool) -> None:
    import transformers
    from packaging.specifiers import SpecifierSet

    if not allow_unproven and not SpecifierSet(PROVEN).contains(transformers.__version__, prereleases=True):
        raise UsageError(
            f"packed: transformers {transformers.__version__} is installed, and packs were proven with {PROVEN} alone: "
            "another version may mix samples. Install such a version, or pass allow_unproven=True and compare losses."
        )


def _check_attention(inner: Any) -> None:
    from transformers.utils.generic import is_flash_attention_requested

    config = inner.config.get_text_config()
    name = config._attn_implementation
    if name not in (None, "eager", "sdpa", "flex_attention", attention.DECODER) and not is_flash_attention_requested(
        config
    ):
        raise UsageError(
            f"packed: the model has attn_implementation={name!r}, which may not see where samples begin. Use 'sdpa', "
            "'eager' or a flash attention."
        )


def _check_batch(inner: Any, batch: PackedBatch) -> None:
    if not is_packed(inner):
        raise UsageError(f"packed: {type(inner).__name__} is not prepared. Call it within `with packed(model):`.")
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
