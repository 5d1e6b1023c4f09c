"""What a run imports: `datasets` takes long, so only if the source needs it."""

from __future__ import annotations

import json
import subprocess
import sys

_RUN = """
import sys
from vlmdata.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("datasets" in sys.modules)
"""


def test_jsonl_needs_no_datasets(tmp_path):
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": chat}) + "\n")
    options = ["preprocess", str(source), "--tokenizer", "embedded", "--out", str(tmp_path / "out"), "-j", "1"]
    done = subprocess.run([sys.executable, "-c", _RUN, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
