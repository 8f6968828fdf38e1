"""What the cache has of a prompt, told so that a person sees why it does not have more."""

from collections.abc import Sequence

from jaxserve.http.generation import Engine
from jaxserve.http.prompts import decode
from jaxserve.http.served_model import ServedModel

_MAX_ALTERNATIVES = 20
_CONTEXT_TOKENS = 32


async def explain(
    ids: tuple[int, ...], salt: str | None, engine: Engine, model: ServedModel
) -> dict[str, object]:
    """Compare a prompt with what is cached; nothing is run."""
    num_matched, following = await engine.explain(salt, ids)
    difference = None
    if num_matched < len(ids):
        before = ids[max(num_matched - _CONTEXT_TOKENS, 0) : num_matched]
        difference = {
            "position": num_matched,
            **await _token(ids[num_matched], model),
            "context_before": await _text(before, model),
            "cached_alternatives": [
                await _token(token_id, model) for token_id in following[:_MAX_ALTERNATIVES]
            ],
        }
    return {
        "prompt_tokens": len(ids),
        "matched_tokens": num_matched,
        "first_difference": difference,
    }


async def _token(token_id: int, model: ServedModel) -> dict[str, object]:
    return {"token_id": token_id, "text": await _text((token_id,), model)}


async def _text(ids: Sequence[int], model: ServedModel) -> str:
    return await decode(ids, model, skip_special_tokens=False)
