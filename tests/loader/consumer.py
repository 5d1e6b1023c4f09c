"""A training process that may be killed at any moment, or that just ends. Used by ``test_faults.py``.

After every batch it replaces its journal: the loader's state, and the keys of all batches so far.

Usage: ``python -m tests.loader.consumer DATA JOURNAL``: ends after two batches, with neither a call of ``close`` nor a
good-bye.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

from tests.loader.helpers import stream, worker_pids


def consume(data: str, journal: Path, batches: int | None, pause: float) -> None:
    """Takes so many batches, with a pause after each."""
    loader = stream(data, num_workers=2)
    seen: list[list[str]] = []
    for batch in islice(loader, batches):
        seen.append(list(batch.sample_keys))
        entry = {"state": loader.state_dict(), "seen": seen, "workers": worker_pids()}
        journal.with_suffix(".new").write_text(json.dumps(entry))
        os.replace(journal.with_suffix(".new"), journal)
        time.sleep(pause)


if __name__ == "__main__":
    consume(sys.argv[1], Path(sys.argv[2]), 2, 0)
