"""Text to token ids and back to pieces, by a checkpoint's tokenizer.json.

It decides by itself when a BOS goes in front, whatever the file's post-processor says, where a
control token may come from, and knows what each id stands for; joining that to a text is the
detokenizer's. Immutable once loaded; encoding releases the GIL, so that a worker thread can take a
long text.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.errors import ModelLoadError
from jaxserve.text.tokenizer_config import TokenizerConfig

_FILE_NAME = "tokenizer.json"
# Control by their spelling, also where a file says that they are ordinary.
_CONTROL = re.compile(r"<\|.+|.+\|>|<(?:start|end)_of_\w+>|<mask>|\[multimodal\]")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The decoder that the pieces below are true for: Gemma's.
_SPACE = "\u2581"
_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


class Tokenizer:
    """A Gemma tokenizer.

    Attributes:
        bos_id: the token that opens every prompt.
        special_ids: tokens that are control, not text.
        controls: matches any one's spelling.
        control_beginnings: what such a spelling can begin with, short of all of it.
        pieces: by id, the text that a token stands for, or the byte, where it stands for one.
        vocab_size: one more than the largest id.
        longest_piece: characters of a text that become one token, at most; None: there is no bound.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, bos_token: str) -> None:
        """Wrap a loaded tokenizer, which is this object's from now on.

        Raises:
            ModelLoadError: it decodes otherwise than Gemma's do, or has no such BOS token.
        """
        # A file may ask for either; a prompt is never cut or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
        if decoder != _DECODER:
            raise ModelLoadError(
                f"{_FILE_NAME}: only Gemma's decoder is served, not {json.dumps(decoder)}"
            )
        self._tokenizer = tokenizer
        _make_special(tokenizer)
        # What of a text is control is decided here: the library would take it from data as well.
        tokenizer.encode_special_tokens = True
        bos_id = self.token_id(bos_token)
        if bos_id is None:
            raise ModelLoadError(
                f"{_FILE_NAME} has no token {bos_token!r}, which is to open every prompt"
            )
        self.bos_id = bos_id
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control_ids = {added[token_id].content: token_id for token_id in self.special_ids}
        # The longest first, as the library chooses.
        spellings = sorted(self._control_ids, key=len, reverse=True)
        self.controls = re.compile("|".join(map(re.escape, spellings)))
        self.control_beginnings = frozenset(
            spelling[:length] for spelling in spellings for length in range(1, len(spelling))
        )
        self._around_controls = re.compile(f"({self.controls.pattern})")
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        # An added token's spelling goes before the vocabulary's, as in the library's decoding.
        self.pieces: Mapping[int, str | int] = {
            token_id: _piece(token) for token, token_id in vocabulary.items()
        } | {token_id: _piece(token.content) for token_id, token in added.items()}
        self.vocab_size = max(self.pieces) + 1
        longest = max(map(len, (*vocabulary, *(token.content for token in added.values()))))
        self.longest_piece = longest if self._keeps_characters() else None

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a folder's tokenizer.json and, for the BOS token's spelling, tokenizer_config.json.

        Raises:
            ModelLoadError: the file is missing or damaged, or is not a tokenizer of Gemma's kind.
        """
        path = folder / _FILE_NAME
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        return cls(tokenizer, bos_token=TokenizerConfig.load(folder).special_tokens["bos_token"])

    def encode(
        self, text: str, *, add_special_tokens: bool, stand_ins: Mapping[int, str] | None = None
    ) -> list[int]:
        """Return the text's ids. Special tokens spelled out in the text become their ids.

        With `add_special_tokens` a BOS is put in front unless the ids begin with one already.
        `stand_ins` maps characters, by their code, to what they stand for: what comes of that is
        text, however it is spelled.
        """
        ids: list[int] = []
        for i, piece in enumerate(self._around_controls.split(text)):
            if i % 2:
                ids.append(self._control_ids[piece])
            elif piece:
                if stand_ins:
                    piece = piece.translate(stand_ins)
                # A batch of one: `encode` keeps the interpreter lock, and a long text would stop
                # streams. A batch of all would take every core.
                batch = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
                ids += batch[0].ids
        if add_special_tokens and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _keeps_characters(self) -> bool:
        """Tell whether each character of a text stays one until it is in a piece of its own length.

        Normalizers may drop some, unknown ones may be fused to one token, and added tokens may
        take the blanks around them.
        """
        tokenizer, model = self._tokenizer, self._tokenizer.model
        known = set(self.pieces.values())
        has_all_bytes = all(
            byte in known or (byte < 0x80 and chr(byte) in known) for byte in range(256)
        )
        return (
            isinstance(model, tokenizers.models.BPE)
            and model.byte_fallback
            and has_all_bytes
            and all(map(_keeps_length, _steps(tokenizer.normalizer)))
            and all(map(_drops_nothing, _steps(tokenizer.pre_tokenizer)))
            and not any(
                token.lstrip or token.rstrip
                for token in tokenizer.get_added_tokens_decoder().values()
            )
        )

    def token_id(self, token: str) -> int | None:
        """Return the id of an exact spelling; None, never the unknown id, where there is none."""
        return self._tokenizer.token_to_id(token)

    def piece(self, token_id: int) -> str | int:
        """Return the text that a token stands for, or its byte; "" outside of the vocabulary."""
        return self.pieces.get(token_id, "")

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token's spelling in the vocabulary; None outside of it."""
        return self._tokenizer.id_to_token(token_id)


def _make_special(tokenizer: tokenizers.Tokenizer) -> None:
    """Let control tokens be special, whatever the file says.

    Raises:
        ModelLoadError: one takes white space from the text around it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    ordinary = [t.content for t in added if not t.special and _CONTROL.fullmatch(t.content)]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(content, special=True, normalized=False) for content in ordinary]
    )
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and (token.lstrip or token.rstrip or token.single_word):
            raise ModelLoadError(
                f"{_FILE_NAME}: the control token {token.content!r} strips text or wants a word's"
                " borders, which none of Gemma's does"
            )


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return what a normalizer or a pre-tokenizer is made of, as tokenizer.json has it."""
    if part is None:
        return []
    config: dict[str, Any] = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = config.get("normalizers", config.get("pretokenizers", [config]))
    return steps


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    kind, pattern = normalizer["type"], normalizer.get("pattern", {}).get("String", "")
    is_kept = kind == "Replace" and 0 < len(pattern) <= len(normalizer["content"])
    return bool(is_kept or kind == "Prepend")


def _drops_nothing(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind, behavior = pre_tokenizer["type"], pre_tokenizer.get("behavior")
    return bool(kind == "Split" and behavior != "Removed")


def _piece(token: str) -> str | int:
    byte = _BYTE_PIECE.fullmatch(token)
    return int(byte[1], 16) if byte else token.replace(_SPACE, " ")
