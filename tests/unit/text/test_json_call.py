"""A call that is one JSON object, in whatever order its keys come."""

import pytest

from jaxserve.text.json_call import JsonCall, read_json_call

TOOLS = {"lamp": {"room": "string"}}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "lamp", "arguments": {"x": 1.50}}', JsonCall("lamp", '{"x":1.50}', ())),
        (' {"parameters" : {} , "name":"f"} ', JsonCall("f", "{}", ())),
        ('{"name": "f"}', JsonCall("f", "{}", ())),
        ('{"type": "function", "function": {"arguments": {"k": [1, {"l": null}]}, "name": "f"}}',
         JsonCall("f", '{"k":[1,{"l":null}]}', ())),
        ('{"arguments": "{\\"room\\": \\"attic\\"}", "name": "lamp"}',
         JsonCall("lamp", '{"room":"attic"}', ())),
        ('{"name": "f", "arguments": {"n": 123456789012345678901234567890, "e": 1e999}}',
         JsonCall("f", '{"n":123456789012345678901234567890,"e":1e999}', ())),
        ('{"name": "f", "arguments": {"n": NaN}}', JsonCall("f", '{"n":"NaN"}', ("string",))),
        ('{"name": "f", "arguments": {"t": "a\\ud800b"}}', JsonCall("f", '{"t":"a\ufffdb"}', ())),
        ('{"name": "lamp", "arguments": {"room": 4}}', JsonCall("lamp", '{"room":"4"}', ("type",))),
        *((text, None) for text in (
            "[]", "{", "3", "{}", '{"name": 3}', '{"name": "f", "arguments": []}',
            '{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": "[]"}', "[" * 100_000,
        )),
    ],
)  # fmt: skip
def test_reading_a_call(text: str, call: JsonCall | None) -> None:
    assert read_json_call(text, TOOLS) == call
