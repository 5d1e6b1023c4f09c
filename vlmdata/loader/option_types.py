"""Types of the loader's options by name, for type checkers: those of the fields of the groups in ``loader.config``.

A keyword that is misspelt or of another type is then found without running the program. A test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from vlmdata.loader.config import Device, OnDamage, Pixels
    from vlmdata.packing.config import Blend, Change, LastStep, Stage
    from vlmdata.packing.cost import CostModel
    from vlmdata.storage.choices import Fetch, Verify


class LoaderOptions(TypedDict, total=False):
    """The options of :class:`vlmdata.LoaderConfig` by name. That class documents them."""

    capacity: int
    global_batch: int
    max_patches: int | None
    pad_to_capacity: bool
    pad_multiple: int
    last: LastStep
    shuffle_window: int | None
    seed: int
    blend: Blend | None
    balance: bool
    cost: CostModel | str | None
    schedule: Sequence[Change]
    earlier: Sequence[Stage]
    dp_rank: int | None
    dp_size: int | None
    context_parallel: int
    context_parallel_rank: int | None
    tensor_parallel: int
    sequence_parallel: bool | None
    vision_ranks: int
    vision_rank: int | None
    parts: Sequence[str]
    num_workers: int
    prefetch_factor: int
    timeout: float
    verify: Verify | bool
    on_damage: OnDamage
    max_damaged: int
    pixels: Pixels
    device: Device | None
    fetch: Fetch
    cache_dir: str | PathLike[str] | None
    cache_bytes: int
    multiprocessing_context: str | None
    hedge: float
    service_token_file: str | PathLike[str] | None
    service_insecure: bool
    tls_ca: str | PathLike[str] | None
    tls_cert: str | PathLike[str] | None
    tls_key: str | PathLike[str] | None
    shared_memory: bool
