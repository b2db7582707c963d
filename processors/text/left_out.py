"""Finds the message whose media a chat template leaves out, to say so in the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...callers.errors import InputError, SensoriumError

_MAX_RENDERINGS = 16
Render = Callable[[Sequence[Mapping[str, Any]]], str]


def left_out_error(
    messages: Sequence[Mapping[str, Any]], modality: str, media: Sequence[tuple[str, str]], text: str, render: Render
) -> InputError:
    """Return the error about an item without a placeholder in a rendered conversation.

    If a prompt stays the same when the media of a message are removed, the chat template leaves them out.

    Args:
        media: (modality, place) of each item, such as ("image", "messages[0].content[1]").
        text: the rendered prompt.
        render: renders messages.
    """
    params = [param for kind, param in media if kind == modality]
    numbers = dict.fromkeys(int(param.partition("[")[2].partition("]")[0]) for param in params)
    for number in list(numbers)[:_MAX_RENDERINGS]:
        if not _is_left_out(messages, number, text, render):
            continue
        role, param = messages[number]["role"], next(param for param in params if param.startswith(f"messages[{number}]"))
        items = {"image": "images", "video": "videos"}.get(modality, modality)
        what = f"message {number}: this model's chat template drops {items} in messages with the role {role}"
        how = "put it into a message with the role user" if role != "user" else "leave it out, or <<change_template>>"
        return InputError(f"{what}; {how}", param=param)
    reason = f"the chat template writes fewer placeholders than the messages have items ({len(params)} of {modality})"
    return InputError(f"{reason}; <<change_template>>", param="messages")


def _is_left_out(messages: Sequence[Mapping[str, Any]], number: int, text: str, render: Render) -> bool:
    content = messages[number]["content"]
    kept = [part for part in content if isinstance(part, str) or (isinstance(part, Mapping) and "text" in part)]
    without = [*messages[:number], {**messages[number], "content": kept or ""}, *messages[number + 1 :]]
    try:
        return render(without) == text
    except SensoriumError:
        return False
