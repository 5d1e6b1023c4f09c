"""Kinds of media files that rows name: how large they may be, and how the ledger calls what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

from vlmdata.reasons import Reason


@dataclass(frozen=True)
class FileKind:
    """A kind of files.

    Attributes:
        name: What the file should be, for messages.
        most_bytes: A larger file is not read or downloaded.
        patience: Multiple of an image's time for a download.
        most_ahead: Files that a worker fetches ahead, or holds until they are asked for, at a time.
        missing: Reason if there is no such file.
        path: Reason for a path that is not allowed.
        fetch: Reason for an address that is not allowed or not reachable.
        wrong: Reason if it is something else.
        too_large: Reason if it has more than ``most_bytes``.
        smaller: How to make it smaller, for messages.
    """

    name: str
    most_bytes: int
    patience: int
    most_ahead: int
    missing: Reason
    path: Reason
    fetch: Reason
    wrong: Reason
    too_large: Reason
    smaller: str


IMAGES = FileKind(
    name="image",
    most_bytes=256 * 1024**2,
    patience=1,
    most_ahead=64,
    missing=Reason.MISSING_IMAGE,
    path=Reason.IMAGE_PATH,
    fetch=Reason.IMAGE_FETCH,
    wrong=Reason.NOT_AN_IMAGE,
    too_large=Reason.IMAGE_TOO_LARGE,
    smaller="make it smaller",
)
#: A worker holds the videos of the row that it encodes in memory, so their size is bounded: an hour at 4.8 Mbit/s.
VIDEOS = FileKind(
    name="video",
    most_bytes=2 * 1024**3,
    patience=6,
    most_ahead=2,
    missing=Reason.MISSING_VIDEO,
    path=Reason.VIDEO_PATH,
    fetch=Reason.VIDEO_FETCH,
    wrong=Reason.NOT_A_VIDEO,
    too_large=Reason.VIDEO_TOO_LARGE,
    smaller="cut it into parts: ffmpeg -i a.mp4 -c copy -f segment -segment_time 600 part-%03d.mp4",
)
