"""Presets of Qwen3.5-VL: small sizes for tests and laptops, and the published sizes.

docs/model.md gives the source of each number.
"""

from __future__ import annotations

from vlmdata.model.architecture import MoeArchitecture, VisionArchitecture
from vlmdata.model.families.qwen3_5.architecture import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen35Architecture,
    Qwen35LanguageArchitecture,
)
from vlmdata.model.families.towers import LARGE, MEDIUM, SMALL_IDS, SMALL_VOCABULARY, TINY
from vlmdata.model.families.towers import SMALL as SMALL_TOWER

#: Ids of the published tokenizer; the vocabulary has spare rows.
PUBLISHED_VOCABULARY = 248_320


def pattern(layers: int) -> tuple[str, ...]:
    """Three gated delta nets, then a full attention, and so on."""
    return tuple(FULL_ATTENTION if (number + 1) % 4 == 0 else LINEAR_ATTENTION for number in range(layers))


def _tiny(moe: MoeArchitecture | None) -> Qwen35Architecture:
    """A small model with every layer kind and size ratio of the published ones."""
    language = Qwen35LanguageArchitecture(
        vocab_size=SMALL_VOCABULARY,
        hidden_size=128,
        intermediate_size=0 if moe else 384,
        layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        mrope_section=(2, 1, 1),
        moe=moe,
        max_position_embeddings=32_768,
    )
    return Qwen35Architecture(TINY(depth=2, out_hidden_size=128), language, **SMALL_IDS, tie_embeddings=moe is None)


def _proxy() -> Qwen35Architecture:
    """A model of 77 M parameters with real head widths and ratios, for measurements on one GPU or a CPU."""
    language = Qwen35LanguageArchitecture(
        vocab_size=SMALL_VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        layer_types=pattern(8),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        max_position_embeddings=32_768,
    )
    vision = VisionArchitecture(depth=6, hidden_size=576, intermediate_size=2304, num_heads=8, out_hidden_size=512)
    return Qwen35Architecture(vision, language, **SMALL_IDS, tie_embeddings=True)


def _published(
    vision: VisionArchitecture,
    layers: int,
    heads: tuple[int, int],
    linear_value_heads: int,
    feed_forward: int | MoeArchitecture,
    tied: bool = False,
) -> Qwen35Architecture:
    language = Qwen35LanguageArchitecture(
        vocab_size=PUBLISHED_VOCABULARY,
        hidden_size=vision.out_hidden_size,
        intermediate_size=feed_forward if isinstance(feed_forward, int) else 0,
        layer_types=pattern(layers),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_value_heads=linear_value_heads,
        moe=None if isinstance(feed_forward, int) else feed_forward,
    )
    return Qwen35Architecture(vision, language, tie_embeddings=tied)


#: Presets that adopt a dataset's vocabulary.
SMALL = frozenset(["tiny", "tiny-moe", "proxy"])

PRESETS: dict[str, Qwen35Architecture] = {
    "tiny": _tiny(None),
    "tiny-moe": _tiny(MoeArchitecture(8, 2, intermediate_size=96, shared_expert_intermediate_size=96)),
    "proxy": _proxy(),
    "0.8b": _published(SMALL_TOWER(out_hidden_size=1024), 24, (8, 2), 16, 3584, tied=True),
    "2b": _published(MEDIUM(out_hidden_size=2048), 24, (8, 2), 16, 6144, tied=True),
    "4b": _published(MEDIUM(out_hidden_size=2560), 32, (16, 4), 32, 9216, tied=True),
    "9b": _published(LARGE(out_hidden_size=4096), 32, (16, 4), 32, 12_288),
    "27b": _published(LARGE(out_hidden_size=5120), 64, (24, 4), 48, 17_408),
    "35b-a3b": _published(LARGE(out_hidden_size=2048), 40, (16, 2), 32, MoeArchitecture(256, 8, 512, 512)),
    "122b-a10b": _published(LARGE(out_hidden_size=3072), 48, (32, 2), 64, MoeArchitecture(256, 8, 1024, 1024)),
    "397b-a17b": _published(LARGE(out_hidden_size=4096), 60, (32, 2), 64, MoeArchitecture(512, 10, 1024, 1024)),
}
