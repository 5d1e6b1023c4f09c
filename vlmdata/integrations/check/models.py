"""Models of transformers to test: a small one with every kind of layer of a configuration, or the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlmdata.errors import UsageError
from vlmdata.families.chat import VIDEO
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations.check.own import Checked
from vlmdata.integrations.reduced import reduced
from vlmdata.integrations.supported import MODEL_TYPES
from vlmdata.integrations.transformers import packed, packed_forward


def read_config(name: str) -> Any:
    """Reads the configuration of a model: a folder, or an id on the hub.

    Raises:
        UsageError: If there is none, or it is of another kind of model.
    """
    from transformers import AutoConfig

    if (looks_local := name.startswith((".", "/", "~"))) or Path(name).exists():
        folder = Path(name).expanduser()
        if looks_local and not folder.exists():
            raise UsageError(f"check-model: no such folder: {name}")
        if not (folder / "config.json").is_file():
            raise UsageError(f"check-model: {name} has no config.json. Give the folder of a Hugging Face model.")
        name = str(folder)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"check-model: the configuration of {name} cannot be read: {reason} Give a folder with config.json, the id "
            "of a model on the hub, module:function or file.py:function."
        ) from error
    if config.model_type not in MODEL_TYPES:
        raise UsageError(
            f"check-model: {name} has model_type {config.model_type!r}. Supported are {', '.join(MODEL_TYPES)}; test "
            "other models with their own forward (MODEL as module:function)."
        )
    return config


def require_fitting(config: Any, dataset: VlmDataset) -> None:
    """Checks that a dataset is for a model.

    Raises:
        UsageError: If it is of another family, or has other ids.
    """
    if config.model_type not in dataset.family.model_types:
        raise UsageError(
            f"check-model: the model's model_type is {config.model_type!r}, and {dataset.name} is for the family "
            f"{dataset.family.name!r} ({', '.join(dataset.family.model_types)}). Preprocess for the model's tokenizer."
        )
    image = dataset.manifest.tokenizer.image
    if config.image_token_id != image:
        raise UsageError(
            f"check-model: the model's image_token_id is {config.image_token_id}, and images of {dataset.name} have "
            f"token {image}. Preprocess with the model's tokenizer."
        )
    if VIDEO in dataset.index.item_kinds:
        video = dataset.manifest.tokenizer.items[VIDEO].token
        if config.video_token_id != video:
            raise UsageError(
                f"check-model: the model's video_token_id is {config.video_token_id}, and videos of {dataset.name} "
                f"have token {video}. Preprocess with the model's tokenizer."
            )
    vocabulary = config.text_config.vocab_size
    if max(image, dataset.manifest.tokenizer.pad) >= vocabulary:
        raise UsageError(
            f"check-model: {dataset.name} has token {max(image, dataset.manifest.tokenizer.pad)}, and the model has "
            f"{vocabulary} tokens. Preprocess with the model's tokenizer."
        )


def builder(
    name: str, config: Any, full: bool, attention: str | None, dtype: torch.dtype, allow_unproven: bool
) -> Callable[[], Checked]:
    """Returns what makes a model of transformers with vlmdata's forward for packs.

    Args:
        name: Folder or id.
        config: Its configuration.
        full: Whether to load the checkpoint, with all layers; else a small model with random weights.
        attention: ``attn_implementation``, or None for that of transformers.
        dtype: Of the checkpoint's weights.
        allow_unproven: As for :func:`vlmdata.integrations.transformers.packed`.
    """

    def build() -> Checked:
        model = _checkpoint(name, attention, dtype) if full else _small(config, attention)

        def forward(batch: Any) -> Any:
            with packed(model, allow_unproven=allow_unproven):
                found = packed_forward(model, batch)
            return {"loss": found.losses, "logits": found.output.logits}

        forward.is_default = True  # type: ignore[attr-defined]
        packed(model, allow_unproven=allow_unproven).remove()  # refuses early
        return Checked(model, forward)

    return build


def _checkpoint(name: str, attention: str | None, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForImageTextToText

    try:
        return AutoModelForImageTextToText.from_pretrained(
            name, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    except (OSError, ImportError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"check-model: the weights of {name} cannot be loaded: {reason}") from error


def _small(config: Any, attention: str | None) -> Any:
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    small = reduced(config)
    try:
        make: Any = AutoModelForImageTextToText.from_config
        model = make(small, attn_implementation=attention)
    except (ImportError, ValueError) as error:
        raise UsageError(f"check-model: attention {attention!r}: {str(error).strip().splitlines()[0]}") from error
    for module_name, parameter in model.named_parameters():
        if module_name.endswith("A_log"):  # a state that decays within a token would hide what runs on
            parameter.data.uniform_(0.05, 0.5).log_()
    return model
