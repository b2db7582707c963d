"""Reads answers in OpenAI's harmony format, which gpt-oss writes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .call_syntax import NO_CALLS, parse_arguments
from .markers import Scanner, markers_of
from .pieces import Call, Content, Piece, Reasoning
from .values import Functions

_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_HEADER = re.compile(r"\s*(?:(?:analysis|commentary|final|json)(?![a-z])|\w*)\s*(?:to=\S*\s*)?")  # without `<|message|>`


class HarmonyReader:
    """Reads the messages of OpenAI's harmony format (https://cookbook.openai.com/articles/openai-harmony).

    A message is `<|start|>ROLE<|channel|>CHANNEL<|message|>TEXT` and one of `<|end|>`, `<|return|>` and `<|call|>`; the prompt
    has the first role. A recipient (`to=functions.NAME`) stands after the role or the channel. Messages to functions are calls,
    those in the channel "analysis" are reasoning, and all others, preambles among them, are text.

    Args:
        prompt: it ends within a message.
        splits_reasoning: False returns reasoning as text.
        dropped_tokens: special tokens to leave out of the text.
        max_calls: maximum number of calls; further ones are left out.
    """

    MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")

    def __init__(
        self,
        prompt: str,
        functions: Functions,
        splits_reasoning: bool = True,
        dropped_tokens: Sequence[str] = (),
        max_calls: int | None = None,
    ) -> None:
        self._functions, self._splits_reasoning, self._max_calls, self._num_calls = functions, splits_reasoning, max_calls, 0
        self.markers = markers_of(self.MARKERS, dropped_tokens)
        self.pieces: list[Piece] = []
        self._seen: set[type[Piece]] = set()
        self._header: list[str] = []
        self._body: list[str] | None = None  # of a call
        self._kind: type[Piece] | None = None  # of the message's body; None in its header
        self._is_new = False  # nothing of the body has been returned
        self._name = self._channel = self._section = ""
        self._read_prompt(prompt)

    @property
    def in_reasoning(self) -> bool:
        return self._kind is Reasoning or (self._kind is None and self._channel == "analysis")

    def on_text(self, text: str) -> None:
        if self._kind is None:
            self._add_to_header(text)
        elif self._body is not None:
            self._body.append(text)
        else:
            self._write(text)

    def on_marker(self, marker: str) -> None:
        if marker not in self.MARKERS:
            return
        if marker == "<|message|>" and self._kind is None:
            self._begin_body()
        elif marker in ("<|channel|>", "<|constrain|>") and self._kind is None:
            self._read_section()
            self._section = marker
        elif marker in ("<|start|>", "<|end|>", "<|return|>", "<|call|>"):
            self._end_body()
            self._section = marker if marker == "<|start|>" else ""
        elif self._kind is not None:  # a marker of headers within a body
            self.on_text(marker)

    def finish(self) -> None:
        self._end_body()

    def _read_prompt(self, prompt: str) -> None:
        """Read the message that the prompt begins: its header, and also a part of its text if the model continues one."""
        start = prompt.rfind("<|start|>")
        if start < 0:
            return
        Scanner().scan(prompt[start:], self, is_last=True)
        self.pieces.clear()
        self._seen.clear()
        if self._section == "<|start|>":
            self._read_section()
            self._section = ""

    def _read_section(self) -> None:
        """Take the text since the last marker of the header."""
        text = "".join(self._header)
        self._header = []
        recipient = _RECIPIENT.search(text)
        if recipient and self._section != "<|constrain|>":
            self._name = recipient[1]
        if self._section == "<|channel|>":
            self._channel = (text.split() or [""])[0]

    def _add_to_header(self, text: str) -> None:
        """Keep text of a header. An answer that begins with something else is text."""
        if not self._header:
            text = text.lstrip()
        if text:
            self._header.append(text)
        if self._section or not text:
            return
        start = "".join(self._header)  # short, because it is a beginning of "to="
        if start.startswith("to="):
            self._section = "to="
        elif not "to=".startswith(start):
            self._kind, self._is_new, self._header = Content, True, []
            self._write(start)

    def _begin_body(self) -> None:
        self._read_section()
        is_call = self._name.startswith("functions.") and bool(self._functions)
        reasons = self._channel == "analysis" and self._splits_reasoning
        self._kind, self._is_new = Call if is_call else Reasoning if reasons else Content, True
        self._body = [] if is_call else None

    def _begin_body_without_mark(self) -> None:
        """Begin the body after the channel's name and the recipient, if a message has text there and no `<|message|>`."""
        header = "".join(self._header)
        match = _HEADER.match(header)
        assert match is not None  # every part of it may be missing
        if body := header[match.end() :]:
            self._header = [match[0]]
            self._begin_body()
            self.on_text(body)

    def _write(self, text: str) -> None:
        kind = self._kind
        assert kind is Content or kind is Reasoning
        if self._is_new and text:
            text = "\n" * (kind in self._seen) + text
            self._is_new = False
            self._seen.add(kind)
        if text:
            self.pieces.append(kind(text))

    def _end_body(self) -> None:
        if self._kind is None and self._section in ("<|channel|>", "<|constrain|>"):
            self._begin_body_without_mark()
        if self._body is not None:
            self._end_call("".join(self._body))
        elif self._kind is None and self._section in ("", "to=") and (text := "".join(self._header)).strip():
            self._kind, self._is_new = Content, True
            self._write(text)
        self._header, self._body, self._kind = [], None, None
        self._name = self._channel = ""

    def _end_call(self, text: str) -> None:
        try:
            call = parse_arguments(self._name, text, self._functions)
        except NO_CALLS:
            self._kind, self._is_new = Content, True
            self._write(text)
            return
        if self._max_calls is None or self._num_calls < self._max_calls:
            self.pieces.append(call)
        self._num_calls += 1
