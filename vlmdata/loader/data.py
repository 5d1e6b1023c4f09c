"""Opens the data of a loader, and checks that its datasets are compatible."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import LoaderConfig, Reading, Service
from vlmdata.loader.feed.pipeline import Filler
from vlmdata.loader.mixture import expanded
from vlmdata.loader.request.pack_request import RankStream
from vlmdata.locations import place_of
from vlmdata.storage.open import open_for_loading
from vlmdata.storage.shards import DatasetShards

_SECONDS_TO_OPEN = 30.0
#: A host and a port, without a scheme.
_PORT = re.compile(r"^[\w.-]+:\d+$")


def locations_of(data: Any) -> list[str | PathLike[str]]:
    """Returns the locations that a user gave: one, or several of them; a UsageError for anything else."""
    if isinstance(data, str | PathLike):
        return [data]
    found: list[str | PathLike[str]] = []
    for each in data if isinstance(data, Iterable) else [data]:
        if not isinstance(each, str | PathLike):  # an opened dataset yields samples: stop at the first
            raise UsageError(f"data is {data!r:.200}; it must be a folder, a URL, or a list of them")
        found.append(each)
    if not found:
        raise UsageError("data: no datasets given")
    return found


class BatchService(Protocol):
    """A service that makes the batches of a loader on other machines."""

    def filler(self, stream: RankStream, reading: Reading) -> Filler:
        """Returns what fills the buffers of a rank's batches."""

    def pinned(self, name: str, fingerprint: str) -> str | None:
        """Returns the name of the version with this fingerprint of a dataset of which no version is named, or None."""

    def close(self) -> None:
        """Closes the connections."""


type OpenDataset = tuple[VlmDataset, DatasetShards]
#: Opens a service: places, folder for manifests and indices, options, seconds to answer.
type OpenService = Callable[[Sequence[str], Path | None, Service, float], tuple[BatchService, list[OpenDataset]]]


@cache
def _services() -> Mapping[str, EntryPoint]:
    """Returns what opens services, by scheme: entry points, since the service is built on the loader."""
    return {each.name: each for each in entry_points(group="vlmdata.services")}


def is_served(place: str) -> bool:
    """Returns True for the address of a collation service."""
    return "://" in place and place.partition("://")[0].lower() in _services()


@dataclass(frozen=True, eq=False)
class OpenedData:
    """The datasets of a loader, where their shards are, and the service that makes the batches.

    ``service`` is None if this machine reads the shards.
    """

    datasets: tuple[VlmDataset, ...]
    shards: tuple[DatasetShards, ...]
    service: BatchService | None = None


def open_data(
    locations: Sequence[str | PathLike[str]],
    cache_dir: Path | None,
    cache_bytes: int,
    options: Service,
    timeout: float = _SECONDS_TO_OPEN,
) -> OpenedData:
    """Opens all data of a loader: folders and fsspec URLs, those in a mixture file, or datasets of a service.

    ``timeout`` is the seconds for such a service to answer.

    Raises:
        UsageError: If a service is mixed with other data.
        DatasetFormatError: If a dataset is missing or unfinished.
        ResourceError: If the cache cannot be written, or no server answers.
    """
    locations = expanded(locations)
    places = [place_of(location) for location in locations]
    schemes = [place.partition("://")[0].lower() if "://" in place else "" for place in places]
    served = [scheme in _services() for scheme in schemes]
    service: BatchService | None = None
    if any(served):
        if not all(served):
            other = places[served.index(False)]
            raise UsageError(f"{other}: cannot be mixed with a collation service; serve it, too (`vlmdata serve A B`)")
        open_service: OpenService = _services()[schemes[0]].load()
        service, opened = open_service(places, cache_dir, options, timeout)
    else:
        if unnamed := next((place for place in places if _PORT.search(place) and not Path(place).exists()), None):
            raise UsageError(f"{unnamed}: no such directory. A collation service is grpc://{unnamed}")
        opened = [open_for_loading(location, cache_dir, cache_bytes) for location in locations]
    return OpenedData(tuple(dataset for dataset, _ in opened), tuple(shards for _, shards in opened), service)


def require_for_tensors(config: LoaderConfig) -> None:
    """Refuses what data of the family ``processor`` cannot have, as a UsageError that names it: its pixels are tensors.

    Args:
        config: The options.
    """
    reading, layout = config.reading, config.parallelism
    sliced = layout.context_parallel_rank is not None or layout.vision_rank is not None
    if reading.pixels != "uint8":
        raise UsageError(
            f"pixels is {reading.pixels!r}, and the data has tensors of a processor: take batch.model_inputs(dtype)"
        )
    if sliced:
        raise UsageError(
            "context_parallel_rank and vision_rank divide images, and the data has tensors of a processor, which only "
            "the whole pack has. Omit them, or preprocess for a family (docs/families.md)"
        )


def require_one_tokenizer(datasets: Sequence[VlmDataset]) -> None:
    """Raises a ConfigMismatchError that names two datasets with different token ids or pixel formats."""
    first = datasets[0]
    for other in datasets[1:]:
        a, b = first.manifest.tokenizer, other.manifest.tokenizer
        if (a.fingerprint, a.pad, a.image) != (b.fingerprint, b.pad, b.image):
            raise ConfigMismatchError(
                f"datasets with different tokenizers cannot be mixed: {first.name} has {a.name} "
                f"({a.fingerprint[:16]}), {other.name} has {b.name} ({b.fingerprint[:16]}). "
                "Preprocess one of them again with the other's tokenizer."
            )
        if first.family != other.family:
            raise ConfigMismatchError(
                f"datasets of different model families cannot be mixed: {first.name} is for "
                f"{first.family.name}, {other.name} is for {other.family.name}. Preprocess one of them again with "
                "the other's --family."
            )
