"""An object that is sent in parts while it is written, and the errors of object stores in words."""

from __future__ import annotations

from collections.abc import Buffer, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import xxhash

from vlmdata.errors import ResourceError
from vlmdata.format.writing import Writing

#: Bytes of a part. S3 takes 10,000 parts, so 160 GB a shard; a writer holds up to four of them.
PART_BYTES = 16 * 1024 * 1024


class Upload(Writing):
    """An object that is being written: ``url`` in messages, ``path`` in an fsspec system that sends parts."""

    def __init__(self, files: Any, path: str, url: str):
        self._file = files.open(path, "wb", block_size=PART_BYTES)
        self._url = url
        self._part = bytearray()
        self._position = 0
        self._hash = xxhash.xxh3_128()
        self._completed = False
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="vlmdata-upload")
        self._sending: Future[Any] | None = None

    def write(self, data: Buffer) -> int:
        """Appends bytes; a full part is sent in the background, one at a time."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        at = 0
        while at < view.nbytes:
            piece = view[at : at + PART_BYTES - len(self._part)]
            self._part += piece
            at += piece.nbytes
            if len(self._part) == PART_BYTES:
                self._sent()
                self._sending = self._sender.submit(self._file.write, self._part)
                self._part = bytearray()
        self._position += at
        return at

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def is_stored_in(self, chunks: Iterable[bytes]) -> bool:
        """Returns whether these are the bytes written so far."""
        found = xxhash.xxh3_128()
        for chunk in chunks:
            found.update(chunk)
        return bool(found.digest() == self._hash.digest())

    def finish(self) -> None:
        """Waits for the current part and passes on the rest, which completing the upload sends."""
        self._sent()
        if self._part:
            with told(self._url, "written"):
                self._file.write(self._part)
            self._part = bytearray()

    def complete(self) -> None:
        """Makes the object appear."""
        self.finish()
        with told(self._url, "written"):
            self._file.close()
        self._completed = True

    def abandon(self) -> None:
        """Aborts the upload, which leaves no object, unless it is completed."""
        self._sender.shutdown(wait=True, cancel_futures=True)
        if not self._completed:
            with suppress(Exception):  # the store may be unreachable
                self._file.discard()
            self._file.closed = True  # otherwise the garbage collector would complete it

    def _sent(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            with told(self._url, "written"):
                sending.result()


@contextmanager
def told(url: str, what: str) -> Iterator[None]:
    """Converts any exception of a store's library to an error with the URL and the remedy.

    FileNotFoundError is kept, except for writes, where it means that the bucket is missing.
    """
    try:
        yield
    except ResourceError:
        raise
    except FileNotFoundError as error:
        if what != "written":
            raise FileNotFoundError(url) from error
        bucket = "/".join(url.split("/")[:3])
        raise ResourceError(
            f"{url}: cannot be {what}: {_cause(error)}. Is there a bucket {bucket}? Create it, or give another one."
        ) from error
    except Exception as error:  # each store's library raises its own types
        if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            remedy = "Give credentials that may list, read, write and delete there (docs/object-storage.md)"
        else:
            remedy = "Finished work is kept; run the same command again when the store can be reached"
        raise ResourceError(f"{url}: cannot be {what}: {_cause(error)}. {remedy}.") from error


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
