"""The error for stored bytes that do not have their checksum."""

from __future__ import annotations

from collections.abc import Buffer

import xxhash

from vlmdata.errors import ChangedDataError


def changed_data(what: str, data: Buffer, checksum: int) -> ChangedDataError:
    """Returns the error for bytes that changed after preprocessing.

    Args:
        what: Shard, row, key and field.
        data: The bytes.
        checksum: Their xxh3-64 in the index.
    """
    return ChangedDataError(
        f"{what}: the data changed after preprocessing: xxh3 is {xxhash.xxh3_64_intdigest(data):016x}, expected "
        f"{checksum:016x}. Run `vlmdata verify` on the dataset to see how to repair it."
    )
