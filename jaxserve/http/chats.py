"""Chats as prompts, and what of them is remembered for later requests. Event loop only."""

import re
from dataclasses import replace

from jaxserve.http.choice import ChoiceText
from jaxserve.http.config import HttpConfig
from jaxserve.http.prompts import EncodedPrompt, chat_prompt
from jaxserve.http.sequences import prompt_limit, prompt_room
from jaxserve.http.served_model import ServedModel
from jaxserve.http.turns import MAX_TURN_BYTES, TurnMemory, spoken_as
from jaxserve.openai.messages import Conversation
from jaxserve.openai.requests import ChatCompletionRequest
from jaxserve.openai.responses import ChatAnswer
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.types import GenerationRequest


class Chats:
    """Makes prompts of chats as the server's settings say."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._dropped = [re.compile(each, re.MULTILINE) for each in config.dropped_from_system]
        self._turns = TurnMemory(MAX_TURN_BYTES if config.remembers_turns else 0)

    async def prompt(
        self, request: ChatCompletionRequest, model: ServedModel, *, must_fit: bool = False
    ) -> EncodedPrompt:
        """Make a request's prompt; `must_fit`: it is to be answered within the context."""
        conversation, options = self._stripped(request.conversation), request.options
        said = [
            spoken_as(message.text, [call.id for call in message.calls])
            for message in conversation.messages
            if message.role == "assistant"
        ]
        return await chat_prompt(
            conversation,
            model,
            trusts_template=self._config.trust_request_chat_template,
            turns=self._turns.find(options.cache_salt, said),
            room=prompt_room(options, model, ChatAnswer),
            keep=prompt_limit(options, model, ChatAnswer),
            must_fit=must_fit,
        )

    async def render(self, conversation: Conversation, model: ServedModel) -> EncodedPrompt:
        """Make a prompt of a conversation as nobody has ever had it."""
        trusts_template = self._config.trust_request_chat_template
        return await chat_prompt(
            self._stripped(conversation), model, trusts_template=trusts_template
        )

    def remember(
        self,
        request: ChatCompletionRequest,
        model: ServedModel,
        sequence: GenerationRequest,
        choice: ChoiceText,
    ) -> None:
        """Remember a complete answer's ids by the message that a client makes of it."""
        conversation, tokenizer, ids = request.conversation, model.tokenizer, choice.text_ids
        if not choice.is_whole:
            return  # its text ends within what its ids spell
        if not (choice.call_ids or tokenizer.special_ids.isdisjoint(ids)):
            return  # thoughts do not come back, nor are control tokens ever text
        text = ""
        if not choice.call_ids:
            skips = request.options.skip_special_tokens
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips)
            text = detokenizer.push(ids) + detokenizer.finish()
        if conversation.continue_final_message:
            text = conversation.messages[-1].text + text
        key = spoken_as(text, choice.call_ids)
        self._turns.remember(sequence.cache_salt, key, sequence.prompt_ids, ids, tokenizer)

    def forget(self) -> None:
        """Forget all answers."""
        self._turns.forget()

    def _stripped(self, conversation: Conversation) -> Conversation:
        """Leave out of system messages what the settings drop."""
        if not self._dropped:
            return conversation
        return replace(
            conversation,
            messages=tuple(
                replace(message, content=self._strip(message.content))
                if message.role == "system"
                else message
                for message in conversation.messages
            ),
        )

    def _strip(self, content: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(content, str):
            return tuple(str(self._strip(part)) for part in content)
        for pattern in self._dropped:
            content = pattern.sub("", content)
        return content
