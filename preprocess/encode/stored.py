"""Images and videos whose pixels a dataset has already: they are encoded without being read or decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlmdata.preprocess.conversation import ImagePart, VideoPart
from vlmdata.preprocess.encode.sample import SampleItem, Views


@dataclass(frozen=True, eq=False)
class StoredImage(ImagePart):
    """An image of which a dataset has the views. ``data`` may be empty."""

    views: Views = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredVideo(VideoPart):
    """A video of which a dataset has the frames. ``data`` may be empty."""

    item: SampleItem = field(kw_only=True)
