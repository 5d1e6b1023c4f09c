"""The vision tower as a model, for ranks that hold nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from vlmdata.model.architecture import Architecture
from vlmdata.model.metrics import MetricSums
from vlmdata.model.network import assembly
from vlmdata.model.network.patch_geometry import Grid
from vlmdata.model.network.saved_model import SavedModel
from vlmdata.model.network.settings import ModelSettings, check_settings
from vlmdata.model.network.vision import VisionTower


class VisionModel(SavedModel):
    """The tower. Its parameters have the same names as in a whole model.

    Args:
        vision: The tower.

    Attributes:
        metric_names: Metrics that the language model counts; this model counts none.
    """

    def __init__(self, vision: VisionTower) -> None:
        super().__init__(config=vision.config)
        self.vision, self.metrics = vision, MetricSums()
        self.metric_names: tuple[str, ...] = ()

    def forward(
        self,
        patches: Tensor,
        grids: Sequence[Grid],
        video_patches: Tensor | None = None,
        video_grids: Sequence[Grid] = (),
    ) -> Tensor:
        """Encodes images and videos; see :meth:`VisionTower.forward`."""
        rows: Tensor = self.vision(patches, grids, video_patches, video_grids)
        return rows


def build_vision_model(architecture: Architecture, settings: ModelSettings) -> VisionModel:
    """Builds the tower of a rank that holds nothing else, with freshly initialised weights.

    Args:
        architecture: Architecture of the whole model.
        settings: Settings of the whole model.

    Raises:
        SettingError: If the settings contradict each other or the architecture.
        ImportError: If the back end is not installed.
    """
    check_settings(settings, architecture)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    vision = assembly.tower_of(architecture, settings, assembly.provider_of(settings), groups, groups.expt_tp)
    return assembly.finished(VisionModel(vision), settings)
