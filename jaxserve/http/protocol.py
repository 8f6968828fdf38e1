"""HTTP/1.1 on a connection: uvicorn's httptools protocol, with what it leaves out.

- An offer to change protocols (`Upgrade: h2c`, which Java's own client sends with every first
  request) is ignored, as RFC 9110 section 7.8 allows: httptools alone would drop the body.
- The head of a request is bounded.
- A client that goes is noticed by every request it sent, also where it sent several at once.
- What is no HTTP gets an error in the API's shape too.
"""

from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxserve.errors import ApiError, HeadTooLargeError, InvalidRequestError, MethodNotAllowedError
from jaxserve.openai.responses import error_body

MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 8
"""Requests that may wait behind one; more are not read from the connection until it is answered."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _num_head_bytes = 0
    _is_in_head = False
    _is_too_large = False
    _has_ended_one = False
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request; uvicorn tells the last one only."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered = ()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came in; a request starts when its head is complete."""
        self._unset_keepalive_if_required()
        self._has_ended_one = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequestError(f"This is no HTTP request: {error}."))
            return
        # What the parser holds of a header that has not ended is known to it alone. Data that ended
        # another request before is not counted: how much of it is this one's, nobody knows.
        if self._is_in_head and not self._has_ended_one:
            self._num_head_bytes += len(data)
        if self._is_too_large or (self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES):
            self._refuse(
                HeadTooLargeError(f"The head exceeds the limit of {MAX_HEAD_BYTES} bytes.")
            )

    # The parser's calls

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._is_in_head = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what follows a chunked body is none, and is dropped."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless it is too large, or to be parsed again without its offer."""
        self._is_in_head = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._is_too_large = size > MAX_HEAD_BYTES
        if self.parser.should_upgrade() or self._is_too_large:
            return
        super().on_headers_complete()
        self._unanswered = (*self._unanswered, self.cycle)
        # Uvicorn stops reading behind a second request, and would not see the client go.
        if len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        self._unanswered = tuple(c for c in self._unanswered if not c.response_complete)
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._has_ended_one = True
        if not (self.parser.should_upgrade() or self._is_too_large):
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if not self._is_too_large:
            super().on_body(body)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer; `rest` follows its head."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(MethodNotAllowedError("CONNECT is not allowed: this is no proxy."))
            return
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() != b"upgrade")
            if name != b"upgrade" and value:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join((*head, b"\r\n", rest)))

    def _refuse(self, error: ApiError) -> None:
        """Answer without an endpoint, and close: where the next request begins is unknown."""
        self.logger.warning("refused a connection's data: %s", error.message)
        if self.transport.is_closing():
            return
        # Uvicorn has none before the first request, whatever its annotation says.
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            body, reason = error_body(error), HTTPStatus(error.status).phrase.encode()
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%s" % (error.status, reason, len(body), body)
            )
        self.transport.close()
