"""Videos: preprocessing against decoding alone and transformers' processor, loading, and memory of a worker.

    python benchmarks/video.py clip.mp4 [more …] --out results/video-2026-11-25

Clips as for ``video_storage.py``. Ways run in turn, in each round, in one thread; times are CPU time, and ratios are
medians of those within a round, so a busy machine matters little.

- Decoding alone: PyAV decodes the files from first to last frame, and drops the frames.
- Needed frames: the frames that are sampled, decoded to RGB by vlmdata, neither resized nor kept.
- Preprocessing: list the frames, sample, decode, resize, cut into patches; and the same with the codec.
- transformers: PyAV decodes all frames to RGB, and ``Qwen3VLVideoProcessor`` samples, resizes and makes
  ``pixel_values_videos``, as in a training step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware

# The folder of benchmarks has a preprocess.py of its own.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

import av
import numpy as np
import torch
from PIL import Image

from vlmdata import StreamingLoader
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.media.codecs import Item, codec
from vlmdata.media.video.container import VideoLimits
from vlmdata.media.video.decode import decode_frames
from vlmdata.preprocess.config import PreprocessConfig, VideoConfig
from vlmdata.preprocess.conversation import VideoPart
from vlmdata.preprocess.encode.video import VideoPlan, encode_video, plan_video
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source

CONFIG = PreprocessConfig(recipe="chat")
LIMITS = VideoLimits()
#: Width and height of the clips for the memory.
LARGE = (1920, 1080)


def decode_all(path: Path) -> None:
    """Decodes a file."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for _ in container.decode(stream):
            pass


def planned(path: Path) -> VideoPlan:
    """Lists and samples the frames."""
    return plan_video(VideoPart(path.read_bytes(), field=path.name), CONFIG)


def decode_needed(path: Path) -> None:
    """Decodes the sampled frames."""
    plan = planned(path)
    assert plan.contents is not None
    for _ in decode_frames(path.read_bytes(), plan.contents, sorted(set(plan.numbers)), LIMITS, path.name):
        pass


def preprocess(path: Path) -> Item:
    """Makes the patches."""
    plan = planned(path)
    encoded = encode_video(plan, CONFIG)
    return Item(encoded.patches, encoded.shape, FAMILY)


def preprocess_and_store(path: Path) -> bytes:
    """Makes the stored bytes."""
    return bytes(codec("zstd").encode(preprocess(path)))


def of_transformers() -> Callable[[Path], Any]:
    """Decodes and processes as a training step does."""
    from transformers import Qwen3VLVideoProcessor

    processor = Qwen3VLVideoProcessor(patch_size=FAMILY.patch_size)

    def run(path: Path) -> Any:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            rate = float(stream.average_rate or 24)
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        facts = {"fps": rate, "total_num_frames": len(frames)}
        return processor(videos=[frames], video_metadata=[facts], return_tensors="pt")

    return run


def speeds(clips: list[Path], rounds: int) -> dict[str, Any]:
    """CPU seconds of each way by clip, and what of them follows."""
    ways: dict[str, Callable[[Path], Any]] = {
        "decode all": decode_all,
        "decode needed": decode_needed,
        "preprocess": preprocess,
        "preprocess, zstd": preprocess_and_store,
        "transformers": of_transformers(),
    }
    found = []
    for clip in clips:
        plan = planned(clip)
        assert plan.contents is not None
        seconds = len(plan.contents) / float(plan.contents.rate)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                begin = time.process_time()
                run(clip)
                times[name].append(time.process_time() - begin)
        ratios = {
            f"{one} / {other}": median(a / b for a, b in zip(times[one], times[other], strict=True))
            for one, other in (
                ("decode all", "preprocess"),
                ("decode needed", "preprocess"),
                ("decode all", "preprocess, zstd"),
                ("transformers", "preprocess"),
            )
        }
        found.append({"clip": clip.name, "seconds": seconds, "sampled": len(plan.numbers), "times": times} | ratios)
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return {"clips": found}


def loading(clips: list[Path], rounds: int) -> dict[str, Any]:
    """Tokens and raw bytes per CPU second of a loader, by codec of videos."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        lines = [{"query": "<video>What?", "response": "It.", "videos": [str(clip.resolve())]} for clip in clips] * 4
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name in ("raw", "zstd", "jxl"):
            config = PreprocessConfig(recipe="chat", max_length=1 << 16, video=VideoConfig(pixels=name))
            out = Path(folder) / name
            root = {"media": type(config.media)(image_root="/")}
            preprocess_dataset(open_source(str(rows)), out, PreprocessConfig(**{**vars(config), **root}))
            speeds = []
            for _ in range(rounds):
                tokens = size = 0
                with StreamingLoader([out], capacity=1 << 15, global_batch=1, dp_size=1, dp_rank=0) as loader:
                    begin = time.process_time()
                    for batch in loader:
                        tokens += batch.true_tokens
                        size += 0 if batch.video_patches is None else batch.video_patches.nbytes
                    speeds.append((tokens, size, time.process_time() - begin))
            best = max(speeds, key=lambda each: each[0] / each[2])
            found[name] = {"tokens_per_cpu_s": best[0] / best[2], "raw_mb_per_cpu_s": best[1] / best[2] / 1e6}
    return found


def long_clip(path: Path, frames: int, size: tuple[int, int]) -> None:
    """Encodes smooth noise that moves, a key frame per 50 frames."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (68, 120, 3), np.uint8))
    picture = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=Fraction(30), options={"preset": "ultrafast", "g": "50"})
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        stream.codec_context.thread_count = 1
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 4 * number, axis=1), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 30)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


def peak(path: Path) -> None:
    """Prints MiB of memory with nothing decoded, after preprocessing, and of the patches; for a process of its own."""
    torch.set_num_threads(1)
    small = Path(path.parent / "small.mp4")
    long_clip(small, 8, size=(192, 108))
    preprocess_and_store(small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    item = preprocess(path)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    codec("zstd").encode(item)
    stored = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([before / 1024, after / 1024, stored / 1024, item.patches.nbytes / 2**20, item.shape.grid]))


def memory(frames: tuple[int, ...]) -> list[dict[str, Any]]:
    """Peak memory of a process that preprocesses clips of 1920x1080."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for count in frames:
            path = Path(folder) / f"{count}.mp4"
            long_clip(path, count, LARGE)
            command = [sys.executable, __file__, "--peak", str(path)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            before, after, stored, patches, grid = json.loads(out)
            file = path.stat().st_size / 2**20
            decoded = count * LARGE[0] * LARGE[1] * 3 / 2**20
            names = {"above_mib": after - before, "with_zstd_mib": stored - before, "patches_mib": patches}
            found.append({"frames": count, "grid": grid, "file_mib": file, "decoded_mib": decoded, **names})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def report(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    ratios = [name for name in found["clips"][0] if " / " in name]
    lines = [f"| clip | {' | '.join(ratios)} | video s per CPU s |", f"|---|{'---|' * (len(ratios) + 1)}"]
    for each in found["clips"]:
        speed = each["seconds"] / median(each["times"]["preprocess, zstd"])
        lines.append(f"| {each['clip']} | {' | '.join(f'{each[name]:.2f}' for name in ratios)} | {speed:.0f} |")
    lines += ["", "| codec | tokens per CPU s | MB of raw frames per CPU s |", "|---|---|---|"]
    for name, each in found["loading"].items():
        lines.append(f"| {name} | {each['tokens_per_cpu_s']:,.0f} | {each['raw_mb_per_cpu_s']:,.0f} |")
    lines += ["", "| frames of 1920x1080 | all decoded, MiB | file, MiB | patches, MiB | peak, MiB | with zstd, MiB |"]
    lines += ["|---|---|---|---|---|---|"]
    for each in found["memory"]:
        names = ("decoded_mib", "file_mib", "patches_mib", "above_mib", "with_zstd_mib")
        lines.append(f"| {each['frames']} | {' | '.join(f'{each[name]:,.0f}' for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clips", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames", type=int, nargs="*", default=[100, 400], help="lengths of clips for the memory")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where .json and .md are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        return peak(options.peak)
    found = speeds(options.clips, options.rounds)
    found |= {"loading": loading(options.clips, options.rounds), "memory": memory(tuple(options.frames))}
    found["hardware"] = hardware("av", "torch", "transformers", "pyarrow")
    print(report(found))
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        head = f"# Videos\n\n{__doc__}\n{json.dumps(found['hardware'])}\n\n"
        options.out.with_suffix(".md").write_text(head + report(found) + "\n")
    return None


if __name__ == "__main__":
    main()
