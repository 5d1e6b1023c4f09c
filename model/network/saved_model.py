"""State of a model in checkpoints, which is the same with both back ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.module import MegatronModule


class SavedModel(MegatronModule):
    """A model whose state has no statistics of Transformer Engine.

    These extra states are scaling histories of one FP8 recipe, which a run rebuilds within a few steps. Without them
    both back ends write the same keys, and each reads the other's checkpoints.
    """

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns megatron-core's sharded state without extra states."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return {name: entry for name, entry in state.items() if not _is_extra_state(name)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict as torch does, but allows missing extra states.

        Raises:
            RuntimeError: If parameters are missing or unexpected, and ``strict``.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [name for name in result.missing_keys if not _is_extra_state(name)]
        unexpected = [name for name in result.unexpected_keys if not _is_extra_state(name)]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state does not fit the model: missing {missing[:8]} ({len(missing)}), "
                f"unexpected {unexpected[:8]} ({len(unexpected)})"
            )
        return result


def _is_extra_state(name: str) -> bool:
    """True for Transformer Engine's FP8 statistics: one per layer or one per expert (``_extra_state3``)."""
    return name.rpartition(".")[2].startswith("_extra_state")
