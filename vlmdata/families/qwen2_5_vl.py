"""Qwen2.5-VL: patches of 14 pixels, CLIP's mean and deviation.

Sources: the published ``preprocessor_config.json`` of Qwen2.5-VL, ``Qwen2_5_VLModel.get_rope_index`` of transformers.
Its positions differ from Qwen3-VL's for videos, whose frames it spaces by time. For images they are equal.
"""

from vlmdata.families.base import Family

FAMILY = Family(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
    min_pixels=3_136,
    max_pixels=12_845_056,
)
