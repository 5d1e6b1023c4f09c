"""What the server of processes imports once, for all that it forks."""

from __future__ import annotations

import gc
import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
importlib.import_module("model.parallel.environment").before_megatron()
importlib.import_module("model.training.loop")
importlib.import_module("torch").set_num_threads(1)
gc.collect()
gc.freeze()  # the collector need not look through all of torch in every one of them
