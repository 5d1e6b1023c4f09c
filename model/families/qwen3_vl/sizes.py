"""Checks that a parallel layout fits the sizes of a Qwen3-VL."""

from __future__ import annotations

from model.families.qwen3_vl.architecture import Qwen3VLArchitecture
from model.network.settings import ModelSettings, check_attention_heads, check_settings


def check(settings: ModelSettings, architecture: Qwen3VLArchitecture) -> None:
    """Raises an error for settings that do not fit, before anything is built.

    Raises:
        SettingError: Naming the setting, its value and the remedy.
    """
    check_settings(settings, architecture)
    check_attention_heads(settings, architecture)
