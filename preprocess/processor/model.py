"""What the model of a processor tells, without weights: the arguments of its forward, and how it counts positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.errors import SourceError


@dataclass(frozen=True, eq=False)
class ModelRules:
    """What is known of a model.

    Attributes:
        model_type: Its ``model_type``.
        arguments: Names of the arguments of its forward.
        positions: Its own method that counts positions, on a module without weights; None if they are the order of
            the tokens.
    """

    model_type: str
    arguments: frozenset[str]
    positions: Any

    def position_ids(self, ids: npt.NDArray[np.int64], tensors: Mapping[str, torch.Tensor]) -> npt.NDArray[np.int32]:
        """Returns the positions of a sample, int32 (axes, L), as the model counts them.

        Args:
            ids: int64 (L,), its tokens.
            tensors: Those of the processor.
        """
        if self.positions is None:
            return np.arange(len(ids), dtype=np.int32)[None]
        wanted = inspect.signature(self.positions).parameters
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **tensors}
        if "mm_token_type_ids" in wanted and "mm_token_type_ids" not in given:
            given["mm_token_type_ids"] = torch.zeros_like(tokens)
        found = self.positions(**{name: value for name, value in given.items() if name in wanted})
        positions = found[0] if isinstance(found, tuple) else found
        made: npt.NDArray[np.int32] = positions[:, 0].numpy().astype(np.int32)
        return made


def model_rules(name: str, revision: str | None, trust_remote_code: bool) -> ModelRules:
    """Reads the model's configuration, and finds its class.

    Raises:
        SourceError: If there is no configuration, or transformers has no class for it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SourceError(
            f"--processor {name}: cannot read the model's config.json, which tells the arguments and positions of the "
            f"model: {_first_line(error)}. Give the folder or id of the whole model."
        ) from error
    kind = _class_of(config, name, revision, trust_remote_code)
    if kind is None:
        raise SourceError(
            f"--processor {name}: this transformers has no model of images and text for model_type "
            f"{config.model_type!r}, so its arguments and positions are not known. Install a version that has it."
        )
    return ModelRules(
        config.model_type, frozenset(inspect.signature(kind.forward).parameters), _positions(kind, config)
    )


def _class_of(config: Any, name: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers.models.auto import modeling_auto

    for mapping in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"):
        known = getattr(modeling_auto, mapping, {})
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    places = getattr(config, "auto_map", None) or {}
    if trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        for auto in ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel"):
            if auto in places:
                return get_class_from_dynamic_module(places[auto], name, revision=revision)
    return None


def _positions(kind: Any, config: Any) -> Any:
    """Returns the method of a model that counts positions, on an object without weights; None without one."""
    module = inspect.getmodule(kind)
    stem = kind.__name__.partition("For")[0]
    owners = [kind, getattr(module, f"{stem}Model", None), *vars(module).values()]
    owner = next(
        (
            each
            for each in owners
            if inspect.isclass(each) and issubclass(each, torch.nn.Module) and hasattr(each, "get_rope_index")
        ),
        None,
    )
    if owner is None:
        return None
    made = owner.__new__(owner)
    torch.nn.Module.__init__(made)
    made.config = config
    vision = getattr(config, "vision_config", None)
    for setting in ("spatial_merge_size", "patch_size", "temporal_patch_size"):
        if (value := getattr(vision, setting, None)) is not None:
            setattr(made, setting, value)
    return made.get_rope_index


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
