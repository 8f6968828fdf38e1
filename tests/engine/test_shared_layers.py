"""What a step writes: each row's own position in the pages of the owning layers, nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.state import Column, HostRows, make_state
from jaxserve.kernels.constants import SCRATCH_PAGE
from jaxserve.models.config import AttentionKind, LayerConfig
from jaxserve.models.kv_cache import FloatPages, KVCache
from jaxserve.models.params import Params
from jaxserve.models.specs import random_params
from tests.checkpoints import Array
from tests.engine.tiny import TinyModel

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler

POSITIONS = (5, 16, 31, 40)


def pages_of(slot: int, first: int) -> list[int]:
    return list(range(first + slot, first + slot + 4 * 6, 4))


PAGES: dict[AttentionKind, list[list[int]]] = {
    "full": [pages_of(slot, 1) for slot in range(4)],
    "sliding": [pages_of(slot, 60) for slot in range(4)],
}


def owners(model: TinyModel) -> list[LayerConfig]:
    """Return the layer of each array of the cache: every owner twice, for keys and for values."""
    return [model.config.layers[i] for i in model.config.kv_owners for _ in range(2)]


def noise(model: TinyModel) -> list[Array]:
    """Keys and values of every layer that owns a cache, in turn."""
    rng, plan = np.random.default_rng(4), model.plan
    count = {"full": plan.num_pages, "sliding": plan.num_sliding_pages}
    shapes = [
        (count[layer.kind], plan.page_size, layer.num_kv_heads * layer.head_dim)
        for layer in owners(model)
    ]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def decode(model: TinyModel, params: Params) -> list[Array]:
    """Run four rows over a cache of noise; return the cache then, and last the sampled ids."""
    plan, arrays = model.plan, [jnp.array(array) for array in noise(model)]
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    cache = KVCache(layers=tuple(FloatPages(k_PZX=k, v_PZX=v) for k, v in pairs))
    host = HostRows(plan.num_slots, plan.table_sizes[0])
    for slot in range(4):
        for kind, pages in PAGES.items():
            host.set_pages(slot, 0, pages[slot], kind)
    staged = host.stage(range(4), 4, plan.table_sizes[0])
    staged[:, Column.POSITION] = POSITIONS
    program = model.compiled[DecodeBucket(rows=4, table_size=plan.table_sizes[0])]
    state = make_state(plan.num_slots, model.config.vocab_size, plan.arena_rows)
    cache, _, result = program(params, cache, state, staged)
    return [np.asarray(array) for array in (*jax.tree.leaves(cache), result)]


def test_a_step_writes_each_rows_own_position_and_no_other(e2b: TinyModel) -> None:
    *after, _ = decode(e2b, e2b.params)

    assert len(after) == 2 * len(e2b.config.kv_owners) == 6
    for layer, before_PZX, after_PZX in zip(owners(e2b), noise(e2b), after, strict=True):
        expected = np.zeros(before_PZX.shape[:2], bool)
        for slot, position in enumerate(POSITIONS):
            page, offset = divmod(position, e2b.plan.page_size)
            expected[PAGES[layer.kind][slot][page], offset] = True
        changed_PZ = (before_PZX != after_PZX).any(-1)
        changed_PZ[SCRATCH_PAGE] = False  # where padding writes
        np.testing.assert_array_equal(changed_PZ, expected)


def test_what_is_written_does_not_depend_on_the_layers_that_share_it(e2b: TinyModel) -> None:
    params, num_writing = e2b.params, e2b.config.num_writing_layers
    others = random_params(e2b.config, np.float32, seed=8)
    norms_LND = np.array(params.norms_LND)
    norms_LND[num_writing:] = others.norms_LND[num_writing:]
    other_tail = replace(
        params,
        layers=(*params.layers[:num_writing], *others.layers[num_writing:]),
        norms_LND=jnp.array(norms_LND),
    )

    *after, ids = decode(e2b, params)
    *other_after, other_ids = decode(e2b, other_tail)

    assert num_writing < e2b.config.num_layers
    assert ids.tolist() != other_ids.tolist()
    for array, other in zip(after, other_after, strict=True):
        np.testing.assert_array_equal(array, other)
