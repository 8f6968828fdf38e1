"""Every error the project raises, in one tree.

JaxserveError
  ConfigError                   a flag or a file at start-up is wrong: on stderr, exit code 2
  ModelLoadError                a checkpoint cannot be served: message to stderr, exit code 3
  ApiError                      one request's fault or fate, in OpenAI's shape
    InvalidRequestError 400
      ContextLengthError        prompt and budget exceed the context
      UnsupportedFieldError     a field this server does not apply
      SchemaError               a schema or grammar that cannot be enforced exactly
    AuthenticationError 401
    NotFoundError 404
    MethodNotAllowedError 405
    RequestTimeoutError 408
    BodyTooLargeError 413
    UrlTooLongError 414
    UnsupportedMediaTypeError 415
    HeadTooLargeError 431
    OverloadedError 429         a queue is full
    UnavailableError 503        starting, draining, or a grammar is not compiled in time
    EngineError 500             an internal fault ended this request
      EngineDeadError 503       the engine is gone for good
    TransferEncodingError 501
  InvariantError                our bug: the device thread stops and the process ends
"""

from typing import TypedDict


class JaxserveError(Exception):
    """Anything this project raises on purpose."""


class ConfigError(JaxserveError):
    """A flag, an environment value or a file is wrong; raised before serving starts."""


class ModelLoadError(JaxserveError):
    """A checkpoint is incomplete, does not fit its config, or is of a model not served."""


class InvariantError(JaxserveError):
    """Something that the code promises did not hold; never caused by input."""


class ApiError(JaxserveError):
    """A failure that a client sees; `message` names the field, the value and the limit.

    It may be tried again after `retry_after_s`, where that is not None.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class InvalidRequestError(ApiError):
    """The request is malformed, or a value is outside its range."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedFieldError(InvalidRequestError):
    """A known field whose value would change the answer in a way this server does not implement."""

    code = "unsupported_parameter"


class SchemaFault(TypedDict):
    """What a SchemaError says, but for the field of the request: `SchemaError(**fault)`."""

    message: str
    code: str | None
    path: str | None
    keyword: str | None


class SchemaError(InvalidRequestError):
    """A schema, regular expression or grammar is malformed, too complex or not to be enforced.

    `path` is the place in the schema as a JSON pointer ("" is its root, None: no schema),
    `keyword` what stands there and cannot be enforced. Codes: invalid_schema, unsupported_schema,
    schema_too_complex.
    """

    code = "invalid_schema"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        path: str | None = None,
        keyword: str | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.path = path
        self.keyword = keyword

    @property
    def fault(self) -> SchemaFault:
        """What it says, to be sent, kept or shown."""
        return SchemaFault(
            message=self.message, code=self.code, path=self.path, keyword=self.keyword
        )


class AuthenticationError(ApiError):
    """The request brings no key that is known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(ApiError):
    """No such path or model."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class MethodNotAllowedError(ApiError):
    """The path exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(ApiError):
    """A request began to arrive, and did not go on."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLargeError(ApiError):
    """The body exceeds the configured limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UrlTooLongError(ApiError):
    """The URL exceeds the limit."""

    status = 414
    type = "invalid_request_error"
    code = "url_too_long"


class UnsupportedMediaTypeError(ApiError):
    """The body is not declared as JSON in UTF-8, as it is."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class HeadTooLargeError(ApiError):
    """Request line and headers together exceed the limit."""

    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class OverloadedError(ApiError):
    """A queue is full, of sequences or of grammars to compile; the client may retry."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after_s = 1


class UnavailableError(ApiError):
    """The server does not accept work now: it starts or drains, or has no time for a grammar."""

    status = 503
    type = "server_error"
    code = "unavailable"
    retry_after_s = 5


class EngineError(ApiError):
    """An internal fault ended this request."""

    status = 500
    type = "server_error"
    code = "internal_error"


class EngineDeadError(EngineError):
    """The engine stopped for good; the process is about to exit."""

    status = 503
    code = "engine_dead"


class TransferEncodingError(ApiError):
    """The body comes in a transfer coding other than chunked."""

    status = 501
    type = "invalid_request_error"
    code = "unsupported_transfer_encoding"
