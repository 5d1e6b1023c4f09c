"""What a run imports: `datasets` takes long, so only if the source needs it; and no compiler of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.cli.command import PreprocessCommand
from vlmdata.preprocess.cli.run_command import runs_own_code
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.media_config import VideoConfig

_RUN = """
import sys
sys.argv[0] = "vlmdata"
from vlmdata.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print(*({"datasets", "torch", "sympy", "accelerate", "torch._dynamo"} & sys.modules.keys()))
"""


def test_jsonl_needs_no_datasets(tmp_path):
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": chat}) + "\n")
    options = ["preprocess", str(source), "--tokenizer", "embedded", "--out", str(tmp_path / "out"), "-j", "1"]
    done = subprocess.run([sys.executable, "-c", _RUN, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch"


def test_a_tokenizer_loaded_for_its_own_sake_is_the_same(tmp_path, tokenizer):
    """The command imports transformers without torch."""
    tokenizer.save(tmp_path / "tokenizer")
    code = (
        "import sys, vlmdata.preprocess.chat.only_tokenizers\n"
        "assert 'torch' not in sys.modules\n"
        "from vlmdata.preprocess.chat.tokenizer import load_tokenizer\n"
        "print(load_tokenizer(sys.argv[1]).info)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch"
    )
    folder = str(tmp_path / "tokenizer")
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(load_tokenizer(folder).info)


def test_pandas_is_imported_after_the_last_row(tmp_path):
    """Arrow does it for its own sake where a table is made from Python's values."""
    image = tmp_path / "image.png"
    Image.new("RGB", (64, 64)).save(image)
    turns = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "black"}]
    row = {"messages": [json.dumps(turns)], "images": [[{"bytes": image.read_bytes()}]]}
    pq.write_table(pa.table(row), tmp_path / "chats.parquet")
    watch = (
        "import sys\n"
        "from vlmdata.preprocess.shards import job\n"
        "made = job.index_table\n"
        "def index_table(*rows):\n"
        "    assert 'pandas' not in sys.modules\n"
        "    return made(*rows)\n"
        "job.index_table = index_table\n"
    )
    options = [tmp_path / "chats.parquet", "--tokenizer", "embedded", "--out", tmp_path / "out", "-j", "1"]
    done = subprocess.run([sys.executable, "-c", watch + _RUN, "preprocess", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_FAMILY = """
from dataclasses import replace
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel  # needs torch
from vlmdata.families import family
FAMILY = replace(family("qwen3_5"), name="mine", model_types=("mine",), processors=())
"""


def test_a_family_that_the_tokenizer_names_may_need_models(tmp_path, tokenizer):
    """It is known by the environment or its package, not by an option."""
    (tmp_path / "mine.py").write_text(_FAMILY)
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "mine"}')
    (tmp_path / "text.jsonl").write_text('{"text": "Four."}\n')
    options = ["preprocess", "text.jsonl", "--recipe", "text", "--tokenizer", "tokenizer", "--out", "out", "-j", "1"]
    environment = os.environ | {"VLMDATA_FAMILIES": "mine.py:FAMILY"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *options], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "family mine, by the tokenizer's files" in done.stderr


@pytest.mark.parametrize("own", ["recipe", "pixels", "video", "engine"])
def test_an_own_extension_may_need_any_library(own):
    given = {
        "recipe": {"recipe": "own:Recipe"},
        "pixels": {"pixels": "tests.media.shuffled_zlib:CODEC"},
        "video": {"video": VideoConfig(pixels="tests.media.shuffled_zlib:CODEC")},
        "engine": {},
    }[own]
    built_in = PreprocessCommand(config=PreprocessConfig())
    assert not runs_own_code(built_in)
    engine = "own:Engine" if own == "engine" else built_in.engine
    assert runs_own_code(replace(built_in, engine=engine, config=PreprocessConfig(**given)))


def test_no_process_outlives_a_command_that_cannot_begin(tmp_path):
    """The server of workers still imports then; whoever reads the messages to their end would wait for it."""
    watched = _RUN.replace("assert not stop.code, stop.code", "assert stop.code == 2, stop.code")
    watched += "from multiprocessing import forkserver\nassert forkserver._forkserver._forkserver_pid is None\n"
    options = ["preprocess", "absent.jsonl", "--tokenizer", "embedded", "--out", str(tmp_path / "out"), "-j", "2"]
    done = subprocess.run([sys.executable, "-c", watched, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "absent.jsonl: no such file" in done.stderr
