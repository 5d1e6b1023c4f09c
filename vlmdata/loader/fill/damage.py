"""Samples with changed bytes: how a worker finds and masks them, and which of them a loader has met.

Whether a sample is masked depends on all of its stored bytes, never on the part or slice of it that a rank reads. So
ranks that share a pack agree without asking one another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ChangedDataError, DatasetFormatError, UnreadableDataError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import OnDamage
from vlmdata.loader.fill.assemble import assemble, extents, read_members, stored_members
from vlmdata.loader.request.request import TOKEN_MEMBERS, PackRequest
from vlmdata.storage.shards import DatasetShards, ShardStore
from vlmdata.wording import counted

#: A sample: the number of its dataset, and its position in it.
type SampleId = tuple[int, int]

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


@dataclass(frozen=True)
class DamagedSample:
    """A sample that was masked.

    Attributes:
        dataset: Number of its dataset in the loader's list.
        index: Its position in the dataset.
        file: Its shard.
        row: Its row of the source.
        key: Its key.
    """

    dataset: int
    index: int
    file: str
    row: int
    key: str

    @property
    def id(self) -> SampleId:
        """Returns what identifies the sample in a loader's state."""
        return self.dataset, self.index

    def __str__(self) -> str:
        return f"{self.file}: row {self.row} key {self.key}"


def look_up(
    ids: Iterable[SampleId], datasets: Sequence[VlmDataset], shards: Sequence[DatasetShards]
) -> tuple[DamagedSample, ...]:
    """Returns file, row and key of samples, in order of dataset and position, each once."""
    found = []
    for dataset, position in sorted(set(ids)):
        index, files = datasets[dataset].index, shards[dataset]
        file = f"{files.name}/{files.files[int(index.shard[position])].name}"
        found.append(DamagedSample(dataset, position, file, int(index.source_row[position]), index.key(position)))
    return tuple(found)


def require_few(damaged: Sequence[DamagedSample], most: int) -> None:
    """Checks the number of masked samples.

    Raises:
        DatasetFormatError: If there are more than ``most``, naming all.
    """
    if len(damaged) > most:
        listed = "\n".join(f"  {each}" for each in damaged)
        raise DatasetFormatError(
            f"{counted(len(damaged), 'sample')} of this run are damaged, more than max_damaged {most}:\n{listed}\n"
            "Run `vlmdata verify` on the dataset; it names the remedy. Or raise max_damaged."
        )
