"""Adam's moments in bfloat16 or on the host: torch's AdamW in float32, and close to it with half the bytes."""

from __future__ import annotations

import mmap
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.training.conftest import steps_of, train_here
from vlmdata.model.training.optimizer import compact_adam
from vlmdata.model.training.optimizer.compact_adam import MOMENTS, CompactAdamW, host_memory

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (11,), (3, 2, 4))]


def trained(own: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for each in own:
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()
    return [each.detach() for each in own]


@pytest.mark.parametrize("on_host", [False, True])
def test_in_float32_it_is_torchs(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size."""
    monkeypatch.setattr(compact_adam, "PIECE", 6)
    theirs, ours = parameters(), parameters()
    groups = [
        [{"params": own[:2], "weight_decay": 0.1, **SETTINGS}, {"params": own[2:], "weight_decay": 0.0, **SETTINGS}]
        for own in (theirs, ours)
    ]
    wanted = trained(theirs, torch.optim.AdamW(groups[0]))
    found = trained(ours, CompactAdamW(groups[1], torch.float32, on_host))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_in_bfloat16_it_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = parameters(), parameters()
    optimizer = CompactAdamW([{"params": ours, "weight_decay": 0.1, **SETTINGS}], torch.bfloat16, False)
    wanted = trained(theirs, torch.optim.AdamW(theirs, weight_decay=0.1, **SETTINGS))  # type: ignore[arg-type]
    for start, a, b in zip(parameters(), trained(ours, optimizer), wanted, strict=True):
        assert 0 < (a - b).norm() < 0.01 * (b - start.detach()).norm()
    assert all(optimizer.state[each][name].dtype == torch.bfloat16 for each in ours for name in MOMENTS)


def mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


def tell(queue: Any, address: int) -> None:
    queue.put(mapped(address))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_processes_do_not_have_host_memory() -> None:
    """Page-locked memory would be copied for each of them."""
    own = host_memory(2**20, torch.bfloat16, page_locked=False)
    assert own.dtype == torch.bfloat16
    assert not own.any()
    assert mapped(own.data_ptr())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=tell, args=(queue, own.data_ptr()))
    child.start()
    assert queue.get(timeout=60) is False
    child.join()
    own += 1
    assert own.float().sum() == 2**20


def test_host_memory_takes_no_advice_that_only_linux_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        monkeypatch.delattr(mmap, advice, raising=False)
    assert not host_memory(8, torch.float32, page_locked=False).any()


@pytest.mark.slow
def test_runs_continue_from_each_other(whole: Path, chats: Path, tmp_path: Path) -> None:
    """On the host: the undisturbed run, from and to checkpoints without it. In bfloat16: near it."""
    pytest.importorskip("megatron.core")
    out = tmp_path / "run"
    compact = {"parallel__fsdp": True, "optimizer__offload": True}
    train_here(out, chats, run__steps=1)
    train_here(out, chats, resume=True, run__steps=2, **compact)
    train_here(out, chats, resume=True, run__steps=3, **compact)
    train_here(out, chats, resume=True, run__steps=4)
    for found, wanted in zip(steps_of(out), steps_of(whole), strict=False):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    train_here(out, chats, resume=True, run__steps=5, **compact, optimizer__moments="bf16")
    train_here(out, chats, resume=True, run__steps=6)  # from moments in bfloat16 to float32
    for last, wanted in zip(steps_of(out)[4:], steps_of(whole)[4:], strict=True):
        assert last["loss"] == pytest.approx(wanted["loss"], rel=2e-3)
    assert last["loss"] != wanted["loss"]


def test_host_memory_is_unlocked_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA takes what is mapped there next for page-locked, and copies from it after it has changed."""
    calls: list[tuple[str, bool]] = []

    def mapped(address: int) -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
        return any(first <= address < end for first, end in bounds)

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("lock", mapped(address)))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unlock", mapped(address)))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    memory = host_memory(2**20, torch.float32, page_locked=True)
    part = memory[4096:]
    del memory
    assert calls == [("lock", True)]  # a part of it is in use
    del part
    assert calls == [("lock", True), ("unlock", True)]
