"""A model whose answers are scripted, behind the part of an engine that readers of documents use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sensorium.callers.errors import ErrorInfo
from sensorium.engine.elements import MarkedText
from sensorium.mm.media.policy import DEFAULT_POLICY
from sensorium.pipelines.run import Task
from sensorium.processors.elements.element import ImageScale


@dataclass
class Request:
    """The part of a request that `ocr` changes."""

    read_draft: Callable[[], str] = str


class ScriptedModel:
    """A model that answers by its prompt, and keeps what it was asked.

    Args:
        answers: by prompt; of a list, each request gets the next one.
        names: of its prompts.
        markup: the format of its elements; "" for none.
        size, resized: (height, width) of the images that it sees, and in its own pixels.
    """

    def __init__(
        self,
        answers: dict[str, Any],
        names: Sequence[str],
        markup: str = "",
        size: tuple[int, int] = (1, 1),
        resized: tuple[int, int] = (1, 1),
    ) -> None:
        self.answers = {prompt: [*answer] if isinstance(answer, list) else answer for prompt, answer in answers.items()}
        self.requests = list[tuple[str, Any]]()  # prompt, and image
        self.params, self.drafts = list[Any](), list[str]()
        self.markup, self.scale, self.errors = markup, ImageScale(size, resized), dict[str, ErrorInfo]()
        self.ocr_prompts = names
        self.config = SimpleNamespace(media=DEFAULT_POLICY, model="org/scripted", torch_device=SimpleNamespace(type="cpu"))
        self.stats, self.loop = SimpleNamespace(no_drafts=False), SimpleNamespace(check_ready=lambda handles: None)

    def chat_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def request(self, messages: Any, params: Any, **options: Any) -> Any:
        image, text = messages[-1]["content"]
        self.requests.append((text["text"], image))
        self.params.append(params)
        return SimpleNamespace(input=Request())

    def run(self, tasks: list[Task[Any]]) -> list[Any]:
        return [self._answer(task) for task in tasks]

    def _answer(self, task: Task[Any]) -> Any:
        coroutine: Any = task()
        request = coroutine.send(None)
        prompt = self.requests[-1][0]
        self.drafts.append(request.input.read_draft())
        text = self.answers[prompt]
        text = text.pop(0) if isinstance(text, list) else text
        marked = MarkedText(self.markup, text, (self.scale,)) if self.markup else None
        answer = SimpleNamespace(
            text=text.replace("<|im_end|>", ""), marked=marked, token_ids=(1,), logprobs=(), cumulative_logprob=-0.1,
            finish_reason="stop",
        )  # fmt: skip
        try:
            coroutine.send(SimpleNamespace(outputs=[answer], error=self.errors.get(prompt)))
        except StopIteration as end:
            return end.value
        raise AssertionError
