"""Stores the tensors of a processor in records of bytes, restores them bit for bit, and joins them to those of packs.

A record has a header of 64 bytes for each tensor of the family, then the data of those that the sample has, each from a
multiple of 64 bytes on. A header is 8 little-endian int64: the form of the data, the number of dimensions, and the
sizes of up to six dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.families.base import CHANNELS
from vlmdata.families.processor import CONCATENATED, MOST_DIMENSIONS, PER_TOKEN, ProcessorFamily, TensorRule

#: Forms of the data: absent, as it is, bfloat16 of which the values are, 8 bits per value, and these with a bit more
#: for each value, which is set where the value is 0 and no colour.
ABSENT, RAW, HALVED, COLOURS, FILLED_COLOURS = range(5)
_HEADER = 8
_ALIGN = 64


class JoinError(ValueError):
    """Tensors do not join by their rule, or are not of the kind that was learned."""


def record_of(family: ProcessorFamily, values: Mapping[str, torch.Tensor]) -> npt.NDArray[np.uint8]:
    """Stores the tensors of a sample.

    Args:
        family: Tells the tensors.
        values: Those of the sample, by name; all are of the family.

    Returns:
        uint8 (R, bytes per row), the record.

    Raises:
        JoinError: If a tensor is not in the family, or has another dtype or number of dimensions.
    """
    if unknown := values.keys() - {rule.name for rule in family.tensors}:
        raise JoinError(f"the processor returns {min(unknown)}, which it did not return for the trial images")
    headers = np.zeros((len(family.tensors), _HEADER), np.int64)
    pieces: list[npt.NDArray[np.uint8]] = []
    for number, rule in enumerate(family.tensors):
        if (value := values.get(rule.name)) is None:
            continue
        require_kind(rule, value)
        form, stored = _stored(family, rule, value)
        headers[number, : 2 + value.dim()] = (form, value.dim(), *value.shape)
        pieces += [_padded(piece, _ALIGN) for piece in stored]
    content = np.concatenate([headers.reshape(-1).view(np.uint8), *pieces])
    return _padded(content, family.patch_bytes).reshape(-1, family.patch_bytes)


def require_kind(rule: TensorRule, value: torch.Tensor) -> None:
    """Checks that a tensor is as its rule says; a :class:`JoinError` names it if not."""
    found = (str(value.dtype).removeprefix("torch."), value.dim())
    if found != (rule.dtype, rule.dimensions):
        raise JoinError(
            f"{rule.name} is {found[0]} with {found[1]} dimensions, {list(value.shape)}; for the trial images it was "
            f"{rule.dtype} with {rule.dimensions}"
        )


def _padded(content: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
    return np.pad(content, (0, -len(content) % multiple))


def _bytes(value: torch.Tensor) -> npt.NDArray[np.uint8]:
    flat = value.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def _stored(family: ProcessorFamily, rule: TensorRule, value: torch.Tensor) -> tuple[int, list[npt.NDArray[np.uint8]]]:
    """Returns the smallest form that restores a tensor bit for bit, and its bytes."""
    if rule.channels and _fits(rule, value.shape):
        codes = _codes(family, rule, value)
        restored = _colours(family, rule, codes)
        filled = (restored != value) & _is_zero(value)
        if not filled.any() and _equal(restored, value):
            return COLOURS, [_bytes(codes)]
        codes[filled], restored[filled] = 0, 0
        if _equal(restored, value):
            bits = np.packbits(filled.reshape(-1).numpy(), bitorder="little")
            return FILLED_COLOURS, [_bytes(codes), bits]
    if value.dtype == torch.float32 and _equal(value.bfloat16().float(), value):
        return HALVED, [_bytes(value.bfloat16())]
    return RAW, [_bytes(value)]


def _is_zero(value: torch.Tensor) -> torch.Tensor:
    """True for zeros, but not for negative ones, which have other bits."""
    return (value == 0) & ~torch.signbit(value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both have the same bits."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _fits(rule: TensorRule, shape: Sequence[int]) -> bool:
    return shape[rule.channel_axis] == sum(count for _, count in rule.channels)


def _by_channel(rule: TensorRule, value: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Returns views of a tensor, each of the values of one channel."""
    counts = [count for _, count in rule.channels]
    views = torch.split(value, counts, rule.channel_axis)
    return [(channel, view) for (channel, _), view in zip(rule.channels, views, strict=True)]


@cache
def _table(family: ProcessorFamily, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(family.colours, dtype=torch.float32).to(dtype).to(device)


def _codes(family: ProcessorFamily, rule: TensorRule, value: torch.Tensor) -> torch.Tensor:
    """Returns the 8-bit value nearest to each, uint8; the colours are evenly spaced."""
    codes = torch.empty(value.shape, dtype=torch.uint8)
    table = torch.tensor(family.colours, dtype=torch.float64)
    for (channel, out), (_, part) in zip(_by_channel(rule, codes), _by_channel(rule, value), strict=True):
        first, last = table[channel, 0], table[channel, -1]
        scaled = (part.float() - first.float()).mul_(float(255 / (last - first)))
        out.copy_(scaled.round_().clamp_(0, 255).to(torch.uint8))
    return codes


def _colours(family: ProcessorFamily, rule: TensorRule, codes: torch.Tensor) -> torch.Tensor:
    table = _table(family, getattr(torch, rule.dtype), codes.device)
    value = torch.empty(codes.shape, dtype=table.dtype, device=codes.device)
    for (channel, out), (_, part) in zip(_by_channel(rule, value), _by_channel(rule, codes), strict=True):
        out.copy_(table[channel][part.long()])
    return value


@dataclass(frozen=True, eq=False)
class Records:
    """The records of some samples, one after another.

    Attributes:
        content: uint8 (R, bytes per row), on any device.
        rows: Rows of each record.
        headers: int64 (N, tensors, 8), the headers of each record, on the host.
    """

    content: torch.Tensor
    rows: Sequence[int]
    headers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, family: ProcessorFamily, content: torch.Tensor, rows: Sequence[int], headers: object = None) -> Records:
        """Returns records; reads their headers, which waits for the device, if they are not given."""
        if headers is None:
            headers = headers_of(family, content.cpu().numpy(), rows)
        return cls(content, rows, np.asarray(headers, np.int64))


def headers_of(family: ProcessorFamily, content: npt.NDArray[np.uint8], rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns a copy of the headers of records, int64 (N, tensors, 8)."""
    flat, size = content.reshape(-1), len(family.tensors) * _HEADER * 8
    starts = (np.cumsum([0, *rows])[:-1] * family.patch_bytes).tolist()
    copies = [flat[start : start + size].copy().view("<i8") for start in starts]
    return np.array(copies, np.int64).reshape(len(rows), len(family.tensors), _HEADER)


def restored(family: ProcessorFamily, records: Records) -> list[dict[str, torch.Tensor]]:
    """Returns the tensors of each record, by name, bit for bit as they were stored, on the device of the records.

    Raises:
        JoinError: If a header does not fit its record.
    """
    found, begin, content = [], 0, records.content.reshape(-1)
    for rows, headers in zip(records.rows, records.headers, strict=True):
        size = rows * family.patch_bytes
        found.append(_one_restored(family, content[begin : begin + size], headers))
        begin += size
    return found


def _one_restored(
    family: ProcessorFamily, content: torch.Tensor, headers: npt.NDArray[np.int64]
) -> dict[str, torch.Tensor]:
    values, at = dict[str, torch.Tensor](), len(family.tensors) * _HEADER * 8

    def take(size: int) -> torch.Tensor:
        nonlocal at
        if size < 0 or at + size > len(content):
            raise JoinError(f"a header tells {size:,} bytes at {at:,} of a record of {len(content):,}")
        taken, at = content[at : at + size], at + -(-size // _ALIGN) * _ALIGN
        return taken

    for rule, header in zip(family.tensors, headers.tolist(), strict=True):
        form, dimensions, *sizes = header
        if form == ABSENT:
            continue
        shape = sizes[:dimensions]
        if dimensions != rule.dimensions or not all(0 <= size < 2**31 for size in shape):
            raise JoinError(f"the header of {rule.name} tells the form {form} and the sizes {sizes}")
        count, dtype = math.prod(shape), getattr(torch, rule.dtype)
        if form in (COLOURS, FILLED_COLOURS) and rule.channels and _fits(rule, shape):
            value = _colours(family, rule, take(count).reshape(shape))
            if form == FILLED_COLOURS:
                bits = take(-(-count // 8))
                shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
                filled = ((bits[:, None] >> shifts) & 1).reshape(-1)[:count].reshape(shape).bool()
                value = value.masked_fill_(filled, 0)
        elif form == HALVED:
            value = _viewed(take(2 * count), torch.bfloat16).reshape(shape).to(dtype)
        elif form == RAW:
            value = _viewed(take(count * dtype.itemsize), dtype).reshape(shape)
        else:
            raise JoinError(f"the header of {rule.name} tells the form {form}")
        values[rule.name] = value
    return values


def _viewed(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return content.view(dtype) if len(content) else torch.empty(0, dtype=dtype, device=content.device)


def joined(
    rule: TensorRule, values: Sequence[torch.Tensor | None], lengths: Sequence[int], segments: Sequence[int]
) -> torch.Tensor | None:
    """Joins the tensors of the samples of a pack.

    Args:
        rule: Their rule.
        values: That of each sample; None for a sample without.
        lengths: Tokens of each sample.
        segments: Tokens of each sample with its padding; more of them are padding alone.

    Returns:
        The tensor of the pack. Entries of padding, and of samples without the tensor, are 0. None if no sample has one.

    Raises:
        JoinError: If they do not join.
    """
    present = [value for value in values if value is not None]
    if not present:
        return None
    if rule.rule == PER_TOKEN:
        out = present[0].new_zeros((1, sum(segments), *present[0].shape[2:]))
        begin = 0
        for value, length, segment in zip(values, lengths, segments, strict=False):
            if value is not None:
                if value.shape[:2] != (1, length):
                    raise JoinError(f"{rule.name} is {list(value.shape)} for {length} tokens")
                out[:, begin : begin + length] = value
            begin += segment
        return out
    return concatenated(present, rule.axis, rule.filler)


#: Joined tensors of more bytes may have at most so many times the values of their parts. Crafted sizes would take all
#: memory otherwise; images of very different sizes stay far below.
_MOST_FILLED, _MOST_FILLING = 2**30, 256


def concatenated(values: Sequence[torch.Tensor], axis: int, filler: float) -> torch.Tensor:
    """Concatenates tensors, with their other axes filled up to the largest of them.

    Raises:
        JoinError: If almost all of a large tensor would be filler.
    """
    sizes = [max(each) for each in zip(*(value.shape for value in values), strict=True)]
    length = sum(value.shape[axis] for value in values)
    whole_size = length * math.prod(sizes[:axis] + sizes[axis + 1 :])
    own_size = sum(value.numel() for value in values)
    if whole_size * values[0].element_size() > _MOST_FILLED and whole_size > _MOST_FILLING * own_size:
        shapes = [list(value.shape) for value in values]
        raise JoinError(f"tensors of {own_size:,} values would be filled up to {whole_size:,}: {shapes!r:.200}")
    parts = []
    for value in values:
        wanted = [*sizes[:axis], value.shape[axis], *sizes[axis + 1 :]]
        if list(value.shape) != wanted:
            whole = value.new_full(wanted, filler)
            whole[tuple(map(slice, value.shape))] = value
            value = whole
        parts.append(value)
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


def rule_for(
    name: str, values: Sequence[torch.Tensor], together: torch.Tensor | None, lengths: Sequence[int]
) -> TensorRule:
    """Learns how a tensor joins, from samples alone and all of them in one.

    Args:
        name: Its name.
        values: That of each sample alone.
        together: That of one sample of all their images and text, or of a batch of the samples; None if it has a row
            per sample there.
        lengths: Tokens of each sample.

    Raises:
        JoinError: If no rule makes the one of the others; it tells what was seen.
    """
    shapes = [list(value.shape) for value in values]
    kinds = {(value.dtype, value.dim()) for value in values}
    per_token = all(value.dim() == 2 and value.shape == (1, n) for value, n in zip(values, lengths, strict=True))
    if together is None and per_token and len(kinds) == 1:
        return TensorRule(name, str(values[0].dtype).removeprefix("torch."), 2, PER_TOKEN)
    if together is None or len(kinds) > 1 or together.dtype != values[0].dtype:
        whole = "none" if together is None else f"{together.dtype} {list(together.shape)}"
        raise JoinError(f"{name}: it is {shapes} for samples alone, and {whole} for all together")
    dtype, dimensions = str(values[0].dtype).removeprefix("torch."), values[0].dim()
    for kind, axis, filler in _candidates(dimensions):
        try:
            rule = TensorRule(name, dtype, dimensions, kind, axis, filler)
        except TypeError as error:
            raise JoinError(str(error)) from error
        try:
            made = joined(rule, values, lengths, lengths)
        except (JoinError, RuntimeError):
            continue
        if made is not None and made.shape == together.shape and _equal(made, together):
            return rule
    raise JoinError(
        f"{name}: no rule makes {list(together.shape)}, that of all together, of {shapes}, those of samples alone; it "
        "depends on its neighbours"
    )


_FILLERS = (0.0, -1.0, 1.0, -100.0)


def _candidates(dimensions: int) -> Iterable[tuple[str, int, float]]:
    if dimensions >= 2:
        yield PER_TOKEN, 0, 0.0
    for axis in range(min(dimensions, MOST_DIMENSIONS)):
        for filler in _FILLERS:
            yield CONCATENATED, axis, filler


def channels_of(
    value: torch.Tensor, colours: Sequence[Sequence[float]], shown: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], int] | None:
    """Finds the channel of each value, from the tensor of an image of one colour.

    Args:
        value: The tensor.
        colours: The value of each 8-bit value, by channel.
        shown: The 8-bit values of the colour, different in each channel.

    Returns:
        Runs of (channel, length) and the axis that they are along, as in :class:`TensorRule`; None if there is none.
    """
    channel = torch.full(value.shape, -1)
    for number, code in enumerate(shown):
        channel[value == torch.tensor(colours[number][code], dtype=torch.float32).to(value.dtype)] = number
    for axis in range(-1, -value.dim() - 1, -1):
        along = channel.movedim(axis, -1).reshape(-1, value.shape[axis])
        whole = along[(along >= 0).all(1)]
        if len(whole) and (whole == whole[0]).all() and ((along == whole[0]) | (along < 0)).all():
            runs: list[tuple[int, int]] = []
            for each in whole[0].tolist():
                runs[-1:] = [(each, runs[-1][1] + 1)] if runs and runs[-1][0] == each else [*runs[-1:], (each, 1)]
            if len({number for number, _ in runs}) == CHANNELS:
                return tuple(runs), axis
    return None
