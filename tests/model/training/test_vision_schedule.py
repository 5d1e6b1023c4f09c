"""The order of the tower's passes, which bounds its memory: the one that docs/training.md draws."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from vlmdata.model.training.vision_side import VisionSide


@pytest.mark.parametrize(
    ("ahead", "passes"),
    [
        (1, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (2, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (4, "F0 F1 F2 F3 B0 B1 B2 B3"),
        (9, "F0 F1 F2 F3 B0 B1 B2 B3"),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_passes_in_turn(ahead: int, passes: str, trained: bool) -> None:
    """``ahead`` is the number of pipeline stages plus ``parallel.vision_ahead``; micro-batch 2 has no image here."""
    made, weight = [], torch.ones(1, requires_grad=True)

    def encode(packs: list[int]) -> torch.Tensor:
        made.append(f"F{packs[0]}")
        return torch.empty(0, 1) if packs[0] == 2 else weight * torch.ones(3, 1)

    class Sender:
        def send(self, number: int, _: Any, rows: torch.Tensor) -> None:
            assert made[-1] == f"F{number}"

        def gradient(self, number: int, count: int) -> torch.Tensor:
            assert trained
            assert count == (0 if number == 2 else 3)
            made.append(f"B{number}")
            return torch.ones(count, 1)

        def wait(self, number: int) -> None:
            assert not trained
            made.append(f"B{number}")

    side: Any = SimpleNamespace(_ahead=ahead, _ranks=SimpleNamespace(data=1), _encode=encode)
    batches: Iterator[Any] = iter(range(4))
    VisionSide._encode_all(side, Sender(), range(4), batches, trained)  # type: ignore[arg-type]
    assert " ".join(made) == passes
    assert next(batches, None) is None
    assert (weight.grad is None) is not trained
    if trained:
        assert weight.grad is not None
        assert float(weight.grad) == 9  # three micro-batches with three rows each
