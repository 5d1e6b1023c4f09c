"""What the server of commands imports once, for all commands that it forks."""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec

from tests.preloading import loaded, settled
from vlmdata.cli.main import COMMANDS

LOADING = (
    "vlmdata.media.decode",
    "vlmdata.media.resize",
    "vlmdata.service.server.server",
    "vlmdata.verify.dataset",
    "pyarrow.dataset",
    "rich.progress",
    "rich.traceback",
    "tests.forked",
)
#: GPU machines, where only loading is tested, may lack what these need.
PREPROCESSING = (
    "vlmdata.preprocess.engines.local",
    "vlmdata.preprocess.run.dataset",
    "vlmdata.preprocess.demo.dataset",
    "transformers.models.auto.tokenization_auto",
    "datasets",
    "pandas",
)

with loaded(), warnings.catch_warnings(action="ignore"):
    for place in COMMANDS.values():
        if not place.startswith("vlmdata.model"):
            importlib.import_module(place.partition(":")[0])
    for module in LOADING + (PREPROCESSING if find_spec("datasets") else ()):
        importlib.import_module(module)
    importlib.import_module("torch").set_num_threads(1)
    settled()
