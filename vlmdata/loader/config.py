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
from numbers import Real
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from vlmdata.errors import UsageError
from vlmdata.families import DEFAULT_FAMILY
from vlmdata.loader.option_types import LoaderOptions
from vlmdata.options import documentation
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
#: Default capacity for callers that need one.
DEFAULT_CAPACITY = 8192


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Options that determine packs and optimizer steps.

    Attributes:
        capacity: Largest number of tokens in a pack, including padding.
        global_batch: Packs per optimizer step over all data-parallel ranks.
        max_patches: Largest number of vision patches in a pack; None means no limit.
        pad_to_capacity: Whether every pack has exactly ``capacity`` tokens.
        pad_multiple: Multiple of tokens to which every sample is padded, in addition to what the layout needs (16 for
            FP8).
        last: The incomplete last step of an epoch: "pad" fills it with empty packs, "keep" makes it shorter, "drop"
            omits it unless it is the only one.
        shuffle_window: Shards packed and shuffled together; None means all.
        seed: Seed of packing and order.
        blend: Shares of several datasets; None means one pass over each per epoch.
        balance: Whether packs are spread over ranks by estimated cost.
        cost: Cost model, or the name of a model size such as 2b or qwen3-vl-8b. None: the 4b of the dataset's family.
        schedule: Changes of the blend at later optimizer steps of the run, each a ``Change``.
        earlier: What the run did with other settings before. A loaded state has it; do not give it.
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
    cost: CostModel | str | None = None
    schedule: Sequence[Change] = ()
    earlier: Sequence[Stage] = ()

    def __post_init__(self) -> None:
        _require_types(self)
        for name, wanted in (("schedule", Change), ("earlier", Stage)):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if wrong := [each for each in getattr(self, name) if not isinstance(each, wanted)]:
                raise UsageError(f"{name} has {wrong[0]!r}; it must be a sequence of {wanted.__name__}")
        if not isinstance(self.blend, Blend | None):
            raise UsageError(f"blend is {self.blend!r}; it must be a Blend, such as Blend('tokens', (0.7, 0.3))")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Options for how ranks share the packs.

    Attributes:
        dp_rank: Data-parallel rank of this process.
        dp_size: Data-parallel size. If neither this nor ``dp_rank`` is given, every process of the
            ``torch.distributed`` group (before there is one: of torchrun's ``RANK`` and ``WORLD_SIZE``) is a rank.
        context_parallel: Context-parallel size; samples are padded so that they can be split.
        context_parallel_rank: Yield this rank's slice, reading only the images that it encodes; None yields whole
            packs.
        tensor_parallel: Tensor-parallel size; samples are padded for it under sequence parallelism.
        sequence_parallel: Whether tensor-parallel ranks share the tokens between layers (sequence parallelism). None is
            off, as in Megatron-LM.
        vision_ranks: Data-parallel ranks of a vision tower on processes of its own. 0 if the ranks that compute packs
            encode their images.
        vision_rank: Be that rank of the tower: yield the packs of all ``dp_size`` ranks, micro-batch by micro-batch,
            with the images that it encodes. None yields the packs of ``dp_rank``.
    """

    dp_rank: int | None = None
    dp_size: int | None = None
    context_parallel: int = 1
    context_parallel_rank: int | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool | None = None
    vision_ranks: int = 0
    vision_rank: int | None = None

    def __post_init__(self) -> None:
        _require_types(self)
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
    """Options for reading batches. They do not change batches of undamaged data.

    Attributes:
        parts: Parts that this rank needs: any of "tokens", "labels", "pixels". A middle pipeline stage needs none.
        num_workers: Worker processes; 0 makes batches in this process, on request.
        prefetch_factor: Batches in progress per worker.
        timeout: Seconds to wait for a batch, or for a service to open, before a stuck worker or server is an error.
        verify: Data to check against checksums. "stored": every byte that is read, before decoding. "pixels":
            also the decoded patches of images. "off": nothing. True means the default, False means "off".
        on_damage: Effect of a sample whose stored bytes changed. "raise": an error. "mask": the sample keeps its place
            in the pack, without targets and pixels; the log and ``stats`` name it. "mask" checks samples whole, so all
            ranks that share a pack agree, whichever part or slice they read.
        max_damaged: Most samples of a run that "mask" masks; one more is an error that names all.
        pixels: Dtype of pixels in a batch. "uint8": patches as stored, for ``pixel_values`` on the batch's device.
            "bfloat16" and "float32": the workers expand them to ``pixel_values``, with 4 and 8 times the bytes.
        device: CUDA device to which batches are copied in the background, one ahead; None leaves them on the host.
        fetch: Data to fetch of remote datasets. "shards": whole shards, kept in ``cache_dir`` for later epochs and for
            other processes of the node. "ranges": the bytes of each batch, which are not kept. "auto": ranges from
            object stores if shards would not fit into ``cache_bytes`` or ``context_parallel_rank`` is given, else
            shards.
        cache_dir: Folder for shards of remote datasets. They are kept in the folder ``vlmdata-cache`` in it.
        cache_bytes: Largest size of these shards in bytes.
        multiprocessing_context: Start method of workers; None means PyTorch's default. Choose ``forkserver`` if threads
            of another library in your process keep forked workers from starting.
    """

    parts: Sequence[str] = PARTS
    num_workers: int = 0
    prefetch_factor: int = 2
    timeout: float = 120.0
    verify: Verify | bool = DEFAULT_VERIFY
    on_damage: OnDamage = "raise"
    max_damaged: int = 100
    pixels: Pixels = "uint8"
    device: torch.device | str | None = None
    fetch: Fetch = "auto"
    cache_dir: str | PathLike[str] | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        _require_types(self)
        if isinstance(self.parts, str):
            raise UsageError(f"parts is {self.parts!r}; it must be a list, such as {[self.parts]}")
        unknown = [name for name in self.parts if name.lower() not in PARTS]
        if unknown:
            raise UsageError(f"parts {list(self.parts)}: {unknown[0]!r} is not one of {', '.join(PARTS)}")
        for name, least in (("num_workers", 0), ("prefetch_factor", 1), ("max_damaged", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.checks not in get_args(Verify):
            raise UsageError(f"verify is {self.verify!r}; it must be one of {', '.join(get_args(Verify))}")
        for name, allowed in (("on_damage", OnDamage), ("pixels", Pixels), ("fetch", Fetch)):
            if (value := getattr(self, name)) not in get_args(allowed):
                raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(get_args(allowed))}")
        if self.on_damage == "mask" and self.checks == "off":
            raise UsageError("on_damage is 'mask', but verify is 'off': unchecked damage cannot be masked")
        if not self.timeout > 0:
            raise UsageError(f"timeout is {self.timeout}; it must be more than 0 seconds")

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
    """Options for batches from a collation service (``grpc://host:8815``). Others ignore them.

    Attributes:
        hedge: Seconds without an answer after which the next server is asked, too; at least three times the usual
            time of an answer.
        service_token_file: File that holds the token that the servers want, not the token itself.
        service_insecure: Whether the token may cross a network in clear text, without TLS.
        tls_ca: File with the certificates of trusted authorities, PEM; None means those of the system.
        tls_cert: File with this client's certificate, PEM, if the servers want one.
        tls_key: File with the private key of ``tls_cert``, PEM.
        shared_memory: Whether batches of a server on this machine are copied from its memory, where the system allows
            that, instead of going through the connection.
    """

    hedge: float = 1.0
    service_token_file: str | PathLike[str] | None = None
    service_insecure: bool = False
    tls_ca: str | PathLike[str] | None = None
    tls_cert: str | PathLike[str] | None = None
    tls_key: str | PathLike[str] | None = None
    shared_memory: bool = True

    def __post_init__(self) -> None:
        _require_types(self)
        if not self.hedge > 0:
            raise UsageError(f"hedge is {self.hedge}; it must be more than 0 seconds")
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


def _require_types(group: Any) -> None:
    """Raises an error if an option that is a number or a bool is something else, such as text of the environment."""
    for each in dataclasses.fields(group):
        value, wanted = getattr(group, each.name), str(each.type).removesuffix(" | None")
        if value is None and wanted != each.type:
            continue
        # numpy's integers count as integers, and 0 and 1 as bools. A bool is no number.
        if wanted == "int" and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise UsageError(f"{each.name} is {value!r}; it must be an integer")
        if wanted == "float" and (isinstance(value, bool) or not isinstance(value, Real)):
            raise UsageError(f"{each.name} is {value!r}; it must be a number")
        if wanted == "bool" and value not in (False, True):
            raise UsageError(f"{each.name} is {value!r}; it must be True or False")


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
class Option:
    """One option of the loader."""

    name: str  # its name in Python
    group: str  # its attribute of :class:`LoaderConfig`
    default: Any  # its default; ``inspect.Parameter.empty`` if required
    annotation: str  # its type, as written
    help: str  # its meaning, in one or two sentences

    @property
    def summary(self) -> str:
        """Returns the first sentence of ``help`` without markup, for the command line."""
        return re.sub(r"``([^`]*)``", r"\1", re.split(r"(?<=[.]) (?=[A-Z])", self.help)[0])


@cache
def loader_options() -> Mapping[str, Option]:
    """Returns the options by name, with help from the docstrings of their groups."""
    found = {}
    for group, of_group in _GROUPS.items():
        meanings = _documented(of_group)
        for each in dataclasses.fields(of_group):
            default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
            found[each.name] = Option(each.name, group, default, str(each.type), meanings.get(each.name, ""))
    return found


def takes_loader_options[Initialiser: Callable[..., None]](initialiser: Initialiser) -> Initialiser:
    """Adds all loader options to the signature of a function that takes them as ``**options``."""
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
    """Returns the texts in the ``Attributes:`` section of a class's docstring, by name."""
    section = documentation(of_group).partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
