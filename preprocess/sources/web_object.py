"""An object on a web server, read in ranges. Each response is compared with what the server said at the start.

Servers tell versions apart by ETag or by Last-Modified. Of a server that gives neither, the object is read once in one
response, and each later range is compared with the hashes of its blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import xxhash

from vlmdata.errors import SourceError

#: Last-Modified has seconds. A file that was changed just before may be changed again without a new time.
_SETTLED = timedelta(seconds=2)
_BLOCK_BYTES = 1 << 20
#: Largest number of hashes per object, which are sent to workers.
_MOST_BLOCKS = 1 << 16
_CHUNK = 1 << 18
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class Changed(Exception):
    """The object was replaced since it was opened."""


@dataclass(frozen=True)
class WebVersion:
    """Tells one version of an object from another."""

    etag: str | None = None  # ETag of its responses; None without
    #: Last-Modified of its responses; None without, or if it is too recent to tell versions apart.
    modified: str | None = None
    block_bytes: int = _BLOCK_BYTES  # size of a hashed block
    blocks: bytes = b""  # hash of each block, 8 bytes each; empty if ETag or Last-Modified suffice
    content: str | None = None  # xxh3-128 of all bytes, if they were read


def look_up(files: Any, url: str, size: int) -> WebVersion:
    """Asks a server for the version of an object; a SourceError if it does not answer range requests."""
    if not size:
        return WebVersion()
    _, headers = _run(files, _get, url, 0, 1, size)
    found = WebVersion(headers.get("ETag"), _settled(headers))
    strong = found.etag is not None and not found.etag.startswith("W/")
    if strong or found.modified:
        return found
    hashed: WebVersion = _run(files, _hashed, url, size)
    return hashed


def read_range(files: Any, url: str, size: int, version: WebVersion, start: int, stop: int) -> bytes:
    """Returns bytes ``start`` to ``stop`` of an object; Changed if they are those of another version."""
    if not version.blocks:
        data, headers = _run(files, _get, url, start, stop, size)
        for name, known in (("ETag", version.etag), ("Last-Modified", version.modified)):
            if known is not None and headers.get(name) != known:
                raise Changed(f"{name} is {headers.get(name)}; it was {known}")
        return bytes(data)
    step = version.block_bytes
    first, last = start // step, -(-stop // step)
    begins, ends = first * step, min(last * step, size)
    data, _ = _run(files, _get, url, begins, ends, size)
    if len(data) != ends - begins:
        raise ConnectionError(f"received {len(data)} of {ends - begins} bytes")
    for block in range(first, last):
        content = data[(block - first) * step : (block - first + 1) * step]
        if xxhash.xxh3_64_digest(content) != version.blocks[8 * block : 8 * block + 8]:
            raise Changed(f"bytes {block * step} to {block * step + len(content) - 1} are others than before")
    return bytes(data[start - begins : stop - begins])


def _run(files: Any, request: Any, *arguments: Any) -> Any:
    """Runs a coroutine function in the thread of the file system."""
    from fsspec.asyn import sync

    return sync(files.loop, request, files, *arguments)


async def _get(files: Any, url: str, start: int, stop: int, size: int) -> tuple[bytes, Mapping[str, str]]:
    """Makes a range request. Returns the bytes and the headers of the response."""
    wanted = {"Range": f"bytes={start}-{stop - 1}"}
    async with await _request(files, url, wanted) as response:
        if response.status == 416:
            raise Changed(f"it has no bytes {start} to {stop - 1}; it had {size} bytes")
        _require_found(response, url)
        place = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
        if response.status != 206 or place is None or int(place[1]) != start:
            if response.headers.get("Content-Length") != str(stop) or start:
                raise SourceError(f"SOURCE {url}: the server does not answer range requests; download the file")
        elif place[2] not in ("*", str(size)):
            raise Changed(f"it has {place[2]} bytes; it had {size}")
        return await response.read(), response.headers


async def _hashed(files: Any, url: str, size: int) -> WebVersion:
    """Reads an object in one response."""
    from aiohttp import ClientTimeout

    step = _BLOCK_BYTES * max(1, -(-size // (_BLOCK_BYTES * _MOST_BLOCKS)))
    digest, blocks, block, received = xxhash.xxh3_128(), bytearray(), bytearray(), 0
    async with await _request(files, url, {}, timeout=ClientTimeout(total=None, sock_read=60)) as response:
        _require_found(response, url)
        async for chunk in response.content.iter_chunked(_CHUNK):
            digest.update(chunk)
            block += chunk
            received += len(chunk)
            while len(block) >= step:
                blocks += xxhash.xxh3_64_digest(bytes(block[:step]))
                del block[:step]
    if received != size:
        raise ConnectionError(f"received {received} of {size} bytes")
    if block:
        blocks += xxhash.xxh3_64_digest(bytes(block))
    return WebVersion(None, None, step, bytes(blocks), digest.hexdigest())


async def _request(files: Any, url: str, headers: Mapping[str, str], **options: Any) -> Any:
    """Begins a request with the session and the options of the file system."""
    session = await files.set_session()
    options = {**files.kwargs, **options}
    # Ranges are of the stored bytes.
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity", **headers}
    return await session.get(files.encode_url(url), headers=headers, **options)


def _require_found(response: Any, url: str) -> None:
    if response.status == 404:
        raise FileNotFoundError(url)
    response.raise_for_status()


def _settled(headers: Mapping[str, str]) -> str | None:
    """Returns Last-Modified if the object was last changed a while before the response."""
    text = headers.get("Last-Modified")
    try:
        modified = parsedate_to_datetime(text or "")
        now = parsedate_to_datetime(headers["Date"]) if "Date" in headers else datetime.now(UTC)
        return text if now - modified >= _SETTLED else None
    except (ValueError, TypeError):  # no date, or one without a time zone
        return None
