"""Kills a recoding at every step it takes on disk. A program of its own, started by ``test_recode.py``.

Usage: ``crash_driver.py FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import tree_bytes
from tests.preprocess.crash_driver import die_at_each_step
from tests.preprocess.recode.rows import build, write_source
from vlmdata.media.codecs import REGISTRY
from vlmdata.preprocess.recode.run import recode_dataset


def main(folder: Path) -> None:
    """Recodes once for every step at which it can die, and again to the end."""
    REGISTRY["shuffled-zlib"] = "tests.media.shuffled_zlib:CODEC"
    source = write_source(folder)
    raw, expected = (build(source, name, name, limit=6) for name in ("raw", "shuffled-zlib"))
    out, whole = folder / "out", tree_bytes(expected)

    def run() -> None:
        recode_dataset(raw, out, "shuffled-zlib")

    run()  # loads the libraries once, for all the runs to come
    print(die_at_each_step(run, out, whole, soon=7)[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
