"""The checkpoint with the lowest evaluation loss, recorded in ``OUT/checkpoints/best.json``."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from vlmdata.errors import ResourceError
from vlmdata.format.atomic import write_atomically
from vlmdata.model.training.processes.agreement import decided

_FILE = "best.json"


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run."""

    checkpoint: str  # name of its folder
    step: int
    loss: float  # its loss on the evaluation sets
    data: tuple[str, ...]  # fingerprints of these sets. Losses on other sets are not comparable.


class BestCheckpoint:
    """Tracks a run's best checkpoint so far, in the folder of its checkpoints. ``found`` is None if there is none."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.found: Best | None = None

    @property
    def name(self) -> str | None:
        """Name of the best checkpoint's folder, which is not removed; None if there is none."""
        return None if self.found is None else self.found.checkpoint

    def recall(self, data: tuple[str, ...]) -> list[str]:
        """Reads the record of an earlier part of the run. A collective.

        The best checkpoint counts if it still exists and used the evaluation sets with these fingerprints. Returns a
        note if it used others.
        """
        found = decided(self._read)
        if found is not None and found.data != data:
            return [f"{found.checkpoint} was the best so far on other evaluation data: the search starts over"]
        self.found = found
        return []

    def mark(self, best: Best) -> None:
        """Keeps a saved or in-progress checkpoint until a better one is marked. A collective.

        Raises:
            ResourceError: If the record cannot be written.
        """
        self.found = best
        decided(lambda: self.note(best.checkpoint))

    def note(self, name: str) -> None:
        """Records a complete checkpoint if it is the best one. Rank 0 calls it for each complete checkpoint.

        Raises:
            ResourceError: If the file cannot be written; the previous file stays.
        """
        if self.found is None or self.name != name or not (self._folder / name).is_dir():
            return
        try:
            text = json.dumps(dataclasses.asdict(self.found), indent=1) + "\n"
            write_atomically(self._folder / _FILE, text.encode())
        except OSError as error:
            raise ResourceError(
                f"{(self._folder / _FILE).resolve()} could not be written: {error.strerror or error}. Checkpoints are "
                "unchanged. Free space or fix permissions, and continue with --resume"
            ) from error

    def _read(self) -> Best | None:
        try:
            found = Best(**json.loads((self._folder / _FILE).read_text()))
            found = dataclasses.replace(found, data=tuple(found.data))
            return found if (self._folder / found.checkpoint).is_dir() else None
        except (OSError, ValueError, TypeError):
            return None
