"""What the server of processes imports once, for all that it forks."""

from __future__ import annotations

import gc
import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
importlib.import_module("model.parallel.environment").before_megatron()
importlib.import_module("model.training.loop")
for family in ("qwen3_5", "qwen3_vl"):
    for module in ("build", "hf_config", "names", "flops", "spec", "presets"):
        importlib.import_module(f"model.families.{family}.{module}")
# Pyarrow imports the first two when an index is read, torch the third for its operators on sharded parameters, and each
# process the others to run train.py or to save a checkpoint: 0.7 s of CPU time.
for module in (
    "pyarrow.dataset",
    "pandas",
    "torch._dynamo",
    "tests.model.training.ranks",
    "typer",
    "pydantic.type_adapter",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
):
    importlib.import_module(module)
importlib.import_module("torch").set_num_threads(1)
importlib.import_module("tests.model.one_device").share_device()
gc.collect()
gc.freeze()  # the collector need not look through all of torch in every one of them
