"""Checks that a parallel layout fits the sizes of a Qwen3.5-VL."""

from __future__ import annotations

from vlmdata.model.families.qwen3_5.architecture import Qwen35Architecture
from vlmdata.model.network.settings import ModelSettings, SettingError, check_settings, require_divides


def check(settings: ModelSettings, architecture: Qwen35Architecture) -> None:
    """Raises an error for settings that do not fit, before anything is built.

    Raises:
        SettingError: Naming the setting, its value and the remedy.
    """
    check_settings(settings, architecture)
    heads, tensor = architecture.language.linear_num_key_heads, settings.tensor_parallel
    require_divides("tensor_parallel", tensor, {"language.linear_num_key_heads": heads})
    both = tensor * settings.context_parallel
    if heads % both:
        raise SettingError(
            f"«tensor_parallel» x «context_parallel» ({both}) does not divide language.linear_num_key_heads {heads}: "
            "the gated delta net distributes its heads over both; choose smaller sizes"
        )
