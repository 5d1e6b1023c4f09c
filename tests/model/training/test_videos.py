"""Whole runs on clips of both families: learned, resumed, evaluated, exported to transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image
from tests.media.video.clips import clip, picture
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import evaluations_of, steps_of, train_here
from tests.model.training.plain import plain_loss
from tests.model.training.test_run import weights_of
from vlmdata.preprocess.config import ImageConfig, VideoConfig

pytestmark = pytest.mark.slow

EXACT = ("loss", "grad_norm", "targets", "tokens", "images", "videos", "patches", "samples", "epoch")


def rows() -> list[dict[str, Any]]:
    """One or two clips, with an image between them or none; some rows have neither."""
    contents = ["<video>What is it?", "<video>Then <image> and <video>?", "And now?", "<image>Or <video>?"]
    return [
        {
            "messages": [
                {"role": "user", "content": contents[number % 4]},
                {"role": "assistant", "content": f"Numbers up to {number}."},
            ],
            "videos": ["odd.mp4", "even.mp4"][: contents[number % 4].count("<video>")],
            "images": ["picture.png"][: contents[number % 4].count("<image>")],
        }
        for number in range(24)
    ]


def clips(folder: Path, family: str) -> Path:
    """A dataset of those rows."""
    for name, count in (("odd", 5), ("even", 8)):
        frames = [picture(37 * number, 64, 48) for number in range(count)]
        (folder / f"{name}.mp4").write_bytes(clip(count=count, rate=2, frames=frames))
    (folder / "picture.png").write_bytes(encoded_image(64, 96, seed=1))
    return build_chats(
        write_jsonl(folder / "rows.jsonl", rows()),
        folder / "clips",
        family=family,
        image=ImageConfig(1024, 4096),
        video=VideoConfig(min_pixels=4096, max_pixels=16384),
        rows_per_shard=8,
        pad_multiple=16,
    )


@pytest.fixture(scope="module")
def clips_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the dataset of a family."""
    return cache(lambda family: clips(tmp_path_factory.mktemp(family), family))


def exact(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in EXACT} for line in steps_of(out)]


@pytest.mark.parametrize(("family", "preset"), [("qwen3_5", "tiny"), ("qwen3_vl", "qwen3-vl-tiny")])
def test_a_run_learns_resumes_and_exports(
    family: str,
    preset: str,
    one_process: None,
    clips_of: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from vlmdata.model.weights.convert import to_hf

    data = clips_of(family)
    options = {"model__preset": preset, "data__eval_paths": [str(data)], "data__max_patches": None, "run__steps": 4}
    train_here(tmp_path / "whole", data, **options)
    train_here(tmp_path / "parts", data, **options | {"run__steps": 2})
    train_here(tmp_path / "parts", data, resume=True, **options)
    assert exact(tmp_path / "parts") == exact(tmp_path / "whole")
    lines = steps_of(tmp_path / "whole")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert all(line["videos"] > 1 and line["images"] > 0 for line in lines)
    (checkpoint,) = (tmp_path / "whole" / "checkpoints").glob("step-*")
    to_hf(checkpoint, tmp_path / "hf")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    (found,) = evaluations_of(tmp_path / "whole")
    assert (found["loss"], found["targets"]) == pytest.approx(plain_loss(exported, data), rel=1e-5)
    processor = AutoProcessor.from_pretrained(tmp_path / "hf").video_processor
    assert dict(processor.size) == {"shortest_edge": 4096, "longest_edge": 16384}, "as the dataset was made"
    assert (processor.fps, processor.min_frames, processor.max_frames) == (2, 4, 768)
    # The next run starts from that model, served by a processor with another setting.
    options |= {"model__preset": "", "model__hf": str(tmp_path / "hf"), "data__eval_paths": [], "run__steps": 1}
    for cap, found in ((None, 0), (True, 1)):
        processor.cap_pixels_per_frame = cap
        processor.save_pretrained(tmp_path / "hf")
        capsys.readouterr()
        train_here(tmp_path / f"next-{cap}", data, **options)
        said = "".join(capsys.readouterr())
        assert said.count("clips has cap_pixels_per_frame off, and the processor of") == found


@pytest.mark.parametrize(
    ("family", "preset", "parts"),
    [("qwen3_5", "tiny", ["vision", "merger"]), ("qwen3_vl", "qwen3-vl-tiny", ["language"])],
)
def test_frozen_parts_stay_as_they_are(
    family: str, preset: str, parts: list[str], one_process: None, clips_of: Callable[[str], Path], tmp_path: Path
) -> None:
    from vlmdata.model.training.optimizer.learner import part_of

    data = clips_of(family)
    options = {"model__preset": preset, "model__freeze": parts, "data__max_patches": None, "run__save_every": 1}
    train_here(tmp_path / "run", data, run__steps=2, run__keep=0, **options)
    first, end = (weights_of(tmp_path / "run/checkpoints" / f"step-0000000{step}") for step in (1, 2))
    changed = {part_of(name) for name in first if not torch.equal(first[name], end[name])}
    assert changed == {"vision", "merger", "language"} - set(parts)
    assert all(line["videos"] > 1 for line in steps_of(tmp_path / "run"))
