"""What is set before torch is imported."""

from __future__ import annotations

import os

import pytest

from vlmdata.model.parallel.environment import let_memory_grow

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def test_memory_grows_in_extendable_blocks() -> None:
    let_memory_grow()
    assert {name: os.environ.get(name) for name in NAMES} == dict(
        zip(NAMES, (None, "expandable_segments:True"), strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decided", ["expandable_segments:False", "max_split_size_mb:512", ""])
def test_what_the_user_decided_stays(name: str, decided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, decided)
    let_memory_grow()
    assert {each: os.environ[each] for each in NAMES if each in os.environ} == {name: decided}
