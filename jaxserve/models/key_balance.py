"""Evens out the channels of keys, so that rounding to levels of their largest loses less.

Scores stay what they are: what divides a key's channel multiplies the query's. Both factors go into
the weights of key and query norms, at load, so that nothing is computed for it.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxserve.models.config import ModelConfig
from jaxserve.models.params import Params


def balance_keys(params: Params, config: ModelConfig) -> Params:
    """Return weights with the same scores, whose key norms give all channels one size.

    Rotary embedding turns channels c and c + E/2 into each other, so they share a factor: the root
    mean square of the key norm's two weights. Layers that read another's keys take its factors.
    """
    norms_L2E = np.array(params.head_norms_L2E)
    size_of = {}
    for i in config.kv_owners:
        pairs = norms_L2E[i, 1, : config.layers[i].head_dim].reshape(2, -1)
        size = np.sqrt(np.mean(pairs**2, axis=0))
        size_of[i] = np.tile(np.where(size > 0, size, 1.0), 2)
    for i, layer in enumerate(config.layers):
        size_E = size_of[layer.kv_source]
        norms_L2E[i, 0, : layer.head_dim] *= size_E
        if layer.kv_source == i:
            norms_L2E[i, 1, : layer.head_dim] /= size_E
    return replace(params, head_norms_L2E=jnp.asarray(norms_L2E))
