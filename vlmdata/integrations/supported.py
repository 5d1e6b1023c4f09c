"""The models of transformers that compute packs: which they are, in which versions, and where their parts are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vlmdata.errors import UsageError
from vlmdata.integrations import attention

#: Versions of transformers whose models were compared with their samples one by one (tests/integrations).
PROVEN = ">=5.16,<5.19"
#: The same of models that were compared in fewer versions, by ``model_type``.
PROVEN_ALONE = {"gemma4": ">=5.17,<5.18", "internvl": ">=5.17,<5.18"}
#: ``model_type`` of the configurations of supported models.
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4", "internvl")
#: Those with one axis of positions: they take them as (1, T).
ONE_AXIS = ("gemma4", "internvl")
#: Those that read from ``mm_token_type_ids`` which tokens see each other in both directions.
MARK_IMAGES = ("gemma4",)
#: Decoders of InternVL that were compared.
INTERNVL_DECODERS = ("qwen2", "qwen3", "qwen3_moe")


def conditional_model(model: torch.nn.Module) -> Any:
    """Finds the model of transformers in a wrapper.

    Raises:
        UsageError: If there is none that is supported.
    """
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if kind in MODEL_TYPES and is_a(module, "ForConditionalGeneration"):
            return module
        if is_a(module, "ForConditionalGeneration") and hasattr(module.config, "text_config"):
            return module
    raise UsageError(
        f"packed: {type(model).__name__} has no ForConditionalGeneration model of transformers with one of the model "
        f"types {', '.join(MODEL_TYPES)}. Give such a model, or its wrapper."
    )


def is_a(module: torch.nn.Module, suffix: str) -> bool:
    """Whether a class of transformers with such a name is among the module's own."""
    kinds = type(module).__mro__  # FSDP2 makes a subclass
    return any(each.__module__.startswith("transformers.models.") and each.__name__.endswith(suffix) for each in kinds)


def is_general(inner: Any) -> bool:
    """Whether a model is of none of :data:`MODEL_TYPES`: its packs are proven on any version."""
    return inner.config.model_type not in MODEL_TYPES


def has_one_axis(inner: Any) -> bool:
    """Whether a model, or its ``model``, has positions of one axis."""
    return inner.config.model_type in ONE_AXIS


def encoder_of(inner: Any) -> Any:
    """The vision encoder of a conditional model."""
    return inner.model.vision_tower if has_one_axis(inner) else inner.model.visual


def decoder_of(inner: Any) -> Any:
    """The module of a conditional model that makes the attention masks: its language model, or what is around it."""
    return inner.model if inner.config.model_type in MARK_IMAGES else inner.model.language_model


def delta_nets(inner: Any) -> Iterator[torch.nn.Module]:
    """The layers with linear attention of a conditional model."""
    return (module for module in inner.model.modules() if is_a(module, "GatedDeltaNet"))


def pixel_dtype(inner: Any) -> torch.dtype | None:
    """The dtype of pixels for a model; None if it computes with them before it casts them."""
    return None if inner.config.model_type == "gemma4" else encoder_of(inner).dtype


def is_recorded(inner: Any) -> bool:
    """Whether tests compared packs of a model with their samples on the installed version of transformers."""
    import transformers
    from packaging.specifiers import SpecifierSet

    proven = PROVEN_ALONE.get(inner.config.model_type, PROVEN)
    return SpecifierSet(proven).contains(transformers.__version__, prereleases=True)


def check_configuration(inner: Any) -> None:
    """Refuses configurations with which samples would mix, or that no test has.

    Raises:
        UsageError: If the model has one.
    """
    from transformers.utils.generic import is_flash_attention_requested

    text = inner.config.get_text_config()
    name, flash = text._attn_implementation, is_flash_attention_requested(text)
    if name not in (None, "eager", "sdpa", "flex_attention", attention.DECODER) and not flash:
        raise UsageError(
            f"packed: the model has attn_implementation={name!r}, which may not see where samples begin. Use 'sdpa', "
            "'eager' or a flash attention."
        )
    if inner.config.model_type == "internvl" and text.model_type not in INTERNVL_DECODERS:
        raise UsageError(
            f"packed: the decoder of this InternVL is {text.model_type!r}, and packs were proven with "
            f"{', '.join(INTERNVL_DECODERS)}. Use a checkpoint with one of them."
        )
    directions = getattr(text, "use_bidirectional_attention", None)
    if directions not in (None, "vision"):
        raise UsageError(
            f"packed: use_bidirectional_attention is {directions!r}, with which tokens see those that they should "
            "predict. Use a checkpoint with 'vision' or None."
        )
    if directions and flash:
        raise UsageError(
            f"packed: attn_implementation={name!r} does not let the tokens of an image see each other, which "
            "use_bidirectional_attention='vision' asks for. Use 'sdpa' or 'eager'."
        )
