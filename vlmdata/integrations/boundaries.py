"""Tells the decoder of a prepared model where the samples of a pack begin, and which images see themselves."""

from __future__ import annotations

from typing import Any

import torch

from vlmdata.errors import UsageError
from vlmdata.integrations import attention
from vlmdata.integrations.segments import PACK, SEGMENTS, Segments, SegmentsMask
from vlmdata.integrations.supported import INTERNVL_DECODERS, MARK_IMAGES
from vlmdata.integrations.windows import Span, image_spans, runs_within, spans_of_tokens

#: ``model_type`` of the modules with :func:`keep_apart` whose positions have one axis.
_ONE_AXIS = (*MARK_IMAGES, *INTERNVL_DECODERS)


def keep_apart(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a decoder, with keywords: if the positions are of a pack, every layer gets its boundaries."""
    row = None if isinstance(kwargs.get("attention_mask"), dict) else row_of_pack(kwargs)
    segments = None if row is None else _segments(decoder, row[0], kwargs)
    if row is None or segments is None:
        return None
    refuse_mask(kwargs, segments)
    positions = kwargs["position_ids"]
    if positions.ndim == 2 and decoder.config.model_type not in _ONE_AXIS:
        positions = row.expand(4, 1, -1)
    kwargs = kwargs | {"use_cache": False, "position_ids": positions}
    return args, kwargs | _boundaries(decoder.config.get_text_config(), row, segments, kwargs)


def row_of_pack(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the positions within segments, (1, T), if the arguments of a call may be of a pack.

    Raises:
        UsageError: If several rows are packs.
    """
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is None or kwargs.get("past_key_values") is not None:
        return None
    if positions.ndim == 3 and len(positions) != 4:
        return None  # three rows do not say where samples begin: transformers takes them for one sample, too
    row: torch.Tensor = positions[0] if positions.ndim == 3 else positions
    if mask is not None and not isinstance(mask, dict) and (mask.ndim != 2 or not mask.all()):
        return None  # a padded row, whose positions rise by other steps
    if len(row) > 1 and bool((row.diff() != 1).any()):
        raise UsageError(f"packed: position_ids are of packs in {len(row)} rows. Pass each pack in a call of its own.")
    return row if len(row) == 1 else None


def refuse_mask(kwargs: dict[str, Any], segments: Segments) -> None:
    """Refuses arguments with which transformers would mix the segments of a pack.

    Raises:
        UsageError: If there is a mask or a cache.
    """
    if kwargs.get("attention_mask") is not None or kwargs.get("use_cache"):
        raise UsageError(
            f"packed: position_ids are of a pack of {len(segments.lengths)} segments, but attention_mask or use_cache "
            "is set, with which transformers mixes samples. Pass neither."
        )


def _segments(decoder: Any, row: torch.Tensor, kwargs: dict[str, Any]) -> Segments | None:
    batch, sees = PACK.get(), _sees_images(decoder)
    if batch is None or batch.total_tokens != len(row):
        found = Segments.of(row)
        if found is None or not sees:
            return found
        return found.with_runs(runs_within(_marked(decoder, kwargs), found.on_host.tolist()))
    # transformers makes a mask of T x T for a single sample whose images see themselves.
    bounds = batch.host.cu_seqlens_padded.tolist()
    found = Segments.of_bounds(bounds, row.device, least=1 if sees else 2)
    return found if found is None or not sees else found.with_runs(runs_within(image_spans(batch), bounds))


def _sees_images(decoder: Any) -> bool:
    """Whether the tokens of an image see each other in both directions, in layers with a sliding window."""
    return getattr(decoder.config.get_text_config(), "use_bidirectional_attention", None) == "vision"


def _marked(decoder: Any, kwargs: dict[str, Any]) -> list[Span]:
    """Tokens of images of a call that is not of ``packed_forward``."""
    marks, ids = kwargs.get("mm_token_type_ids"), kwargs.get("input_ids")
    if marks is not None:
        return spans_of_tokens((marks[0] == 1) | (marks[0] == 2))
    if ids is not None:
        return spans_of_tokens((ids[0] == decoder.config.image_token_id) | (ids[0] == decoder.config.video_token_id))
    raise UsageError(
        "packed: a pack has neither mm_token_type_ids nor input_ids, so the images that see themselves "
        "(use_bidirectional_attention='vision') are not known. Pass one of them."
    )


def _boundaries(config: Any, row: torch.Tensor, segments: Segments, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by which the layers of a language model know where samples begin."""
    from transformers.masking_utils import create_causal_mask
    from transformers.utils.generic import is_flash_attention_requested

    found: dict[str, Any] = {}
    kinds = set(getattr(config, "layer_types", None) or ())
    linear = "linear_attention" in kinds
    if config._attn_implementation == attention.DECODER:
        mask = SegmentsMask.make(row.device)
        found[SEGMENTS] = segments
        by_kind = dict.fromkeys(kinds, mask) | ({"linear_attention": segments} if linear else {})
        found["attention_mask"] = by_kind if linear or "sliding_attention" in kinds else mask
        return found
    if is_flash_attention_requested(config):  # else each layer finds them from the positions, and waits for it
        found |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), segments.cu_seqlens)
        found |= dict.fromkeys(("max_length_q", "max_length_k"), max(segments.lengths))
    if linear:
        full = create_causal_mask(
            config=config,
            inputs_embeds=kwargs["inputs_embeds"],
            attention_mask=None,
            past_key_values=None,
            position_ids=row,
        )
        found["attention_mask"] = {"full_attention": full, "linear_attention": segments}
    if segments.runs and kwargs.get("mm_token_type_ids") is None:
        found["mm_token_type_ids"] = _marks(segments, row)
    return found


def _marks(segments: Segments, row: torch.Tensor) -> torch.Tensor:
    """int64 (1, T), 1 at the tokens of images: from them, transformers makes its own masks."""
    marks = torch.zeros(1, len(row[0]), dtype=torch.long)
    for begin, end in segments.runs:
        marks[0, begin:end] = 1
    return marks.to(row.device)
