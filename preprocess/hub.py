"""Keeps libraries from asking the Hugging Face hub for minutes if it does not answer."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

#: How long the hub may take for its first answer, in seconds.
_SECONDS = 4.0


@contextmanager
def hub_or_cache() -> Iterator[str]:
    """Yields why the hub does not answer, empty if it does, or must not be asked (HF_HUB_OFFLINE).

    If it does not, libraries use only their caches within.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield ""
        return
    silence = _silence_of(constants.ENDPOINT)
    # `datasets` copies the setting when it is imported.
    settings: list[Any] = [constants, *(sys.modules[name] for name in ("datasets.config",) if name in sys.modules)]
    for each in settings:
        each.HF_HUB_OFFLINE = bool(silence)
    try:
        yield silence
    finally:
        for each in settings:
            each.HF_HUB_OFFLINE = False


@cache
def _silence_of(endpoint: str) -> str:
    """Asks the hub once. Returns why it does not answer; empty if it does."""
    from huggingface_hub import get_session

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _SECONDS)
    silence = [f"no answer of {endpoint} in {seconds:g} s; HF_HUB_ETAG_TIMEOUT=30 waits longer"]

    def ask() -> None:
        try:
            status = get_session().head(f"{endpoint}/api/datasets", timeout=seconds).status_code
            silence[:] = [f"{endpoint} answers {status}" if status >= 500 else ""]
        except Exception as error:
            lines = str(error).splitlines()
            silence[:] = [f"{endpoint}: {type(error).__name__}: {lines[0] if lines else 'no details'}"]

    # In a thread, because looking up a name has no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return silence[0]
