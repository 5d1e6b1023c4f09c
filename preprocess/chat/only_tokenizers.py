"""Importing this module imports transformers as if torch were not installed, for its tokenizers alone.

With torch, ``AutoTokenizer`` spends 3 s of CPU time to import torch's compiler and distributed tensors, sympy and
accelerate, which no tokenizer needs. Without torch, transformers has no models. So only the command and
its workers import this module.
"""

from __future__ import annotations

import os
import sys

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"

if "transformers" not in sys.modules and "torch" not in sys.modules:
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"  # it would warn that torch is missing
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    try:
        import transformers  # noqa: F401  # checks for torch only now
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
