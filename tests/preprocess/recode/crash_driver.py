"""Kills a recoding at every step it takes on disk. A program of its own, started by ``test_recode.py``.

Usage: ``crash_driver.py FOLDER``.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

from preprocess.recode.run import recode_dataset
from tests.conftest import tree_bytes
from tests.preprocess.crash_driver import die_at, in_child
from tests.preprocess.recode.rows import build, write_source
from vlmdata.media.codecs import REGISTRY


def main(folder: Path) -> None:
    """Recodes once for every step at which it can die, and again to the end."""
    REGISTRY["shuffled-zlib"] = "tests.media.shuffled_zlib:CODEC"
    source = write_source(folder)
    raw, expected = (build(source, name, name, limit=6) for name in ("raw", "shuffled-zlib"))
    out, whole = folder / "out", tree_bytes(expected)

    def run() -> None:
        recode_dataset(raw, out, "shuffled-zlib")

    def doomed(step: int) -> None:
        die_at(step, out)
        run()

    run()  # loads the libraries once, for all the runs to come
    step = 0
    while True:
        shutil.rmtree(out, ignore_errors=True)
        code = in_child(lambda: doomed(step))  # noqa: B023 (called at once)
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        if step % 6 == 0:  # the run that continues dies as well, soon
            in_child(lambda: doomed(step % 7))  # noqa: B023
        assert in_child(run) == 0, f"killed at step {step}, it does not continue"
        found = tree_bytes(out)
        different = sorted(name for name in {*found, *whole} if found.get(name) != whole.get(name))
        assert not different, f"killed at step {step}, the result differs in {different}"
        step += 1
    print(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
