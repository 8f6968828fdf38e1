"""Random schemas: every text that their masks let through is JSON, and fits."""

import json
import random
from typing import Any

import jsonschema
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from jaxserve.errors import SchemaError
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.masks import unpacked
from jaxserve.guided.tables import GrammarSpec, TokenTables
from tests.grammars import random_walk, spelled, tiny_vocabulary

VOCABULARY = tiny_vocabulary()
NAMES = ("a", "b", "kind", 'q"')

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.sampled_from(["", "a", "ab", "é\n", 1.5]),
    lambda parts: (
        st.lists(parts, max_size=2) | st.dictionaries(st.sampled_from(NAMES), parts, max_size=2)
    ),
    max_leaves=3,
)
numbers = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        "minimum": st.sampled_from([-5, 0, 2.5, 3]),
        "exclusiveMaximum": st.sampled_from([4, 7.25, 100]),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
    },
)
strings = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(2, 4),
        "pattern": st.sampled_from(["^[a-c]+$", "b", '^[^"]*$', "^.{0,3}$", "a|b"]),
        "format": st.sampled_from(["date", "ipv4", "uuid"]),
    },
)


def composed(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(parts, min_size=1, max_size=3)
    of_names = st.dictionaries(st.sampled_from(NAMES), parts, max_size=3)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": of_names},
        optional={
            "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            "additionalProperties": parts | st.booleans(),
            "patternProperties": st.dictionaries(st.sampled_from(["^k", "b"]), parts, max_size=1),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 3),
            "propertyNames": st.fixed_dictionaries({"maxLength": st.integers(1, 4)}),
            "dependentRequired": st.just({"a": ["b"]}),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": parts,
            "prefixItems": lists,
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(1, 3),
            "contains": parts,
        },
    )
    mixed = st.one_of(
        st.fixed_dictionaries({"anyOf": lists}),
        st.fixed_dictionaries({"oneOf": lists}),
        st.fixed_dictionaries({"allOf": lists}),
        st.fixed_dictionaries({"not": parts}),
        st.fixed_dictionaries({"if": parts, "then": parts, "else": parts}),
    )
    beside = st.tuples(objects | arrays | strings | numbers, mixed).map(lambda two: two[0] | two[1])
    return objects | arrays | mixed | beside


schemas = st.recursive(
    numbers
    | strings
    | st.lists(values, min_size=1, max_size=3).map(lambda some: {"enum": some})
    | values.map(lambda value: {"const": value})
    | st.sampled_from([{}, True, False, {"type": ["null", "boolean"]}]),
    composed,
    max_leaves=6,
)


def tables_of(schema: Any) -> TokenTables:
    """Compile a schema; those that are refused or need the host are no examples."""
    spec = GrammarSpec(kind="json_schema", source=json.dumps(schema))
    try:
        tables = compile_grammar(spec, VOCABULARY)
    except SchemaError:
        reject()
    assume(isinstance(tables, TokenTables))
    assert isinstance(tables, TokenTables)
    return tables


@settings(max_examples=40, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_what_masks_let_through_fits(schema: Any, seed: int) -> None:
    tables = tables_of(schema)
    rng = random.Random(seed)
    validator = jsonschema.Draft202012Validator(schema)
    for free_tokens in (0, 6, 25):
        text = spelled(VOCABULARY, random_walk(tables, rng, free_tokens=free_tokens))
        validator.validate(json.loads(text))


@settings(max_examples=15, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_masks_are_what_trying_each_token_says(schema: Any, seed: int) -> None:
    tables = tables_of(schema)
    rng = random.Random(seed)
    for state in rng.sample(range(len(tables.next_SC)), min(5, len(tables.next_SC))):
        mask = unpacked(tables.masks_DW[tables.mask_id_S[state]])[: VOCABULARY.size]
        for token_id, text in enumerate(VOCABULARY.token_bytes):
            after = state if text else -1
            # Ids of single bytes are the bytes: any token is a walk of those.
            for byte in text:
                after = tables.advance(after, byte) if after >= 0 and byte != 0xF4 else -1
            assert mask[token_id] == (after >= 0)
            assert tables.advance(state, token_id) == after
