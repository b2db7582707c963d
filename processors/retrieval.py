"""Chat templates of embedders that have one fixed prompt for images and one for texts."""

from __future__ import annotations

import json

_TEMPLATE = (
    "{%% for m in messages if m.role != 'system' %%}"
    "{%% for c in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) %%}"
    "{%% if c.type == 'text' %%}{{ %s }}{{ c.text }}{{ %s }}{%% else %%}{{ %s }}{%% endif %%}{%% endfor %%}{%% endfor %%}"
)


def retrieval_template(image: str, before: str = "", after: str = "") -> str:
    """Return a template that writes `image` for an image, and a text between `before` and `after`.

    It has no place for a system message, so a call with an instruction is refused.
    """
    return _TEMPLATE % tuple(map(json.dumps, (before, after, image)))
