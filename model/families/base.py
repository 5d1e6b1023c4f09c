"""What a model family gives to the trainer and to the conversion of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from model.architecture import Architecture
from model.flops import StepFlops
from model.network.settings import ModelSettings

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from model.weights.mapping import ParameterMap


class Build[A: Architecture](Protocol):
    """Builds this rank's part of a model, with fresh weights.

    Raises:
        SettingError: If the settings contradict each other, the architecture or the groups that exist.
        ImportError: If the back end is not installed.
    """

    def __call__(  # noqa: D102
        self, architecture: A, settings: ModelSettings, *, pre_process: bool = True, post_process: bool = True
    ) -> MegatronModule: ...


class ParameterMaps[A: Architecture](Protocol):
    """Makes the table of weight names of a model, by canonical name in the order of the layers.

    Rows of the embedding table beyond the vocabulary (``vocab_rows``) are zero and left out of what is written for
    Hugging Face. ``checkpoint_names`` are the tensors of the checkpoint that is read, if its spelling has variants.
    """

    def __call__(  # noqa: D102
        self,
        architecture: A,
        *,
        mtp: bool = True,
        vocab_rows: int | None = None,
        checkpoint_names: Collection[str] = (),
    ) -> dict[str, ParameterMap]: ...


@dataclass(frozen=True)
class ModelSpec[A: Architecture]:
    """A model family. Everything but ``build`` and ``parameter_maps`` works without torch.

    Attributes:
        name: Name in :data:`model.families.REGISTRY`; the ``family`` of its architectures.
        data_family: The family in :mod:`vlmdata.families` whose datasets its models train on.
        model_types: Values of ``model_type`` of a ``config.json`` that ``from_hf`` reads.
        presets: Architectures by name; names are unique over all families.
        from_hf: Reads the content of a ``config.json`` or a transformers config. The second argument names unknown
            fields that are known to be harmless. Raises ValueError for what the model does not compute.
        to_hf: The content of a ``config.json`` that ``from_hf`` and transformers read back.
        step_flops: The FLOP formula, given architecture, whether multi-token prediction is trained, and frozen parts.
        check: Refuses settings that do not fit an architecture with a :class:`model.network.settings.SettingError`.
        build: Builds a model.
        parameter_maps: Makes the table of weight names.
    """

    name: str
    data_family: str
    model_types: tuple[str, ...]
    presets: Mapping[str, A]
    from_hf: Callable[[Mapping[str, Any] | Any, Collection[str]], A]
    to_hf: Callable[[A], dict[str, Any]]
    step_flops: Callable[[A, bool, tuple[str, ...]], StepFlops]
    check: Callable[[ModelSettings, A], None]
    build: Build[A]
    parameter_maps: ParameterMaps[A]
