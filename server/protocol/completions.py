"""The body of /v1/completions."""

from __future__ import annotations

from typing import ClassVar

from ...callers.errors import InputError
from .body import Many, Refused
from .sampling import OWNER, SamplingBody

MAX_PROMPTS = 2048


class CompletionBody(SamplingBody):
    refused: ClassVar[Refused] = {
        **OWNER,
        "add_special_tokens": ((True,), "give the token ids of /tokenize with add_special_tokens=false"),
        "suffix": (("",), "there is no infilling; write the model's own tokens for it into the prompt"),
    }
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list.

        Raises:
            InputError: there is none, or there are too many.
        """
        prompt = self.prompt
        several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        listed: list[str | list[int]] = list(prompt) if several else [prompt]  # type: ignore[arg-type, list-item]
        if not 1 <= len(listed) <= MAX_PROMPTS:
            raise InputError(f"prompt has {len(listed)} entries; give from 1 to {MAX_PROMPTS}", param="prompt")
        return listed
