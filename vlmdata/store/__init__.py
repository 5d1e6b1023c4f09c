"""The destination of a dataset's files: a local folder or an object store, with one interface."""

from vlmdata.store.base import Lock, LockedError, Store, Writing
from vlmdata.store.open import open_store

__all__ = ["Lock", "LockedError", "Store", "Writing", "open_store"]
