"""Compiles FlashAttention 4's kernels into its cache: ``python -m model.kernels.compile_flash WIDTH``.

FlashAttention 4 otherwise compiles a kernel at its first launch. This module calls it in a process that sees no GPU,
with tensors without content. That gives the same kernels under the same keys of its cache. One fork compiles each.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.kernels.configurations import HOPPER
from model.kernels.flash_cache import CompiledAhead
from model.kernels.forks import in_forks, machine_has_hopper

#: Values that FlashAttention 4 and CUTLASS's compiler otherwise ask a GPU for. FlashAttention 4 reads the number of
#: multiprocessors, but no kernel of the tower depends on it.
_TARGET = {
    "FLASH_ATTENTION_ARCH": f"sm_{HOPPER[0]}{HOPPER[1]}",
    "CUTE_DSL_ARCH": f"sm_{HOPPER[0]}{HOPPER[1]}a",
    "FLASH_ATTENTION_NUM_SMS": "132",
}
#: Number of images, patches per image, and heads. The kernels are the same for any number of heads, for up to 256
#: images, and for more than 192 patches in the largest image.
_IMAGES, _PATCHES, _HEADS = 4, 3450, 16


def pretend_hopper() -> None:
    """Makes this process compile for a Hopper GPU without using one. Call it before torch is imported.

    If the process saw a GPU, tensors without content would open a CUDA context, and forks do not survive one.
    """
    os.environ.update(_TARGET, CUDA_VISIBLE_DEVICES="")
    import torch

    torch.cuda.current_device = lambda: 0


@dataclass(frozen=True)
class FlashKernel:
    """A kernel that FlashAttention 4 asks its cache for.

    Attributes:
        cache: FlashAttention 4's cache.
        key: The kernel's key in the cache.
        file: The kernel's file in the cache.
        compile: Compiles it; None if the cache has it.
    """

    cache: Any
    key: tuple[Any, ...]
    file: Path
    compile: Callable[[], Any] | None

    def save(self) -> dict[str, Any]:
        """Compiles the kernel and saves it in the cache's folder.

        Raises:
            OSError: If the file could not be written. FlashAttention 4 itself does not report this.
        """
        assert self.compile is not None
        self.cache[self.key] = self.compile()
        if not self.file.exists():
            raise OSError(f"{self.file} could not be written")
        return {"kernel": self.file.parent.name, "cached": False}


def collect(run: Callable[[], None]) -> list[FlashKernel]:
    """Runs a function and returns the kernels that it needs, without compiling any."""
    found: dict[Path, FlashKernel] = {}
    with _collecting(found):
        run()
    return list(found.values())


@contextlib.contextmanager
def _collecting(found: dict[Path, FlashKernel]) -> Iterator[None]:
    """Makes FlashAttention 4 note kernels in ``found`` instead of compiling them."""
    from cutlass import cute
    from flash_attn.cute.cache_utils import JITCache, JITPersistentCache

    compiler, contains, put = cute.compile, JITPersistentCache.__contains__, JITPersistentCache.__setitem__

    def note(cache: Any, key: tuple[Any, ...], compile_it: Callable[[], Any] | None) -> None:
        file = cache.cache_path / f"{cache._key_to_hash(key)}.o"
        found.setdefault(file, FlashKernel(cache, key, file, compile_it))

    def is_there(cache: Any, key: tuple[Any, ...]) -> bool:
        if contains(cache, key):
            note(cache, key, None)
            return True
        return False

    def store(cache: Any, key: tuple[Any, ...], compile_it: Callable[[], Any]) -> None:
        note(cache, key, compile_it)
        JITCache.__setitem__(cache, key, compile_it)  # so that it is asked for once

    cute.compile = lambda *args, **options: functools.partial(compiler, *args, **options)
    JITPersistentCache.__contains__, JITPersistentCache.__setitem__ = is_there, store
    try:
        yield
    finally:
        cute.compile = compiler
        JITPersistentCache.__contains__, JITPersistentCache.__setitem__ = contains, put


def run_tower_attention(width: int) -> None:
    """Calls attention like :class:`model.network.vision_attention.FlashAttention`, with tensors without content.

    Args:
        width: Width of a head.
    """
    import torch
    from flash_attn.cute.interface import flash_attn_varlen_func
    from torch._subclasses.fake_tensor import FakeTensorMode

    for trained in (True, False):  # a frozen tower and evaluation keep nothing for the backward pass
        with FakeTensorMode():
            shape = (_IMAGES * _PATCHES, _HEADS, width)
            parts = [torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=trained) for _ in range(3)]
            bounds = torch.empty(_IMAGES + 1, dtype=torch.int32, device="cuda")
            out, _ = flash_attn_varlen_func(
                *parts, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=_PATCHES, max_seqlen_k=_PATCHES
            )
            if trained:
                out.grad_fn.apply(torch.empty_like(out), None)  # torch's own backward pass would ask for a GPU


def main() -> None:
    """Compiles the kernels for heads of the width on the command line."""
    width = int(sys.argv[1])
    if not machine_has_hopper():
        return
    pretend_hopper()
    kernels = collect(lambda: run_tower_attention(width))
    missing = [kernel for kernel in kernels if kernel.compile is not None]
    if missing:
        print(json.dumps({"kernels": len(missing)}), flush=True)
    if in_forks([kernel.save for kernel in missing], len(os.sched_getaffinity(0))):
        sys.exit(1)
    CompiledAhead.of(width).note([kernel.file for kernel in kernels])


if __name__ == "__main__":
    main()
