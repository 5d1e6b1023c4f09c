"""The demo source: receipts drawn on this machine, so that the demo needs no download."""

from vlmdata.preprocess.demo.dataset import DemoLayout, ensure_demo_dataset
from vlmdata.preprocess.demo.row import DEMO_VERSION

__all__ = ["DEMO_VERSION", "DemoLayout", "ensure_demo_dataset"]
