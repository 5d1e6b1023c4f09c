"""Finds out whether tokens of one sample reach another: a module is computed again with some of its inputs changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from vlmdata.integrations.check.packs import SampleBatch, SampleSpans
from vlmdata.integrations.check.record import Site, Tensors, named_arguments, not_shared, replaced, tensors_of

#: A change of an output row above this share of its size is an influence. The inputs of a sample change by about 1.
_SEEN = 1e-6
#: ``A_log`` with which a state is multiplied by less than exp(-100) from each token to the next.
_FORGETS = 10.0


@dataclass(frozen=True)
class Influence:
    """How far samples of a pack reach into others, through one module.

    Attributes:
        pairs: Keys of (changed sample, sample that changed with it).
        largest: Largest relative change of a row of another sample.
        near: Whether the last tokens of a sample reach another, as through a short convolution.
        far: Whether the tokens before these do.
        convolution: How far samples reach through the convolution of a layer whose state reaches others, too.
    """

    pairs: tuple[tuple[str, str], ...]
    largest: float
    near: bool
    far: bool
    convolution: Influence | None = None

    @property
    def crosses(self) -> bool:
        """Whether any sample reaches another."""
        return bool(self.pairs)


def probe(
    place: Site,
    compute: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    data: SampleBatch,
    unit: str,
    into: Mapping[str, int],
    out: Mapping[str, int],
) -> Influence:
    """Changes each sample's rows in the inputs of a call, and looks at those of the others in its outputs.

    Args:
        place: What is called.
        compute: The call.
        args: Its arguments.
        kwargs: Its keyword arguments.
        data: The pack.
        unit: What a row is: ``token`` or ``patch``.
        into: The axis of rows of each input that has one, by path.
        out: The axis of rows of each output that has one, by path.
    """
    names = list(named_arguments(place.module, args, {}, bool(place.function)))

    def outputs(begin: int, end: int) -> Tensors:
        def noisy(path: str, tensor: torch.Tensor) -> torch.Tensor:
            return _noisy(tensor, into[path], begin, end) if path in into and end > begin else tensor

        given = [replaced(value, noisy, name) for name, value in zip(names, args, strict=True)]
        named = {name: replaced(value, noisy, name) for name, value in not_shared(kwargs).items()}
        return {path: each for path, each in tensors_of(compute(*given, **named)).items() if path in out}

    def change(before: Tensors, after: Tensors, rows: SampleSpans) -> float:
        return max(_change(before[path], after[path], out[path], *rows.spans[unit]) for path in before)

    def influence(wanted: tuple[str, ...]) -> Influence:
        before, again = outputs(0, 0), outputs(0, 0)
        others = [each for each in data.rows if each.count(unit)]
        seen = max(_SEEN, 3 * max(change(before, again, each) for each in others))
        pairs: dict[tuple[str, str], float] = {}
        reached = set()
        for (begin, end), source in zip(_segments(data, unit), data.rows, strict=True):
            for first, last, part in _parts(begin, end, place.module):
                after = outputs(first, last) if part in wanted else before
                for other in others:
                    if other is not source and (found := change(before, after, other)) > seen:
                        pair = (source.key, other.key)
                        pairs[pair] = max(found, pairs.get(pair, 0.0))
                        reached.add(part)
        return Influence(tuple(pairs), max(pairs.values(), default=0.0), "near" in reached, "far" in reached)

    found = influence(("near", "far"))
    decay = getattr(place.module, "A_log", None)
    if place.function or not (found.near and found.far) or not isinstance(decay, torch.Tensor):
        return found
    with _forgetting(decay):  # the state hides what the convolution lets through
        through = influence(("near",))
    return replace(found, convolution=through if through.crosses else None)


@contextmanager
def _forgetting(decay: torch.Tensor) -> Iterator[None]:
    """Lets the state of a delta rule decay to nothing from each token to the next."""
    kept = decay.detach().clone()
    try:
        with torch.no_grad():
            decay.fill_(_FORGETS)
        yield
    finally:
        with torch.no_grad():
            decay.copy_(kept)


def _parts(begin: int, end: int, module: torch.nn.Module) -> list[tuple[int, int, str]]:
    """Parts of a segment that are changed one by one: of a layer with a convolution, what that sees, and the rest."""
    size = getattr(module, "conv_kernel_size", None)
    border = max(begin, end - int(size) + 1) if isinstance(size, int) else end
    return [part for part in ((begin, border, "far"), (border, end, "near")) if part[1] > part[0]]


def _segments(data: SampleBatch, unit: str) -> list[tuple[int, int]]:
    """The rows of each sample, padding included: a convolution may see no more of a sample than its padding."""
    if unit != "token":
        return [each.spans[unit] for each in data.rows]
    return list(pairwise(data.batch.host.cu_seqlens_padded.tolist()))


def _noisy(tensor: torch.Tensor, axis: int, begin: int, end: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    changed = tensor.clone()
    part = changed.narrow(axis, begin, end - begin)
    noise = torch.randn(part.shape, generator=generator).to(part.device, part.dtype)
    part.add_(noise * tensor.float().std().to(part.dtype))
    return changed


def _change(before: torch.Tensor, after: torch.Tensor, axis: int, begin: int, end: int) -> float:
    if before.shape != after.shape:
        return 0.0
    one, two = before.movedim(axis, 0)[begin:end].float(), after.movedim(axis, 0)[begin:end].float()
    size = one.flatten(1).norm(dim=1).clamp(min=1e-12)
    return float(((two - one).flatten(1).norm(dim=1) / size).max())
