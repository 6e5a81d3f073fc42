"""Pictures to tensors: 8 bits per channel, channels first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image


def image_tensor(image: Image.Image, *, grey: bool | None = None, size: tuple[int, int] | None = None) -> Tensor:
    """A Pillow image as uint8 `(1, height, width)` or `(3, height, width)`.

    Args:
        image: the image; 8 bits per channel, or black and white.
        grey: one channel or three; None keeps grey images grey and makes everything else RGB.
        size: (height, width) to resize to, with a Lanczos filter.

    Example:
        >>> from PIL import Image
        >>> image_tensor(Image.new("RGB", (10, 6)), grey=True, size=(3, 5)).shape
        torch.Size([1, 3, 5])
    """
    if image.mode.startswith(("I", "F")):
        # Pillow clips these to 0…255 without a word, which leaves an almost white picture.
        raise ValueError(f"its mode {image.mode!r} has more than 8 bits per channel; convert it to 8 bits first")
    one_channel = image.mode in ("1", "L") if grey is None else grey
    converted = image.convert("L" if one_channel else "RGB")  # before resizing: 1-bit images ignore the filter
    if size is not None:
        from PIL import Image

        height, width = size
        converted = converted.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.array(converted, dtype=np.uint8).reshape(converted.height, converted.width, -1)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
