"""Fetching images before they are asked for: some at a time, while the rows before them are at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from preprocess.sources.kinds import is_image

#: Images that a worker fetches at a time.
_THREADS = 16
#: Images that are fetched ahead, or wait to be asked for, at a time; others are fetched when they are asked for.
_MOST_IMAGES = 64
_MOST_CHARACTERS = 2048


class Ahead:
    """Fetches that were begun. One per worker; its methods are for one thread."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[str, Future[bytes]] = {}

    def begin(self, wanted: Mapping[str, Callable[[], bytes]]) -> list[str]:
        """Begins fetches; gives those that were not begun before, for :meth:`forget`.

        Args:
            wanted: What fetches each image, by its name.
        """
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        missing = [name for name in wanted if name not in self._begun][: _MOST_IMAGES - len(self._begun)]
        new = {name: self._threads.submit(wanted[name]) for name in missing}
        self._begun |= new
        return list(new)

    def get(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """An image, as it was fetched ahead, or fetched now."""
        begun = self._begun.get(name)
        return fetch() if begun is None else begun.result()

    def forget(self, names: Sequence[str]) -> None:
        """Drops images that are no longer needed."""
        for name in names:
            self._begun.pop(name).cancel()


def image_names(value: Any) -> list[str]:
    """Texts in a row that look like paths or URLs of images, in their order; at most so many."""
    found: dict[str, None] = {}
    for text in _texts(value):
        if len(text) <= _MOST_CHARACTERS and is_image(text.partition("?")[0]):
            found[text] = None
        if len(found) == _MOST_IMAGES:
            break
    return list(found)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if not isinstance(value.get("bytes"), bytes):  # a stored image needs no file
            for inner in value.values():
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
