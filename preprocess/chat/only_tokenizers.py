"""Imports transformers for its tokenizers alone, as if torch were not installed, when this module is imported.

With torch, ``AutoTokenizer`` imports torch's compiler and distributed tensors, sympy and accelerate, which no tokenizer
needs: 3 s of CPU time. transformers' models are then missing in this process, so only processes that belong to the
command import this module.
"""

from __future__ import annotations

import os
import sys

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"

if "transformers" not in sys.modules and "torch" not in sys.modules:
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"  # it would say that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    try:
        import transformers  # noqa: F401  # looks for torch once
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
