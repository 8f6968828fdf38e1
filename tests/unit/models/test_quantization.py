"""Unpacking of int4 weights."""

import ml_dtypes
import numpy as np

from jaxserve.models.quantization import packed_shapes, unpack_int4


def test_the_lowest_bits_hold_the_first_input() -> None:
    # Levels -8, -7, ... 7 twice: nibbles 0 to 15, eight to a word, the first in the lowest bits.
    words = np.array([[0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]], np.uint32).view(np.int32)
    steps = np.array([[2.0]], ml_dtypes.bfloat16)
    levels = np.tile(np.arange(-8, 8), 2)
    np.testing.assert_array_equal(unpack_int4(words, steps).astype(np.float32)[0], 2.0 * levels)


def test_each_group_has_its_step_and_products_round_to_the_steps_dtype() -> None:
    words = np.full((1, 8), -1, np.int32)  # level 7 everywhere
    steps = np.array([[1.0, 1.0078125]], ml_dtypes.bfloat16)
    values = unpack_int4(words, steps)
    assert values.dtype == ml_dtypes.bfloat16
    # 7 * 1.0078125 = 7.0546875 lies between the bf16 values 7.03125 and 7.0625.
    np.testing.assert_array_equal(values.astype(np.float32)[0], [7.0] * 32 + [7.0625] * 32)


def test_shapes() -> None:
    assert packed_shapes(6, 64) == ((6, 8), (6, 2), (2,))
