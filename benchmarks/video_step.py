"""A training step on packs of clips, on one GPU: fed by the loader, or from clips decoded in the training process.

    python benchmarks/video_step.py make --out CLIPS    # draws clips and preprocesses them, for both families
    python benchmarks/video_step.py run --data CLIPS --presets 2b qwen3-vl-2b --capacity 16384

`make` needs no GPU, `run` neither `av` nor `datasets`: the folder may come from another machine. All ways run in one
process, one after the other, on the same packs in the same order, with the bundled trainer's step:

- loader: the loader's batches with --workers processes, as in train.py;
- in the step: the same tokens, but each clip is decoded (--decoder), sampled, resized and cut by transformers' video
  processor when its pack is due, as trainers that decode clips in the training process do;
- N processes: the same in N processes of torch's DataLoader, pinned, two packs ahead each.

The last two get their tokens from the dataset, so they save tokenizing. Tokens are true tokens. Times and waits for
batches are those that train.py logs: a wait counts if the GPU has no work when it ends. Times are sums over steps.
MFU is the model FLOP (`model/flops.py`) over time and the data sheet's dense bf16 peak. Without CUDA the presets are
the tiny ones in fp32, as a check of the script. Writes video-step-<label>-<date>.json and .md under --out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FAMILIES = ("qwen3_5", "qwen3_vl")
ROWS, CLIPS = "rows.jsonl", "clips"


def make(options: argparse.Namespace) -> None:
    """Draws clips, writes rows that use each of them several times, and preprocesses these for both families."""
    from loader_data import preprocess
    from train_data import words

    folder: Path = options.out
    (folder / CLIPS).mkdir(parents=True, exist_ok=True)
    for number in range(options.clips):
        draw_clip(folder / CLIPS / f"{number}.mp4", number, options.seconds)
    drawn = np.random.default_rng(5)
    rows = []
    for number in range(options.rows):
        question = {"role": "user", "content": f"<video>What moves in it, and where to? ({number})"}
        answer = {"role": "assistant", "content": words(drawn, 4.4, 0.5, 30, 300)}
        rows.append({"messages": [question, answer], "videos": [f"{CLIPS}/{number % options.clips}.mp4"]})
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for family in FAMILIES:
        size = ("--video-max-pixels", str(options.max_pixels), "--pixels", options.pixels)
        preprocess(str(folder / ROWS), folder / family, "--recipe", "chat", "--family", family, *size)
        print(f"{family}: {sum(file.stat().st_size for file in (folder / family).iterdir()) / 1e6:,.1f} MB")


def draw_clip(path: Path, number: int, seconds: float, rate: int = 30) -> None:
    """Encodes H.264 of 1280 x 720 pixels: rectangles that move over flat areas."""
    import av

    drawn = np.random.default_rng(number)
    areas = drawn.integers(0, 256, (6, 8, 3), np.uint8)
    background = areas.repeat(120, 0).repeat(160, 1)
    places, speeds = drawn.integers(0, 500, (12, 2)), drawn.integers(-6, 7, (12, 2))
    sizes, colours = drawn.integers(40, 220, (12, 2)), drawn.integers(0, 256, (12, 3), np.uint8)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for step in range(round(seconds * rate)):
            picture = background.copy()
            for place, speed, (height, width), colour in zip(places, speeds, sizes, colours, strict=True):
                y, x = (place + step * speed) % (720 - height, 1280 - width)
                picture[y : y + height, x : x + width] = colour
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        file.mux(stream.encode(None))


class DecodedPacks:
    """The pixels of packs, decoded from their clips: a dataset for torch's DataLoader.

    Args:
        packs: The clips of each pack, in order.
        processor: transformers' video processor.
        decoder: Name of transformers' back end that reads files.
    """

    def __init__(self, packs: list[list[Path]], processor: Any, decoder: str):
        self.packs, self.processor, self.decoder = packs, processor, decoder

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        """Returns ``pixel_values_videos``, float32, and ``video_grid_thw`` of a pack."""
        from transformers.video_utils import load_video

        def sampled(metadata: Any, **_: Any) -> Any:
            return self.processor.sample_frames(metadata=metadata)

        videos, about = zip(
            *(load_video(str(clip), backend=self.decoder, sample_indices_fn=sampled) for clip in self.packs[number]),
            strict=True,
        )
        made = self.processor(list(videos), video_metadata=list(about), do_sample_frames=False, return_tensors="pt")
        return made["pixel_values_videos"], made["video_grid_thw"]


def video_processor(dataset: Any) -> Any:
    """transformers' video processor with the settings with which the dataset was made."""
    from transformers import Qwen3VLVideoProcessor

    family, made = dataset.manifest.model_family, dataset.manifest.config["options"]["video"]
    return Qwen3VLVideoProcessor(
        size={"shortest_edge": made["min_pixels"], "longest_edge": made["max_pixels"]},
        image_mean=list(family.image_mean),
        image_std=list(family.image_std),
        **{name: made[name] for name in ("fps", "min_frames", "max_frames")},
    )


@dataclasses.dataclass(frozen=True)
class Feed:
    """What all ways of a preset share."""

    folder: Path
    dataset: Any
    config: Any
    architecture: Any
    packs: int
    decoder: str

    def of_loader(self, stack: contextlib.ExitStack) -> Iterator[Any]:
        """Batches of train.py's loader."""
        from train_peer import DEVICE

        from vlmdata.model.training.data import RankPlace, endless, open_loader

        return endless(stack.enter_context(open_loader(self.config, RankPlace.here(), self.architecture, DEVICE)))

    def of_clips(self, stack: contextlib.ExitStack, processes: int) -> Iterator[Any]:
        """The same packs, whose pixels come from their clips."""
        import torch
        from train_peer import DEVICE

        from vlmdata import StreamingLoader
        from vlmdata.model.training.data import endless

        clips = [json.loads(line)["videos"] for line in (self.folder / ROWS).read_text().splitlines()]
        on_gpu = DEVICE.type == "cuda"
        loading = {"capacity": self.config.data.capacity, "global_batch": 1, "max_patches": None, "num_workers": 0}
        parts = ("tokens", "labels")
        with StreamingLoader(self.dataset.directory, **loading, parts=parts, pad_to_capacity=on_gpu) as loader:
            batches = [batch.clone() for batch in itertools.islice(endless(loader), self.packs)]
        packs = [[self.folder / clip for origin in batch.origins for clip in clips[origin.row]] for batch in batches]
        decoded = torch.utils.data.DataLoader(
            DecodedPacks(packs, video_processor(self.dataset), self.decoder),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=processes,
            prefetch_factor=2 if processes else None,
            multiprocessing_context="spawn" if processes else None,  # a fork of a process with threads may hang
            pin_memory=on_gpu,
        )
        none = torch.zeros(0, self.dataset.family.patch_bytes, dtype=torch.uint8)
        for batch, (pixels, grids) in zip(batches, decoded, strict=True):
            if grids.tolist() != batch.host.video_grid_thw.tolist():
                raise SystemExit(f"transformers' processor makes grids {grids.tolist()} of pack {batch.pack}")
            whole = dataclasses.replace(batch, patches=none, video_patches=pixels)
            yield whole.to(DEVICE, non_blocking=True)


def timed(stepper: Any, batches: Iterator[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of steps after a warm-up; each is launched before the one before it is finished, as in a run."""
    import torch
    from train_peer import DEVICE

    from vlmdata.model.flops import peak_flops

    results, before = [], None
    for number in range(options.warmup + options.steps + 1):
        launched = stepper.launch(batches) if number < options.warmup + options.steps else None
        if before is not None:
            results.append(stepper.finish(before))
        before = launched
    measured = results[options.warmup :]
    seconds = sum(each.seconds for each in measured)
    return {
        "tokens_per_second": sum(each.tokens for each in measured) / seconds,
        "fill": sum(each.tokens for each in measured) / sum(each.slots for each in measured),
        "video_tokens": sum(each.patches for each in measured) / 4 / sum(each.tokens for each in measured),
        "seconds_per_step": seconds / len(measured),
        "wait": sum(each.data_wait for each in measured) / seconds,
        "mfu": sum(each.flops for each in measured) / seconds / (peak_flops(DEVICE) or float("nan")),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else float("nan"),
        "losses": [each.loss for each in results],
    }


def measure(name: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ways of a preset, each with its figures."""
    from train_peer import DEVICE, DTYPE, emptied, recomputing

    from vlmdata import open_dataset
    from vlmdata.model.families import preset, spec_of
    from vlmdata.model.training.build import architecture_of, build
    from vlmdata.model.training.data import RankPlace
    from vlmdata.model.training.kernels import compile_ahead
    from vlmdata.model.training.optimizer.learner import build_learner
    from vlmdata.model.training.settings.config_loading import load_config
    from vlmdata.model.training.step import Stepper

    dataset = open_dataset(options.data / preset(name).data_family)
    settings: list[tuple[str, Any]] = [
        ("data.paths", [str(dataset.directory)]),
        ("data.capacity", options.capacity),
        ("data.max_patches", None),
        ("data.global_batch", 1),
        ("data.workers", options.workers),
        ("model.preset", name),
        ("model.mtp", False),
        ("optimizer.warmup_steps", 0),
        ("run.steps", 1000),
        *recomputing(options.recompute),
    ]
    config = load_config(None, settings)
    with compile_ahead(config) or contextlib.nullcontext() as kernels:
        if kernels is not None:
            kernels.wait(print)
    architecture, place = architecture_of(config), RankPlace.here()
    emptied()
    flops = spec_of(architecture).step_flops(architecture, False, ())
    learner = build_learner(build(config, architecture, place, DEVICE), config, DEVICE, DTYPE)
    stepper = Stepper(learner, place, 1, options.capacity, flops, DEVICE)
    feed = Feed(options.data, dataset, config, architecture, options.warmup + options.steps, options.decoder)
    ways: dict[str, Callable[[contextlib.ExitStack], Iterator[Any]]] = {"loader": feed.of_loader}
    for processes in options.processes:
        way = f"{processes} processes" if processes else "in the step"
        ways[way] = lambda stack, count=processes: feed.of_clips(stack, count)
    for way, batches in ways.items():
        with contextlib.ExitStack() as stack:
            found = timed(stepper, batches(stack), options)
        print(f"  {name} {way}: {json.dumps(found)}", flush=True)
        yield way, found


def report(about: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"# A training step on packs of clips, {about['date']}",
        "",
        f"- `{about['command']}`",
        "",
        f"On {about['device']}; torch {about['torch']}, transformers {about['transformers']}. {about['note']}",
        "",
        "| model | pixels from | real tokens/s | step | wait for data | MFU | filled | tokens of clips |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, ways in about["presets"].items():
        lines += [
            f"| {name} | {way} | {found['tokens_per_second']:,.0f} | {found['seconds_per_step']:.2f} s | "
            f"{found['wait']:.2%} | {found['mfu']:.1%} | {found['fill']:.0%} | {found['video_tokens']:.0%} |"
            for way, found in ways.items()
        ]
    return "\n".join([*lines, ""])


def run(options: argparse.Namespace) -> None:
    """Measures all presets."""
    from vlmdata.model.parallel.environment import before_megatron

    before_megatron()
    from train_peer import about_run

    from vlmdata.model.parallel import groups
    from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed

    groups.initialize()
    about = about_run("video_step.py", options.note)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "-".join(filter(None, ["video-step", options.label, about["date"]]))
    with cpu_mode_if_needed():
        for name in options.presets:
            ways = about["presets"][name] = {}
            for way, found in measure(name, options):
                ways[way] = found
                stem.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
                stem.with_suffix(".md").write_text(report(about))
    groups.destroy()
    print(stem.with_suffix(".md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    maker = commands.add_parser("make", help="draw clips and preprocess them for both families")
    maker.add_argument("--out", type=Path, required=True)
    maker.add_argument("--clips", type=int, default=8)
    maker.add_argument("--seconds", type=float, default=10.0, help="length of a clip")
    maker.add_argument("--rows", type=int, default=96, help="conversations, each about one of the clips")
    maker.add_argument("--max-pixels", type=int, default=6_291_456, help="--video-max-pixels of the dataset")
    maker.add_argument("--pixels", default="zstd", help="codec of the dataset")
    maker.set_defaults(command=make)
    runner = commands.add_parser("run", help="measure steps")
    runner.add_argument("--data", type=Path, required=True, help="the folder that `make` wrote")
    runner.add_argument("--presets", nargs="+", default=["2b", "qwen3-vl-2b"])
    runner.add_argument("--capacity", type=int, default=16384, help="tokens of a pack")
    runner.add_argument("--workers", type=int, default=4, help="processes of the loader")
    runner.add_argument("--processes", type=int, nargs="*", default=[0, 8], help="that decode clips; 0: in the step")
    runner.add_argument("--decoder", default="opencv", help="transformers' back end that reads clips, such as pyav")
    runner.add_argument("--steps", type=int, default=12)
    runner.add_argument("--warmup", type=int, default=4)
    runner.add_argument("--recompute", default="none", help="none, selective or full; +vision adds the tower's blocks")
    runner.add_argument("--label", default="", help="of the result files")
    runner.add_argument("--note", default="", help="a sentence for the result")
    runner.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    runner.set_defaults(command=run)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
