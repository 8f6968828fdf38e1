"""`/v1/grammar/check`: what a request's grammar compiles to, and what it says of texts.

Event loop only; texts are judged on a worker thread.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import anyio.to_thread

from jaxserve.guided import tables as guided
from jaxserve.guided.checking import TextChecker, byte_vocabulary, described
from jaxserve.guided.triggered import Trigger, anything
from jaxserve.http.answer_parts import TurnPlan
from jaxserve.http.aside import limiter
from jaxserve.http.grammars import of_model
from jaxserve.http.guidance import AnswerGrammars
from jaxserve.http.served_model import ServedModel
from jaxserve.openai.requests import GrammarCheckRequest
from jaxserve.text.markers import control_marks
from jaxserve.types import Grammar


async def check_grammar(
    request: GrammarCheckRequest, model: ServedModel, *, strict_by_default: bool
) -> dict[str, object]:
    """Tell what answers to a request would be held to; raises as `AnswerGrammars.of_answer`."""
    param = "tools" if request.grammar is None else request.grammar.param
    grammars = of_model(model.grammars, param)
    plan = TurnPlan(
        model=model,
        tool_use=request.tool_use,
        reasoning_fields=(),
        strict_by_default=strict_by_default,
    )
    begun_s = time.perf_counter()
    made = await AnswerGrammars(grammars=grammars, plan=plan).of_answer(request.grammar)
    compile_s = time.perf_counter() - begun_s
    if made is None:
        report: dict[str, object] = {"path": None}
        checker = partial(TextChecker, anything(byte_vocabulary().size))
    else:
        compiled = await grammars.compile(made.spec)
        report = _described(made.whole, compiled) | {"compile_s": round(compile_s, 4)}
        spellings = {i: text for text, i in plan.markers.spellings.items()} if plan.markers else {}
        triggers = [spellings[o.token_id] for o in made.openings if isinstance(o, Trigger)]
        marks = control_marks(plan.markers, grammars.marks) if made.spec.kind == "calls" else {}
        # It has compiled for the model within its limits, and does so sooner for bytes.
        checker = partial(
            TextChecker.of,
            made.spec,
            compiled,
            marks,
            trigger=next(iter(triggers), None),
        )
    if request.texts:
        # In threads that no request for an answer waits for; shielded as in Grammars.prepare.
        judging = anyio.to_thread.run_sync(
            lambda: _judge(checker(), request.texts), limiter=limiter(is_foreign=True)
        )
        report["texts"] = await asyncio.shield(judging)
    return report


def _described(grammar: Grammar, compiled: guided.Grammar) -> dict[str, object]:
    report: dict[str, object] = {"path": "host" if grammar.image is None else "device"}
    report |= described(compiled)
    if grammar.host_reason is not None:
        report["reason"] = grammar.host_reason
    if grammar.min_tokens is not None:
        report["min_tokens"] = grammar.min_tokens
    return report


def _judge(checker: TextChecker, texts: Sequence[str]) -> list[dict[str, object]]:
    return [checker.judge(text.encode()).told() for text in texts]
