"""The samples with changed bytes that a loader has met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlmdata.errors import DatasetFormatError
from vlmdata.format.dataset import VlmDataset
from vlmdata.storage.shards import DatasetShards
from vlmdata.wording import counted

#: A sample: the number of its dataset, and its position in it.
type SampleId = tuple[int, int]


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
