"""Megatron-core's remarks on deprecated and absent parts, kept from users: they are for its developers."""

from __future__ import annotations

import logging
import warnings


def quiet_megatron() -> None:
    """Lets only errors of megatron-core and of the compilers it tries through. Call it before importing it."""
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("megatron", "transformer_engine", "torch.distributed.checkpoint"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
