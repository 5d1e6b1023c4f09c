"""What the server of processes imports once."""

from __future__ import annotations

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
importlib.import_module("model.parallel.startup").before_megatron()
importlib.import_module("model.training.loop")
importlib.import_module("torch").set_num_threads(1)
