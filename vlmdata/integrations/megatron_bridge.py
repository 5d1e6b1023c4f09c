"""Packs as batches of NeMo Megatron-Bridge: what its ``vlm_step`` takes from a data iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError
from vlmdata.loader.loader import StreamingLoader


def bridge_batch(batch: PackedBatch) -> dict[str, Any]:
    """Returns a pack as ``megatron.bridge.training.vlm_step.get_batch`` reads it, in megatron-core's THD form.

    Weights of targets take the place of the loss mask: Megatron-Bridge sums ``losses * loss_mask`` and divides by the
    whole number below the sum of the mask over the step. So weights other than 0 and 1 change the step by less than
    one part in that number.

    Args:
        batch: A whole pack with tokens, labels and pixels, on the host.

    Returns:
        ``input_ids``, ``labels`` (already shifted, as there) and ``loss_mask`` (1, T), ``position_ids`` (3, 1, T)
        for MRoPE, boundaries ``cu_seqlens_q`` and ``…_padded`` int32 (segments + 1,), ``max_seqlen_q`` int32 (),
        the same for ``kv``, ``total_tokens``, and ``visual_inputs`` (``GenericVisualInputs``; None without images).

    Raises:
        UsageError: If the pack has videos.
    """
    visual = None
    if batch.video_grid_thw is not None:
        raise UsageError(
            f"pack {batch.pack} of epoch {batch.epoch} has videos, and packs for Megatron-Bridge have images alone. "
            "Load a dataset without videos."
        )
    if len(batch.host.image_grid_thw):
        from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

        visual = GenericVisualInputs(pixel_values=batch.pixel_values(), image_grid_thw=batch.image_grid_thw)
    longest = torch.tensor(batch.max_seqlen, dtype=torch.int32)
    boundaries = {"": batch.cu_seqlens, "_padded": batch.cu_seqlens_padded}
    return {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "loss_mask": batch.loss_weights,
        "attention_mask": None,
        "position_ids": batch.position_ids,
        **{f"cu_seqlens_{side}{kind}": bounds for side in ("q", "kv") for kind, bounds in boundaries.items()},
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "total_tokens": batch.total_tokens,
        "visual_inputs": visual,
    }


class BridgePacks(Iterator[dict[str, Any]]):
    """The packs of a loader as the train data of Megatron-Bridge, without end.

    Return it from ``DatasetProvider.build_datasets`` with ``dataloader_type="external"``. Megatron-Bridge keeps its
    position in checkpoints by ``save_state`` and ``restore_state``.

    Args:
        loader: The packs. With tensor, pipeline or context parallelism, give it ``dp_rank`` and ``dp_size``.
    """

    def __init__(self, loader: StreamingLoader):
        self.loader = loader

    def __next__(self) -> dict[str, Any]:
        batch = next(iter(self.loader), None)
        return bridge_batch(next(iter(self.loader)) if batch is None else batch)  # None: an epoch has ended

    def save_state(self) -> dict[str, Any]:
        """Returns the position."""
        return self.loader.state_dict()

    def restore_state(self, state: dict[str, Any]) -> None:
        """Continues from a position."""
        self.loader.load_state_dict(state)
