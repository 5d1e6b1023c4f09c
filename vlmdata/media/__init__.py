"""What the pixels of an item are and how they are stored: decoding, resizing, codecs."""
