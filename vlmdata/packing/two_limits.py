"""Packing under two limits: tokens and vision patches per pack.

Patches are nearly a function of tokens, so as a rule one limit decides and the other is rarely touched. The deciding
one (with the greater lower bound) is packed alone, which is fast and tight; packs that break the other limit are
emptied, together with enough packs that have room to spare in it, and their samples packed again under both limits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlmdata.packing.cells import pack_pairs
from vlmdata.packing.lower_bound import bin_lower_bound
from vlmdata.packing.one_limit import Bins, fill_up, group_items, pack_sizes
from vlmdata.packing.seeding import derive_key

IntArray = npt.NDArray[np.int64]

# Packs are emptied until their average use of the broken limit is down to this share of it: best fit needs some slack.
_REPACK_LOAD = 0.96
# A limit whose lower bound is below this share of the other's does not decide; in between both ways are tried.
_CLEARLY_LESS = 0.9


def pack_samples(tokens: IntArray, patches: IntArray, capacity: int, max_patches: int | None, key: int) -> Bins:
    """Pack samples under a token limit and, if given, a patch limit.

    Args:
        tokens: int64 (n,), aligned token lengths in alignment units, each in ``[1, capacity]``.
        patches: int64 (n,), each in ``[0, max_patches]``.
        capacity: Alignment units per pack.
        max_patches: Patches per pack, or None for no limit.
        key: Stream key.

    Returns:
        The packs; every sample once, no limit broken. A function of the arguments only.
    """
    if max_patches is None or not len(tokens):
        return pack_sizes(tokens, capacity, key)
    token_bound = bin_lower_bound(*np.unique(tokens, return_counts=True), capacity)
    patch_bound = bin_lower_bound(*np.unique(patches, return_counts=True), max_patches)
    ways: list[Bins] = []
    if token_bound >= patch_bound * _CLEARLY_LESS:
        bins = pack_sizes(tokens, capacity, key)
        ways.append(_repack_broken(bins, tokens, patches, capacity, max_patches, key))
    if patch_bound >= token_bound * _CLEARLY_LESS:
        ways.append(_pack_by_patches(tokens, patches, capacity, max_patches, key))
    return min(ways, key=lambda way: way.num_bins)


def lower_bound(tokens: IntArray, patches: IntArray, capacity: int, max_patches: int | None) -> int:
    """Lower bound on the packs: the greater of the bounds of the two limits taken alone.

    Args:
        tokens: As for :func:`pack_samples`.
        patches: As for :func:`pack_samples`.
        capacity: As for :func:`pack_samples`.
        max_patches: As for :func:`pack_samples`.

    Returns:
        The bound; 0 without samples.
    """
    bound = bin_lower_bound(*np.unique(tokens, return_counts=True), capacity)
    if max_patches is not None:
        bound = max(bound, bin_lower_bound(*np.unique(patches, return_counts=True), max_patches))
    return bound


def _pack_by_patches(tokens: IntArray, patches: IntArray, capacity: int, max_patches: int, key: int) -> Bins:
    """Pack the samples that have patches by patches; text then fills the tokens left over."""
    with_patches = np.flatnonzero(patches)
    text = np.flatnonzero(patches == 0)
    image_tokens, image_patches = tokens[with_patches], patches[with_patches]
    unit = int(np.gcd.reduce(image_patches))  # merged images: a multiple of 4; fewer distinct sizes
    bins = pack_sizes(image_patches // unit, max_patches // unit, key)
    bins = _repack_broken(bins, image_patches, image_tokens, max_patches, capacity, key)
    room = capacity - bins.sums(image_tokens)
    labels, num_bins = fill_up(room, tokens[text], capacity, derive_key("text", key))
    items = np.concatenate([with_patches, text])
    return group_items(items, np.concatenate([bins.bin_of_item(), labels]), num_bins)


def _repack_broken(
    bins: Bins, packed: IntArray, other: IntArray, packed_limit: int, other_limit: int, key: int
) -> Bins:
    """Empty the bins that break the other limit, and some that have room in it, and pack those under both."""
    use = bins.sums(other)
    broken = use > other_limit
    if not broken.any():
        return bins
    emptied = broken | _partners(use, broken, int(other_limit * _REPACK_LOAD))
    label = bins.bin_of_item()
    pool = np.flatnonzero(emptied[label])
    again, used = pack_pairs(packed[pool], other[pool], packed_limit, other_limit, derive_key("repack", key))
    label = (np.cumsum(~emptied) - 1)[label]
    kept = int((~emptied).sum())
    label[pool] = again + kept
    return group_items(np.arange(len(packed)), label, kept + used)


def _partners(use: IntArray, broken: npt.NDArray[np.bool_], target: int) -> npt.NDArray[np.bool_]:
    """Choose the bins that use least, as many as bring the average of all emptied bins down to ``target``."""
    excess = int((use[broken] - target).sum())
    spare = np.where(broken, 0, np.maximum(target - use, 0))
    order = np.argsort(-spare, kind="stable")
    given = np.cumsum(spare[order])
    count = min(int(np.searchsorted(given, excess)) + 1, int((spare > 0).sum()))
    chosen = np.zeros(len(use), np.bool_)
    chosen[order[:count]] = True
    return chosen
