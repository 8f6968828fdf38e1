"""What an answer must be, worked out apart from the server.

The model's logits are the oracle's (a full pass in numpy), options are applied to them in numpy,
and text is the `tokenizers` library's. One full pass over prompt and answer gives the logits of all
of the answer's tokens, so that an answer is checked, not generated again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers

from jaxserve.models.registry import load_config
from tests import oracle
from tests.checkpoints import END_TOKEN_IDS, read_tensors

Floats = npt.NDArray[np.float32]

BANNED = np.float32(-1e30)
TOLERANCE = 2e-3
"""Of a logit or log-probability in float32: the sums are formed in other orders."""

BOS = 2

TURN_MARKERS = frozenset({48, 49, 50, 52, 100, 101})
"""Of thoughts and calls, which split a chat's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """How a choice must end."""

    text: str
    finish_reason: str
    stop_reason: str | int | None


class Expected:
    """Checks answers of one checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._config = load_config(checkpoint)
        self._tensors = read_tensors(checkpoint)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def spell(self, token_id: int) -> str:
        """Return a token as log-probabilities name it."""
        piece = str(self._tokenizer.id_to_token(token_id))
        if piece.startswith("<0x"):
            return f"bytes:\\x{piece[3:5].lower()}"
        return piece.replace("\u2581", " ")

    def logits(self, ids: Sequence[int]) -> Floats:
        """Return [T, V]: row t is of the token behind ids[: t + 1]."""
        return oracle.logits(self._tensors, self._config, list(ids))

    # Which tokens may be chosen

    def check_tokens(
        self, prompt: Sequence[int], ids: Sequence[int], options: dict[str, Any]
    ) -> None:
        """Check that each token is the likeliest, or one that sampling keeps, once adjusted."""
        logits = self.logits([*prompt, *ids])[len(prompt) - 1 :]
        for i, token_id in enumerate(ids):
            adjusted = self._adjust(logits[i], prompt, ids[:i], options)
            if options.get("temperature") == 0:
                assert adjusted[token_id] >= adjusted.max() - TOLERANCE, (i, token_id)
            else:
                assert _is_kept(adjusted, token_id, options), (i, token_id)

    def _adjust(
        self, logits: Floats, prompt: Sequence[int], before: Sequence[int], options: dict[str, Any]
    ) -> Floats:
        z = logits.copy()
        if "allowed_token_ids" in options:
            barred = np.ones(len(z), bool)
            barred[options["allowed_token_ids"]] = False
            z[barred] = BANNED
        for word in options.get("bad_words", ()):
            for spelling in (word, f" {word.lstrip()}"):
                *lead, last = self.encode(spelling)
                if not lead or list(before[-len(lead) :]) == lead:
                    z[last] = BANNED
        if len(before) < options.get("min_tokens", 0):
            z[sorted(end_ids(options))] = BANNED
        for key, bias in options.get("logit_bias", {}).items():
            z[int(key)] += np.float32(bias)
        seen = sorted({*prompt, *before})
        factor = np.float32(options.get("repetition_penalty", 1))
        z[seen] = np.where(z[seen] > 0, z[seen] / factor, z[seen] * factor)
        count = np.bincount(list(before), minlength=len(z)).astype(np.float32)
        z -= np.float32(options.get("frequency_penalty", 0)) * count
        z -= np.float32(options.get("presence_penalty", 0)) * (count > 0)
        return z

    # What they read like

    def text(self, ids: Sequence[int], options: dict[str, Any]) -> Text:
        """Return the text of an answer's tokens, and why it ended."""
        skips = bool(options.get("skip_special_tokens", True))
        includes = bool(options.get("include_stop_str_in_output", False))
        ends = end_ids(options)
        ended = bool(ids) and ids[-1] in ends
        assert not ends.intersection(ids[:-1])
        shown = ids[:-1] if ended and not includes else ids
        text = self.decode(shown, skip_special_tokens=skips)
        searched = len(self.decode(ids[: options.get("min_tokens", 0)], skip_special_tokens=skips))
        stop = options.get("stop")
        if stop is not None and (at := text.find(stop, searched)) >= 0:
            return Text(
                text=text[: at + len(stop) * includes], finish_reason="stop", stop_reason=stop
            )
        if ended:
            own = ids[-1] in options.get("stop_token_ids", ()) and ids[-1] not in END_TOKEN_IDS
            return Text(text=text, finish_reason="stop", stop_reason=ids[-1] if own else None)
        assert len(ids) == options["max_tokens"]
        return Text(text=text, finish_reason="length", stop_reason=None)

    # How likely they were

    def check_chat_logprobs(
        self, entries: list[Any], ids: Sequence[int], scores: Floats, num_top: int, *, as_ids: bool
    ) -> None:
        """Check a chat's; scores [T, V] are log-probabilities of each position."""
        assert [entry["token"] for entry in entries] == [self._name(i, as_ids) for i in ids]
        for entry, token_id, score in zip(entries, ids, scores, strict=True):
            assert entry["logprob"] == near(score[token_id])
            top = [each["logprob"] for each in entry["top_logprobs"]]
            assert top == near(np.sort(score)[::-1][:num_top])

    def check_completion_logprobs(
        self, told: Any, ids: Sequence[int], scores: Floats, num_top: int, *, as_ids: bool
    ) -> None:
        """Check a completion's; one more id than scores: the first one follows nothing."""
        names = [self._name(token_id, as_ids) for token_id in ids]
        assert told["tokens"] == names
        assert told["text_offset"] == sorted(told["text_offset"])
        values, tops = told["token_logprobs"], told["top_logprobs"]
        if len(ids) > len(scores):
            assert values.pop(0) is None
            assert tops.pop(0) is None
            ids, names = ids[1:], names[1:]
        assert values == near([score[i] for i, score in zip(ids, scores, strict=True)])
        for top, name, token_id, score in zip(tops, names, ids, scores, strict=True):
            assert top[name] == near(score[token_id])
            # By name, which several tokens may share.
            least = np.sort(score)[::-1][num_top - 1] if num_top else score[token_id]
            assert all(value >= min(least, score[token_id]) - TOLERANCE for value in top.values())
            assert len(top) <= num_top + 1
            best = self._name(int(score.argmax()), as_ids)
            assert num_top == 0 or best in top

    def check_prompt_logprobs(self, told: list[Any], prompt: Sequence[int], num_top: int) -> None:
        """Check a prompt's own log-probabilities."""
        scores = log_softmax(self.logits(prompt))
        assert told[0] is None
        for entry, token_id, score in zip(told[1:], prompt[1:], scores[:-1], strict=True):
            own = entry[str(token_id)]
            assert own["logprob"] == near(score[token_id])
            assert own["decoded_token"] == self.spell(token_id)
            least = (score > score[token_id] + TOLERANCE).sum() + 1
            assert least <= own["rank"] <= (score > score[token_id] - TOLERANCE).sum() + 1
            by_rank = sorted(entry.values(), key=lambda each: int(each["rank"]))
            top = [each["logprob"] for each in by_rank[:num_top]]
            assert top == near(np.sort(score)[::-1][:num_top])
            assert num_top <= len(entry) <= num_top + 1

    def _name(self, token_id: int, as_ids: bool) -> str:
        return f"token_id:{token_id}" if as_ids else self.spell(token_id)


def end_ids(options: dict[str, Any]) -> set[int]:
    """Return the ids that end an answer."""
    own = set(options.get("stop_token_ids", ()))
    return own if options.get("ignore_eos") else own | set(END_TOKEN_IDS)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    scores: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return scores


def near(value: Any) -> Any:
    return pytest.approx(value if np.isscalar(value) else list(value), abs=TOLERANCE)


def _is_kept(adjusted: Floats, token_id: int, options: dict[str, Any]) -> bool:
    """Say whether min-p, top-k and top-p, in this order, may keep a token."""
    p = np.exp(log_softmax(adjusted / np.float32(options.get("temperature", 1))))
    p[p < options.get("min_p", 0) * p.max() * (1 - TOLERANCE)] = 0
    if p[token_id] == 0:
        return False
    larger = np.sort(p[p > p[token_id] * (1 + TOLERANCE)])[::-1]
    kept = np.sort(p)[::-1][: options.get("top_k") or None]
    is_in_k = len(larger) < len(kept)
    return bool(is_in_k and larger.sum() < options.get("top_p", 1) * kept.sum() + TOLERANCE)
