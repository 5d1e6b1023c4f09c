"""Conversion of filled buffers to batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import HostArrays, PackedBatch, SampleOrigin
from vlmdata.loader.request.request import PackRequest


def batch_of(request: PackRequest, buffer: npt.NDArray[np.uint8], masked: tuple[int, ...] = ()) -> PackedBatch:
    """Returns a batch whose tensors are views of a filled buffer."""
    fields = {name: torch.from_numpy(view) for name, view in request.layout.views(buffer).items()}
    if "patches" in fields:
        fields["patches"] = fields["patches"].view(getattr(torch, request.pixels))
    bounds = request.cu_seqlens_padded
    samples, images = request.samples, request.images
    origins = (column.tolist() for column in (samples.dataset, samples.shard, samples.row, samples.index))
    return PackedBatch(
        input_ids=fields.get("input_ids"),
        labels=fields.get("labels"),
        loss_mask=fields.get("loss_mask"),
        loss_weights=fields.get("loss_weights"),
        position_ids=fields["position_ids"],
        padding_mask=fields["padding_mask"],
        cu_seqlens=torch.from_numpy(request.cu_seqlens.astype(np.int32)),
        cu_seqlens_padded=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int((bounds[1:] - bounds[:-1]).max(initial=0)),
        total_tokens=request.total_tokens,
        true_tokens=int(request.cu_seqlens[-1]),
        image_grid_thw=torch.from_numpy(images.grids),
        image_starts=torch.from_numpy(images.starts),
        image_indices=torch.from_numpy(request.held),
        patches=fields.get("patches"),
        sample_keys=samples.keys,
        origins=tuple(map(SampleOrigin, *origins)),
        epoch=request.position.epoch,
        step=request.position.step,
        micro_batch=request.position.micro_batch,
        pack=request.pack,
        context_parallel=request.context_parallel,
        host=HostArrays(request.cu_seqlens, bounds, images.grids, images.starts, request.held),
        family=request.family,
        masked=masked,
    )
