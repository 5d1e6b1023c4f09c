"""Qwen3.5 (dense and with experts): patches of 16 pixels, mean and deviation 0.5.

Sources: the published ``preprocessor_config.json`` of Qwen3.5, ``Qwen3_5Model.get_rope_index`` of transformers.
The checkpoints allow images of 65,536 to 16,777,216 pixels. The defaults here, 196 to 980 tokens per image, are those
of the CORD-V2 example that this project follows.
"""

from vlmdata.families import qwen
from vlmdata.families.base import Family

FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    chat=qwen.CHATML,
    items=qwen.ITEMS,
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    min_pixels=200_704,
    max_pixels=1_003_520,
    processors=("Qwen3VLProcessor",),  # Qwen3-VL shares it, and its images and positions are equal
    token_settings=qwen.TOKEN_SETTINGS,
)
