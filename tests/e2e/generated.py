"""Requests made at random from the tables of fields: good ones, border values, and nonsense.

Bodies are written as JSON text, not as objects, for some of what a client can send has no object:
keys twice, numbers without end, unpaired surrogates. The same seed gives the same requests.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from jaxserve.openai.fields import FieldTable
from jaxserve.openai.requests import CHAT_FIELDS, COMPLETION_FIELDS, GRAMMAR_CHECK_FIELDS

VOCAB_SIZE = 1024
MAX_SIZE = 300_000  # of a text or a list
NUM_MEDIA_IDS = 7  # at the end of the vocabulary, refused in prompts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RENDER = "/v1/chat/completions/render"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
EXPLAIN = "/v1/cache/explain"
CHECK = "/v1/grammar/check"
FIELDS: dict[str, FieldTable] = {COMPLETIONS: COMPLETION_FIELDS, CHECK: GRAMMAR_CHECK_FIELDS}
"""Of all other paths: a chat's."""

# Few, as is what NONSENSE makes of their fields: each is compiled once.
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 1, None]}, "b": {"type": "array", "maxItems": 2}},
    "required": ["a"],
}
GRAMMARS: tuple[dict[str, object], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"guided_json": SCHEMA},
    {"guided_json": {"items": {"$ref": "#"}}},
    {"guided_regex": "[a-c]{1,3}"},
    {"guided_choice": ["one", "two ☂"]},
    {"guided_choice": ["a", "b"], "ensure_complete": True},
    {"guided_grammar": 'start: "(" start? ")"'},
    {"guided_regex": "("},
    {"guided_json": {"uniqueItems": True}},
)
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": {"name": "h", "parameters": {"uniqueItems": True}}},
]
TOOL_CHOICES = (
    *("none", "auto", "auto", "required"),
    *({"type": "function", "function": {"name": name}} for name in "fgx"),
)

Body = list[tuple[str, str]]
"""Pairs of JSON text: keys, which may come twice, and values."""

WORDS = ("Rain", "The sea is", "one two", "Ünïcödé ☂ 雨", "a\nb", "x", " ", "<bos>hm", "\u202eabc")

NONSENSE = (
    *("null", "true", "false", "0", "-1", "1", "2", "0.5", "-0.0", "1e308", "-1e400", "1e-400"),
    *("9007199254740993", "2147483647", "2147483648", "9223372036854775808"),
    *("18446744073709551616", "-18446744073709551616", "1" * 400, "NaN", "Infinity", "1.0", "01"),
    *('""', '"x"', '"0"', '"true"', r'"\ud800"', r'"\udc00\ud800"', r'"\u0000"', '"\x00"'),
    *('"é☂雨👩‍👩‍👧"', '"%s"' % ("a" * 5000), '"%s"' % ("☂" * 700), r'"\"\\\/\b"', r'"\x"'),
    *("[]", "{}", "[null]", "[[]]", "[{}]", "[0]", '["a"]', "[1,2,3]", "[true]", '{"a":1}'),
    *('{"0":0}', '{"5":100}', '{"5":1e9}', '{"":1}', '{"-1":1}', '{"1.5":1}', '{"99999999999":1}'),
    *("[" * 30 + "]" * 30, "[" * 1500 + "]" * 1500, '{"a":' * 100 + "1" + "}" * 100, "[" * 500),
    *(f"[{','.join('1' * 3000)}]", "[1024,1024,1024]", '[1,"a"]', "[1,[2]]"),
)


@dataclass(frozen=True, slots=True)
class Generated:
    """A request: where it goes and what it says."""

    path: str
    body: bytes


class Generator:
    """Makes requests; one seed, one sequence of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> Generated:
        """Make the next request: as good as any, with one thing wrong, or with several."""
        path = self._pick(
            *(
                CHAT,
                36,
                COMPLETIONS,
                45,
                RENDER,
                4,
                TOKENIZE,
                5,
                DETOKENIZE,
                4,
                EXPLAIN,
                4,
                CHECK,
                2,
            )
        )
        pairs = self._good(path)
        kind = self._random.random()
        if kind > 0.2:
            for _ in range(1 if kind < 0.75 else self._random.randint(2, 4)):
                self._spoil(pairs, path)
        if path == CHAT and not any(key in _LIMITS and value.isdecimal() for key, value in pairs):
            # A chat without a limit takes all of the context.
            pairs.append(('"max_completion_tokens"', "2"))
        self._random.shuffle(pairs)
        text = f"{{{','.join(f'{key}:{value}' for key, value in pairs)}}}"
        if kind > 0.97:
            text = self._break(text)
        return Generated(path, text.encode("utf-8", "surrogatepass"))

    # A request that the server takes

    def _good(self, path: str) -> Body:
        rng = self._random
        if path == TOKENIZE:
            return self._pairs(
                {"prompt": rng.choice(WORDS), "return_token_strs": rng.random() < 0.5}
            )
        if path == DETOKENIZE:
            return self._pairs({"tokens": self._ids(rng.randint(0, 12))})
        if path == CHECK:
            asked = rng.choice(GRAMMARS) | ({} if rng.random() < 0.5 else self._tools())
            return self._pairs(asked | {"texts": rng.sample(WORDS, rng.randint(0, 3))})
        is_chat = path != COMPLETIONS
        max_tokens = rng.choice((1, 1, 1, 1, 1, 2, 2, 4))
        name = rng.choice(("max_tokens", "max_completion_tokens")) if is_chat else "max_tokens"
        body: dict[str, object] = {name: max_tokens}
        body |= {"messages": self._messages()} if is_chat else {"prompt": self._prompt()}
        options = self._options(is_chat, max_tokens)
        for option in rng.sample(sorted(options), rng.randint(0, 4)):
            body |= options[option]()
        if not body.get("stream"):
            body.pop("stream_options", None)
        elif "prompt_logprobs" in body:
            del body["prompt_logprobs"]
        if rng.random() < 0.2:
            body["model"] = "tiny"
        return self._pairs(body)

    def _options(
        self, is_chat: bool, max_tokens: int
    ) -> dict[str, Callable[[], dict[str, object]]]:
        rng = self._random

        def one(name: str, *values: object) -> Callable[[], dict[str, object]]:
            return lambda: {name: rng.choice(values)}

        def text(length: int) -> str:
            return "".join(rng.choice("abcdehinorst ,.☂é") for _ in range(length)) or "a"

        options: dict[str, Callable[[], dict[str, object]]] = {
            "temperature": one("temperature", 0, 0.7, 1, 2),
            "top_p": one("top_p", 0.1, 0.9, 1),
            "top_k": one("top_k", -1, 0, 1, 40, 1000, 1 << 20),
            "min_p": one("min_p", 0, 0.1, 1),
            "presence": one("presence_penalty", -2, 0, 0.5, 2),
            "frequency": one("frequency_penalty", -2, 0, 0.5, 2),
            "repetition": one("repetition_penalty", 0.01, 1, 1.3, 10),
            "bias": lambda: {"logit_bias": {str(i): rng.uniform(-100, 100) for i in self._ids(4)}},
            "allowed": lambda: {"allowed_token_ids": self._ids(rng.randint(1, 40))},
            "bad_words": lambda: {"bad_words": [text(2) for _ in range(rng.randint(0, 4))]},
            "seed": one("seed", 0, -1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
            "stop": lambda: {"stop": rng.choice((text(1), [text(1), text(2)], []))},
            "stop_ids": lambda: {"stop_token_ids": self._ids(rng.randint(0, 200))},
            "include_stop": one("include_stop_str_in_output", True, False),
            "special": one("skip_special_tokens", True, False),
            "n": one("n", 1, 2, 3),
            "priority": one("priority", -(1 << 31), 0, 5, (1 << 31) - 1),
            "stream": one("stream", True),
            "usage": lambda: {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            "ignore_eos": one("ignore_eos", True, False),
            "return_ids": one("return_token_ids", True, False),
            "as_ids": one("return_tokens_as_token_ids", True),
            "prompt_logprobs": one("prompt_logprobs", 0, 1, 20),
            "truncate": one("truncate_prompt_tokens", -1, 1, 3, 2047),
            "request_id": one("request_id", "mine", "{9}~"),
            "user": one("user", "somebody", ""),
            "min_tokens": one("min_tokens", 0, 1, max_tokens),
            "timeout": one("timeout_s", 600, 86_400),
            "loops": one("repetition_detection", {"max_pattern_size": 8, "min_count": 2}),
            "grammar": lambda: rng.choice(GRAMMARS),
        }
        if is_chat:
            options |= {
                "logprobs": lambda: {"logprobs": True, "top_logprobs": rng.choice((0, 1, 20))},
                "kwargs": lambda: {"chat_template_kwargs": {"enable_thinking": True, "x": [1]}},
                "tools": self._tools,
                "tool_limits": lambda: {"parallel_tool_calls": False, "max_tool_calls": 1},
                "reasoning": one("include_reasoning", True, False),
                "effort": one("reasoning_effort", "none"),
            }
        else:
            options |= {
                "logprobs": one("logprobs", 0, 1, 20),
                "echo": one("echo", True),
                "special_tokens": one("add_special_tokens", True, False),
            }
        return options

    def _tools(self) -> dict[str, object]:
        rng = self._random
        # The last one's schema cannot be enforced.
        tools = TOOLS if rng.random() < 0.2 else TOOLS[:2]
        return {"tools": tools, "tool_choice": rng.choice(TOOL_CHOICES)}

    def _messages(self) -> list[object]:
        rng = self._random
        contents: list[object] = [
            rng.choice(WORDS),
            [{"type": "text", "text": rng.choice(WORDS)} for _ in range(rng.randint(1, 3))],
        ]
        roles = ("user", "assistant", "system", "developer")
        return [
            {"role": rng.choice(roles), "content": rng.choice(contents)}
            for _ in range(rng.randint(1, 3))
        ]

    def _prompt(self) -> object:
        rng = self._random
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(WORDS)
        if kind < 0.7:
            return self._ids(rng.randint(1, 20))
        if kind < 0.72:
            return self._ids(rng.randint(500, 2000))
        return [rng.choice(WORDS), self._ids(rng.randint(1, 5))][: rng.randint(1, 2)]

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB_SIZE - NUM_MEDIA_IDS) for _ in range(count)]

    @staticmethod
    def _pairs(body: dict[str, object]) -> Body:
        return [(json.dumps(key), json.dumps(value)) for key, value in body.items()]

    # What may be wrong with it

    def _spoil(self, pairs: Body, path: str) -> None:
        rng = self._random
        fields = FIELDS.get(path, CHAT_FIELDS)
        kind = rng.random()
        if kind < 0.45:
            self._set(pairs, rng.choice(sorted(fields)), rng.choice(NONSENSE))
        elif kind < 0.7:
            name = rng.choice(sorted(fields))
            self._set(pairs, name, rng.choice(_border_texts(path, name)))
        elif kind < 0.78:
            key, _ = rng.choice(pairs)
            pairs.append((key, rng.choice(NONSENSE)))
        elif kind < 0.88:
            pairs.append((json.dumps(rng.choice(WORDS)), rng.choice(NONSENSE)))
        elif kind < 0.95 and len(pairs) > 1:
            pairs.pop(rng.randrange(len(pairs)))
        else:
            i = rng.randrange(len(pairs))
            pairs[i] = pairs[i][0], rng.choice(NONSENSE)

    @staticmethod
    def _set(pairs: Body, name: str, value: str) -> None:
        key = json.dumps(name)
        for i, (other, _) in enumerate(pairs):
            if other == key:
                pairs[i] = key, value
                return
        pairs.append((key, value))

    def _break(self, text: str) -> str:
        """Make what is no JSON object of it, or a JSON value that is none."""
        rng = self._random
        at = rng.randrange(len(text))
        return rng.choice(
            (
                text[:at],
                text[:at] + rng.choice('{}[]",:\\\x00\ufeff') + text[at:],
                "\ufeff" + text,
                text * 2,
                f"[{text}]",
                rng.choice(NONSENSE),
                "",
                text.replace('"', "'"),
            )
        )

    def _pick(self, *names_and_weights: str | int) -> str:
        names = [str(name) for name in names_and_weights[::2]]
        return self._random.choices(names, [int(w) for w in names_and_weights[1::2]])[0]


_LIMITS = ('"max_tokens"', '"max_completion_tokens"')


@cache
def _border_texts(path: str, name: str) -> list[str]:
    read = FIELDS.get(path, CHAT_FIELDS)[name].read
    return [json.dumps(value) for value in _borders(read.schema())]


def _borders(schema: Mapping[str, Any]) -> list[Any]:
    """Give values at the limits of a schema, and the ones just beyond."""
    values: list[Any] = [None, *schema.get("enum", [])]
    for option in schema.get("anyOf", []):
        values += _borders(option)
    kind = schema.get("type")
    if kind == "boolean":
        values += [True, False]
    for key in ("minimum", "maximum", "exclusiveMinimum"):
        if key not in schema:
            continue
        limit, step = schema[key], 1 if kind == "integer" else 1e-6
        values += [limit - step, limit, limit + step, float(limit)]
    if kind == "string":
        values += _sized("a", schema, "Length", most=300)
    elif kind == "array":
        short = [each for each in _borders(schema["items"]) if len(json.dumps(each)) < 100]
        values += _sized([short[-1]], schema, "Items", most=3)
    elif kind == "object":
        values += _border_objects(schema)
    return values


def _border_objects(schema: Mapping[str, Any]) -> list[Any]:
    values: list[Any] = [{}, {"a": 1}]
    if isinstance(entry := schema.get("additionalProperties"), dict):
        values += [{str(i): value} for i, value in enumerate(_borders(entry))]
        values.append({str(i): 1 for i in range(1025)})
    for name, property_ in schema.get("properties", {}).items():
        values += [{name: value} for value in _borders(property_)[:3]]
    return values


def _sized(unit: Any, schema: Mapping[str, Any], what: str, *, most: int) -> list[Any]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", most)
    sizes = sorted({max(least - 1, 0), least, most, most + 1})
    return [unit * size for size in sizes if size <= MAX_SIZE]
