"""Keys: everything but the probes is closed without one, routes to come as well."""

import json
import logging

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from jaxserve.config import ServeConfig
from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.routes import Endpoints
from jaxserve.metrics import Metrics
from tests.fake_engine import FakeEngine
from tests.http.conftest import Serve
from tests.http.driver import JSON, Connection, open_connection

KEY, OTHER_KEY = "sk-first-é", "sk-second"
# Blanks around a key, which no header keeps, do not count.
CLOSED = HttpConfig(api_keys=(KEY, f" {OTHER_KEY}\n"))
OPEN_PATHS = {"/health", "/live"}
ORIGIN = "https://page.example"

ROUTES: list[Route] = Endpoints(
    FakeEngine(), lambda: None, config=HttpConfig(), metrics=Metrics()
).routes()
CALLS = [
    (method, route.path.replace("{id:path}", "org/byte-model"))
    for route in ROUTES
    for method in sorted(route.methods or ())
    if route.path not in OPEN_PATHS
]


async def call(
    app: Starlette, method: str, path: str, headers: dict[str, str] | None = None
) -> Connection:
    body = json.dumps({"prompt": "hi"}).encode() if method == "POST" else b""
    return await open_connection(app, method, path, body, {**JSON, **(headers or {})}).finish()


def check_refused(reply: Connection) -> None:
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert reply.error["type"] == "authentication_error"
    assert reply.error["code"] == "invalid_api_key"
    assert reply.error["param"] is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": ""},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"authorization": f"Bearer {KEY},{OTHER_KEY}"},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"cookie": f"authorization=Bearer {KEY}"},
    ],
    ids=lambda headers: next(iter(headers.items()), "none"),
)
async def test_every_route_is_closed_without_a_key(serve: Serve, headers: dict[str, str]) -> None:
    engine = FakeEngine()
    app = serve(engine, CLOSED)
    for method, path in CALLS:
        reply = await call(app, method, path, headers)
        assert reply.status == 401, (method, path)
        check_refused(reply)
    assert not engine.requests


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/", "/nowhere", "/health/", "/HEALTH", "//health",
     "/live/x", "/health/../v1/models", "/health?/v1/models"],
)  # fmt: skip
async def test_odd_paths_are_closed_as_well(serve: Serve, path: str) -> None:
    app = serve(FakeEngine(), CLOSED)
    check_refused(await call(app, "GET", path))
    with_key = await call(app, "GET", path, {"authorization": f"Bearer {KEY}"})
    assert with_key.status == 404


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
@pytest.mark.parametrize("layout", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer  {} "])
async def test_any_of_the_keys_opens_every_route(serve: Serve, key: str, layout: str) -> None:
    app = serve(FakeEngine(), CLOSED)
    for method, path in CALLS:
        reply = await call(app, method, path, {"authorization": layout.format(key)})
        assert reply.status != 401, (method, path)
    reply = await call(app, "POST", "/v1/completions", {"authorization": layout.format(key)})
    assert reply.status == 200


async def test_two_headers_are_none(serve: Serve) -> None:
    app = serve(FakeEngine(), CLOSED)
    for second in ("x", f"Bearer {KEY}"):
        pairs = [("authorization", f"Bearer {KEY}"), ("authorization", second)]
        reply = await open_connection(app, "GET", "/v1/models", headers=pairs).finish()
        check_refused(reply)


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_are_open(serve: Serve, path: str) -> None:
    assert (await call(serve(FakeEngine(), CLOSED), "GET", path)).status == 200


async def test_without_keys_everything_is_open(serve: Serve) -> None:
    app = serve(FakeEngine())
    assert (await call(app, "POST", "/v1/completions")).status == 200
    reply = await call(app, "GET", "/v1/models", {"authorization": "Bearer anything"})
    assert reply.status == 200


async def test_options_does_nothing_and_tells_nothing(serve: Serve) -> None:
    engine = FakeEngine()
    app = serve(engine, CLOSED)
    for _, path in CALLS:
        reply = await call(app, "OPTIONS", path)
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert not engine.requests


async def test_a_body_is_not_read_before_the_key(serve: Serve) -> None:
    app = serve(FakeEngine(), CLOSED)
    connection = open_connection(app, "POST", "/v1/completions", headers=JSON)
    connection.incoming.get_nowait()  # a body that never comes
    check_refused(await connection.finish())


async def test_keys_are_told_nowhere(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        app = serve(FakeEngine(), CLOSED)
        for key in (KEY, "sk-wrong"):
            reply = await call(app, "GET", "/v1/models", {"authorization": f"Bearer {key}"})
            assert key.encode() not in reply.body
    told = (
        caplog.text + repr(CLOSED) + repr(ServeConfig(api_key=(KEY,))) + repr(app.user_middleware)
    )
    assert "sk-" not in told


def test_no_more_is_open_than_the_probes() -> None:
    paths = {route.path for route in ROUTES}
    assert paths - {path.replace("org/byte-model", "{id:path}") for _, path in CALLS} == OPEN_PATHS


# Pages of other origins


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_no_origin_is_allowed_by_default(serve: Serve, path: str) -> None:
    app = serve(FakeEngine())
    reply = await call(app, "GET", path, {"origin": ORIGIN})
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]
    preflight = await call(app, "OPTIONS", path, preflight_headers(ORIGIN))
    assert preflight.status == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]


def preflight_headers(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }


@pytest.mark.parametrize("allowed", [(ORIGIN,), ("https://a.example", ORIGIN), ("*",)])
async def test_preflight_needs_no_key(serve: Serve, allowed: tuple[str, ...]) -> None:
    app = serve(FakeEngine(), HttpConfig(cors_origins=allowed, api_keys=(KEY,)))
    reply = await call(app, "OPTIONS", "/v1/chat/completions", preflight_headers(ORIGIN))
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert "POST" in reply.headers["access-control-allow-methods"]
    for name in ("authorization", "content-type", "x-stainless-os"):
        assert name in reply.headers["access-control-allow-headers"].lower()


async def test_other_origins_get_no_permission(serve: Serve) -> None:
    app = serve(FakeEngine(), HttpConfig(cors_origins=(ORIGIN,)))
    other = "https://other.example"
    reply = await call(app, "OPTIONS", "/v1/models", preflight_headers(other))
    assert reply.status == 400
    for answer in (reply, await call(app, "GET", "/v1/models", {"origin": other})):
        assert "access-control-allow-origin" not in answer.headers


async def test_a_page_may_read_every_answer(serve: Serve) -> None:
    engine = FakeEngine()
    app = serve(engine, HttpConfig(cors_origins=(ORIGIN,), api_keys=(KEY,)))
    with_key = {"origin": ORIGIN, "authorization": f"Bearer {KEY}"}
    engine.refusals.extend([None, KeyError("a bug")])
    replies = [
        await call(app, "POST", "/v1/completions", with_key),
        await call(app, "POST", "/v1/completions", with_key),
        await call(app, "POST", "/v1/completions", {"origin": ORIGIN}),
        await call(app, "POST", "/nowhere", with_key),
    ]
    assert [reply.status for reply in replies] == [200, 500, 401, 404]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert reply.headers["x-request-id"]
        assert "origin" in reply.headers["vary"].lower()


async def test_a_page_may_read_a_stream(serve: Serve) -> None:
    app = serve(FakeEngine(), HttpConfig(cors_origins=("*",)))
    body = b'{"prompt":"hi","stream":true}'
    headers = {**JSON, "origin": ORIGIN}
    reply = await open_connection(app, "POST", "/v1/completions", body, headers).finish()
    assert reply.headers["access-control-allow-origin"] == "*"
    assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("keys", [(), (KEY,)])
async def test_the_document_names_the_key_where_one_is_needed(
    serve: Serve, keys: tuple[str, ...]
) -> None:
    app = serve(FakeEngine(), HttpConfig(api_keys=keys))
    document = (await call(app, "GET", "/openapi.json", {"authorization": f"Bearer {KEY}"})).json
    schemes = document["components"].get("securitySchemes")
    assert schemes == ({"key": {"type": "http", "scheme": "bearer"}} if keys else None)
    assert document.get("security") == ([{"key": []}] if keys else None)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            # What the document says is what a call without a key meets.
            reply = await call(app, method.upper(), path.replace("{id}", "x"), {})
            is_open = not keys or operation.get("security") == []
            assert (reply.status != 401) == is_open, path


def test_no_keys_and_no_origins_by_default() -> None:
    app = build_app(FakeEngine(), lambda: None, config=HttpConfig(), metrics=Metrics())
    assert len(app.user_middleware) == 1


async def test_a_wrong_key_is_told_from_none(serve: Serve) -> None:
    app = serve(FakeEngine(), HttpConfig(api_keys=("right",)))
    wrong = await call(app, "GET", "/v1/models", {"authorization": "Bearer wrong"})
    assert wrong.error["message"] == "The API key is not known."
    for headers in ({}, {"authorization": "Basic x"}, {"authorization": "Bearer"}):
        reply = await call(app, "GET", "/v1/models", headers)
        assert "needs an API key" in reply.error["message"]
