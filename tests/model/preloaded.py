"""What the server of processes imports once, for all that it forks."""

from __future__ import annotations

import gc
import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
importlib.import_module("model.parallel.environment").before_megatron()
importlib.import_module("model.training.loop")
for family in ("qwen3_5", "qwen3_vl"):
    for module in ("build", "hf_config", "names", "flops"):
        importlib.import_module(f"model.families.{family}.{module}")
# Pyarrow imports these when the first index is read.
for module in ("pyarrow.dataset", "pandas"):
    importlib.import_module(module)
importlib.import_module("torch").set_num_threads(1)
gc.collect()
gc.freeze()  # the collector need not look through all of torch in every one of them
