"""All options of the loader: name, meaning, default and limits. Commands and trainers use these definitions."""

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
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, get_args

from vlmdata.errors import UsageError
from vlmdata.families import DEFAULT_FAMILY
from vlmdata.loader.option_types import LoaderOptions
from vlmdata.options import DeclaredOption, OptionHelp, declared_fields, require_valid
from vlmdata.packing.alignment import alignment
from vlmdata.packing.config import Blend, Change, LastStep, PlanConfig, Stage
from vlmdata.packing.cost import CostModel, chosen_cost
from vlmdata.storage.choices import DEFAULT_CACHE_BYTES, Fetch, Verify

if TYPE_CHECKING:
    import torch

#: Parts of a batch that a rank may need.
BatchPart = Literal["tokens", "labels", "pixels"]
PARTS: tuple[BatchPart, ...] = get_args(BatchPart)
DEFAULT_VERIFY: Verify = "pixels"
OnDamage = Literal["raise", "mask"]
#: Dtype in which a batch has its pixels.
Pixels = Literal["uint8", "bfloat16", "float32"]
#: Of batches. Evaluated on use alone, because the options need no torch.
type Device = torch.device | str
#: Default capacity for callers that need one.
DEFAULT_CAPACITY = 8192


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Options that determine packs and optimizer steps."""

    capacity: Annotated[int, "Largest number of tokens in a pack, including padding."]
    global_batch: Annotated[int, "Packs per optimizer step over all data-parallel ranks."]
    max_patches: Annotated[int | None, "Largest number of vision patches in a pack; None means no limit."] = None
    pad_to_capacity: Annotated[bool, "Whether every pack has exactly ``capacity`` tokens."] = False
    pad_multiple: Annotated[
        int,
        OptionHelp(
            "Multiple of tokens to which every sample is padded, in addition to what the layout needs (16 for FP8).",
            least=1,
        ),
    ] = 1
    last: Annotated[
        LastStep,
        (
            'The incomplete last step of an epoch: "pad" fills it with empty packs, "keep" makes it shorter, "drop" '
            "omits it unless it is the only one."
        ),
    ] = "pad"
    shuffle_window: Annotated[int | None, "Shards packed and shuffled together; None means all."] = None
    seed: Annotated[int, "Seed of packing and order."] = 0
    blend: Annotated[Blend | None, "Shares of several datasets; None means one pass over each per epoch."] = None
    balance: Annotated[bool, "Whether packs are spread over ranks by estimated cost."] = True
    cost: Annotated[
        CostModel | str | None,
        "Cost model, or the name of a model size such as 2b or qwen3-vl-8b. None: the 4b of the dataset's family.",
    ] = None
    schedule: Annotated[
        Sequence[Change], "Changes of the blend at later optimizer steps of the run, each a ``Change``."
    ] = ()
    earlier: Annotated[
        Sequence[Stage], "What the run did with other settings before. A loaded state has it; do not give it."
    ] = ()

    def __post_init__(self) -> None:
        require_valid(self)
        for name, wanted in (("schedule", Change), ("earlier", Stage)):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if wrong := [each for each in getattr(self, name) if not isinstance(each, wanted)]:
                raise UsageError(f"{name} has {wrong[0]!r}; it must be a sequence of {wanted.__name__}")
        if not isinstance(self.blend, Blend | None):
            raise UsageError(f"blend is {self.blend!r}; it must be a Blend, such as Blend('tokens', (0.7, 0.3))")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Options for how ranks share the packs."""

    dp_rank: Annotated[int | None, "Data-parallel rank of this process."] = None
    dp_size: Annotated[
        int | None,
        (
            "Data-parallel size. If neither this nor ``dp_rank`` is given, every process of the ``torch.distributed`` "
            "group (before there is one: of torchrun's ``RANK`` and ``WORLD_SIZE``) is a rank."
        ),
    ] = None
    context_parallel: Annotated[int, "Context-parallel size; samples are padded so that they can be split."] = 1
    context_parallel_rank: Annotated[
        int | None, "Yield this rank's slice, reading only the images that it encodes; None yields whole packs."
    ] = None
    tensor_parallel: Annotated[int, "Tensor-parallel size; samples are padded for it under sequence parallelism."] = 1
    sequence_parallel: Annotated[
        bool | None,
        (
            "Whether tensor-parallel ranks share the tokens between layers (sequence parallelism). None is off, as in "
            "Megatron-LM."
        ),
    ] = None
    vision_ranks: Annotated[
        int,
        (
            "Data-parallel ranks of a vision tower on processes of its own. 0 if the ranks that compute packs encode "
            "their images."
        ),
    ] = 0
    vision_rank: Annotated[
        int | None,
        (
            "Be that rank of the tower: yield the packs of all ``dp_size`` ranks, micro-batch by micro-batch, with "
            "the images that it encodes. None yields the packs of ``dp_rank``."
        ),
    ] = None

    def __post_init__(self) -> None:
        require_valid(self)
        rank, size = self.context_parallel_rank, self.context_parallel
        if rank is not None and not 0 <= rank < size:
            raise UsageError(f"context_parallel_rank {rank} of context_parallel {size}: ranks count from 0")
        if self.vision_rank is not None:
            if not 0 <= self.vision_rank < self.vision_ranks:
                raise UsageError(f"vision_rank {self.vision_rank} of vision_ranks {self.vision_ranks}: count from 0")
            if self.dp_size is None or rank is not None:
                raise UsageError(
                    "vision_rank reads the packs of all data-parallel ranks whole: give dp_size, and no "
                    "context_parallel_rank"
                )
        if self.tensor_parallel > 1 and self.sequence_parallel is None and not self.dp_rank:
            _warn_that_sequence_parallel_is_off()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading batches. They do not change batches of undamaged data."""

    parts: Annotated[
        Sequence[str],
        'Parts that this rank needs: any of "tokens", "labels", "pixels". A middle pipeline stage needs none.',
    ] = PARTS
    num_workers: Annotated[
        int, OptionHelp("Worker processes; 0 makes batches in this process, on request.", least=0)
    ] = 0
    prefetch_factor: Annotated[int, OptionHelp("Batches in progress per worker.", least=1)] = 2
    timeout: Annotated[
        float,
        OptionHelp(
            "Seconds to wait for a batch, or for a service to open, before a stuck worker or server is an error.",
            above=0,
            unit="seconds",
        ),
    ] = 120.0
    verify: Annotated[
        Verify | bool,
        (
            'Data to check against checksums. "stored": every byte that is read, before decoding. "pixels": also the '
            'decoded patches of images. "off": nothing. True means the default, False means "off".'
        ),
    ] = DEFAULT_VERIFY
    on_damage: Annotated[
        OnDamage,
        (
            'Effect of a sample whose stored bytes changed. "raise": an error. "mask": the sample keeps its place in '
            'the pack, without targets and pixels; the log and ``stats`` name it. "mask" checks samples whole, so all '
            "ranks that share a pack agree, whichever part or slice they read."
        ),
    ] = "raise"
    max_damaged: Annotated[
        int, OptionHelp('Most samples of a run that "mask" masks; one more is an error that names all.', least=1)
    ] = 100
    pixels: Annotated[
        Pixels,
        (
            'Dtype of pixels in a batch. "uint8": patches as stored, for ``pixel_values`` on the batch\'s device. '
            '"bfloat16" and "float32": the workers expand them to ``pixel_values``, with 4 and 8 times the bytes.'
        ),
    ] = "uint8"
    device: Annotated[
        Device | None,
        "CUDA device to which batches are copied in the background, one ahead; None leaves them on the host.",
    ] = None
    fetch: Annotated[
        Fetch,
        (
            'Data to fetch of remote datasets. "shards": whole shards, kept in ``cache_dir`` for later epochs and for '
            'other processes of the node. "ranges": the bytes of each batch, which are not kept. "auto": ranges from '
            "object stores if shards would not fit into ``cache_bytes`` or ``context_parallel_rank`` is given, else "
            "shards."
        ),
    ] = "auto"
    cache_dir: Annotated[
        str | PathLike[str] | None,
        "Folder for shards of remote datasets. They are kept in the folder ``vlmdata-cache`` in it.",
    ] = None
    cache_bytes: Annotated[int, "Largest size of these shards in bytes."] = DEFAULT_CACHE_BYTES
    multiprocessing_context: Annotated[
        str | None,
        (
            "Start method of workers; None means PyTorch's default. Choose ``forkserver`` if threads of another "
            "library in your process keep forked workers from starting."
        ),
    ] = None

    def __post_init__(self) -> None:
        require_valid(self)
        if isinstance(self.parts, str):
            raise UsageError(f"parts is {self.parts!r}; it must be a list, such as {[self.parts]}")
        unknown = [name for name in self.parts if name.lower() not in PARTS]
        if unknown:
            raise UsageError(f"parts {list(self.parts)}: {unknown[0]!r} is not one of {', '.join(PARTS)}")
        if self.on_damage == "mask" and self.checks == "off":
            raise UsageError("on_damage is 'mask', but verify is 'off': unchecked damage cannot be masked")

    @property
    def checks(self) -> Verify:
        """Returns ``verify`` as a name."""
        if isinstance(self.verify, bool):
            return DEFAULT_VERIFY if self.verify else "off"
        return self.verify

    @property
    def wanted_parts(self) -> frozenset[BatchPart]:
        """Returns ``parts`` as a set, in lower case."""
        named = {name.lower() for name in self.parts}
        return frozenset(part for part in PARTS if part in named)


@dataclass(frozen=True, kw_only=True)
class Service:
    """Options for batches from a collation service (``grpc://host:8815``). Others ignore them."""

    hedge: Annotated[
        float,
        OptionHelp(
            "Seconds without an answer after which the next server is asked, too; at least three times the usual time "
            "of an answer.",
            above=0,
            unit="seconds",
        ),
    ] = 1.0
    service_token_file: Annotated[
        str | PathLike[str] | None, "File that holds the token that the servers want, not the token itself."
    ] = None
    service_insecure: Annotated[bool, "Whether the token may cross a network in clear text, without TLS."] = False
    tls_ca: Annotated[
        str | PathLike[str] | None,
        "File with the certificates of trusted authorities, PEM; None means those of the system.",
    ] = None
    tls_cert: Annotated[
        str | PathLike[str] | None, "File with this client's certificate, PEM, if the servers want one."
    ] = None
    tls_key: Annotated[str | PathLike[str] | None, "File with the private key of ``tls_cert``, PEM."] = None
    shared_memory: Annotated[
        bool,
        (
            "Whether batches of a server on this machine are copied from its memory, where the system allows that, "
            "instead of going through the connection."
        ),
    ] = True

    def __post_init__(self) -> None:
        require_valid(self)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("tls_cert and tls_key: give both, or neither")


@dataclass(frozen=True)
class LoaderConfig:
    """All options of a :class:`vlmdata.StreamingLoader`, validated on construction.

    Attributes:
        packing: Packs and steps.
        parallelism: How ranks share the packs.
        reading: How batches are read.
        service: How a collation service is reached.

    Raises:
        UsageError: If an option is out of range, or options are incompatible.
    """

    packing: Packing
    parallelism: Parallelism = field(default_factory=Parallelism)
    reading: Reading = field(default_factory=Reading)
    service: Service = field(default_factory=Service)

    def __post_init__(self) -> None:
        self.plan_config()  # checks the limits of packing

    @classmethod
    def of(cls, **options: Unpack[LoaderOptions]) -> LoaderConfig:
        """Creates a configuration from options by name, in any group.

        Raises:
            UsageError: If ``capacity`` or ``global_batch`` is missing, or an option is invalid.
            TypeError: If an option is unknown.
        """
        groups = _grouped(options)
        missing = [name for name in ("capacity", "global_batch") if name not in groups["packing"]]
        if missing:
            raise UsageError(f"{' and '.join(missing)} must be given")
        return cls(**{name: _GROUPS[name](**values) for name, values in groups.items()})

    def with_options(self, **options: Unpack[LoaderOptions]) -> LoaderConfig:
        """Returns a copy with other values for some options, by name.

        Raises:
            UsageError: If an option is invalid.
            TypeError: If an option is unknown.
        """
        groups = _grouped(options)
        return LoaderConfig(**{name: dataclasses.replace(getattr(self, name), **groups[name]) for name in _GROUPS})

    def plan_config(self, family: str = DEFAULT_FAMILY) -> PlanConfig:
        """Returns the options on which a plan depends; ``family`` is that of the datasets, for the default cost.

        Raises:
            UsageError: If an option is out of range, or options are incompatible.
        """
        packing, layout = self.packing, self.parallelism
        options = dict(vars(packing), cost=chosen_cost(packing.cost, family))
        options["alignment"] = alignment(
            layout.context_parallel,
            layout.tensor_parallel,
            bool(layout.sequence_parallel),
            options.pop("pad_multiple"),
        )
        return PlanConfig(**options)


@cache
def _warn_that_sequence_parallel_is_off() -> None:
    logging.getLogger("vlmdata.loader").warning(
        "tensor_parallel without sequence_parallel: samples are not padded for sequence parallelism, which was the "
        "default before. Pass sequence_parallel=True (--sp) if the model uses it, else False (--no-sp)."
    )


_GROUPS: Mapping[str, type[Any]] = {
    "packing": Packing,
    "parallelism": Parallelism,
    "reading": Reading,
    "service": Service,
}


@dataclass(frozen=True)
class Option(DeclaredOption):
    """One option of the loader."""

    group: str  # its attribute of :class:`LoaderConfig`

    @property
    def help(self) -> str:
        """Its meaning, in one or two sentences."""
        return self.option.help

    @property
    def summary(self) -> str:
        """Returns the first sentence of ``help`` without markup, for the command line."""
        return re.sub(r"``([^`]*)``", r"\1", re.split(r"(?<=[.]) (?=[A-Z])", self.help)[0])


@cache
def loader_options() -> Mapping[str, Option]:
    """Returns the options by name. The default of a required one is ``inspect.Parameter.empty``."""
    return {
        declared.name: Option(**vars(declared), group=group)
        for group, of_group in _GROUPS.items()
        for declared in declared_fields(of_group)
    }


def takes_loader_options[Initialiser: Callable[..., None]](initialiser: Initialiser) -> Initialiser:
    """Adds all loader options to the signature of a function that takes them as ``**options``."""
    signature = inspect.signature(initialiser)
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.kind)
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
