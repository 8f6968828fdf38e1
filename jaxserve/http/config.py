"""Limits of the HTTP layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """What the HTTP layer allows.

    Attributes:
        max_body_bytes: a larger request body is refused with 413, unread where its length is
            declared.
        max_sequences: most sequences of one request, prompts times n.
        heartbeat_s: a silent stream carries a comment this often; 0: never.
    """

    max_body_bytes: int = 32 << 20
    max_sequences: int = 128
    heartbeat_s: float = 15.0
