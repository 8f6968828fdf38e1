"""Grammars for a model without a real engine: compiled at once, and walked by hand."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.masks import has_id
from jaxserve.guided.tables import Grammar, GrammarSpec
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.http.grammars import Grammars
from jaxserve.http.layouts import Layouts
from jaxserve.http.served_model import ServedModel
from jaxserve.types import GenerationRequest
from tests.fake_engine import turn_ids


class InlineCompiler:
    """Compiles in the test's own process."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self.specs: list[GrammarSpec] = []

    async def compile(self, spec: GrammarSpec) -> Grammar:
        self.specs.append(spec)
        return await asyncio.to_thread(compile_grammar, spec, self._vocabulary)

    async def warm(self, specs: Iterable[GrammarSpec] = ()) -> None: ...

    async def close(self) -> None: ...


def with_grammars(model: ServedModel) -> ServedModel:
    tokenizer = model.tokenizer
    vocabulary = GrammarVocabulary.build(
        tokenizer.pieces,
        control_ids=tokenizer.special_ids | model.end_token_ids,
        vocab_size=model.vocab_size,
    )
    grammars = Grammars(
        InlineCompiler(vocabulary),
        Layouts(
            vocabulary,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            vocab_size=model.vocab_size,
            arena_rows=4000,
        ),
    )
    return replace(model, grammars=grammars)


class Ways:
    """What the grammar of a sequence lets through."""

    def __init__(self, request: GenerationRequest) -> None:
        self.guidance = request.guidance

    @property
    def end_ids(self) -> frozenset[int]:
        assert self.guidance is not None
        return self.guidance.end_ids

    def takes(self, token_ids: tuple[int, ...]) -> bool | None:
        """Whether an answer may be so and end there; None: it may not begin so."""
        assert self.guidance is not None
        guide = self.guidance.grammar.start()
        for token_id in token_ids:
            if not has_id(guide.allowed_words(), token_id):
                return None
            guide.advance(token_id)
        return bool(guide.may_end)

    def __call__(self, text: str) -> bool | None:
        return self.takes(turn_ids(text))
