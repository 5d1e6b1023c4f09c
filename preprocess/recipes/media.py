"""Getting an image file's bytes out of whatever a row holds: bytes, a data URI, a path, or (if allowed) a URL."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from preprocess import image_files
from preprocess.reject import RowRejected, excerpt
from vlmdata.errors import SourceError
from vlmdata.format.ledger import Reason

#: A file larger than this is not read or downloaded.
MAX_FILE_BYTES = 256 * 1024 * 1024
_TIMEOUT_SECONDS = (10, 60)  # to connect, and between two packets
_ATTEMPTS = 3


def require_image_root(image_root: str | None) -> None:
    """Checks that the folder the user named is there, before work is paid for.

    Raises:
        SourceError: If it is not.
    """
    if image_root is not None and not Path(image_root).is_dir():
        found = "is not a folder" if Path(image_root).exists() else "does not exist"
        raise SourceError(
            f"--image-root {image_root}: it {found}; name the folder that image paths in the data begin at"
        )


class MediaLoader:
    """Loads image files named by data, within limits.

    What it says of them names no place on this machine: the ledger is the same for every copy of a source.

    Args:
        image_root: Folder that paths are relative to and may not leave; None allows no paths.
        allow_urls: Whether http(s) URLs are fetched.
    """

    def __init__(self, image_root: str | None, allow_urls: bool):
        self._root = Path(image_root).resolve() if image_root is not None else None
        self._allow_urls = allow_urls

    def load(self, value: Any, field: str) -> bytes:
        """The file's bytes.

        Args:
            value: bytes, a ``{"bytes", "path"}`` mapping as ``datasets`` stores images, or a string: a data URI, a
                path, a ``file://`` URL, or an http(s) URL.
            field: Where it stands in the row, for messages.

        Raises:
            RowRejected: MISSING_IMAGE, IMAGE_PATH, IMAGE_FETCH or NOT_AN_IMAGE.
        """
        if isinstance(value, Mapping):
            if value.get("bytes") is not None:
                value = value["bytes"]
            else:
                value = value.get("path") or value.get("url")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value.strip():
            raise RowRejected(Reason.MISSING_IMAGE, f"{field}: no image here: {excerpt(value)}")
        if value.startswith("data:"):
            return _data_uri(value, field)
        if value.startswith(("http://", "https://")):
            return self._fetch(value, field)
        if value.startswith("file://"):
            value = unquote(value.removeprefix("file://"))
        return self._read(value, field)

    def _read(self, path: str, field: str) -> bytes:
        shown = excerpt(path)
        if self._root is None:
            raise RowRejected(Reason.IMAGE_PATH, f"{field}: {shown} is a path; say with --image-root where paths begin")
        try:
            # Symbolic links are followed first: neither `..` nor a link may lead out of the root.
            full = (self._root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            image_files.record(self._root, path, None, None, None)
            raise RowRejected(
                Reason.MISSING_IMAGE, f"{field}: no file {shown} below the image root: {type(error).__name__}"
            ) from error
        if not full.is_relative_to(self._root):
            raise RowRejected(Reason.IMAGE_PATH, f"{field}: {shown} leads out of the image root")
        size, data = None, None
        try:
            if not full.is_file():
                raise RowRejected(Reason.MISSING_IMAGE, f"{field}: {shown} is not a regular file")
            if (size := os.path.getsize(full)) > MAX_FILE_BYTES:
                raise RowRejected(Reason.IMAGE_TOO_LARGE, f"{field}: {shown} has {size} bytes, over {MAX_FILE_BYTES}")
            data = full.read_bytes()
            size = len(data)
            return data
        except OSError as error:
            raise RowRejected(Reason.MISSING_IMAGE, f"{field}: cannot read {shown}: {error.strerror}") from error
        finally:
            image_files.record(self._root, path, full, size, data)

    def _fetch(self, url: str, field: str) -> bytes:
        if not self._allow_urls:
            raise RowRejected(Reason.IMAGE_FETCH, f"{field}: {excerpt(url)} is a URL; --allow-urls fetches such images")
        import requests

        problem: object = None
        for _ in range(_ATTEMPTS):
            try:
                with requests.get(url, stream=True, timeout=_TIMEOUT_SECONDS) as response:
                    if 400 <= response.status_code < 500:
                        raise RowRejected(
                            Reason.IMAGE_FETCH, f"{field}: {excerpt(url)}: HTTP status {response.status_code}"
                        )
                    response.raise_for_status()
                    return _limited(response.iter_content(1 << 20), url, field)
            except (requests.RequestException, ValueError) as error:
                problem = error
        raise RowRejected(
            Reason.IMAGE_FETCH,
            f"{field}: {excerpt(url)}: {_ATTEMPTS} attempts failed, the last with: {problem}",
        )


def _limited(chunks: Any, url: str, field: str) -> bytes:
    received = bytearray()
    for chunk in chunks:
        received += chunk
        if len(received) > MAX_FILE_BYTES:
            raise RowRejected(Reason.IMAGE_TOO_LARGE, f"{field}: {excerpt(url)} gives more than {MAX_FILE_BYTES} bytes")
    return bytes(received)


def _data_uri(uri: str, field: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RowRejected(Reason.NOT_AN_IMAGE, f"{field}: a data URI without ;base64: {excerpt(uri)}")
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowRejected(Reason.NOT_AN_IMAGE, f"{field}: {excerpt(uri)}: not base64: {error}") from error
