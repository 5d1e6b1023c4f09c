"""Fills the buffer of a batch, with samples of changed bytes masked if the user chose that. Workers run this code.

Whether a sample is masked depends on all of its stored bytes, never on the part or slice of it that a rank reads. So
ranks that share a pack agree without asking one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ChangedDataError, DatasetFormatError, UnreadableDataError
from vlmdata.loader.config import OnDamage
from vlmdata.loader.fill.assemble import assemble, extents, read_members, stored_members
from vlmdata.loader.request.request import TOKEN_MEMBERS, PackRequest
from vlmdata.storage.shards import ShardStore

#: Errors of a copy of the data that is damaged. Another copy may be sound.
DAMAGE = (DatasetFormatError, UnreadableDataError)


@dataclass(frozen=True)
class Filled:
    """What filling a buffer came to.

    Attributes:
        bytes_read: Bytes read from shards.
        damaged: What is wrong with the samples that are masked, by their number in the pack.
    """

    bytes_read: int
    damaged: Mapping[int, str] = field(default_factory=dict)


def fill(request: PackRequest, store: ShardStore, buffer: npt.NDArray[np.uint8], on_damage: OnDamage) -> Filled:
    """Reads a batch into a buffer.

    Args:
        request: What to read.
        store: Source of the shards.
        buffer: uint8, at least ``request.layout.bytes`` long.
        on_damage: What a sample with changed bytes does; see :class:`vlmdata.loader.config.Reading`.

    Raises:
        ChangedDataError: If a sample has changed bytes and is not masked.
        DatasetFormatError: If a shard is missing, has another size, or does not decode.
        UnreadableDataError: If a shard cannot be read.
    """
    if store.fetches_ranges:
        with store.fetched(extents(request, whole=on_damage == "mask")):
            return _fill(request, store, buffer, on_damage)
    return _fill(request, store, buffer, on_damage)


def _fill(request: PackRequest, store: ShardStore, buffer: npt.NDArray[np.uint8], on_damage: OnDamage) -> Filled:
    if on_damage == "raise":
        return Filled(assemble(request, store, buffer))
    before = store.bytes_read
    damaged: dict[int, str] = {}
    try:
        assemble(request, store, buffer)
        _check_the_rest(request, store)
    except ChangedDataError:
        damaged = _find_damaged(request, store)
        assemble(request, store, buffer, damaged)
    return Filled(store.bytes_read - before, damaged)


def _check_the_rest(request: PackRequest, store: ShardStore) -> None:
    """Checks what :func:`assemble` did not read: other parts of the samples, and images of other slices."""
    here = stored_members(request)
    others = [name for name in TOKEN_MEMBERS if name not in here]
    read_members(request.samples, others, store)
    pixels = any(each.name == "patches" for each in request.layout.fields)
    held = request.held if pixels else request.held[:0]
    _check_images(request, store, np.setdiff1d(np.arange(len(request.images.grids)), held).tolist())


def _find_damaged(request: PackRequest, store: ShardStore) -> dict[int, str]:
    """Returns what is wrong with each sample that has changed bytes."""
    found = {}
    for number in range(len(request.samples.keys)):
        try:
            read_members(request.samples.take([number]), TOKEN_MEMBERS, store)
            _check_images(request, store, np.flatnonzero(request.images.sample == number).tolist())
        except ChangedDataError as error:
            found[number] = str(error)
    return found


def _check_images(request: PackRequest, store: ShardStore, images: Collection[int]) -> None:
    """Checks the stored bytes of images, without decoding them."""
    reads, samples = request.images, request.samples
    for image in images:
        sample = int(reads.sample[image])
        number = image - int(np.searchsorted(reads.sample, sample))
        what = f"row {samples.row[sample]} key {samples.keys[sample]} patches of image {number}"
        store.read(
            int(samples.dataset[sample]),
            int(samples.shard[sample]),
            int(reads.offsets[image]),
            memoryview(np.empty(int(reads.bytes[image]), np.uint8)),
            int(reads.checksums[image]),
            what,
        )


def damaged_file(message: str) -> str:
    """Returns the file that an error of damaged data names: all of them begin with it."""
    return message.partition(": ")[0]
