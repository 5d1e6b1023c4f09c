"""The benchmark of a step on clips: all ways of feeding it train on the same packs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from benchmarks import video_step
from tests.preprocess.command_line import TOKENIZER
from vlmdata.cli.main import main

BENCHMARKS = Path(video_step.__file__).parent


def preprocess_here(source: str, out: Path, *options: str) -> Path:
    """``loader_data.preprocess`` without a process of its own."""
    command = ["vlmdata", "preprocess", source, "--out", str(out), "-j", "1", *TOKENIZER, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return out


def test_all_ways_train_on_the_same_packs(one_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    monkeypatch.setattr("loader_data.preprocess", preprocess_here)
    monkeypatch.setattr(video_step, "FAMILIES", ("qwen3_5",))
    monkeypatch.setattr(video_step, "draw_clip", lambda path, number, seconds: path.write_bytes(drawn(number)))
    video_step.make(argparse.Namespace(out=tmp_path, clips=2, seconds=1.0, rows=6, max_pixels=16384, pixels="zstd"))
    options = argparse.Namespace(
        data=tmp_path, capacity=1024, workers=0, processes=[0], decoder="pyav", steps=2, warmup=1, recompute="none"
    )
    ways = dict(video_step.measure("tiny", options))
    assert set(ways) == {"loader", "in the step"}
    assert ways["loader"]["fill"] == ways["in the step"]["fill"]
    assert ways["loader"]["video_tokens"] == ways["in the step"]["video_tokens"] > 0.05
    losses = [*ways["loader"]["losses"], *ways["in the step"]["losses"]]  # one run goes on
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    about = {
        "date": "",
        "command": "",
        "device": "",
        "torch": "",
        "transformers": "",
        "note": "",
        "presets": {"tiny": ways},
    }
    assert "| tiny | in the step |" in video_step.report(about)


def drawn(number: int) -> bytes:
    from tests.media.video.clips import clip

    return clip("libx264", 20, 10, options={"g": str(5 + number)})
