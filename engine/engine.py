"""`Engine`: a loaded model, which `LLM`, `AsyncLLM`, live sessions, tasks and the server share."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch

from ..callers.errors import InputError, check_utf8, short_repr, typed
from ..callers.pacing import releasing_gil
from ..callers.plain import builtin_copy
from ..kernels.installation import warn_if_hidden
from ..mm.parse import modality_of_path
from ..mm.types import ItemPlan
from ..processors.device import MediaDevice
from ..processors.files import MODULES
from ..processors.interface import ProcessingInfo, SupportsPhonemes, SupportsTranscription
from ..processors.sentence_transformers import SentenceTransformersConfig
from ..processors.text.message_parts import holds_files
from ..processors.text.tokenizer import Tokenizer
from .config import EngineConfig, make_config
from .core_info import CoreInfo, task_without_head
from .errors import NotPicklable
from .frontend.adapters import AdapterChoice, RequestAdapters, as_adapters
from .frontend.arguments import (
    REQUEST_KEYS,
    as_priorities,
    check_sleep_level,
    check_wake_tags,
    drop_vllm_arguments,
    read_chat_options,
    read_chat_template,
    request_template,
)
from .frontend.encoder_server import serve_encoder
from .frontend.engine_loop import EngineLoop
from .frontend.input_processor import InputProcessor
from .frontend.item_store import ItemStore
from .frontend.media import MultiModalSettings
from .frontend.prompt_text import PromptOptions
from .frontend.prompts import find_salt
from .frontend.remote_encoder import RemoteEncoder, remote_encoder
from .frontend.request import RequestInput
from .frontend.request_handle import RequestHandle, ResetPrefixCache, UpdateWeights
from .frontend.trace import span_observer
from .frontend.weights import KEEPS_REQUESTS, UpdateMode, WeightsSource, check_mode, read_update
from .model_files import ModelFiles, load_model_files
from .outputs import RequestOutput
from .pooling_params import check_pooling
from .sampling_params import SamplingParams, from_generation_config
from .setup.connectors import open_item_store, rows_namespace
from .setup.hub import find_model
from .setup.implementation import resolve_architecture
from .setup.loader import load_core
from .setup.lora_resolvers import check_default_adapters, make_resolvers
from .setup.memory_plan import MemoryPlan
from .setup.resolve import load_processing
from .stats import EngineStats

if TYPE_CHECKING:
    from .answer_report import AnswerReport
    from .option_types import ChatOptions
    from .voices import Voices


_POLL_SECONDS = 0.005  # between two looks whether all requests have ended
_UNLIMITED_TOKENS = 1e9  # transformers writes 1e30 as model_max_length of a tokenizer without a limit
OTHERS = ("metrics", "tracing", "chat_template")
"""Options of `LLM` that are not in EngineConfig."""
Params = SamplingParams | Sequence[SamplingParams] | None


def make_engine(model: str | os.PathLike[str], options: Mapping[str, Any]) -> Engine:
    """Make an engine from the arguments of `LLM`."""
    others = {name: value for name, value in options.items() if name in OTHERS}
    return Engine(make_config(model, {name: value for name, value in options.items() if name not in OTHERS}), **others)


class Engine(NotPicklable):
    """A loaded model: its configuration, tokenizer, inputs and the loop that computes. It makes requests and does not wait.

    Attributes:
        info: what the core says of the model.
        default_params: sampling parameters of requests that give none.
        ocr_prompts: names of prompts that `ocr` takes as its question.
        speech: the model's interface for transcription, or None.
        sentence_transformers: settings of a checkpoint in the layout of sentence-transformers, else None.
        truncates_pairs: `score` cuts pairs of texts that are too long, as sentence-transformers' CrossEncoder does.
        adapters: those that requests may choose, by name.
        voices: those of a model that turns texts into speech, else None.
        talker: generates the codes and samples of `speak` with `load_talker=True`, else None.

    Raises:
        ConfigError, CheckpointError, HubError: see `LLM`.
    """

    def __init__(
        self,
        config: EngineConfig,
        metrics: Any = False,
        tracing: Any = False,
        chat_template: str | os.PathLike[str] | None = None,
    ) -> None:
        warn_if_hidden()
        self.config = find_model(config)
        files = load_model_files(self.config.model, self.config.adapter, self.config.hf_overrides)
        resolve_architecture(files)  # an unknown architecture is reported before a missing tokenizer
        self.tokenizer = Tokenizer(files.tokenizer_folder)
        if files.sentence_transformers is not None and files.sentence_transformers.lower_cases:
            self.tokenizer.lower_case()
        info = load_processing(files, self.config.mm_processor_kwargs, self.tokenizer)
        self._template = read_chat_template(chat_template) if chat_template else info.chat_template or files.find_template()
        self.tokenizer.chat_template = self._template
        self._architecture = files.architecture
        self.takes_media, self.ocr_prompts, self.output_shape = bool(info.modalities), info.ocr_prompts, info.output_shape
        self.takes_instruction, self.document_instruction = info.takes_instruction, info.document_instruction
        self.embeds_text = not self.takes_media and (self._template is None or (files.root / MODULES).is_file())
        core, self.config = load_core(self.config, files, info, self.tokenizer)
        self._load_talker = None
        if self.config.load_talker:
            from .setup.talker import load_talker

            self._load_talker = partial(load_talker, self.config, files)
        self.talker = None if self._load_talker is None else self._load_talker()
        self._sleep_lock = threading.Lock()  # the engine and the talker sleep and wake together
        self.max_model_len, self.dtype = core.info.max_model_len, getattr(torch, core.info.dtype)
        ends = [token for text in info.end_tokens if (token := self.tokenizer.token_to_id(text)) is not None]
        self.eos_token_ids = tuple(dict.fromkeys((*files.eos_token_ids, *ends)))
        self.default_params = _default_params(self.config, files)
        self.speech = info if isinstance(info, SupportsTranscription) else None
        self.voices = _find_voices(info, files)
        hidden_size = core.info.hidden_size if self.config.enable_prompt_embeds else None
        longest = _default_max_tokens(files.sentence_transformers, self.tokenizer)
        options = PromptOptions(self.config.max_template_seconds, hidden_size, core.info.can_generate, longest)
        self.truncates_pairs = files.is_cross_encoder
        namespace = rows_namespace(self.config, files, core.info)
        remote = remote_encoder(self.config, core.info, namespace)
        items = open_item_store(self.config, files, getattr(torch, core.info.dtype))
        settings = _media_settings(self.config, files, core.info, remote, items)
        self.sentence_transformers = files.sentence_transformers
        self.inputs = InputProcessor(info, self.tokenizer, settings, self.max_model_len, options)
        loop = (self.config.seed, self.config.media_workers, self.config.sampling_limits)
        self.loop = EngineLoop(core, self.tokenizer, self.eos_token_ids, *loop)
        check_default_adapters(self.config, info.modalities)
        resolvers = make_resolvers(self.config)
        self.adapters = RequestAdapters(self.loop, self.tokenizer.token_to_id, resolvers, self.config.default_mm_loras)
        if self.config.warm_up:
            self.inputs.media.warm_up([modality for modality in info.modalities if self.config.encodes(modality)])
        self._observe(metrics, tracing)
        self._encoder_server = serve_encoder(self.config, self.loop, namespace)
        if self._encoder_server is not None:
            weakref.finalize(self, self._encoder_server.close)

    def _observe(self, metrics: Any, tracing: Any) -> None:
        if metrics:
            from .frontend.metrics import register

            self.loop.observers.append(register(metrics, self.loop, self.inputs.media))
        if tracing:
            self.loop.observers.append(span_observer(tracing))

    def describe(self, name: str) -> str:
        """Return the repr of a face with this name: the model, how it computes, and whether the engine is closed."""
        info, quantization = self.info, self.config.quantization
        facts: dict[str, object] = {"model": self.config.model, "architecture": self._architecture}
        facts |= {"device": info.device, "dtype": info.dtype} | ({} if quantization is None else {"quantization": quantization})
        facts |= {"closed": True} if self.loop.closed else {}
        return f"{name}({', '.join(f'{fact}={value!r}' for fact, value in facts.items())})"

    @property
    def info(self) -> CoreInfo:
        return self.loop.core.info

    @cached_property
    def checkpoint_digests(self) -> list[str]:
        """Hashes of the checkpoint and of the adapter that was merged with it, if any. Raises OSError if one cannot be read."""
        from ..checkpoints.identity import checkpoint_digest

        return [checkpoint_digest(folder) for folder in (self.config.model, self.config.adapter) if folder]

    def request(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        request_id: str | None = None,
        **chat: Unpack[ChatOptions],
    ) -> RequestHandle:
        """Make a request for one prompt or conversation; see `LLM.request`."""
        if prompt is None or isinstance(prompt, bytes | int | float):
            reason = f"a prompt must be a string, a mapping, token ids or a list of messages, not {typed(prompt)}"
            raise InputError(reason, code="invalid_value", param="prompt")
        (adapter,) = as_adapters(chat.pop("adapter", None), chat.pop("lora_request", None), 1)
        options = drop_vllm_arguments(chat)
        (params,) = self.params(sampling_params, 1)
        (priority,) = as_priorities(priority, 1)
        request_id = builtin_copy(request_id, "request_id")
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise InputError(
                f"<<param>> must be a non-empty string, not {short_repr(request_id)}", code="invalid_value", param="request_id"
            )
        check_utf8(request_id or "", "request_id")
        is_chat = isinstance(prompt, list | tuple) and not all(isinstance(token, int) for token in releasing_gil(prompt))
        if is_chat:
            return self.handle(prompt, params, self.chat_options(**options), priority, request_id, adapter)
        read_chat_options(options, self.config.max_template_chars)
        if options:
            raise InputError(f"{next(iter(options))} is an argument for messages; in any other prompt, give it as a key")
        return self.handle(prompt, params, None, priority, request_id, adapter)

    def media_request(self, prompt: object) -> RequestHandle:
        """Make a request of `encode_media` for one prompt, for `serve` or `AsyncLLM.answer`."""
        if self.config.parts != "encoder":
            raise InputError('this engine returns no encoder rows; load the model with <<parts=>>"encoder"', code="unsupported")
        parse = partial(self.inputs.parse_media, prompt)
        return RequestHandle(RequestInput(parse, SamplingParams(max_tokens=1), salt=find_salt(prompt)))

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and caches; see `LLM.sleep`."""
        check_sleep_level(level)
        with self._sleep_lock:
            self.loop.sleep().result()
            self.talker = None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Read the weights again, with empty caches; see `LLM.wake_up`."""
        check_wake_tags(tags)
        with self._sleep_lock:
            self.loop.wake_up().result()
            if self.talker is None and self._load_talker is not None:
                self.talker = self._load_talker()

    def update_weights(self, weights: WeightsSource, mode: UpdateMode = "wait") -> int:
        """Replace weights and return the new version; see `LLM.update_weights`."""
        check_mode(mode)
        if self.config.encoder is not None:
            reason = "the weights of an engine with <<encoder>> cannot be updated: its encoders would keep theirs"
            raise InputError(f"{reason}; make new engines", code="unsupported")
        self.loop.check_open()
        tensors = read_update(weights)
        with self._sleep_lock:
            self.loop.updating = mode not in KEEPS_REQUESTS
            try:
                self._wait_for_requests(mode)
                self.loop.call(UpdateWeights(tensors, mode)).result()
                return self.weights_version
            finally:
                self.loop.updating = False

    @property
    def weights_version(self) -> int:
        """See `LLM.weights_version`."""
        return self.loop.weights_version

    def _wait_for_requests(self, mode: UpdateMode) -> None:
        """Wait until all requests have ended. Raise InputError if sessions are open, which do not end by themselves."""
        while mode == "wait" and self.loop.num_unfinished:
            self.loop.check_open()
            if self.loop.num_live:
                raise InputError('live sessions are open; close them, or give <<param=>>"pause" or "abort"', param="mode")
            time.sleep(_POLL_SECONDS)

    def reset_prefix_cache(self) -> bool:
        """Free all KV blocks that are kept for reuse. Return False if blocks of running sequences remain."""
        self.loop.check_open()
        return bool(self.loop.call(ResetPrefixCache()).result())

    @property
    def asleep(self) -> bool:
        """True while requests are refused, from `sleep` to `wake_up`."""
        return self.loop.asleep

    @property
    def media_full(self) -> bool:
        """True while media of the requests take `max_total_bytes` of the media policy."""
        return self.inputs.media.budget.is_full

    @property
    def stats(self) -> EngineStats:
        """Counters of sequences, blocks, caches and preemptions, at most 50 ms old while requests are computed."""
        stats = self.loop.stats
        return replace(stats, transfers=(*stats.transfers, *self.inputs.media.transfers))

    def close(self) -> None:
        """End every request with an error, then all threads and processes. Garbage collection of the engine does the same."""
        self.loop.close()
        if self._encoder_server is not None:
            self._encoder_server.close()
        self.inputs.media.close()

    def plan(
        self, prompt: object, mm_processor_kwargs: Mapping[str, Any] | None = None, cache_salt: str | None = None
    ) -> list[ItemPlan]:
        """Return the sizes of the items from their headers; see `LLM.plan`."""
        if modality := modality_of_path(prompt):
            advice = f'give {{"multi_modal_data": {{"{modality}": path}}}}'
            raise InputError(
                f"<<param=>>{short_repr(prompt)} is a text to plan, but a file has this name; {advice}", param="prompt"
            )
        prompt = builtin_copy(prompt, "prompt", "the prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt):
            return self.inputs.plan_chat(prompt, mm_processor_kwargs, cache_salt)
        for name, value in ("mm_processor_kwargs", mm_processor_kwargs), ("cache_salt", cache_salt):
            if value is not None:
                if not isinstance(prompt, Mapping):
                    raise InputError(f"{name} needs a prompt with multi_modal_data; give the prompt as a mapping")
                prompt = {**prompt, name: value}
        return self.inputs.plan(prompt)

    def tokenize(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None, **options: Unpack[ChatOptions]
    ) -> tuple[int, ...]:
        """Return the token ids of the prompt of a conversation, from the headers of its media. Nothing is decoded.

        Args:
            max_tokens: tokens that the prompt may have; None: as many as the model takes.
            options: as in `chat`.

        Raises:
            InputError, MediaError: errors of `chat` that can be found without decoding.
        """
        return self.inputs.tokenize_chat(messages, *self.chat_options(**options), max_tokens)

    def count_tokens(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> int:
        """Return the number of tokens of `tokenize`."""
        return len(self.tokenize(messages, **options))

    @overload
    def explain(self, output: None = None) -> MemoryPlan: ...
    @overload
    def explain(self, output: RequestOutput) -> AnswerReport: ...
    @overload
    def explain(self, output: RequestOutput | None) -> MemoryPlan | AnswerReport: ...
    def explain(self, output: RequestOutput | None = None) -> MemoryPlan | AnswerReport:
        """Return the maximum memory of this engine and the largest items it accepts or, with an output, how it was made."""
        from .answer_report import report_answer
        from .setup.doctor import explain

        if output is None:
            return explain(self.config)
        if not isinstance(output, RequestOutput):
            raise InputError(
                f"<<param>> must be an output of this engine, not {typed(output)}", code="invalid_value", param="output"
            )
        return report_answer(output, self.stats.no_drafts)

    def embedding_size(self, pooling: str | None = None) -> int:
        """Return the length of the vectors of `embed`.

        Raises:
            InputError: `pooling` is unknown, or the checkpoint's layers on pooled vectors take vectors of another length.
        """
        check_pooling(pooling)
        info = self.info
        if (pooling or info.pooling) == "tokens":
            return info.token_size
        if pooling is None or pooling.count("+") == info.pooling.count("+"):
            return info.vector_size
        if info.vector_size != info.hidden_size * (info.pooling.count("+") + 1):
            reason = f"<<param=>>{short_repr(pooling)} gives vectors of another length than {short_repr(info.pooling)}"
            raise InputError(
                f"{reason}, for which this checkpoint's layers are made; leave it out", code="unsupported", param="pooling"
            )
        return info.hidden_size * (pooling.count("+") + 1)

    def chat_options(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments `render` and `request` of `InputProcessor.parse_chat` from the options of `chat`."""
        options = read_chat_options(options, self.config.max_template_chars)
        chosen = options.pop("chat_template", None)
        template = self._template if isinstance(chosen, str | None) and not chosen else request_template(chosen)
        if template is None:
            task = task_without_head(self.info)
            if task is not None and not self.speech:
                raise InputError(f"this model does not chat: {task}", code="unsupported")
            advice = "<<give_template_or_prompt>>"
            if self.speech:
                advice = "this model transcribes speech: <<transcribe_or_prompt>>"
            raise InputError(f"the checkpoint has no chat template; {advice}", code="unsupported")
        request = {name: options.pop(name) for name in REQUEST_KEYS if name in options}
        variables = options.pop("chat_template_kwargs", None) or {}
        return {**variables, **options, "template": template, "isolated": template != self._template}, request

    def handle(
        self,
        prompt: Any,
        params: SamplingParams,
        chat: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
        priority: int = 0,
        request_id: str | None = None,
        adapter: AdapterChoice = None,
    ) -> RequestHandle:
        """Make a request. `chat`: the render and request options of a conversation; None for a prompt."""
        if self.config.parts == "encoder":
            raise InputError("this engine has only the encoder; <<load_whole>>", code="unsupported")
        inputs, reserve = self.inputs, self._reserve(params)
        prepare = partial(inputs.parse, prompt) if chat is None else partial(inputs.parse_chat, prompt, *chat)
        has_files, salt = chat is not None and holds_files(prompt), find_salt(prompt if chat is None else chat[1])
        request = RequestInput(partial(prepare, reserve), params, priority, request_id, has_files=has_files, salt=salt)
        if adapter is None:
            return RequestHandle(replace(request, default_adapter=self.adapters.default))
        return RequestHandle(replace(request, adapter=self.adapters.lease(adapter)))

    def _reserve(self, params: SamplingParams) -> int:
        """Return how many tokens `fit="context"` leaves for the answer: max_tokens, at most a quarter of the context."""
        return min(params.max_tokens or self.max_model_len, max(1, self.max_model_len // 4))

    def params(self, params: Params, count: int) -> Sequence[SamplingParams]:
        """Return one copy per prompt, so that later changes by the caller have no effect."""
        if params is None or isinstance(params, SamplingParams):
            return [(self.default_params if params is None else params).clone()] * count
        valid = isinstance(params, list | tuple) and all(isinstance(entry, SamplingParams) for entry in params)
        if not valid:
            raise InputError(f"sampling_params must be a SamplingParams or a list of them, not {typed(params)}")
        if len(params) != count:
            raise InputError(f"{len(params)} sampling_params for {count} prompts; give one, or one per prompt")
        copies = {id(entry): entry for entry in params}
        copies = {key: entry.clone() for key, entry in releasing_gil(copies.items())}
        return [copies[id(entry)] for entry in params]


def _default_max_tokens(settings: SentenceTransformersConfig | None, tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens to which sentence-transformers cuts a text; None: the longest prompt's."""
    if settings is None or settings.max_tokens is not None:
        return None if settings is None else settings.max_tokens
    longest = tokenizer.model_max_length
    return int(longest) if isinstance(longest, int | float) and 0 < longest < _UNLIMITED_TOKENS else None


def _find_voices(info: ProcessingInfo, files: ModelFiles) -> Voices | None:
    if not isinstance(info, SupportsPhonemes):
        return None
    from .voices import find_voices

    return find_voices(files.root, info.phoneme_rule())


def _default_params(config: EngineConfig, files: ModelFiles) -> SamplingParams:
    """Return the parameters of requests that give none: those of generation_config.json, unless it is ignored."""
    stored = files.generation_config if config.generation_config == "auto" else {}
    return from_generation_config(stored, config.override_generation_config)


def _media_settings(
    config: EngineConfig, files: ModelFiles, core: CoreInfo, remote: RemoteEncoder | None, items: ItemStore | None
) -> MultiModalSettings:
    return MultiModalSettings(
        config.media,
        config.limit_mm_per_prompt,
        # other engines may have other folders
        files.processing_digest() if config.kv_transfer.is_shared or items is not None else files.fingerprint,
        core.row_bytes,
        getattr(torch, core.dtype),
        config.trust_uuid,
        config.mm_processor_cache_bytes,
        max_uuids=config.max_uuids,
        kernels=config.kernels,
        device=None if config.media_device == "cpu" else MediaDevice(config.torch_media_device),
        encodes=config.parts != "decoder",
        remote_encoder=remote,
        item_store=items,
    )
