"""Parts of a run. A separate command makes each part, on any machine and at any time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from vlmdata.errors import UsageError

_PART = re.compile(r"([0-9]+)/([0-9]+)")


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
