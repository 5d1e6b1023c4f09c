"""Parts of a run, and the locks of a store for one whole run or for any number of different parts.

A whole run locks the store and then checks for parts. A part takes a lock of its own and then checks for a whole run.
So if two begin at the same moment, at least one detects the other, and parts run side by side.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby

from vlmdata.errors import ResourceError, UsageError
from vlmdata.format.schema import PROGRESS_DIR
from vlmdata.preprocess.run.directory import LOCK_FILE
from vlmdata.storage import Lock, LockedError, Store

_PART = re.compile(r"([0-9]+)/([0-9]+)")
_PART_LOCK = re.compile(r"part-(\d+)-of-(\d+)\.lock")
#: Checking a lock in a folder takes it briefly. Another command that meets it then retries for this long.
_SECONDS_OF_A_CHECK = 2.0
#: Time that a part waits for a whole run, such as `vlmdata finish`, to end.
_SECONDS_FOR_A_RUN = 10.0
_SECONDS_BETWEEN_TRIES = 0.1
#: Locks checked in parallel. In an object store, a lock whose holder may be dead takes half a minute.
_CHECKS = 32


@dataclass(frozen=True, order=True)
class Part:
    """Every ``parts``-th shard, beginning with shard ``number - 1``. Part 3 of 16 has shards 2, 18, 34 and so on."""

    number: int  # the part, from 1
    parts: int  # number of parts

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parses text such as ``3/16``.

        Raises:
            UsageError: If the text does not name a part.
        """
        match = _PART.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError(f"--part {text}: give it as NUMBER/PARTS, from 1/16 to 16/16 for 16 parts")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def for_shard(cls, shard: int, parts: int) -> Part:
        """Returns the part that makes a shard."""
        return cls(shard % parts + 1, parts)

    def has(self, shard: int) -> bool:
        """True if the shard belongs to this part."""
        return shard % self.parts == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"


def job_array(parts: Iterable[Part]) -> str:
    """Formats part numbers as the option of a job array: ``2,5-7``."""
    numbers = sorted({part.number for part in parts})
    spans = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


@contextmanager
def whole_claim(store: Store) -> Iterator[Lock]:
    """Locks the store against any other run.

    Raises:
        ResourceError: If another run, or a part of one, is at work there.
    """
    with directory_claim(store) as lock:
        if at_work := parts_at_work(store):
            raise ResourceError(f"{store}: {named(at_work)} at work there; wait for it or stop it")
        yield lock


def directory_claim(store: Store, command: str = "vlmdata preprocess") -> AbstractContextManager[Lock]:
    """Locks the store against whole runs, and against parts that have not begun. ``command`` is for messages.

    Raises:
        ResourceError: If a whole run is at work there.
    """
    return _locked(store, LOCK_FILE, f"another `{command}` is using it")


@contextmanager
def part_claim(store: Store, part: Part) -> Iterator[Lock]:
    """Locks a part.

    Raises:
        ResourceError: If this part, one of another division into parts, or a whole run is at work there.
    """
    name = f"{PROGRESS_DIR}/part-{part.number}-of-{part.parts}.lock"
    with _locked(store, name, f"part {part} is already at work there") as lock:
        end = time.monotonic() + _SECONDS_FOR_A_RUN
        while store.is_locked(LOCK_FILE):
            if time.monotonic() > end:
                raise ResourceError(f"{store}: another `vlmdata preprocess` is using it; wait for it or stop it")
            time.sleep(_SECONDS_BETWEEN_TRIES)
        if others := parts_at_work(store, except_of=part.parts):
            raise ResourceError(
                f"{store}: {named(others[:1])} at work there, which may make the same shards as part {part}. Use one "
                "number of parts for all, or wait until that one has ended."
            )
        yield lock


def parts_at_work(store: Store, except_of: int | None = None) -> list[Part]:
    """Returns the parts that are at work, except those of a run with ``except_of`` parts."""
    found = {}
    for name in store.listing(PROGRESS_DIR):
        if (match := _PART_LOCK.fullmatch(name)) and int(match[2]) != except_of:
            found[f"{PROGRESS_DIR}/{name}"] = Part(int(match[1]), int(match[2]))
    with ThreadPoolExecutor(_CHECKS) as pool:
        locked = pool.map(store.is_locked, found)
        return sorted(part for part, is_locked in zip(found.values(), locked, strict=True) if is_locked)


def named(parts: Iterable[Part]) -> str:
    """Lists parts in words: ``part 1/4, part 3/4``."""
    return ", ".join(f"part {part}" for part in parts)


@contextmanager
def _locked(store: Store, name: str, taken: str) -> Iterator[Lock]:
    end = time.monotonic() + _SECONDS_OF_A_CHECK
    with ExitStack() as entered:
        while True:
            try:
                lock = entered.enter_context(store.lock(name))
                break
            except LockedError as error:
                if time.monotonic() > end:
                    raise _refusal(store, taken, error) from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            yield lock
        except LockedError as error:  # another run took over
            raise _refusal(store, taken, error) from None


def _refusal(store: Store, taken: str, error: LockedError) -> ResourceError:
    who = f" ({error.holder})" if error.holder else ""
    return ResourceError(f"{store}: {taken}{who}; wait for it or stop it")
