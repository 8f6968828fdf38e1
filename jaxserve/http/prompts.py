"""From a request's messages or prompts to token ids that the model may be given."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio.to_thread

from jaxserve.errors import InvalidRequestError
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.requests import Message, Prompt

T = TypeVar("T")

# Tokenizing takes 1 to 2 µs a character, a worker thread 0.1 ms; every stream waits meanwhile.
_INLINE_CHARS = 1_000


async def chat_prompt(messages: Sequence[Message], model: ServedModel) -> tuple[int, ...]:
    """Render and tokenize a conversation; its ids start with exactly one BOS."""

    def encode() -> tuple[int, ...]:
        text = model.chat_template.render([message.for_template() for message in messages])
        return tuple(model.tokenizer.encode(text, add_special_tokens=True))

    ids = await _run(encode, sum(message.num_chars for message in messages))
    _check_ids(ids, model, param="messages")
    return ids


async def completion_prompts(
    prompts: Sequence[Prompt], model: ServedModel, *, add_special_tokens: bool
) -> list[tuple[int, ...]]:
    """Tokenize text prompts; ids are taken as they are, without a BOS."""

    def encode() -> list[tuple[int, ...]]:
        return [
            tuple(model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    id_lists = await _run(encode, sum(len(prompt) for prompt in prompts))
    for i, ids in enumerate(id_lists):
        _check_ids(ids, model, param="prompt" if len(id_lists) == 1 else f"prompt[{i}]")
    return id_lists


async def _run(encode: Callable[[], T], num_chars: int) -> T:
    if num_chars <= _INLINE_CHARS:
        return encode()
    return await anyio.to_thread.run_sync(encode)


def _check_ids(ids: tuple[int, ...], model: ServedModel, *, param: str) -> None:
    if not ids:
        raise InvalidRequestError(f"{param} holds no token.", param=param)
    largest, vocab_size = max(ids), model.vocab_size
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"{param} holds token id {largest}; the vocabulary ends at {vocab_size - 1}.",
            param=param,
        )
    placeholders = model.placeholder_token_ids.intersection(ids)
    if placeholders:
        raise InvalidRequestError(
            f"{param} holds token id {min(placeholders)}, which stands for media;"
            " this server takes text.",
            param=param,
        )
