"""The demo source: receipts drawn on the spot, so that everything runs without a download."""

from preprocess.sources.demo.chat import Conversation, demo_conversation
from preprocess.sources.demo.dataset import ensure_demo_dataset, write_demo_dataset
from preprocess.sources.demo.receipt import DEMO_VERSION, DemoReceipt, demo_content, demo_receipt

__all__ = [
    "DEMO_VERSION",
    "Conversation",
    "DemoReceipt",
    "demo_content",
    "demo_conversation",
    "demo_receipt",
    "ensure_demo_dataset",
    "write_demo_dataset",
]
