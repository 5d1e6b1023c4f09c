"""``vlmdata recode``: options, progress bar and summary."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdata.format.schema import KIND_FEATURES
from vlmdata.media.codecs import REGISTRY, VIDEO, codec

if TYPE_CHECKING:
    from rich.console import Console

    from vlmdata.format.manifest import Totals
    from vlmdata.preprocess.recode.run import RecodeResult

_CODECS = ", ".join(f"`{name}`" for name in REGISTRY if not codec(name).needs_file)


def recode(
    data: Annotated[str, typer.Argument(metavar="DIR", help="A finished dataset: a folder or fsspec URL.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder of the copy to make or continue.")],
    pixels: Annotated[
        str | None,
        typer.Option(help=f"How the copy stores images, all lossless: {_CODECS}. Default: as they are stored now."),
    ] = None,
    video_pixels: Annotated[
        str | None,
        typer.Option(help="How the copy stores videos. Default: as --pixels; `zstd` for `raw`."),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-j", help="Processes. Default: one per core.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove a dataset in --out and start over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Copy a dataset with its images in another codec, or bring it up to the current format, without its source.

    With equal library versions, the copy is byte-identical to the result of `vlmdata preprocess --pixels`. Every sample
    is checked. Without `--pixels`, the stored images of a dataset of an earlier format stay, byte for byte; index and
    manifest are new. Repeat the command to continue an interrupted run. A dataset with codec `source` can be read but
    not made, because the original files are not in the dataset.

    **Examples**

    - `vlmdata recode data/cord --pixels zstd --out data/cord-zstd`

    - `vlmdata recode s3://bucket/cord-jxl --pixels raw --out /scratch/cord -j 16`

    - `vlmdata recode data/made-by-1.1 --out data/current`

    - `vlmdata recode data/cord --pixels jxl --out data/cord-jxl --json | jq .ratio`

    **Exit codes**: 0 done; 2 invalid options, no dataset, or a damaged one; 3 out of space or workers; 130
    interrupted.
    """
    from vlmdata.cli.console import counting_bar, messages, results
    from vlmdata.machine import available_cores
    from vlmdata.preprocess.cli.locations import output_store
    from vlmdata.preprocess.recode.run import recode_dataset

    if workers is not None and workers < 1:
        raise typer.BadParameter(f"workers is {workers}; it must be at least 1")
    talk, begun, store = messages(), time.monotonic(), output_store(out)
    with counting_bar(talk) as bar:
        task = bar.add_task("shards", total=None)

        def started(shards: int, kept: int) -> None:
            bar.update(task, total=shards, completed=kept)
            if kept:
                talk.print(f"{kept:,} of {shards:,} shards already made", soft_wrap=True)

        result = recode_dataset(
            data,
            store,
            pixels,
            video_pixels,
            workers=workers or available_cores(),
            overwrite=overwrite,
            started=started,
            shard_done=lambda record: bar.advance(task),
        )
    summary = _summary(data, str(store), result, time.monotonic() - begun)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        _print(results(soft_wrap=True), summary, result.manifest.totals)


def _summary(data: str, out: str, result: RecodeResult, seconds: float) -> dict[str, Any]:
    before, after, options = result.old.totals, result.manifest.totals, result.manifest.config["options"]
    videos = KIND_FEATURES[VIDEO] in result.manifest.features
    return {
        "from": data,
        "directory": out,
        "was": result.was,
        "pixels": options["pixels"],
        **({"video_pixels": options["video"]["pixels"]} if videos else {}),
        "fingerprint": result.manifest.fingerprint,
        "samples": after.samples,
        "images": after.items,
        "bytes_before": before.bytes,
        "bytes": after.bytes,
        "ratio": after.bytes / max(before.bytes, 1),
        "bytes_per_image": after.item_bytes / max(after.items, 1),
        "bytes_per_file": after.file_bytes / max(after.items, 1),
        "shards": len(result.manifest.shards),
        "shards_made": result.made,
        "shards_kept": result.kept,
        "seconds": round(seconds, 3),
    }


def _print(console: Console, summary: dict[str, Any], totals: Totals) -> None:
    from vlmdata.format.manifest import item_sizes
    from vlmdata.wording import counted, duration

    stored = " and ".join(dict.fromkeys([summary["pixels"], *filter(None, [summary.get("video_pixels")])]))
    sizes = f"{summary['bytes_before'] / 1e6:,.1f} MB as {summary['was']}, {summary['bytes'] / 1e6:,.1f} MB as"
    kept = f", {summary['shards_kept']:,} kept" if summary["shards_kept"] else ""
    console.print(
        f"{counted(summary['samples'], 'sample')}, {counted(summary['images'], 'image')}: {sizes} {stored} "
        f"({summary['ratio']:.2f} of it)",
        markup=False,
    )
    if sizes := item_sizes(totals, stored):
        console.print(sizes, markup=False)
    made = f"{counted(summary['shards_made'], 'shard')} made{kept} in {duration(summary['seconds'])}"
    console.print(made, markup=False)
    console.print(f"every sample checked; next: vlmdata inspect {shlex.quote(summary['directory'])}", markup=False)
