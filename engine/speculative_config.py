"""Limits of drafted tokens, and the reader of vLLM's `speculative_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

from ..callers.errors import ConfigError, equals_one_of, hint, short_repr
from ..models.quantization import METHODS

_MOST = 64  # guesses of a sequence in a step
_ANSWERS = 10_000  # finished answers that method "suffix" keeps, as in vLLM
_CUSTOM = "custom_class"
_MTP, _MODEL, EAGLE3, _PREDICTED = (
    "mtp",
    "draft_model",
    "eagle3",
    3,
)  # methods that draft in the worker, and the default of their tokens
_METHODS = ("ngram", "suffix", _MTP, _MODEL, EAGLE3, _CUSTOM)
MODEL_METHODS = (_MODEL, EAGLE3)
"""Methods whose "model" is a checkpoint that drafts."""
_NUMBERS = {
    "num_speculative_tokens": (0, _MOST),
    "prompt_lookup_min": (1, 32),
    "prompt_lookup_max": (1, 1024),
    "suffix_decoding_max_tree_depth": (3, 1024),
    "suffix_decoding_max_cached_requests": (0, 1 << 20),
}
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {  # accepted values, and why others are refused
    "suffix_decoding_max_spec_factor": ((1.0,), "the number of tokens follows from measured costs"),
    "suffix_decoding_min_token_prob": ((0.1,), "the number of tokens follows from measured acceptance"),
    "rejection_sample_method": (("strict", "standard"), "answers are those without drafts"),
    "enforce_eager": ((False, True, None), ""),
    "disable_by_batch_size": ((None,), "the number of tokens follows from measured costs, of every batch"),
    "disable_padded_drafter_batch": ((False, True), ""),
    "draft_tensor_parallel_size": ((None, 1), "an engine runs on one device"),
    "revision": ((None,), "give the folder of that revision as the model"),
    "code_revision": ((None,), "no code of a checkpoint is run"),
    "max_model_len": ((None,), "the draft model's sequences are as long as the model's"),
}


@dataclass(frozen=True)
class DraftLimits:
    """Sources of drafted tokens, and their limits.

    Args:
        depth: guesses of a sequence in a step, at most; 0 drafts nothing.
        suffix: propose what followed the last tokens before, see SuffixProposer. Without it, only given texts draft.
        shortest, longest: as in SuffixProposer.
        custom: path of a class of the caller's proposers, "module:name"; "" for none.
        predicted: tokens that are drafted in the worker after each step; 0 for none.
        method: what drafts them: "mtp" (the model's own layers), "draft_model" or "eagle3".
        model: folder or name of the model that drafts; "" for none. quantization: of this model, as in EngineConfig.
        parallel: the draft model or head drafts all tokens in one forward pass, from mask tokens, instead of one after another.
        corpus_bytes, corpus_answers: limits of the corpus of finished answers; 0 for none.
    """

    depth: int = 15
    suffix: bool = False
    shortest: int = 3
    longest: int = 24
    corpus_bytes: int = 32 << 20
    corpus_answers: int = 0
    custom: str = ""
    predicted: int = 0
    method: str = ""
    model: str = ""
    quantization: str | None = None
    parallel: bool = False


def read_speculative_config(options: object) -> DraftLimits:
    """Return the limits that a `speculative_config` of vLLM asks for. None: only texts that requests give are drafts.

    Raises:
        ConfigError: a method, key or value that cannot be honoured, by name.
    """
    if options is None:
        return DraftLimits()
    if not isinstance(options, Mapping):
        raise config_error(options, 'must be a mapping, such as {"method": "suffix"}')
    values = {name: value for name, value in options.items() if value is not None}
    method = values.pop("method", None)
    if method in (None, "ngram") and equals_one_of(values.get("model"), ("ngram", "[ngram]")):
        method = values.pop("model").strip("[]")
    method = _MTP if isinstance(method, str) and method.endswith(f"_{_MTP}") else method  # vLLM's older names
    method = _MODEL if method is None and "model" in values else method
    if method is not None and not equals_one_of(method, _METHODS):
        raise config_error(method, f"cannot be honoured; the methods are {', '.join(_METHODS)}", "method")
    model = _take_model(method, values)
    if "model" in values:
        raise config_error(
            values["model"], f"cannot be honoured: method {short_repr(method)} has no model; leave it out", "model"
        )
    if method is None and values.get("num_speculative_tokens") != 0:
        raise config_error(
            dict(options), 'has no method; give "ngram" or "suffix", or num_speculative_tokens=0 to draft nothing'
        )
    for name, value in values.items():
        if name in _NUMBERS:
            _check_number(name, value)
        elif name == "quantization" and equals_one_of(method, (_MODEL,)):
            if not equals_one_of(value, METHODS):
                raise config_error(value, f"must be one of {', '.join(METHODS)}", name)
        elif name == "quantization":
            raise config_error(value, "cannot be honoured: it is for a draft model", name)
        elif name == "parallel_drafting":
            if type(value) is not bool:
                raise config_error(value, "must be True or False", name)
            if value and not equals_one_of(method, MODEL_METHODS):
                raise config_error(value, f"cannot be honoured: it is for the methods {' and '.join(MODEL_METHODS)}", name)
        elif name in _ONLY:
            accepted, reason = _ONLY[name]
            if not equals_one_of(value, accepted):
                raise config_error(value, f"cannot be honoured: {reason}", name)
        else:
            suggestion = hint(name, ("method", "model", "quantization", "parallel_drafting", *_NUMBERS, *_ONLY))
            raise ConfigError(f"<<param>> has the unknown key {short_repr(name)}; {suggestion}", param="speculative_config")
    return _limits(str(method), values, model)


def _take_model(method: object, values: dict[str, Any]) -> str:
    """Take "model" out of the options and return it, for the methods that have one; "" for others."""
    is_custom = equals_one_of(method, (_CUSTOM,))
    if not is_custom and not equals_one_of(method, MODEL_METHODS):
        return ""
    model = values.pop("model", None)
    if is_custom and not (isinstance(model, str) and model):
        raise config_error(model, 'must be the path of a class, "module:name"', "model")
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise config_error(model, "must be the folder of the model that drafts, or its name on the Hub", "model")
    return os.fspath(model)


def with_paths(config: Any) -> Any:
    """Return a `speculative_config` that has a path as text where the caller gave a class or another kind of path."""
    if isinstance(config, Mapping) and equals_one_of(config.get("method"), (_CUSTOM,)) and callable(config.get("model")):
        return {**config, "model": _import_path(config["model"])}
    if isinstance(config, Mapping) and isinstance(config.get("model"), os.PathLike):
        return {**config, "model": os.fspath(config["model"])}
    return config


def _import_path(factory: Any) -> str:
    """Return "module:name" of a class or function.

    Raises:
        ConfigError: it is not at the top level of a module.
    """
    path = f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', '')}"
    try:
        is_same = resolve_name(path) is factory
    except (ImportError, AttributeError, ValueError):
        is_same = False
    if not is_same:
        advice = "define it at the top level of a module, or give its path"
        raise config_error(factory, f"cannot be found by its name; {advice}", "model")
    return path


def _limits(method: str, values: Mapping[str, Any], model: str) -> DraftLimits:
    if method == _MTP or method in MODEL_METHODS:
        count = values.get("num_speculative_tokens", _PREDICTED)
        quantization, parallel = values.get("quantization"), values.get("parallel_drafting", False)
        return DraftLimits(count, predicted=count, method=method, model=model, quantization=quantization, parallel=parallel)
    custom = model
    limits = DraftLimits(suffix=not custom, custom=custom)
    limits = replace(limits, depth=values.get("num_speculative_tokens", limits.depth))
    if custom:
        return limits
    if method != "ngram":
        longest = values.get("suffix_decoding_max_tree_depth", limits.longest)
        answers = values.get("suffix_decoding_max_cached_requests", _ANSWERS)
        return replace(limits, longest=longest, corpus_answers=answers)
    least, most = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    shortest, longest = least or most or limits.shortest, most or least or limits.longest
    if shortest > longest:
        raise config_error(shortest, f"is above prompt_lookup_max={longest}", "prompt_lookup_min")
    return replace(limits, shortest=shortest, longest=longest)


def _check_number(name: str, value: object) -> None:
    least, most = _NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise config_error(value, f"must be an integer from {least} to {most}", name)


def config_error(value: object, reason: str, key: str = "") -> ConfigError:
    """Return the error of a value of `speculative_config`, or of its `key`."""
    prefix = f"<<param>>[{key!r}]={short_repr(value)}" if key else f"<<param=>>{short_repr(value)}"
    return ConfigError(f"{prefix} {reason}", param="speculative_config", value=short_repr(value))
