"""Sampling on the device: one id a row from its logits, its parameters and its position, all data.

A row's id depends on nothing else: not on its slot, its neighbours or the batch's size. Filters
apply in vLLM's order: temperature, min-p, top-k, top-p among what is left; all of them to what a
grammar's mask leaves. Tokens that tie with the last one kept are kept too. B rows, V vocab, C
candidates, J members of a group of tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.device.grammar import mask_logits, masked_argmax
from jaxserve.device.largest import groups, largest

NUM_CANDIDATES = 256
"""Most likely tokens that are sorted; filters that reach beyond them are resolved by bisection."""

DRAW_GROUP = 512
"""A draw picks a group by its mass, then a token of it: near √V, to make both sums short."""

ONE_BITS = 0x3F800000
"""The float32 1.0 as an integer; for floats of [0, 1] integer order is their order."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """SamplingParams of each row, [B] each; `seed` is uint32 [B, 2], low half first.

    `position` is that of the token to be sampled.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    position: jax.Array


def sample(
    logits_VB: jax.Array,
    rows: SamplingRows,
    is_adjusted_B: jax.Array,
    adjust: Callable[[jax.Array], jax.Array],
    is_masked_B: jax.Array,
    mask_BW: jax.Array,
) -> jax.Array:
    """Return int32 ids [B]; at temperature 0 the most likely token, the lowest of equals.

    `adjust` takes logits [B, V] and returns those to sample from; it runs only if any row is
    adjusted. Then the masks apply (device/grammar.py), of which rows without one allow everything.
    """
    is_any_masked = jnp.any(is_masked_B)
    is_random_B = rows.temperature > 0
    is_any_random = jnp.any(is_random_B)
    # What applies a mask does so in the pass that reads the logits: one more, of the size of the
    # logits, would take a CPU longer than all that a mask is for.
    greedy_B = lax.cond(
        is_any_masked,
        lambda: masked_argmax(logits_VB, mask_BW),
        lambda: _argmax(logits_VB),
    )

    def other(transposed: Callable[[], jax.Array]) -> jax.Array:
        def adjusted() -> tuple[jax.Array, jax.Array]:
            logits_BV = mask_logits(adjust(transposed()), mask_BW)
            best_B = jnp.where(is_adjusted_B, _argmax(logits_BV.T), greedy_B)
            weight_BV = lax.cond(
                is_any_random,
                lambda: _weights(logits_BV, best_B, rows),
                lambda: jnp.zeros_like(logits_BV),
            )
            return weight_BV, best_B

        def unadjusted() -> tuple[jax.Array, jax.Array]:
            weight_BV = lax.cond(
                is_any_masked,
                lambda: _weights(mask_logits(transposed(), mask_BW), greedy_B, rows),
                lambda: _weights(transposed(), greedy_B, rows),
            )
            return weight_BV, greedy_B

        weight_BV, best_B = lax.cond(jnp.any(is_adjusted_B), adjusted, unadjusted)
        ids_B: jax.Array = lax.cond(
            is_any_random,
            lambda: jnp.where(is_random_B, _draw(weight_BV, rows), best_B),
            lambda: best_B,
        )
        return ids_B

    def choose(transposed: Callable[[], jax.Array]) -> jax.Array:
        needs_other = is_any_random | jnp.any(is_adjusted_B)
        ids_B: jax.Array = lax.cond(needs_other, lambda: other(transposed), lambda: greedy_B)
        return ids_B

    def choose_of_rows() -> jax.Array:
        # A TPU's product leaves rows one behind another, as [B, V] lies by itself: handed to a
        # condition as [V, B] they would be copied, B padded to a whole row of lanes.
        logits_BV = logits_VB.T
        return choose(lambda: logits_BV)

    ids_B: jax.Array = lax.platform_dependent(
        cpu=lambda: choose(lambda: logits_VB.T), default=choose_of_rows
    )
    return ids_B


def _argmax(logits_VB: jax.Array) -> jax.Array:
    """Find the largest by group, then within its group: on a CPU one fast pass, not one slow."""
    padding = ((0, -logits_VB.shape[0] % DRAW_GROUP), (0, 0))
    padded = jnp.pad(logits_VB, padding, constant_values=-jnp.inf)
    logits_GJB = padded.reshape(-1, DRAW_GROUP, logits_VB.shape[1])
    group_B = jnp.argmax(logits_GJB.max(axis=1), axis=0)
    members_JB = jnp.take_along_axis(logits_GJB, group_B[None, None, :], axis=0)[0]
    return (group_B * DRAW_GROUP + jnp.argmax(members_JB, axis=0)).astype(jnp.int32)


def _weights(logits_BV: jax.Array, best_B: jax.Array, rows: SamplingRows) -> jax.Array:
    """Return probabilities up to a factor: of [0, 1], that of the likeliest is 1."""
    best_logit_B1 = jnp.take_along_axis(logits_BV, best_B[:, None], axis=1)
    temperature_B = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    return jnp.exp((logits_BV - best_logit_B1) / temperature_B[:, None])


def _draw(weight_BV: jax.Array, rows: SamplingRows) -> jax.Array:
    """Draw an id for each row; of those with filters mostly from the candidates alone."""
    uniform_B = _uniform(rows)
    is_random_B = rows.temperature > 0
    has_filters_B = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)

    def filtered() -> jax.Array:
        top_BC, candidates_BC = _first_candidates(weight_BV, rows)
        kept_BC, are_all_B = _filter_candidates(top_BC, weight_BV, rows)
        are_all_B &= has_filters_B
        cumulative_BC = jnp.cumsum(kept_BC, axis=-1)
        place_B = _first_above(kept_BC, cumulative_BC, uniform_B * cumulative_BC[:, -1])
        picked_B = jnp.take_along_axis(candidates_BC, place_B[:, None], axis=1)[:, 0]
        ids_B: jax.Array = lax.cond(
            jnp.all(are_all_B | ~is_random_B),
            lambda: picked_B,
            lambda: jnp.where(
                are_all_B, picked_B, _pick(_filter(weight_BV, top_BC, rows), uniform_B)
            ),
        )
        return ids_B

    ids_B: jax.Array = lax.cond(
        jnp.any(is_random_B & has_filters_B), filtered, lambda: _pick(weight_BV, uniform_B)
    )
    return ids_B


def _uniform(rows: SamplingRows) -> jax.Array:
    """Return one float32 of [0, 1) a row, from its seed and position alone."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(rows.seed, rows.position)


def _pick(weight_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Invert the cumulative weights at uniform·total, in two stages; never a token of weight 0."""
    weight_BGJ = groups(weight_BV, DRAW_GROUP, 0.0)
    mass_BG = weight_BGJ.sum(axis=-1)
    cumulative_BG = jnp.cumsum(mass_BG, axis=-1)
    target_B = uniform_B * cumulative_BG[:, -1]
    group_B = _first_above(mass_BG, cumulative_BG, target_B)
    before_B = jnp.where(
        group_B > 0, jnp.take_along_axis(cumulative_BG, group_B[:, None] - 1, axis=1)[:, 0], 0.0
    )
    weight_BJ = jnp.take_along_axis(weight_BGJ, group_B[:, None, None], axis=1)[:, 0]
    cumulative_BJ = jnp.cumsum(weight_BJ, axis=-1)
    member_B = _first_above(weight_BJ, cumulative_BJ, target_B - before_B)
    return (group_B * DRAW_GROUP + member_B).astype(jnp.int32)


def _first_above(weight_BN: jax.Array, cumulative_BN: jax.Array, target_B: jax.Array) -> jax.Array:
    """Return the first index of a positive weight whose sum exceeds the target, else the last one.

    Weights must be asked: sums are formed in trees, so one may grow by rounding at a weight of 0.
    """
    is_positive_BN = weight_BN > 0
    is_above_BN = is_positive_BN & (cumulative_BN > target_B[:, None])
    last_B = weight_BN.shape[1] - 1 - jnp.argmax(is_positive_BN[:, ::-1], axis=-1)
    return jnp.where(is_above_BN.any(axis=-1), jnp.argmax(is_above_BN, axis=-1), last_B)


def _first_candidates(weight_BV: jax.Array, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """Return each row's C largest weights that min-p keeps, descending, and their ids."""
    top_BC, ids_BC = largest(weight_BV, min(NUM_CANDIDATES, weight_BV.shape[1]))
    return jnp.where(top_BC >= rows.min_p[:, None], top_BC, 0.0), ids_BC


def _filter_candidates(
    top_BC: jax.Array, weight_BV: jax.Array, rows: SamplingRows
) -> tuple[jax.Array, jax.Array]:
    """Set to 0 what top-k and top-p drop of the candidates; say of which rows they are all.

    They are not where filters reach beyond them, ties with the last one kept included.
    """
    count = top_BC.shape[1]
    has_k_B = rows.top_k > 0
    place_B = jnp.clip(rows.top_k - 1, 0, count - 1)
    floor_B = jnp.take_along_axis(top_BC, place_B[:, None], axis=1)[:, 0]
    top_BC = jnp.where(has_k_B[:, None] & (top_BC < floor_B[:, None]), 0.0, top_BC)

    cumulative_BC = jnp.cumsum(top_BC, axis=-1)
    mass_B = cumulative_BC[:, -1]
    needs_rest_B = (rows.temperature > 0) & (rows.top_p < 1) & ~has_k_B

    def with_rest() -> jax.Array:
        all_B = jnp.where(weight_BV >= rows.min_p[:, None], weight_BV, 0.0).sum(axis=-1)
        return jnp.where(needs_rest_B, all_B, mass_B)

    wanted_B = rows.top_p * lax.cond(jnp.any(needs_rest_B), with_rest, lambda: mass_B)
    floor_B = _nucleus_floor(top_BC, cumulative_BC, wanted_B)
    top_BC = jnp.where((rows.top_p < 1)[:, None] & (top_BC < floor_B[:, None]), 0.0, top_BC)
    has_mass_B = has_k_B | (rows.top_p >= 1) | (cumulative_BC[:, -1] >= wanted_B)
    has_rest_B = (top_BC[:, -1] == 0) | (count == weight_BV.shape[1])
    return top_BC, (rows.top_k <= count) & has_mass_B & has_rest_B


def _nucleus_floor(top_BC: jax.Array, cumulative_BC: jax.Array, wanted_B: jax.Array) -> jax.Array:
    """Return the largest weight down to which the mass is enough; the last one if none is."""
    last_B = (cumulative_BC < wanted_B[:, None]).sum(axis=-1)
    last_B = jnp.minimum(last_B, top_BC.shape[1] - 1)
    return jnp.take_along_axis(top_BC, last_B[:, None], axis=1)[:, 0]


def _filter(weight_BV: jax.Array, top_BC: jax.Array, rows: SamplingRows) -> jax.Array:
    """Set to 0 what min-p, top-k and top-p drop, given the candidates."""
    num_candidates = top_BC.shape[1]
    weight_BV = jnp.where(weight_BV >= rows.min_p[:, None], weight_BV, 0.0)
    k_B = jnp.where(rows.top_k > 0, rows.top_k, weight_BV.shape[1])
    is_small_k_B = k_B <= num_candidates

    # Top-k: the k-th largest weight.
    small_B = jnp.take_along_axis(top_BC, jnp.clip(k_B - 1, 0, num_candidates - 1)[:, None], axis=1)
    floor_B = _where_else(
        is_small_k_B | (rows.top_k <= 0),
        jnp.where(rows.top_k > 0, small_B[:, 0], 0.0),
        lambda: _bisect(lambda t_B: (weight_BV >= t_B[:, None]).sum(axis=-1) >= k_B, weight_BV),
    )
    weight_BV = jnp.where(weight_BV >= floor_B[:, None], weight_BV, 0.0)

    # Top-p: the largest weight down to which the mass reaches p.
    wanted_B = rows.top_p * weight_BV.sum(axis=-1)
    top_BC = jnp.where(top_BC >= floor_B[:, None], top_BC, 0.0)
    cumulative_BC = jnp.cumsum(top_BC, axis=-1)
    found_B = _nucleus_floor(top_BC, cumulative_BC, wanted_B)
    floor_B = _where_else(
        (rows.top_p >= 1) | (cumulative_BC[:, -1] >= wanted_B) | is_small_k_B,
        jnp.where(rows.top_p < 1, found_B, 0.0),
        lambda: _bisect(
            lambda t_B: (
                jnp.where(weight_BV >= t_B[:, None], weight_BV, 0.0).sum(axis=-1) >= wanted_B
            ),
            weight_BV,
        ),
    )
    return jnp.where(weight_BV >= floor_B[:, None], weight_BV, 0.0)


def _where_else(
    done_B: jax.Array, value_B: jax.Array, compute: Callable[[], jax.Array]
) -> jax.Array:
    """Return `value` where it is known, for other rows, if any, what `compute` finds."""
    value_B = lax.cond(
        jnp.all(done_B), lambda: value_B, lambda: jnp.where(done_B, value_B, compute())
    )
    return value_B


def _bisect(holds: Callable[[jax.Array], jax.Array], weight_BV: jax.Array) -> jax.Array:
    """Return the largest float32 of [0, 1] for which `holds`, a falling predicate true at 0."""

    def halve(
        _: jax.Array | int, bounds: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        middle_B = (low_B + high_B) // 2
        holds_B = holds(lax.bitcast_convert_type(middle_B, jnp.float32))
        return jnp.where(holds_B, middle_B, low_B), jnp.where(holds_B, high_B, middle_B)

    low_B = jnp.zeros(weight_BV.shape[0], jnp.int32)
    high_B = jnp.full(weight_BV.shape[0], ONE_BITS + 1, jnp.int32)
    low_B, _ = lax.fori_loop(0, 30, halve, (low_B, high_B))
    return lax.bitcast_convert_type(low_B, jnp.float32)
