"""WebDataset tars: neighbouring members with the same key, such as ``000017.jpg`` and ``000017.json``, are one row.

Columns come from the members' extensions (the part of the file name after its first dot):

- an image gives ``image``; several give ``images``, in natural order of their extensions (``0.jpg`` … ``10.jpg``);
- the object in ``json`` gives a column per key; ``NAME.json`` gives its parsed content as ``NAME``;
- text (``txt``, ``text``, ``caption``, ``cls``, ``md``, ``html``) gives a column by its extension;
- a video gives ``video`` and a sound ``audio``, so that recipes see them; any other member gives its bytes;
- ``__key__`` is the key.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import SourceError
from vlmdata.preprocess import json_text
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.sources.byte_files import ByteFile
from vlmdata.preprocess.sources.counting import Counted, places_of
from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.kinds import IMAGE_ENDINGS
from vlmdata.preprocess.sources.records import RecordFile
from vlmdata.reasons import Reason
from vlmdata.wording import counted

#: Ending of an index, appended to the full name of its tar.
INDEX_ENDING = ".idx"
_BLOCK_BYTES = 512
KEY_COLUMN = "__key__"
#: Bytes per request to a remote tar when only headers are read.
_HEADER_BYTES = 64 << 10
#: Splits names like WebDataset: folders belong to the key, as do files without a dot or with nothing before it.
_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")
_TEXT = ("txt", "text", "caption", "cls", "md", "html")
_MEDIA = {
    **dict.fromkeys(("mp4", "avi", "mov", "mkv", "webm", "m4v"), "video"),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg", "m4a", "opus"), "audio"),
}


@dataclass(frozen=True)
class TarIndex:
    """An index. Cheap to pickle: each process reads it once."""

    file: DataFile
    tar: DataFile

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 (samples + 1,): where samples begin, and the last ends; a SourceError if they cannot be the tar's."""
        return _read(self)[0]

    @property
    def digest(self) -> str:
        """Hash of the index."""
        return _read(self)[1]

    def require_sample(self, begins: int, ends: int) -> None:
        """Raises a SourceError unless a sample in the index has its first header and its end at these bytes."""
        offsets = self.offsets
        at = int(np.searchsorted(offsets, begins))
        if at + 1 >= len(offsets) or offsets[at] != begins:
            raise self.wrong(f"the tar has a sample at byte {begins}, which it does not name")
        if offsets[at + 1] != ends:
            raise self.wrong(
                f"after the sample at byte {begins}, the next one or the end is at byte {ends} of the tar, and "
                f"{offsets[at + 1]} in the index"
            )

    def wrong(self, problem: str) -> SourceError:
        """Returns the error for an index that does not describe its tar."""
        return SourceError(
            f"SOURCE {self.file.place}: it is not the index of {self.tar.place} ({self.tar.size} bytes): {problem}. "
            "Remove the index, or make it again with `energon prepare`."
        )


@lru_cache(maxsize=16)
def _read(index: TarIndex) -> tuple[npt.NDArray[np.int64], str]:
    with index.file.open(index.file.size, counting=True) as stream:
        data = stream.read()
    if len(data) % 8 or not data:
        raise index.wrong(f"{len(data)} bytes are no list of 64-bit numbers")
    offsets = np.frombuffer(data, "<u8").astype(np.int64)
    if (np.diff(offsets) <= 0).any() or (offsets % _BLOCK_BYTES).any() or not 0 <= offsets[0] <= offsets[-1]:
        raise index.wrong(f"its numbers are no ascending multiples of {_BLOCK_BYTES}")
    if offsets[-1] > index.tar.size:
        raise index.wrong(f"it ends at byte {offsets[-1]}")
    return offsets, xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class _Member:
    """A file in a tar: name, extension in lower case, place of its bytes, and time.

    Identities of sources contain a hash of the representation. So new fields have none.
    """

    name: str
    extension: str
    offset: int
    size: int
    is_link: bool
    time: float
    is_sparse: bool = field(default=False, repr=False)

    @property
    def suffix(self) -> str:
        """The last part of the extension."""
        return self.extension.rpartition(".")[2]


@dataclass(frozen=True)
class _Sample:
    key: str
    members: tuple[_Member, ...]


@dataclass(frozen=True)
class TarFile(RecordFile):
    """A tar of samples, and its index, if it has one."""

    name = "tar"
    endings = (".tar",)
    title = "WebDataset tar"
    index_ending = INDEX_ENDING

    index: TarIndex | None = None

    @classmethod
    def open(cls, file: ByteFile, index: DataFile | None = None) -> TarFile:
        """Returns the reader of a tar and its index."""
        return cls(file, None if index is None else TarIndex(index, file.file))

    @classmethod
    def count(cls, file: ByteFile, index: DataFile | None, block: int) -> Counted:
        """Counts the samples of a tar by its index, if there is one, else by its headers.

        Raises:
            SourceError: If the tar is damaged, members of a sample are not adjacent, or the index is of another tar.
        """
        tar, digest = cls.open(file, index), xxhash.xxh3_128()
        if tar.index is not None:
            tar._require_index(tar.index)
            count, places = places_of(tar.index.offsets[:-1].tolist(), block)
            return Counted(count, places, metadata=tar.index.digest)

        def offsets(stream: BinaryIO) -> Iterator[int]:
            for offset, sample in tar.records(stream):
                digest.update(repr(sample).encode())
                yield offset

        with file.open(0, _HEADER_BYTES, counting=True) as stream:
            count, places = places_of(offsets(stream), block)
        return Counted(count, places, metadata=digest.hexdigest())

    def _require_index(self, index: TarIndex) -> None:
        """Checks the first sample and the last in the index. The others are checked when they are read."""
        offsets = index.offsets
        with self.file.open(0, _HEADER_BYTES, counting=True) as stream:
            first = next(self.records(stream), None)
            if (first is None) != (len(offsets) == 1):
                raise index.wrong(f"it names {counted(len(offsets) - 1, 'sample')}, and the tar has none")
            if len(offsets) > 1:
                stream.seek(int(offsets[-2]))
                for _ in self.records(stream):
                    pass

    def records(self, stream: BinaryIO) -> Iterator[tuple[int, _Sample]]:
        """Yields the samples and the offsets of their first headers. Reads only headers.

        Raises:
            SourceError: If the tar is damaged, members of a sample are not adjacent, or the index is of another tar.
        """
        seen: set[str] = set()
        key, begins, members = "", 0, list[_Member]()
        for offset, member_key, member in self._members(stream):
            if members and (member is None or member_key != key):
                if self.index is not None:
                    self.index.require_sample(begins, offset)
                yield begins, _Sample(key, tuple(members))
                members = []
            if member is None:
                return
            if not members:
                key, begins = member_key, offset
                if key in seen:
                    raise SourceError(
                        f"SOURCE {self.file.path}: {member.name} is apart from the other members of sample {key}. "
                        "Members of a sample must follow each other; make the tar with `tar --sort=name`."
                    )
                seen.add(key)
            members.append(member)

    def _members(self, stream: BinaryIO) -> Iterator[tuple[int, str, _Member | None]]:
        """Yields offset, key and member of each file, and the end with None."""
        try:
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                while (info := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # otherwise all headers stay in memory
                    name = _NAME.fullmatch(info.name)
                    if name is not None and (info.isreg() or info.issym() or info.islnk()):
                        fields = info.offset_data, info.size, not info.isreg(), info.mtime, info.issparse()
                        yield info.offset, name[1], _Member(info.name, name[2].lower(), *fields)
                self._require_end(stream, tar.offset)
                yield tar.offset, "", None
        except (tarfile.TarError, ValueError) as error:  # a ValueError of numbers in the map of a sparse file
            raise self._damaged(error) from error

    def _damaged(self, problem: object) -> SourceError:
        suspect = "" if self.index is None else f", or the index {self.index.file.place} is of another tar"
        return SourceError(f"SOURCE {self.file.path}: the tar is damaged or cut off{suspect}: {problem}")

    def _require_end(self, stream: BinaryIO, offset: int) -> None:
        """Checks that the tar ends here. ``tarfile`` stops silently at a damaged header."""
        stream.seek(offset)
        end = stream.read(tarfile.BLOCKSIZE)
        if end != bytes(tarfile.BLOCKSIZE):
            found = "the file ends without an end mark" if not end else "there is no header"
            raise self._damaged(f"at byte {offset} {found}")
        while chunk := stream.read(1 << 20):
            if chunk.count(0) != len(chunk):
                raise SourceError(
                    f"SOURCE {self.file.path}: there is data after the end mark at byte {offset}. Tars that were "
                    "joined with `cat` are read only up to there; give them as separate files."
                )

    def values(self, record: _Sample, stream: BinaryIO) -> Mapping[str, Any]:
        """Returns the columns of a sample; MALFORMED_ROW if a member cannot be read, or two claim one column."""
        columns = _Columns(record.key)
        images = []
        for member in record.members:
            if member.is_link:
                raise _malformed(record.key, f"{member.name} is a link; make the tar with --dereference")
            if member.is_sparse:
                problem = f"{member.name} is stored as a sparse file; make the tar without --sparse (-S)"
                raise _malformed(record.key, problem)
            stream.seek(member.offset)
            data = stream.read(member.size)
            if f".{member.suffix}" in IMAGE_ENDINGS:
                images.append((member, data))
            else:
                columns.add_member(member, data)
        columns.add_images(images)
        return columns.values


class _Columns:
    """Columns of one sample, filled member by member."""

    def __init__(self, key: str):
        self._key = key
        self.values: dict[str, Any] = {KEY_COLUMN: key}

    def add_member(self, member: _Member, data: bytes) -> None:
        """Adds a member that is not an image."""
        name, _, suffix = member.extension.rpartition(".")
        if suffix == "json":
            content = self._json(member, data)
            if name or not isinstance(content, dict):
                self._set(name or "json", content, member)
            else:
                for column, value in content.items():
                    self._set(column, value, member)
        elif suffix in _TEXT:
            self._set(name or suffix, self._text(member, data), member)
        else:
            self._set(_MEDIA.get(suffix, member.extension), data, member)

    def add_images(self, images: Sequence[tuple[_Member, bytes]]) -> None:
        """Adds the images in the order of the file names in the JSON, else in natural order."""
        if not images:
            return
        named = [name for name in ("images", "image") if name in self.values]
        files = {member.name.rpartition("/")[2]: (member, data) for member, data in images}
        ordered = sorted(images, key=lambda image: _natural(image[0].extension))
        for column in named:
            names = self.values.pop(column)
            if names is None:
                continue
            names = names if isinstance(names, list) else [names]
            if not all(isinstance(name, str) for name in names) or len(names) != len(images):
                held = counted(len(images), "image file")
                raise _malformed(self._key, f"{column} in the JSON is {excerpt(names)}, and the sample has {held}")
            found = [files.get(name.rpartition("/")[2]) for name in names]
            if len(names) > 1 and (None in found or len(set(names)) != len(names)):
                raise _malformed(self._key, f"{column} in the JSON names {excerpt(names)}, not {', '.join(files)}")
            ordered = [image for image in found if image is not None] or ordered
        values = [{"bytes": data, "path": member.name} for member, data in ordered]
        self.values |= {"images": values} if len(values) > 1 else {"image": values[0]}

    def _set(self, column: str, value: Any, member: _Member) -> None:
        if column in self.values and self.values[column] != value:
            raise _malformed(self._key, f"{member.name} gives {column} a second value: {excerpt(value)}")
        self.values[column] = value

    def _json(self, member: _Member, data: bytes) -> Any:
        try:
            return json_text.loads(data)
        except (ValueError, RecursionError) as error:
            raise _malformed(self._key, f"{member.name} is not JSON: {error}") from error

    def _text(self, member: _Member, data: bytes) -> str:
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _malformed(self._key, f"{member.name} is not UTF-8: {error}") from error


def _malformed(key: str, problem: str) -> RowRejected:
    return RowRejected(Reason.MALFORMED_ROW, f"sample {key}: {problem}")


def _natural(extension: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders numbers in names by value: ``2.jpg`` before ``10.jpg``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", extension)]
