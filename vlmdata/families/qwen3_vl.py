"""Qwen3-VL (dense and with experts): the same images and positions as Qwen3.5.

Sources: the published ``preprocessor_config.json`` of Qwen3-VL, ``Qwen3VLModel.get_rope_index`` of transformers.
"""

from dataclasses import replace

from vlmdata.families import qwen3_5

FAMILY = replace(qwen3_5.FAMILY, name="qwen3_vl", model_types=("qwen3_vl", "qwen3_vl_moe"), processors=())
