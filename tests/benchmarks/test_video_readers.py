"""Colours of decoded frames beside those of qwen-vl-utils, at toy size."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import their neighbours

from benchmarks.video_readers import compared


def test_the_colours_are_nearer_to_the_source_than_those_of_the_default_conversion() -> None:
    found = compared("clouds", 8, (128, 96))
    assert 0.4 < found["values that differ"] < 1
    assert found["mean error to the source, vlmdata"] < found["mean error to the source, qwen-vl-utils"]
