"""What the server of pytest's workers imports once, for all of them: most of what collecting the tests imports."""

from __future__ import annotations

import importlib
import warnings

from tests.preloading import loaded, settled

MODULES = (
    "tests.preloaded_commands",
    "tests.model.preloaded",
    "cryptography.x509",
    "peft",
    "ray",
    "torchvision",
)

with loaded(), warnings.catch_warnings(action="ignore"):
    for module in MODULES:
        importlib.import_module(module)
    settled()
