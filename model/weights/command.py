"""``vlmdata convert``: the command."""

from __future__ import annotations

import json as jsonlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from vlmdata.errors import ResourceError, UsageError, VlmdataError
from vlmdata.model.weights.places import TEMPORARY, is_distributed, newest_checkpoint_in

#: Checkpoints of a run that may disappear while they are converted.
_ATTEMPTS = 3
_DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: Annotated[
        Path,
        typer.Argument(help="Folder of a Hugging Face or Megatron checkpoint, or of a run: its newest checkpoint."),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; must be empty or absent.")],
    like: Annotated[
        Path | None,
        typer.Option(help="To Hugging Face: copy config, tokenizer, processor and other small files from this folder."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="To Hugging Face: dataset that supplies tokenizer, processor and generation settings. Default: the "
            "files of --like, or else the run's training dataset."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="To Hugging Face: float32, bfloat16 or float16. Default: the stored dtype.")
    ] = None,
    ignore_config_field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Unknown config.json field to ignore, if harmless; may be repeated."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with LoRA: write full weights instead of PEFT's adapter.")
    ] = False,
    file_gb: Annotated[float, typer.Option(help="To Hugging Face: largest file size in GB.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert weights from Hugging Face safetensors to a Megatron distributed checkpoint or back.

    SOURCE determines the direction. A distributed checkpoint works with every tensor, pipeline and expert parallel
    size. The round trip is exact: conversion only rearranges values. It holds one tensor in memory at a time.

    **Examples**

    - `vlmdata convert models/Qwen3.5-9B --out weights/qwen3.5-9b`

    - `torchrun --nproc-per-node 8 --master-addr 127.0.0.1 -m vlmdata.train --data data/cord --hf models/Qwen3.5-9B
      --weights weights/qwen3.5-9b`

    - `vlmdata convert runs/cord --out models/cord`

    - `vlmdata convert runs/cord/checkpoints/step-00000500 --out models/cord --like models/Qwen3.5-9B`

    - `vlmdata convert runs/lora --out adapters/cord`

    - `vlmdata convert runs/lora --out models/cord --merge --like models/Qwen3.5-9B`

    A Hugging Face output folder is complete: AutoProcessor and AutoModelForImageTextToText load it. A run with LoRA
    gives an adapter in PEFT's format, or with --merge such a folder, from the base weights in --like.

    **Exit codes**: 0 done; 2 tensors missing, unexpected or of the wrong shape (all listed), damaged files, or invalid
    paths; 3 the output could not be written. After an error, nothing is left in --out.
    """
    rest = (out, like, data, dtype, ignore_config_field, merge, file_gb, json)
    for attempt in range(_ATTEMPTS):
        newest = newest_checkpoint_in(source)
        if newest is not None:
            typer.echo(f"converting {newest}, the newest checkpoint in {source}", err=True)
        try:
            _convert(newest or source, *rest)
            return
        except Exception as error:
            if newest is None or (newest / ".metadata").exists():
                raise
            # A run that goes on keeps few checkpoints. Its newest one now stays for a while.
            if attempt + 1 == _ATTEMPTS:
                raise ResourceError(
                    f"{newest} was removed by its run while it was converted, and so were {attempt} before it. Keep "
                    "more checkpoints (run.keep), or copy the newest one and convert the copy."
                ) from error
            typer.echo(f"{newest} was removed by its run", err=True)


def _convert(
    source: Path,
    out: Path,
    like: Path | None,
    data: str | None,
    dtype: str | None,
    ignore_config_field: list[str] | None,
    merge: bool,
    file_gb: float,
    json: bool,
) -> None:
    """Converts one checkpoint and prints the result; the options are those of :func:`convert`."""
    # megatron-core takes seconds to import, so check the arguments first.
    to_megatron = _direction(source, out, like, data, dtype)
    from vlmdata.model.parallel.environment import before_megatron

    before_megatron()
    from vlmdata.model.parallel import cpu_mode, groups
    from vlmdata.model.weights import adapter
    from vlmdata.model.weights import convert as conversion

    adapted = adapter.adapted_in(source) is not None
    if merge and not adapted:
        raise VlmdataError(f"--merge is for checkpoints of runs with LoRA, but {source} holds a model's weights")
    if adapted and not merge and (data is not None or dtype is not None):
        raise VlmdataError(
            "--data and --dtype have no effect on an adapter in PEFT's format; leave them out, or --merge"
        )
    begun, ignore = time.perf_counter(), ignore_config_field or ()
    with _bar(source, json) as advance:
        groups.initialize(backend="gloo")
        try:
            with cpu_mode.cpu_mode_if_needed():
                if to_megatron:
                    done = conversion.to_megatron(source, out, advance, ignore)
                else:
                    import torch

                    kind = None if dtype is None else getattr(torch, dtype)
                    rest = kind, int(file_gb * 1e9), advance, ignore, data
                    if merge:
                        done = adapter.merge(source, out, like or adapter.base_folder(source), *rest)
                    elif adapted:
                        done = adapter.to_peft(source, out, None if like is None else str(like))
                    else:
                        done = conversion.to_hf(source, out, like, *rest)
        finally:
            groups.destroy()
    seconds = time.perf_counter() - begun
    form = "megatron" if to_megatron else "peft" if adapted and not merge else "hf"
    if json:
        result = {"source": str(source), "out": str(out), "format": form, **vars(done), "seconds": round(seconds, 2)}
        typer.echo(jsonlib.dumps(result))
        return
    kind_of = {"megatron": "Megatron distributed checkpoint", "hf": "Hugging Face checkpoint", "peft": "PEFT adapter"}[
        form
    ]
    without = "" if done.mtp or form == "peft" else ", without multi-token prediction (the source has none)"
    typer.echo(f"{kind_of} in {out}: {done.tensors:,} tensors, {_size(done.bytes)} in {seconds:.1f} s{without}")
    if done.data is not None:
        typer.echo(f"tokenizer, processor and generation settings from {done.data}")
    for note in done.notes:
        typer.echo(f"note: {note}", err=True)
    if done.unchecked:
        typer.echo(f"{done.unchecked} files of {source} were not checked: they have no checksums", err=True)


def _direction(source: Path, out: Path, like: Path | None, data: str | None, dtype: str | None) -> bool:
    """Returns True if the direction is to Megatron; a VlmdataError if it is unclear, or the options do not fit it."""
    if not source.is_dir():
        raise VlmdataError(
            f"{source} is not a folder; download a checkpoint first: `hf download OWNER/NAME --local-dir DIR`"
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(out)):  # pathlib makes one slash of two
        raise UsageError(
            f"--out {str(out).replace(':/', '://', 1)}: checkpoints are written to local folders. Give one and copy it "
            "there when it is finished."
        )
    if out.exists() and not out.is_dir():
        raise VlmdataError(f"--out {out} is a file. It must be an empty folder, or absent.")
    if out.exists() and any(path.name != TEMPORARY for path in out.iterdir()):
        raise VlmdataError(f"{out} is not empty; choose another --out")
    if dtype is not None and dtype not in _DTYPES:
        raise VlmdataError(f"--dtype {dtype}: choose one of {', '.join(_DTYPES)}")
    if is_distributed(source):
        if like is not None and not (like / "config.json").is_file():
            raise VlmdataError(f"--like {like} is not a folder of a Hugging Face checkpoint: it has no config.json")
        return False
    if not any(source.glob("*.safetensors")):
        raise VlmdataError(
            f"{source} holds neither *.safetensors nor a distributed checkpoint (.metadata), nor checkpoints of a run"
        )
    if like is not None or data is not None or dtype is not None:
        raise VlmdataError(
            "--like, --data and --dtype are for conversion to Hugging Face, but SOURCE is a Hugging Face checkpoint"
        )
    return True


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


@contextmanager
def _bar(source: Path, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar over bytes if on a terminal. Yields the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    total = sum(file.stat().st_size for kind in ("*.safetensors", "*.distcp") for file in source.glob(kind))
    console = Console(stderr=True, emoji=False)
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("convert", total=total)
        yield lambda count: progress.advance(task, count)
