"""Presets of Qwen3-VL: small sizes for tests and laptops, and the published sizes.

docs/model.md gives the source of each number.
"""

from __future__ import annotations

from functools import partial

from vlmdata.model.architecture import MoeArchitecture, VisionArchitecture
from vlmdata.model.families import towers
from vlmdata.model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture

#: Rows of the published embedding tables.
PUBLISHED_VOCABULARY = 151_936

_MEDIUM = partial(towers.MEDIUM, deepstack_layers=(5, 11, 17))
_LARGE = partial(towers.LARGE, deepstack_layers=(8, 16, 24))


def _tiny(moe: MoeArchitecture | None) -> Qwen3VLArchitecture:
    """A small model with every part and size ratio of the published ones."""
    language = Qwen3VLLanguageArchitecture(
        vocab_size=towers.SMALL_VOCABULARY,
        hidden_size=128,
        intermediate_size=0 if moe else 384,
        layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mrope_section=(6, 5, 5),
        moe=moe,
        max_position_embeddings=32_768,
    )
    vision = towers.TINY(depth=3, out_hidden_size=128, deepstack_layers=(0, 1))
    return Qwen3VLArchitecture(vision, language, **towers.SMALL_IDS, tie_embeddings=moe is None)


def _published(
    vision: VisionArchitecture,
    layers: int,
    heads: tuple[int, int],
    feed_forward: int | MoeArchitecture,
    tied: bool = False,
) -> Qwen3VLArchitecture:
    language = Qwen3VLLanguageArchitecture(
        vocab_size=PUBLISHED_VOCABULARY,
        hidden_size=vision.out_hidden_size,
        intermediate_size=feed_forward if isinstance(feed_forward, int) else 0,
        layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        moe=None if isinstance(feed_forward, int) else feed_forward,
    )
    return Qwen3VLArchitecture(vision, language, tie_embeddings=tied)


#: Presets that adopt a dataset's vocabulary.
SMALL = frozenset(["qwen3-vl-tiny", "qwen3-vl-tiny-moe"])

PRESETS: dict[str, Qwen3VLArchitecture] = {
    "qwen3-vl-tiny": _tiny(None),
    "qwen3-vl-tiny-moe": _tiny(MoeArchitecture(8, 2, intermediate_size=96)),
    "qwen3-vl-2b": _published(_MEDIUM(out_hidden_size=2048), 28, (16, 8), 6144, tied=True),
    "qwen3-vl-4b": _published(_MEDIUM(out_hidden_size=2560), 36, (32, 8), 9728, tied=True),
    "qwen3-vl-8b": _published(_LARGE(out_hidden_size=4096), 36, (32, 8), 12_288),
    "qwen3-vl-32b": _published(_LARGE(out_hidden_size=5120), 64, (64, 8), 25_600),
    "qwen3-vl-30b-a3b": _published(_LARGE(out_hidden_size=2048), 48, (32, 4), MoeArchitecture(128, 8, 768)),
    "qwen3-vl-235b-a22b": _published(_LARGE(out_hidden_size=4096), 94, (64, 4), MoeArchitecture(128, 8, 1536)),
}
