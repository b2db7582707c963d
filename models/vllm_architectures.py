"""Names of architectures that vLLM has for its own classes, in `architectures` of config.json or of `hf_overrides`.

Sources: vLLM's documentation of rerankers (`classifier_from_token`, `is_original_qwen3_reranker`) and its table of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..callers.errors import ConfigError, short_repr
from .registry import CHECKPOINT_LAYOUTS, is_registered

_SAME = {
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "PixtralForConditionalGeneration": "LlavaForConditionalGeneration",
    "Qwen3ASRRealtimeGeneration": "Qwen3ASRForConditionalGeneration",
    "VoxtralRealtimeGeneration": "VoxtralRealtimeForConditionalGeneration",
}
_OF_PARAMS_JSON = (
    *_SAME,
    "MistralForCausalLM",
    "MistralLarge3ForCausalLM",
    "MixtralForCausalLM",
    "VoxtralForConditionalGeneration",
)
"""vLLM's classes for checkpoints with params.json, whose content alone decides here."""
_CLASSIFIER = "ForSequenceClassification"
_GENERATORS = ("ForConditionalGeneration", "ForCausalLM")
_METHODS = (None, "from_2_way_softmax")


def translate_architecture(config: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose architecture has our name, if it has one of vLLM's.

    vLLM runs Qwen3-Reranker and Qwen3-VL-Reranker as classifiers, whose one weight is the row of "yes" minus that of "no" in
    the output layer. `LLM.score` of the generating model computes the same: the probability of "yes" against "no".

    Args:
        stored: the checkpoint's config, without overrides.

    Raises:
        ConfigError: a classifier is made from other tokens, or in another way.
    """
    names, stored_names = config.get("architectures"), stored.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        return config
    name = names[0]
    layouts = [key for layout in CHECKPOINT_LAYOUTS.values() for key in layout.architectures.values()]
    if name in _OF_PARAMS_JSON and isinstance(stored_names, list) and stored_names and stored_names[0] in layouts:
        return {**config, "architectures": stored_names}
    if not is_registered(name) and name in _SAME:
        return {**config, "architectures": [_SAME[name]]}
    tokens = config.get("classifier_from_token")
    if tokens is None or not name.endswith(_CLASSIFIER):
        return config
    candidates = [name.removesuffix(_CLASSIFIER) + ending for ending in _GENERATORS]
    generator = next((candidate for candidate in candidates if is_registered(candidate)), None)
    if tokens != ["no", "yes"] or config.get("method") not in _METHODS or generator is None:
        override = f"classifier_from_token={short_repr(tokens)} of {name}"
        reason = 'score compares "yes" with "no", as Qwen3-Reranker and Qwen3-VL-Reranker do; leave the overrides out'
        raise ConfigError(f"{override} cannot be honoured: {reason}, or convert the checkpoint", param="hf_overrides")
    return {**config, "architectures": [generator]}
