"""The model as the HTTP layer sees it: its name, its text side and its limits."""

from dataclasses import dataclass

from jaxserve.http.grammars import Grammars
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded model.

    Attributes:
        id: the name that requests use; may hold slashes.
        vocab_size: ids that the model knows, [0, vocab_size); a tokenizer may know more.
        max_model_len: most tokens of prompt and output together.
        end_token_ids: ids that end a sequence.
        placeholder_token_ids: media placeholders, refused in prompts.
        defaults: the checkpoint's own way of sampling.
        created: Unix time in seconds, for the models endpoints.
        grammars: compiles what answers have to be; None: nothing can be asked of them.
    """

    id: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    vocab_size: int
    max_model_len: int
    end_token_ids: frozenset[int]
    placeholder_token_ids: frozenset[int]
    created: int
    defaults: SamplingDefaults
    grammars: Grammars | None = None
