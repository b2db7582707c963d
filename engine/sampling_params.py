"""Sampling parameters of a request. Values are checked on construction."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from enum import IntEnum
from typing import Any

from ..callers.errors import ConfigError, InputError, check_utf8, equals_one_of, hint, hints_at_arguments, short_repr, typed
from ..callers.plain import builtin_copy
from ..callers.wording import in_python
from .builtin_logits_processors import ALLOWED_TOKENS, NO_REPEAT_NGRAMS, SUPPRESS_TOKENS, NoRepeatNGrams, pack_tokens
from .logits_processors import normalize_processors
from .param_checks import (
    MAX_INT32,
    UnusedParams,
    as_tuple,
    check_count,
    check_strings,
    check_token,
    check_token_ids,
    check_unused,
    param_error,
)
from .structured_outputs import StructuredOutputsParams

_GREEDY_BELOW = 1e-5  # dividing logits by a lower temperature overflows float32
_MAX_LOOKBACK = 4096  # tokens that a check for repetition may read; it runs after every token
_MAX_INT64 = 2**63 - 1
_MAX_ANSWERS = 64  # answers of a request that may have the maximum number of log probabilities
_LOGPROBS_MODES = "raw_logprobs", "processed_logprobs"
_MAX_DRAFT_CHARS = 1 << 20
_MAX_BIASES, _MAX_ALLOWED = 1 << 14, 1 << 20  # entries

UNUSED_PARAMS: UnusedParams = {
    "best_of": ((None, 1), "ask for n answers and choose among them"),
    "spaces_between_special_tokens": ((True, False), ""),
    "skip_clone": ((True, False), ""),
    "truncate_prompt_tokens": ((None,), "cut the prompt's tokens and give prompt_token_ids"),
    "flat_logprobs": ((False,), "log probabilities are one mapping per token"),
    "logprob_token_ids": ((None,), "give logprobs, the number of the likeliest tokens"),
    "skip_reading_prefix_cache": ((None, False), "give the prompt its own cache_salt"),
    "thinking_token_budget": ((None,), "give <<max_tokens>>"),
    "routed_experts_prompt_start": ((0,), "outputs do not name the experts"),
}
"""vLLM's parameters that have no meaning here: the accepted values, and why others are refused."""


class RequestOutputKind(IntEnum):
    """What each output of `AsyncLLM.generate` holds: the answer so far, what is new, or one output with the whole answer."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@hints_at_arguments
@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Detects answers that repeat themselves, and ends or repairs them.

    An answer is in a loop if it ends with a cycle of at most `max_cycle` tokens that is repeated at least `min_repeats` times
    and covers at least `min_tokens` tokens. The last repetition may be incomplete. The answer then ends with the finish reason
    "repetition", or is repaired.

    Args:
        max_cycle: maximum length of a cycle in tokens.
        min_repeats: minimum number of repetitions, at least 2.
        min_tokens: minimum number of tokens that a loop covers. It lets short cycles, such as lines of dashes, zeros or empty
            table cells, repeat more often.
        repair: if True, remove the loop from the answer, forbid its cycle for the rest of the answer, and continue.
        max_repairs: maximum number of repairs per answer; a further loop ends the answer.

    Raises:
        InputError: a value is out of range.
    """

    max_cycle: int = 128
    min_repeats: int = 4
    min_tokens: int = 32
    repair: bool = False
    max_repairs: int = 3

    def __post_init__(self) -> None:
        for name, least in {"max_cycle": 1, "min_repeats": 2, "min_tokens": 1, "max_repairs": 1}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= MAX_INT32:
                raise param_error(f"repetition_detection.{name}", value, f"must be an integer from {least} to {MAX_INT32}")
            object.__setattr__(self, name, int(value))
        if not isinstance(self.repair, bool):
            raise param_error("repetition_detection.repair", self.repair, "must be True or False")
        if max(self.max_cycle * self.min_repeats, self.min_tokens) > _MAX_LOOKBACK:
            reason = f"<<param>> looks at {_MAX_LOOKBACK} tokens at most; lower max_cycle or min_tokens"
            raise InputError(reason, param="repetition_detection")


@hints_at_arguments
@dataclass
class SamplingParams:
    """Sampling parameters of a request. Names and meanings follow vLLM and the OpenAI API.

    Args:
        n: number of answers to generate for the prompt. Values above 1 require a temperature above 0.
        temperature: randomness of the sampling. Lower values are more deterministic; 0 means greedy sampling.
        top_p: cumulative probability of the most likely tokens to consider, in (0, 1]. 1 considers all tokens.
        top_k: number of most likely tokens to consider. 0 or -1 considers all tokens.
        min_p: minimum probability of a token, relative to the probability of the most likely token, in [0, 1]. 0 disables it.
        max_tokens: maximum number of tokens to generate per answer. None generates up to the end of the context.
        min_tokens: minimum number of tokens to generate before EOS, stop tokens and stop strings can end the answer.
        stop: string or list of strings that end the answer. The text does not contain them.
        stop_token_ids: token ids that end the answer. `token_ids` contains them, the text does not.
        ignore_eos: if True, continue generating after the EOS token.
        seed: random seed. The same seed gives the same answer regardless of other requests. None, or -1 as in vLLM,
            derives a seed from the engine's seed and the number of the request.
        logprobs: number of log probabilities to return per generated token: those of the most likely tokens and of the sampled
            token. None returns none.
        prompt_logprobs: number of log probabilities to return per prompt token.
        logprobs_mode: "raw_logprobs": of the model's distribution; "processed_logprobs": of the distribution after logits
            processors, penalties and biases, and before the temperature, among the tokens that these allow.
        repetition_penalty: penalises tokens that appear in the prompt or the answer so far: positive logits are divided by it,
            negative ones multiplied. 1 means no penalty.
        presence_penalty: subtracted from the logits of tokens that appear in the answer so far, in [-2, 2].
        frequency_penalty: subtracted from a token's logit once per occurrence in the answer so far, in [-2, 2].
        bad_words: strings that must not be generated. Only the last token of a matching sequence is forbidden.
        logit_bias: token id -> value that is added to its logit, in [-100, 100].
        skip_special_tokens: if True, leave special tokens out of the text.
        include_stop_str_in_output: if True, the text contains the stop string.
        structured_outputs: format that the answer must have: a JSON schema, a regular expression, choices or a grammar.
        logits_processors: names of registered logits processors, or a mapping from names to their arguments.
        repetition_detection: ends or repairs answers that repeat themselves. None disables it.
        allowed_token_ids: the only tokens that may be generated.
        detokenize: if False, outputs have no text.
        output_kind: what each output of `AsyncLLM.generate` holds. None takes that call's argument.
        draft_text: what the answer will probably be, as a text or as token ids: a page's own text, an earlier output of the
            same job. Tokens that the answer shares with it take fewer steps; the answer is the same with any text and without.
        guided_decoding: older name of structured_outputs.
        extra_args: arguments of vLLM's processor against repeated n-grams: `ngram_size`, `window_size` (default: 100) and
            `whitelist_token_ids`, those of the logits processor "no_repeat_ngrams". Other keys are refused.

    The other parameters exist in vLLM; values that cannot be honoured are refused. An engine uses a copy of the parameters, so
    changing them later affects new requests only.

    Raises:
        InputError: a value is out of range; the message names the parameter and its limits. A value that is set later is
            checked when a request is made.
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
    logprobs_mode: str = "raw_logprobs"
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    allowed_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind | None = None
    draft_text: str | Sequence[int] | None = None
    guided_decoding: InitVar[StructuredOutputsParams | None] = None
    extra_args: InitVar[Mapping[str, Any] | None] = None
    best_of: InitVar[int | None] = None
    spaces_between_special_tokens: InitVar[bool] = True
    skip_clone: InitVar[bool] = False
    truncate_prompt_tokens: InitVar[int | None] = None
    flat_logprobs: InitVar[bool] = False
    logprob_token_ids: InitVar[Sequence[int] | None] = None
    skip_reading_prefix_cache: InitVar[bool | None] = None
    thinking_token_budget: InitVar[int | None] = None
    routed_experts_prompt_start: InitVar[int] = 0

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dataclass_fields__:
            reason = f"unknown sampling parameter {short_repr(name)}; {hint(name, self.__dataclass_fields__)}"
            raise AttributeError(in_python(reason))
        if name in UNUSED_PARAMS:
            check_unused(UNUSED_PARAMS, name, value)
        elif name == "extra_args":
            object.__setattr__(self, "logits_processors", _with_extra_args(self.logits_processors, value))
        else:
            object.__setattr__(self, "structured_outputs" if name == "guided_decoding" else name, value)

    def __post_init__(self, guided_decoding: StructuredOutputsParams | None, extra_args: object, *unused: object) -> None:
        for name, value in zip(UNUSED_PARAMS, unused, strict=True):
            check_unused(UNUSED_PARAMS, name, value)
        if guided_decoding is not None:
            self.structured_outputs = guided_decoding
        if extra_args is not None:
            self.logits_processors = _with_extra_args(self.logits_processors, extra_args)
        _check_numbers(self)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise param_error(name, getattr(self, name), "must be True or False")
        if not equals_one_of(self.logprobs_mode, _LOGPROBS_MODES):
            raise param_error("logprobs_mode", self.logprobs_mode, f"must be {' or '.join(_LOGPROBS_MODES)}")
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        self.stop = check_strings("stop", as_tuple("stop", stop, expected="a string or a list of strings"))
        self.bad_words = check_strings("bad_words", as_tuple("bad_words", self.bad_words))
        self.stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_token_ids("allowed_token_ids", self.allowed_token_ids, _MAX_ALLOWED)
            if not self.allowed_token_ids:
                raise InputError("<<param>> is empty; give the allowed tokens, or None", param="allowed_token_ids")
            self.__dict__["packed"] = self.allowed_token_ids, pack_tokens({"tokens": self.allowed_token_ids})
        self.draft_text = _check_draft(self.draft_text)
        if self.output_kind is not None:
            if not equals_one_of(self.output_kind, RequestOutputKind):
                raise param_error("output_kind", self.output_kind, "must be a RequestOutputKind")
            self.output_kind = RequestOutputKind(self.output_kind)
        if self.stop and not self.detokenize:
            raise InputError("stop strings need the text; leave detokenize True, or give stop_token_ids", param="detokenize")
        biases: Any = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping):
            raise param_error("logit_bias", biases, "must map token ids to numbers")
        check_count("logit_bias", biases, _MAX_BIASES)
        biases = dict(biases.items())
        self.logit_bias = {check_token("logit_bias", k): _check_bias(v) for k, v in biases.items()}
        for name, kind in (
            ("structured_outputs", StructuredOutputsParams),
            ("repetition_detection", RepetitionDetectionParams),
        ):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), kind):
                raise param_error(name, getattr(self, name), f"must be a {kind.__name__}")
        processors = {} if self.logits_processors is None else self.logits_processors
        normalized = normalize_processors(processors)
        if ALLOWED_TOKENS in normalized:
            if self.allowed_token_ids is not None:
                reason = f"<<param>> is the logits processor {ALLOWED_TOKENS}; give one of them"
                raise InputError(reason, code="invalid_value", param="allowed_token_ids")
            normalized[ALLOWED_TOKENS] = pack_tokens(normalized[ALLOWED_TOKENS])
        self.logits_processors = normalized
        if self.n > 1 and self.greedy:
            raise InputError(f"<<param=>>{self.n} needs a temperature above 0; greedy answers would all be the same", param="n")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"<<param=>>{self.min_tokens} is above <<max_tokens=>>{self.max_tokens}; lower it or raise <<max_tokens>>"
            raise InputError(reason, param="min_tokens")

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return parameters in which None stands for the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """Return a copy whose values are checked."""
        return replace(self)

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
        """True if sampling is greedy and nothing changes or reads the logits."""
        return self.greedy and self.logprobs is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """True if penalties, biases, a format or logits processors change the logits."""
        changes = self.structured_outputs or self.logits_processors or self.allowed_token_ids
        return bool(self.penalised or self.min_tokens or self.bad_words or self.logit_bias or changes)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def processors(self) -> dict[str, Mapping[str, Any]]:
        """The arguments of each logits processor, with that of allowed_token_ids."""
        chosen: dict[str, Mapping[str, Any]] = dict(self.logits_processors or {})  # type: ignore[arg-type]
        if not self.allowed_token_ids:
            return chosen
        allowed, packed = self.__dict__["packed"]  # of `__post_init__`
        return {ALLOWED_TOKENS: packed if allowed is self.allowed_token_ids else {"tokens": self.allowed_token_ids}} | chosen


@dataclass(frozen=True)
class SamplingLimits:
    """Limits of an engine on the sampling parameters of a request; see the options of `EngineConfig` of the same names."""

    max_logprobs: int = 20
    max_sampling_chars: int = 1 << 14
    max_grammar_chars: int = 1 << 18

    def check(self, params: SamplingParams) -> None:
        """Raise InputError that names the parameter and the option if the parameters ask for too much."""
        for name, answers in ("logprobs", params.n), ("prompt_logprobs", 1):
            count = getattr(params, name) or 0
            if count > self.max_logprobs or count * answers > _MAX_ANSWERS * self.max_logprobs:
                limit = f"{self.max_logprobs}, and {_MAX_ANSWERS} times as many for all answers of a request"
                reason = f"with n={answers} is over the limit of {limit}; ask for fewer, or raise <<max_logprobs>>"
                raise param_error(name, count, reason, code="over_limit", limit=self.max_logprobs)
        draft = params.draft_text
        if isinstance(draft, str) and len(draft) > _MAX_DRAFT_CHARS:
            reason = f"<<param>> has {len(draft):,} characters, but the limit is {_MAX_DRAFT_CHARS:,}; give a part of it"
            raise InputError(reason, code="over_limit", param="draft_text", limit=_MAX_DRAFT_CHARS, value=len(draft))
        for name, strings in ("stop", params.stop_strings), ("bad_words", tuple(params.bad_words or ())):
            chars = sum(map(len, strings))
            if chars > self.max_sampling_chars:
                reason = f"<<param>> has {chars:,} characters, but the limit is {self.max_sampling_chars:,}"
                reason = f"{reason}; give fewer, or raise <<max_sampling_chars>>"
                raise InputError(reason, code="over_limit", param=name, limit=self.max_sampling_chars, value=chars)
        grammar = params.structured_outputs
        size = 0 if grammar is None else grammar.num_chars
        if size > self.max_grammar_chars:
            reason = f"<<param>> has {size:,} characters, but the limit is {self.max_grammar_chars:,}"
            reason = f"{reason}; give a smaller form, or raise <<max_grammar_chars>>"
            raise InputError(reason, code="over_limit", param="structured_outputs", limit=self.max_grammar_chars, value=size)


_LIMITS: dict[str, tuple[float, float, str]] = {
    "n": (1, 1024, "at least 1 and at most 1024"),
    "temperature": (0.0, 1e6, "0 (greedy) or above, at most 1e6"),
    "top_p": (math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
    "top_k": (-1, _MAX_INT64, "0 or -1 (all), or above, at most 2**63 - 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "max_tokens": (1, _MAX_INT64, "at least 1 and at most 2**63 - 1, or None for the end of the context"),
    "min_tokens": (0, _MAX_INT64, "0 or above, at most 2**63 - 1"),
    "seed": (-(2**63), 2**64 - 1, "from -2**63 to 2**64 - 1"),
    "logprobs": (0, 1000, "from 0 to 1000"),
    "prompt_logprobs": (0, 1000, "from 0 to 1000"),
    "repetition_penalty": (1e-6, 1e6, "from 1e-6 to 1e6"),
    "presence_penalty": (-2.0, 2.0, "from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "from -2 to 2"),
}
_INTEGERS = {"n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs"}
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}


_GENERATION_NUMBERS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_GENERATION_NUMBERS["max_new_tokens"] = "max_tokens"
_GENERATION_TOKENS = {"suppress_tokens": "tokens", "begin_suppress_tokens": "first"}
_GENERATION_KEYS = ("do_sample", *_GENERATION_NUMBERS, *_GENERATION_TOKENS)


def from_generation_config(stored: Mapping[str, object], overrides: Mapping[str, object] | None = None) -> SamplingParams:
    """Return the checkpoint's default sampling parameters. `do_sample: false` means greedy sampling.

    Source: the keys of generation_config.json: do_sample, temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens,
    suppress_tokens and begin_suppress_tokens.

    Args:
        stored: the file's values; other keys are not read.
        overrides: values that replace them. A temperature here counts although the file has `do_sample: false`.
    """
    overrides = overrides or {}
    config = {**stored, **({"do_sample": None} if "temperature" in overrides else {}), **overrides}
    values: dict[str, Any] = {name: config[key] for key, name in _GENERATION_NUMBERS.items() if config.get(key) is not None}
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    suppressed = {name: config[key] for key, name in _GENERATION_TOKENS.items() if config.get(key)}
    if suppressed:
        values["logits_processors"] = {SUPPRESS_TOKENS: suppressed}
    return SamplingParams(**values)


def check_generation_overrides(overrides: Mapping[str, object]) -> None:
    """Raise ConfigError for a key of `override_generation_config` that nothing reads, or a value that is not allowed."""
    option = "override_generation_config"
    for key, value in overrides.items():
        if key not in _GENERATION_KEYS:
            reason = f"<<param>> has the unknown key {short_repr(key)}; {hint(key, _GENERATION_KEYS)}"
            raise ConfigError(reason, code="unknown_name", param=option, value=key)
        try:
            if key == "do_sample" and not isinstance(value, bool | None):
                raise param_error(key, value, "must be True or False")
            if key in _GENERATION_TOKENS:
                check_token_ids(key, value, _MAX_ALLOWED)  # type: ignore[arg-type]
            from_generation_config({}, {key: value})
        except InputError as error:
            raise ConfigError(**error.info.fields() | {"code": "invalid_value", "param": f"{option}.{key}"}) from None


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, limits) in _LIMITS.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        kind: Any = numbers.Integral if name in _INTEGERS else numbers.Real  # numpy's numbers count as well
        if isinstance(value, bool) or not isinstance(value, kind):
            expected = "an integer" if name in _INTEGERS else "a number"
            raise param_error(name, value, f"must be {expected}, {limits}, not {typed(value)}")
        if not low <= value <= high:
            raise param_error(name, value, f"must be {'an integer, ' if name in _INTEGERS else ''}{limits}")
        setattr(params, name, int(value) if name in _INTEGERS else float(value))
    if params.seed == -1:  # as in vLLM
        params.seed = None


def _check_draft(value: Any) -> str | tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return check_utf8(str.__str__(value), "draft_text")
    if isinstance(value, bytes | Mapping) or not isinstance(value, Collection):
        raise param_error("draft_text", value, "must be a text or a list of token ids")
    return check_token_ids("draft_text", value, _MAX_ALLOWED)


def _with_extra_args(processors: Any, extra_args: object) -> Any:
    """Return logits processors, with the one that vLLM's `extra_args` ask for.

    Raises:
        InputError: there is no such processor, or its arguments are wrong.
    """
    extra_args = builtin_copy(extra_args, "extra_args")
    if extra_args is None or equals_one_of(extra_args, ({},)):
        return processors
    if not isinstance(extra_args, Mapping):
        raise param_error("extra_args", extra_args, "must map names to values")
    names = [field.name for field in fields(NoRepeatNGrams)]
    unknown = next((name for name in extra_args if name not in names), None)
    if unknown is not None or "ngram_size" not in extra_args:
        reason = f"ngram_size is missing beside {next(iter(extra_args))}" if unknown is None else f"nothing reads {unknown!r}"
        reason = f"cannot be honoured: {reason}; give {', '.join(names)}, or register a logits processor, which takes arguments"
        raise param_error("extra_args", extra_args, reason, code="unsupported")
    try:
        NoRepeatNGrams(**extra_args)
    except InputError as error:
        raise InputError(f"<<param>>: {error.info.text}", code="invalid_value", param="extra_args") from None
    chosen = normalize_processors({} if processors is None else processors)
    whitelist = {name: tuple(value) for name, value in extra_args.items() if name == "whitelist_token_ids"}
    return {**chosen, NO_REPEAT_NGRAMS: {**extra_args, **whitelist}}


def _check_bias(value: object) -> float:
    value = builtin_copy(value, "logit_bias")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise InputError(
            f"<<param>> holds {short_repr(value)}; a bias is a number from -100 to 100",
            code="invalid_value",
            param="logit_bias",
        )
    return float(value)
