"""The table of names is complete and its functions are exact inverses, cut or whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.model.helpers import (
    as_in_memory,
    small_architecture,
    transformers_config,
    transformers_model,
    unsharded,
    weights_of,
)
from vlmdata.model.families import presets, spec_of
from vlmdata.model.weight_names.table import ParameterMap, hf_names

KINDS: dict[str, dict[str, Any]] = {
    f"{family} {kind}": {"family": family, **options}
    for family in ("qwen3_5", "qwen3_vl")
    for kind, options in {"dense": {}, "moe": {"moe": True}, "tied": {"tied": True}}.items()
}


def parameter_maps(architecture: Any, **options: Any) -> dict[str, ParameterMap]:
    return spec_of(architecture).parameter_maps(architecture, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_table_is_transformers_state_dict(kind: str) -> None:
    architecture = small_architecture(**KINDS[kind])
    wanted = hf_names(parameter_maps(architecture, mtp=False))
    weights = weights_of(architecture, mtp=False)
    state = as_in_memory(architecture, transformers_model(architecture, weights).state_dict())
    if architecture.tie_embeddings:
        del state["lm_head.weight"]
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_table_is_our_models_parameters(kind: str, one_process: None) -> None:
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.weight_names.table import canonical_names

    architecture = small_architecture(**KINDS[kind])
    model = spec_of(architecture).build(architecture, ModelSettings())
    names = canonical_names(model)
    shapes = {names[name]: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {name: entry.shape for name, entry in parameter_maps(architecture).items()}


def round_trip(entry: ParameterMap, dtype: torch.dtype) -> None:
    """There and back gives the same bits: every value of the dtype's range is used."""
    generator = torch.Generator().manual_seed(len(entry.name))
    pieces = []
    for source in entry.sources:
        whole = torch.randn(source.shape, generator=generator) * torch.randn(source.shape, generator=generator).exp()
        pieces.append(source.take(whole.to(dtype)))
    parameter = entry.to_mcore(pieces)
    assert tuple(parameter.shape) == entry.shape
    assert parameter.dtype == dtype
    for piece, back in zip(pieces, entry.to_hf(parameter), strict=True):
        assert torch.equal(piece, back), entry.name
    for size in (1, 2, 4):
        parts = [entry.shard(parameter, rank, size) for rank in range(size)]
        assert torch.equal(unsharded(entry, parts), parameter), (entry.name, size)
        if entry.shard_dim is not None:
            assert all(part.numel() == parameter.numel() // size for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_exact(kind: str, dtype: torch.dtype) -> None:
    architecture = small_architecture(**KINDS[kind])
    for entry in parameter_maps(architecture, vocab_rows=architecture.language.vocab_size + 64).values():
        round_trip(entry, dtype)


def test_experts_one_by_one_give_the_same_parameters() -> None:
    """Published checkpoints have a layer's experts in one tensor or each by itself."""
    architecture = small_architecture(moe=True)
    fused = parameter_maps(architecture)
    single = {"mtp.layers.0.mlp.experts.0.gate_proj.weight": (40, 64)}
    mixed = parameter_maps(architecture, stored=single)
    assert set(fused) == set(mixed)
    name = "language.predictor.layer.mlp.experts.local_experts.1.linear_fc1.weight"
    gate, up = torch.randn(40, 64), torch.randn(40, 64)
    assert [source.name for source in mixed[name].sources] == [
        "mtp.layers.0.mlp.experts.1.gate_proj.weight",
        "mtp.layers.0.mlp.experts.1.up_proj.weight",
    ]
    assert fused[name].sources[0].name == "mtp.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(mixed[name].to_mcore([gate, up]), fused[name].to_mcore([torch.cat([gate, up])]))
    round_trip(mixed[name], torch.bfloat16)
    layer = "language.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    assert mixed[layer].sources[0].name == "model.language_model.layers.0.mlp.experts.gate_up_proj"


def test_every_hugging_face_value_is_used_once() -> None:
    """Numbering all values and moving them to our parameters and back loses and doubles none."""
    for kind in KINDS:
        maps = parameter_maps(small_architecture(**KINDS[kind]))
        numbered, start = {}, 0
        for name, shape in hf_names(maps).items():
            count = int(torch.tensor(shape).prod())
            numbered[name] = torch.arange(start, start + count).view(shape)
            start += count
        seen = torch.zeros(start, dtype=torch.int64)
        for entry in maps.values():
            parameter = entry.to_mcore([source.take(numbered[source.name]) for source in entry.sources])
            seen.index_add_(0, parameter.flatten(), torch.ones(parameter.numel(), dtype=torch.int64))
        assert bool((seen == 1).all()), kind


@pytest.mark.parametrize("name", sorted(presets()))
def test_tables_of_all_sizes_are_transformers_state_dicts(name: str) -> None:
    """Names and shapes of models without content; transformers has no prediction layer."""
    import transformers

    architecture = presets()[name]
    config = transformers_config(architecture)
    with torch.device("meta"):
        model = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))(config)
    state = as_in_memory(architecture, model.state_dict())
    if architecture.tie_embeddings:
        del state["lm_head.weight"]
    wanted = hf_names(parameter_maps(architecture, mtp=False))
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == wanted


def with_few_modules(architecture: Any) -> Any:
    """The architecture with at most eight layers, two cycles of their kinds, and at most three experts per layer."""
    language = architecture.language
    few: dict[str, Any] = (
        {"layer_types": language.layer_types[:8]}
        if hasattr(language, "layer_types")
        else {"layers": min(language.layers, 8)}
    )
    if language.moe:
        few["moe"] = dataclasses.replace(language.moe, num_experts=3, num_experts_per_tok=2)
    return dataclasses.replace(architecture, language=dataclasses.replace(language, **few))


@pytest.mark.parametrize("name", sorted(presets()))
def test_tables_of_all_sizes_are_our_models_parameters(name: str, one_process: None) -> None:
    """The same of ours, of the first eight layers and three experts: modules of all of them take a minute to make."""
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.weight_names.table import canonical_names

    architecture = with_few_modules(presets()[name])
    with torch.device("meta"):
        model = spec_of(architecture).build(architecture, ModelSettings())
    names = canonical_names(model)
    shapes = {names[name]: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {name: entry.shape for name, entry in parameter_maps(architecture).items()}


@pytest.mark.parametrize("name", sorted(presets()))
def test_published_tables_divide_over_eight_ranks(name: str) -> None:
    """Every section of every cut parameter of the published sizes divides by the number of ranks its heads allow."""
    architecture = with_few_modules(presets()[name])
    size = 2 if architecture.language.num_key_value_heads >= 2 else 1
    for entry in parameter_maps(architecture).values():
        if entry.shard_dim is not None:
            for section in entry.sections or (entry.shape[entry.shard_dim],):
                assert section % size == 0, entry.name
