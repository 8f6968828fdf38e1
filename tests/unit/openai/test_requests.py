import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError, UnsupportedFieldError
from jaxserve.openai.fields import FieldTable
from jaxserve.openai.readers import Neutral
from jaxserve.openai.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    ChatCompletionRequest,
    CompletionRequest,
    parse_chat_completion,
    parse_completion,
)

# All that OpenAI documents for the two requests.
OPENAI_CHAT_FIELDS = {
    "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs",
    "max_completion_tokens", "max_tokens", "messages", "metadata", "modalities", "model", "n",
    "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key",
    "prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "seed",
    "service_tier", "stop", "store", "stream", "stream_options", "temperature", "tool_choice",
    "tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options",
}  # fmt: skip
OPENAI_COMPLETION_FIELDS = {
    "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "model", "n",
    "presence_penalty", "prompt", "seed", "stop", "stream", "stream_options", "suffix",
    "temperature", "top_p", "user",
}  # fmt: skip


def chat(**fields: object) -> ChatCompletionRequest:
    request = {"messages": [{"role": "user", "content": "go"}], **fields}
    return parse_chat_completion(json.dumps(request).encode())


def complete(**fields: object) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "go", **fields}).encode())


def refused_fields(fields: FieldTable) -> list[str]:
    return [name for name, field in fields.items() if isinstance(field.read, Neutral)]


def test_all_of_openai_is_known() -> None:
    assert set(CHAT_FIELDS) >= OPENAI_CHAT_FIELDS
    assert set(COMPLETION_FIELDS) >= OPENAI_COMPLETION_FIELDS


@pytest.mark.parametrize("value", [12345, "other", [1], {"other": 1}])
@pytest.mark.parametrize("name", refused_fields(CHAT_FIELDS))
def test_chat_refuses_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        chat(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize("value", [12345, "other", [1], {"other": 1}])
@pytest.mark.parametrize("name", refused_fields(COMPLETION_FIELDS))
def test_completion_refuses_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        complete(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize("name", CHAT_FIELDS)
def test_chat_ignores_null(name: str) -> None:
    if name != "messages":
        assert chat(**{name: None}) == chat()


@pytest.mark.parametrize("name", COMPLETION_FIELDS)
def test_completion_ignores_null(name: str) -> None:
    if name != "prompt":
        assert complete(**{name: None}) == complete()


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "length_penalty": 1},
        {"logit_bias": {}, "logprobs": False, "top_logprobs": 0},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "none", "functions": [], "function_call": "auto"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "n": 1},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "s"},
        {"skip_special_tokens": True, "min_tokens": 0, "stop_token_ids": [], "bad_words": []},
        {"stop": [], "stream": False, "echo": False, "priority": 0, "chat_template_kwargs": {}},
        {"add_generation_prompt": True, "continue_final_message": False},
    ],
)
def test_chat_values_that_ask_for_nothing(fields: dict[str, object]) -> None:
    assert chat(**fields) == chat()


def test_best_of_may_equal_n() -> None:
    assert complete(best_of=2, n=2).options.n == 2
    with pytest.raises(UnsupportedFieldError) as caught:
        complete(best_of=3, n=2)
    assert caught.value.param == "best_of"


def test_two_names_of_the_budget() -> None:
    assert chat(max_tokens=5).options.max_tokens == 5
    assert chat(max_completion_tokens=6).options.max_tokens == 6
    assert chat(max_tokens=7, max_completion_tokens=7).options.max_tokens == 7
    with pytest.raises(InvalidRequestError) as caught:
        chat(max_tokens=7, max_completion_tokens=8)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("seed", "unsigned"),
    [(0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)],
)
def test_seeds(seed: int, unsigned: int) -> None:
    assert chat(seed=seed).options.seed == unsigned


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (2**64, "between"),
        (-(2**63) - 1, "between"),
        (2**70, "between"),
        (1.5, "an integer"),
        ("1", "an integer"),
        (True, "an integer"),
    ],
)
def test_bad_seeds(seed: object, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^seed must be {what}") as caught:
        chat(seed=seed)
    assert caught.value.param == "seed"


@pytest.mark.parametrize(
    ("response_format", "what"),
    [
        ({"type": "json_schema"}, "is required with"),
        ({"type": "text", "json_schema": {"name": "n"}}, "belongs to"),
    ],
)
def test_a_schema_goes_with_its_type(response_format: dict[str, object], what: str) -> None:
    message = f"^response_format.json_schema {what} the type json_schema"
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chat(response_format=response_format)
    assert caught.value.param == "response_format.json_schema"


def test_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).options.include_usage
    assert not chat(stream=True, stream_options={}).options.include_usage
    assert not chat(stream=True).options.include_usage


def test_developer_is_system() -> None:
    request = chat(messages=[{"role": "developer", "content": "x"}])
    assert request.conversation.messages[0].for_template() == {"role": "system", "content": "x"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(sorted(CHAT_FIELDS)), json_values, max_size=6),
    st.dictionaries(st.sampled_from(sorted(COMPLETION_FIELDS)), json_values, max_size=6),
)
def test_hostile_values_are_read_or_refused(
    chat_fields: dict[str, object], completion_fields: dict[str, object]
) -> None:
    for call in (lambda: chat(**chat_fields), lambda: complete(**completion_fields)):
        with contextlib.suppress(InvalidRequestError):
            call()


@given(st.binary(max_size=40))
def test_hostile_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_chat_completion(body)
