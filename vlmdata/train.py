"""The command ``vlmdata train``: parse, build, loop, close. The parts are in ``model/training``.

With several processes: ``torchrun … -m vlmdata.train``. ``train.py`` at the top of the repository is the same.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from vlmdata.cli.declared_options import option_parameter, with_parameters
from vlmdata.loader.config import loader_options
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.options import documentation

if TYPE_CHECKING:
    from vlmdata.model.kernels.ahead import KernelsAhead

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Options of the loader mean here what they mean there, so their help is the loader's.
_LOADER = loader_options()
#: Options of the command line: the setting of a run that each is, and its help.
_OPTIONS = {
    "data": ("data.paths", "Dataset directory or URL; may be repeated."),
    "preset": ("model.preset", "Model size: tiny, 0.8b, 2b, 9b, …, qwen3-vl-tiny, qwen3-vl-2b, …"),
    "hf": ("model.hf", "Train this Hugging Face checkpoint: folder or hub id."),
    "weights": ("model.weights", "Folder with initial weights. Default: those of --hf, or random."),
    "steps": ("run.steps", "Total number of optimizer steps."),
    "capacity": ("data.capacity", _LOADER["capacity"].summary),
    "global_batch": ("data.global_batch", _LOADER["global_batch"].summary),
    "workers": ("data.workers", _LOADER["num_workers"].summary),
    "tp": ("parallel.tp", _LOADER["tensor_parallel"].summary),
    "sp": ("parallel.sp", _LOADER["sequence_parallel"].summary),
    "cp": ("parallel.cp", _LOADER["context_parallel"].summary),
    "pp": ("parallel.pp", "Pipeline stages."),
    "ep": ("parallel.ep", "Expert parallel size."),
    "freeze": ("model.freeze", "Parts to freeze, such as vision,merger; may be repeated."),
    "lora_rank": ("lora.rank", "Train low-rank adapters of this rank instead of the weights."),
    "lora_alpha": ("lora.alpha", "Their products count alpha / rank. Default: twice the rank."),
    "lora_targets": ("lora.targets", "Groups or names of matrices to adapt, such as attention,mlp. Default: all."),
    "lora_weights": ("lora.weights", "Folder of an adapter in PEFT's format to start from."),
    "lr": ("optimizer.lr", "Peak learning rate."),
    "out": ("run.out", "Folder for logs and checkpoints."),
    "save_every": ("run.save_every", "Steps between checkpoints; 0: only at the end."),
    "eval_data": ("data.eval_paths", "Dataset directory or URL to evaluate on; may be repeated."),
    "eval_every": ("run.eval_every", "Steps between evaluations; 0: only at the end."),
    "keep_best": ("run.keep_best", "Keep the checkpoint with the lowest evaluation loss."),
    "seed": ("run.seed", "Seed of the initial weights."),
}


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds :data:`_OPTIONS` to a command, with the types of their settings. It receives them as ``**settings``."""
    parameters = []
    kinds = {group: get_type_hints(type(settings)) for group, settings in vars(TrainConfig()).items()}
    for name, (setting, meaning) in _OPTIONS.items():
        group, _, key = setting.partition(".")
        kind = kinds[group][key]
        kind = list[str] if get_origin(kind) is tuple else (get_args(kind) or (kind,))[0]
        flag = f"--{name.replace('_', '-')}"
        option: Any = typer.Option(f"{flag}/--no-{flag[2:]}" if kind is bool else flag, help=meaning)
        parameters.append(option_parameter(name, kind, option))
    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "settings"]
    parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    return with_parameters(command, parameters)


@_with_settings
def train(
    config: Annotated[Path | None, typer.Option(help="TOML file; command-line options override it.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: group.name=value.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")] = False,
    **settings: Any,
) -> None:
    """Train Qwen3.5-VL or Qwen3-VL on datasets that `vlmdata preprocess` wrote.

    **Examples**

    - `vlmdata train --data build/demo --preset tiny --steps 50 --capacity 4096 --global-batch 1`

    - `torchrun --nproc-per-node 4 --master-addr 127.0.0.1 -m vlmdata.train --data D --preset tiny --tp 2 --cp 2 --sp`

    - `torchrun --nproc-per-node 8 --master-addr 127.0.0.1 -m vlmdata.train --data D --hf Qwen/Qwen3.5-9B --tp 2 --sp`

    - `torchrun --nproc-per-node 8 --master-addr 127.0.0.1 -m vlmdata.train --data D --hf H --set parallel.fsdp=true`

    - `vlmdata train --data data/cord --hf models/Qwen3.5-9B --lora-rank 16 --lr 2e-4 --out runs/cord`

    - `vlmdata train --config runs/cord/checkpoints/step-00000500/config.toml --resume`

    **Exit codes**: 0 done; 1 another rank or the program failed; 2 invalid option, data or configuration; 3 out of
    space or workers; 4 loss or gradient not finite; 130 or 143 interrupted, with a checkpoint saved.
    """
    try:
        code = _run(config, [*_overrides(settings), *(set_ or [])], resume)
    except Exception as error:
        from vlmdata.model.training.processes.failure import end_process

        end_process(error)
    raise typer.Exit(code)


app.command(help=documentation(train))(train)


def _overrides(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the given options as settings of the run."""
    overrides: list[tuple[str, Any]] = []
    for name, (setting, _) in _OPTIONS.items():
        value = settings[name]
        if value is not None and value not in ([], ()):  # typer passes either for an option that was not given
            parts = (
                [part for each in value for part in each.split(",") if part]
                if name in ("freeze", "lora_targets")
                else value
            )
            overrides.append((setting, parts))
    return overrides


def _run(file: Path | None, overrides: list[str | tuple[str, Any]], resume: bool) -> int:
    """Joins the process group, trains and leaves the group. Returns the exit code."""
    from vlmdata.model.parallel.environment import adopt_slurm_ranks
    from vlmdata.model.training.kernels import compile_ahead
    from vlmdata.model.training.processes.garbage import collected_later
    from vlmdata.model.training.settings.config_loading import load_config
    from vlmdata.model.training.settings.early_checks import check_early

    adopt_slurm_ranks()  # first: only one of several processes must report an error
    config = load_config(file, overrides)
    check_early(config)
    with compile_ahead(config) or contextlib.nullcontext() as kernels, collected_later():
        return _train(config, resume, kernels)


def _train(config: TrainConfig, resume: bool, kernels: KernelsAhead | None) -> int:
    from vlmdata.model.parallel.environment import before_megatron
    from vlmdata.model.training.kernels import needs_compiler
    from vlmdata.model.training.settings.config import ConfigError

    launch_order = not config.parallel.fsdp or config.parallel.tp > 1
    before_megatron(launch_order=launch_order, compiled=needs_compiler(config), open_cuda=True)
    from vlmdata.model.kernels.ahead import hash_triton
    from vlmdata.model.parallel import groups
    from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed
    from vlmdata.model.training.build import device_of_this_process
    from vlmdata.model.training.loop import train as run_steps

    device = device_of_this_process()
    if device.type == "cuda":
        hash_triton()
    with cpu_mode_if_needed():
        try:
            sizes, run = config.parallel.sizes, config.run
            groups.initialize(**sizes, seed=run.seed, timeout_minutes=run.timeout_minutes)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        outcome = run_steps(config, device, resume, kernels)
        groups.destroy()  # all ranks together; a failed rank must not wait for the others
    return 0 if outcome.interrupted_by is None else 128 + outcome.interrupted_by


if __name__ == "__main__":
    app()
