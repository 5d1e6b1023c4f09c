"""FlashAttention 4's kernels are compiled ahead, for runs whose tower uses it, under the keys that they ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import model.training.kernels
from model.kernels.ahead import Kernels, KernelsAhead
from model.kernels.flash_cache import CompiledAhead, flash_attention_4_is_installed
from model.training.kernels import compile_ahead
from model.training.settings.config_loading import load_config

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
ROOT = Path(__file__).resolve().parents[3]

needs_flash = pytest.mark.skipif(not flash_attention_4_is_installed(), reason="no FlashAttention 4 here")


def in_a_process(call: str, cache: Path, *arguments: object) -> Any:
    """In a process of its own: FlashAttention 4 reads its environment when it is imported."""
    code = f"import {__name__} as here; here.{call}(*{arguments!r})"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {ENABLED: "1", FOLDER: str(cache), "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compiled(width: int) -> None:
    """Runs the module as on a machine with a Hopper GPU, and prints whether the next start would compile."""
    from model.kernels import compile_flash

    compile_flash.machine_has_hopper = lambda: True
    sys.argv = ["compile_flash", str(width)]
    compile_flash.main()
    print(json.dumps(CompiledAhead.of(width).holds()))


def trained_and_evaluated(width: int, lengths: tuple[int, ...]) -> None:
    """Runs the tower's attention on images without content, and prints which kernels it compiled, or wished to."""
    from model.kernels.compile_flash import collect, pretend_hopper

    pretend_hopper()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from model.network import vision_attention

    vision_attention._split_and_rotate = lambda mixed, *_: mixed.unbind(-2)  # the real one launches a Triton kernel
    attention = vision_attention.FlashAttention()

    def run() -> None:
        for trained in (True, False):
            with FakeTensorMode():
                mixed = torch.empty(
                    sum(lengths), 12, 3, width, dtype=torch.bfloat16, device="cuda", requires_grad=trained
                )
                bounds = torch.empty(len(lengths) + 1, dtype=torch.int32, device="cuda")
                images: Any = SimpleNamespace(cu_seqlens=bounds, longest=max(lengths))
                out = attention(mixed, None, images)
                if trained:
                    node = out.grad_fn.next_functions[0][0]
                    assert "FlashAttnVarlenFunc" in node.name()
                    node.apply(torch.empty(sum(lengths), 12, width, dtype=torch.bfloat16, device="cuda"), None)

    kernels = collect(run)
    print(json.dumps({each.file.parent.name: each.compile is not None for each in kernels}))


@needs_flash
@pytest.mark.parametrize("width", [64, 72])
def test_a_run_finds_every_kernel(tmp_path: Path, width: int) -> None:
    pytest.importorskip("megatron.core")
    names = {"fwd", "bwd_pre", "bwd", "bwd_post"}
    lengths = (1024, 3450, 200)
    assert in_a_process("trained_and_evaluated", tmp_path, width, lengths) == dict.fromkeys(names, True)
    assert in_a_process("compiled", tmp_path, width) is True
    assert in_a_process("trained_and_evaluated", tmp_path, width, lengths) == dict.fromkeys(names, False)
    assert sorted(file.parent.name for file in tmp_path.rglob("*.o")) == sorted([*names, "fwd"]), "fwd for two cases"
    assert in_a_process("trained_and_evaluated", tmp_path, width, (64,))["fwd"] is True, "of small images only"


@needs_flash
def test_without_room_nothing_is_noted(tmp_path: Path) -> None:
    """FlashAttention 4 itself goes on silently if it cannot write."""
    assert in_a_process("unwritable", tmp_path) == 1
    assert not list(tmp_path.glob("ahead-*"))


def unwritable() -> None:
    """Runs the module with kernels that cannot be exported."""
    from model.kernels import compile_flash

    compile_flash.machine_has_hopper = lambda: True
    compile_flash.pretend_hopper()
    from flash_attn.cute.cache_utils import JITPersistentCache

    JITPersistentCache._try_export_to_storage = lambda *_: None
    sys.argv = ["compile_flash", "64"]
    try:
        compile_flash.main()
    except SystemExit as end:
        print(json.dumps(end.code))


class TestTheStart:
    """For which runs it is compiled."""

    @pytest.fixture(autouse=True)
    def started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kernels | None, int | None]]:
        found: list[tuple[Kernels | None, int | None]] = []
        monkeypatch.setattr(model.training.kernels, "can_compile_ahead", lambda: False)
        monkeypatch.setattr(model.training.kernels, "flash_attention_4_is_installed", lambda: True)
        monkeypatch.setattr(KernelsAhead, "of", lambda *given: found.append(given))
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setenv(ENABLED, "")  # what is set within the test is undone after it
        monkeypatch.delenv(ENABLED)
        monkeypatch.setenv(FOLDER, str(tmp_path / "kept"))
        return found

    def start(self, **settings: Any) -> None:
        compile_ahead(load_config(None, [(name.replace("__", "."), value) for name, value in settings.items()]))

    @pytest.mark.parametrize("family", ["2b", "qwen3-vl-2b"])
    @pytest.mark.parametrize("wanted", ["auto", "flash_attention_4"])
    def test_if_the_tower_uses_it(self, started: list[Any], family: str, wanted: str) -> None:
        self.start(model__preset=family, model__vision_attention=wanted)
        assert started == [(None, 64)]
        assert os.environ[ENABLED] == "1", "the process that compiles inherits the folder"

    @pytest.mark.parametrize("preset", ["9b", "qwen3-vl-8b"])
    def test_not_for_heads_whose_gradients_are_wrong(self, started: list[Any], preset: str) -> None:
        self.start(model__preset=preset)
        assert not started

    @pytest.mark.parametrize(
        "settings",
        [
            {"model__vision_attention": "transformer_engine"},
            {"model__language_only": True},
            {"model__backend": "torch"},
            {"run__precision": "fp32"},
        ],
    )
    def test_not_if_the_tower_does_not(self, started: list[Any], settings: dict[str, Any]) -> None:
        self.start(model__preset="2b", **settings)
        assert not started

    def test_not_without_the_package(self, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model.training.kernels, "flash_attention_4_is_installed", lambda: False)
        self.start(model__preset="2b")
        assert not started

    def test_not_if_the_user_keeps_nothing(self, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENABLED, "0")
        self.start(model__preset="2b")
        assert not started

    def test_once_on_a_node(self, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        self.start(model__preset="2b")
        assert not started

    def test_not_again_until_a_file_is_gone(self, started: list[Any], tmp_path: Path) -> None:
        kernel = tmp_path / "kept" / "fingerprint" / "fwd" / "a.o"
        kernel.parent.mkdir(parents=True)
        kernel.write_text("code")
        CompiledAhead.of(64).note([kernel])
        self.start(model__preset="2b")
        assert not started
        kernel.unlink()
        self.start(model__preset="2b")
        assert started == [(None, 64)]

    def test_again_with_another_version(self, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.start(model__preset="2b")  # makes the folder
        CompiledAhead.of(64).note([])
        assert CompiledAhead.of(64).holds()
        assert not CompiledAhead.of(72).holds()
        monkeypatch.setattr("model.kernels.flash_cache._version", lambda package: f"{package} of tomorrow")
        assert not CompiledAhead.of(64).holds()
