"""``vlmdata convert``: the command."""

from __future__ import annotations

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from vlmdata.errors import VlmdataError

_DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint, or a Megatron checkpoint.")],
    out: Annotated[Path, typer.Option(help="Where the converted checkpoint goes; must be empty or absent.")],
    like: Annotated[
        Path | None,
        typer.Option(help="To Hugging Face: keep config, tokenizer, processor and other small files of this folder."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="To Hugging Face: dataset to write tokenizer, processor and generation settings from; default: the "
            "files of --like, or else the dataset that the run was trained on."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="To Hugging Face: float32, bfloat16 or float16; default: as stored.")
    ] = None,
    ignore_config_field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Field of a config.json that is unknown here, but harmless; may be repeated."
        ),
    ] = None,
    file_gb: Annotated[float, typer.Option(help="To Hugging Face: most gigabytes in a file.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert weights: Hugging Face safetensors to a Megatron distributed checkpoint, or back.

    The direction follows from SOURCE. A distributed checkpoint serves every tensor, pipeline and expert parallel size,
    so there is nothing to choose. Values only change places, so the round trip is exact. One tensor is in memory at a
    time.

    **Examples**

        vlmdata convert models/Qwen3.5-9B --out weights/qwen3.5-9b

        torchrun --nproc-per-node 8 train.py --data data/cord --hf models/Qwen3.5-9B --weights weights/qwen3.5-9b

        vlmdata convert runs/cord/checkpoints/step-00000500 --out models/cord

        vlmdata convert runs/cord/checkpoints/step-00000500 --out models/cord --like models/Qwen3.5-9B

    To Hugging Face, the folder is complete: AutoProcessor, AutoModelForImageTextToText and generate load it.

    Exit codes: 0 done; 2 tensors are missing, unexpected or mis-shaped (all are listed), or wrong paths.
    """
    # Megatron-core takes seconds to import: only once the arguments are known to make sense.
    to_megatron = _direction(source, out, like, data, dtype)
    from model.parallel.environment import before_megatron

    before_megatron()
    from model.parallel import cpu_mode, groups
    from model.weights import convert as conversion

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
                    done = conversion.to_hf(source, out, like, kind, int(file_gb * 1e9), advance, ignore, data)
        finally:
            groups.destroy()
    seconds = time.perf_counter() - begun
    kind_of = "Megatron distributed checkpoint" if to_megatron else "Hugging Face checkpoint"
    if json:
        result: dict[str, Any] = {"out": str(out), "format": "megatron" if to_megatron else "hf", **vars(done)}
        typer.echo(jsonlib.dumps({**result, "seconds": round(seconds, 2)}))
        return
    without = "" if done.mtp else ", without multi-token prediction (the source has none)"
    typer.echo(f"{kind_of} in {out}: {done.tensors:,} tensors, {_size(done.bytes)} in {seconds:.1f} s{without}")
    if done.data is not None:
        typer.echo(f"tokenizer, processor and generation settings from {done.data}")
    for note in done.notes:
        typer.echo(f"note: {note}", err=True)
    if done.unchecked:
        typer.echo(f"{done.unchecked} files of {source} have no checksums and were not checked", err=True)


def _direction(source: Path, out: Path, like: Path | None, data: str | None, dtype: str | None) -> bool:
    """Whether it goes to Megatron.

    Raises:
        VlmdataError: If that cannot be told, or the options do not fit it.
    """
    if not source.is_dir():
        raise VlmdataError(
            f"{source} is not a folder; download a checkpoint first: `hf download OWNER/NAME --local-dir DIR`"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise VlmdataError(f"{out} is not empty; choose another --out")
    if dtype is not None and dtype not in _DTYPES:
        raise VlmdataError(f"--dtype {dtype}: choose one of {', '.join(_DTYPES)}")
    if (source / ".metadata").exists():
        if like is not None and not (like / "config.json").is_file():
            raise VlmdataError(f"--like {like} is not a folder of a Hugging Face checkpoint: it has no config.json")
        return False
    if not any(source.glob("*.safetensors")):
        raise VlmdataError(
            f"{source} holds neither *.safetensors nor a distributed checkpoint (.metadata){_within(source)}"
        )
    if like is not None or data is not None or dtype is not None:
        raise VlmdataError(
            "--like, --data and --dtype are for the way to Hugging Face; SOURCE is a Hugging Face checkpoint"
        )
    return True


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def _within(folder: Path) -> str:
    """The newest checkpoint of a run's folder, or of the one in it, for who names these."""
    found = sorted(each.parent for each in [*folder.glob("step-*/.metadata"), *folder.glob("*/step-*/.metadata")])
    return f"; {found[-1]} is one" if found else ""


def _bar(source: Path, quiet: bool) -> Any:
    """A progress bar over bytes on a terminal, nothing elsewhere; gives the function that moves it."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    @contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        with Progress(
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        ) as progress:
            task = progress.add_task("convert", total=_weight_bytes(source))
            yield lambda count: progress.advance(task, count)

    return shown()


def _weight_bytes(source: Path) -> int:
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.distcp") for file in source.glob(pattern))
