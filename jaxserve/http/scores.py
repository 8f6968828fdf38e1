"""How likely a prompt's tokens are, as its answers tell it: bounded, and written once a prompt."""

from collections.abc import Sequence

import orjson

from jaxserve.errors import InvalidRequestError
from jaxserve.http.aside import run_aside
from jaxserve.http.choice import PromptScores
from jaxserve.http.prompts import Echo, EncodedPrompt
from jaxserve.openai.logprobs import Columns, LogprobsWriter, ScoredToken
from jaxserve.openai.options import MAX_PROMPT_SCORES, GenerationOptions
from jaxserve.openai.responses import Answer


def check_scores(
    prompts: Sequence[EncodedPrompt], options: GenerationOptions, kind: type[Answer]
) -> None:
    """Refuse a request that asks for too many of its prompts' log-probabilities."""
    num_told = options.n if kind.tells_echo else 1
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts) * num_told
    tells_echo = options.echo and kind.tells_echo
    told = {
        "prompt_logprobs": options.prompt_logprobs,
        "logprobs": options.logprobs if tells_echo else None,
    }
    for param, num_top in told.items():
        count = 0 if num_top is None else num_tokens * (num_top + 1)
        if count > MAX_PROMPT_SCORES:
            raise InvalidRequestError(
                f"{param}={num_top} asks for {count} log-probabilities of the prompt's tokens, all"
                f" choices together; at most {MAX_PROMPT_SCORES} are told.",
                param=param,
            )


class ToldPrompts:
    """What is told of the tokens of a request's prompts; it is written when first asked for.

    A prompt's scores must have come by then.
    """

    def __init__(
        self,
        prompts: Sequence[EncodedPrompt],
        echoes: Sequence[Echo],
        scores: Sequence[PromptScores],
        *,
        options: GenerationOptions,
        answer: Answer,
        writer: LogprobsWriter,
    ) -> None:
        self._prompts = prompts
        self._echoes = echoes
        self._scores = scores
        self._options = options
        self._answer = answer
        self._writer = writer
        self._written_echoes: dict[int, Columns] = {}
        self._written_scores: dict[int, orjson.Fragment] = {}

    async def echo(self, prompt: int) -> tuple[Columns, ...]:
        """Give a prompt's part of its choices' `logprobs`; none where it is not echoed in them."""
        num_top, offsets = self._options.logprobs, self._echoes[prompt].offsets
        if num_top is None or not offsets:
            return ()

        def write() -> Columns:
            tokens = [
                ScoredToken(token_id=token_id, offset=offset, scored=scored)
                for token_id, offset, scored in zip(
                    self._prompts[prompt].token_ids,
                    offsets,
                    (None, *self._scores[prompt].tokens),
                    strict=False,  # of a choice that was cut, not all scores have come
                )
            ]
            return self._answer.write_logprobs(self._writer, tokens, num_top)

        if prompt not in self._written_echoes:
            self._written_echoes[prompt] = await run_aside(write, len(offsets) * (num_top + 1))
        return (self._written_echoes[prompt],)

    async def scores(self, prompt: int) -> orjson.Fragment | None:
        """Give a prompt's `prompt_logprobs`; None where they are not wanted."""
        num_top, scored = self._options.prompt_logprobs, self._scores[prompt].tokens
        if num_top is None:
            return None
        if prompt not in self._written_scores:
            self._written_scores[prompt] = await run_aside(
                lambda: self._writer.prompt(scored, num_top), len(scored) * (num_top + 1)
            )
        return self._written_scores[prompt]
