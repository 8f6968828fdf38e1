"""A generation's outputs as an OpenAI answer: whole, or frame by frame."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import orjson

from jaxserve.http.answer_parts import TurnPlan, WholeTurn
from jaxserve.http.choice import ChoiceText
from jaxserve.http.generation import Delta, Generation
from jaxserve.http.limits import finish_details
from jaxserve.http.prompts import Echo
from jaxserve.http.scores import ToldPrompts
from jaxserve.openai.logprobs import Columns, LogprobsWriter, ScoredToken
from jaxserve.openai.options import GenerationOptions
from jaxserve.openai.responses import STREAM_END, Answer, Choice
from jaxserve.openai.usage import Timings, Usage
from jaxserve.text.turns import Content, TurnEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWriter:
    """Writes one request's answer in the format of `answer`.

    Attributes:
        choices: `n` of each prompt.
        echoes: by prompt, what precedes its choices' text.
        turns: how a chat's parts are written; None: there is nothing but text.
        told: what is told of the prompts' tokens.
    """

    generation: Generation
    answer: Answer
    choices: Sequence[ChoiceText]
    echoes: Sequence[Echo]
    options: GenerationOptions
    logprobs: LogprobsWriter
    told: ToldPrompts
    turns: TurnPlan | None = None

    async def whole(self) -> bytes:
        """Run to the end and write one body; a fault in any sequence is raised."""
        turns = [WholeTurn(self.turns, [self._echo(index)]) for index in range(len(self.choices))]
        ids: list[list[int]] = [[] for _ in self.choices]
        tokens: list[list[Columns]] = [[] for _ in self.choices]
        choices = []
        async with aclosing(self.generation.outputs()) as outputs:
            async for output in outputs:
                index = output.index
                if isinstance(output, Delta):
                    turns[index].add(output.delta.parts)
                    ids[index].extend(output.delta.token_ids)
                    if output.delta.tokens:
                        tokens[index].append(self._write(output.delta.tokens))
                    continue
                prompt = index // self.options.n
                told = [*await self.told.echo(prompt), *tokens[index]]
                turns[index].add(output.parts)
                choices.append(
                    Choice(
                        index=index,
                        text="".join(turns[index].text),
                        extras=turns[index].extras(),
                        token_ids=tuple(ids[index]),
                        finish_reason=output.reason,
                        stop_reason=output.stop_reason,
                        finish_details=finish_details(output.cut_by),
                        logprobs=self._logprobs(told),
                        prompt_logprobs=await self.told.scores(prompt),
                    )
                )
        choices.sort(key=lambda choice: choice.index)
        return self.answer.body(choices, self._usage(), self._timings())

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield events, each complete, several joined where they belong to one step."""
        answer, options = self.answer, self.options
        opened = [False] * len(self.choices)
        num_open = len(self.choices)
        async with aclosing(self.generation.outputs()) as outputs:
            async for output in outputs:
                index = output.index
                usage = self._usage() if options.continuous_usage else None
                frame = b""
                if not opened[index]:
                    opened[index] = True
                    echoed = await self.told.echo(index // options.n)
                    logprobs = self._logprobs(echoed) if echoed else None
                    frame = answer.first_chunk(index, usage)
                    frame += answer.text_chunk(index, self._echo(index), (), logprobs, usage)
                if isinstance(output, Delta):
                    delta = output.delta
                    tokens = delta.tokens
                    logprobs = self._logprobs([self._write(tokens)]) if tokens else None
                    frame += self._chunks(index, delta.parts, delta.token_ids, logprobs, usage)
                else:
                    num_open -= 1
                    tells_timings = num_open == 0 and not options.include_usage
                    frame += self._chunks(index, output.parts, (), None, usage)
                    frame += answer.last_chunk(
                        index,
                        output.reason,
                        output.stop_reason,
                        usage,
                        details=finish_details(output.cut_by),
                        timings=self._timings() if tells_timings else None,
                    )
                if frame:
                    yield frame
        end = b""
        if options.include_usage:
            end = answer.usage_chunk(self._usage(), self._timings())
        yield end + STREAM_END

    def _chunks(
        self,
        index: int,
        parts: Sequence[TurnEvent],
        token_ids: tuple[int, ...],
        logprobs: orjson.Fragment | None,
        usage: Usage | None,
    ) -> bytes:
        """Write a step's parts; what is known of its ids goes with the first."""
        written = []
        for part in parts:
            if isinstance(part, Content):
                chunk = self.answer.text_chunk(index, part.text, token_ids, logprobs, usage)
            elif self.turns is None or (delta := self.turns.delta(part)) is None:
                continue
            else:
                chunk = self.answer.delta_chunk(index, delta, token_ids, logprobs, usage)
            written.append(chunk)
            token_ids, logprobs = (), None
        if not written:
            return self.answer.text_chunk(index, "", token_ids, logprobs, usage)
        return b"".join(written)

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.options.n].text

    def _write(self, tokens: Sequence[ScoredToken]) -> Columns:
        return self.answer.write_logprobs(self.logprobs, tokens, self.options.logprobs or 0)

    def _logprobs(self, parts: Sequence[Columns]) -> orjson.Fragment | None:
        return None if self.options.logprobs is None else self.answer.join_logprobs(parts)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.generation.num_prompt_tokens,
            completion_tokens=self.generation.num_output_tokens,
            reasoning_tokens=self.generation.num_thought_tokens,
            cached_tokens=self.generation.num_cached_tokens,
        )

    def _timings(self) -> Timings:
        """Tell the times of a generation that has ended."""
        usage = self._usage()
        num_prompt = usage.prompt_tokens - usage.cached_tokens if self.generation.has_started else 0
        started_s, first_token_s, ended_s = self.generation.times_s()
        return Timings(
            queue_s=started_s,
            prompt_s=first_token_s - started_s,
            predicted_s=ended_s - first_token_s,
            num_cached=usage.cached_tokens,
            num_prompt=num_prompt,
            num_predicted=usage.completion_tokens,
            num_forced=self.generation.num_forced_tokens,
            grammar_path=self.generation.grammar_path,
        )
