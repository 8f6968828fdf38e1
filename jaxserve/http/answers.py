"""A generation's outputs as an OpenAI answer: whole, or frame by frame."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from jaxserve.http.generation import Delta, Generation
from jaxserve.openai.responses import STREAM_END, Answer, Choice, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWriter:
    """Writes one request's answer in the format of `answer`.

    Attributes:
        prompts: the prompts' token ids, each of which has `n` sequences.
    """

    generation: Generation
    answer: Answer
    prompts: list[tuple[int, ...]]
    n: int

    async def whole(self) -> bytes:
        """Run to the end and write one body; a fault in any sequence is raised."""
        texts: list[list[str]] = [[] for _ in range(self._num_choices)]
        ids: list[list[int]] = [[] for _ in range(self._num_choices)]
        choices = []
        async with aclosing(self.generation.outputs()) as outputs:
            async for output in outputs:
                index = output.index
                texts[index].append(output.text)
                if isinstance(output, Delta):
                    ids[index].extend(output.token_ids)
                    continue
                choices.append(
                    Choice(
                        index=index,
                        text="".join(texts[index]),
                        token_ids=tuple(ids[index]),
                        finish_reason=output.reason,
                        stop_reason=output.stop_reason,
                    )
                )
        choices.sort(key=lambda choice: choice.index)
        return self.answer.body(choices, self._usage())

    async def frames(self, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yield events, each complete, several joined where they belong to one step."""
        answer = self.answer
        opened = [False] * self._num_choices
        async with aclosing(self.generation.outputs()) as outputs:
            async for output in outputs:
                index = output.index
                if isinstance(output, Delta):
                    frame = answer.text_chunk(index, output.text, output.token_ids)
                else:
                    frame = answer.text_chunk(index, output.text, ())
                    frame += answer.last_chunk(index, output.reason, output.stop_reason)
                if not opened[index]:
                    opened[index] = True
                    frame = answer.first_chunk(index) + frame
                if frame:
                    yield frame
        yield (answer.usage_chunk(self._usage()) if include_usage else b"") + STREAM_END

    @property
    def _num_choices(self) -> int:
        return len(self.prompts) * self.n

    def _usage(self) -> Usage:
        generation = self.generation
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=generation.num_output_tokens,
            # As the prompts, each counted once: by its first sample.
            cached_tokens=sum(
                generation.num_cached_tokens(p * self.n) for p in range(len(self.prompts))
            ),
        )
