"""Makes upright 8-bit RGB of decoded frames.

Chroma is interpolated and rounded by FFmpeg's exact code (``ACCURATE_RND``, ``BITEXACT``), so the bytes do not depend
on the processor. The matrix is that of the file, else BT.601, as in FFmpeg. HDR is not tone-mapped, and interlaced
frames are kept as they are: so do the servers that show models their frames (docs/decisions/0086).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmdata.media.decode import composite_on_white
from vlmdata.media.error import MediaError
from vlmdata.reasons import Reason

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from av.video.reformatter import VideoReformatter

#: Transfer functions of HDR, by FFmpeg's number.
_HDR = {16: "pq", 18: "hlg"}


class Pictures:
    """Converts the frames of one video.

    Args:
        what: Name of the field for messages.
    """

    def __init__(self, what: str) -> None:
        from av.video.reformatter import Interpolation, VideoReformatter

        self._what = what
        self._reformatter, self._packer = VideoReformatter(), VideoReformatter()
        self._flags = (
            Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.BITEXACT | Interpolation.FULL_CHR_H_INT
        )

    def rgb(self, frame: VideoFrame) -> npt.NDArray[np.uint8]:
        """Returns a frame as uint8 (H, W, 3), C-contiguous, turned as the file's display matrix says.

        Transparent pixels are composited on white, as those of images are.

        Raises:
            MediaError: UNSUPPORTED_VIDEO if the matrix turns by other than quarter turns.
        """
        has_alpha = frame.format.name == "pal8" or any(part.is_alpha for part in frame.format.components)
        if has_alpha:
            made = self._converted(self._reformatter, frame, "rgba")
        elif frame.format.is_rgb:
            made = self._converted(self._reformatter, frame, "rgb24")
        else:  # by way of planes, for which FFmpeg has code that is twice as fast and as exact
            made = self._converted(self._packer, self._converted(self._reformatter, frame, "gbrp"), "rgb24")
        pixels: npt.NDArray[np.uint8] = made.to_ndarray().astype(np.uint8, copy=False)
        if has_alpha:
            pixels = _on_white(pixels)
        flip_rows, flip_columns, transposed = self._turn(frame)
        if transposed:
            pixels = pixels.transpose(1, 0, 2)
        return np.ascontiguousarray(pixels[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1])

    def _converted(self, reformatter: VideoReformatter, frame: VideoFrame, pixels: str) -> VideoFrame:
        from av.video.reformatter import ColorRange

        return reformatter.reformat(
            frame, format=pixels, interpolation=self._flags, dst_color_range=ColorRange.JPEG, threads=1
        )

    def size(self, frame: VideoFrame) -> tuple[int, int]:
        """Returns (height, width) of the upright frame, in pixels.

        Raises:
            MediaError: As for :meth:`rgb`.
        """
        return (frame.width, frame.height) if self._turn(frame)[2] else (frame.height, frame.width)

    def _turn(self, frame: VideoFrame) -> tuple[bool, bool, bool]:
        """Returns whether rows and columns are flipped after the axes may have been swapped, and the latter."""
        data = frame.side_data.get("DISPLAYMATRIX")
        if data is None:
            return False, False, False
        # A point (x, y) goes to (a x + c y, b x + d y), in units of 2^-16.
        a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()
        if b == c == 0 and a and d:
            return d < 0, a < 0, False
        if a == d == 0 and b and c:
            return b < 0, c < 0, True
        raise MediaError(
            Reason.UNSUPPORTED_VIDEO,
            f"{self._what}: the file asks to turn its frames by {frame.rotation} degrees; only quarter turns are "
            "supported. Turn its frames: ffmpeg -i a.mp4 b.mp4",
        )


def colour_of(frame: VideoFrame) -> dict[str, str | bool]:
    """Returns what of a frame's format changes its look: pixel format, HDR, interlacing; for the metadata."""
    found: dict[str, str | bool] = {"pixels": frame.format.name}
    if (transfer := _HDR.get(int(frame.color_trc))) is not None:
        found["hdr"] = transfer
    if frame.interlaced_frame:
        found["interlaced"] = True
    return found


def _on_white(rgba: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if (rgba[..., 3] == 255).all():
        return rgba[..., :3]
    return np.asarray(composite_on_white(Image.fromarray(rgba)))
