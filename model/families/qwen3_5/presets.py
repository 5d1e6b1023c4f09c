"""Presets of Qwen3.5-VL: small sizes for tests and laptops, and the published sizes.

docs/model.md gives the source of each number.
"""

from __future__ import annotations

from model.architecture import MoeArchitecture, VisionArchitecture
from model.families.qwen3_5.architecture import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen35Architecture,
    Qwen35LanguageArchitecture,
)

#: Ids of the published tokenizer; the vocabulary has spare rows.
PUBLISHED_VOCABULARY = 248_320

#: Ids of the tiny presets; :meth:`Qwen35Architecture.with_vocabulary` fits them to a tokenizer.
TINY_VOCABULARY = 6144


def pattern(layers: int) -> tuple[str, ...]:
    """Three gated delta nets, then a full attention, and so on."""
    return tuple(FULL_ATTENTION if (number + 1) % 4 == 0 else LINEAR_ATTENTION for number in range(layers))


def _vision_small(out: int) -> VisionArchitecture:
    return VisionArchitecture(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12, out_hidden_size=out)


def _vision_medium(out: int) -> VisionArchitecture:
    return VisionArchitecture(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=out)


def _vision_large(out: int) -> VisionArchitecture:
    return VisionArchitecture(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=out)


def _tiny(moe: MoeArchitecture | None) -> Qwen35Architecture:
    """A small model with every layer kind and size ratio of the published ones."""
    language = Qwen35LanguageArchitecture(
        vocab_size=TINY_VOCABULARY,
        hidden_size=128,
        intermediate_size=0 if moe else 384,
        layer_types=pattern(4),
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
    vision = VisionArchitecture(
        depth=2,
        hidden_size=64,
        intermediate_size=192,
        num_heads=4,
        out_hidden_size=128,
        num_position_embeddings=64,
    )
    return Qwen35Architecture(
        vision,
        language,
        image_token_id=TINY_VOCABULARY - 2,
        video_token_id=TINY_VOCABULARY - 1,
        vision_start_token_id=TINY_VOCABULARY - 4,
        vision_end_token_id=TINY_VOCABULARY - 3,
        tie_embeddings=moe is None,
    )


def _proxy() -> Qwen35Architecture:
    """A model of 77 M parameters with real head widths and ratios, for measurements on one GPU or a CPU."""
    language = Qwen35LanguageArchitecture(
        vocab_size=TINY_VOCABULARY,
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
    return Qwen35Architecture(
        vision,
        language,
        image_token_id=TINY_VOCABULARY - 2,
        video_token_id=TINY_VOCABULARY - 1,
        vision_start_token_id=TINY_VOCABULARY - 4,
        vision_end_token_id=TINY_VOCABULARY - 3,
        tie_embeddings=True,
    )


def _dense(
    vision: VisionArchitecture,
    *,
    layers: int,
    intermediate: int,
    heads: tuple[int, int],
    linear_value_heads: int,
    tied: bool,
) -> Qwen35Architecture:
    language = Qwen35LanguageArchitecture(
        vocab_size=PUBLISHED_VOCABULARY,
        hidden_size=vision.out_hidden_size,
        intermediate_size=intermediate,
        layer_types=pattern(layers),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_value_heads=linear_value_heads,
    )
    return Qwen35Architecture(vision, language, tie_embeddings=tied)


def _sparse(
    hidden: int, *, layers: int, heads: tuple[int, int], linear_value_heads: int, moe: MoeArchitecture
) -> Qwen35Architecture:
    language = Qwen35LanguageArchitecture(
        vocab_size=PUBLISHED_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=0,
        layer_types=pattern(layers),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_value_heads=linear_value_heads,
        moe=moe,
    )
    return Qwen35Architecture(_vision_large(hidden), language)


#: Presets that adopt a dataset's vocabulary.
SMALL = frozenset(["tiny", "tiny-moe", "proxy"])

PRESETS: dict[str, Qwen35Architecture] = {
    "tiny": _tiny(None),
    "tiny-moe": _tiny(MoeArchitecture(8, 2, intermediate_size=96, shared_expert_intermediate_size=96)),
    "proxy": _proxy(),
    "0.8b": _dense(_vision_small(1024), layers=24, intermediate=3584, heads=(8, 2), linear_value_heads=16, tied=True),
    "2b": _dense(_vision_medium(2048), layers=24, intermediate=6144, heads=(8, 2), linear_value_heads=16, tied=True),
    "4b": _dense(_vision_medium(2560), layers=32, intermediate=9216, heads=(16, 4), linear_value_heads=32, tied=True),
    "9b": _dense(_vision_large(4096), layers=32, intermediate=12288, heads=(16, 4), linear_value_heads=32, tied=False),
    "27b": _dense(_vision_large(5120), layers=64, intermediate=17408, heads=(24, 4), linear_value_heads=48, tied=False),
    "35b-a3b": _sparse(2048, layers=40, heads=(16, 2), linear_value_heads=32, moe=MoeArchitecture(256, 8, 512, 512)),
    "122b-a10b": _sparse(
        3072, layers=48, heads=(32, 2), linear_value_heads=64, moe=MoeArchitecture(256, 8, 1024, 1024)
    ),
    "397b-a17b": _sparse(
        4096, layers=60, heads=(32, 2), linear_value_heads=64, moe=MoeArchitecture(512, 10, 1024, 1024)
    ),
}
