"""Packs on versions of transformers that nobody has tried are proven on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import tiny_model
from vlmdata.errors import UsageError
from vlmdata.integrations import proof
from vlmdata.integrations.transformers import is_packed, packed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, on a version that is not recorded."""
    tiny_model("qwen3_5")  # to import its code sets the version anew
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    return tmp_path / "proofs"


def _no_second(*_: Any) -> Any:
    raise AssertionError("proven again")


def _ignored(*_: Any) -> None:
    """A hook that does nothing."""


@pytest.mark.parametrize("variant", ["qwen3_5", "gemma4-dense"])
def test_the_verdict_is_kept_for_the_version(variant: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(variant)
    state, random = torch.get_default_dtype(), torch.random.get_rng_state()
    with packed(model):
        assert is_packed(model)
    assert (torch.get_default_dtype(), model.training) == (state, False)
    assert torch.equal(torch.random.get_rng_state(), random)
    (kept,) = cache.iterdir()
    monkeypatch.setattr(proof, "_prove", _no_second)
    packed(model).remove()
    kept.write_bytes(b'{"key": "another", "way": "packed"}')
    with pytest.raises(UsageError, match=r"cannot be proven on transformers 5\.99\.0.*proven again"):
        packed(model)
    monkeypatch.setattr("transformers.__version__", "5.99.1")
    with pytest.raises(UsageError, match=r"cannot be proven on transformers 5\.99\.1"):
        packed(model)
    packed(model, allow_unproven=True).remove()
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    packed(model).remove()


def test_a_leak_is_refused_with_the_difference(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmdata.integrations.transformers.keep_apart", _ignored)
    wanted = r"transformers 5.99.0, packs of qwen3_5 differ from their samples \(packed: logits .* by [0-9.e+-]+ of the"
    for _ in range(2):  # computed, then remembered
        with pytest.raises(UsageError, match=wanted):
            packed(tiny_model("qwen3_5"))
        monkeypatch.setattr(proof, "_prove", _no_second)


def test_a_folder_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file")
    packed(tiny_model("qwen2_5_vl")).remove()
