"""Rendering: a checkpoint's own template, in the environment that it was written for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.text import chat_template
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "data"
SHARED = Path(__file__).parents[4] / "shared" / "cases" / "gemma4" / "xs0" / "bf16"
USER = [{"role": "user", "content": "Hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens={"bos_token": "<bos>"})


def conversations() -> list[Any]:
    """All reference conversations where they are at hand, else the few that are kept here."""
    folder = SHARED if SHARED.is_dir() else DATA / "gemma4_chat"
    cases = json.loads((folder / "chat_cases.json").read_text())
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", conversations())
def test_gemma4_conversation_renders_to_the_reference(case: dict[str, Any]) -> None:
    variables = dict(case["kwargs"])
    opens = variables.pop("add_generation_prompt", True)
    rendered = ChatTemplate.load(DATA / "gemma4_chat").render(
        case["messages"], tools=case["tools"], add_generation_prompt=opens, variables=variables
    )
    assert rendered == case["text"]
    tokenizer = Tokenizer.load(DATA / "tiny_tokenizer")
    for add_special_tokens in (False, True):
        ids = tokenizer.encode(rendered, add_special_tokens=add_special_tokens)
        assert ids == case["ids"]


def test_the_jinja_file_goes_before_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "from the config"}')
    assert ChatTemplate.load(tmp_path).render(USER) == "from the file"


def test_the_config_holds_a_template(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}!"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(USER) == "<s>!"


def test_the_config_holds_several_templates(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }} tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    loaded = ChatTemplate.load(tmp_path)
    assert loaded.render(USER) == "plain"
    assert loaded.render(USER, tools=[]) == "plain"
    assert loaded.render(USER, tools=[{}, {}]) == "with 2 tools"


def test_a_checkpoint_without_template_refuses_chat(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        ChatTemplate.load(tmp_path).render(USER)
    assert caught.value.param == "messages"


def test_blocks_take_no_lines_of_their_own() -> None:
    source = "{% for m in messages %}\n  {% if m.content %}\n{{ m.content }}\n  {% endif %}\n"
    assert template(source + "{% endfor %}\n").render(USER) == "Hi\n"


def test_loop_controls() -> None:
    source = "{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert template(source).render(USER) == "01"


def test_tojson_escapes_neither_html_nor_other_scripts() -> None:
    source = "{{ x | tojson }} {{ y | tojson(indent=1) }}"
    assert template(source).render(USER, variables={"x": "<é>", "y": [1]}) == '"<é>" [\n 1\n]'


def test_strftime_now() -> None:
    year = template("{{ strftime_now('%Y') }}").render(USER)
    assert year.isdecimal()


def test_the_generation_prompt_can_be_left_out() -> None:
    source = "{{ add_generation_prompt }}"
    assert template(source).render(USER) == "True"
    assert template(source).render(USER, add_generation_prompt=False) == "False"


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render(USER)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.field }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ messages[0].content.encode('no-such-code') }}",
        "{{ messages[0].content | dictsort }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_template_that_fails_on_the_messages_is_a_400(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        template(source).render(USER)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].update(a=1) }}"],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [dict(USER[0])]
    with pytest.raises(InvalidRequestError):
        template(source).render(messages)
    assert messages == USER


def test_invalid_jinja_is_refused_at_load() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        template("\n{% if %}")


def test_unreadable_template_is_refused_at_load(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        r'{{ "\ud800" }}',
        "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{{ cycler().next() }}",
        "{% include 'x' %}",
        "{{ range(10**9) | list }}",
        "{% if %}",
        "{% endfor %}",
        "{{ 'a' * 10**15 }}",
    ],
)
def test_a_bad_template_of_the_requests_own_is_a_400_that_names_it(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template("fine").render(USER, source=source)
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}<{{ m.content | trim }}|end>\n{% endfor %}", "<b|end>\n<a "),
        ("{{ messages[-1].content }}+{{ messages[-1].content }};", "a +a "),
    ],
)
def test_the_final_message_stays_open(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a "}]
    rendered = template(source).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "a "}]
    source = "{% for part in messages[-1].content %}{{ part.text }}/{% endfor %}"
    messages = [{"role": "assistant", "content": parts}]  # type: ignore[dict-item]
    rendered = template(source).render(messages, continue_final_message=True)
    assert rendered == "x/a "


@pytest.mark.parametrize("source", ["nothing", "{{ messages[-1].content | length }}"])
def test_a_final_message_that_is_not_written_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render(USER, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | upper }} {{ messages[0].content }}",
        "{{ messages[0].content | length }} {{ messages[0].content }}",
        "{{ messages[0].content[:20] }} {{ messages[0].content }}",
        "{{ messages[0].content | upper }}",
    ],
)
def test_a_message_that_the_template_changes_is_not_continued(source: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        template(source).render(USER, continue_final_message=True)
    assert refusal.value.param == "continue_final_message"


def test_an_endless_template_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SOURCE_S", 0.01)
    tracing = sys.gettrace()
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(InvalidRequestError, match=r"more than 0\.01 s") as refusal:
        template("own").render(USER, source=loops)
    assert refusal.value.param == "chat_template"
    assert sys.gettrace() is tracing
