"""From a request's messages or prompts to token ids that the model may be given."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.http.aside import INLINE_COST, run_aside
from jaxserve.http.conversations import render_conversation
from jaxserve.http.served_model import ServedModel
from jaxserve.http.turns import Turn, restore
from jaxserve.openai.messages import Conversation
from jaxserve.openai.options import MAX_TEXT_CHARS
from jaxserve.openai.requests import Prompt
from jaxserve.text.detokenizer import Detokenizer

_CHARS_PER_PART = 50
"""What a message or a part of one costs a template, in characters."""


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
    turns: Sequence[Turn] = (),
    room: int = 0,
    keep: int | None = None,
    must_fit: bool = False,
) -> EncodedPrompt:
    """Render and tokenize a conversation; its ids start with exactly one BOS.

    `trusts_template`: it may bring a template of its own. `turns` may be the model's turns in it;
    they take no more tokens than there is `room` for, where the usual ones would not.
    Only the last `keep` tokens count; None: all. `must_fit`: it is to be answered within the
    context.
    """
    if conversation.chat_template is not None and not trusts_template:
        raise InvalidRequestError(
            "chat_template is not accepted: a template is a program;"
            " --trust-request-chat-template allows it.",
            param="chat_template",
        )

    def check(text: str) -> None:
        _check_length(text, model, param="messages", must_fit=must_fit and keep is None)

    def run() -> EncodedPrompt:
        text, ids = render_conversation(conversation, model, check)
        if turns:
            restored = restore(ids, turns, model.tokenizer)
            ids = restored if len(restored) <= max(room, len(ids)) else ids
        prompt = _truncated(EncodedPrompt(text, tuple(ids)), keep)
        check_ids(prompt.token_ids, model, param="messages", must_fit=must_fit)
        return prompt

    cost = sum(
        len(each.text) + len(each.reasoning) + _CHARS_PER_PART * each.num_parts
        for each in conversation.messages
    )
    if conversation.takes_long:
        cost += INLINE_COST
    return await run_aside(run, cost, is_foreign=conversation.chat_template is not None)


async def completion_prompts(
    prompts: Sequence[Prompt],
    model: ServedModel,
    *,
    add_special_tokens: bool,
    keep: int | None = None,
) -> list[EncodedPrompt]:
    """Tokenize text prompts that are to be answered; ids are taken as they are, without a BOS.

    Only the last `keep` tokens of each count; None: all.
    """

    def encode_one(prompt: Prompt, param: str) -> EncodedPrompt:
        if isinstance(prompt, str):
            _check_length(prompt, model, param=param, must_fit=keep is None)
            encoded = _encoded(prompt, model, add_special_tokens=add_special_tokens, keep=keep)
        else:
            encoded = _truncated(EncodedPrompt(None, prompt), keep)
        check_ids(encoded.token_ids, model, param=param, must_fit=True)
        return encoded

    params = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    return await run_aside(
        lambda: [encode_one(*each) for each in zip(prompts, params, strict=True)],
        sum(len(prompt) for prompt in prompts),
    )


async def encode(
    text: str, model: ServedModel, *, add_special_tokens: bool, param: str
) -> tuple[int, ...]:
    """Tokenize a text, which may be empty."""
    _check_length(text, model, param=param, must_fit=False)
    prompt = await run_aside(
        lambda: _encoded(text, model, add_special_tokens=add_special_tokens), len(text)
    )
    return prompt.token_ids


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

    return Echo(text, await run_aside(offsets, len(prompt.token_ids)))


def chat_echo(conversation: Conversation) -> Echo:
    """Return what the answer continues, where that is the model's own message."""
    last = conversation.messages[-1]
    return Echo(last.text) if last.role == "assistant" else Echo()


async def decode(token_ids: Sequence[int], model: ServedModel, *, skip_special_tokens: bool) -> str:
    """Return the text of ids."""

    def run() -> str:
        detokenizer = Detokenizer(model.tokenizer, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    return await run_aside(run, len(token_ids))


def check_ids(ids: Sequence[int], model: ServedModel, *, param: str, must_fit: bool) -> None:
    """Refuse a prompt that the model cannot be given; `must_fit`: or not answer."""
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
    if must_fit and len(ids) >= model.max_model_len:
        raise ContextLengthError(
            f"{context_phrase(model)}; the prompt has {len(ids)} tokens, which leaves no room"
            " for an answer.",
            param=param,
        )


def context_phrase(model: ServedModel) -> str:
    """Begin a refusal in the words by which clients that shorten a conversation tell it."""
    return f"This model's maximum context length is {model.max_model_len} tokens"


def check_vocabulary(ids: Sequence[int], model: ServedModel, *, param: str) -> None:
    """Refuse ids that the model does not know."""
    largest, vocab_size = max(ids, default=0), model.vocab_size
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"{param} holds token id {largest}; the vocabulary ends at {vocab_size - 1}.",
            param=param,
        )


def _check_length(text: str, model: ServedModel, *, param: str, must_fit: bool) -> None:
    """Refuse a text that is not worth tokenizing: it cannot fit, or would take too long."""
    longest = model.tokenizer.longest_piece
    holds = model.max_model_len * (longest or 0)
    if must_fit and longest is not None and len(text) > holds:
        raise ContextLengthError(
            f"{context_phrase(model)}; the prompt has {len(text)} characters, which are"
            f" {-(-len(text) // longest)} tokens at least.",
            param=param,
        )
    limit = max(MAX_TEXT_CHARS, holds)
    if len(text) > limit:
        raise InvalidRequestError(
            f"{param} has {len(text)} characters; at most {limit} are tokenized.", param=param
        )


def _encoded(
    text: str, model: ServedModel, *, add_special_tokens: bool = True, keep: int | None = None
) -> EncodedPrompt:
    ids = tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens))
    return _truncated(EncodedPrompt(text, ids), keep)


def _truncated(prompt: EncodedPrompt, keep: int | None) -> EncodedPrompt:
    if keep is None or len(prompt.token_ids) <= keep:
        return prompt
    return EncodedPrompt(None, prompt.token_ids[-keep:])
