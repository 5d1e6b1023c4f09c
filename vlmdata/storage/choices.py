"""What a reader of shards may choose."""

from __future__ import annotations

from typing import Literal

#: How stored data is checked: the stored bytes, the decoded pixels too, or nothing.
Verify = Literal["stored", "pixels", "off"]
#: How remote shards are fetched: whole, by ranges of bytes, or as fits the use.
Fetch = Literal["auto", "shards", "ranges"]
#: Size of the cache of remote shards, unless the user says otherwise.
DEFAULT_CACHE_BYTES = 100 * 1024**3
