"""The decoder as a whole: a token's bits depend on no other row of a decode."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import PagedRows
from jaxserve.models.kv_cache import KVCache, make_cache
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.specs import random_params
from jaxserve.models.transformer import run_writing_layers
from tests.checkpoints import config_json, write_json_files

PAGE, TABLE, NUM_ROWS = 8, 4, 8


def test_a_decoded_row_has_the_same_bits_alone_and_in_company(tmp_path: Path) -> None:
    # √D is no power of two: scaling embeddings rounds.
    write_json_files(tmp_path, config_json("gemma3") | {"hidden_size": 48})
    config = load_config(tmp_path)
    params = random_params(config, jnp.dtype(jnp.bfloat16), seed=3)
    cache = make_cache(
        config,
        num_pages=NUM_ROWS * TABLE + 1,
        num_sliding_pages=NUM_ROWS * TABLE + 1,
        page_size=PAGE,
        dtype=jnp.uint16,
    )
    rng = np.random.default_rng(0)
    ids_R = jnp.asarray(rng.integers(2, 1000, NUM_ROWS), jnp.int32)
    table_RM = jnp.arange(1, NUM_ROWS * TABLE + 1, dtype=jnp.int32).reshape(NUM_ROWS, TABLE)
    rows = PagedRows(
        start_R=jnp.asarray(rng.integers(0, PAGE * TABLE, NUM_ROWS), jnp.int32),
        num_valid_R=jnp.ones(NUM_ROWS, jnp.int32),
        table_RM=table_RM,
        sliding_table_RM=table_RM,
        full_start_R=jnp.zeros(NUM_ROWS, jnp.int32),
        block=1,
    )

    @jax.jit
    def run(params: Params, ids_R: jax.Array, cache: KVCache, rows: PagedRows) -> jax.Array:
        stream, _ = run_writing_layers(params, config, ids_R, cache, rows, chunk_pages=2)
        return stream.x_ND

    together = np.asarray(run(params, ids_R, cache, rows))

    for i in range(NUM_ROWS):
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], replace(rows, is_one_run=None))
        alone = np.asarray(run(params, ids_R[i : i + 1], cache, one))
        np.testing.assert_array_equal(alone[0], together[i])
