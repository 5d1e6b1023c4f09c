"""State of this process's random generators: Python's, NumPy's, torch's, and megatron-core's for CUDA."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.serialization
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from numpy._core import multiarray

#: What the pickled state of NumPy's generator consists of, also under its name before NumPy 2.
_NUMPY: list[Any] = [
    *((multiarray._reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]


def write_random_state(path: Path) -> None:
    """Writes the state of all generators to a file, by way of memory, because torch obscures a full disk's OSError."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the global generator is what libraries use)
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with path.open("wb") as file:
        file.write(buffer.getvalue())


def restore_random_state(path: Path) -> None:
    """Restores all generators from a file of :func:`write_random_state`.

    The file may come from elsewhere. Anything but numbers, tensors and NumPy's arrays is a pickle.UnpicklingError.
    """
    with torch.serialization.safe_globals(_NUMPY):
        state = torch.load(path, weights_only=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
