"""The text of prompts: it is tokenised, cut, and measured before that, and each placeholder has a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...callers.errors import InputError
from ...mm.truncation import Truncation
from ...processors.interface import ProcessingInfo, SupportsWholeText
from ...processors.retokenize import Pieces, PromptText
from ...processors.text.tokenizer import Tokenizer
from ..param_checks import read_truncation
from .prompts import Prompt


@dataclass(frozen=True)
class PromptOptions:
    """Options of an InputProcessor.

    Args:
        max_template_seconds: time limit of a chat template.
        hidden_size: width of `prompt_embeds`; None refuses them.
        generates: False for models without a head, whose prompts may have `max_model_len` tokens.
        default_max_tokens: number of tokens for `truncate_prompt_tokens=-1`; None: the longest prompt's.
    """

    max_template_seconds: float = 10.0
    hidden_size: int | None = None
    generates: bool = True
    default_max_tokens: int | None = None


class PromptTokenizer:
    """Turns the text of prompts into token ids with one placeholder per item. Thread-safe.

    Args:
        max_model_len: maximum number of tokens of prompt and answer together.

    Attributes:
        max_prompt: maximum number of tokens of a prompt.
        whole_text: the model's interface, if its processor tokenises the whole text after the expansion of placeholders.
    """

    def __init__(self, info: ProcessingInfo, tokenizer: Tokenizer, max_model_len: int, options: PromptOptions) -> None:
        self.whole_text = info if isinstance(info, SupportsWholeText) else None
        if self.whole_text is not None and self.whole_text.plain_tokens and tokenizer is not None:
            tokenizer.reset_special_tokens(self.whole_text.plain_tokens)
        self._info, self._tokenizer, self._max_model_len = info, tokenizer, max_model_len
        self.max_prompt = max_model_len - options.generates
        self._default_max_tokens = min(options.default_max_tokens or self.max_prompt, self.max_prompt)
        needs_item = info.cross_token is None and any(name not in info.placeholder_ids for name in info.modalities)
        # with special tokens, an encoder-decoder model's tokenizer would write a complete answer, EOS included
        self._adds_special_tokens = info.adds_special_tokens and not needs_item

    def tokenize(self, prompt: Prompt, special: bool = True, encoder: bool = False) -> tuple[Sequence[int], bool]:
        """Return the token ids of a prompt, and whether it was cut; placeholders are not expanded.

        `encoder`: it is the text that an encoder reads, which has the tokenizer's special tokens.
        """
        if prompt.token_ids is not None:
            return self.truncate(prompt, prompt.token_ids)
        text = prompt.text or ""
        if special and self.whole_text is not None:  # not for the continuation of a prompt
            text = self.whole_text.preprocess_text(text, self._tokenizer.special_tokens.get("bos_token"))
        special = special and (self._adds_special_tokens or encoder)
        cut = self.truncation(prompt.truncate_prompt_tokens, prompt.truncation_side)
        if cut is not None:
            _check_has_no_media(prompt)
            return self._tokenizer.encode_truncated(text, cut, special)
        self.check_text_length(text)
        return self._tokenizer.encode(text, add_special_tokens=special), False

    def truncate(self, prompt: Prompt, ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """Return the ids that `truncate_prompt_tokens` keeps, and whether these are fewer."""
        cut = self.truncation(prompt.truncate_prompt_tokens, prompt.truncation_side)
        if cut is None or len(ids) <= cut.max_tokens:
            return ids, False
        _check_has_no_media(prompt)
        return cut.apply(ids), True

    def truncation(self, tokens: int | None, side: str | None) -> Truncation | None:
        """Return how `truncate_prompt_tokens` and `truncation_side` cut a prompt. Raise InputError for too many tokens."""
        tokens, side = read_truncation(tokens, side)
        if tokens is None:
            return None
        if tokens > self.max_prompt:
            reason = f"<<param=>>{tokens} is above {self.max_prompt}, the tokens of this model's longest prompt"
            raise InputError(f"{reason}; lower it, or give -1", param="truncate_prompt_tokens")
        return Truncation(self._default_max_tokens if tokens < 0 else tokens, side or self._tokenizer.truncation_side)

    def prompt_text(self, prompt: Prompt, special: bool = True) -> PromptText | None:
        """Return the text that `tokenize` reads; None for a prompt of token ids."""
        added = special and self._adds_special_tokens

        def encode(pieces: Pieces) -> Sequence[int]:
            return self._tokenizer.encode("".join(text for text, _ in pieces), add_special_tokens=added)

        return None if prompt.token_ids is not None else PromptText(((prompt.text or "", True),), encode)

    def rewritten(self, text: PromptText | None, before: Sequence[int], after: Sequence[int]) -> PromptText | None:
        """Return the text of a prompt: with the token before it, or marked, if `preprocess_prompt` changed more than items."""
        changed = self.whole_text is not None and self.whole_text.rewrites_prompts and list(before) != list(after)
        if text is None or not changed:
            return text
        return replace(text, first=(after[0],)) if list(after[1:]) == list(before) else replace(text, rewritten=True)

    def encode_segments(self, segments: Pieces, placeholders: Mapping[str, int] = {}) -> Sequence[int]:
        """Return the ids of a rendered chat."""
        ids = self._tokenizer.encode_pieces(segments, placeholders)
        return self._tokenizer.add_special_tokens(ids) if self._adds_special_tokens else ids

    def check_text_length(self, text: str) -> None:
        """Refuse a text that is too long before time and memory are spent on tokenising it."""
        count = self._tokenizer.min_tokens(text)
        if count > self.max_prompt:
            reason = f"the prompt has at least {count} tokens, but <<max_model_len>> is {self._max_model_len}; shorten it"
            raise InputError(reason, code="too_long", limit=self.max_prompt, value=count)

    @property
    def placeholders(self) -> dict[str, str]:
        """The text of each modality's placeholder."""
        return {name: self.text_of(token) for name, token in self._info.placeholder_ids.items()}

    @cached_property
    def placeholder_texts(self) -> dict[str, tuple[str, ...]]:
        """All texts that stand for an item of each modality."""
        texts: dict[str, tuple[str, ...]] = {}
        for name, token in self._info.placeholder_ids.items():
            texts_of_token = [text for text, number in self._info.text_placeholders.items() if number == token]
            decoded = self._tokenizer.decode([token], skip_special_tokens=False)
            written = self._info.placeholder_texts.get(name) if isinstance(self._info, SupportsWholeText) else None
            texts[name] = (*texts_of_token, *filter(None, (decoded, written)))
        return texts

    def text_of(self, token: int) -> str:
        """Return the text of a token for messages: that which prompts spell for it, or its own."""
        spelled = next((text for text, number in self._info.text_placeholders.items() if number == token), "")
        text = spelled or self._tokenizer.decode([token], skip_special_tokens=False)
        return text or f"token {token} (the tokenizer has no text for it: the prompt must be token ids)"


def _check_has_no_media(prompt: Prompt) -> None:
    if prompt.media or prompt.uuids:
        reason = '<<param>> is for texts, and this prompt has media; leave it out, or give fit="context"'
        raise InputError(reason, param="truncate_prompt_tokens")
