"""A training process that may be killed at any moment. Run by ``test_faults.py``.

After every batch it replaces its journal: the loader's state, and the keys of all batches so far.

Usage: ``python -m tests.loader.consumer DATA JOURNAL [slowly | leaves]``. "leaves": ends after two batches, with neither
a call of ``close`` nor a good-bye.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.loader.helpers import stream, worker_pids


def main(data: str, journal: Path, how: str) -> None:
    loader = stream(data, num_workers=2)
    seen: list[list[str]] = []
    for batch in loader:
        seen.append(list(batch.sample_keys))
        entry = {"state": loader.state_dict(), "seen": seen, "workers": worker_pids(), "ended": time.time()}
        journal.with_suffix(".new").write_text(json.dumps(entry))
        os.replace(journal.with_suffix(".new"), journal)
        if how == "slowly":
            time.sleep(0.3)
        if how == "leaves" and len(seen) == 2:
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
