"""Chat templates that write mistral-common's prompts, for checkpoints with a tekken.json and no template.

Source: mistral-common's instruct tokenizers. Tools are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTENT = """
{%- macro content(parts) -%}
  {%- if parts is string -%}{{ parts }}
  {%- else -%}
    {%- set first = parts[-1].type == 'image' and parts[:-1] | rejectattr('type', 'equalto', 'text') | list | length == 0 -%}
    {%- if first -%}[IMG]{%- endif -%}
    {%- for part in (parts[:-1] if first else parts) -%}
      {%- if part.type == 'image' -%}[IMG]{%- elif part.type == 'audio' -%}[BEGIN_AUDIO][AUDIO]
      {%- elif part.type == 'text' -%}{{ part.text }}
      {%- else -%}{{ raise_exception('this model takes text, images and audio') }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}{{ raise_exception('this template does not support tools; give another one as chat_template') }}{%- endif -%}
<s>"""
"""An image at the end, after text only, is moved before the text."""
_TURNS = """
  {%- elif m.role == 'assistant' -%}{{ content(m.content) }}
    {%- if not loop.last or add_generation_prompt -%}</s>{%- endif -%}
  {%- else -%}{{ raise_exception('a message of role ' ~ m.role ~ ' is not supported by this template') }}
  {%- endif -%}
{%- endfor -%}"""
_OLD = (
    _CONTENT
    + """
{%- set seen = namespace(system='', last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{%- set seen.system = seen.system ~ content(m.content) ~ '\\n\\n' -%}
  {%- elif m.role == 'user' -%}{%- set seen.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}
  {%- elif m.role == 'user' -%}
    [INST]{%- if loop.index0 == seen.last -%}{{ seen.system }}{%- endif -%}{{ content(m.content) }}[/INST]"""
    + _TURNS
)
"""Up to v3, the system prompt is part of the last user message."""
_NEW = (
    _CONTENT
    + """
{%- for m in messages -%}
  {%- if m.role == 'system' -%}[SYSTEM_PROMPT]{{ content(m.content) }}[/SYSTEM_PROMPT]
  {%- elif m.role == 'user' -%}[INST]{{ content(m.content) }}[/INST]"""
    + _TURNS
)


def tekken_template(tekken: Mapping[str, Any]) -> str | None:
    """Return the template for a tekken.json by its version; None for an empty one."""
    if not tekken:
        return None
    version = str((tekken.get("config") or {}).get("version", "v3")).removeprefix("v").partition("m")[0]
    return _OLD if version.isdecimal() and int(version) <= 3 else _NEW
