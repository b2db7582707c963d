"""Methods and attributes of a tokenizer with transformers' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...mm.errors import InputError


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask` of texts, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"an encoding has no {name!r}; it has {', '.join(self)}")
        return self[name]


class TransformersNames:
    """Base of `Tokenizer`."""

    special_tokens: Mapping[str, str]
    specials: Mapping[str, int]
    vocab_size: int
    chat_template: str | None = None  # set by `LLM`

    def __call__(self: Any, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """Return the token ids of a text, or lists of them for a list of texts. Special tokens in a text are recognised."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        ids = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=ids, attention_mask=[[1] * len(one) for one in ids])

    def __len__(self) -> int:
        return self.vocab_size

    def apply_chat_template(
        self: Any,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Return the prompt of a conversation: token ids, with `return_dict` an Encoding, or its text without `tokenize`.

        Raises:
            InputError: there is no chat template, or it refuses the messages.
        """
        from .chat import render_chat

        template = chat_template or self.chat_template
        if template is None:
            raise InputError("the checkpoint has no chat template; pass chat_template=", param="chat_template")
        options = {"tools": tools, "continue_final_message": continue_final_message, **variables}
        rendered = render_chat(conversation, template, self, add_generation_prompt, **options)
        if not tokenize:
            return rendered.text
        ids = self.encode_pieces(rendered.segments)
        return Encoding(input_ids=ids, attention_mask=[1] * len(ids)) if return_dict else ids

    def batch_decode(self: Any, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_tokens_to_ids(self: Any, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of several; None for an unknown one."""
        return self.token_to_id(tokens) if isinstance(tokens, str) else [self.token_to_id(token) for token in tokens]

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.specials)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id(self.pad_token)

    @property
    def unk_token_id(self) -> int | None:
        return self._id(self.unk_token)

    def _id(self: Any, token: str | None) -> int | None:
        return None if token is None else self.token_to_id(token)
