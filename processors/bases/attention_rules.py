"""Rules of prompt attention that several families name."""

from __future__ import annotations

from collections.abc import Sequence

from ...mm.embeddings import PROMPT_EMBEDS
from ...mm.rules import PromptAttention, Rule, register
from ...mm.types import MultiModalFeature


@register
def whole_prompt(prompt_length: int, features: Sequence[MultiModalFeature]) -> list[tuple[int, int]]:
    """Return the prompt as one span."""
    return [(0, prompt_length)]


@register
def item_runs(prompt_length: int, features: Sequence[MultiModalFeature], *causal: str) -> list[tuple[int, int]]:
    """Return each run of adjacent rows of an item, except for items of the `causal` modalities."""
    return [run for feature in features if feature.modality not in (PROMPT_EMBEDS, *causal) for run in feature.range.runs]


@register
def item_ranges(prompt_length: int, features: Sequence[MultiModalFeature]) -> list[tuple[int, int]]:
    """Return the range of each item as a span of prompt attention."""
    ranges = (feature.range for feature in features if feature.modality != PROMPT_EMBEDS)
    return list(dict.fromkeys((where.offset, where.end) for where in ranges))


PREFIX_LM = PromptAttention("bidirectional_prompt", Rule.of(whole_prompt), whole_prompt=True)
"""All tokens of the prompt see each other (prefix-LM of PaliGemma, encoder-only models)."""

PROMPT_WINDOWS = PromptAttention(
    "bidirectional_prompt_windows", Rule.of(whole_prompt), whole_prompt=True, two_sided_windows=True
)
"""The same, but windows reach as far ahead as behind (embedders with a decoder, such as EmbeddingGemma)."""
