"""Settings of a training run, in six groups.

:mod:`vlmdata.model.training.settings.config_loading` reads and checks them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

from vlmdata.differences import ABSENT, differing
from vlmdata.errors import VlmdataError
from vlmdata.loader.config import DEFAULT_CAPACITY, Packing, Parallelism, Reading, Service
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.network.settings import ModelOptions
from vlmdata.options import OptionHelp

#: The value of ``model.weights`` for random initial weights.
NO_WEIGHTS = "none"


class ConfigError(VlmdataError):
    """A setting is unknown, of the wrong type, or out of range."""


#: Options of the loader (:class:`vlmdata.LoaderConfig`) that are settings of a run by the same name.
OF_THE_LOADER = (
    "max_patches",
    "pad_multiple",
    "shuffle_window",
    "balance",
    "seed",
    "verify",
    "on_damage",
    "max_damaged",
    "timeout",
    "fetch",
    "cache_dir",
    "hedge",
    "service_token_file",
    "service_insecure",
    "tls_ca",
    "tls_cert",
    "tls_key",
)


def _with_loader_options[Config: type](config: Config) -> Config:
    """Adds the options :data:`OF_THE_LOADER` as fields, with the loader's types and defaults."""
    for group in (Packing, Reading, Service):
        types = get_type_hints(group, include_extras=True)
        for name in OF_THE_LOADER:
            if name in types:
                config.__annotations__[name] = types[name]
                setattr(config, name, getattr(group, name))
    return config


@dataclass(frozen=True)
@_with_loader_options
class DataConfig:
    """The data and how it is packed, with the options :data:`OF_THE_LOADER`.

    The trainer's own defaults are these four: ``capacity`` and ``global_batch``, which the loader must be given;
    ``workers``, since a step should not wait for its data; and ``pad_to_capacity``, which depends on the device.
    """

    paths: Annotated[
        tuple[str, ...],
        ("Dataset directories or URLs, or a mixture file (``.toml``), or a collation service (``grpc://host:8815``)."),
    ] = ()
    blend: Annotated[
        tuple[float, ...], "A weight for each dataset, such as [0.7, 0.3]; empty means one pass over each per epoch."
    ] = ()
    blend_by: Annotated[
        Literal["tokens", "samples", "targets", "epochs"],
        (
            'Meaning of the weights: shares of an epoch\'s "tokens", "samples" or "targets", in any scale, or passes '
            'over each dataset per epoch ("epochs", such as [1, 2.5]).'
        ),
    ] = "tokens"
    change: Annotated[
        bool,
        (
            "Whether a resumed run may have other data, blend, seed or packs than its checkpoint. It then changes "
            "there, between two steps, and repeats and skips no sample."
        ),
    ] = False
    capacity: Annotated[int, OptionHelp("Largest number of tokens in a pack.", least=1)] = DEFAULT_CAPACITY
    global_batch: Annotated[int, OptionHelp("Packs per optimizer step.", least=1)] = 8
    pad_to_capacity: Annotated[
        bool | None,
        (
            "Make all packs equally long. Unset means only with CUDA, where some kernels are compiled and tuned per "
            "length (flash-linear-attention's convolution: seconds for each new multiple of 1,024 tokens)."
        ),
    ] = None
    workers: Annotated[int, OptionHelp("Loader processes per rank: the loader's ``num_workers``.", least=0)] = 2
    eval_paths: Annotated[tuple[str, ...], "Dataset directories or URLs to evaluate on; each has its own loss."] = ()

    @property
    def loader_options(self) -> dict[str, Any]:
        """The options :data:`OF_THE_LOADER` by name."""
        return {name: getattr(self, name) for name in OF_THE_LOADER}


@dataclass(frozen=True)
class ModelConfig(ModelOptions):
    """The model, with the options of :class:`~vlmdata.model.network.settings.ModelOptions`."""

    preset: Annotated[str, "Name of a size in :func:`vlmdata.model.families.presets`; ignored with ``hf``."] = "tiny"
    hf: Annotated[
        str | None, "Folder, ``config.json`` or hub id of a Hugging Face checkpoint whose architecture is built."
    ] = None
    ignore_config_fields: Annotated[
        tuple[str, ...], "Unknown fields of that ``config.json`` to ignore, if harmless."
    ] = ()
    weights: Annotated[
        str | None,
        (
            "Folder of initial weights: a Hugging Face checkpoint, the output of ``vlmdata convert``, or a run's "
            'checkpoint. Unset means those of ``hf``, or random without ``hf``. "none" means random weights.'
        ),
    ] = None
    backend: Annotated[
        Literal["auto", "torch", "transformer_engine"],
        '"transformer_engine", "torch", or "auto": Transformer Engine with CUDA, else torch.',
    ] = "auto"
    mtp: Annotated[bool | None, "Train multi-token prediction; unset means if the architecture has it."] = None
    freeze: Annotated[tuple[str, ...], 'Parts to freeze: any of "vision", "merger", "language".'] = ()


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is split over processes. The rest of the world size is data parallel."""

    tp: Annotated[int, OptionHelp("Tensor parallel size.", least=1)] = Parallelism.tensor_parallel
    vision_gpus: Annotated[
        int,
        OptionHelp(
            "Processes that hold the vision tower and nothing else: the first ones. The others hold the language "
            "model, in the layout of the other settings. 0: all processes share one layout.",
            least=0,
        ),
    ] = 0
    vision_ahead: Annotated[
        int,
        OptionHelp(
            "With ``vision_gpus``, micro-batches that the tower encodes ahead of those in the language model's "
            "pipeline stages. More hide uneven images, and take memory.",
            least=0,
        ),
    ] = 1
    vision_tp: Annotated[
        int | None,
        OptionHelp(
            "Tensor parallel size of the vision tower: unset means ``tp``; with 1, each of these ranks encodes some "
            "of the images. With ``vision_gpus``: any divisor of it; unset means 1.",
            least=1,
        ),
    ] = None
    sp: Annotated[
        bool, "Sequence parallelism, off by default as in the loader; experts with tensor parallelism need it."
    ] = False
    cp: Annotated[int, OptionHelp("Context parallel size.", least=1)] = Parallelism.context_parallel
    pp: Annotated[int, OptionHelp("Pipeline stages.", least=1)] = 1
    ep: Annotated[int, OptionHelp("Expert parallel size.", least=1)] = 1
    fsdp: Annotated[
        bool,
        (
            "Shard weights, gradients and optimizer state fully over the ranks of data and context parallelism, and "
            "gather the weights of a layer right before it is computed."
        ),
    ] = False
    cp_comm: Annotated[
        Literal["p2p", "all_gather", "a2a", "a2a+p2p"],
        "Communication of context-parallel attention (Transformer Engine).",
    ] = "p2p"

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by their names in :mod:`vlmdata.model.parallel`."""
        language = {"tensor": self.tp, "context": self.cp, "pipeline": self.pp, "expert": self.ep}
        return language | {"vision": self.vision_gpus, "vision_tensor": self.vision_tp or 1}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up."""

    lr: Annotated[float, OptionHelp("Peak learning rate.", least=0)] = 1e-4
    min_lr: Annotated[
        float | None, OptionHelp("Learning rate at the end of the decay; unset means a tenth of ``lr``.", least=0)
    ] = None
    warmup_steps: Annotated[
        int | None,
        OptionHelp(
            "Linear warm-up steps W; step k trains with k / (W + 1) of the peak. Unset means a tenth of the steps, at "
            "most 10.",
            least=0,
        ),
    ] = None
    decay_steps: Annotated[
        int | None, OptionHelp("Steps until ``min_lr``, including warm-up; unset means all steps of the run.", least=1)
    ] = None
    schedule: Annotated[Literal["cosine", "linear", "constant"], "Shape of the decay."] = "cosine"
    weight_decay: Annotated[float, OptionHelp("Decoupled weight decay, applied to matrices only.", least=0)] = 0.1
    beta1: Annotated[float, OptionHelp("Adam's first decay rate.", least=0, below=1)] = 0.9
    beta2: Annotated[float, OptionHelp("Adam's second decay rate.", least=0, below=1)] = 0.95
    eps: Annotated[float, OptionHelp("Adam's epsilon.", least=0)] = 1e-8
    clip_grad: Annotated[float, OptionHelp("Largest gradient norm; 0 disables clipping.", least=0)] = 1.0
    distributed: Annotated[
        bool | None, "Split the optimizer state over data-parallel ranks; unset means only with CUDA."
    ] = None
    overlap: Annotated[
        bool | None, "Reduce gradients during the backward pass; unset means only with CUDA and several replicas."
    ] = None
    moments: Annotated[
        Literal["fp32", "bf16"], 'Type of Adam\'s moments, "fp32" or "bf16"; the latter needs ``parallel.fsdp``.'
    ] = "fp32"
    offload: Annotated[bool, "Keep Adam's moments in host memory, with ``parallel.fsdp``."] = False

    @property
    def last_lr(self) -> float:
        """Learning rate at the end of the decay."""
        return self.lr / 10 if self.min_lr is None else self.min_lr


@dataclass(frozen=True)
class RunConfig:
    """Length, outputs and precision of the run."""

    out: Annotated[str, "Folder for logs and checkpoints."] = "runs/default"
    steps: Annotated[int, OptionHelp("Total number of optimizer steps, across resumes.", least=1)] = 100
    seed: Annotated[int, "Seed of the initial weights."] = 1234
    precision: Annotated[Literal["auto", "fp32", "bf16"], '"fp32", "bf16", or "auto": bf16 with CUDA, else fp32.'] = (
        "auto"
    )
    fp8: Annotated[
        bool, "Compute matrix products in FP8, E4M3 forward and E5M2 backward (Transformer Engine only)."
    ] = False
    fp8_recipe: Annotated[
        Literal["tensorwise", "delayed", "blockwise"],
        (
            'FP8 scaling: of whole tensors by their current range ("tensorwise") or by that of earlier steps '
            '("delayed"; not saved in checkpoints), or of blocks ("blockwise").'
        ),
    ] = "tensorwise"
    save_every: Annotated[int, OptionHelp("Steps between checkpoints; 0 saves only at the end.", least=0)] = 0
    keep: Annotated[int, OptionHelp("Number of newest checkpoints to keep; 0 keeps all.", least=0)] = 2
    eval_every: Annotated[
        int, OptionHelp("Steps between evaluations, starting before step 1; 0 evaluates only at the end.", least=0)
    ] = 0
    keep_best: Annotated[
        bool,
        (
            "Keep the checkpoint with the lowest evaluation loss. An evaluation with a new lowest loss saves a "
            "checkpoint."
        ),
    ] = False
    async_save: Annotated[
        bool | None,
        "Write checkpoints in the background; unset means only with CUDA, and without ``optimizer.offload``.",
    ] = None
    verify: Annotated[bool, "Compare a checkpoint with its checksums before loading it."] = True
    tensorboard: Annotated[bool, "Write TensorBoard files."] = True
    wandb: Annotated[str | None, "Weights & Biases project to log to."] = None
    profile: Annotated[
        tuple[int, ...], "First and last step to profile, such as [10, 12]; empty disables profiling."
    ] = ()
    timeout_minutes: Annotated[
        float, OptionHelp("The job ends if a rank does not respond for this long.", above=0, unit="minutes")
    ] = 10.0


#: Settings that change neither the computation nor its order.
WITHOUT_EFFECT_ON_RESULTS = frozenset(
    [f"data.{name}" for name in OF_THE_LOADER if not hasattr(Packing, name)]
    + [
        "data.workers",
        "data.eval_paths",
        "model.ignore_config_fields",
        "parallel.vision_ahead",
        "run.out",
        "run.save_every",
        "run.keep",
        "run.eval_every",
        "run.keep_best",
        "run.async_save",
        "run.verify",
        "run.tensorboard",
        "run.wandb",
        "run.profile",
        "run.timeout_minutes",
    ]
)


#: Settings that decide which parameters are trained. A checkpoint's optimizer state fits only runs that agree in them.
DECIDE_WHAT_IS_TRAINED = (
    "model.freeze",
    "model.mtp",
    "model.language_only",
    *(f"lora.{each.name}" for each in dataclasses.fields(LoraOptions) if each.name not in ("dropout", "weights")),
)


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraOptions = field(default_factory=LoraOptions)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def decay_steps(self) -> int:
        """Steps until the last learning rate, including warm-up."""
        return self.optimizer.decay_steps or self.run.steps

    @property
    def warmup_steps(self) -> int:
        """Warm-up steps."""
        given = self.optimizer.warmup_steps
        return min(10, self.decay_steps // 10) if given is None else given

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """Parts of the model whose own weights are not trained: any of "vision", "merger", "language"."""
        if self.lora.rank is None:
            return self.model.freeze
        return tuple(part for part in ("vision", "merger", "language") if part not in self.lora.full_parts)

    @property
    def trains_tower(self) -> bool:
        """Whether anything in the vision tower or its mergers is trained."""
        return not {"vision", "merger"} <= set(self.frozen_parts) - set(self.adapted_parts)

    @property
    def adapted_parts(self) -> tuple[str, ...]:
        """Parts of the model that have adapters."""
        return () if self.lora.rank is None else self.lora.adapted_parts

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the groups as JSON-compatible dictionaries, with lists for tuples."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    def hash(self) -> str:
        """Returns the first 16 hex digits of the SHA-256 of the canonical JSON of settings that affect results.

        Runs that differ only in :data:`WITHOUT_EFFECT_ON_RESULTS` have equal hashes: folder, logs, checkpoint intervals
        and the way data is read. Layout and back end are included, since they change results by rounding. Paths are
        included too: for data, a ``config.json`` and weights, only the path is hashed, not the content.
        """
        settings = {name: each for name, each in flattened(self.to_dict()) if name not in WITHOUT_EFFECT_ON_RESULTS}
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """Returns the configuration as TOML, from which ``load_config`` restores an equal one."""
        import tomli_w

        groups = {name: {k: v for k, v in group.items() if v is not None} for name, group in self.to_dict().items()}
        return f"# configuration {self.hash()}\n" + tomli_w.dumps(groups)


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lists the differences of two nested dictionaries, as ``data.capacity: 8192 -> 4096``."""
    return [
        f"{name}: {_change(*(None if each is ABSENT else each for each in both))}"
        for name, *both in differing(old, new)
    ]


def flattened(groups: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields pairs of ``group.name`` and value, at any depth."""
    for name, value in groups.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _change(old: Any, new: Any) -> str:
    """Formats a change. Shortens long lists to their ends, such as the kinds of 64 layers, if those differ."""
    ends = [
        f"[{each[0]}, …, {each[-1]}] ({len(each)})" if isinstance(each, list | tuple) and len(each) > 8 else str(each)
        for each in (old, new)
    ]
    return " -> ".join(ends) if ends[0] != ends[1] else f"{old} -> {new}"
