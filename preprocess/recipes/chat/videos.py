"""The videos of a row: named by content items, or taken in order from a column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vlmdata.preprocess.conversation import VideoPart, timestamps_fault
from vlmdata.preprocess.recipes.chat.column import ColumnKind, FileColumn
from vlmdata.preprocess.recipes.chat.images import BOUND_KEYS
from vlmdata.preprocess.recipes.chat.tools import json_or_text
from vlmdata.preprocess.recipes.file_kinds import VIDEOS
from vlmdata.preprocess.recipes.keys import KeyLog, filled
from vlmdata.preprocess.recipes.media import MediaLoader, place_with_file
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason

VIDEO_COLUMN = ColumnKind(
    noun="video",
    mark="<video>",
    columns=("videos", "video"),
    mismatch=Reason.VIDEO_COUNT_MISMATCH,
    sources=("video", "video_url", "url", "path"),
    foreign=("source", "file", "data", "bytes", "base64", "video_path"),
)
#: Keys of qwen_vl_utils with the requested frames and sizes, and the attributes of a :class:`VideoPart` they give.
_COUNTS: Mapping[str, str] = {
    "nframes": "num_frames",
    "min_frames": "min_frames",
    "max_frames": "max_frames",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "total_pixels": "total_pixels",
}
_SECONDS: Mapping[str, str] = {"video_start": "start", "video_end": "end"}
_RATES = ("fps", "sample_fps")
#: When each frame of a list is shown, as in molmo_utils. qwen_vl_utils has no such key.
_TIMES = "timestamps"
#: Keys that choose frames of a file, or of a list with timestamps. A list with a rate is used as it is.
_CHOOSING = ("nframes", "min_frames", "max_frames", *_SECONDS)
#: Keys of qwen_vl_utils that would resize to another size than transformers' processors.
_UNSUPPORTED = ("resized_height", "resized_width")
_OPTIONS = (*_RATES, _TIMES, *_COUNTS, *_SECONDS, *_UNSUPPORTED)
ITEM_KEYS = frozenset({"type", "index", *VIDEO_COLUMN.sources, *_OPTIONS})
_FILE_KEYS = frozenset({"url", "bytes", "path", "video", *_OPTIONS})
#: ``raw_fps`` is the rate of the file that frames were taken from; their times follow from ``sample_fps``.
HARMLESS = frozenset({"raw_fps"})


class RowVideos:
    """Loads the videos of one row, and checks that each has its place.

    Attributes:
        column: The column with videos, ``videos`` or ``video``.
    """

    def __init__(self, values: Mapping[str, Any], media: MediaLoader, keys: KeyLog):
        given = filled(values, VIDEO_COLUMN.columns)  # Arrow gives each row the columns of all
        self._files = FileColumn({name: values[name] for name in given}, VIDEO_COLUMN)
        self.column = self._files.name
        self._media = media
        self._keys = keys
        self._of_images = filled(values, BOUND_KEYS)

    @property
    def count(self) -> int:
        """Number of videos in the column."""
        return len(self._files.files)

    def from_item(self, item: Mapping[str, Any], where: str) -> VideoPart:
        """Returns the video of a content item: the one that it names, or the next of the column.

        Raises:
            RowRejected: For a video that does not load, or an item that contradicts itself.
        """
        key, options = self._files.named_by(item, where), {name: item[name] for name in _OPTIONS if name in item}
        if key is not None:
            return self._part(item[key], where, f"messages[].content[].{key}.", options)
        field, file = self._files.take(where, item.get("index"))
        return self._part(file, field, f"{self.column}[].", options)

    def take(self, where: str, index: Any = None, remedy: str = "") -> VideoPart:
        """Returns the next video of the column; see :meth:`FileColumn.take`.

        Raises:
            RowRejected: VIDEO_COUNT_MISMATCH if there is none.
        """
        field, file = self._files.take(where, index, remedy)
        return self._part(file, field, f"{self.column}[].", {})

    def take_unmarked(self) -> Iterator[VideoPart]:
        """Yields all videos of the column, if the row has no place for any."""
        if self._files.is_unmarked:
            yield from (self.take(self.column) for _ in self._files.files)

    def require_all_used(self, or_else: str = "") -> None:
        """Checks that every video of the column has its place. ``or_else`` is a remedy if none has.

        Raises:
            RowRejected: VIDEO_COUNT_MISMATCH.
        """
        self._files.require_all_used(or_else)

    def _part(self, file: Any, field: str, place: str, options: Mapping[str, Any]) -> VideoPart:
        """Loads a video, or the frames of one, with what its item and its file entry request.

        Args:
            file: What names the video.
            field: Its place in the row, for messages.
            place: The same without numbers, for the keys of a file entry (``{"path": …, "fps": …}``).
            options: What the item requests.
        """
        if self._of_images:
            key = self._of_images[0]
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{key} of the row is the size of its images, and {field} is a video; write {key} into its item",
            )
        if isinstance(file, Mapping):
            self._keys.note(file, _FILE_KEYS, HARMLESS, place)
            file = {key: value for key, value in file.items() if value is not None}
            options = {**{key: file[key] for key in _OPTIONS if key in file}, **options}
            file = file.get("video", file)
        # qwen_vl_utils' own example writes "sample_fps": "1".
        options = {key: json_or_text(value) for key, value in options.items() if value is not None}
        if isinstance(file, list | tuple):
            return self._of_frames(file, field, options)
        data = self._media.load(file, field, VIDEOS)
        if "sample_fps" in options:
            raise _refused(field, "sample_fps", options, "the rate of a list of frames; a file is sampled at fps")
        if _TIMES in options:
            raise _refused(field, _TIMES, options, "for a list of frames; a file has its own")
        return VideoPart(data, place_with_file(file, field), **_numbers(options, field))

    def _of_frames(self, files: Any, field: str, options: Mapping[str, Any]) -> VideoPart:
        """Loads the frames of a list, whose times are given by a rate or one by one."""
        if not files:
            raise RowRejected(Reason.EMPTY_VIDEO, f"{field}: a list of frames without any")
        times = _times(options, len(files), field)
        rate = None if times else _rate(options, field)
        given = _numbers({key: value for key, value in options.items() if times or key not in _RATES}, field)
        frames = tuple(self._media.load(each, f"{field}[{number}]") for number, each in enumerate(files))
        return VideoPart(frames, field, rate, timestamps=times, **given)


def _times(options: Mapping[str, Any], frames: int, where: str) -> tuple[float, ...] | None:
    """Returns when each frame of a list is shown, if the data tells it."""
    if _TIMES not in options:
        return None
    times = options[_TIMES]
    if not isinstance(times, list | tuple):
        raise _refused(where, _TIMES, options, "it must be a list of seconds, one per frame")
    if fault := timestamps_fault(times, frames):
        raise RowRejected(Reason.VIDEO_FRAMES, f"{where}.{_TIMES}{fault}")
    if "sample_fps" in options:
        raise _refused(where, "sample_fps", options, f"given with {_TIMES}; keep one of them")
    return tuple(float(time) for time in times)


def _rate(options: Mapping[str, Any], where: str) -> float:
    """Returns the rate of a list of frames without timestamps."""
    for key in _CHOOSING:
        if key in options:
            raise _refused(where, key, options, f"for files and lists with {_TIMES}; all frames of this list are used")
    rates = [key for key in _RATES if key in options]
    if not rates:
        raise RowRejected(
            Reason.VIDEO_FRAMES,
            f"{where}: a list of frames without their rate, so their times are unknown; write sample_fps or {_TIMES} "
            "beside it",
        )
    if options[rates[0]] != options[rates[-1]]:
        raise _refused(where, "sample_fps", options, f"not fps {excerpt(options['fps'])}; keep one of them")
    return _number(rates[0], options[rates[0]], where)


def _numbers(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the attributes of a :class:`VideoPart` that the data requests."""
    found: dict[str, Any] = {}
    if {"fps", "nframes"} <= options.keys():
        raise _refused(where, "nframes", options, "given with fps; keep one of them")
    for key, value in options.items():
        if key == _TIMES:
            continue
        if key in _UNSUPPORTED:
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{where}.{key} is {excerpt(value)}; a video is resized within min_pixels and max_pixels, as "
                "transformers' processors do. Give these",
            )
        if key in _COUNTS:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if type(value) is not int or value < 1:
                raise _refused(where, key, options, "it must be a positive whole number")
            found[_COUNTS[key]] = value
        else:
            found[_SECONDS.get(key, key)] = _number(key, value, where)
    return found


def _number(key: str, value: Any, where: str) -> float:
    least = key in _SECONDS  # 0 is a time, and no rate
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (value == 0 and not least):
        wanted = "a number of seconds from 0" if least else "a positive number of frames per second"
        raise _refused(where, key, {key: value}, f"it must be {wanted}")
    return float(value)


def _refused(where: str, key: str, options: Mapping[str, Any], why: str) -> RowRejected:
    value = options[key]
    shown = excerpt(repr(value) if isinstance(value, str) else value)
    return RowRejected(Reason.VIDEO_FRAMES, f"{where}.{key} is {shown}; {why}")
