"""Learns from a Hugging Face processor what the general family needs, and runs it on samples."""

from vlmdata.preprocess.processor.learning import Processor, load_processor
from vlmdata.preprocess.processor.running import Processed

__all__ = ["Processed", "Processor", "load_processor"]
