"""From a conversation or a document to the arrays of its samples."""

from preprocess.encode.encoder import Encoder
from preprocess.encode.image import encode_image
from preprocess.encode.sample import EncodedImage, EncodedSample

__all__ = ["EncodedImage", "EncodedSample", "Encoder", "encode_image"]
