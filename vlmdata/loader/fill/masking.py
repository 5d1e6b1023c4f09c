"""Reads a batch whose samples of changed bytes are masked, if the user chose that.

Whether a sample is masked depends on all of its stored bytes, never on the part or slice of it that a rank reads. So
ranks that share a pack agree without asking one another.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ChangedDataError, DatasetFormatError, UnreadableDataError
from vlmdata.loader.fill.assemble import assemble, image_of, read_members, stored_members
from vlmdata.loader.request.index_rows import TOKEN_MEMBERS
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.storage.shards import ShardStore

#: Errors of a copy of the data that is damaged. Another copy may be sound.
DAMAGE = (DatasetFormatError, UnreadableDataError)


def assemble_masked(request: PackRequest, store: ShardStore, buffer: npt.NDArray[np.uint8]) -> dict[int, str]:
    """Reads a batch into a buffer. Returns what is wrong with the masked samples, by their number in the pack."""
    try:
        assemble(request, store, buffer)
        _check_the_rest(request, store)
    except ChangedDataError:
        damaged = _find_damaged(request, store)
        assemble(request, store, buffer, damaged)
        return damaged
    return {}


def _check_the_rest(request: PackRequest, store: ShardStore) -> None:
    """Checks what :func:`assemble` did not read: other parts of the samples, and images of other slices."""
    here = stored_members(request)
    read_members(request.pack.samples, [name for name in TOKEN_MEMBERS if name not in here], store, request.pack.family)
    held = request.held if request.arrays.has_patches else request.held[:0]
    _check_images(request, store, np.setdiff1d(np.arange(len(request.pack.images.grids)), held).tolist())


def _find_damaged(request: PackRequest, store: ShardStore) -> dict[int, str]:
    """Returns what is wrong with each sample that has changed bytes."""
    found, samples, images = {}, request.pack.samples, request.pack.images
    for number in range(len(samples.keys)):
        try:
            read_members(samples.take([number]), TOKEN_MEMBERS, store, request.pack.family)
            _check_images(request, store, np.flatnonzero(images.sample == number).tolist())
        except ChangedDataError as error:
            found[number] = str(error)
    return found


def _check_images(request: PackRequest, store: ShardStore, images: Collection[int]) -> None:
    """Checks the stored bytes of images, without decoding them."""
    rows, samples = request.pack.images, request.pack.samples
    for image in images:
        sample = int(rows.sample[image])
        store.read(
            int(samples.dataset[sample]),
            int(samples.shard[sample]),
            int(rows.offsets[image]),
            memoryview(np.empty(int(rows.bytes[image]), np.uint8)),
            int(rows.checksums[image]),
            image_of(request.pack, sample, image),
        )


def damaged_file(message: str) -> str:
    """Returns the file that an error of damaged data names: all of them begin with it."""
    return message.partition(": ")[0]
