"""What clients and servers of the collation service exchange.

A query is the ticket of an Arrow Flight ``DoGet`` call, as JSON. The answer to a batch query is the batch's buffer (see
:class:`vlmdata.loader.request.pack_request.BatchArrays`) as record batches with one uint8 column, in order. The
application metadata of the first one is a :class:`Header`, of the last one its xxh3-64. If the header says
that the batch is in shared memory, there is only one record batch, with the pieces that are not there; the client then
cancels the call. The answer to a file query is the file's bytes in the same form, without metadata.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

from vlmdata import errors
from vlmdata.context_parallel import Slice
from vlmdata.errors import UsageError, VlmdataError
from vlmdata.loader.config import PARTS, BatchPart, OnDamage, Pixels
from vlmdata.loader.state import Position
from vlmdata.packing.config import PlanConfig, config_differences
from vlmdata.service.shared_memory import SharedPack

#: Version of the protocol. Client and server must have the same.
PROTOCOL = 3
#: Longest query, in bytes: it names the settings of a run before each of its changes.
MAX_QUERY_BYTES = 1 << 20
#: Flight actions.
DESCRIBE, STATUS, HEALTH = "describe", "status", "health"

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_MAX_DATASETS = 1024
_MAX_RANKS = 1 << 20
_MAX_NUMBER = 1 << 40
#: Changes of settings in a run. Each takes the time of one more plan.
MAX_STAGES = 1024


@dataclass(frozen=True)
class ServedDataset:
    """A dataset of a service: its name there, and the fingerprint of its manifest."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Description:
    """What a server says of itself: its protocol, the version of its package, and its datasets, in order.

    ``others`` are names of versions, such as ``cord@1``, also of those among the datasets.
    """

    protocol: int
    vlmdata: str
    datasets: tuple[ServedDataset, ...]
    others: tuple[ServedDataset, ...] = ()

    def encode(self) -> bytes:
        """Returns the JSON form."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads the JSON form, or raises a UsageError if this is not a description."""
        try:
            values = json.loads(data)
            datasets, others = (
                tuple(ServedDataset(str(each["name"]), str(each["fingerprint"])) for each in listed)
                for listed in (values["datasets"], values.get("others", ()))
            )
            return cls(int(values["protocol"]), str(values["vlmdata"]), datasets, others)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UsageError(f"this is not a vlmdata service ({error!r})") from error


@dataclass(frozen=True)
class FileQuery:
    """Asks for a small file of a dataset, such as its index, by the dataset's fingerprint."""

    dataset: str
    name: str

    def encode(self) -> bytes:
        """Returns the ticket."""
        return json.dumps({"protocol": PROTOCOL, "file": dataclasses.asdict(self)}).encode()


@dataclass(frozen=True)
class BatchQuery:
    """Asks for a batch. It is complete: a server needs to know nothing of earlier queries.

    Datasets are named by fingerprint, in order. ``place`` is where the client runs, if it can read a server's memory
    there (:func:`vlmdata.service.shared_memory.this_place`); "" if it wants the bytes.
    """

    datasets: tuple[str, ...]
    plan: PlanConfig
    position: Position
    dp_rank: int
    dp_size: int
    context_parallel: Slice | None
    parts: frozenset[BatchPart]
    pixels: Pixels
    on_damage: OnDamage
    place: str = ""

    def encode(self) -> bytes:
        """Returns the ticket."""
        values = {
            "datasets": list(self.datasets),
            "plan": self.plan.to_dict(),
            "position": dataclasses.astuple(self.position),
            "dp": [self.dp_rank, self.dp_size],
            "slice": self.context_parallel and [self.context_parallel.rank, self.context_parallel.size],
            "parts": sorted(self.parts),
            "pixels": self.pixels,
            "on_damage": self.on_damage,
            "place": self.place,
        }
        return json.dumps({"protocol": PROTOCOL, "batch": values}, separators=(",", ":")).encode()

    def at(self, position: Position) -> BatchQuery:
        """Returns the query for another position."""
        return dataclasses.replace(self, position=position)

    def to(self, place: str) -> BatchQuery:
        """Returns the query of a client that runs at a place."""
        return dataclasses.replace(self, place=place)


def decode_query(ticket: bytes) -> BatchQuery | FileQuery:
    """Reads a ticket from an untrusted client.

    Raises:
        UsageError: If it is no query. The message names the field.
        ConfigMismatchError: If client and server make different plans from the same settings.
    """
    if len(ticket) > MAX_QUERY_BYTES:
        raise UsageError(f"the query has {len(ticket)} bytes, more than {MAX_QUERY_BYTES}")
    try:
        values = json.loads(ticket)
    except (ValueError, RecursionError):
        raise UsageError("the query is not JSON") from None
    fields = _Fields(values, "query")
    if (protocol := fields.get("protocol")) != PROTOCOL:
        raise errors.ConfigMismatchError(
            f"the client speaks protocol {protocol!r}, the server {PROTOCOL}: install the same version of vlmdata"
        )
    if "file" in values:
        wanted = fields.child("file")
        return FileQuery(wanted.fingerprint("dataset"), wanted.text("name"))
    return _batch_query(fields.child("batch"))


def _batch_query(fields: _Fields) -> BatchQuery:
    fingerprints = fields.items("datasets", _MAX_DATASETS)
    epoch, step, micro_batch = fields.numbers("position", 3)
    dp_rank, dp_size = fields.numbers("dp", 2)
    context_parallel = None
    if fields.get("slice") is not None:
        rank, size = fields.numbers("slice", 2)
        if not rank < size <= _MAX_RANKS:
            raise UsageError(f"slice: rank {rank} of {size}")
        context_parallel = Slice(rank, size)
    if not dp_rank < dp_size <= _MAX_RANKS:
        raise UsageError(f"dp: rank {dp_rank} of {dp_size}")
    if unknown := [part for part in fields.items("parts", len(PARTS)) if part not in PARTS]:
        raise UsageError(f"parts: {unknown[0]!r}")
    if (on_damage := fields.get("on_damage")) not in get_args(OnDamage):
        raise UsageError(f"on_damage: {on_damage!r}")
    if (pixels := fields.get("pixels")) not in get_args(Pixels):
        raise UsageError(f"pixels: {pixels!r}")
    if not isinstance(place := fields.get("place") or "", str):
        raise UsageError("place: not a text")
    for fingerprint in fingerprints:
        _Fields({"datasets": fingerprint}, "query").fingerprint("datasets")
    if not fingerprints or len(set(fingerprints)) < len(fingerprints):
        raise UsageError("datasets: none, or one of them twice")
    return BatchQuery(
        datasets=tuple(fingerprints),
        plan=_plan_config(fields.child("plan").values),
        position=Position(epoch, step, micro_batch),
        dp_rank=dp_rank,
        dp_size=dp_size,
        context_parallel=context_parallel,
        parts=frozenset(fields.items("parts", len(PARTS))),
        pixels=pixels,
        on_damage=on_damage,
        place=place,
    )


def _plan_config(values: Mapping[str, Any]) -> PlanConfig:
    """Builds the settings again, and checks that they are the client's, algorithm versions included."""
    try:
        for name in ("balance", "pad_to_capacity"):
            if type(values.get(name)) is not bool:
                raise UsageError(f"plan.{name}: not true or false")
        config = PlanConfig.from_dict(values)
        if len(config.earlier) > MAX_STAGES:
            raise UsageError(f"plan.earlier: {len(config.earlier)} earlier settings; servers allow {MAX_STAGES}")
        if config.schedule:
            raise UsageError("plan.schedule: a client asks for settled plans")
        hash(config)  # lists where numbers belong
        differences = config_differences(dict(values), config)
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"plan: {error}") from error
    if differences:
        raise errors.ConfigMismatchError(
            "client and server make different plans (client -> server): "
            f"{'; '.join(differences)}. Install the same version of vlmdata on both."
        )
    return config


class _Fields:
    """Fields of a JSON object from outside; a wrong one is an error that names it."""

    def __init__(self, values: Any, name: str):
        if not isinstance(values, dict):
            raise UsageError(f"{name}: not an object")
        self.values: dict[str, Any] = values

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def child(self, name: str) -> _Fields:
        return _Fields(self.values.get(name), name)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise UsageError(f"{name}: not a text")
        return value

    def fingerprint(self, name: str) -> str:
        value = self.text(name)
        if not _FINGERPRINT.fullmatch(value):
            raise UsageError(f"{name}: not a fingerprint")
        return value

    def items(self, name: str, most: int) -> list[Any]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise UsageError(f"{name}: not a list of at most {most}")
        return value

    def numbers(self, name: str, count: int) -> list[int]:
        value = self.items(name, count)
        if len(value) != count or not all(type(each) is int and 0 <= each < _MAX_NUMBER for each in value):
            raise UsageError(f"{name}: not {count} numbers from 0 to {_MAX_NUMBER - 1}")
        return value


@dataclass(frozen=True)
class Header:
    """Metadata of the first record batch of an answer: bytes of the buffer, and what is wrong with masked samples.

    ``shared`` is the batch's place in shared memory; None if the bytes follow.
    """

    size: int
    damaged: Mapping[int, str]
    shared: SharedPack | None = None

    def encode(self) -> bytes:
        """Returns the JSON form."""
        shared = None if self.shared is None else dataclasses.asdict(self.shared)
        return json.dumps({"bytes": self.size, "damaged": list(self.damaged.items()), "shared": shared}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads the JSON form."""
        values = json.loads(data)
        shared = values.get("shared")
        return cls(
            int(values["bytes"]),
            {int(number): str(text) for number, text in values["damaged"]},
            None if shared is None else SharedPack.from_dict(shared),
        )


def encode_trailer(checksum: int) -> bytes:
    """Returns the metadata of the last record batch of an answer, with xxh3-64 of the buffer."""
    return json.dumps({"xxh3": checksum}).encode()


def decode_trailer(data: bytes) -> int:
    """Returns the checksum in the result of :func:`encode_trailer`."""
    return int(json.loads(data)["xxh3"])


def encode_error(error: VlmdataError) -> bytes:
    """Returns an error in the form in which it travels."""
    return json.dumps({"type": type(error).__name__, "message": str(error)}).encode()


def decode_error(data: bytes, server: str) -> VlmdataError:
    """Returns the error of a server from the result of :func:`encode_error`."""
    try:
        values = json.loads(data)
        kind, message = getattr(errors, str(values["type"]), None), str(values["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        kind, message = None, repr(data[:200])
    if not (isinstance(kind, type) and issubclass(kind, VlmdataError)):
        kind = errors.ResourceError
    return kind(f"server {server}: {message}")
