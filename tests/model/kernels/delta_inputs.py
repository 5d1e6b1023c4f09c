"""The kernels before the delta rule and the same in plain torch, for tests on CPU and checks on CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tests.model.helpers import relative
from vlmdata.model.kernels.delta_inputs import DeltaInputs
from vlmdata.model.kernels.short_convolution import DeltaHeads


def drawn(tokens: int, heads: DeltaHeads, taps: int, dtype: torch.dtype, seed: int, apart: int) -> list[torch.Tensor]:
    """The projection, with rows that are ``apart`` more than their width, and the parameters; of one dtype."""
    generator = torch.Generator().manual_seed(seed)
    width = heads.channels + heads.values * (heads.value_width + 2)
    projected = torch.randn(tokens, width + apart, generator=generator).to(dtype)[:, :width]
    # Rates reach from nearly none to strong, as softplus does over its range.
    projected[:, -heads.values :] *= 8
    weight = torch.randn(heads.channels, 1, taps, generator=generator).to(dtype)
    return [projected, weight, *torch.randn(2, heads.values, generator=generator).to(dtype)]


def starts_of(bounds: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """int32 (T,), for each token the first of its sample."""
    starts = [begin for begin, end in itertools.pairwise(bounds) for _ in range(begin, end)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


def plain(inputs: Sequence[torch.Tensor], bounds: Sequence[int], heads: DeltaHeads) -> tuple[torch.Tensor, ...]:
    """The same with torch's own functions, sample by sample."""
    projected, weight, a_log, dt_bias = inputs
    gate = heads.values * heads.value_width
    mixed, gate, beta, alpha = projected.split([heads.channels, gate, heads.values, heads.values], -1)
    pieces = []
    for begin, end in itertools.pairwise(bounds):
        padded = F.pad(mixed[begin:end], (0, 0, weight.shape[-1] - 1, 0))
        pieces.append(F.silu((padded.unfold(0, weight.shape[-1], 1) * weight[:, 0]).sum(-1)))
    keys = heads.keys * heads.key_width
    query, key, value = torch.cat(pieces).split([keys, keys, heads.values * heads.value_width], -1)
    units = []
    for each in (query, key):
        each = each.unflatten(-1, (heads.keys, heads.key_width))
        each = each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6)
        units.append(each.repeat_interleave(heads.values // heads.keys, 1))
    decay = -a_log.exp() * F.softplus(alpha + dt_bias, threshold=100)
    return *units, value.unflatten(-1, (heads.values, heads.value_width)), gate, decay, beta.sigmoid()


def compared(
    bounds: Sequence[int],
    heads: DeltaHeads,
    taps: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    apart: int = 0,
) -> dict[str, float]:
    """The errors of all results and gradients against float64, relative to what each is."""
    inputs = [each.to(device).requires_grad_() for each in drawn(bounds[-1], heads, taps, dtype, seed, apart)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, wanted = DeltaInputs.apply(*inputs, starts_of(bounds, device), heads), plain(exact, bounds, heads)
    assert [each.dtype for each in found] == [dtype] * 4 + [torch.float32, dtype]
    assert all(each.is_contiguous() for number, each in enumerate(found) if number != 3)
    generator = torch.Generator().manual_seed(1)
    # As a kernel may give them: not contiguous.
    pulls = [torch.randn(each.shape[::-1], generator=generator).to(dtype).mT if each.ndim == 2 else
             torch.randn(each.shape, generator=generator).to(dtype) for each in wanted]  # fmt: skip
    pulls[4] = pulls[4].abs()  # the gradients of rate and bias are sums, which should not cancel out
    pulls = [each.to(device) for each in pulls]
    given_ = torch.autograd.grad(found, inputs, [x.to(y.dtype) for x, y in zip(pulls, found, strict=True)])
    wanted_ = torch.autograd.grad(wanted, exact, [x.double() for x in pulls])
    names = ("query", "key", "value", "gate", "decay", "beta", "d projected", "d taps", "d a_log", "d dt_bias")
    errors = {}
    for name, mine, theirs in zip(names, (*found, *given_), (*wanted, *wanted_), strict=True):
        assert mine.shape == theirs.shape, name
        errors[name] = relative(mine, theirs)
    sections = [heads.channels, heads.values * heads.value_width, heads.values, heads.values]
    for name, mine, theirs in zip(
        ("d channels", "d gate", "d beta", "d alpha"),
        given_[0].split(sections, -1),
        wanted_[0].split(sections, -1),
        strict=True,
    ):
        errors[name] = relative(mine, theirs)
    return errors
