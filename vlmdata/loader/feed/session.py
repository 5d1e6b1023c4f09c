"""A sequence of batches from one position on. Owns the workers, the buffers and the copy stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import VIDEO_ARRAYS, HostArrays, PackedBatch, PackItems, SampleOrigin
from vlmdata.families.processor import ProcessorFamily
from vlmdata.families.tensors import headers_of
from vlmdata.loader.feed.device import DeviceCopy, DeviceMover
from vlmdata.loader.feed.pipeline import Filler, Pipeline
from vlmdata.loader.fill.buffers import BufferPool, LeasedBuffer
from vlmdata.loader.fill.filler import Filled
from vlmdata.loader.request.pack_request import PackRequest, RankStream
from vlmdata.loader.state import Position


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A batch, the position of the next one, and what came of filling it; its copy to the device while in progress."""

    batch: PackedBatch
    following: Position
    bytes_read: int
    damaged: Mapping[int, str]
    copy: DeviceCopy | None


class Session:
    """Batches from ``start`` on, until a jump to another position; on the host if ``device`` is None."""

    def __init__(self, stream: RankStream, filler: Filler, device: torch.device | None, start: Position):
        self._next: Position | None = start
        self._process = os.getpid()
        self._device, self._filler, self._pool = device, filler, BufferPool()
        self._mover = DeviceMover(device) if device is not None and device.type == "cuda" else None
        self._pipeline: Pipeline[LoadedBatch] | None = None
        if filler.ahead:
            self._pipeline = Pipeline(stream.requests(start), filler, self._pool, self._finish)
            self._batches = iter(self._pipeline)
        else:
            self._batches = self._here(stream.requests(start))

    def continues_at(self, position: Position) -> bool:
        """True if the next batch is at this position. False in a fork, which has neither thread nor workers."""
        return self._next == position and self._process == os.getpid()

    def take(self) -> LoadedBatch:
        """Returns the next batch, on the device and safe to use on its current stream. After an error there is none."""
        self._next = None
        loaded = next(self._batches)
        self._next = loaded.following
        if loaded.copy is None:
            return loaded
        assert self._mover is not None
        self._mover.receive(loaded.batch, loaded.copy)
        return replace(loaded, copy=None)

    def close(self) -> None:
        """Stops everything. Returned batches stay valid."""
        if self._process != os.getpid():
            return  # the workers and buffers are the parent's
        if self._pipeline is not None:
            self._pipeline.close()
        else:
            self._filler.stop(wait=True)
        if self._mover is not None:
            self._mover.close()
        self._pool.close()
        # These objects refer back to this one. Breaking the cycle releases memory now, not at a later collection.
        self._pipeline, self._batches = None, iter(())

    def _here(self, requests: Iterator[PackRequest]) -> Iterator[LoadedBatch]:
        """Makes batches in the consumer's thread, one at a time."""
        for request in requests:
            yield self._finish(request, *self._filler.start(request, self._pool).result())

    def _finish(self, request: PackRequest, lease: LeasedBuffer, filled: Filled) -> LoadedBatch:
        """Converts a filled buffer to a batch; in the thread of the pipeline, if there is one."""
        batch, copy = _batch_of(request, lease.array(), tuple(filled.damaged)), None
        if self._mover is not None:
            self._mover.pin(lease.memory())
            batch, copy = self._mover.send(batch)
        elif self._device is not None:
            batch = batch.to(self._device)
        return LoadedBatch(batch, request.following, filled.bytes_read, filled.damaged, copy)


def _batch_of(request: PackRequest, buffer: npt.NDArray[np.uint8], masked: tuple[int, ...] = ()) -> PackedBatch:
    """Returns a batch whose tensors are views of a filled buffer."""
    fields = {name: torch.from_numpy(view) for name, view in request.arrays.views(buffer).items()}
    for name in fields.keys() & {"patches", "video_patches"}:
        fields[name] = fields[name].view(getattr(torch, request.pixels))
    pack = request.pack
    bounds, samples = pack.cu_seqlens_padded, pack.samples
    host = _host_arrays(request, fields.get("video_block_starts"))
    videos = {name: torch.from_numpy(getattr(host, name)) for name in VIDEO_ARRAYS} if len(host.video_starts) else {}
    origins = (column.tolist() for column in (samples.dataset, samples.shard, samples.row, samples.index))
    by_part: dict[str, Any] = {
        name: fields.get(name)
        for name in ("input_ids", "labels", "loss_mask", "loss_weights", "patches", "video_patches")
    }
    return PackedBatch(
        position_ids=fields["position_ids"],
        padding_mask=fields["padding_mask"],
        cu_seqlens=torch.from_numpy(pack.cu_seqlens.astype(np.int32)),
        cu_seqlens_padded=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int((bounds[1:] - bounds[:-1]).max(initial=0)),
        total_tokens=pack.total_tokens,
        true_tokens=int(pack.cu_seqlens[-1]),
        image_grid_thw=torch.from_numpy(host.image_grid_thw),
        image_starts=torch.from_numpy(host.image_starts),
        image_indices=torch.from_numpy(host.image_indices),
        **by_part,
        **videos,
        sample_keys=samples.keys,
        origins=tuple(map(SampleOrigin, *origins)),
        epoch=request.position.epoch,
        step=request.position.step,
        micro_batch=request.position.micro_batch,
        pack=pack.number,
        context_parallel=request.context_parallel,
        host=host,
        family=pack.family,
        masked=masked,
        headers=_headers(request, fields.get("patches")),
    )


def _headers(request: PackRequest, patches: torch.Tensor | None) -> npt.NDArray[np.int64] | None:
    """Returns the headers of the records of a processor's tensors; None for other families."""
    family = request.pack.family
    if not isinstance(family, ProcessorFamily) or patches is None:
        return None
    return headers_of(family, patches.numpy(), request.pack.images.rows.tolist())


def _host_arrays(request: PackRequest, blocks: torch.Tensor | None) -> HostArrays:
    """Returns boundaries, images and videos of a pack, with the first tokens of the blocks of its videos, if any."""
    pack, held = request.pack, request.held
    bounds, images, videos = pack.cu_seqlens_padded, pack.images, pack.images.are_videos
    if blocks is None:  # no videos
        return HostArrays(pack.cu_seqlens, bounds, images.grids, images.starts, held.items)
    numbers = np.where(videos, np.cumsum(videos), np.cumsum(~videos)) - 1
    found = PackItems(images.grids, images.starts, videos, numbers).held(held)
    return HostArrays(
        pack.cu_seqlens,
        bounds,
        images.grids[~videos],
        images.starts[~videos],
        found.images,
        images.grids[videos],
        images.starts[videos],
        blocks.numpy().copy(),  # a view would keep the buffer
        found.videos,
    )


class CurrentSession:
    """The current session of a loader, if any. Separate from the loader, so that it can end later."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def at(self, position: Position, begin: Callable[[], Session]) -> Session:
        """Returns the current session if it continues at this position, else a new one."""
        if self._session is None or not self._session.continues_at(position):
            self.end()
            self._session = begin()
        return self._session

    def end(self) -> None:
        """Ends the session, if any."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
