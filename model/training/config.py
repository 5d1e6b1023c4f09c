"""What a training run is told: five groups of settings. :mod:`model.training.config_loading` reads and checks them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmdata.differences import ABSENT, differing
from vlmdata.errors import VlmdataError
from vlmdata.loader.config import DEFAULT_CAPACITY, Packing, Reading

#: The value of ``model.weights`` that means random ones.
NO_WEIGHTS = "none"


class ConfigError(VlmdataError):
    """A setting is unknown, of the wrong type, or out of range."""


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how it is packed.

    Settings named as options of the loader (:class:`vlmdata.LoaderConfig`) mean the same and have the same defaults.

    Attributes:
        paths: Dataset directories or URLs.
        blend: A weight for each of them, such as [0.7, 0.3]; empty is one pass over each per epoch.
        blend_by: What weights mean: shares of an epoch's "tokens" or "samples", in any scale, or passes over each
            dataset per epoch ("epochs", such as [1, 2.5]).
        capacity: As the loader's, like the next two.
        global_batch: Packs per optimizer step.
        max_patches: Most vision patches in a pack.
        pad_to_capacity: Packs of equal length; none means where there is CUDA, since some kernels are compiled and
            tuned for the length (flash-linear-attention's convolution: seconds for every 1,024 tokens more or less).
        pad_multiple: Samples are padded to a multiple of this, beside what the layout needs. With one that suits every
            layout (16, say) all of them train on the same packs, so that runs may be compared or moved.
        shuffle_window: As the loader's, like ``balance``, ``seed``, ``verify``, ``timeout`` and ``cache_dir``.
        balance: Whether packs are spread over ranks by cost.
        seed: Of packing and order.
        workers: Loader processes per rank (the loader's ``num_workers``).
        verify: Whether checksums are checked.
        timeout: Seconds to wait for a batch.
        cache_dir: Folder for shards of remote datasets.
        eval_paths: Dataset directories or URLs of evaluation; each has a loss of its own.
    """

    paths: tuple[str, ...] = ()
    blend: tuple[float, ...] = ()
    blend_by: Literal["tokens", "samples", "epochs"] = "tokens"
    capacity: int = DEFAULT_CAPACITY
    global_batch: int = 8
    max_patches: int | None = Packing.max_patches
    pad_to_capacity: bool | None = None
    pad_multiple: int = Packing.pad_multiple
    shuffle_window: int | None = Packing.shuffle_window
    balance: bool = Packing.balance
    seed: int = Packing.seed
    workers: int = 2
    verify: bool = Reading.verify
    timeout: float = Reading.timeout
    cache_dir: str | None = None
    eval_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Which model.

    Attributes:
        preset: Name of a size in :func:`model.families.presets`; ignored with ``hf``.
        hf: Folder, ``config.json`` or hub id of a Hugging Face checkpoint whose architecture is built.
        ignore_config_fields: Fields of that ``config.json`` that are unknown here, but harmless.
        weights: Folder of the weights to start from: a Hugging Face checkpoint, what ``vlmdata convert`` made, or a
            run's checkpoint. Unset, they are those of ``hf``, and random without ``hf``. The word "none" starts from
            random weights.
        backend: "transformer_engine", "torch", or "auto": Transformer Engine where there is CUDA.
        mtp: Whether multi-token prediction is trained; none means as the architecture has it.
        mtp_loss_scale: Weight of its loss.
        moe_aux_loss: Weight of the load-balancing loss; none means the architecture's.
        freeze: Parts that are not trained: of "vision", "merger", "language".
        recompute: Activations of the language model made again in the backward pass: "none", "selective", "full".
        vision_recompute: The same for all vision blocks.
        vision_attention: With Transformer Engine, what attends in the vision tower: "transformer_engine",
            "flash_attention_4" (package flash-attn-4), or "auto": the latter where it is installed.
    """

    preset: str = "tiny"
    hf: str | None = None
    ignore_config_fields: tuple[str, ...] = ()
    weights: str | None = None
    backend: Literal["auto", "torch", "transformer_engine"] = "auto"
    mtp: bool | None = None
    mtp_loss_scale: float = 0.1
    moe_aux_loss: float | None = None
    freeze: tuple[str, ...] = ()
    recompute: Literal["none", "selective", "full"] = "none"
    vision_recompute: bool = False
    vision_attention: Literal["auto", "transformer_engine", "flash_attention_4"] = "auto"


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread; what is left of the world size is data parallel.

    Attributes:
        tp: Tensor parallel size.
        vision_tp: The same of the vision tower: none is ``tp``; 1 has each of these ranks encode some of the images.
        sp: Sequence parallelism; experts with tensor parallelism need it.
        cp: Context parallel size.
        pp: Pipeline stages.
        ep: Expert parallel size.
        cp_comm: How context-parallel attention talks (Transformer Engine).
    """

    tp: int = 1
    vision_tp: int | None = None
    sp: bool = False
    cp: int = 1
    pp: int = 1
    ep: int = 1
    cp_comm: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up.

    Attributes:
        lr: Peak learning rate.
        min_lr: Learning rate at the end of the decay; none means a tenth of ``lr``.
        warmup_steps: Steps W of linear warm-up, of which step k trains with k / (W + 1) of the peak; none means a tenth
            of the steps, 10 at most.
        decay_steps: Steps until ``min_lr``, warm-up included; none means all steps of the run.
        schedule: Shape of the decay.
        weight_decay: Decoupled weight decay, of matrices only.
        beta1: Adam's first decay.
        beta2: Adam's second decay.
        eps: Adam's epsilon.
        clip_grad: Largest gradient norm; 0 clips nothing.
        distributed: Optimizer state spread over data-parallel ranks; none means where there is CUDA.
        overlap: Gradient reduction while the backward pass runs; none means where there is CUDA.
    """

    lr: float = 1e-4
    min_lr: float | None = None
    warmup_steps: int | None = None
    decay_steps: int | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool | None = None
    overlap: bool | None = None

    @property
    def last_lr(self) -> float:
        """Learning rate at the end of the decay."""
        return self.lr / 10 if self.min_lr is None else self.min_lr


@dataclass(frozen=True)
class RunConfig:
    """The run itself.

    Attributes:
        out: Folder of logs and checkpoints.
        steps: Optimizer steps in all, over every resume.
        seed: Of the initial weights.
        precision: "fp32", "bf16", or "auto": bf16 where there is CUDA.
        fp8: Matrix products in FP8, E4M3 forward and E5M2 backward (Transformer Engine only).
        fp8_recipe: Scaling of FP8: of whole tensors by their present range ("tensorwise") or by that of earlier steps
            ("delayed", which is not kept in checkpoints), or of blocks ("blockwise").
        save_every: Steps between checkpoints; 0 saves at the end only.
        keep: Newest checkpoints that are kept; 0 keeps all.
        eval_every: Steps between evaluations, the first of which comes before step 1; 0 evaluates at the end only.
        keep_best: Whether the checkpoint with the lowest evaluation loss is kept. An evaluation that finds a lower loss
            than all before saves one.
        async_save: Checkpoints written in the background; none means where there is CUDA.
        verify: Whether a checkpoint is compared with its checksums before it is loaded.
        tensorboard: Whether TensorBoard files are written.
        wandb: Weights & Biases project to log to.
        profile: First and last step of a profile, such as [10, 12]; empty is none.
        timeout_minutes: After so long without an answer from a rank the job ends.
    """

    out: str = "runs/default"
    steps: int = 100
    seed: int = 1234
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    fp8: bool = False
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise"] = "tensorwise"
    save_every: int = 0
    keep: int = 2
    eval_every: int = 0
    keep_best: bool = False
    async_save: bool | None = None
    verify: bool = True
    tensorboard: bool = True
    wandb: str | None = None
    profile: tuple[int, ...] = ()
    timeout_minutes: float = 10.0


#: Settings that change neither what is computed nor in which order.
WITHOUT_EFFECT_ON_RESULTS = frozenset(
    [
        "data.workers",
        "data.verify",
        "data.timeout",
        "data.cache_dir",
        "data.eval_paths",
        "model.ignore_config_fields",
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


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def decay_steps(self) -> int:
        """Steps until the last learning rate, warm-up included."""
        return self.optimizer.decay_steps or self.run.steps

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up."""
        given = self.optimizer.warmup_steps
        return min(10, self.decay_steps // 10) if given is None else given

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """JSON-able groups; tuples are lists."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON of what has an effect on results.

        Equal for two runs that differ in :data:`WITHOUT_EFFECT_ON_RESULTS` only: in folder, logs, when checkpoints are
        made, and how data is fetched. Layout and back end, which change results by rounding, are in it, and so are
        paths: of the data, a ``config.json`` and weights it knows no more than the name.
        """
        settings = {name: each for name, each in flattened(self.to_dict()) if name not in WITHOUT_EFFECT_ON_RESULTS}
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The configuration as TOML, of which ``load_config`` makes an equal one again."""
        import tomli_w

        groups = {name: {k: v for k, v in group.items() if v is not None} for name, group in self.to_dict().items()}
        return f"# configuration {self.hash()}\n" + tomli_w.dumps(groups)


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines ``data.capacity: 8192 -> 4096`` for what differs between two dictionaries of any depth."""
    return [
        f"{name}: {_change(*(None if each is ABSENT else each for each in both))}"
        for name, *both in differing(old, new)
    ]


def flattened(groups: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of ``group.name`` and value, however deep they are."""
    for name, value in groups.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _change(old: Any, new: Any) -> str:
    """Long lists by their ends, such as the kinds of 64 layers, if these tell the difference."""
    ends = [
        f"[{each[0]}, …, {each[-1]}] ({len(each)})" if isinstance(each, list | tuple) and len(each) > 8 else str(each)
        for each in (old, new)
    ]
    return " -> ".join(ends) if ends[0] != ends[1] else f"{old} -> {new}"
