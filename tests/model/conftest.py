"""Parallel groups of one process, and models whose weights transformers' model shares."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

from tests import forked
from tests.model.helpers import small_architecture, transformers_model, weights_of

# Nothing here is long enough to be worth compiling, and one thread a worker is what the machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="package", autouse=True)
def _own_server_of_processes() -> Iterator[None]:
    """Python keeps one server that processes are forked from. Here it shall have imported what training needs: once for
    all folders, as that takes 4 s.
    """
    server: Any = forkserver._forkserver
    server._stop()
    shared = forked.connected_to_shared(server, forked.MODELS)
    yield
    if shared:
        del server.ensure_running
        server._forkserver_address = None
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    server._stop()


@pytest.fixture(scope="package")
def one_process() -> Iterator[None]:
    """Megatron-core's groups for this process alone, in the CPU mode. Both end with the tests of models: threads of
    groups wake up all the time, and the mode looks at every call of torch.
    """
    pytest.importorskip("megatron.core")
    from vlmdata.model.parallel import cpu_mode, groups

    torch.set_num_threads(1)
    for name in ("dcp_logger", "default"):  # torch logs each collective and each part of a checkpoint, for nobody
        logging.getLogger(f"c10d-NullHandler-{name}").setLevel(logging.INFO)
    groups.initialize(backend="gloo")
    gc.collect()
    gc.freeze()  # megatron-core, which no later collection need look through
    with cpu_mode.cpu_mode_if_needed():
        yield
    groups.destroy()


@dataclass(frozen=True)
class Pair:
    """Our model and transformers', with equal weights.

    Attributes:
        architecture: Of both.
        ours: In training mode.
        theirs: In evaluation mode (it has no dropout).
        weights: Hugging Face tensors, ``mtp.*`` included.
        maps: Names.
    """

    architecture: Any
    ours: Any
    theirs: Any
    weights: dict[str, torch.Tensor]
    maps: Any


@pytest.fixture(scope="package")
def make_pair(one_process: None) -> Callable[..., Pair]:
    """Makes pairs; settings are those of :class:`ModelSettings`."""
    from vlmdata.model.families import spec_of
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.weight_names.table import load_from_hf

    def make(*, family: str = "qwen3_5", moe: bool = False, tied: bool = False, mtp: int = 0, **settings: Any) -> Pair:
        own = {"mtp": mtp} if family == "qwen3_5" else {}
        architecture = small_architecture(family, moe=moe, tied=tied, **own)
        spec = spec_of(architecture)
        maps, weights = spec.parameter_maps(architecture), weights_of(architecture)
        ours: Any = spec.build(architecture, ModelSettings(**settings))
        load_from_hf(ours, maps, lambda source: source.take(weights[source.name]))
        return Pair(architecture, ours.train(), transformers_model(architecture, weights), weights, maps)

    return make
