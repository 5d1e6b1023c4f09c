"""Compares what a forward and backward pass of a pack gave, as a whole, with that of its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from vlmdata.batch import IGNORE_INDEX
from vlmdata.integrations.check.own import Computed
from vlmdata.integrations.check.packs import SampleBatch
from vlmdata.integrations.check.run import Bench, Gradients

#: Gradients below this share of the whole are as good as zero.
_LEAST_GRADIENT = 1e-3


@dataclass(frozen=True, eq=False)
class Whole:
    """Relative errors of an unchanged run of a pack.

    Attributes:
        outputs: Of ``logits``, ``loss`` and ``mtp_losses.0`` and so on: the largest of a sample.
        gradients: By parameter.
    """

    outputs: Mapping[str, float]
    gradients: Mapping[str, float]


def output_errors(
    outcome: Computed, alone: Sequence[Computed], data: SampleBatch, shares: Sequence[float]
) -> dict[str, float]:
    """Relative errors of what a forward pass returned.

    Args:
        outcome: That of the pack.
        alone: Those of its samples, in pack order.
        data: The pack.
        shares: The share of each sample in the weights of the loss, in pack order.
    """
    errors = {"loss": scalar_error(outcome, alone, data, shares)} if outcome.losses.ndim == 0 else {}
    for name, (found, wanted, unit) in _pairs(outcome, alone).items():
        worst = 0.0
        for rows, part in zip(data.rows, wanted, strict=True):
            begin, end = rows.spans[unit]
            worst = max(worst, relative(found[begin:end], part))
        errors[name] = worst
    return errors


def _pairs(outcome: Computed, alone: Sequence[Computed]) -> dict[str, tuple[torch.Tensor, list[torch.Tensor], str]]:
    pairs: dict[str, tuple[torch.Tensor, list[torch.Tensor], str]] = {}
    if outcome.logits is not None and (logits := [each.logits for each in alone if each.logits is not None]):
        pairs["logits"] = (outcome.logits, logits, "target")
    if outcome.losses.ndim and all(each.losses.ndim for each in alone):
        pairs["loss"] = (outcome.losses, [each.losses for each in alone], "token")
    for depth, mtp in enumerate(outcome.mtp):
        if all(len(each.mtp) > depth for each in alone):
            pairs[f"mtp_losses.{depth}"] = (mtp, [each.mtp[depth] for each in alone], "token")
    return pairs


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference of two tensors, relative to that of the second."""
    size = float(wanted.float().norm())
    error = float((found.float() - wanted.float()).norm()) / max(size, 1e-12)
    return error if error == error else float("inf")


def scalar_error(outcome: Computed, alone: Sequence[Computed], data: SampleBatch, shares: Sequence[float]) -> float:
    """Relative error of the weighted mean loss of a pack."""
    wanted = expected_mean(alone, data, shares)
    found = float(outcome.losses) if outcome.losses.ndim == 0 else wanted
    return abs(found - wanted) / max(abs(wanted), 1e-12)


def expected_mean(alone: Sequence[Computed], data: SampleBatch, shares: Sequence[float]) -> float:
    """The weighted mean loss of a pack, from those of its samples."""
    return sum(share * mean for share, mean in zip(shares, _means(alone, data), strict=True))


def _means(alone: Sequence[Computed], data: SampleBatch) -> Iterator[float]:
    assert data.batch.loss_weights is not None
    for each, rows in zip(alone, data.rows, strict=True):
        begin, end = rows.spans["token"]
        weights = data.batch.loss_weights[0, begin:end].to(each.losses.device)
        per_token = each.losses if each.losses.ndim == 0 else (each.losses * weights).sum() / weights.sum()
        yield float(per_token)


def explained(outcome: Computed, data: SampleBatch) -> tuple[bool | None, str]:
    """Looks for a usual fault that gives just this loss.

    Returns:
        Whether targets of one sample reach another, if that is known, and the fault in words, or "".
    """
    batch = data.batch
    assert batch.labels is not None
    assert batch.input_ids is not None
    assert batch.loss_weights is not None
    labels, ids = batch.labels[0], batch.input_ids[0]
    weights, ones = batch.loss_weights[0], torch.ones(len(labels))
    again = torch.cat([labels[1:], labels.new_full((1,), IGNORE_INDEX)])
    crossing = torch.cat([ids[1:], ids.new_full((1,), IGNORE_INDEX)])
    candidates: list[tuple[bool, str, torch.Tensor, torch.Tensor]] = [
        (False, "it is the mean over targets without batch.loss_weights", labels, ones),
        (True, "batch.labels were shifted again, so targets are a token late and cross borders", again, ones),
        (True, "every next token is a target, also the first of the next sample", crossing, ones),
        (True, "batch.labels were shifted again, so targets are a token late and cross borders", again, weights),
    ]
    if outcome.full is None:
        return None, ""
    full = outcome.full.float().cpu()
    for crosses, words, target, weight in candidates:
        losses = cross_entropy(full, target, reduction="none", ignore_index=IGNORE_INDEX)
        kept = (target != IGNORE_INDEX).float() * weight
        if outcome.losses.ndim:
            error = relative(outcome.losses.cpu(), losses)
        else:
            mean = float((losses * kept).sum() / kept.sum().clamp(min=1e-12))
            error = abs(float(outcome.losses) - mean) / max(abs(mean), 1e-12)
        if error < 1e-4:
            return crosses, words
    return None, ""


def gradient_errors(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """Relative errors of gradients, by parameter; very small ones relative to the norm of all."""
    whole = float(torch.stack([each.norm() for each in wanted.values()]).norm()) if wanted else 0.0
    errors = {}
    for name in wanted.keys() | found.keys():
        one, two = found.get(name), wanted.get(name)
        one = torch.zeros_like(two) if one is None and two is not None else one
        two = torch.zeros_like(one) if two is None and one is not None else two
        assert one is not None
        assert two is not None
        errors[name] = float((one - two).norm()) / max(float(two.norm()), _LEAST_GRADIENT * whole, 1e-12)
    return errors


def reached_by_tokens(bench: Bench, data: SampleBatch) -> bool | None:
    """Whether other text in one sample of a pack changes the outputs of another; for forwards that show no modules."""
    import dataclasses

    assert data.batch.input_ids is not None
    text = ~data.vision_tokens & (data.batch.input_ids[0] == data.batch.input_ids[0])
    with torch.no_grad():
        before = bench.pack(data)
    for source in data.rows:
        begin, end = source.spans["token"]
        places = begin + text[begin:end].nonzero().flatten()
        ids = data.batch.input_ids.clone()
        ids[0, places] = ids[0, places.flip(0)]
        changed = dataclasses.replace(data, batch=dataclasses.replace(data.batch, input_ids=ids))
        with torch.no_grad():
            after = bench.pack(changed)
        for other in data.rows:
            for one, two, unit in ((before.logits, after.logits, "target"), (before.losses, after.losses, "token")):
                if other is source or one is None or two is None or one.ndim == 0:
                    continue
                first, last = other.spans[unit]
                if relative(two[first:last], one[first:last]) > 1e-5:
                    return True
    return False if before.logits is not None or before.losses.ndim else None
