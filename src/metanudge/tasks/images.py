"""Pictures to tensors: 8 bits per channel, channels first."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

# What people keep pictures in. Pillow knows forty more formats, and each is another parser that a
# stranger's file would meet.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")

_GREY = ("1", "L", "LA")
_WITH_ALPHA = ("LA", "PA", "RGBA", "RGBa")
_MAY_BE_CLEAR = ("1", "L", "P", "RGB")
_ORIENTATION = 0x0112  # the EXIF tag; from 5 on the picture lies on its side


@contextmanager
def opened(source: Path | io.BytesIO) -> Iterator[Image.Image]:
    """A picture of one of `FORMATS`; its pixels are not read yet. One that would unpack to more
    than 89 million is refused.
    """
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # odd metadata, of which nothing is used
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(source, formats=FORMATS)
        except UnidentifiedImageError as error:
            if isinstance(source, Path):
                raise
            # instead of an address in memory
            raise UnidentifiedImageError("cannot identify image file it") from error
        with image:
            yield image


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether inputs of this shape are pictures, grey or RGB."""
    return len(shape) == 3 and shape[0] in (1, 3)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width of a picture as its camera was held."""
    width, height = image.size
    return (width, height) if image.getexif().get(_ORIENTATION, 1) >= 5 else (height, width)


def is_grey(image: Image.Image) -> bool:
    """Whether a picture is stored without colours."""
    return image.mode in _GREY


def as_seen(image: Image.Image) -> Image.Image:
    """A picture as viewers show it: turned as its EXIF data say, on white where it is transparent,
    the first one of an animation.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in _WITH_ALPHA or (image.mode in _MAY_BE_CLEAR and "transparency" in image.info):
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image


def image_tensor(
    image: Image.Image, *, grey: bool | None = None, size: tuple[int, int] | None = None
) -> Tensor:
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
        raise ValueError(
            f"its mode {image.mode!r} has more than 8 bits per channel; convert it to 8 bits first"
        )
    one_channel = is_grey(image) if grey is None else grey
    # before resizing: 1-bit images ignore the filter
    converted = image.convert("L" if one_channel else "RGB")
    if size is not None:
        from PIL import Image

        height, width = size
        converted = converted.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.array(converted, dtype=np.uint8).reshape(converted.height, converted.width, -1)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
