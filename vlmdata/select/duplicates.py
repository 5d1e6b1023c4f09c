"""Kinds of duplicates. The command line imports nothing else before it runs."""

from __future__ import annotations

from enum import StrEnum


class Duplicates(StrEnum):
    """What makes a sample a repetition of an earlier one."""

    SAMPLES = "samples"
    TEXTS = "texts"
    IMAGES = "images"
    NEAR_TEXTS = "near-texts"
    NEAR_IMAGES = "near-images"

    @property
    def is_near(self) -> bool:
        """Whether samples need not be equal."""
        return self in (Duplicates.NEAR_TEXTS, Duplicates.NEAR_IMAGES)
