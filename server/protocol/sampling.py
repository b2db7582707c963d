"""Fields about sampling and about the request as a whole, which chat and completions share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from ...callers.errors import InputError, naming_field, short_repr
from ...callers.message_fields import check_fields
from ...engine.sampling_params import RepetitionDetectionParams, SamplingParams
from ...engine.structured_outputs import StructuredOutputsParams
from .body import Body, Many, Part, Refused

_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "skip_special_tokens"),
    *("include_stop_str_in_output", "allowed_token_ids", "prompt_logprobs", "draft_text"),
)
_TEMPLATES = "the server's chat template is used; start it with --chat-template"
TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
"""Tiers of OpenAI's API. There is one tier here, "default", which responses name, as OpenAI's name the tier that was used."""
VERBOSITIES = ("low", "medium", "high")
OWNER: Refused = {
    "chat_template": ((), _TEMPLATES),
    "logits_processors": (([], {}), "requests cannot name logits processors"),
    "lora_request": ((), "name an adapter of the option adapters as the model"),
    "service_tier": (TIERS, "the known tiers are " + ", ".join(TIERS) + "; all of them are served alike"),
    "store": ((False, True), "give true or false; answers are not stored"),
    "moderation": ((), "there is no moderation"),
    "spaces_between_special_tokens": ((True, False), "give true or false; tokens are joined as the tokenizer writes them"),
    "truncate_prompt_tokens": ((-1,), "shorten the input"),
    "truncation_side": (("left", "right"), "give left or right; prompts are not truncated"),
    "logprob_token_ids": ((), "give the number of the likeliest tokens"),
    "thinking_token_budget": ((-1,), "give the maximum of all tokens"),
    "kv_transfer_params": ((), "engines share KV blocks through the server's option kv_transfer_config"),
    "ec_transfer_params": ((), "engines share encoder rows through the server's option encoder_cache_dir"),
    "watermarking": ((False,), "answers have no watermark"),
    "routed_experts_prompt_start": ((0,), "outputs do not name the experts"),
    "return_token_offsets": ((False,), "no endpoint returns offsets"),
    "return_prompt_text": ((False,), "/tokenize shows how a conversation is rendered"),
    "media_io_kwargs": (({},), "give mm_processor_kwargs, or start the server with --media-io-kwargs"),
    "prompt_embeds": ((), "give text or token ids"),
    "prompt_cache_options": (({}, {"mode": "implicit"}), "every prefix is cached, for as long as there is memory"),
}
"""Fields that only the server's options decide: the values that a request may state, and why others are refused."""
_NO_FORMATS = "the beams follow no format"
_NO_BEAMS = "/v1/chat/completions and /v1/completions search with beams"
ONE_ANSWER: Refused = {
    "use_beam_search": ((False,), _NO_BEAMS),
    "length_penalty": ((1.0,), _NO_BEAMS),
    "best_of": ((1,), "/v1/chat/completions and /v1/completions choose among answers"),
}
"""Fields that only endpoints with several answers have."""
_NO_SAMPLING, _NO_ENDS = "the search follows the model's own probabilities", "its answers end at EOS or max_tokens"
NOT_WITH_BEAMS: Refused = {
    "stream": ((False,), "the search changes its answers until it ends"),
    "top_p": ((1,), _NO_SAMPLING),
    "top_k": ((0, -1), _NO_SAMPLING),
    "min_p": ((0,), _NO_SAMPLING),
    "repetition_penalty": ((1,), _NO_SAMPLING),
    "presence_penalty": ((0,), _NO_SAMPLING),
    "frequency_penalty": ((0,), _NO_SAMPLING),
    "logit_bias": (({},), _NO_SAMPLING),
    "bad_words": (([],), _NO_SAMPLING),
    "allowed_token_ids": ((), _NO_SAMPLING),
    "vllm_xargs": (({},), _NO_SAMPLING),
    "stop": (([],), _NO_ENDS),
    "stop_token_ids": (([],), _NO_ENDS),
    "min_tokens": ((0,), _NO_ENDS),
    "repetition_detection": ((), _NO_ENDS),
    "structured_outputs": ((), _NO_FORMATS),
    "response_format": (({"type": "text"},), _NO_FORMATS),
    "return_timings": ((False,), "the search has no times of its own"),
}
"""Fields that beam search cannot honour: values that change nothing, and why others are refused."""


class StreamOptions(Part):
    refused: ClassVar[Refused] = {"include_obfuscation": ((False,), "chunks are not padded")}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """Fields with the names and meanings of OpenAI, and vLLM's further ones."""

    n: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    bad_words: Many[str] | None = None
    logit_bias: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Many[int] | None = None
    prompt_logprobs: int | None = None
    draft_text: str | Many[int] | None = None
    repetition_detection: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=0, lt=1 << 31)  # a request can step back, but not before those of others
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    best_of: int | None = Field(None, ge=1)
    vllm_xargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def sampling_params(self, defaults: SamplingParams, **computed: Any) -> SamplingParams:
        """Return the parameters of one answer. `computed`: those that the endpoint has computed.

        Raises:
            InputError: a value is out of range, or two fields exclude each other.
        """
        values = {name: getattr(self, name) for name in _PARAMS if getattr(self, name) is not None}
        if self.stream_options is not None and not self.stream:
            raise InputError("<<param>> need stream=true; set it, or remove them", param="stream_options")
        if self.logit_bias is not None:
            values["logit_bias"] = {_token(name): bias for name, bias in self.logit_bias.items()}
        if self.repetition_detection is not None:
            values["repetition_detection"] = _make(RepetitionDetectionParams, self.repetition_detection, "repetition_detection")
        formats = [computed.pop("structured_outputs", None), self._structured_outputs(), response_format(self.response_format)]
        constraints = [constraint for constraint in formats if constraint is not None]
        if len(constraints) > 1:
            reason = "<<param>>, structured_outputs and a required tool call exclude each other; give one of them"
            raise InputError(reason, code="invalid_value", param="response_format")
        if constraints:
            values["structured_outputs"] = constraints[0]
        if self.vllm_xargs:
            with naming_field("extra_args", "vllm_xargs"):
                return replace(defaults, **{**values, **computed}, extra_args=self.vllm_xargs)
        return replace(defaults, **{**values, **computed})

    @property
    def num_candidates(self) -> int:
        """How many answers are generated for each prompt.

        Raises:
            InputError: best_of is below n, or a stream would have to choose before it begins.
        """
        wanted, candidates = 1 if self.n is None else self.n, self.best_of
        if candidates is None or candidates == wanted:
            return wanted
        if candidates < wanted:
            raise InputError(f"<<param=>>{candidates} is below n={wanted}; raise it", code="invalid_value", param="best_of")
        if self.stream:
            reason = f"<<param=>>{candidates} is above n={wanted}, which a stream cannot have; leave out stream"
            raise InputError(reason, code="unsupported", param="best_of")
        return candidates

    @property
    def count_field(self) -> str:
        """The field that says how many answers are generated."""
        return "n" if self.best_of is None else "best_of"

    @property
    def usage_in_stream(self) -> tuple[bool, bool]:
        """Return (the last chunk reports usage, every chunk reports usage)."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.continuous_usage_stats and options.include_usage)

    @property
    def format_field(self) -> str:
        """The field that gives the format of the answer, if one does."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        value = self.structured_outputs
        return None if value is None else _make(StructuredOutputsParams, value, "structured_outputs")


def response_format(value: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the format of OpenAI's response_format, None for text.

    Raises:
        InputError: it has another form.
    """
    kind = None if value is None else value.get("type")
    if value is None:
        return None
    if kind in ("text", "json_object"):
        check_fields(value, ("type",), "response_format", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise InputError(
            f"<<param>>.type is {short_repr(kind)}; give text, json_object or json_schema", param="response_format"
        )
    schema = value.get("json_schema")
    check_fields(value, ("type", "json_schema"), "response_format", "response_format")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        shape = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        raise InputError(f"<<param>> has no schema; give {shape}", param="response_format")
    check_fields(schema, ("name", "description", "schema", "strict", "type"), "response_format.json_schema", "response_format")
    return StructuredOutputsParams(json=schema["schema"])


def _make(kind: Any, values: dict[str, Any], param: str) -> Any:
    check_fields(values, list(kind.__dataclass_fields__), param, param)
    return kind(**{name: value for name, value in values.items() if value is not None})


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 20):
        raise InputError(f"<<param>> has the key {short_repr(name)}; its keys are token ids", param="logit_bias")
    return int(name)
