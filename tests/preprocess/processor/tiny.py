"""Tiny processors of transformers' models, made offline with the embedded tokenizer, as folders of whole models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers.models.auto import image_processing_auto, processing_auto, video_processing_auto

from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Answers stand between a token that ends questions, and one that ends texts.
_MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'user' %}[/INST]{% else %}<|im_end|>{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Tiny:
    """What a model's processor is made of.

    Attributes:
        image: What the template writes for an image.
        named: Special tokens that the tokenizer has by name.
        extra: Other special tokens.
        arguments: Arguments of the processor.
        images: Arguments of its image processor.
        videos: Arguments of its video processor.
        begin: The token that begins texts.
        config: Values in the model's configuration.
        template: Its chat template, with PLACEHOLDER for an image.
    """

    image: str
    named: Mapping[str, str] = field(default_factory=dict)
    extra: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    videos: Mapping[str, Any] = field(default_factory=dict)
    begin: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str = _TEMPLATE


_QWEN = Tiny(
    "<|vision_start|><|image_pad|><|vision_end|>",
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
)
#: Smallest and largest images, in pixels.
BOUNDS = (4096, 65536)
_BOUNDS = {"shortest_edge": BOUNDS[0], "longest_edge": BOUNDS[1]}
_HALVES = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": _BOUNDS}
_GLM = Tiny(
    "<|begin_of_image|><|image|><|end_of_image|>",
    extra=(
        "<|image|>",
        "<|video|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    ),
)
_SMALL = {"size": {"height": 56, "width": 56}}
_CROPPED = {
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
    "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
}
_IDEFICS = Tiny(
    "<image>",
    extra=(
        "<image>",
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
    ),
    arguments={"image_seq_len": 4},
    images={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
)
_ERNIE = Tiny(
    "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    {
        "image_token": "<|IMAGE_PLACEHOLDER|>",
        "image_end_token": "<|IMAGE_END|>",
        "image_start_token": "<|IMAGE_START|>",
        "video_token": "<|VIDEO_PLACEHOLDER|>",
        "video_end_token": "<|VIDEO_END|>",
        "video_start_token": "<|VIDEO_START|>",
    },
    videos={"draw_on_frames": False},
)
_AYA = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL")

#: By model type.
TINY: dict[str, Tiny] = {
    "qwen3_vl": replace(_QWEN, images=_HALVES),
    "qwen3_5": replace(_QWEN, images=_HALVES),
    "qwen2_5_vl": replace(_QWEN, images={"patch_size": 14, "size": _BOUNDS}),
    "qwen2_vl": _QWEN,
    "glm4v": _GLM,
    "glm46v": _GLM,
    "mistral3": Tiny(
        "[IMG]",
        extra=("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"),
        arguments={"patch_size": 14, "spatial_merge_size": 2},
        images={"patch_size": 14, "size": {"longest_edge": 336}},
        template=_MISTRAL,
    ),
    "llava_onevision": Tiny(
        "<image>",
        extra=("<image>", "<video>"),
        arguments={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        images={**_SMALL, "image_grid_pinpoints": _CROPPED["image_grid_pinpoints"]},
    ),
    "llava_next": Tiny(
        "<image>",
        extra=("<image>",),
        arguments={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        images=_CROPPED,
    ),
    "idefics3": _IDEFICS,
    "gemma3": Tiny(
        "<start_of_image>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        arguments={"image_seq_length": 16},
        images=_SMALL,
    ),
    "gemma4": Tiny(
        "<|image|>",
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        },
    ),
    "lfm2_vl": Tiny(
        "<image>",
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        extra=tuple(f"<|img_row_{i}_col_{j}|>" for i in range(1, 11) for j in range(1, 11)),
        images={
            "tile_size": 64,
            "min_tiles": 2,
            "max_tiles": 4,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "max_num_patches": 64,
            "encoder_patch_size": 8,
        },
    ),
    "internvl": Tiny(
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        arguments={"image_seq_length": 4},
        images={**_SMALL, "crop_to_patches": True, "max_patches": 4},
    ),
    "aya_vision": Tiny(
        "<image>",
        extra=_AYA,
        arguments={"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        images={**_SMALL, "crop_to_patches": True, "max_patches": 4},
    ),
    "cohere2_vision": Tiny(
        "<|IMG_PATCH|>",
        {
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        images={**_SMALL, "patch_size": 2},
    ),
    "deepseek_vl": Tiny(
        "<image_placeholder>",
        {"image_token": "<image_placeholder>"},
        arguments={"num_image_tokens": 16},
        images=_SMALL,
    ),
    "ernie4_5_vl_moe": _ERNIE,
    "paddleocr_vl": _ERNIE,
    "ovis2": Tiny(
        "<image>",
        {"image_token": "<image>"},
        extra=("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        arguments={"image_seq_length": 4},
        images={**_SMALL, "max_patches": 4},
    ),
    "llama4": Tiny(
        "<|image|>",
        extra=(
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        arguments={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        images={**_SMALL, "max_patches": 4},
    ),
    "mllama": Tiny(
        "<|image|>",
        extra=("<|image|>", "<|python_tag|>"),
        begin="<|begin_of_text|>",
        images={**_SMALL, "max_image_tiles": 4},
    ),
    "video_llama_3": Tiny("<|image_pad|>", {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}),
    "perception_lm": Tiny(
        "<|image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        arguments={"patch_size": 14, "pooling_ratio": 2},
        images={"tile_size": 56, "max_num_tiles": 4, "vision_input_type": "thumb+tile"},
    ),
    "lighton_ocr": Tiny(
        "<|image_pad|>",
        {
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        arguments={"patch_size": 14, "spatial_merge_size": 2},
        images={"size": {"longest_edge": 336}, "patch_size": 14},
    ),
}


def save_tiny(model_type: str, folder: Path) -> Path:
    """Writes the processor, tokenizer, template and configuration of a model. Returns the folder."""
    tiny = TINY[model_type]
    kind = getattr(transformers, processing_auto.PROCESSOR_MAPPING_NAMES[model_type])
    taken = inspect.signature(kind.__init__).parameters
    given = dict(tiny.arguments) | {"tokenizer": _tokenizer(tiny)}
    given["image_processor"] = _part(image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES, model_type)(**tiny.images)
    if "video_processor" in taken:
        given["video_processor"] = _part(video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES, model_type)(**tiny.videos)
    if "feature_extractor" in taken:
        from transformers.models.auto import feature_extraction_auto

        given["feature_extractor"] = _part(feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES, model_type)()
    processor = kind(**given)
    processor.chat_template = tiny.template.replace("PLACEHOLDER", tiny.image)
    if tiny.begin:
        processor.chat_template = tiny.begin + processor.chat_template
    processor.save_pretrained(folder)
    config = CONFIG_MAPPING[model_type](**tiny.config).to_dict()
    for name in ("image", "video", "audio"):
        if isinstance(token := getattr(processor, f"{name}_token", None), str):
            config[f"{name}_token_id"] = processor.tokenizer.convert_tokens_to_ids(token)
    for name, token in tiny.named.items():
        config[f"{name}_id"] = processor.tokenizer.convert_tokens_to_ids(token)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def _tokenizer(tiny: Tiny) -> PreTrainedTokenizerFast:
    named: dict[str, Any] = {"bos_token": tiny.begin} if tiny.begin else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(EMBEDDED_TOKENIZER / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(tiny.named),
        **named,
    )
    if tiny.extra:
        tokenizer.add_special_tokens({"additional_special_tokens": list(tiny.extra)})
    return tokenizer


def _part(names: Mapping[str, Any], model_type: str) -> Any:
    name = names[model_type]
    if isinstance(name, dict):
        name = name.get("torchvision") or next(iter(name.values()))
    if isinstance(name, list | tuple):
        name = [each for each in name if each][-1]
    return getattr(transformers, name)
