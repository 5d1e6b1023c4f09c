"""Faults of megatron-core 0.19.2 that we do not have (DESIGN section 4), each where it would show.

1. Without sequence parallelism the delta net's ``out_norm`` gradient is not summed over tensor-parallel ranks: the
   layout "tensor 2, no sequence parallelism" of ``test_layouts.py``.
2. Padded boundaries in packed sequences: ``test_padding_has_no_influence`` of ``test_parity.py``.
3. The logged multi-token prediction loss is a mean of ranks' means: ``metrics`` in ``test_layouts.py``, and below.
4. ``A_log`` is exponentiated in the parameters' dtype: below.
5. A context-parallel rank that branches on its own data before a collective hangs the others: the context-parallel
   layouts of ``test_layouts.py`` hold packs of which some rank encodes no image, and packs without any.
6. ``Function.apply`` with keyword arguments, in the gather of image embeddings: below.
7. An embedding that is scattered twice, or never, under sequence parallelism: below, and all such layouts.
8. A redundant output-layer entry with pipeline stages, multi-token prediction and tied embeddings:
   ``test_checkpoints_travel_between_layouts[tied]``.

Found since:

9. The load-balancing loss of a pack that is all padding is not a number: ``test_load_balancing.py``.
10. The delta net uses the convolution's weight without calling the convolution, so nothing waits for the overlapped
    gather of that weight: below.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.model.conftest import Pair
from tests.model.helpers import mixed_samples, pack

pytest.importorskip("megatron.core")


def test_metrics_are_sums_over_sums() -> None:
    """Two ranks' worth of targets, 1 and 99: the mean is over all of them, not over two means."""
    from vlmdata.model.metrics import MetricSums

    metrics = MetricSums()
    metrics.add("loss", torch.tensor(10.0), torch.tensor(1))
    metrics.add("loss", torch.tensor(99.0), torch.tensor(99))
    assert metrics.pop(("loss", "never"))["loss"] == pytest.approx(109 / 100)
    assert metrics.pop(("loss",)) == {}


def test_decay_is_exponentiated_in_float32(make_pair: Callable[..., Pair]) -> None:
    """With bfloat16 parameters the decay equals transformers' formula exactly."""
    layer = make_pair(precision="bf16").ours.language.decoder.layers[0].self_attention
    alpha, beta = torch.randn(1, 50, 8).bfloat16(), torch.randn(1, 50, 8).bfloat16()
    decay, _ = layer._compute_g_and_beta(layer.A_log, layer.dt_bias, alpha, beta)
    wanted = -layer.A_log.float().exp() * F.softplus(alpha.float() + layer.dt_bias)
    rounded = -layer.A_log.exp() * F.softplus(alpha.float() + layer.dt_bias)
    assert decay.dtype == torch.float32
    assert torch.equal(decay, wanted)
    assert not torch.equal(decay, rounded)


def test_gathering_rows_has_a_gradient(one_process: None) -> None:
    """The exchange itself, with counts of which some are zero; its sums over ranks are in the layouts."""
    import torch.distributed as dist

    from vlmdata.model.parallel.exchange import _AllGatherRows, all_gather_rows

    for count in (0, 3):
        rows = torch.randn(count, 5, requires_grad=True)
        for gathered in (
            all_gather_rows(rows, [count], dist.group.WORLD),
            _AllGatherRows.apply(rows, (count,), dist.group.WORLD, True),
            _AllGatherRows.apply(rows, (count,), dist.group.WORLD, False),
        ):
            assert torch.equal(gathered, rows)
            (gradient,) = torch.autograd.grad((gathered * 2).sum(), rows)
            assert torch.equal(gradient, torch.full_like(rows, 2))


def test_hidden_states_have_one_row_per_token(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    shapes = []
    pair.ours.language.decoder.layers[0].register_forward_pre_hook(
        lambda _m, _a, kwargs: shapes.append(kwargs["hidden_states"].shape), with_kwargs=True
    )
    batch = pack(mixed_samples())
    pair.ours(batch)
    assert shapes == [(batch.total_tokens, 1, 64)]


def test_bfloat16_follows_float32(make_pair: Callable[..., Pair]) -> None:
    """The whole model in bfloat16: 8 bits of significand over a handful of layers leave two digits."""
    batch = pack(mixed_samples())
    losses = [float(make_pair(mtp=1, precision=precision).ours(batch).sum()) for precision in ("fp32", "bf16")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.parametrize("moe", [False, True])
def test_every_module_with_weights_is_called(moe: bool, make_pair: Callable[..., Pair]) -> None:
    """The distributed optimizer's overlapped gather waits for weights where their module is called, and only there."""
    pair = make_pair(moe=moe, mtp=1)
    owners = {name: each for name, each in pair.ours.named_modules() if list(each.parameters(recurse=False))}
    called: set[str] = set()
    hooks = [each.register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name, each in owners.items()]
    pair.ours(pack(mixed_samples(), tail=24))
    for hook in hooks:
        hook.remove()
    assert owners.keys() == called
