"""Which parallel layouts fit the sizes of a Qwen3.5-VL."""

from __future__ import annotations

from model.families.qwen3_5.architecture import Qwen35Architecture
from model.network.settings import TENSOR, Field, ModelSettings, SettingError, check_settings, require_divides


def check(settings: ModelSettings, architecture: Qwen35Architecture) -> None:
    """Refuses settings that do not fit, before anything is built.

    Raises:
        SettingError: With the setting, its value, and what to do.
    """
    check_settings(settings, architecture)
    language, tensor = architecture.language, settings.tensor_parallel
    sizes = {
        "language.num_attention_heads": language.num_attention_heads,
        "language.linear_num_key_heads": language.linear_num_key_heads,
    }
    if tensor % language.num_key_value_heads:  # several ranks may hold copies of one key-value head
        sizes["language.num_key_value_heads"] = language.num_key_value_heads
    require_divides(settings, sizes)
    both = tensor * settings.context_parallel
    if language.linear_num_key_heads % both:
        raise SettingError(
            TENSOR,
            " x ",
            Field("context_parallel"),
            f" ({both}) does not divide language.linear_num_key_heads {language.linear_num_key_heads}: the gated delta "
            "net spreads its heads over both; choose smaller sizes",
        )
