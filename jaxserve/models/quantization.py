"""Unpacking of int4 checkpoint weights (compressed-tensors' pack-quantized form).

Symmetric, a step for every 32 inputs of a row, no zero points. Decided by the tensors' shapes
alone: other forms that a quantization_config may name do not fit them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
PER_WORD = 8
SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape")


def packed_shapes(out: int, cols: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int]]:
    """Return the shapes of the words, the steps and the shape tensor of an [out, in] weight."""
    return (out, cols // PER_WORD), (out, cols // GROUP), (2,)


def unpack_int4(words: npt.NDArray[np.int32], steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return level times step, [out, in], rounded to the steps' dtype as the reference does.

    Args:
        words: int32 [out, in / 8]; input 8c + j lies in bits [4j, 4j + 4) of word c, as level + 8.
        steps: [out, in / 32].
    """
    out, num_words = words.shape
    # On a little-endian machine input 2b is the low nibble of byte b.
    packed = words.view(np.uint8)
    levels = np.empty((out, num_words * PER_WORD), np.int8)
    levels[:, 0::2] = packed & 15
    levels[:, 1::2] = packed >> 4
    levels -= 8
    grouped = levels.reshape(out, -1, GROUP).astype(np.float32)
    grouped *= steps.astype(np.float32)[:, :, None]
    return grouped.astype(steps.dtype).reshape(out, -1)
