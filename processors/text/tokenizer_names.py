"""Methods and attributes of a tokenizer with transformers' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...callers.errors import InputError, equals_one_of, short_repr


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask` of texts, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"an encoding has no {name!r}; it has {', '.join(self)}")
        return self[name]

    def to(self, device: Any) -> Encoding:
        """Return the tensors on a device."""
        return Encoding({name: value.to(device) for name, value in self.items()})


class TransformersNames:
    """Base of `Tokenizer`."""

    special_tokens: Mapping[str, str]
    specials: Mapping[str, int]
    vocab_size: int
    chat_template: str | None = None  # set by `LLM`

    padding_side = "right"

    def __call__(
        self: Any,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> Encoding:
        """Return the token ids of a text, or lists of them for a list of texts. Special tokens in a text are recognised.

        Args:
            padding: True or "longest" pads to the longest text, "max_length" to `max_length` tokens, on the `padding_side`.
            truncation: True cuts the end of texts to `max_length` tokens, including special tokens.
            return_tensors: "pt" or "np" for int64 tensors or arrays of two axes.

        Raises:
            InputError: any other value, texts of different lengths without padding, or padding without a pad token.
        """
        _check_choice("padding", padding, (False, True, "longest", "max_length", "do_not_pad"))
        _check_choice("truncation", truncation, (False, True, "longest_first", "only_first", "do_not_truncate"))
        _check_choice("return_tensors", return_tensors, (None, "pt", "np"))
        cuts, pads = truncation not in (False, "do_not_truncate"), padding not in (False, "do_not_pad")
        if (cuts or padding == "max_length") and (not isinstance(max_length, int) or max_length < 1):
            reason = f"<<param=>>{short_repr(max_length)} must be a number of tokens"
            raise InputError(reason, code="invalid_value", param="max_length")
        rows = [self.encode(string, add_special_tokens) for string in ([text] if isinstance(text, str) else text)]
        if cuts:
            most = max_length or 0
            after = min(most, len(self._around[1])) if add_special_tokens else 0
            rows = [[*row[: most - after], *row[len(row) - after :]] if len(row) > most else row for row in rows]
        masks = [[1] * len(row) for row in rows]
        if pads:
            if self.pad_token_id is None:
                raise InputError("the tokenizer has no pad token; leave padding out", param="padding")
            longest = max([max_length or 0 if padding == "max_length" else 0, *map(len, rows)])
            rows, masks = (
                [self._pad(row, longest, self.pad_token_id) for row in rows],
                [self._pad(m, longest, 0) for m in masks],
            )
        if return_tensors is None:
            alone = isinstance(text, str)
            return Encoding(input_ids=rows[0] if alone else rows, attention_mask=masks[0] if alone else masks)
        if len({len(row) for row in rows}) > 1:
            raise InputError("the texts have different numbers of tokens; give padding=True", param="return_tensors")
        return _as_tensors(Encoding(input_ids=rows, attention_mask=masks), return_tensors)

    def _pad(self, row: list[int], length: int, value: int) -> list[int]:
        rest = [value] * (length - len(row))
        return [*rest, *row] if self.padding_side == "left" else [*row, *rest]

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
        return_tensors: str | None = None,
        **variables: Any,
    ) -> Any:
        """Return the prompt of a conversation: token ids, with `return_dict` an Encoding, or its text without `tokenize`.

        Args:
            return_tensors: as when the tokenizer is called.

        Raises:
            InputError: there is no chat template, or it refuses the messages.
        """
        from .chat import render_chat

        _check_choice("return_tensors", return_tensors, (None, "pt", "np"))
        template = chat_template or self.chat_template
        if template is None:
            raise InputError("the checkpoint has no chat template; <<give_template>>", param="chat_template")
        options = {"tools": tools, "continue_final_message": continue_final_message, **variables}
        rendered = render_chat(conversation, template, self, add_generation_prompt, **options)
        if not tokenize:
            return rendered.text
        ids = self.encode_pieces(rendered.segments)
        encoding = Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        if return_tensors is not None:
            encoding = _as_tensors(Encoding({name: [row] for name, row in encoding.items()}), return_tensors)
        return encoding if return_dict else encoding.input_ids

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


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not equals_one_of(value, choices):
        raise InputError(
            f"<<param=>>{short_repr(value)} must be one of {', '.join(map(repr, choices))}", code="invalid_value", param=name
        )


def _as_tensors(rows: Encoding, kind: str) -> Encoding:
    """Return lists of rows as int64 tensors ("pt") or arrays ("np")."""
    import numpy as np

    arrays = {name: np.array(value, np.int64) for name, value in rows.items()}
    if kind == "np":
        return Encoding(arrays)
    import torch

    return Encoding({name: torch.from_numpy(array) for name, array in arrays.items()})
