#!/usr/bin/env python3
"""Measure what a cache or a head of another dtype costs in quality: docs/quality.md's figures.

A text is forced through two models in lockstep, chunk by chunk: the reference with all in the
weights' dtype, and the same weights with another cache, another head or both. Then the reference
continues its last tokens greedily, one at a time, and the other one is forced along, so that its
error can be seen to grow or not. Without a text, ids are random, as models with random weights want
them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxserve.device.evaluate import PagedSequence
from jaxserve.models.config import ModelConfig
from jaxserve.models.int8_table import Int8Table, pack_table
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.params import Params
from jaxserve.models.registry import load_config
from jaxserve.models.weights import load_params
from jaxserve.text.tokenizer import Tokenizer

CHUNK = 64
PARTS = 5
"""Of a continuous decode, for which its error is told apart."""

COLUMNS = ("other", "perplexity", "change", "greedy agreement", "KL", "largest difference")


@dataclass(slots=True)
class Comparison:
    """Two models' logits at the same positions, added up.

    Attributes:
        nll: of the tokens that came, by each, natural logarithms.
        kl: Kullback-Leibler divergence from the reference, natural logarithms.
        difference: the largest of any logit, both centred by their mean.
    """

    nll: list[tuple[float, float]] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    difference: list[float] = field(default_factory=list)

    def add(self, logits_TV: Sequence[npt.NDArray[np.float32]], next_ids: Sequence[int]) -> None:
        """Take in logits of the reference and of the other, and the ids that came next."""
        rows = len(next_ids)
        sides = (jnp.asarray(z_TV[:rows]) for z_TV in logits_TV)
        nll, kl, agrees, difference = _compare(*sides, jnp.asarray(next_ids, jnp.int32))
        self.nll += [(a, b) for a, b in np.asarray(nll, np.float64).T.tolist()]
        self.kl += np.asarray(kl).tolist()
        self.agrees += np.asarray(agrees).tolist()
        self.difference += np.asarray(difference).tolist()

    @property
    def perplexities(self) -> tuple[float, float]:
        """Of the reference and of the other."""
        reference, other = np.exp(np.mean(self.nll, axis=0)).tolist()
        return reference, other

    def cells(self) -> list[str]:
        """Format as docs/quality.md has it."""
        reference, other = self.perplexities
        return [
            f"{other:.4f} ({reference:.4f})",
            f"{100 * (other / reference - 1):+.3f} %",
            f"{100 * np.mean(self.agrees):.2f} %",
            f"{np.mean(self.kl):.2g}",
            f"{max(self.difference):.2g}",
        ]


@jax.jit
def _compare(z_TV: jax.Array, other_TV: jax.Array, next_T: jax.Array) -> tuple[jax.Array, ...]:
    sides = [jax.nn.log_softmax(side_TV) for side_TV in (z_TV, other_TV)]
    nll = jnp.stack([-jnp.take_along_axis(p, next_T[:, None], axis=1)[:, 0] for p in sides])
    kl = (jnp.exp(sides[0]) * (sides[0] - sides[1])).sum(-1)
    agrees = z_TV.argmax(-1) == other_TV.argmax(-1)
    centred = [side_TV - side_TV.mean(-1, keepdims=True) for side_TV in (z_TV, other_TV)]
    return nll, kl, agrees, jnp.abs(centred[0] - centred[1]).max(-1)


def with_int8_head(params: Params) -> Params:
    """Return weights whose table of token embeddings, and head, is int8."""
    if isinstance(params.embed_VD, Int8Table):
        return params
    return replace(params, embed_VD=pack_table(params.embed_VD))


def compare(
    sides: tuple[Params, Params],
    config: ModelConfig,
    ids: Sequence[int],
    steps: int,
    kv_dtype: KVDtype | None,
) -> tuple[Comparison, list[Comparison]]:
    """Force ids, then decode; return the comparison of the first, and of the second by parts.

    `sides` are the reference and the other, whose cache is of `kv_dtype`; None: as the reference's.
    """
    length = len(ids) + steps
    pair = [
        PagedSequence(params, config, length, 32, dtype)
        for params, dtype in zip(sides, (None, kv_dtype), strict=True)
    ]
    forced = Comparison()
    for start in range(0, len(ids), CHUNK):
        part = list(ids[start : start + CHUNK])
        logits_TV = [sequence.append(part, CHUNK) for sequence in pair]
        forced.add(logits_TV, ids[start + 1 : start + 1 + CHUNK])
    decoded = [Comparison() for _ in range(PARTS)] if steps else []
    for step in range(steps):
        token_id = int(logits_TV[0][-1].argmax())
        decoded[step * PARTS // steps].add([z_TV[-1:] for z_TV in logits_TV], [token_id])
        logits_TV = [sequence.append([token_id], 1) for sequence in pair]
    return forced, decoded


def read_ids(arguments: argparse.Namespace, config: ModelConfig) -> list[int]:
    """Return so many ids of the texts, one behind another, or random ones."""
    if not arguments.text:
        rng = np.random.default_rng(0)
        ids: list[int] = rng.integers(2, config.vocab_size, arguments.tokens).tolist()
        return ids
    tokenizer = Tokenizer.load(arguments.model)
    text = "\n".join(path.read_text(encoding="utf-8") for path in arguments.text)
    found = list(tokenizer.encode(text, add_special_tokens=True))
    if len(found) < arguments.tokens:
        sys.exit(f"the texts have {len(found)} tokens, of {arguments.tokens} that --tokens wants")
    return found[: arguments.tokens]


def rows(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Measure; yield the cells of each row."""
    config = load_config(arguments.model)
    dtype = jnp.dtype(arguments.dtype)
    loaded = load_params(arguments.model, config, dtype, progress=lambda done, total: None)
    ids = read_ids(arguments, config)
    kv_dtype: KVDtype | None = None if arguments.kv_dtype == "same" else arguments.kv_dtype
    is_int8 = arguments.head_dtype == "int8"
    other = with_int8_head(loaded.params) if is_int8 else loaded.params
    forced, decoded = compare((loaded.params, other), config, ids, arguments.steps, kv_dtype)
    name = f"{arguments.kv_dtype} KV, {arguments.head_dtype} head"
    yield [f"{name}, {len(forced.nll)} forced tokens", *forced.cells()]
    first = 1
    for part in decoded:
        last = first + len(part.nll) - 1
        yield [f"{name}, decode steps {first} to {last}", *part.cells()]
        first = last + 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what another dtype costs in quality.")
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--text", type=Path, nargs="*", help="files; none: random ids")
    parser.add_argument("--tokens", type=int, default=2049)
    parser.add_argument("--steps", type=int, default=1000, help="of the decode")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kv-dtype", choices=("same", "int8", "bfloat16"), default="int8")
    parser.add_argument("--head-dtype", choices=("same", "int8"), default="same")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"{arguments.model.name}, {arguments.dtype}, jax {jax.__version__}\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for cells in rows(arguments):
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
