"""The destination of a dataset's files: a local folder or an object store, with one interface."""

from vlmdata.storage.base import Lock, LockedError, Store, Writing
from vlmdata.storage.stores import open_store

__all__ = ["Lock", "LockedError", "Store", "Writing", "open_store"]
