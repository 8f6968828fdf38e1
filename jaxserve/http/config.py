"""Limits of the HTTP layer."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """What the HTTP layer allows.

    Attributes:
        max_body_bytes: a larger request body is refused with 413, unread where its length is
            declared.
        trust_request_chat_template: a request may bring a chat template, which is a program.
        api_keys: one of them opens all but /health and /live; none: everything is open.
        cors_origins: origins whose pages may call; "*": all.
        dropped_from_system: regular expressions; what they find in system messages is no part of
            prompts.
        remembers_turns: what the model said stays the ids that it was when it comes back.
        reasoning_fields: fields of an answer that tell the model's thoughts.
        strict_tools: arguments of calls fit the schemas of tools that do not say so.
        heartbeat_s: a silent stream carries a comment this often; 0: never.
    """

    max_body_bytes: int = 32 << 20
    dropped_from_system: tuple[str, ...] = ()
    remembers_turns: bool = True
    strict_tools: bool = True
    heartbeat_s: float = 15.0
    trust_request_chat_template: bool = False
    reasoning_fields: tuple[str, ...] = ("reasoning", "reasoning_content")
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
