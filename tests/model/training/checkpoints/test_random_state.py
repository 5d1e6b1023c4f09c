"""The random state of a checkpoint returns bit for bit, and a foreign file cannot run code."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from vlmdata.model.training.checkpoints.random_state import restore_random_state, write_random_state

pytestmark = pytest.mark.usefixtures("one_process")


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]  # noqa: NPY002


def test_all_generators_go_on_where_they_were(tmp_path: Path) -> None:
    np.random.randn()  # noqa: NPY002 (leaves a second value for later)
    write_random_state(tmp_path / "random.pt")
    first = drawn()
    assert drawn() != first
    restore_random_state(tmp_path / "random.pt")
    assert drawn() == first


class _Code:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_foreign_file_runs_no_code(tmp_path: Path) -> None:
    write_random_state(tmp_path / "random.pt")
    state = torch.load(tmp_path / "random.pt", weights_only=False) | {"tracker": _Code(tmp_path / "made")}
    torch.save(state, tmp_path / "foreign.pt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        restore_random_state(tmp_path / "foreign.pt")
    assert not (tmp_path / "made").exists()
