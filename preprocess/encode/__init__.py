"""Encodes conversations and documents to the arrays of samples."""

from preprocess.encode.encoder import Encoder
from preprocess.encode.image import encode_image
from preprocess.encode.sample import EncodedSample, SampleItem

__all__ = ["EncodedSample", "Encoder", "SampleItem", "encode_image"]
