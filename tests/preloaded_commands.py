"""What the server of commands imports once, for all commands that it forks."""

from __future__ import annotations

import importlib
import warnings
from importlib.metadata import entry_points

from tests.preloading import loaded, settled

with loaded(), warnings.catch_warnings(action="ignore"):
    for point in entry_points(group="vlmdata.commands"):
        if not point.value.startswith("model"):
            point.load()
    for module in (
        "preprocess.engines.local",
        "preprocess.run.dataset",
        "preprocess.demo.dataset",
        "vlmdata.media.decode",
        "vlmdata.media.resize",
        "vlmdata.service.server.server",
        "vlmdata.verify.dataset",
        "transformers.models.auto.tokenization_auto",
        "datasets",
        "pandas",
        "pyarrow.dataset",
        "rich.progress",
        "rich.traceback",
        "tests.forked",
    ):
        importlib.import_module(module)
    importlib.import_module("torch").set_num_threads(1)
    settled()
