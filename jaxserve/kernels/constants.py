"""What kernels, and the code that does the same without them, have to agree on."""

LANES = 128
"""A TPU stores rows of whole lanes, one behind another; of other sizes it copies to read them."""

SUBLANES = 8
"""And it stores so many rows at a time; arrays of other sizes it copies to reshape them."""

BFLOAT16_128 = 0x43004300
"""Two bfloat16 of 128 in a word, no bit of their mantissas set, the last of which counts 1: 128 or
a level of seven bits more, by one OR."""

MAX_LEVEL = 127
"""Of int8 keys and values, whose least is -127."""

MASKED = -1e30
"""A score that no key can have; finite, so that a chunk or row without any key gives no NaN."""

SCRATCH_PAGE = 0
"""No sequence's: where padding and empty rows write keys, values and scales."""
