"""Exceptions a user may meet. Every message names what, where, the numbers, and a remedy."""

from __future__ import annotations


class VlmdataError(Exception):
    """Base of all errors that are the data's, the machine's or the caller's, not a bug of vlmdata."""


class UsageError(VlmdataError, ValueError):
    """An option or argument is unknown, out of range, or does not go with another or with the data."""


class NotFoundError(UsageError, IndexError, KeyError):
    """A key or number names no sample, pack, step or row."""

    __str__ = Exception.__str__  # KeyError's would quote the message


class DatasetFormatError(VlmdataError):
    """A dataset directory, shard or index does not hold what the format demands."""


class ConfigMismatchError(VlmdataError):
    """Two configurations that must agree do not; the message lists the differences."""


class SourceError(VlmdataError):
    """A source of rows, a tokenizer or a recipe cannot be opened."""


class ResourceError(VlmdataError):
    """The machine ran out of space, permission or living worker processes; what was finished is kept."""
