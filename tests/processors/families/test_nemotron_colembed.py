"""Nemotron-ColEmbed-VL v2: the prefixes of queries and pages, which processor_config.json may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from sensorium.models.families.colpali.processing import NemotronColEmbedProcessingInfo
from sensorium.processors.files import ProcessorFiles

PAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize(
    ("settings", "query", "page"),
    [
        ({}, "Query: query: a", f"{PAGE}passage: "),
        ({"query_prefix": "ask", "passage_prefix": "page"}, "Query: ask a", f"{PAGE}page "),
        ({"query_prefix": "", "passage_prefix": ""}, "Query: a", PAGE),
    ],
)
def test_prefixes_come_from_the_processors_config(settings: dict[str, Any], query: str, page: str, tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    template = NemotronColEmbedProcessingInfo(ProcessorFiles(folder=tmp_path)).chat_template
    assert template is not None

    def rendered(content: Any) -> str:
        return jinja2.Template(template).render(messages=[{"role": "user", "content": content}])

    def turn(text: str) -> str:
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    assert rendered("a") == turn(query)
    assert rendered([{"type": "image"}]) == turn(page)
