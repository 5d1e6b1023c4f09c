"""The demo source: receipts drawn on this machine, so that everything runs without a download."""

from preprocess.demo.dataset import DemoLayout, ensure_demo_dataset
from preprocess.demo.row import DEMO_VERSION

__all__ = ["DEMO_VERSION", "DemoLayout", "ensure_demo_dataset"]
