"""How models write their reasoning: a row for each format.

Sources: the chat templates of the published models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """A way to write reasoning.

    Args:
        begins, ends: markers around it.
        repeats: it may begin anywhere in the answer; otherwise only at the beginning.
        implicit: an answer begins within it, unless the prompt has ended it.
        answer_begins, answer_ends: markers around the text after it, which are left out. Without begin markers, the text
            begins where the reasoning ends.
        headers: markers before a message, which begins with the name of a function or with the marker of its kind.
        signs: texts of which a chat template with this format has all; without any, one of the markers is the sign.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    repeats: bool = False
    implicit: bool = False
    answer_begins: tuple[str, ...] = ()
    answer_ends: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.begins, *self.ends, *self.answer_begins, *self.answer_ends, *self.headers)

    def is_used_by(self, template: str) -> bool:
        """Return whether a chat template has the signs of the format."""
        if self.signs:
            return all(sign in template for sign in self.signs)
        return any(marker in template for marker in (*self.begins, *self.ends))

    def is_open(self, text: str) -> bool:
        """Return whether a text ends within the reasoning."""
        begin = max((text.rfind(marker) for marker in self.begins), default=-1)
        return begin >= 0 and begin > max(text.rfind(marker) for marker in self.ends)


_THINK, _THINK_END = ("<think>",), ("</think>",)


def _wrapped(tag: str) -> ReasoningFormat:
    """Return the format in which a tag is around the answer."""
    begin = f"<{tag}>"
    return ReasoningFormat(_THINK, _THINK_END, answer_begins=(begin,), answer_ends=(f"</{tag}>",), signs=("<think>", begin))


HARMONY = ReasoningFormat(("<|channel|>",), ("<|end|>",), repeats=True, signs=("<|channel|>", "<|message|>"))
"""Reasoning is in messages of their own, which `harmony.HarmonyReader` reads."""

FORMATS = {
    "harmony": HARMONY,
    "channel": ReasoningFormat(("<|channel>thought", "<|channel>"), ("<channel|>",), repeats=True),
    "start_thinking": ReasoningFormat(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        repeats=True,
        answer_begins=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        answer_ends=("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    "seed_think": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "longcat": ReasoningFormat(("<longcat_think>",), ("</longcat_think>",)),
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",)),
    "solar_open2": ReasoningFormat(("<|think:start|>",), ("<|think:end|>",)),
    "open_close": ReasoningFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        answer_begins=("<|open|>response<|sep|>",),
        answer_ends=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "typed_blocks": ReasoningFormat(
        ("<|content_thinking|>",),
        ("<|end_message|>", "<|content_model_end_sampling|>"),
        repeats=True,
        answer_begins=("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>"),
        answer_ends=("<|end_message|>", "<|content_model_end_sampling|>"),
        headers=("<|message_model|>",),
        signs=("<|content_thinking|>",),
    ),
    "apertus": ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",), repeats=True),
    "kimi_vl": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "bracketed": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "thought_process": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "apriel": ReasoningFormat(
        ("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), answer_ends=("[END FINAL RESPONSE]",)
    ),
    "think_answer": _wrapped("answer"),
    "think_response": _wrapped("response"),
    "think": ReasoningFormat(_THINK, _THINK_END),
    "thought": ReasoningFormat(("<thought>",), ("</thought>",)),
    "always_think": ReasoningFormat(_THINK, _THINK_END, implicit=True),
}
"""Formats by name. Where a template has signs of several, the first one counts."""

_SIGNS = (
    *("enable_thinking", "thinking", "reasoning_content", "reasoning_effort", "message.reasoning", "['reasoning']"),
    *("<think", "<|think", "thought", "reasoning_text"),
)


def find_reasoning(template: str) -> ReasoningFormat | None:
    """Return the format of which a chat template has a sign."""
    return next((row for row in FORMATS.values() if row.is_used_by(template)), None)


def mentions_reasoning(template: str) -> bool:
    """Return whether a chat template shows that the model reasons before it answers."""
    return any(sign in template for sign in _SIGNS)
