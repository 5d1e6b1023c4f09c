"""What a recipe may know of its run."""

from __future__ import annotations

from dataclasses import dataclass

from vlmdata.families import Family
from vlmdata.media.decode import decode_image
from vlmdata.media.error import MediaError
from vlmdata.media.resize import SizeRequest, target_size
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import ImagePart
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason


@dataclass(frozen=True)
class RecipeContext:
    """What a recipe may know of its run: options that are recorded with the dataset.

    Attributes:
        family: Family of the samples.
        min_pixels: Smallest area of a resized image, in pixels.
        max_pixels: Largest area of a resized image, in pixels.
        max_source_pixels: Image files with more pixels are rejected.
        variants: Samples that are made of each conversation with images.
    """

    family: Family
    min_pixels: int
    max_pixels: int
    max_source_pixels: int = ImageConfig.max_source_pixels
    variants: int = 1

    @classmethod
    def of(cls, config: PreprocessConfig) -> RecipeContext:
        """Returns the context of a run."""
        family, bounds = config.model_family, config.image.bounds(config.model_family)
        return cls(family, *bounds, config.image.max_source_pixels, config.variants)

    def final_size(self, image: ImagePart | tuple[int, int]) -> tuple[int, int]:
        """Returns the (height, width) of an image after resizing, in pixels: the size that the model sees.

        Args:
            image: An image, which is decoded to find its size, or its (height, width) as it is shown, in pixels.

        Raises:
            RowRejected: If the image cannot be used. UNSUPPORTED_CONTENT if there are variants, whose sizes differ.
        """
        if self.variants > 1:
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"--variants {self.variants} makes images of several sizes, and the recipe scales coordinates to one: "
                "return BoxPart and PointPart, which follow, or omit --variants",
            )
        request, what = SizeRequest(), "image"
        try:
            if isinstance(image, ImagePart):
                request = SizeRequest(image.min_pixels, image.max_pixels, image.resized_height, image.resized_width)
                what = image.field
                height, width = decode_image(image.data, self.max_source_pixels, what).memory.shape[:2]
                if image.region is not None:
                    width, height = image.region[2:]
            else:
                height, width = image
            return target_size(height, width, request, (self.min_pixels, self.max_pixels), self.family, what)
        except MediaError as error:
            raise RowRejected(error.reason, error.message) from error
