"""Writes an answer as blocks that follow each other: text, reasoning and calls, each with its events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from ...engine.outputs import CompletionOutput, RequestOutput
from ..custom_calls import CustomCall
from ..outputs import finish_reason
from ..parsers.pieces import Arguments, Call, Content, Piece, Reasoning
from ..state import checked
from .chat import Chat

Event = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]


class AnswerWriter(ABC):
    """Reads the outputs of one request, and writes the events of its API."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._kind: Kind | None = None  # of the open block
        self._blank = ""  # whitespace that may begin a text
        self._unsent: list[CompletionOutput] = []  # tokens whose text the parser holds back
        self._token_ids: list[int] = []
        self._reasoning_tokens = 0

    @property
    def needs_deltas(self) -> bool:
        """True if the answer is needed as deltas also without a stream, because tokens are counted block by block."""
        return self._chat.params.logprobs is not None or self._chat.server.answer_format.reasoning is not None

    async def _events(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer, from its first output on."""
        async with aclosing(outputs):
            for event in self._begin(output):
                yield event
            parser = self._chat.parser(output.prompt if output.prompt is not None else self._end_of_prompt(output))
            while True:
                (answer,) = checked(output).outputs
                self._token_ids += answer.token_ids
                inside = parser.in_reasoning
                pieces = parser.push(answer.text)
                if inside or parser.in_reasoning:
                    self._reasoning_tokens += len(answer.token_ids)
                else:
                    self._unsent.append(answer)
                for event in self._pieces(pieces):
                    yield event
                if output.finished:
                    break
                output = await anext(outputs)
            for event in self._pieces(parser.finish()):
                yield event
            for event in self._end(output, answer, finish_reason(answer) == "length"):
                yield event

    def _end_of_prompt(self, output: RequestOutput) -> str:
        """Return the end of a prompt of token ids, which may be inside the reasoning."""
        return self._chat.server.engine.tokenizer.decode(output.prompt_token_ids[-16:], skip_special_tokens=False)

    def _pieces(self, pieces: Sequence[Piece | CustomCall]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, Content):
                yield from self._text(piece.text)
                continue
            if isinstance(piece, Reasoning):
                if self._kind != "reasoning":
                    yield from self._start("reasoning")
            elif not isinstance(piece, Arguments):
                yield from self._start("function_call" if isinstance(piece, Call) else "custom_tool_call", piece.name)
            self._blank, self._unsent = "", []
            texts = {Call: "arguments", CustomCall: "input"}
            yield from self._delta(getattr(piece, texts.get(type(piece), "text")))

    def _text(self, text: str) -> Iterator[Event]:
        """Write text for the user. Whitespace alone begins no block."""
        text, self._blank = self._blank + text, ""
        if self._kind != "message":
            if not text.strip():
                self._blank = text
                return
            yield from self._start("message")
        yield from self._delta(text)

    def _start(self, kind: Kind, name: str = "") -> Iterator[Event]:
        """Close the open block and begin another one. `name`: of the tool that is called."""
        yield from self._close(False)
        self._kind = kind
        yield from self._open(kind, name)

    @abstractmethod
    def _begin(self, output: RequestOutput) -> Iterator[Event]:
        """Write the events before the first block."""

    @abstractmethod
    def _open(self, kind: Kind, name: str) -> Iterator[Event]:
        """Begin a block."""

    @abstractmethod
    def _delta(self, text: str) -> Iterator[Event]:
        """Write more text of the open block."""

    @abstractmethod
    def _close(self, is_cut: bool) -> Iterator[Event]:
        """End the open block, if there is one. `is_cut`: the token limit has ended it."""

    @abstractmethod
    def _end(self, output: RequestOutput, answer: CompletionOutput, is_cut: bool) -> Iterator[Event]:
        """End the open block, and write the events after the last one. `answer`: the last output's."""
