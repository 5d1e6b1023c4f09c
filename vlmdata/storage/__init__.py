"""Where datasets lie: local folders and object stores behind one interface, the cache of remote shards, and reading."""

from vlmdata.format.writing import Writing
from vlmdata.storage.base import Lock, LockedError, Store
from vlmdata.storage.stores import open_store

__all__ = ["Lock", "LockedError", "Store", "Writing", "open_store"]
