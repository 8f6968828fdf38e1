"""From a request's messages or prompts to token ids that the model may be given."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import anyio.to_thread

from jaxserve.errors import InvalidRequestError
from jaxserve.http.conversations import render_conversation
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.messages import Conversation
from jaxserve.openai.requests import Prompt
from jaxserve.text.detokenizer import Detokenizer

T = TypeVar("T")

# Tokenizing takes 1 to 2 µs a character, a worker thread 0.1 ms; every stream waits meanwhile.
_INLINE_CHARS = 1_000


class EncodedPrompt(NamedTuple):
    """A prompt as the model takes it, and the text that it was; None: it was ids, or was cut."""

    text: str | None
    token_ids: tuple[int, ...]


class Echo(NamedTuple):
    """What of a prompt precedes the answer: its text, and where each of its tokens begins there.

    A chat's echo is the message that the answer continues, whose tokens are not told.
    """

    text: str = ""
    offsets: tuple[int, ...] = ()


async def chat_prompt(
    conversation: Conversation,
    model: ServedModel,
    *,
    trusts_template: bool,
    keep: int | None = None,
) -> EncodedPrompt:
    """Render and tokenize a conversation; its ids start with exactly one BOS.

    `keep` is as in `completion_prompts`; `trusts_template`: the conversation may bring its own.
    """
    if conversation.chat_template is not None and not trusts_template:
        raise InvalidRequestError(
            "chat_template is not accepted: a template is a program;"
            " --trust-request-chat-template allows it.",
            param="chat_template",
        )

    def encode() -> EncodedPrompt:
        text, ids = render_conversation(conversation, model)
        return _truncated(EncodedPrompt(text, tuple(ids)), keep)

    num_chars = sum(len(message.text) for message in conversation.messages)
    if conversation.takes_long:
        num_chars += _INLINE_CHARS
    prompt = await _run(encode, num_chars)
    check_ids(prompt.token_ids, model, param="messages")
    return prompt


async def completion_prompts(
    prompts: Sequence[Prompt],
    model: ServedModel,
    *,
    add_special_tokens: bool,
    keep: int | None = None,
) -> list[EncodedPrompt]:
    """Tokenize text prompts; ids are taken as they are, without a BOS.

    Only the last `keep` tokens of each count; None: all.
    """

    def encode_one(prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, str):
            ids = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return _truncated(EncodedPrompt(prompt, tuple(ids)), keep)
        return _truncated(EncodedPrompt(None, prompt), keep)

    encoded = await _run(
        lambda: [encode_one(prompt) for prompt in prompts], sum(len(prompt) for prompt in prompts)
    )
    for i, prompt in enumerate(encoded):
        check_ids(prompt.token_ids, model, param="prompt" if len(encoded) == 1 else f"prompt[{i}]")
    return encoded


async def encode(text: str, model: ServedModel, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Tokenize a text, which may be empty."""
    return await _run(
        lambda: tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens)),
        len(text),
    )


async def completion_echo(
    prompt: EncodedPrompt, model: ServedModel, *, skip_special_tokens: bool
) -> Echo:
    """Return a whole prompt as an echo: as it was sent, or what its ids stand for.

    Control tokens that were sent as text stay.
    """
    tokenizer, text = model.tokenizer, prompt.text
    skip_special_tokens = skip_special_tokens and text is None
    if text is None:
        text = await decode(prompt.token_ids, model, skip_special_tokens=skip_special_tokens)
    has_added_bos = not text.startswith(str(tokenizer.piece(tokenizer.bos_id)))

    def offsets() -> tuple[int, ...]:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        found, offset = [], 0
        for i, token_id in enumerate(prompt.token_ids):
            is_text = not (i == 0 and token_id == tokenizer.bos_id and has_added_bos)
            length = len(detokenizer.push((token_id,))) if is_text else 0
            # An id may make final, before its own text, that of the bytes in front of it.
            found.append(offset + length - (detokenizer.length(token_id) if length else 0))
            offset += length
        return tuple(found)

    return Echo(text, await _run(offsets, len(prompt.token_ids)))


def chat_echo(conversation: Conversation) -> Echo:
    """Return what the answer continues, where that is the model's own message."""
    last = conversation.messages[-1]
    return Echo(last.text) if last.role == "assistant" else Echo()


async def decode(token_ids: Sequence[int], model: ServedModel, *, skip_special_tokens: bool) -> str:
    """Return the text of ids."""

    def run() -> str:
        detokenizer = Detokenizer(model.tokenizer, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    return await _run(run, len(token_ids))


def check_ids(ids: Sequence[int], model: ServedModel, *, param: str) -> None:
    """Refuse a prompt that the model cannot be given."""
    if not ids:
        raise InvalidRequestError(f"{param} holds no token.", param=param)
    check_vocabulary(ids, model, param=param)
    placeholders = model.placeholder_token_ids.intersection(ids)
    if placeholders:
        raise InvalidRequestError(
            f"{param} holds token id {min(placeholders)}, which stands for media;"
            " this server takes text.",
            param=param,
        )


def check_vocabulary(ids: Sequence[int], model: ServedModel, *, param: str) -> None:
    """Refuse ids that the model does not know."""
    largest, vocab_size = max(ids, default=0), model.vocab_size
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"{param} holds token id {largest}; the vocabulary ends at {vocab_size - 1}.",
            param=param,
        )


async def _run(encode: Callable[[], T], num_chars: int) -> T:
    if num_chars < _INLINE_CHARS:
        return encode()
    return await anyio.to_thread.run_sync(encode)


def _truncated(prompt: EncodedPrompt, keep: int | None) -> EncodedPrompt:
    if keep is None or len(prompt.token_ids) <= keep:
        return prompt
    return EncodedPrompt(None, prompt.token_ids[-keep:])
