"""What a caller may ask of one answer, checked where it is made. Knows no tokenizer and no model."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..mm.errors import InputError, typed
from .logits_processors import normalised
from .repetition import RepetitionDetection
from .structured import StructuredOutputs
from .token_rules import SUPPRESS

_GREEDY_BELOW = 1e-5  # dividing by less overflows float32


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. The names and meanings are those the field uses.

    Args:
        n: answers per prompt; more than one needs a temperature above 0.
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: most likely tokens kept; 0 or -1 keeps all.
        min_p: tokens below this share of the likeliest token's probability are dropped, in [0, 1].
        max_tokens: tokens of the answer at most; None runs to the end of the context.
        min_tokens: before this many, neither EOS nor a stop token or stop string ends the answer.
        stop: string or strings that end the answer; the text is cut before them.
        stop_token_ids: tokens that end the answer; they stay in `token_ids`, not in the text.
        ignore_eos: go on after EOS.
        seed: fixes the answer whatever else runs; None derives one from the engine's seed and the request's number.
        logprobs: log probabilities of that many likeliest tokens beside the chosen one, at every step.
        prompt_logprobs: the same for the tokens of the prompt.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer; 1 changes nothing.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the answer; in [-2, 2].
        bad_words: texts whose tokens are never completed.
        logit_bias: token id -> added to its logit, in [-100, 100].
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string in the text.
        structured_outputs: what form the answer must have: a JSON schema, a regex, a choice, a grammar.
        logits_processors: names of registered processors, or names mapped to their arguments.
        repetition_detection: end answers that go round in a circle, or repair them; None lets them run.

    Raises:
        InputError: a value outside its limits; the message names both.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    logits_processors: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None
    repetition_detection: RepetitionDetection | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r} must be True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _store(self, "stop", _texts("stop", _listed("stop", stop)))
        _store(self, "bad_words", _texts("bad_words", _listed("bad_words", self.bad_words)))
        ids = _listed("stop_token_ids", self.stop_token_ids)
        _store(self, "stop_token_ids", tuple(_token("stop_token_ids", t) for t in ids))
        if not isinstance(self.logit_bias or {}, Mapping):
            raise InputError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
        _store(self, "logit_bias", {_token("logit_bias", k): _bias(v) for k, v in (self.logit_bias or {}).items()})
        for name, kind in (("structured_outputs", StructuredOutputs), ("repetition_detection", RepetitionDetection)):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), kind):
                raise InputError(f"{name}={getattr(self, name)!r} must be a {kind.__name__}")
        _store(self, "logits_processors", normalised(self.logits_processors or {}))
        if self.n > 1 and self.greedy:
            raise InputError(f"n={self.n} answers need a temperature above 0; greedy answers would all be the same")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Greedy, and nothing that changes or reads the logits."""
        return self.greedy and self.logprobs is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        own = self.structured_outputs or self.logits_processors
        return bool(self.penalised or self.min_tokens or self.bad_words or self.logit_bias or own)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def processors(self) -> dict[str, Mapping[str, Any]]:
        return dict(self.logits_processors or {})  # type: ignore[arg-type]


_LIMITS: dict[str, tuple[float, float, str]] = {
    "n": (1, 1024, "at least 1 and at most 1024"),
    "temperature": (0.0, math.inf, "0 (greedy) or above"),
    "top_p": (math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
    "top_k": (-1, math.inf, "0 or -1 (all), or above"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "max_tokens": (1, math.inf, "at least 1, or None for the end of the context"),
    "min_tokens": (0, math.inf, "0 or above"),
    "seed": (-(2**63), 2**64 - 1, "from -2**63 to 2**64 - 1"),
    "logprobs": (0, 1000, "from 0 to 1000"),
    "prompt_logprobs": (0, 1000, "from 0 to 1000"),
    "repetition_penalty": (1e-6, 1e6, "from 1e-6 to 1e6"),
    "presence_penalty": (-2.0, 2.0, "from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "from -2 to 2"),
}
_WHOLE = {"n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs"}
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}


def from_generation_config(config: Mapping[str, object]) -> SamplingParams:
    """The checkpoint's own sampling defaults, as parameters; `do_sample: false` means greedy.

    Source: generation_config.json's do_sample, temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens,
    suppress_tokens and begin_suppress_tokens.
    """
    known = {field.name for field in fields(SamplingParams)}
    names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} & known
    given = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        given["max_tokens"] = config["max_new_tokens"]
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    suppressed = {"tokens": config.get("suppress_tokens"), "first": config.get("begin_suppress_tokens")}
    if any(suppressed.values()):
        given["logits_processors"] = {SUPPRESS: {name: tokens for name, tokens in suppressed.items() if tokens}}
    return SamplingParams(**given)  # type: ignore[arg-type]


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, limits) in _LIMITS.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        kind: Any = numbers.Integral if name in _WHOLE else numbers.Real  # numpy's count as well
        whole = "an integer, " if name in _WHOLE else ""
        if isinstance(value, bool) or not isinstance(value, kind):
            raise InputError(f"{name}={value!r} must be {whole or 'a number, '}{limits}, not {typed(value)}")
        if not low <= value <= high or math.isinf(value):
            raise InputError(f"{name}={value!r} must be {whole}{limits}")
        _store(params, name, int(value) if name in _WHOLE else float(value))


def _store(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)  # a frozen dataclass is normalised once, here


def _listed(name: str, value: Sequence[Any] | None) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value or (), Collection):
        raise InputError(f"{name}={value!r} must be a list")
    return tuple(value or ())


def _texts(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str) or not value:
            raise InputError(f"{name} holds {value!r}; every entry must be a string that is not empty")
    return values


def _token(name: str, value: object) -> int:
    if isinstance(value, str) and value.isdigit():  # JSON keys
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise InputError(f"{name} holds {value!r}; token ids are integers, 0 or above")
    return int(value)


def _bias(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise InputError(f"logit_bias holds {value!r}; a bias is a number from -100 to 100")
    return float(value)
