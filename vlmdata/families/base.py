"""The definition of a family: conversations as text, image geometry, normalisation, rules for size and position."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from vlmdata.families.chat import IMAGE, ChatFormat, Expansion
from vlmdata.families.grounding import Grounding
from vlmdata.families.patches import patchify, unpatchify
from vlmdata.families.positions import mrope_position_ids
from vlmdata.families.video import VideoRules
from vlmdata.registry import files_of, module_named

if TYPE_CHECKING:
    import torch

CHANNELS = 3
#: Bounds of qwen_vl_utils for images whose data requests a size, in tokens.
_LEAST_TOKENS, _MOST_TOKENS = 4, 16_384


class AspectRatioError(ValueError):
    """A picture has an aspect ratio that the family's processor rejects.

    Attributes:
        size: Its (height, width) in pixels.
    """

    def __init__(self, height: int, width: int, most: float) -> None:
        super().__init__(height, width, most)  # the arguments, so that it can be pickled
        self.size, self._most = (height, width), most

    def __str__(self) -> str:
        height, width = self.size
        return f"{width}x{height} pixels: aspect ratio {max(self.size) / min(self.size):.1f}, over {self._most:g}"


class ImageBoundsError(ValueError):
    """The family has no images within such bounds."""


@dataclass(frozen=True)
class View:
    """One picture of an image that becomes an item: ``crop`` of the image, resized to ``size``, and ``part`` of that.

    Attributes:
        size: (height, width) to which the image or its crop is resized, in pixels.
        crop: (top, left, height, width) in pixels of the image; None is all of it.
        part: (top, left, height, width) in pixels after resizing, sides multiples of the factor; None is all of it.
    """

    size: tuple[int, int]
    crop: tuple[int, int, int, int] | None = None
    part: tuple[int, int, int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) of the picture in pixels."""
        return self.size if self.part is None else self.part[2:]

    @property
    def is_whole(self) -> bool:
        """Whether it shows all of the image."""
        return self.crop is None and self.part is None


@dataclass(frozen=True)
class Family:
    """The data format of a kind of model.

    Each rule is a method. Subclass it if a rule differs.

    Attributes:
        name: Name in manifests and options.
        model_types: Values of ``model_type`` in the transformers configs of this family.
        chat: How its chat templates write turns.
        items: How each kind of item becomes tokens; images among them.
        patch_size: Side of a vision patch in pixels.
        merge_size: Patches per side that merge into one token.
        temporal_patch_size: Frames per patch.
        image_mean: Mean per channel, for values from 0 to 1.
        image_std: Standard deviation per channel, for values from 0 to 1.
        min_pixels: Default smallest area of a resized image, in pixels (``--min-pixels``).
        max_pixels: Default largest area of a resized image, in pixels (``--max-pixels``).
        max_aspect_ratio: Largest ratio of the longer to the shorter side of an image.
        most_views: Largest number of pictures that :meth:`views` makes of an image.
        resample: Filter of the antialiased resize.
        position_axes: Names of the axes of a token's position: t, h, w for MRoPE, one for the order of tokens. Others
            need a :meth:`position_ids` of their own.
        processors: Values of ``processor_class`` in the files of this family's tokenizers.
        token_settings: Texts of special tokens, each with the setting in which a tokenizer may name another text.
        video: How videos are sampled and resized; None if the family has no videos.
        other_video: Other rules for videos that a run may choose, by name.
        grounding: How boxes and points are written; None if the family has no convention for them.
    """

    name: str
    model_types: tuple[str, ...]
    chat: ChatFormat
    items: tuple[Expansion, ...]
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float = 200.0
    most_views: int = 1
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    position_axes: tuple[str, ...] = ("t", "h", "w")
    processors: tuple[str, ...] = ()
    token_settings: tuple[tuple[str, str], ...] = ()
    video: VideoRules | None = None
    other_video: tuple[tuple[str, VideoRules], ...] = ()
    grounding: Grounding | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        """Pickles and unpickles once: each request to a worker has the family, which else is a tenth of its cost."""
        return _unpickled, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        values = {name: value for name, value in vars(self).items() if name != "_pickled"}
        made = pickle.dumps((type(self), values))
        return pickle.dumps((files_of((type(self), *map(type, values.values()))), made))

    @property
    def smallest_image(self) -> int:
        """Smallest area of a resized image, in pixels: one token."""
        return self.factor**2

    @property
    def largest_image(self) -> int:
        """Largest area of a resized image that data may request, in pixels."""
        return _MOST_TOKENS * self.factor**2

    @property
    def image(self) -> Expansion:
        """How an image becomes tokens."""
        return next(each for each in self.items if each.kind == IMAGE)

    @property
    def factor(self) -> int:
        """Image sides are multiples of this number of pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_bytes(self) -> int:
        """Bytes of a stored patch: uint8 (3, patch, patch), without the temporal copy."""
        return CHANNELS * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """Vision patches that are merged; :meth:`token_counts` counts tokens."""
        return self.merge_size**2

    def image_size(
        self, height: int, width: int, min_pixels: int, max_pixels: float, *, least_side: int = 0
    ) -> tuple[int, int]:
        """Returns the (height, width) to which an image is resized.

        Both are multiples of :attr:`factor`. Their product is within [min_pixels, max_pixels] if possible,
        and the aspect ratio changes as little as possible. Halves round to even, as Python's ``round`` does.
        Source: ``smart_resize`` of transformers' Qwen2-VL processor.

        Args:
            height: Source height in pixels, positive.
            width: Source width in pixels, positive.
            min_pixels: Smallest product.
            max_pixels: Largest product.
            least_side: Minimum side before the product is checked (qwen_vl_utils: the factor).

        Raises:
            AspectRatioError: If the aspect ratio is above :attr:`max_aspect_ratio`.
        """
        self.require_aspect_ratio(height, width)
        factor = self.factor
        new_height = max(least_side, round(height / factor) * factor)
        new_width = max(least_side, round(width / factor) * factor)
        if new_height * new_width > max_pixels:
            scale = math.sqrt((height * width) / max_pixels)
            new_height = max(factor, math.floor(height / scale / factor) * factor)
            new_width = max(factor, math.floor(width / scale / factor) * factor)
        elif new_height * new_width < min_pixels:
            scale = math.sqrt(min_pixels / (height * width))
            new_height = math.ceil(height * scale / factor) * factor
            new_width = math.ceil(width * scale / factor) * factor
        return new_height, new_width

    def requested_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the (height, width) of an image for which the data requests a height and a width, in pixels.

        Source: ``fetch_image`` of qwen_vl_utils.

        Raises:
            AspectRatioError: If the aspect ratio is above :attr:`max_aspect_ratio`.
            ImageBoundsError: If it is too large, or the family has no such requests.
        """
        if height * width > self.largest_image:
            raise ImageBoundsError(
                f"{width}x{height} (resized_width x resized_height) is more than {self.largest_image:,} pixels"
            )
        least = _LEAST_TOKENS * self.factor**2
        return self.image_size(height, width, least, self.largest_image, least_side=self.factor)

    def require_bounds(self, min_pixels: int, max_pixels: int) -> None:
        """Checks the smallest and the largest area of an image, of the run or of the data; :meth:`image_size` has them.

        Args:
            min_pixels: At least :attr:`smallest_image`.
            max_pixels: At least ``min_pixels``.

        Raises:
            ImageBoundsError: If the family does not take them; with the remedy.
        """

    def require_aspect_ratio(self, height: int, width: int) -> None:
        """Checks the sides of a picture.

        Raises:
            AspectRatioError: If the aspect ratio is above :attr:`max_aspect_ratio`.
        """
        if max(height, width) / min(height, width) > self.max_aspect_ratio:
            raise AspectRatioError(height, width, self.max_aspect_ratio)

    def views(self, height: int, width: int, size: tuple[int, int]) -> tuple[View, ...]:
        """Returns the pictures of an image, each an item. Their placeholders stand together between one pair of marks.

        Args:
            height: Height of the image in pixels.
            width: Width of the image in pixels.
            size: The (height, width) of :meth:`image_size`, or that which the data requests.

        Returns:
            The whole image at ``size``; at most :attr:`most_views` if a family cuts images.
        """
        return (View(size),)

    def patchify(self, image: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Cuts an image into patches; see :func:`vlmdata.families.patches.patchify`.

        Large images are cut in bands of whole rows of tokens. A band must give the patches that the whole image has
        there.
        """
        return patchify(image, self.patch_size, self.merge_size, out)

    def unpatchify(self, patches: npt.NDArray[np.uint8], grid_h: int, grid_w: int) -> npt.NDArray[np.uint8]:
        """Joins patches to an image; see :func:`vlmdata.families.patches.unpatchify`."""
        return unpatchify(patches, grid_h, grid_w, self.patch_size, self.merge_size)

    def expansion(self, kind: str) -> Expansion:
        """How an item of a kind becomes tokens.

        Raises:
            KeyError: If the family has none of this kind.
        """
        return {each.kind: each for each in self.items}[kind]

    def token_counts(self, grid_thw: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Returns the number of tokens of each block between its marks, by default one per merged patch.

        All counts of tokens are of this method. An image is one block; :meth:`Expansion.blocks` tells those of videos.

        Args:
            grid_thw: (N, 3), patches of each block along t, h, w.

        Returns:
            int64 (N,).
        """
        return np.asarray(grid_thw, dtype=np.int64).reshape(-1, 3).prod(axis=1) // self.patches_per_token

    def placeholders(self, kind: str, grid: tuple[int, int, int]) -> Sequence[str]:
        """Returns the texts of the tokens of a block between its marks, as many as :meth:`token_counts` says.

        By default all are the ``token`` of its :class:`Expansion`. A family with tokens ``between`` them, such as a
        break after each row, says here where they stand.

        Args:
            kind: Kind of the item.
            grid: Patches of the block along t, h, w.
        """
        return (self.expansion(kind).token,) * int(self.token_counts(np.array([grid]))[0])

    def item_tokens(self, kind: str, grids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Returns the number of tokens of each item, in all of its blocks, int64 (N,).

        Args:
            kind: Kind of the items.
            grids: (N, 3), patches along t, h, w.
        """
        distinct, numbers = np.unique(np.asarray(grids, np.int64).reshape(-1, 3), axis=0, return_inverse=True)
        blocks = self.expansion(kind).blocks
        counts = [int(self.token_counts(np.array(blocks((t, h, w)))).sum()) for t, h, w in distinct.tolist()]
        return np.array(counts, np.int64)[numbers.reshape(-1)]

    def position_ids(
        self,
        length: int,
        starts: npt.NDArray[np.integer],
        grids: npt.NDArray[np.integer],
        steps: npt.NDArray[np.number] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Computes the positions of a sequence with items at known places.

        Args:
            length: Tokens in the sequence.
            starts: (N,) index of the first token of each block: of an image, or as :meth:`Expansion.blocks` tells.
                Ascending.
            grids: (N, 3), patches of each block along t, h, w.
            steps: (N,), from one temporal patch of a block to the next (:meth:`VideoRules.temporal_step`); None is 1.

        Returns:
            int32 (axes, length): the order of tokens for one axis, for three as
            :func:`vlmdata.families.positions.mrope_position_ids` tells; tokens of a block beyond its merged patches
            count as text after it.

        Raises:
            NotImplementedError: If there are three, and tokens are not one per merged patch and perhaps more after
                them: such a family has a rule of its own.
        """
        if len(self.position_axes) == 1:
            return np.arange(length, dtype=np.int32)[None]
        merged = np.asarray(grids, np.int64).reshape(-1, 3).prod(axis=1) // self.patches_per_token
        if any(item.between for item in self.items) or (self.token_counts(grids) < merged).any():
            raise NotImplementedError(f"family {self.name}: its tokens are not those of a grid; define position_ids")
        return mrope_position_ids(length, starts, grids, self.merge_size, steps)

    def pixel_values(
        self,
        patches: torch.Tensor,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        copies: int = 1,
    ) -> torch.Tensor:
        """Expands stored patches to the ``pixel_values`` of transformers' processor, bitwise exact in float32.

        Args:
            patches: uint8 (P * copies, patch_bytes) on any device; the copies of a patch are adjacent.
            dtype: Result dtype; by default that of ``out``, else float32.
            out: Where the values go: contiguous, of the result's shape and dtype. None is a new tensor.
            copies: Temporal copies of each patch that are stored: 1 (images), or ``temporal_patch_size``.

        Returns:
            (P, temporal_patch_size * patch_bytes), columns (C, T, patch, patch), on the patches' device.
        """
        import torch

        from vlmdata.families.pixel_values import expand_patches

        shape = (len(patches) // copies, self.temporal_patch_size * self.patch_bytes)
        if out is None:
            out = torch.empty(shape, dtype=dtype or torch.float32, device=patches.device)
        by_frame = out.view(len(out), CHANNELS, self.temporal_patch_size, self.patch_size**2)
        expand_patches(patches, self.image_mean, self.image_std, by_frame, copies)
        return out

    def image_inputs(self, values: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns what transformers' model of the family takes for images, by argument.

        Args:
            values: (P, columns), the :meth:`pixel_values` of images one after another.
            grids: (N, 3), patches of each along t, h, w.

        Returns:
            Exactly what its processor makes of the same images; by default ``pixel_values`` and ``image_grid_thw``.
        """
        return {"pixel_values": values, "image_grid_thw": grids}


@cache
def _unpickled(content: bytes) -> Family:
    """Returns the family of :attr:`Family._pickled`, the same object each time."""
    files, made = pickle.loads(content)
    for file in files:
        module_named(file)
    kind, values = pickle.loads(made)
    found: Family = object.__new__(kind)
    vars(found).update(values)
    return found
