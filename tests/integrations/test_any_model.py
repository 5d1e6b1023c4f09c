"""Packs in any model of transformers that takes images and text: proven equal to samples, or refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.any_models import ANY_MODELS, any_model
from vlmdata.errors import UsageError
from vlmdata.integrations import general, proof
from vlmdata.integrations.segments import Segments
from vlmdata.integrations.transformers import is_packed, packed

#: Models that differ on a version, or whose small model cannot be computed.
REFUSED = ("mllama", "llama4", "paligemma")
EQUAL = [name for name in ANY_MODELS if name not in REFUSED]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path))


def _logits(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    taken = {"token_type_ids", "mm_token_type_ids"} & set(type(model).forward.__annotations__)
    marks = {name: torch.zeros_like(ids) for name in taken}
    if model.config.get_text_config().rope_parameters and hasattr(model.model, "get_rope_index"):
        positions = positions.expand(4, 1, -1)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **marks).logits[0]
    return found


@pytest.mark.parametrize("model_type", EQUAL)
def test_packs_equal_their_samples(model_type: str) -> None:
    """Of the model itself, beside the proof on its small copy."""
    model, lengths = any_model(model_type), (19, 30, 11)
    pieces = [torch.randint(100, 500, (1, length)) for length in lengths]
    rows = [torch.arange(length)[None] for length in lengths]
    alone = torch.cat([_logits(model, ids, row) for ids, row in zip(pieces, rows, strict=True)])
    before = [len(module._forward_pre_hooks) for module in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one says that the proof had no images
        prepared = packed(model)
    with prepared:
        assert is_packed(model)
        packed(model).remove()  # twice is harmless
        together = _logits(model, torch.cat(pieces, 1), torch.cat(rows, 1))
    assert float((together - alone).abs().max()) < 1e-4 * float(alone.abs().max())
    assert [len(module._forward_pre_hooks) for module in model.modules()] == before
    assert not is_packed(model)


@pytest.mark.parametrize("model_type", ["mllama", "llama4"])
def test_models_that_mix_samples_are_refused_by_name(model_type: str) -> None:
    model = any_model(model_type)
    with pytest.raises(UsageError, match=f"packed: .*{type(model).__name__}"):
        packed(model)


def test_modules_that_convolve_along_the_sequence_need_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "_by_samples", lambda *_: None)
    with pytest.raises(UsageError, match=r"packs of Lfm2VlForConditionalGeneration differ from their samples \(pos"):
        packed(any_model("lfm2_vl"))


def test_a_proof_without_images_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_image", lambda model: None)
    for _ in range(2):  # also if it is remembered
        with pytest.warns(UserWarning, match="LlavaForConditionalGeneration were proven with text alone"):
            packed(any_model("llava")).remove()


def test_masks_are_those_of_transformers_within_samples() -> None:
    model = any_model("gemma3").model
    segments = Segments.of(torch.cat([torch.arange(10), torch.arange(4)]))
    assert segments is not None
    marks = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0]])
    masks = general._masks(model, segments, ("full_attention", "sliding_attention"), {"token_type_ids": marks})
    full, sliding = (masks[kind][0, 0] == 0 for kind in ("full_attention", "sliding_attention"))
    assert all(full[query, key] for query, key in ((1, 3), (10, 11), (9, 1)))
    assert not any(full[query, key] for query, key in ((0, 1), (10, 3), (11, 12)))
    assert all(sliding[query, key] for query, key in ((9, 2), (1, 3)))
    assert not sliding[9, 1]


@pytest.mark.parametrize("extra", [{"attention_mask": True}, {"use_cache": True}])
def test_arguments_with_which_transformers_mixes_samples(extra: dict[str, Any]) -> None:
    model = any_model("smolvlm")
    ids, positions = torch.randint(100, 500, (1, 12)), torch.arange(6).repeat(2)[None]
    if "attention_mask" in extra:
        extra = {"attention_mask": torch.ones_like(ids)}
    with packed(model), pytest.raises(UsageError, match=r"pack of 2 segments.*Pass neither"):
        model(input_ids=ids, position_ids=positions, **extra)
