"""The streaming loader: packed batches in an order that is a pure function of data, configuration and position."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from vlmdata.alignment import alignment
from vlmdata.batch import PackedBatch, Slice
from vlmdata.errors import ConfigMismatchError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.open import DEFAULT_CACHE_BYTES, open_for_loading, require_one_tokenizer, sample_table
from vlmdata.loader.plans import EpochPlans
from vlmdata.loader.ranks import DataParallel, data_parallel
from vlmdata.loader.request import Part
from vlmdata.loader.session import CurrentSession, Session
from vlmdata.loader.state import LoaderState, Position, restore
from vlmdata.loader.stream import RankStream
from vlmdata.loader.view import LoaderDataset
from vlmdata.loader.workers import PipelineConfig
from vlmdata.packing.config import Blend, PlanConfig
from vlmdata.packing.cost import CostModel, cost_model
from vlmdata.packing.plan import EpochPlan

Location = str | PathLike[str]


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has done since it was made.

    Attributes:
        batches: Batches handed out.
        tokens: True tokens in them (of whole packs).
        bytes_read: Bytes read from shards for them.
        wait_seconds: Time the consumer waited for batches.
    """

    batches: int = 0
    tokens: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0


class StreamingLoader:
    """Streams packed batches from one or several dataset directories.

    One pass of the iterator is one epoch; the next pass is the next epoch. A pass that was left early goes on where it
    was left, also after :meth:`load_state_dict`. The packs of every optimizer step are the same for every ``dp_size``,
    ``num_workers`` and point of interruption.

    Args:
        data: A dataset directory, an fsspec URL, or several of them.
        capacity: Most tokens in a pack, padding included.
        global_batch: Packs per optimizer step over all data-parallel ranks; each rank gets ``global_batch / dp_size``.
        dp_rank: This data-parallel rank.
        dp_size: Data-parallel ranks. If neither is given, every process of the ``torch.distributed`` group (before
            there is one: of torchrun's ``RANK`` and ``WORLD_SIZE``) is a rank of its own.
        seed: Of packing and order.
        context_parallel: Context-parallel size: samples are padded so that it divides them.
        context_parallel_rank: Yield this rank's slice, reading only the images it encodes; None yields whole packs.
        tensor_parallel: Tensor-parallel size, for alignment under sequence parallelism.
        sequence_parallel: Whether tensor-parallel ranks scatter the sequence.
        pad_multiple: Any further multiple for sample lengths (16 for FP8).
        max_patches: Most vision patches in a pack; None is no limit.
        pad_to_capacity: Whether every pack has exactly ``capacity`` tokens.
        last: The incomplete last step of an epoch: "pad" with empty packs, "keep" what there is, or "drop" it.
        shuffle_window: Shards packed and shuffled together; None is all.
        blend: Shares of several datasets; None is one pass over each per epoch.
        balance: Whether packs are spread over ranks by estimated cost.
        cost: Cost model, or a preset's name.
        parts: Of "tokens", "labels", "pixels": what this rank needs. A middle pipeline stage takes none.
        num_workers: Worker processes; 0 makes batches in this process, when they are asked for.
        prefetch_factor: Batches under way per worker.
        timeout: Seconds to wait for a batch before a stuck worker is an error.
        verify: Whether everything read is checked against its checksum.
        device: CUDA device that batches are copied to in the background, one ahead; None leaves them on the host.
        cache_dir: Folder for shards of remote datasets.
        cache_bytes: Most bytes kept there.
        multiprocessing_context: Start method of workers; None is PyTorch's default.

    Raises:
        ValueError: If sizes do not fit together or not with the process group, or a sample fits no pack.
        DatasetFormatError: If there is no finished dataset.
        ConfigMismatchError: If datasets have different tokenizers.
    """

    def __init__(
        self,
        data: Location | Sequence[Location],
        *,
        capacity: int,
        global_batch: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        seed: int = 0,
        context_parallel: int = 1,
        context_parallel_rank: int | None = None,
        tensor_parallel: int = 1,
        sequence_parallel: bool = True,
        pad_multiple: int = 1,
        max_patches: int | None = None,
        pad_to_capacity: bool = False,
        last: str = "pad",
        shuffle_window: int | None = None,
        blend: Blend | None = None,
        balance: bool = True,
        cost: CostModel | str = "4b",
        parts: Sequence[str] = ("tokens", "labels", "pixels"),
        num_workers: int = 0,
        prefetch_factor: int = 2,
        timeout: float = 120.0,
        verify: bool = True,
        device: torch.device | str | None = None,
        cache_dir: Location | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        multiprocessing_context: str | None = None,
    ):
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if context_parallel_rank is not None and not 0 <= context_parallel_rank < context_parallel:
            raise ValueError(f"context_parallel_rank {context_parallel_rank} of context_parallel {context_parallel}")
        self._given_ranks = (dp_rank, dp_size, context_parallel, tensor_parallel)
        self._ranks = self._settle_ranks(global_batch)
        locations = [data] if isinstance(data, str | PathLike) else list(data)
        if not locations:
            raise ValueError("no datasets given")
        cache = Path(cache_dir) if cache_dir is not None else None
        opened = [open_for_loading(location, cache, cache_bytes) for location in locations]
        self.datasets: tuple[VlmDataset, ...] = tuple(dataset for dataset, _ in opened)
        self._shards = tuple(shards for _, shards in opened)
        require_one_tokenizer(self.datasets)
        self.config = PlanConfig(
            capacity=capacity,
            global_batch=global_batch,
            alignment=alignment(context_parallel, tensor_parallel, sequence_parallel, pad_multiple),
            max_patches=max_patches,
            pad_to_capacity=pad_to_capacity,
            last=last,  # type: ignore[arg-type]
            shuffle_window=shuffle_window,
            seed=seed,
            blend=blend,
            balance=balance,
            cost=cost_model(cost) if isinstance(cost, str) else cost,
        )
        names = [shards.name for shards in self._shards]
        self._plans = EpochPlans(sample_table(self.datasets), self.config, self.datasets, names)
        self._context_parallel = (
            None if context_parallel_rank is None else Slice(context_parallel_rank, context_parallel)
        )
        self._parts = parts_of(parts)
        self._pipeline_config = PipelineConfig(num_workers, prefetch_factor, timeout, verify, multiprocessing_context)
        self._device = torch.device(device) if device is not None else None
        self._position = Position()
        self._session = CurrentSession()
        # Not __del__: at the interpreter's exit this runs while there still is an interpreter to run it.
        weakref.finalize(self, self._session.end)
        self.stats = LoaderStats()
        self.plan(0)  # refuse what cannot be packed now, not at the first batch

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """The plan of an epoch, by default of the one that the next batch is in. The two last used are kept."""
        return self._plans[self._position.epoch if epoch is None else epoch]

    def steps(self, epoch: int | None = None) -> int:
        """Optimizer steps in an epoch; may differ by a little between epochs, as each packs anew."""
        return self.plan(epoch).num_steps

    def __len__(self) -> int:
        """Batches that this rank gets in the epoch of the next batch, those already handed out included."""
        return self.plan().micro_batches(self.dp_size)

    @property
    def dp_rank(self) -> int:
        """This data-parallel rank."""
        return self._follow_process_group().rank

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self._follow_process_group().size

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; within that epoch already, the loader stays where it is.

        Frameworks call this before every pass. So it must not undo a resume, and passes that follow one another need
        no such call.

        Raises:
            ValueError: If the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; epochs count from 0")
        if epoch != self._position.epoch:
            self._session.end()
            self._position = Position(epoch)

    def as_dataset(self, endless: bool = False) -> LoaderDataset:
        """This loader as a PyTorch dataset, for ``DataLoader(loader.as_dataset(), batch_size=None)``.

        Args:
            endless: Whether a pass goes on from epoch to epoch; the dataset then has no length.
        """
        return LoaderDataset(self, endless)

    @property
    def position(self) -> Position:
        """Of the next batch."""
        return self._position

    def __iter__(self) -> Iterator[PackedBatch]:
        self._follow_process_group()
        epoch = self._position.epoch
        while self._position.epoch == epoch:
            session = self._session.at(self._position, self._begin_session)
            begun = time.perf_counter()
            ready = session.take()
            waited = time.perf_counter() - begun
            self._position = ready.tag.following
            self.stats = LoaderStats(
                self.stats.batches + 1,
                self.stats.tokens + ready.batch.true_tokens,
                self.stats.bytes_read + ready.bytes_read,
                self.stats.wait_seconds + waited,
            )
            yield ready.batch

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was handed out; JSON-able, a few hundred bytes.

        The same for all data-parallel ranks between steps, so one rank's copy is enough to save.
        """
        return LoaderState(self._position, self.dp_size, self._fingerprints(), self.config.to_dict()).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a saved state left off.

        Args:
            state: What :meth:`state_dict` gave, on any number of ranks if it was between steps.

        Raises:
            ConfigMismatchError: If data or plan changed since; every difference is listed.
        """
        position = restore(state, self.dp_size, self._fingerprints(), self.config)
        self._session.end()
        self._position = position

    def close(self) -> None:
        """Stops workers and lets go of buffers. Batches that were handed out stay valid."""
        self._session.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        at, names = self._position, [shards.name for shards in self._shards]
        return (
            f"StreamingLoader({(names[0] if len(names) == 1 else names)!r}, capacity={self.config.capacity}, "
            f"global_batch={self.config.global_batch}, dp_rank={self._ranks.rank}, dp_size={self._ranks.size}, "
            f"epoch={at.epoch}, step={at.step}, micro_batch={at.micro_batch})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # What the caller said, and the position: where it lands, datasets are opened and ranks settled anew.
        return _make_again, (self._arguments, self._position)

    def _begin_session(self) -> Session:
        # Nothing that the workers' thread holds may hold this loader: a forgotten one must be garbage, and stop them.
        stream = RankStream(
            self._plans,
            self.datasets,
            self.config,
            self._ranks.rank,
            self._ranks.size,
            self._context_parallel,
            self._parts,
        )
        return Session(stream, self._shards, self._pipeline_config, self._device, self._position)

    def _settle_ranks(self, global_batch: int) -> DataParallel:
        ranks = data_parallel(*self._given_ranks)
        if global_batch % ranks.size:
            source = f" (from {ranks.source})" if ranks.source else ""
            raise ValueError(
                f"global_batch {global_batch} is not a multiple of dp_size {ranks.size}{source}: all ranks must get "
                "equally many"
            )
        return ranks

    def _follow_process_group(self) -> DataParallel:
        """The ranks; settled anew as long as nothing said that there are several, as a loader may be made first."""
        if self._given_ranks[:2] == (None, None) and not self._ranks.source:
            ranks = self._settle_ranks(self.config.global_batch)
            if ranks != self._ranks:
                if self._position.micro_batch:
                    raise ConfigMismatchError(
                        f"the process group was set up within a step, at {self._position}: {self._ranks.size} rank "
                        f"began the step, {ranks.size} cannot continue it. Make the loader after the process group"
                    )
                self._session.end()
                self._ranks = ranks
        return self._ranks

    def _fingerprints(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (shards.name, dataset.manifest.fingerprint)
            for dataset, shards in zip(self.datasets, self._shards, strict=True)
        )


def parts_of(names: Sequence[str]) -> Part:
    """Part flags by name.

    Raises:
        ValueError: If a name is none of tokens, labels, pixels.
    """
    parts = Part(0)
    for name in names:
        if name.upper() not in Part.__members__:
            raise ValueError(f"parts {list(names)}: {name!r} is none of tokens, labels, pixels")
        parts |= Part[name.upper()]
    return parts


def _make_again(arguments: dict[str, Any], position: Position) -> StreamingLoader:
    """Rebuilds a pickled loader."""
    loader = StreamingLoader(**arguments)
    loader._position = position
    return loader
