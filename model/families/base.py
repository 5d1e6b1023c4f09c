"""The interface between a model family and the trainer and weight conversion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from vlmdata.model.architecture import Architecture
from vlmdata.model.families.processors import ProcessorFiles
from vlmdata.model.flops import StepFlops
from vlmdata.model.kernels.shapes import DecoderKernels
from vlmdata.model.network.settings import ModelSettings

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from vlmdata.model.weight_names.table import ParameterMap, Shape


class Build[A: Architecture](Protocol):
    """Builds this rank's part of a model with freshly initialised weights.

    Raises:
        SettingError: If the settings contradict each other, the architecture or the process groups.
        ImportError: If the back end is not installed.
    """

    def __call__(  # noqa: D102
        self, architecture: A, settings: ModelSettings, *, pre_process: bool = True, post_process: bool = True
    ) -> MegatronModule: ...


class ParameterMaps[A: Architecture](Protocol):
    """Makes the weight name table of a model, keyed by canonical name in layer order.

    Embedding rows beyond the vocabulary (``vocab_rows``) are zero and are not written to Hugging Face files.
    ``stored`` has the shapes of the tensors of the checkpoint to read, by name, for families whose checkpoints differ
    in names or layout. Without it, the table is that of the checkpoints to write.
    """

    def __call__(  # noqa: D102
        self,
        architecture: A,
        *,
        mtp: bool = True,
        vocab_rows: int | None = None,
        stored: Mapping[str, Shape] | None = None,
    ) -> dict[str, ParameterMap]: ...


class StepFlopsOf[A: Architecture](Protocol):
    """Returns the FLOP formula of a model, given the parts whose weights are frozen and those that have adapters."""

    def __call__(  # noqa: D102
        self, model: A, mtp: bool = ..., frozen: tuple[str, ...] = ..., adapted: tuple[str, ...] = ...
    ) -> StepFlops: ...


@dataclass(frozen=True)
class ModelSpec[A: Architecture]:
    """A model family. Only ``build`` and ``parameter_maps`` need torch.

    Attributes:
        name: Name in :data:`vlmdata.model.families.REGISTRY`; the ``family`` of its architectures.
        model_types: Values of ``model_type`` in ``config.json`` that ``from_hf`` accepts.
        presets: Architectures by name; names are unique across families.
        typical: Name of the preset whose cost balances packs of the family's data if no size is named.
        small: Names of the presets that adopt a dataset's vocabulary; the others keep their own.
        from_hf: Reads the content of a ``config.json`` or a transformers config. The second argument names unknown
            fields that are known to be harmless. Raises ValueError for anything that the model does not compute.
        to_hf: Returns the content of a ``config.json`` that ``from_hf`` and transformers can read.
        step_flops: FLOP formula; takes the architecture, whether multi-token prediction is trained, frozen parts
            and parts with adapters.
        check: Raises :class:`vlmdata.model.network.settings.SettingError` for settings that do not fit an architecture.
        build: Builds a model.
        parameter_maps: Makes the weight name table.
        processor: The files of its processor, which conversion writes for a trained model.
        kernels: Returns the decoder's kernels to compile while a run starts, if any; takes the architecture, settings
            and the tokens of a pack.
    """

    name: str
    model_types: tuple[str, ...]
    presets: Mapping[str, A]
    typical: str
    small: frozenset[str]
    from_hf: Callable[[Mapping[str, Any] | Any, Collection[str]], A]
    to_hf: Callable[[A], dict[str, Any]]
    step_flops: StepFlopsOf[A]
    check: Callable[[ModelSettings, A], None]
    build: Build[A]
    parameter_maps: ParameterMaps[A]
    processor: ProcessorFiles
    kernels: Callable[[A, ModelSettings, int], DecoderKernels | None] = lambda *_: None


def imported_when_called(module: str, name: str) -> Any:
    """Returns a function whose module is imported by its first call, since torch and megatron-core take seconds."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call
