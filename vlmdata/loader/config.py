"""Every option of the loader: its name, meaning, default and limits. Commands and trainers take them from here."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Any

from vlmdata.alignment import alignment
from vlmdata.errors import UsageError
from vlmdata.packing.config import Blend, LastStep, PlanConfig
from vlmdata.packing.cost import DEFAULT_COST, CostModel, cost_model

if TYPE_CHECKING:
    import torch

#: What a rank may need of a batch.
PARTS = ("tokens", "labels", "pixels")
#: Capacity for callers that need one and were given none.
DEFAULT_CAPACITY = 8192


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Decides what a pack and an optimizer step are.

    Attributes:
        capacity: Largest number of tokens in a pack, padding included.
        global_batch: Packs per optimizer step over all data-parallel ranks.
        max_patches: Most vision patches in a pack; None is no limit.
        pad_to_capacity: Whether every pack has exactly ``capacity`` tokens.
        pad_multiple: Multiple of tokens that every sample is padded to, in addition to what the layout needs (16 for
            FP8).
        last: The incomplete last step of an epoch: "pad" fills it up with empty packs, "keep" makes it shorter, "drop"
            leaves it out.
        shuffle_window: Shards packed and shuffled together; None is all.
        seed: Seed of packing and order.
        blend: Shares of several datasets; None is one pass over each per epoch.
        balance: Whether packs are spread over ranks by estimated cost.
        cost: Cost model, or the name of a model size such as 0.8b, 2b, 4b, 9b or 27b.
    """

    capacity: int
    global_batch: int
    max_patches: int | None = None
    pad_to_capacity: bool = False
    pad_multiple: int = 1
    last: LastStep = "pad"
    shuffle_window: int | None = None
    seed: int = 0
    blend: Blend | None = None
    balance: bool = True
    cost: CostModel | str = DEFAULT_COST


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Says how ranks share the packs, and which of them this is.

    Attributes:
        dp_rank: This data-parallel rank.
        dp_size: Data-parallel ranks. If neither this nor ``dp_rank`` is given, every process of the
            ``torch.distributed`` group (before there is one: of torchrun's ``RANK`` and ``WORLD_SIZE``) is a rank.
        context_parallel: Context-parallel size: samples are padded so that it divides them.
        context_parallel_rank: Yield this rank's slice, reading only the images it encodes; None yields whole packs.
        tensor_parallel: Tensor-parallel size; samples are padded for it under sequence parallelism.
        sequence_parallel: Whether tensor-parallel ranks share the tokens between layers (sequence parallelism). None is
            off, as in Megatron-LM.
    """

    dp_rank: int | None = None
    dp_size: int | None = None
    context_parallel: int = 1
    context_parallel_rank: int | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        rank, size = self.context_parallel_rank, self.context_parallel
        if rank is not None and not 0 <= rank < size:
            raise UsageError(f"context_parallel_rank {rank} of context_parallel {size}: ranks count from 0")
        if self.tensor_parallel > 1 and self.sequence_parallel is None and not self.dp_rank:
            _warn_that_sequence_parallel_is_off()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Says how batches are read. Changes no batch.

    Attributes:
        parts: Of "tokens", "labels", "pixels": what this rank needs. A middle pipeline stage takes none.
        num_workers: Worker processes; 0 makes batches in this process, when they are asked for.
        prefetch_factor: Batches under way per worker.
        timeout: Seconds to wait for a batch before a stuck worker is an error. A killed worker is noticed after 5 s and
            replaced, unless this is less.
        verify: Whether everything read is checked against its checksum.
        device: CUDA device that batches are copied to in the background, one ahead; None leaves them on the host.
        cache_dir: Folder for shards of remote datasets.
        cache_bytes: Most bytes kept there.
        multiprocessing_context: Start method of workers; None is PyTorch's default.
    """

    parts: Sequence[str] = PARTS
    num_workers: int = 0
    prefetch_factor: int = 2
    timeout: float = 120.0
    verify: bool = True
    device: torch.device | str | None = None
    cache_dir: str | PathLike[str] | None = None
    cache_bytes: int = 100 * 1024**3
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.parts if name.lower() not in PARTS]
        if unknown:
            raise UsageError(f"parts {list(self.parts)}: {unknown[0]!r} is none of {', '.join(PARTS)}")
        if self.num_workers < 0:
            raise UsageError(f"num_workers is {self.num_workers}; it must be at least 0")
        if self.prefetch_factor < 1:
            raise UsageError(f"prefetch_factor is {self.prefetch_factor}; it must be at least 1")
        if not self.timeout > 0:
            raise UsageError(f"timeout is {self.timeout}; it must be more than 0 seconds")


@dataclass(frozen=True)
class LoaderConfig:
    """All options of a :class:`vlmdata.StreamingLoader`, checked when it is made.

    Attributes:
        packing: What a pack and a step are.
        parallelism: How ranks share them.
        reading: How batches are read.

    Raises:
        UsageError: If an option is out of range, or options do not go together.
    """

    packing: Packing
    parallelism: Parallelism = field(default_factory=Parallelism)
    reading: Reading = field(default_factory=Reading)

    def __post_init__(self) -> None:
        self.plan_config()  # the limits of packing are those of a plan

    @classmethod
    def of(cls, **options: Any) -> LoaderConfig:
        """Makes a configuration from options by name, whichever group each is in.

        Raises:
            UsageError: If ``capacity`` or ``global_batch`` is missing, or an option is wrong.
            TypeError: If there is no such option.
        """
        groups = _grouped(options)
        missing = [name for name in ("capacity", "global_batch") if name not in groups["packing"]]
        if missing:
            raise UsageError(f"{' and '.join(missing)} must be given")
        return cls(**{name: _GROUPS[name](**values) for name, values in groups.items()})

    def with_options(self, **options: Any) -> LoaderConfig:
        """A copy with other values for some options, by name.

        Raises:
            UsageError: If an option is wrong.
            TypeError: If there is no such option.
        """
        groups = _grouped(options)
        return LoaderConfig(**{name: dataclasses.replace(getattr(self, name), **groups[name]) for name in _GROUPS})

    def plan_config(self) -> PlanConfig:
        """What a plan depends on.

        Raises:
            UsageError: If an option is out of range, or options do not go together.
        """
        packing, layout = self.packing, self.parallelism
        return PlanConfig(
            capacity=packing.capacity,
            global_batch=packing.global_batch,
            alignment=alignment(
                layout.context_parallel, layout.tensor_parallel, bool(layout.sequence_parallel), packing.pad_multiple
            ),
            max_patches=packing.max_patches,
            pad_to_capacity=packing.pad_to_capacity,
            last=packing.last,
            shuffle_window=packing.shuffle_window,
            seed=packing.seed,
            blend=packing.blend,
            balance=packing.balance,
            cost=cost_model(packing.cost) if isinstance(packing.cost, str) else packing.cost,
        )


@cache
def _warn_that_sequence_parallel_is_off() -> None:
    logging.getLogger("vlmdata.loader").warning(
        "tensor_parallel without sequence_parallel: samples are not padded for sequence parallelism, which was the "
        "default before. Pass sequence_parallel=True (--sp) if the model uses it, else False (--no-sp)."
    )


_GROUPS: Mapping[str, type[Any]] = {"packing": Packing, "parallelism": Parallelism, "reading": Reading}


@dataclass(frozen=True)
class Option:
    """One option of the loader.

    Attributes:
        name: Its name in Python.
        group: The attribute of :class:`LoaderConfig` it belongs to.
        default: Its default; ``inspect.Parameter.empty`` if it must be given.
        annotation: Its type, as written.
        help: What it means, in a sentence or two.
    """

    name: str
    group: str
    default: Any
    annotation: str
    help: str

    @property
    def summary(self) -> str:
        """The first sentence of ``help`` without markup, for a command line."""
        return re.sub(r"``([^`]*)``", r"\1", re.split(r"(?<=[.]) (?=[A-Z])", self.help)[0])


@cache
def loader_options() -> Mapping[str, Option]:
    """The options by name, with what their groups' docstrings say about them."""
    found = {}
    for group, of_group in _GROUPS.items():
        meanings = _documented(of_group)
        for each in dataclasses.fields(of_group):
            default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
            found[each.name] = Option(each.name, group, default, str(each.type), meanings.get(each.name, ""))
    return found


def takes_loader_options[Initialiser: Callable[..., None]](initialiser: Initialiser) -> Initialiser:
    """Shows every loader option in the signature of a function that takes them as ``**options``."""
    signature = inspect.signature(initialiser)
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
        for each in loader_options().values()
    ]
    initialiser.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return initialiser


def _grouped(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    known = loader_options()
    groups: dict[str, dict[str, Any]] = {name: {} for name in _GROUPS}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"the loader has no option {name!r}" + (f"; the nearest is {near[0]!r}" if near else ""))
        groups[known[name].group][name] = value
    return groups


def _documented(of_group: type[Any]) -> dict[str, str]:
    """The texts of the ``Attributes:`` section of a class's docstring, by name."""
    section = (inspect.getdoc(of_group) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
