"""Reads the bytes of a batch into its buffer. Workers run this code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError
from vlmdata.families import Family
from vlmdata.format.schema import IGNORE_INDEX
from vlmdata.loader.config import Pixels
from vlmdata.loader.request.index_rows import TOKEN_MEMBERS, IndexedPack, IntArray, SampleRows
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.media.codecs import RAW, decode_item
from vlmdata.storage.download import Extents
from vlmdata.storage.shards import ShardStore
from vlmdata.wording import LaterText

_ALIGN = 64
_BYTES_PER_TOKEN = {"input_ids": 4, "loss_mask": 1, "loss_weights": 4}
_BYTES_PER_POSITION = 4
#: Gaps up to this size between two arrays are read too, instead of a second read: a page of the cache.
_READ_THROUGH = 4096


def assemble(
    request: PackRequest, store: ShardStore, buffer: npt.NDArray[np.uint8], masked: Collection[int] = ()
) -> None:
    """Reads a batch into a buffer. Writes every byte of its arrays.

    Samples with a number in ``masked`` are not read: their tokens are padding and the placeholders of their images and
    videos, their positions follow from these, their pixels are 0, and they have no targets. The blocks of a video then
    stand together at its start: the index does not say where the others were, and every rank must agree.

    Raises:
        DatasetFormatError: If a shard has changed.
    """
    views = request.arrays.views(buffer)
    _fill_tokens(request, store, views, masked)
    if "patches" in views:
        _fill_patches(request, store, views, masked)


def stored_members(request: PackRequest) -> list[str]:
    """Returns the members with an entry per token that :func:`assemble` reads, in storage order."""
    filled = {each.name for each in request.arrays.placed if each.bytes}
    wanted = filled & {"position_ids", "input_ids", "loss_weights"}
    if "labels" in filled:  # labels are shifted tokens
        wanted |= {"input_ids", "loss_mask"}
    if "video_block_starts" in filled:
        wanted.add("input_ids")
    return [name for name in TOKEN_MEMBERS if name in wanted]


def extents(request: PackRequest, *, whole: bool) -> Extents:
    """Returns the places of all bytes that :func:`assemble` reads; ``whole``: of all parts, to check the samples."""
    samples, images = request.pack.samples, request.pack.images
    members = TOKEN_MEMBERS if whole else stored_members(request)
    which = [TOKEN_MEMBERS.index(member) for member in members]
    starts = samples.offsets[which].ravel()
    sizes = np.outer(_bytes_per_token(members, request.pack.family), samples.padded).ravel()
    there = starts >= 0
    read = np.arange(len(images.grids)) if whole else request.read
    owner = images.sample[read]
    begin = np.concatenate([starts[there], images.offsets[read]])
    return Extents(
        np.concatenate([np.tile(samples.dataset, len(which))[there], samples.dataset[owner]]),
        np.concatenate([np.tile(samples.shard, len(which))[there], samples.shard[owner]]),
        begin,
        begin + np.concatenate([sizes[there], images.bytes[read]]),
    )


def _fill_tokens(
    request: PackRequest, store: ShardStore, views: dict[str, npt.NDArray[np.generic]], masked: Collection[int]
) -> None:
    total = request.pack.total_tokens
    sliced = views["padding_mask"].size != total
    positions = views["position_ids"][:, 0]
    positions.fill(0)
    fills: dict[str, tuple[object, str]] = {"padding_mask": (True, "|b1")}
    blocks = views.get("video_block_starts", np.zeros(0, np.int64))
    if views.keys() & {"input_ids", "labels"} or blocks.size:  # labels are shifted tokens
        fills["input_ids"] = (request.pack.pad_id, "<i8")
    if "labels" in views:
        fills |= {"labels": (IGNORE_INDEX, "<i8"), "loss_mask": (0, "<f4")}
    if "loss_weights" in views:
        fills["loss_weights"] = (0, "<f4")
    whole: dict[str, npt.NDArray[Any]] = {}
    for name, (fill, dtype) in fills.items():
        in_place = name in views and not sliced
        whole[name] = views[name].reshape(total) if in_place else np.empty(total, dtype)
        whole[name].fill(fill)
    _fill_samples(request, store, positions, whole, masked)
    if blocks.size:
        blocks[...] = _video_blocks(request, store, whole["input_ids"])
    if sliced:  # tokens are small, so they are read whole and sliced; only the needed pixels are read
        for name in whole.keys() & views.keys():
            np.concatenate([whole[name][a:b] for a, b in request.ranges.tolist()], out=views[name][0])


def _fill_samples(
    request: PackRequest,
    store: ShardStore,
    positions: npt.NDArray[Any],
    whole: dict[str, npt.NDArray[Any]],
    masked: Collection[int],
) -> None:
    """Fills the columns (T,) of a whole pack, and the positions (k, T) or (k, 0), at the samples' places."""
    wanted, samples = stored_members(request), request.pack.samples
    if masked:
        samples = samples.take([number for number in range(len(samples.keys)) if number not in masked])
        for number in masked:
            _fill_masked(request.pack, number, positions, whole)
    stored = read_members(samples, wanted, store, request.pack.family) if wanted else {}
    targets = np.zeros(request.pack.total_tokens, np.uint8) if "loss_mask" in wanted else None
    weights = np.zeros(request.pack.total_tokens, np.float32) if "loss_weights" in wanted else None
    spans = zip(samples.begins.tolist(), samples.lengths.tolist(), samples.padded.tolist(), strict=True)
    for i, (begin, length, padded) in enumerate(spans):
        span = slice(begin, begin + length)
        whole["padding_mask"][span] = False
        if positions.size:
            positions[:, span] = stored["position_ids"][i].view("<i4").reshape(-1, padded)[:, :length]
        if "input_ids" in wanted:
            whole["input_ids"][span] = stored["input_ids"][i].view("<i4")[:length]
        if targets is not None:
            targets[span] = stored["loss_mask"][i][:length]
        if weights is not None:
            own = stored["loss_weights"][i]
            weights[span] = own.view("<f4")[:length] if len(own) else stored["loss_mask"][i][:length]
    if targets is not None:
        # Token i predicts token i + 1; the last token of a sample predicts nothing.
        targets[samples.begins] = 0
        np.copyto(whole["labels"][:-1], whole["input_ids"][1:], where=targets[1:] != 0)
        whole["loss_mask"][:-1] = targets[1:]
    if weights is not None:
        weights[samples.begins] = 0
        whole["loss_weights"][:-1] = weights[1:]


def _fill_masked(
    pack: IndexedPack, number: int, positions: npt.NDArray[Any], whole: dict[str, npt.NDArray[Any]]
) -> None:
    """Fills the place of a sample from its lengths and grids alone, so that it looks the same to every rank."""
    samples, images = pack.samples, pack.images
    begin, length = int(samples.begins[number]), int(samples.lengths[number])
    own = images.sample == number
    blocks, firsts = pack.blocks(own), images.starts[own]
    # From the first token of each item on, its blocks stand one after another.
    ends = np.cumsum(blocks.counts)
    item = np.repeat(np.arange(len(firsts)), np.diff(blocks.firsts, append=len(blocks.counts)))
    starts = firsts[item] + ends - blocks.counts - (ends - blocks.counts)[blocks.firsts][item]
    whole["padding_mask"][begin : begin + length] = False
    if positions.size:
        positions[:, begin : begin + length] = pack.family.position_ids(length, starts - begin, blocks.grids)
    if "input_ids" in whole:  # models look for an image's placeholders
        for start, count, end in zip(starts.tolist(), blocks.counts.tolist(), ends.tolist(), strict=True):
            whole["input_ids"][start : start + count] = blocks.ids[end - count : end]


def _video_blocks(request: PackRequest, store: ShardStore, input_ids: npt.NDArray[Any]) -> IntArray:
    """Returns the first token of each block of the pack's videos, (B,), from its tokens (T,)."""
    samples, images = request.pack.samples, request.pack.images
    found = []
    for number in np.unique(images.sample[images.are_videos]).tolist():
        begin, own = int(samples.begins[number]), images.sample == number
        blocks = request.pack.blocks(own)
        try:
            starts = blocks.locate(input_ids[begin : begin + int(samples.lengths[number])])
        except ValueError as error:
            file = store.path(int(samples.dataset[number]), int(samples.shard[number]))
            raise DatasetFormatError(
                f"{file}: row {samples.row[number]} key {samples.keys[number]} input_ids: {error}. Run "
                "`vlmdata verify` on the dataset to list all damage."
            ) from error
        of_video = np.repeat(images.are_videos[own], np.diff(blocks.firsts, append=len(blocks.counts)))
        found.append(starts[of_video] + begin)
    return np.concatenate(found)


def read_members(
    samples: SampleRows, members: Sequence[str], store: ShardStore, family: Family
) -> dict[str, list[npt.NDArray[np.uint8]]]:
    """Reads some stored arrays of all samples, adjacent ones together; ``members`` are in storage order.

    Returns for each member the bytes of each sample's array; empty if the sample lacks the member.
    """
    which = [TOKEN_MEMBERS.index(member) for member in members]
    # Flat, sample by sample and member by member: that is file order within a shard.
    starts = samples.offsets[which].T.ravel()
    sizes = np.outer(samples.padded, _bytes_per_token(members, family)).ravel()
    dataset, shard = np.repeat(samples.dataset, len(members)), np.repeat(samples.shard, len(members))
    checksums = samples.checksums[which].T.ravel()
    place: npt.NDArray[np.intp] = np.arange(len(starts))
    found: list[npt.NDArray[np.uint8]] = [np.zeros(0, np.uint8)] * len(place)
    if "loss_weights" in members:
        place = np.flatnonzero(starts >= 0)
        starts, sizes, checksums = starts[place], sizes[place], checksums[place]
        dataset, shard = dataset[place], shard[place]

    def what(number: int) -> str:
        i, j = divmod(int(place[number]), len(members))
        return f"row {samples.row[i]} key {samples.keys[i]} {members[j]}"

    first, run_sizes = _runs(starts, starts + sizes, dataset, shard)
    room = -(-run_sizes // _ALIGN) * _ALIGN
    at = np.cumsum(room) - room
    scratch = np.empty(int(room.sum()), np.uint8)
    memory = memoryview(scratch)
    reads = (first, dataset[first], shard[first], starts[first], at, at + run_sizes)
    for number, of, file, begin, a, b in zip(*(column.tolist() for column in reads), strict=True):
        store.read(of, file, begin, memory[a:b], None, LaterText(what, number))
    inside = starts + np.repeat(at - starts[first], np.diff(first, append=len(starts)))
    columns = (place, dataset, shard, starts, inside, inside + sizes, checksums)
    for number, (into, of, file, begin, a, b, checksum) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        data = memory[a:b]
        if not store.is_sound(data, checksum):
            store.require_sound(of, file, begin, data, checksum, LaterText(what, number))
        found[into] = scratch[a:b]
    return {member: found[j :: len(members)] for j, member in enumerate(members)}


def _bytes_per_token(members: Sequence[str], family: Family) -> IntArray:
    positions = _BYTES_PER_POSITION * len(family.position_axes)
    return np.array([_BYTES_PER_TOKEN.get(member, positions) for member in members], np.int64)


def _runs(starts: IntArray, stops: IntArray, dataset: IntArray, shard: IntArray) -> tuple[IntArray, IntArray]:
    """Groups nearly adjacent byte ranges of a file to runs. Returns the first of each run and its bytes, both (r,)."""
    apart = starts[1:] - stops[:-1]
    joined = (apart >= 0) & (apart <= _READ_THROUGH) & (dataset[1:] == dataset[:-1]) & (shard[1:] == shard[:-1])
    first = np.flatnonzero(np.concatenate([np.ones(min(len(starts), 1), np.bool_), ~joined]))
    last = first + np.diff(first, append=len(starts)) - 1
    return first, stops[last] - starts[first]


def image_of(pack: IndexedPack, sample: int, image: int) -> str:
    """Returns row, key and number of a sample's image, for messages."""
    samples = pack.samples
    return f"row {samples.row[sample]} key {samples.keys[sample]} patches of image {pack.images.number[image]}"


def _fill_patches(
    request: PackRequest, store: ShardStore, views: dict[str, npt.NDArray[np.generic]], masked: Collection[int]
) -> None:
    """Fills the images held here, one after another, and the videos held here alike.

    Raw uint8 patches are read directly into place. Other codecs decode there, and patches in another dtype are expanded
    there, image by image. Of a video that is held in part all is read: the checksums are of all of it.
    """
    pack, held = request.pack, request.held
    if not len(held.items):
        return
    samples, images, family = pack.samples, pack.images, pack.family
    stored, made = images.rows[held.items], held.rows(images.grids, request.rows)
    rest = {name: view.view(np.uint8) for name, view in views.items() if name in ("patches", "video_patches")}
    # Only patches that stand in the batch otherwise than in the shard need a place to be read to.
    in_part = held.counts != images.grids[held.items, 0]
    through = np.ones(len(made), np.bool_) if request.pixels != "uint8" else in_part | (stored != made)
    scratch = np.empty((int(stored[through].max(initial=0)), family.patch_bytes), np.uint8)
    owner, part = images.sample[held.items], held.rows(images.grids, images.rows)
    columns = (
        samples.dataset[owner],
        samples.shard[owner],
        images.offsets[held.items],
        stored,
        made,
        images.checksums[held.items],
        through,
        owner,
        held.items,
        part // np.maximum(held.counts, 1) * held.begins,
        part,
    )
    for dataset, shard, offset, count, rows, checksum, apart, sample, image, first, taken in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        name = "video_patches" if images.are_videos[image] else "patches"
        out, rest[name] = rest[name][:rows], rest[name][rows:]
        what = LaterText(image_of, pack, sample, image)
        codec = images.codecs[image]
        place = scratch[:count] if apart else out
        if sample in masked:
            place.fill(0)
        elif codec == RAW:
            store.read(dataset, shard, offset, memoryview(place.reshape(-1)), checksum, what)
        else:
            data = np.empty(int(images.bytes[image]), np.uint8)
            store.read(dataset, shard, offset, memoryview(data), checksum, what)
            decode_item(codec, data, images.shape(image), family, place, LaterText(store.place, dataset, shard, what))
            store.require_pixels(dataset, shard, place, int(images.pixel_checksums[image]), what)
        if apart:
            _expand(place[first : first + taken], out, request.pixels, int(images.copies[image]), family)


def _expand(
    stored: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8], pixels: Pixels, copies: int, family: Family
) -> None:
    """Writes patches that are stored so often to their rows in a batch, given as bytes."""
    if pixels == "uint8":  # a video whose frames are equal is stored once
        out.reshape(-1, family.temporal_patch_size // copies, family.patch_bytes)[...] = stored[:, None]
        return
    import torch  # takes seconds, and only expanding needs it

    values = torch.from_numpy(out).view(getattr(torch, pixels))
    family.pixel_values(torch.from_numpy(stored), out=values, copies=copies)
