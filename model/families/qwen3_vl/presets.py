"""Presets of Qwen3-VL: small sizes for tests and laptops, and the published sizes.

docs/model.md gives the source of each number.
"""

from __future__ import annotations

from model.architecture import MoeArchitecture, VisionArchitecture
from model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture

#: Rows of the published embedding tables.
PUBLISHED_VOCABULARY = 151_936

#: Ids of the tiny presets; :meth:`Architecture.with_vocabulary` fits them to a tokenizer.
TINY_VOCABULARY = 6144


def _vision_medium(out: int) -> VisionArchitecture:
    return VisionArchitecture(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        out_hidden_size=out,
        deepstack_layers=(5, 11, 17),
    )


def _vision_large(out: int) -> VisionArchitecture:
    return VisionArchitecture(
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_heads=16,
        out_hidden_size=out,
        deepstack_layers=(8, 16, 24),
    )


def _tiny(moe: MoeArchitecture | None) -> Qwen3VLArchitecture:
    """A small model with every part and size ratio of the published ones."""
    language = Qwen3VLLanguageArchitecture(
        vocab_size=TINY_VOCABULARY,
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
    vision = VisionArchitecture(
        depth=3,
        hidden_size=64,
        intermediate_size=192,
        num_heads=4,
        out_hidden_size=128,
        num_position_embeddings=64,
        deepstack_layers=(0, 1),
    )
    return Qwen3VLArchitecture(
        vision,
        language,
        image_token_id=TINY_VOCABULARY - 2,
        video_token_id=TINY_VOCABULARY - 1,
        vision_start_token_id=TINY_VOCABULARY - 4,
        vision_end_token_id=TINY_VOCABULARY - 3,
        tie_embeddings=moe is None,
    )


def _published(
    vision: VisionArchitecture,
    *,
    layers: int,
    heads: tuple[int, int],
    intermediate: int = 0,
    moe: MoeArchitecture | None = None,
    tied: bool = False,
) -> Qwen3VLArchitecture:
    language = Qwen3VLLanguageArchitecture(
        vocab_size=PUBLISHED_VOCABULARY,
        hidden_size=vision.out_hidden_size,
        intermediate_size=intermediate,
        layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        moe=moe,
    )
    return Qwen3VLArchitecture(vision, language, tie_embeddings=tied)


#: Presets that adopt a dataset's vocabulary.
SMALL: dict[str, Qwen3VLArchitecture] = {
    "qwen3-vl-tiny": _tiny(None),
    "qwen3-vl-tiny-moe": _tiny(MoeArchitecture(8, 2, intermediate_size=96)),
}

PRESETS: dict[str, Qwen3VLArchitecture] = SMALL | {
    "qwen3-vl-2b": _published(_vision_medium(2048), layers=28, heads=(16, 8), intermediate=6144, tied=True),
    "qwen3-vl-4b": _published(_vision_medium(2560), layers=36, heads=(32, 8), intermediate=9728, tied=True),
    "qwen3-vl-8b": _published(_vision_large(4096), layers=36, heads=(32, 8), intermediate=12_288),
    "qwen3-vl-32b": _published(_vision_large(5120), layers=64, heads=(64, 8), intermediate=25_600),
    "qwen3-vl-30b-a3b": _published(_vision_large(2048), layers=48, heads=(32, 4), moe=MoeArchitecture(128, 8, 768)),
    "qwen3-vl-235b-a22b": _published(_vision_large(4096), layers=94, heads=(64, 4), moe=MoeArchitecture(128, 8, 1536)),
}
