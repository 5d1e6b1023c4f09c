"""Exceptions for users. Each message names the problem, its place, the values and a remedy."""

from __future__ import annotations

from collections.abc import Iterator


class VlmdataError(Exception):
    """Base of all errors caused by the data, the machine or the caller, as opposed to bugs in vlmdata."""


class UsageError(VlmdataError, ValueError):
    """An option or argument is unknown, out of range, or incompatible with another one or with the data."""


class NotFoundError(UsageError, IndexError, KeyError):
    """A key or number does not match any sample, pack, step or row."""

    __str__ = Exception.__str__  # KeyError's would quote the message


class DatasetFormatError(VlmdataError):
    """A dataset directory, shard or index violates the format."""


class ChangedDataError(DatasetFormatError):
    """Stored bytes of a sample do not have their checksum."""


class ConfigMismatchError(VlmdataError):
    """Two configurations that must agree differ; the message lists the differences."""


class SourceError(VlmdataError):
    """A source of rows, a tokenizer or a recipe cannot be opened."""


class ResourceError(VlmdataError):
    """The machine lacks space, permissions or live worker processes. Finished work is kept."""


class UnreadableDataError(ResourceError):
    """Stored bytes of a sample cannot be read: a bad sector, or a network file system that fails."""


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then what it was raised from or while handling, down to the first one."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
