"""Small gradients are added together: megatron-core's sums, bit by bit."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.training.optimizer.toy_gradients import FORMS, Kind, step, wrapped
from tests.model.workers import run_in_all

pytest.importorskip("megatron.core")

SHAPES = [(), (1,), (3,), (4, 1, 5), (8, 8), (16, 9)]
#: Limits at which some of these gradients are large, and a few of them are too many.
LIMITS = {"LARGEST": 288, "MOST": 700}
BF16 = torch.bfloat16


def kinds() -> st.SearchStrategy[Kind]:
    def kind(shape: tuple[int, ...], dtype: torch.dtype, form: str, own: str) -> Kind:
        return Kind(shape, dtype, form, own in ("adds", "shared"), own == "shared", own == "frozen")

    owns = st.sampled_from(["plain", "plain", "plain", "adds", "shared", "frozen"])
    dtypes = st.sampled_from([BF16, BF16, torch.float32])
    return st.builds(kind, st.sampled_from(SHAPES), dtypes, st.sampled_from(FORMS), owns)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Kind], list[list[list[tuple[int, bool]]]]]:
    """Parameters, and by step and micro-batch the uses of them; the first is trained, so that there is a buffer."""
    parameters = [Kind((5,), BF16), *draw(st.lists(kinds(), max_size=12))]
    use = st.tuples(st.integers(0, len(parameters) - 1), st.booleans())
    passes = st.lists(st.lists(use, max_size=20), min_size=1, max_size=3)
    return parameters, draw(st.lists(passes, min_size=1, max_size=2))


def both(parameters: list[Kind], **options: Any) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel

    from vlmdata.model.training.optimizer.small_gradients import GradientBuffers

    return wrapped(GradientBuffers, parameters, **options), wrapped(DistributedDataParallel, parameters, **options)


def limited(**limits: int) -> Any:
    return patch.multiple("vlmdata.model.training.optimizer.small_gradients", **limits)


@given(steps())
@settings(max_examples=150, deadline=None)
def test_sums_are_megatron_cores(
    one_process: None, case: tuple[list[Kind], list[list[list[tuple[int, bool]]]]]
) -> None:
    parameters, found = case
    with limited(**LIMITS):
        ours, theirs = both(parameters)
        for seed, passes in enumerate(found):
            for own, wanted in zip(step(ours, passes, seed), step(theirs, passes, seed), strict=True):
                assert torch.equal(own, wanted)


def of_two_ranks(distributed: bool) -> list[int]:
    """Compares gradients of ranks that send buckets during the backward pass.

    Returns how many gradients each launch added.
    """
    import torch.distributed as dist

    from vlmdata.model.parallel import groups
    from vlmdata.model.training.optimizer.small_gradients import _BucketGroup

    groups.initialize(backend="gloo")
    generator = torch.Generator().manual_seed(3)
    parameters = [Kind(SHAPES[number % 6], (BF16, torch.float32)[number % 5 == 0]) for number in range(40)]
    launches: list[int] = []
    add = torch._foreach_add_
    options = {"overlap_grad_reduce": True, "bucket_size": 200, "use_distributed_optimizer": distributed}
    ours, theirs = both(parameters, **options)
    buckets = len(ours.bucket_groups)
    assert buckets > 4
    sent: list[int] = []
    send = _BucketGroup.start_grad_sync

    def counted(self: Any, *arguments: Any, **named: Any) -> None:
        sent[-1] += torch._C._current_graph_task_id() != -1  # -1 outside of a backward pass
        send(self, *arguments, **named)

    # As in a model, each pass uses all parameters; some twice, in a pass of their own.
    uses = [(number, False) for number in range(40)] + [(number, True) for number in (3, 17, 39)]
    order = [uses[place] for place in torch.randperm(43, generator=generator)]
    for number in range(3):
        seed = 2 * number + dist.get_rank()
        sent.append(0)
        with (
            patch.object(torch, "_foreach_add_", lambda own, *rest: (launches.append(len(own)), add(own, *rest))),
            patch.object(_BucketGroup, "start_grad_sync", counted),
        ):
            own = step(ours, [order, order], seed)
        for name, (each, wanted) in enumerate(zip(own, step(theirs, [order, order], seed), strict=True)):
            assert torch.equal(each, wanted), f"step {number}, parameter {name}"
    # In the first step, megatron-core counts the gradients of each bucket, and sends all at the end.
    assert sent == [0, buckets, buckets]
    return launches


@pytest.mark.parametrize("distributed", [False, True])
def test_a_bucket_is_sent_with_all_gradients(distributed: bool) -> None:
    for launches in run_in_all(of_two_ranks, distributed, world=2):
        assert sum(launches) == 3 * 2 * 43
        assert len(launches) < sum(launches) / 3


def test_gradients_are_added_together_and_large_ones_at_once(one_process: None) -> None:
    parameters = [Kind((64,), BF16)] * 50 + [Kind((4,))] * 20 + [Kind((500,), BF16)]
    uses = [(number, False) for number in range(71)]
    launches: list[int] = []
    add, copy = torch._foreach_add_, torch._foreach_copy_
    with (
        limited(LARGEST=999, MOST=10**6),
        patch.object(torch, "_foreach_add_", lambda own, *rest: (launches.append(len(own)), add(own, *rest))),
        patch.object(torch, "_foreach_copy_", lambda own, *rest: (launches.append(-len(own)), copy(own, *rest))),
    ):
        ours, _ = both(parameters)
        step(ours, [uses], 0)
        assert sorted(launches) == [-50, 20, 50]
        launches.clear()
        step(ours, [uses] * 3, 0)
        assert sorted(launches) == [-50] * 3 + [20] * 3 + [50] * 3


@pytest.mark.parametrize(
    ("form", "largest", "most", "wanted"),
    [("own", 5000, 800, 800), ("part", 5000, 9000, 8160), ("part", 4000, 9000, 0), ("own", 79, 800, 0)],
)
def test_what_waits_is_bounded(one_process: None, form: str, largest: int, most: int, wanted: int) -> None:
    """By the memory that gradients keep, of which they may be a small part."""
    from vlmdata.model.training.optimizer.small_gradients import SmallGradients

    parameters = [Kind((20,), torch.float32, form)] * 30
    seen: list[int] = []
    take = SmallGradients.take

    def watched(self: SmallGradients, parameter: Any, gradient: torch.Tensor) -> bool:
        taken = take(self, parameter, gradient)
        seen.append(sum(each.untyped_storage().nbytes() for each in self._waiting.values()))
        return taken

    with limited(LARGEST=largest, MOST=most), patch.object(SmallGradients, "take", watched):
        ours, _ = both(parameters)
        step(ours, [[(number, False) for number in range(30)]], 0)
    assert max(seen) == wanted


def test_a_gradient_after_its_bucket_is_sent_is_added(one_process: None) -> None:
    """As by megatron-core. Ranks would differ in it, but one rank sends nothing."""
    ours, theirs = both([Kind((5,), BF16), Kind((3,))], overlap_grad_reduce=True)
    for seed, uses in enumerate([[(0, False), (1, False)], [(0, True), (0, False), (1, False)]]):
        own, wanted = (step(each, [uses], seed) for each in (ours, theirs))
        assert all(torch.equal(*each) for each in zip(own, wanted, strict=True))


def test_what_waits_of_a_pass_that_failed_is_forgotten(one_process: None) -> None:
    ours, theirs = both([Kind((5,), BF16), Kind((3,))])
    ours([(0, False), (1, False)], torch.Generator()).backward()
    wanted = step(theirs, [[(1, False)]], 1)
    assert all(torch.equal(*each) for each in zip(step(ours, [[(1, False)]], 1), wanted, strict=True))


def test_the_trainer_has_them(one_process: None) -> None:
    from tests.model.training.optimizer.test_weight_copies import learner
    from vlmdata.model.training.optimizer.small_gradients import GradientBuffers

    assert type(learner(torch.float32).model[0]) is GradientBuffers
