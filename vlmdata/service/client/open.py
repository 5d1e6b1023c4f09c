"""Opens the datasets of a collation service: their manifests and indices, which a loader needs for its plans."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.manifest import ShardInfo
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.loader.config import Service
from vlmdata.service.address import Server, ServiceAddress, parse_address
from vlmdata.service.client.connection import Connection
from vlmdata.service.client.filler import CollationService
from vlmdata.service.client.servers import Servers
from vlmdata.service.protocol import Description, FileQuery, ServedDataset
from vlmdata.storage.cache import cache_folder
from vlmdata.storage.open import fetch_tables
from vlmdata.storage.shards import DatasetShards

#: Seconds for an index, however long others may take: 96 bytes a sample. A server that is gone is noticed before.
_SECONDS_FOR_AN_INDEX = 600.0
_LEAST_FINGERPRINT = 8


@dataclass(frozen=True)
class ServedShards:
    """Shards that only the servers can read."""

    service: str

    def local_path(self, shard: ShardInfo) -> Path:
        """Returns the shard's name; it has no place on this machine."""
        return Path(shard.name)

    def open(self, shard: ShardInfo) -> int:
        """Raises a UsageError."""
        raise UsageError(
            f"{self.service}: {shard.name} is at the service, which gives batches only. Name the dataset's folder or "
            "URL to read samples."
        )

    def open_sound(self, shard: ShardInfo) -> None:
        """Returns None: no shard is opened here."""


def open_service(
    places: Sequence[str], cache_dir: Path | None, options: Service, timeout: float
) -> tuple[CollationService, list[tuple[VlmDataset, DatasetShards]]]:
    """Connects to a service and opens its datasets.

    Manifests and indices are kept in ``cache_dir`` by content. ``timeout`` is the seconds to answer each of the
    questions: what it has, a manifest, an index.

    Raises:
        UsageError: If an address is malformed, the service has no such dataset, refuses the token, or has a wrong
            certificate, or the addresses are of several services.
        ConfigMismatchError: If servers have different data.
        ResourceError: If no server answers.
        DatasetFormatError: If a file does not match its fingerprint.
    """
    addresses = [parse_address(place) for place in places]
    first = addresses[0]
    if other := next((each for each in addresses if (each.tls, each.hosts) != (first.tls, first.hosts)), None):
        raise UsageError(f"{first.text} and {other.text} are different services; a loader reads from one")
    servers = Servers(first, options)
    opened = []
    described = servers.describe(timeout)
    for served in _agreed(addresses, described):
        name = f"{first.base}/{served.name}"
        directory = fetch_tables(name, cache_folder(cache_dir), partial(_fetch, servers, served, timeout))
        shards = ServedShards(name)
        dataset = VlmDataset(directory, name=name, open_shard=shards.open)
        if dataset.manifest.fingerprint != served.fingerprint:
            raise DatasetFormatError(
                f"{name}: its manifest has fingerprint {dataset.manifest.fingerprint[:16]}, the service says "
                f"{served.fingerprint[:16]}. Was the dataset replaced while it is served? Restart the service."
            )
        opened.append((dataset, DatasetShards.of(name, dataset.manifest, shards)))
    others = {each for description in described.values() for each in description.others}
    return CollationService(servers, {f"{first.base}/{each.name}": each.fingerprint for each in others}), opened


def _agreed(addresses: Sequence[ServiceAddress], found: Mapping[Server, Description]) -> list[ServedDataset]:
    """Returns the datasets of some addresses, if all servers have the same under these names."""
    chosen = {
        server: [each for address in addresses for each in _chosen(address, description)]
        for server, description in found.items()
    }
    first, *others = chosen
    for other in others:
        if chosen[other] != chosen[first]:
            listed = [
                f"server {server}: " + ", ".join(f"{each.name} {each.fingerprint[:16]}" for each in chosen[server])
                for server in (first, other)
            ]
            raise ConfigMismatchError(f"{addresses[0].text}: servers have different data. {'; '.join(listed)}")
    return chosen[first]


def _chosen(address: ServiceAddress, description: Description) -> list[ServedDataset]:
    wanted, datasets = address.dataset, (*description.datasets, *description.others)
    if not wanted:
        return list(description.datasets)
    found = [each for each in datasets if each.name == wanted]
    if not found and len(wanted) >= _LEAST_FINGERPRINT:  # the names of versions are later, and say more
        matching = {each.fingerprint: each for each in datasets if each.fingerprint.startswith(wanted)}
        found = list(matching.values())
    if len(found) != 1:
        names = ", ".join(f"{each.name} ({each.fingerprint[:_LEAST_FINGERPRINT]})" for each in datasets)
        raise UsageError(
            f"{address.text}: {'no dataset' if not found else 'several datasets'} {wanted!r}; the service has: {names}"
        )
    return found


def _fetch(servers: Servers, served: ServedDataset, timeout: float, name: str, to: Path, sha256: str | None) -> None:
    query = FileQuery(served.fingerprint, name)

    def copy(connection: Connection, seconds: float) -> None:
        digest = hashlib.sha256()
        with open(to, "wb") as target:
            for chunk in connection.file(query, seconds if name == MANIFEST_NAME else _SECONDS_FOR_AN_INDEX):
                digest.update(chunk)
                target.write(chunk)
        if sha256 not in (None, digest.hexdigest()):
            raise DatasetFormatError(
                f"server {connection.server}: {name} of {served.name} has sha256 {digest.hexdigest()}, but the "
                f"manifest says {sha256}"
            )

    servers.ask(copy, timeout)
