"""As a new user would: a wrongly masked sample, planted among real receipts, is found in two commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SHARED_DATA, build_dataset
from tests.inspect.conftest import Command, once
from tests.verify.rewriting import Draft, rewrite_sample

FOLDERS = ("cord_v2_real", "receipts_real")


@pytest.fixture(params=FOLDERS)
def real(request: pytest.FixtureRequest, shared_folder: Path, copy_of: Callable[[Path], Path]) -> Path:
    """A copy of a dataset of real receipts."""
    source = SHARED_DATA / request.param
    if not source.is_dir():
        pytest.skip(f"{source} is absent")
    file = next((source / "data").glob("*.parquet"))
    return copy_of(once(shared_folder, request.param, lambda out: build_dataset(file, out, limit=12)))


def one_late(draft: Draft) -> None:
    """The classic: the mask is shifted by one."""
    draft.loss_mask[:] = np.roll(draft.loss_mask, 1)


def one_early(draft: Draft) -> None:
    draft.loss_mask[:] = np.roll(draft.loss_mask, -1)


def prompt_instead(draft: Draft) -> None:
    """The question is learned, not the answer."""
    targets = np.flatnonzero(draft.loss_mask)
    draft.loss_mask[targets] = 0
    draft.loss_mask[targets[0] - 20 : targets[0] - 12] = 1


@pytest.mark.parametrize("plant", [one_late, one_early, prompt_instead])
def test_a_planted_fault_is_found_in_under_three_commands(
    real: Path, command: Command, plant: Callable[[Draft], None]
) -> None:
    sound = command(real)[1]
    assert "nothing suspicious" in sound
    key = "000000007" if "000000007" in sound else "000000000"
    rewrite_sample(real, key, plant)

    _, card, _ = command(real)  # the first: which sample?
    assert "findings" in card
    advice = re.search(r"next: vlmdata inspect (\S+) (--sample) (\S+)", card)
    assert advice is not None
    assert (advice[1], advice[3]) == (str(real), key)

    _, found, _ = command(real, "--find", "is:suspicious")
    assert re.findall(r"^\d{9}", found, re.MULTILINE) == [key]

    _, sample, _ = command(*advice.groups())  # the second: what is wrong with it?
    assert "✖" in sample
    body = sample.split("newline\n", 1)[1]
    inside = body[body.index("⟦") + 1 : body.index("⟧")]
    assert not (inside.startswith("<s_") and inside.rstrip("\n").endswith("<|im_end|>↵"))
