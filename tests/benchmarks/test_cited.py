"""Each benchmark that a page cites still runs: at toy size, on the CPU. What needs more is named, with the reason."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.toy import run_toy
from tests.chat_rows import write_jsonl
from tests.conftest import cord_row, write_cord_parquet
from tests.forked import MODELS as MODEL_SERVER
from tests.forked import run_forked
from tests.loader.rows import chat_rows
from tests.media.video.clips import clip
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
#: Other scripts: options, and constants that are smaller here. P are rows with images, V is a clip, R the root; S takes
#: the place of the folder with real data.
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "codecs.py": (
        "--quick --work W --out O",
        {
            "codecs.CODECS": ("raw", "zstd"),
            "codecs.BATCHES": dict.fromkeys(("raw", "zstd", "jxl", "source"), 1),
            "loader_data.SHARED": "S",
        },
    ),
    "decoder_share.py": (
        "--rounds 1 --out O",
        {"loader_data.SHARED": "S", "decoder_share.EPOCHS": dict.fromkeys(("raw", "zstd", "jxl"), 1)},
    ),
    "engines.py": ("--rounds 1 --rows 4 --rows-per-shard 1", {"engines.MANY_SHARDS": 4}),
    "loader.py": (
        "--quick --out O",
        {
            "loader.BATCHES": {"webdataset": 1, "on the fly": 1, "short": (1, 1)},
            "loader.SOURCE_BYTES": 100_000_000,
            "loader.COPIES": 1,
            "loader.GLOBAL_BATCH": 1,
            "loader.CHATS": 100,
            "loader.CHATS_LISTED": (2, 2),
            "loader_data.SHARED": "S",
        },
    ),
    "near_duplicates.py": ("--samples 100", {}),
    "object_store.py": ("driver --shards 8 --rows 2", {}),
    "packing.py": (
        "--quick",
        {
            "packing.SAMPLES": 20_000,
            "packing.TIMED": {"1 M": (20_000, None, None)},
            "packing.RUNS": 1,
            "packing.REPEATS": (1,),
        },
    ),
    "packing_pairs.py": ("40", {}),
    "preprocess.py": (
        "--quick --out O",
        {
            "preprocess.SIZES": ((1, 2), (1, 2)),
            "preprocess._MANY": 3,
            "preprocess._ROWS_PER_SHARD": 1,
            "preprocess._EDGE": 1,
            "preprocess.SHARED": "S",
        },
    ),
    "preprocess_pairs.py": ("R R --rounds 1 --images 1 --out O", {"preprocess_pairs._SCAN_PIXELS": 100_000}),
    "preprocess_start.py": (
        "P --rounds 1",
        {
            "preprocess_start.FEW": 2,
            "preprocess_start.MANY": 4,
            "preprocess_start.WORKERS": (1,),
            "preprocess_start.WAYS": {"two commands": (2, 1)},
        },
    ),
    "preprocess_workers.py": ("P --processes 1 --rows-per-shard 1 --shards 4 --rounds 1 --out O", {}),
    "retokenize.py": (
        "--rows 2 --rounds 1 --codecs raw --out O",
        {"retokenize.ROWS_PER_SHARD": 1, "retokenize.PHOTOGRAPH": (300, 400)},
    ),
    "service.py": (
        "--rows 24 --out O",
        {
            "service.OPTIONS": {"capacity": 2048, "global_batch": 1},
            "service.ROUNDS": 1,
            "service.BATCHES": 12,
            "service.AHEAD": 1,
            "service.STALLS": 1,
        },
    ),
    "sources.py": ("--quick --out O", {"sources.SIZES": ((2, 4, 1), (2, 4, 1)), "sources.ROWS_PER_FILE": 2}),
    "video.py": ("V --rounds 1 --frames 4 --out O", {"video.LARGE": (192, 108)}),
}
#: Only their imports and options are tried. Those of the trainer start jobs of the command line, which have tests.
ELSEWHERE = {
    "train_runs.py": "jobs on CUDA devices",
    "train_parity.py": "bf16 on CUDA devices",
    "train_faults.py": "jobs on CUDA devices",
    "cold_start.py": "compiles kernels on a CUDA device",
    "peers/run.py": "installs other loaders from the network",
    "install.py": "installs wheels from the network",
}


def cited() -> set[str]:
    """The scripts of ``benchmarks/`` that pages name with ``python``."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"python (?:benchmarks/)?([a-z_/]+\.py)", page.read_text())}
    return {name for name in named if (ROOT / "benchmarks" / name).exists()}


def test_each_cited_script_is_run_or_said_not_to_be() -> None:
    known = {*MODELS, *TOYS, "video_step.py", *ELSEWHERE}
    assert cited() <= known
    assert all((ROOT / "benchmarks" / name).exists() for name in known)


@pytest.fixture(scope="module")
def data(cord_parquet: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Places in the options: datasets, and a folder to work in."""
    folder = tmp_path_factory.mktemp("cited")
    rows = short(chat_rows(40))
    texts = [row for row in rows if not row.get("images")]
    made = {"O": str(folder / "results"), "P": str(cord_parquet), "R": str(ROOT), "V": str(folder / "clip.mp4")}
    made["W"] = str(write_cord_parquet(folder / "work" / "photographs.parquet", [cord_row()]).parent)
    made["S"] = str(folder / "shared")
    write_cord_parquet(folder / "shared" / "receipts_real" / "train.parquet", [cord_row(n) for n in range(4)])
    (folder / "clip.mp4").write_bytes(clip(size=(64, 96)))
    for name, of in (("C", rows), ("T", texts)):
        source = write_jsonl(folder / f"{name}.jsonl", of)
        made[name] = str(build_chats(source, folder / name, image=ImageConfig(1024, 16384)))
    return made


def filled(options: str, data: dict[str, str]) -> list[str]:
    """Options with places in them."""
    return [re.sub(r"\b[COPRTVW]$", lambda found: data[found[0]], each) for each in shlex.split(options)]


@pytest.mark.parametrize("script", MODELS)
def test_a_script_around_the_model_runs(script: str, data: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    world, options = MODELS[script]
    written = [] if script == "sharding_pairs.py" else ["--out", str(tmp_path / "results")]
    if script in OF_TRANSFORMERS:
        done = run_toy(script, *filled(options, data), "--out", f"{tmp_path}/results", sizes={}, server=MODEL_SERVER)
        assert done.returncode == 0, done.stderr
        assert any("|---|" in each.read_text() for each in (tmp_path / "results").glob("*.md"))
        return
    ranks = Ranks([*filled(options, data), *written], tmp_path / "said", world, script=f"benchmarks/{script}")
    assert ranks.wait() == [0] * world, "\n".join(map(ranks.said, range(world)))
    tables = [each.read_text() for each in (tmp_path / "results").glob("*.md")] if written else [ranks.said(0)]
    assert any("|---|" in each for each in tables), ranks.said(0)


@pytest.mark.parametrize("script", TOYS)
def test_another_script_runs(script: str, data: dict[str, str]) -> None:
    options, sizes = TOYS[script]
    sizes = {name: data["S"] if size == "S" else size for name, size in sizes.items()}
    done = run_toy(script, *filled(options, data), sizes=sizes)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_step_on_clips_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    make = f"make --out {tmp_path}/clips --clips 1 --seconds 0.3 --rows 2 --max-pixels 65536 --pixels raw"
    done = run_toy("video_step.py", *make.split(), sizes={})
    assert done.returncode == 0, done.stderr
    options = "--presets tiny --capacity 1024 --workers 0 --processes 0 --decoder pyav --steps 1 --warmup 0"
    run = f"run --data {tmp_path}/clips --out {tmp_path}/results {options}"
    done = run_toy("video_step.py", *run.split(), sizes={}, server=MODEL_SERVER)
    assert done.returncode == 0, done.stderr
    assert "| tiny | in the step |" in done.stdout


@pytest.mark.parametrize("script", sorted(ELSEWHERE))
def test_a_script_for_other_machines_says_its_options(script: str) -> None:
    done = run_forked(str(ROOT / "benchmarks" / script), "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
