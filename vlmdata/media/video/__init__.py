"""Reads the frames of video files that a sampling rule asks for, by their presentation time, on the CPU.

``container`` opens files, ``contents`` lists their frames, ``decode`` decodes some of them, ``picture`` makes upright
RGB of each, ``sample`` joins these steps, and ``patches`` makes an item of the frames. The decoder is FFmpeg in PyAV's
wheels (docs/decisions/0086).
"""

from vlmdata.media.video.contents import VideoContents, read_contents
from vlmdata.media.video.sample import SampledVideo, sample_video

__all__ = ["SampledVideo", "VideoContents", "read_contents", "sample_video"]
