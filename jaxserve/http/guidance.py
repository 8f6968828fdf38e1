"""What an answer has to be: the grammar of a request, of its calls, and what may go before either.

Event loop only.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jaxserve.errors import InvalidRequestError, SchemaError
from jaxserve.guided.tables import GrammarSpec
from jaxserve.guided.triggered import Opening, Thought, Trigger
from jaxserve.http.answer_parts import TurnPlan
from jaxserve.http.grammars import Grammars, naming, of_model
from jaxserve.openai.call_grammar import calls_spec
from jaxserve.openai.guided import GrammarRequest
from jaxserve.openai.tools import ToolUse
from jaxserve.text.markers import call_marks
from jaxserve.types import GenerationRequest, Grammar, Guidance

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """What holds of an answer from its beginning.

    Behind a thought it is `spec` with `openings` before it.
    """

    whole: Grammar
    spec: GrammarSpec
    openings: tuple[Opening, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammars:
    """Makes the grammars of one request's answers.

    Attributes:
        grammars: of the model; None: this server has none.
        plan: of a chat; None: the request is no chat.
        stop_ids: end the request, and are forced nowhere in a grammar.
    """

    grammars: Grammars | None
    plan: TurnPlan | None
    prompt_ids: Sequence[int] = ()
    stop_ids: Collection[int] = ()

    def are_needed(self, asked: GrammarRequest | None) -> bool:
        """Tell whether there may be something to compile."""
        if asked is not None:
            return True
        plan = self.plan
        return plan is not None and (bool(plan.tool_use.offered) or plan.thought_budget is not None)

    async def of_answer(self, asked: GrammarRequest | None) -> AnswerGrammar | None:
        """Return what an answer has to be; None: anything.

        Raises:
            SchemaError: that can't be enforced.
            InvalidRequestError: a schema that has to hold is not read exactly, or an answer and
                calls cannot both be held.
            UnsupportedFieldError: this server has no grammars.
            OverloadedError: too many grammars wait to be compiled.
            UnavailableError: there is no time for it.
        """
        if self.plan is not None and self.plan.tool_use.offered:
            return await self._with_calls(asked, self.plan)
        if asked is None:
            return None
        with naming(asked.param):
            return await self._behind_thought(of_model(self.grammars, asked.param), asked.spec)

    async def behind(self, grammar: AnswerGrammar | None, *closer: Opening) -> Grammar:
        """Return what has to follow a thought, with what closes that.

        Raises:
            UnsupportedFieldError: this server has no grammars.
            SchemaError: it was known, is no longer, and now takes too much time.
            OverloadedError: likewise, and too many grammars wait to be compiled.
            UnavailableError: likewise, and there is no time for it.
        """
        known = of_model(self.grammars, "thinking_token_budget")
        spec, openings = (grammar.spec, grammar.openings) if grammar else (None, ())
        return await known.prepare(spec, *openings, *closer, stop_ids=self.stop_ids)

    async def _with_calls(
        self, asked: GrammarRequest | None, plan: TurnPlan
    ) -> AnswerGrammar | None:
        use, markers = plan.tool_use, plan.markers
        if use.must_call:
            known = of_model(self.grammars, "tool_choice")
            marks = call_marks(markers, known.marks)
            spec = calls_spec(use, marks, strict_by_default=plan.strict_by_default)
            with naming_field_of(use):
                return await self._behind_thought(known, spec)
        if asked is not None:
            known = of_model(self.grammars, asked.param)
            with naming(asked.param):
                await known.compile(asked.spec)  # what is wrong with it is no tool's fault
            try:
                return await self._loosely(known, plan, asked.spec)
            except SchemaError as error:
                if error.param != "tools":
                    raise  # one tool's own fault
                raise InvalidRequestError(
                    f"{asked.param} and tools cannot both be held: {error.message}",
                    param=asked.param,
                    code=error.code,
                ) from error
        if markers is None or self.grammars is None:
            return None  # no token tells that a call begins
        try:
            return await self._loosely(self.grammars, plan, None)
        except SchemaError as error:
            if any(tool.is_strict for tool in use.offered):
                raise
            logger.warning("calls of tools are not held to their syntax: %s", error.message)
            return None

    async def _loosely(
        self, known: Grammars, plan: TurnPlan, answer: GrammarSpec | None
    ) -> AnswerGrammar:
        """Return what an answer with or without calls has to be, by the syntax alone if need be."""
        use, markers = plan.tool_use, plan.markers
        gives_up = False
        while True:
            spec = calls_spec(
                use,
                call_marks(markers, known.marks),
                strict_by_default=plan.strict_by_default,
                gives_up=gives_up,
                answer=answer,
            )
            try:
                with naming_field_of(use):
                    if answer is not None or markers is None:
                        return await self._behind_thought(known, spec)
                    trigger = Trigger(markers.call_start)
                    whole = await known.prepare(spec, trigger, stop_ids=self.stop_ids)
                    return AnswerGrammar(whole=whole, spec=spec, openings=(trigger,))
            except SchemaError as error:
                is_strict = any(tool.is_strict for tool in use.offered)
                if gives_up or is_strict or not plan.strict_by_default:
                    raise
                logger.warning("calls of tools are not held to their schemas: %s", error.message)
                gives_up = True

    async def _behind_thought(self, known: Grammars, spec: GrammarSpec) -> AnswerGrammar:
        """Let a thought go before a grammar where the prompt has begun one, or asks for one."""
        thoughts: list[Opening] = []
        if self.plan is not None and self.plan.markers is not None:
            markers = self.plan.markers
            if self.plan.is_in_thought(self.prompt_ids):
                thoughts.append(Thought(markers.thought_end, None))
            elif self.plan.thinks:
                thoughts.append(Thought(markers.thought_end, markers.thought_start))
        whole = await known.prepare(spec, *thoughts, stop_ids=self.stop_ids)
        return AnswerGrammar(whole=whole, spec=spec)


@contextmanager
def naming_field_of(use: ToolUse) -> Iterator[None]:
    """Let errors of a tool's schema name the field that it came in."""
    try:
        yield
    except SchemaError as error:
        index = (error.path or "/").split("/")[1]  # as guided.calls names a tool's place
        if index.isdecimal():
            error.param = use.offered[int(index)].path
        else:
            error.param = "tool_choice" if use.must_call else "tools"
        raise


def guide(
    requests: Sequence[GenerationRequest],
    grammar: Grammar,
    model_end_ids: frozenset[int],
    *,
    ensures_complete: bool,
) -> list[GenerationRequest]:
    """Give planned sequences a grammar.

    Raises:
        InvalidRequestError: the budget does not hold the shortest complete text.
    """
    if ensures_complete:
        _check_budget(requests, grammar)
    guidances = {
        ids: guidance(grammar, ids, model_end_ids, ensures_complete=ensures_complete)
        for ids in {request.sampling.stop_token_ids for request in requests}
    }
    return [
        replace(request, guidance=guidances[request.sampling.stop_token_ids])
        for request in requests
    ]


def guidance(
    grammar: Grammar,
    end_ids: frozenset[int],
    model_end_ids: frozenset[int],
    *,
    ensures_complete: bool,
) -> Guidance:
    """Return how a grammar guides what ends with some ids."""
    # What ignores all ends still has to be told that the text is over.
    return Guidance(
        grammar=grammar, end_ids=end_ids or model_end_ids, ensures_complete=ensures_complete
    )


def _check_budget(requests: Sequence[GenerationRequest], grammar: Grammar) -> None:
    if grammar.image is None or grammar.min_tokens is None:
        raise InvalidRequestError(
            "ensure_complete is not supported for a grammar that runs on the host: one that"
            " recurs, or is too large for the device.",
            param="ensure_complete",
        )
    max_tokens = min(request.sampling.max_tokens for request in requests)
    if max_tokens < grammar.min_tokens:
        raise InvalidRequestError(
            f"ensure_complete: the shortest text and its end take {grammar.min_tokens} tokens;"
            f" this answer may have {max_tokens}.",
            param="ensure_complete",
        )
