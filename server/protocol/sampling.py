"""Fields about sampling and about the request as a whole, which chat and completions share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ...engine.sampling_params import RepetitionDetectionParams, SamplingParams
from ...engine.structured_outputs import StructuredOutputsParams
from ...mm.errors import InputError, short_repr
from ...mm.message_fields import check_fields
from .body import Body, Many, Part, Refused

_PARAMS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "skip_special_tokens"),
    *("include_stop_str_in_output", "allowed_token_ids", "prompt_logprobs"),
)
_TEMPLATES = "the server's chat template is used; start it with --chat-template"
OWNER: Refused = {
    "chat_template": ((), _TEMPLATES),
    "priority": ((0,), "requests run in order of arrival"),
    "logits_processors": (([], {}), "requests cannot name logits processors"),
    "lora_request": ((), "the server has one adapter; start it with --adapter"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "answers are not stored"),
}
"""Fields that only the server's options decide: the values that a request may state, and why others are refused."""


class StreamOptions(Part):
    refused: ClassVar[Refused] = {"include_obfuscation": ((False,), "chunks are not padded")}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """Fields with the names and meanings of OpenAI, and vLLM's further ones."""

    n: int | None = None
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
    repetition_detection: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None

    def sampling_params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """Return the parameters of this request. `own`: those that the endpoint has computed.

        Raises:
            InputError: a value is out of range, or two fields exclude each other.
        """
        values = {name: getattr(self, name) for name in _PARAMS if getattr(self, name) is not None}
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options need stream=true; set it, or remove them", param="stream_options")
        if self.logit_bias is not None:
            values["logit_bias"] = {_token(name): bias for name, bias in self.logit_bias.items()}
        if self.repetition_detection is not None:
            values["repetition_detection"] = _make(RepetitionDetectionParams, self.repetition_detection, "repetition_detection")
        formats = [own.pop("structured_outputs", None), self._structured_outputs(), response_format(self.response_format)]
        given = [one for one in formats if one is not None]
        if len(given) > 1:
            reason = "response_format, structured_outputs and a required tool call exclude each other; give one of them"
            raise InputError(reason, param="response_format")
        if given:
            values["structured_outputs"] = given[0]
        return replace(defaults, **{**values, **own})

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
        given = self.structured_outputs
        return None if given is None else _make(StructuredOutputsParams, given, "structured_outputs")


def response_format(given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the format of OpenAI's response_format, None for text.

    Raises:
        InputError: it has another form.
    """
    kind = None if given is None else given.get("type")
    if given is None:
        return None
    if kind in ("text", "json_object"):
        check_fields(given, ("type",), "response_format", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise InputError(
            f"response_format.type is {short_repr(kind)}; give text, json_object or json_schema", param="response_format"
        )
    schema = given.get("json_schema")
    check_fields(given, ("type", "json_schema"), "response_format", "response_format")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        form = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        raise InputError(f"response_format has no schema; give {form}", param="response_format")
    check_fields(schema, ("name", "description", "schema", "strict", "type"), "response_format.json_schema", "response_format")
    return StructuredOutputsParams(json=schema["schema"])


def _make(kind: Any, values: dict[str, Any], param: str) -> Any:
    check_fields(values, list(kind.__dataclass_fields__), param, param)
    return kind(**{name: value for name, value in values.items() if value is not None})


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 20):
        raise InputError(f"logit_bias has the key {short_repr(name)}; its keys are token ids", param="logit_bias")
    return int(name)
