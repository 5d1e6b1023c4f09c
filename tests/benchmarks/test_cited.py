"""Each benchmark that a page cites still runs: at toy size, on the CPU. What needs more is named, with the reason."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_rows import write_jsonl
from tests.forked import run_forked
from tests.loader.rows import chat_rows
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import short
from tests.model.training.ranks import ROOT, Ranks
from vlmdata.preprocess.config import ImageConfig

pytestmark = pytest.mark.slow

#: Scripts around the bundled model: number of processes and options. C are chats with images, T texts.
MODELS: dict[str, tuple[int, str]] = {
    "vision_gpus.py": (
        2,
        "--receipts C --texts T --cases tiny:texts --layouts data 'vision + language' --capacity 512 --global-batch 2 "
        "--steps 1 --workers 0 --work W",
    ),
    "sharding_pairs.py": (2, "--data C --preset tiny --capacity 512 --packs 1 --rounds 1 --warmup 0"),
    "train_speed.py": (1, "--data C --presets tiny --ways packed padded --capacity 512 --steps 1 --micro-batches 1"),
    "long_packs.py": (1, "--data receipts=C --data books=T --presets tiny --short 512 --long 1024 --steps 1"),
    "expert_layers.py": (1, "--data T --presets tiny-moe --layers 1 --capacity 512 --steps 1 --warmup 1"),
    "adapter_peer.py": (
        1,
        "--data chats=C --presets tiny --ways padded packs --capacity 512 --tokens 256 --start 1 --largest 1 "
        "--warmup 1",
    ),
    "one_axis_peer.py": (1, "--presets gemma4-tiny --capacity 1100 --tokens 1100 --samples 4 --sizes 1"),
    "lora_peer.py": (1, "--data C --presets tiny --ways peft --steps 1 --warmup 1 --start 1 --largest 1"),
}
#: Those of them that compare with transformers' models.
OF_TRANSFORMERS = ("adapter_peer.py", "one_axis_peer.py", "lora_peer.py")
#: Scripts without it.
OTHERS: dict[str, str] = {
    "packing_pairs.py": "40",
    "object_store.py": "driver --shards 8 --rows 2",
}
#: Cited, but their smallest run takes half a minute or more, most of it in commands that they start and time: here only
#: their imports and options.
LONG = (
    "loader.py",
    "preprocess.py",
    "preprocess_pairs.py",
    "preprocess_workers.py",
    "preprocess_start.py",
    "engines.py",
    "video.py",
    "video_step.py",
    "sources.py",
    "service.py",
    "packing.py",
    "retokenize.py",
    "decoder_share.py",
    "near_duplicates.py",
)
#: Not run here. Those of the trainer start jobs of the command line, which have tests of their own.
ELSEWHERE = {
    "train_runs.py": "jobs on CUDA devices",
    "train_parity.py": "bf16 on CUDA devices",
    "train_faults.py": "jobs on CUDA devices",
    "cold_start.py": "compiles kernels on a CUDA device",
    "codecs.py": "needs the photographs of vlmdata[bench]",
    "peers/run.py": "installs other loaders from the network",
    "install.py": "installs wheels from the network",
}


def cited() -> set[str]:
    """The scripts of ``benchmarks/`` that pages name with ``python``."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"python (?:benchmarks/)?([a-z_/]+\.py)", page.read_text())}
    return {name for name in named if (ROOT / "benchmarks" / name).exists()}


def test_each_cited_script_is_run_or_said_not_to_be() -> None:
    known = {*MODELS, *OTHERS, *LONG, *ELSEWHERE}
    assert cited() <= known
    assert all((ROOT / "benchmarks" / name).exists() for name in known)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Places in the options: datasets, and a folder to work in."""
    folder = tmp_path_factory.mktemp("cited")
    rows = short(chat_rows(40))
    texts = [row for row in rows if not row.get("images")]
    made = {"W": str(folder / "work"), "O": str(folder / "results")}
    for name, of in (("C", rows), ("T", texts)):
        source = write_jsonl(folder / f"{name}.jsonl", of)
        made[name] = str(build_chats(source, folder / name, image=ImageConfig(1024, 16384)))
    return made


def filled(options: str, data: dict[str, str]) -> list[str]:
    """Options with places in them."""
    return [re.sub(r"\b[CTOW]$", lambda found: data[found[0]], each) for each in shlex.split(options)]


@pytest.mark.parametrize("script", MODELS)
def test_a_script_around_the_model_runs(script: str, data: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    world, options = MODELS[script]
    written = [] if script == "sharding_pairs.py" else ["--out", str(tmp_path / "results")]
    if script in OF_TRANSFORMERS:  # what others are forked from has transformers without its models
        line = [sys.executable, f"{ROOT}/benchmarks/{script}", *filled(options, data), "--out", f"{tmp_path}/results"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert any("|---|" in each.read_text() for each in (tmp_path / "results").glob("*.md"))
        return
    ranks = Ranks([*filled(options, data), *written], tmp_path / "said", world, script=f"benchmarks/{script}")
    assert ranks.wait() == [0] * world, "\n".join(map(ranks.said, range(world)))
    tables = [each.read_text() for each in (tmp_path / "results").glob("*.md")] if written else [ranks.said(0)]
    assert any("|---|" in each for each in tables), ranks.said(0)


@pytest.mark.parametrize("script", OTHERS)
def test_another_script_runs(script: str, data: dict[str, str]) -> None:
    done = run_forked(str(ROOT / "benchmarks" / script), *filled(OTHERS[script], data))
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("script", sorted({*LONG, *ELSEWHERE} - {"codecs.py"}))
def test_a_long_script_says_its_options(script: str) -> None:
    done = run_forked(str(ROOT / "benchmarks" / script), "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
