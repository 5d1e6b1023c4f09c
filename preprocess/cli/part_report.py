"""The summary of one part of a run, as text or JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from preprocess.run.dataset import PartResult
from preprocess.shards.sums import summed
from vlmdata.storage import Store
from vlmdata.wording import counted, duration


@dataclass(frozen=True)
class PartReport:
    """The result of a part. ``vlmdata finish`` checks whether too many rows were rejected."""

    store: Store
    result: PartResult
    seconds: float
    failure: None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as JSON values."""
        return {
            "directory": str(self.store),
            "part": str(self.result.part),
            "finished": self.result.finished,
            "rows": self._sum("rows"),
            "samples": self._sum("samples"),
            "rejected": self._sum("rejected"),
            "rejects": dict(sorted(self._rejects.items())),
            "bytes": self._sum("bytes"),
            "shards_made": self.result.made,
            "shards_kept": self.result.kept,
            "seconds": round(self.seconds, 3),
        }

    def print(self, console: Console) -> None:
        """Prints the summary."""
        result = self.result
        if result.finished:
            lines = [f"{self.store}: the dataset is finished; nothing to do for part {result.part}"]
        else:
            kept = f", {result.kept:,} kept" if result.kept else ""
            lines = [
                f"part {result.part}: {counted(result.made, 'shard')} made{kept}, "
                f"{counted(self._sum('samples'), 'sample')} of {counted(self._sum('rows'), 'row')}, "
                f"{self._sum('bytes') / 1e6:,.1f} MB in {duration(self.seconds)}"
            ]
            if self._rejects:
                listed = ", ".join(f"{count:,} {reason}" for reason, count in self._rejects.most_common())
                lines.append(f"{self._sum('rejected'):,} rejected: {listed}")
            lines.append(f"next, when all {result.part.parts} parts are made: vlmdata finish {self.store}")
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)

    @property
    def _rejects(self) -> Counter[str]:
        return Counter(summed(record.rejects for record in self.result.records))

    def _sum(self, name: str) -> int:
        return sum(getattr(record.totals, name) for record in self.result.records)
