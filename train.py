"""Trains Qwen3.5-VL and Qwen3-VL on packed batches: parse, build, loop, close. The parts are in ``model/training``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdata.loader.config import loader_options

if TYPE_CHECKING:
    from model.kernels.ahead import KernelsAhead
    from model.training.settings.config import TrainConfig

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Options of the loader mean here what they mean there, so their help is the loader's.
_LOADER = loader_options()
#: Command-line options and the configuration fields that they set.
_SETTINGS = {
    "data": "data.paths",
    "capacity": "data.capacity",
    "global_batch": "data.global_batch",
    "workers": "data.workers",
    "eval_data": "data.eval_paths",
    "preset": "model.preset",
    "hf": "model.hf",
    "weights": "model.weights",
    "freeze": "model.freeze",
    "tp": "parallel.tp",
    "sp": "parallel.sp",
    "cp": "parallel.cp",
    "pp": "parallel.pp",
    "ep": "parallel.ep",
    "lr": "optimizer.lr",
    "steps": "run.steps",
    "save_every": "run.save_every",
    "eval_every": "run.eval_every",
    "keep_best": "run.keep_best",
    "out": "run.out",
    "seed": "run.seed",
}


@app.command()
def main(
    context: typer.Context,
    data: Annotated[list[str] | None, typer.Option(help="Dataset directory or URL; may be repeated.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Model size: tiny, 0.8b, 2b, 9b, …, qwen3-vl-tiny, qwen3-vl-2b, …")
    ] = None,
    hf: Annotated[str | None, typer.Option(help="Train this Hugging Face checkpoint: folder or hub id.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Folder with initial weights. Default: those of --hf, or random.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of optimizer steps.")] = None,
    capacity: Annotated[int | None, typer.Option(help=_LOADER["capacity"].summary)] = None,
    global_batch: Annotated[int | None, typer.Option(help=_LOADER["global_batch"].summary)] = None,
    workers: Annotated[int | None, typer.Option(help=_LOADER["num_workers"].summary)] = None,
    tp: Annotated[int | None, typer.Option(help=_LOADER["tensor_parallel"].summary)] = None,
    sp: Annotated[bool | None, typer.Option("--sp/--no-sp", help=_LOADER["sequence_parallel"].summary)] = None,
    cp: Annotated[int | None, typer.Option(help=_LOADER["context_parallel"].summary)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallel size.")] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(help="Parts to freeze, such as vision,merger; may be repeated.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for logs and checkpoints.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = None,
    eval_data: Annotated[
        list[str] | None, typer.Option(help="Dataset directory or URL to evaluate on; may be repeated.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations; 0: only at the end.")] = None,
    keep_best: Annotated[
        bool | None,
        typer.Option("--keep-best/--no-keep-best", help="Keep the checkpoint with the lowest evaluation loss."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the initial weights.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; command-line options override it.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: group.name=value.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")] = False,
) -> None:
    """Train Qwen3.5-VL or Qwen3-VL on datasets that `vlmdata preprocess` wrote.

    **Examples**

    - `python train.py --data build/demo --preset tiny --steps 50 --capacity 4096 --global-batch 1`

    - `torchrun --nproc-per-node 4 --master-addr 127.0.0.1 train.py --data build/demo --preset tiny --tp 2 --cp 2 --sp`

    - `torchrun --nproc-per-node 8 --master-addr 127.0.0.1 train.py --data data/cord --hf Qwen/Qwen3.5-9B --tp 2 --sp`

    - `torchrun --nproc-per-node 8 --master-addr 127.0.0.1 train.py --data D --preset 9b --set parallel.fsdp=true`

    - `torchrun --nproc-per-node 8 --master-addr 127.0.0.1 train.py --data D --preset 9b --set parallel.vision_gpus=4`

    - `python train.py --config runs/cord/checkpoints/step-00000500/config.toml --resume`

    **Exit codes**: 0 done; 1 another rank or the program failed; 2 invalid option, data or configuration; 3 out of
    space or workers; 4 loss or gradient not finite; 130 or 143 interrupted, with a checkpoint saved.
    """
    overrides: list[str | tuple[str, Any]] = []
    for name, setting in _SETTINGS.items():
        value = context.params[name]
        if value is not None and value not in ([], ()):  # typer passes either for an option that was not given
            parts = [part for each in value for part in each.split(",") if part] if name == "freeze" else value
            overrides.append((setting, parts))
    raise typer.Exit(_run(config, [*overrides, *(set_ or [])], resume))


def _run(file: Path | None, overrides: list[str | tuple[str, Any]], resume: bool) -> int:
    """Joins the process group, trains and leaves the group. Returns the exit code."""
    from model.parallel.environment import adopt_slurm_ranks
    from model.training.kernels import compile_ahead
    from model.training.processes.garbage import collected_later
    from model.training.settings.config_loading import load_config
    from model.training.settings.early_checks import check_early

    adopt_slurm_ranks()  # first: only one of several processes must report an error
    config = load_config(file, overrides)
    check_early(config)
    with compile_ahead(config) or contextlib.nullcontext() as kernels, collected_later():
        return _train(config, resume, kernels)


def _train(config: TrainConfig, resume: bool, kernels: KernelsAhead | None) -> int:
    from model.parallel.environment import before_megatron
    from model.training.kernels import needs_compiler
    from model.training.settings.config import ConfigError

    launch_order = not config.parallel.fsdp or config.parallel.tp > 1
    before_megatron(launch_order=launch_order, compiled=needs_compiler(config), open_cuda=True)
    from model.kernels.ahead import hash_triton
    from model.parallel import groups
    from model.parallel.cpu_mode import cpu_mode_if_needed
    from model.training.build import device_of_this_process
    from model.training.loop import train

    device, parallel = device_of_this_process(), config.parallel
    if device.type == "cuda":
        hash_triton()
    with cpu_mode_if_needed():
        try:
            groups.initialize(
                tensor=parallel.tp,
                context=parallel.cp,
                pipeline=parallel.pp,
                expert=parallel.ep,
                vision=parallel.vision_gpus,
                vision_tensor=parallel.vision_tp or 1,
                seed=config.run.seed,
                timeout_minutes=config.run.timeout_minutes,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        outcome = train(config, device, resume, kernels)
        groups.destroy()  # all ranks together; a failed rank must not wait for the others
    return 0 if outcome.interrupted_by is None else 128 + outcome.interrupted_by


if __name__ == "__main__":
    try:
        app()
    except Exception as error:
        from model.training.processes.failure import end_process

        end_process(error)
