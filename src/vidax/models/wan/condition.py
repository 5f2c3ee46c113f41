"""What an image-to-video model is given of a video beforehand, in one of two ways.

Channels: beside the noisy latents there are others, in which a mask says which frames are known, and then the latents
of the known frames with grey ones between them (2.1 image to video, and the experts of 2.2).
Frames: the first latent frame is the picture's own, and its tokens have timestep 0 (TI2V-5B).

Source: Wan-Video/Wan2.1, wan/image2video.py and first_last_frame2video.py; Wan-Video/Wan2.2, wan/textimage2video.py.
"""

from collections.abc import Iterator, Sequence

import numpy as np


def mask(frames: int, last: bool, time_factor: int) -> np.ndarray:
    """[F time_factor] of a video: 1 for known frames. The first stands for all that its latent frame could hold."""
    known = np.zeros(frames, np.float32)
    known[0] = 1
    if last:
        known[-1] = 1
    return np.concatenate([np.repeat(known[:1], time_factor), known[1:]]).reshape(-1, time_factor)


def chunks(pictures: Sequence[np.ndarray], frames: int, time_factor: int) -> Iterator[np.ndarray]:
    """A video [1 f H W 3] in [-1, 1] as it is encoded: the first frame alone, then `time_factor` at a time.

    pictures: the first frame and perhaps the last, [H W 3] in [0, 1]; between them all is grey.
    """
    first, *others = (picture[None, None] * 2 - 1 for picture in pictures)
    yield first
    grey = np.zeros((1, time_factor, *first.shape[2:]), np.float32)
    for start in range(1, frames, time_factor):
        if others and start + time_factor == frames:
            yield np.concatenate([grey[:, 1:], *others], 1)
        else:
            yield grey
