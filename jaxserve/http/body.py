"""Reading a request's body within limits."""

from starlette.requests import Request as HttpRequest

from jaxserve.errors import BodyTooLargeError, UnsupportedMediaTypeError


async def read_json_body(
    request: HttpRequest, *, max_bytes: int, may_be_empty: bool = False
) -> bytes:
    """Read a body declared as JSON; `may_be_empty`: there may be none at all.

    Raises:
        UnsupportedMediaTypeError: it is declared as something else, as nothing, or as encoded.
        BodyTooLargeError: it exceeds `max_bytes`; raised before it is read where it says so.
    """
    if may_be_empty and not _has_body(request):
        return b""
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _check_type(request: HttpRequest) -> None:
    content_type = request.headers.get("content-type", "")
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if kind != "application/json":
        raise UnsupportedMediaTypeError(
            f"Content-Type must be application/json, not {content_type or 'absent'}."
        )
    for parameter in parameters:
        name, _, charset = parameter.partition("=")
        if name == "charset" and charset.strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMediaTypeError(f"Content-Type: charset must be utf-8, not {charset}.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMediaTypeError(f"Content-Encoding must be absent, not {encoding}.")


def _has_body(request: HttpRequest) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body exceeds the limit of {max_bytes} bytes.")
