"""What a process imports until its first batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.loader.synthetic import write_dataset

_LOAD = """
import sys
from vlmdata import StreamingLoader
with StreamingLoader(sys.argv[1], capacity=1024, global_batch=1) as loader:
    next(iter(loader))
sys.exit("pandas" in sys.modules)
"""


def test_loading_imports_no_pandas(tmp_path: Path) -> None:
    """Arrow imports it for some conversions; that takes longer than opening a dataset."""
    data = write_dataset(tmp_path / "data", shards=1, samples_per_shard=20)
    subprocess.run([sys.executable, "-c", _LOAD, str(data)], check=True)
