"""HTTP/1.1 on a connection: uvicorn's httptools protocol, with what it leaves out.

- An offer to change protocols (`Upgrade: h2c`, which Java's own client sends with every first
  request) is ignored, as RFC 9110 section 7.8 allows: httptools alone would drop the body.
- The URL and the head of a request are bounded, and so is the time that a request takes to arrive.
- A client that goes is noticed by every request it sent, also where it sent several at once; one
  that only closes its sending side behind a request is answered.
- What is no HTTP gets an error in the API's shape too, after the answers to what was before it.
"""

import asyncio
from http import HTTPStatus
from typing import Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxserve.errors import (
    ApiError,
    HeadTooLargeError,
    InvalidRequestError,
    MethodNotAllowedError,
    RequestTimeoutError,
    TransferEncodingError,
    UrlTooLongError,
)
from jaxserve.openai.responses import error_body

MAX_URL_BYTES = 8 << 10
MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 8
"""Requests that may wait behind one; more are not read from the connection until it is answered."""

MAX_SILENCE_S = 30.0
"""Seconds that a head may take in all, and a body between two pieces of it."""


_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What every client skips, and one that has gone answers with a reset, which the next one meets."""

_PROBE_DELAYS_S = (0.05, 0.1, 1.0, 5.0)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _part: Literal["none", "head", "body"] = "none"
    """What of a request is being received."""

    _num_head_bytes = 0
    _received_s = 0.0  # when the head began, or when something of the body came
    _has_ended_one = False
    _has_begun_one = False
    _fault: ApiError | None = None  # found while parsing: nothing that follows counts
    _refusal: ApiError | None = None  # to be sent once all before it is answered
    _unanswered: tuple[RequestResponseCycle, ...] = ()
    _timer: asyncio.TimerHandle | None = None
    _is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to listen."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(MAX_SILENCE_S, self._check_silence)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request; uvicorn tells the last one only."""
        if self._timer is not None:
            self._timer.cancel()
        for cycle in self._unanswered:
            _leave(cycle)
        self._unanswered = ()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answers to requests that are complete, and have none yet."""
        if not self._is_half_closed:
            self._is_half_closed = self._part == "none" and not any(
                cycle.response_started or cycle.scope["http_version"] == "1.0"
                for cycle in self._unanswered
            )
            if self._is_half_closed:
                self._schedule_probe(_PROBE_DELAYS_S)
        return self._is_half_closed and bool(self._unanswered)

    def data_received(self, data: bytes) -> None:
        """Parse what came in; a request starts when its head is complete."""
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._has_ended_one = False
        if self._part == "body":
            self._received_s = self.loop.time()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._fault is None:
                self._ignore_upgrade(data[upgrade.args[0] :])
                return
        except httptools.HttpParserError as error:
            self._fault = self._fault or InvalidRequestError(f"This is no HTTP request: {error}.")
        # What the parser holds of a header that has not ended is known to it alone. Data that ended
        # another request before is not counted: how much of it is this one's, nobody knows.
        if self._part == "head" and not self._has_ended_one:
            self._num_head_bytes += len(data)
            self._check_head(self._num_head_bytes)
        if self._fault is not None:
            self._refuse(self._fault)

    # The parser's calls

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._fault is not None:
            return
        self._part, self._has_begun_one = "head", True
        self._num_head_bytes = 0
        self._received_s = self.loop.time()
        if self._timer is None:
            self._timer = self.loop.call_later(MAX_SILENCE_S, self._check_silence)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        if self._fault is None:
            super().on_url(url)
            if len(self.url) > MAX_URL_BYTES:
                self._fault = UrlTooLongError(
                    f"The URL exceeds the limit of {MAX_URL_BYTES} bytes."
                )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what follows a chunked body is none, and is dropped."""
        if self._part != "head" or self._fault is not None:
            return
        super().on_header(name, value)
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._fault = TransferEncodingError(
                f"Transfer-Encoding must be chunked, not {value.decode('latin-1')}."
            )

    def on_headers_complete(self) -> None:
        """Start the request, unless it is too large, or to be parsed again without its offer."""
        if self._fault is None:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            self._check_head(size)
        if self._fault is not None:
            return
        if self.parser.should_upgrade():
            self._part = "none"
            return
        self._part = "body"
        super().on_headers_complete()
        self._unanswered = (*self._unanswered, self.cycle)
        # Uvicorn stops reading behind a second request, and would not see the client go.
        if len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """End the request's body."""
        if self._fault is not None:
            return
        self._part, self._has_ended_one = "none", True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if self._fault is None:
            super().on_body(body)

    # The answers' end

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        self._unanswered = tuple(c for c in self._unanswered if not c.response_complete)
        if self._refusal is not None and not self._unanswered:
            self._send_refusal(self._refusal)
        elif self._is_half_closed and not self._unanswered:
            self.transport.close()
        else:
            super().on_response_complete()

    # Inside

    def _check_head(self, num_bytes: int) -> None:
        if self._fault is None and num_bytes > MAX_HEAD_BYTES:
            self._fault = HeadTooLargeError(
                f"The head exceeds the limit of {MAX_HEAD_BYTES} bytes."
            )

    def _schedule_probe(self, delays_s: tuple[float, ...]) -> None:
        """Find out whether a client has closed one side of the connection or both."""
        if delays_s:
            self.loop.call_later(delays_s[0], self._probe, delays_s[1:])

    def _probe(self, delays_s: tuple[float, ...]) -> None:
        is_waiting = bool(self._unanswered) and not self._unanswered[0].response_started
        if is_waiting and not self.transport.is_closing():
            self.transport.write(_PROBE)
            self._schedule_probe(delays_s)

    def _check_silence(self) -> None:
        """End a connection whose request does not arrive."""
        self._timer = None
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._part == "none":
            # Uvicorn waits for the next request, but not for the first.
            if not self._has_begun_one:
                self.transport.close()
            return
        now_s = self.loop.time()
        if self.flow.read_paused:
            self._received_s = now_s  # it is the server who does not read
        due_s = self._received_s + MAX_SILENCE_S
        if now_s < due_s:
            self._timer = self.loop.call_at(due_s, self._check_silence)
            return
        self._refuse(
            RequestTimeoutError(
                f"The request's {self._part} was not sent within {MAX_SILENCE_S} s."
            )
        )

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
        self._refusal = error
        if self._part == "body":
            # The error is this request's own answer, unless it has one.
            if self.cycle.response_started:
                self.transport.close()
                return
            self._unanswered = tuple(c for c in self._unanswered if c is not self.cycle)
            _leave(self.cycle)
        if not self._unanswered:
            self._send_refusal(error)

    def _send_refusal(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        body, reason = error_body(error), HTTPStatus(error.status).phrase.encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (error.status, reason, len(body), body)
        )
        self.transport.close()


def _leave(cycle: RequestResponseCycle) -> None:
    """Tell a request that its client has gone."""
    cycle.disconnected = True
    cycle.message_event.set()
