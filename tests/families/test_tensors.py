"""Records restore tensors bit for bit, and rules that are learned join them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.families.chat import ChatFormat
from vlmdata.families.processor import ProcessorFamily, TensorRule
from vlmdata.families.tensors import (
    JoinError,
    Records,
    channels_of,
    concatenated,
    headers_of,
    joined,
    record_of,
    restored,
    rule_for,
)

COLOURS = tuple(tuple(((torch.arange(256) / 255 - mean) / 0.25).tolist()) for mean in (0.4, 0.5, 0.6))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "bool": torch.bool}


def family(*rules: TensorRule, colours: Any = COLOURS) -> ProcessorFamily:
    """The family of a processor with these tensors."""
    return ProcessorFamily.learned(
        model_type="made_up",
        chat=ChatFormat("<s>", "</s>", "model\n"),
        image="<image>",
        axes=1,
        tensors=rules,
        colours=colours,
    )


def round_trip(made: ProcessorFamily, *values: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Stores samples and restores them from one buffer."""
    records = [record_of(made, each) for each in values]
    content = torch.from_numpy(np.concatenate(records))
    return restored(made, Records.of(made, content, list(map(len, records))))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, also in those of NaN and -0."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(
        (one.contiguous().reshape(-1).view(torch.uint8) == other.contiguous().reshape(-1).view(torch.uint8)).all()
    )


@given(
    st.data(),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_any_tensor_is_restored_bit_for_bit(data: st.DataObject, dtype: str, shape: list[int], seed: int) -> None:
    random, kind = np.random.default_rng(seed), DTYPES[dtype]
    size = int(np.prod(shape)) * kind.itemsize
    content = random.integers(0, 2 if kind == torch.bool else 256, size, dtype=np.uint8)
    value = torch.from_numpy(content).view(kind).reshape(shape) if size else torch.zeros(shape, dtype=kind)
    made = family(TensorRule("a", "int64", 1, "concatenated"), TensorRule("b", dtype, len(shape), "concatenated"))
    first, second = round_trip(made, {"b": value}, {"a": torch.arange(3), "b": value})
    assert same_bits(first["b"], value)
    assert same_bits(second["b"], value)
    assert second["a"].tolist() == [0, 1, 2]


@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(["float32", "bfloat16"]))
def test_colours_take_a_byte_each_and_fillers_a_bit_more(seed: int, filled: bool, dtype: str) -> None:
    random = np.random.default_rng(seed)
    codes = torch.from_numpy(random.integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)).long()
    table = torch.tensor(COLOURS).to(DTYPES[dtype])
    value = torch.stack([table[channel][codes[:, channel]] for channel in range(3)], 1)
    if filled:
        value[:, :, 5:] = 0
    rule = TensorRule("a", dtype, 4, "concatenated", channels=((0, 1), (1, 1), (2, 1)), channel_axis=-3)
    made = family(rule)
    (back,) = round_trip(made, {"a": value})
    assert same_bits(back["a"], value)
    stored = record_of(made, {"a": value})
    needed = 64 + value.numel() + (value.numel() // 8 if filled else 0)
    assert stored.size <= -(-needed // 192) * 192 + 64


def test_values_that_are_no_colours_are_stored_as_they_are() -> None:
    rule = TensorRule("a", "float32", 2, "concatenated", channels=((0, 1), (1, 1), (2, 1)))
    for odd in (0.1234567, float("nan"), -0.0, float("inf")):
        value = torch.tensor([[COLOURS[0][7], COLOURS[1][9], odd]])
        (back,) = round_trip(family(rule), {"a": value})
        assert same_bits(back["a"], value)


def test_a_record_that_tells_more_than_it_has_is_refused() -> None:
    made = family(TensorRule("a", "float32", 1, "concatenated"))
    record = record_of(made, {"a": torch.arange(4) / 3})
    for place, value in ((0, 9), (0, 3), (1, 2), (2, 10**12), (2, -1)):
        changed = record.copy()
        changed.reshape(-1)[:64].view("<i8")[place] = value
        with pytest.raises(JoinError):
            restored(made, Records.of(made, torch.from_numpy(changed), [len(changed)]))


def test_crafted_sizes_take_no_memory() -> None:
    with pytest.raises(JoinError, match="would be filled up to 4,294,967,294"):
        concatenated([torch.zeros(0, 2**31 - 1, 2), torch.zeros(1, 1, 2)], 0, 0.0)
    with pytest.raises(JoinError, match=r"\[\[1, 40000\], \[40000, 1\]\]"):
        concatenated([torch.zeros(1, 40_000), torch.zeros(40_000, 1)], 0, 0.0)
    assert concatenated([torch.zeros(1, 400), torch.zeros(400, 1)], 0, 1.0).shape == (401, 400)


def test_tensors_that_were_not_learned_are_refused_by_name() -> None:
    made = family(TensorRule("a", "float32", 1, "concatenated"))
    for values, name in (
        ({"b": torch.zeros(1)}, "b"),
        ({"a": torch.zeros(1, 1)}, "a"),
        ({"a": torch.zeros(1).long()}, "a"),
    ):
        with pytest.raises(JoinError, match=name):
            record_of(made, values)


@given(st.integers(0, 2), st.sampled_from([0.0, -1.0, 1.0, -100.0]), st.integers(0, 2**32 - 1))
def test_a_concatenation_with_a_filler_is_learned(axis: int, filler: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = [torch.from_numpy(random.normal(size=random.integers(1, 5, 3))).float() for _ in range(3)]
    sizes = [max(value.shape[k] for value in values) for k in range(3)]
    parts = []
    for value in values:
        whole = torch.full([value.shape[k] if k == axis else sizes[k] for k in range(3)], filler)
        whole[: value.shape[0], : value.shape[1], : value.shape[2]] = value
        parts.append(whole)
    together = torch.cat(parts, axis)
    rule = rule_for("a", values, together, [1, 1, 1])
    found = joined(rule, values, [1, 1, 1], [1, 1, 1])
    assert found is not None
    assert torch.equal(found, together)


def test_what_depends_on_its_neighbours_is_refused_with_the_shapes() -> None:
    values = [torch.ones(2, 3), torch.ones(1, 3), torch.ones(1, 3)]
    with pytest.raises(JoinError, match=r"a: no rule makes \[4, 3\].*\[\[2, 3\], \[1, 3\], \[1, 3\]\]"):
        rule_for("a", values, torch.arange(12).reshape(4, 3).float(), [1, 1, 1])


def test_a_tensor_per_token_is_0_on_padding_and_in_samples_without() -> None:
    rule = TensorRule("a", "int64", 2, "token")
    made = joined(rule, [torch.ones(1, 3).long(), None, torch.ones(1, 2).long()], [3, 2, 2], [4, 4, 4, 4])
    assert made is not None
    assert made.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_the_channel_of_each_value_is_found_by_a_plain_colour(axis: int) -> None:
    shown = (10, 100, 200)
    plain = torch.tensor([COLOURS[channel][code] for channel, code in enumerate(shown)])
    value = plain.repeat_interleave(2).expand(4, 5, 6).movedim(-1, axis).contiguous()
    assert channels_of(value, COLOURS, shown) == (((0, 2), (1, 2), (2, 2)), axis)
    value[0] = 0  # filler
    assert channels_of(value, COLOURS, shown) is not None or axis == -3


def test_a_family_is_what_its_json_says() -> None:
    made = family(
        TensorRule("a", "float32", 4, "concatenated", 1, -1.0, ((0, 1), (1, 1), (2, 1)), -3),
        TensorRule("b", "int64", 2, "token"),
    )
    assert ProcessorFamily.from_json(made.to_json()) == made
    assert ProcessorFamily.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert dataclasses.replace(made, tensors=made.tensors[:1]) != made


def test_headers_are_read_where_records_begin() -> None:
    made = family(TensorRule("a", "float32", 1, "concatenated"))
    records = [record_of(made, {"a": torch.zeros(n)}) for n in (100, 3)]
    headers = headers_of(made, np.concatenate(records), list(map(len, records)))
    assert headers[:, 0, 2].tolist() == [100, 3]
