"""Families whose processors add the tokenizer's special tokens to prompts and rendered chats."""

from __future__ import annotations

from oracle import ensure_torchvision
from sensorium.engine.model_files import resolve
from sensorium.models.registry import native_architectures

ARCHITECTURES = native_architectures()


def test_families_add_special_tokens_where_their_published_processors_do() -> None:
    ensure_torchvision()
    import transformers
    from transformers.models.auto import modeling_auto, processing_auto

    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    kinds = {name: kind for table in tables for kind, name in table.items() if isinstance(name, str)}
    compared = 0
    for architecture, row in ARCHITECTURES.items():
        name = processing_auto.PROCESSOR_MAPPING_NAMES.get(kinds.get(architecture.partition("/")[0], ""))
        if isinstance(name, str):
            defaults = getattr(getattr(transformers, name), "text_kwargs", {})
            assert resolve(row.processing).adds_special_tokens == defaults.get("add_special_tokens", True), architecture
            compared += 1
    assert compared >= 25
