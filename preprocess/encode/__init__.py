"""Encodes conversations and documents to the arrays of samples."""

from vlmdata.preprocess.encode.encoder import Encoder
from vlmdata.preprocess.encode.image import encode_image
from vlmdata.preprocess.encode.sample import EncodedSample, SampleItem

__all__ = ["EncodedSample", "Encoder", "SampleItem", "encode_image"]
