"""Sizes that presets of both model families share: vision towers, and the vocabulary of small presets.

docs/model.md gives the source of each number.
"""

from __future__ import annotations

from functools import partial

from vlmdata.model.architecture import VisionArchitecture

#: Towers of published sizes, to be completed by ``out_hidden_size`` and, if the family has it, ``deepstack_layers``.
SMALL = partial(VisionArchitecture, depth=12, hidden_size=768, intermediate_size=3072, num_heads=12)
MEDIUM = partial(VisionArchitecture, depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16)
LARGE = partial(VisionArchitecture, depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16)
TINY = partial(VisionArchitecture, hidden_size=64, intermediate_size=192, num_heads=4, num_position_embeddings=64)

#: Ids of the small presets; :meth:`Architecture.with_vocabulary` fits them to a tokenizer.
SMALL_VOCABULARY = 6144
SMALL_IDS = {
    "image_token_id": SMALL_VOCABULARY - 2,
    "video_token_id": SMALL_VOCABULARY - 1,
    "vision_start_token_id": SMALL_VOCABULARY - 4,
    "vision_end_token_id": SMALL_VOCABULARY - 3,
}
