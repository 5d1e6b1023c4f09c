"""Qwen2.5-VL: patches of 14 pixels, CLIP's mean and deviation.

Sources: the published ``preprocessor_config.json`` of Qwen2.5-VL, ``Qwen2_5_VLModel.get_rope_index`` of transformers.
The checkpoints allow images of 3,136 to 12,845,056 pixels. The defaults here, 256 to 1,280 tokens per image, are those
in the model card's example. For images its positions equal Qwen3-VL's. For videos they differ: it spaces frames by
time.
"""

from vlmdata.families import qwen
from vlmdata.families.base import Family

FAMILY = Family(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    chat=qwen.CHATML,
    items=qwen.ITEMS,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
    min_pixels=200_704,
    max_pixels=1_003_520,
    processors=("Qwen2_5_VLProcessor",),
    token_settings=qwen.TOKEN_SETTINGS,
)
