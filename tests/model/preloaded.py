"""What the server of processes imports once, for all that it forks."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import importlib
import pkgutil

from tests.preloading import loaded, settled

#: Pyarrow imports the first two when an index is read, torch the third for its operators on sharded parameters, and
#: each process the others to run train.py, to make an optimizer or to save a checkpoint: 0.9 s of CPU time.
LATER = (
    "pyarrow.dataset",
    "pandas",
    "torch._dynamo",
    "tests.model.training.ranks",
    "typer",
    "typer._adapters",
    "typer._click.decorators",
    "pydantic.type_adapter",
    "pydantic.fields",
    "pydantic.plugin._loader",
    "annotated_types",
    "vlmdata.model.parallel.cpu_mode",
    "vlmdata.model.parallel.groups",
    "vlmdata.model.training.kernels",
    "vlmdata.model.training.settings.config_loading",
    "vlmdata.families.qwen3_5",
    "vlmdata.families.qwen3_vl",
    "vlmdata.media.codecs.raw",
    "megatron.core.models.mimo",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "psutil",
    "tomli_w",
    "torch._subclasses.schema_check_mode",
    "torch.utils.serialization.config",
)

with loaded():
    importlib.import_module("vlmdata.model.parallel.environment").before_megatron()
    importlib.import_module("vlmdata.model.training.loop")
    families = importlib.import_module("vlmdata.model.families")
    for module in pkgutil.walk_packages(families.__path__, "vlmdata.model.families."):
        importlib.import_module(module.name)
    for name in LATER:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    importlib.import_module("tests.model.one_device").share_device()
    settled()
