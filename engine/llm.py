"""`LLM`: the synchronous interface of an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from ..mm.cache import CacheStats
from ..mm.errors import InputError, check_utf8, short_repr, typed
from ..mm.pacing import releasing_gil
from ..mm.parse import modality_of_path
from ..mm.plain import builtin_copy, builtin_list, check_classes, reading
from ..mm.types import ItemPlan
from ..processors.device import MediaDevice
from ..processors.files import MODULES
from ..processors.interface import SupportsTranscription
from ..processors.text.message_parts import holds_files
from ..processors.text.tokenizer import Tokenizer
from .config import EngineConfig, make_config
from .engine_args import EngineArgs
from .errors import NotPicklable, warn_of_failures
from .frontend.arguments import (
    REQUEST_KEYS,
    Messages,
    as_conversations,
    as_priorities,
    as_prompts,
    check_sleep_level,
    drop_vllm_arguments,
    read_chat_options,
    read_chat_template,
    request_template,
    unknown_argument,
)
from .frontend.engine_loop import EngineLoop
from .frontend.input_processor import InputProcessor
from .frontend.media import MultiModalSettings
from .frontend.prompts import find_salt, read_prompt
from .frontend.request_handle import RequestHandle
from .frontend.trace import span_observer
from .model_files import ModelFiles, load_model_files
from .progress import ShowProgress, make_progress
from .sampling_params import SamplingParams, from_generation_config
from .session import LiveSession
from .setup.doctor import explain
from .setup.hub import find_model
from .setup.implementation import resolve_architecture
from .setup.loader import load_core
from .setup.memory_plan import MemoryPlan
from .setup.resolve import load_processing
from .setup.talker import load_talker
from .types import CoreInfo, EngineStats, RequestOutput

Params = SamplingParams | Sequence[SamplingParams] | None
_GENERATE = ("prompts", "sampling_params", "use_tqdm", "priority", "on_error")


class LLM(NotPicklable):
    """A loaded model.

    Args:
        model: path of a checkpoint's folder in the layout of the Hugging Face Hub, or a model's name there (ORG/NAME), which
            is downloaded unless the Hub's cache holds it.
        metrics: True or a prometheus_client.CollectorRegistry to export metrics, see `engine.frontend.metrics`.
        tracing: True or a TracerProvider to export OpenTelemetry spans: one per request, with one child per stage.
        chat_template: replaces the checkpoint's: Jinja source, or the path of a file (a text without braces is a path).
        options: further options of the engine. `engine.config.EngineConfig` documents all options.

    Attributes:
        default_params: sampling parameters of requests that give none.
        ocr_prompts: names of prompts that `ocr` takes as its question.
        speech: the model's interface for transcription, or None.
        talker: generates the codes and samples of `speak` with `load_talker=True`, else None.

    Raises:
        ConfigError: an unknown or contradictory option, or an architecture that is not supported.
        CheckpointError: weights or tokenizer files are missing, surplus or unreadable.
        HubError: a model that is given by name cannot be downloaded; the code says why.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        max_model_len: int | str | None = None,
        max_num_seqs: int = 64,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        generation_config: str = "auto",
        metrics: Any = False,
        tracing: Any = False,
        chat_template: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        named = {
            "dtype": dtype,
            "device": device,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "limit_mm_per_prompt": limit_mm_per_prompt,
            "mm_processor_kwargs": mm_processor_kwargs,
            "seed": seed,
            "generation_config": generation_config,
        }
        self.config = find_model(make_config(model, named | options))
        files = load_model_files(self.config.model, self.config.adapter, self.config.hf_overrides)
        resolve_architecture(files)  # an unknown architecture is reported before a missing tokenizer
        self._tokenizer = Tokenizer(files.tokenizer_folder)
        info = load_processing(files, self.config.mm_processor_kwargs, self._tokenizer)
        self._template = read_chat_template(chat_template) if chat_template else info.chat_template or files.find_template()
        self._tokenizer.chat_template = self._template
        self.takes_media, self.ocr_prompts, self.output_shape = bool(info.modalities), info.ocr_prompts, info.output_shape
        self.takes_instruction, self.document_instruction = info.takes_instruction, info.document_instruction
        self.embeds_text = not self.takes_media and (self._template is None or (files.path / MODULES).is_file())
        core, self.config = load_core(self.config, files, info, self._tokenizer)
        self._load_talker = partial(load_talker, self.config, files) if self.config.load_talker else None
        self.talker = None if self._load_talker is None else self._load_talker()
        self._sleep_lock = threading.Lock()  # the engine and the talker sleep and wake together
        self.max_model_len, self.dtype = core.info.max_model_len, getattr(torch, core.info.dtype)
        ends = [token for text in info.end_tokens if (token := self._tokenizer.token_to_id(text)) is not None]
        self.eos_token_ids = tuple(dict.fromkeys((*files.eos_token_ids, *ends)))
        defaults = files.generation_config if self.config.generation_config == "auto" else {}
        self.default_params = from_generation_config(defaults | dict(self.config.override_generation_config))
        self.speech = info if isinstance(info, SupportsTranscription) else None
        hidden_size = core.info.hidden_size if self.config.enable_prompt_embeds else None
        limits = (self.max_model_len, self.config.max_template_seconds, hidden_size)
        self._inputs = InputProcessor(info, self._tokenizer, _media_settings(self.config, files, core.info), *limits)
        loop = (self.config.seed, self.config.media_workers, self.config.sampling_limits)
        self._engine_loop = EngineLoop(core, self._tokenizer, self.eos_token_ids, *loop)
        if self.config.warm_up:
            self._inputs.media.warm_up([modality for modality in info.modalities if self.config.encodes(modality)])
        if metrics:
            from .frontend.metrics import register

            self._engine_loop.observers.append(register(metrics, self._engine_loop, self._inputs.media))
        if tracing:
            self._engine_loop.observers.append(span_observer(tracing))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an LLM from all options in one object."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: object = None,
        sampling_params: Params = None,
        use_tqdm: ShowProgress = True,
        priority: int | Sequence[int] = 0,
        on_error: str = "return",
        **unused: Any,
    ) -> list[RequestOutput]:
        """Answer one prompt or a list of prompts. Return the outputs in the order of the prompts.

        A prompt that cannot be served has an output with `error` set and the finish reason "error"; the others are answered,
        and one warning in the log has the number of failed prompts and the first reason.
        Interrupting the call aborts unfinished requests and frees their memory.

        Args:
            prompts: one prompt or an iterable of prompts: a string, a list of token ids, or
                `{"prompt": str}` or `{"prompt_token_ids": [int]}` with "multi_modal_data":
                `{"image": one or a list, "video": ...}`; each item needs one placeholder in the prompt. Or, with
                `enable_prompt_embeds`, `{"prompt_embeds": [tokens, hidden]}`. Further keys:
                "multi_modal_uuids" (names of items), "mm_processor_kwargs" (options of this request), "cache_salt"
                (requests with different salts share no cache), "fit": "context" (shrink media until the prompt fits).
            sampling_params: one for all prompts, one per prompt, or None for the checkpoint's defaults.
            use_tqdm: show a progress bar on terminals and in notebooks; "log" writes to the log; see `engine.progress`.
            priority: one for all prompts, or one per prompt; smaller values are served first.
            on_error: "return" outputs with errors, or "raise" the first error, which ends the other prompts.
            unused: vLLM's other arguments, such as lora_request; None is the only value.

        Raises:
            InputError: `prompts`, `sampling_params` or `priority` has a wrong type or length.
        """
        if remaining := drop_vllm_arguments(unused):
            raise unknown_argument(next(iter(remaining)), _GENERATE)
        listed = as_prompts(prompts)
        given, priorities = self._params(sampling_params, len(listed)), as_priorities(priority, len(listed))
        handles: Iterable[RequestHandle] = (
            self._handle(prompt, params, priority=own)
            for prompt, params, own in releasing_gil(zip(listed, given, priorities, strict=True))
        )
        if len(set(priorities)) > 1:
            handles = list(handles)  # which are then submitted by priority
        return self._answers(handles, len(listed), use_tqdm, on_error)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: ShowProgress = True,
        add_generation_prompt: bool = True,
        chat_template: str | os.PathLike[str] | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_error: str = "return",
        **request: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of conversations, see `generate`.

        Args:
            messages: `{"role", "content"}`. The content is a string or a list of parts of the types text, image_url,
                video_url, audio_url (objects with a "url"), input_audio, image, video and audio. A part may have "uuid" and
                its own options. `media` restricts URLs and paths, see `mm.media.policy.MediaPolicy`.
            chat_template: replaces the checkpoint's: Jinja source, or a `pathlib.Path` of a file. It is rendered in a worker
                process.
            continue_final_message: leave the last message open, so that the model continues it.
            tools, chat_template_kwargs: variables of the template.
            on_error: as in `generate`.
            request: mm_processor_kwargs, cache_salt and fit, as in a prompt of `generate`.

        Raises:
            InputError: `messages` has a wrong type, an argument is unknown, or there is no chat template.
        """
        request = drop_vllm_arguments(request)
        options = self._chat_options(
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            **request,
        )
        conversations = as_conversations(messages)
        given = self._params(sampling_params, len(conversations))
        handles = (
            self._handle(messages, params, options)
            for messages, params in releasing_gil(zip(conversations, given, strict=True))
        )
        return self._answers(handles, len(conversations), use_tqdm, on_error)

    def encode_media(self, prompts: object, use_tqdm: bool = True, on_error: str = "return") -> list[RequestOutput]:
        """Return the encoder rows of the items of one prompt or a list of prompts, as `encoded` of their outputs.

        The engine needs `parts="encoder"`. Each EncodedItem may take the place of its item in a prompt of an engine of the
        same checkpoint, which then gives the same answer.

        Args:
            prompts: `{"multi_modal_data": ...}` with the other keys of a prompt of `generate`. The text is not read.
            on_error: as in `generate`.

        Raises:
            InputError: `prompts` has another form, or the engine has a decoder.
        """
        listed = as_prompts(prompts)
        return self._answers(map(self.media_request, releasing_gil(listed)), len(listed), use_tqdm, on_error)

    def media_request(self, prompt: object) -> RequestHandle:
        """Make a request of `encode_media` for one prompt, for `serve` or `AsyncLLM.answer`."""
        if self.config.parts != "encoder":
            raise InputError('this engine returns no encoder rows; load the model with parts="encoder"')
        parse = partial(self._inputs.parse_media, prompt)
        return RequestHandle(parse, SamplingParams(max_tokens=1), salt=find_salt(prompt))

    def serve(
        self, handles: Sequence[RequestHandle], use_tqdm: ShowProgress = True
    ) -> Generator[tuple[int, RequestOutput], RequestHandle | Sequence[RequestHandle] | None, None]:
        """Yield (index, output) of each request when it finishes. Closing the generator aborts the rest.

        The caller may send further requests to the generator after an output; they get that output's index.
        """
        with reading(handles, "handles"):
            valid = isinstance(handles, Sequence) and all(isinstance(handle, RequestHandle) for handle in handles)
        if not valid:
            raise InputError(f"handles must be a list of what `request` returns, not {short_repr(handles)}", param="handles")
        return self._serve(handles, len(handles), use_tqdm)

    def _serve(
        self, handles: Iterable[RequestHandle], count: int, use_tqdm: ShowProgress
    ) -> Generator[tuple[int, RequestOutput], RequestHandle | Sequence[RequestHandle] | None, None]:
        with make_progress(count, use_tqdm) as progress, closing(self._engine_loop.serve(handles)) as outputs:
            found = next(outputs, None)
            while found is not None:
                following = yield found
                progress.update(int(following is None))
                found = next(outputs, None) if following is None else outputs.send(following)

    def stream(self, prompt: object, sampling_params: SamplingParams | None = None, **chat: Any) -> Iterator[RequestOutput]:
        """Answer one prompt or one conversation (a list of messages), and yield outputs as the answer grows.

        Each output holds all text so far, and later outputs remove none of it. Closing the generator aborts the request.

        Args:
            chat: with messages, the options of `chat`.
        """
        handle = self.request(prompt, sampling_params, **chat)
        return (output for _, output in self._engine_loop.serve([handle], stream=True))

    def live(self, prompt: object, sampling_params: SamplingParams | None = None, **chat: Any) -> LiveSession:
        """Open a session whose tokens stay in the KV cache: `answer()`, then `append(more)`, and the next answer.

        Args:
            prompt, chat: see `stream`.

        Raises:
            InputError: `sampling_params.n` is above 1, or the prompt has an unknown form.
        """
        if not isinstance(prompt, list | tuple):
            read_prompt(prompt)
        return LiveSession(self._engine_loop, self._inputs, self.request(prompt, sampling_params, **chat))

    def request(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        request_id: str | None = None,
        **chat: Any,
    ) -> RequestHandle:
        """Make a request for one prompt or one conversation (a list of messages), for `serve` or `AsyncLLM.answer`.

        Raises:
            InputError: an argument has a wrong type or is unknown.
        """
        check_classes(prompt=prompt)
        if prompt is None or isinstance(prompt, bytes | int | float):
            reason = f"a prompt must be a string, a mapping, token ids or a list of messages, not {typed(prompt)}"
            raise InputError(reason, param="prompt")
        chat = drop_vllm_arguments(chat)
        (params,) = self._params(sampling_params, 1)
        (priority,) = as_priorities(priority, 1)
        request_id = builtin_copy(request_id, "request_id")
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise InputError(f"request_id must be a non-empty string, not {short_repr(request_id)}", param="request_id")
        check_utf8(request_id or "", "request_id")
        if isinstance(prompt, list | tuple):
            prompt = builtin_list(prompt, "prompt")
        with reading(prompt, "prompt"):
            is_chat = isinstance(prompt, list | tuple) and not all(isinstance(token, int) for token in releasing_gil(prompt))
        if is_chat:
            return self._handle(prompt, params, self._chat_options(**chat), priority, request_id)
        read_chat_options(chat, self.config.max_template_chars)
        if chat:
            raise InputError(f"{next(iter(chat))} is an argument for messages; in any other prompt, give it as a key")
        return self._handle(prompt, params, None, priority, request_id)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights, caches and buffers until `wake_up`. Do nothing if the engine sleeps already.

        The tokenizer, the cache of processed items, and encoder rows in `encoder_cache_dir` are kept.

        Args:
            level: 1 or 2 as in vLLM; both do the same here.

        Raises:
            InputError: requests are being served, live sessions are open, or the engine was closed.
        """
        check_sleep_level(level)
        with self._sleep_lock:
            self._engine_loop.sleep().result()
            self.talker = None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Read the weights again, with empty caches. Do nothing if the engine is awake.

        Args:
            tags: "weights" and "kv_cache" as in vLLM; any of them wakes all.

        Raises:
            CheckpointError: the checkpoint was changed meanwhile, or cannot be read.
            InputError: there is too little memory, or the engine was closed.
        """
        with self._sleep_lock:
            self._engine_loop.wake_up().result()
            if self.talker is None and self._load_talker is not None:
                self.talker = self._load_talker()

    def reset_prefix_cache(self) -> bool:
        """Free all KV blocks that are kept for reuse. Return False if blocks of running sequences remain."""
        return bool(self._engine_loop.call(lambda engine_loop: engine_loop.core.reset_prefix_cache()).result())

    def reset_mm_cache(self) -> None:
        """Empty the cache of processed items."""
        self._inputs.media.reset_cache()

    @property
    def asleep(self) -> bool:
        """True while requests are refused, from `sleep` to `wake_up`."""
        return self._engine_loop.asleep

    @property
    def media_full(self) -> bool:
        """True while media of the requests take `max_total_bytes` of the media policy."""
        return self._inputs.media.budget.is_full

    def close(self) -> None:
        """End every request with an error, then end all threads and processes. Garbage collection of the LLM does the same."""
        self._engine_loop.close()
        self._inputs.media.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(
        self, prompt: object, mm_processor_kwargs: Mapping[str, Any] | None = None, cache_salt: str | None = None
    ) -> list[ItemPlan]:
        """Return the tokens, encoder rows and bytes of each item from the headers of its media. Nothing is decoded.

        Args:
            prompt: a prompt as in `generate`, or messages as in `chat`. Its text is optional, as in
                `{"multi_modal_data": {...}}`; that of messages is not read.
            mm_processor_kwargs, cache_salt: options of this request.

        Raises:
            InputError: the prompt has another form.
            MediaError: an item would be refused.
        """
        if modality := modality_of_path(prompt):
            how = f'give {{"multi_modal_data": {{"{modality}": path}}}}'
            raise InputError(f"prompt={short_repr(prompt)} is a text to plan, but a file has this name; {how}", param="prompt")
        prompt = builtin_copy(prompt, "prompt", "the prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt):
            return self._inputs.plan_chat(prompt, mm_processor_kwargs, cache_salt)
        for name, value in ("mm_processor_kwargs", mm_processor_kwargs), ("cache_salt", cache_salt):
            if value is not None:
                if not isinstance(prompt, Mapping):
                    raise InputError(f"{name} needs a prompt with multi_modal_data; give the prompt as a mapping")
                prompt = {**prompt, name: value}
        return self._inputs.plan(prompt)

    def explain(self) -> MemoryPlan:
        """Return the maximum memory of this engine and the largest items it accepts. `print` shows a table."""
        return explain(self.config)

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self._engine_loop.core.info.hidden_size

    @property
    def pooling(self) -> str:
        """The `pooling` of `embed` if a call names none: "tokens" for late-interaction models."""
        return self._engine_loop.core.info.pooling

    @property
    def logit_scale(self) -> float | None:
        """Factor of the cosines of CLIP and SigLIP in their logits, else None."""
        return self._engine_loop.core.info.logit_scale

    @property
    def logit_bias(self) -> float | None:
        """Bias of SigLIP's logits, else None."""
        return self._engine_loop.core.info.logit_bias

    def embedding_size(self, pooling: str | None = None) -> int:
        """Return the length of the vectors of `embed`."""
        info = self._engine_loop.core.info
        return info.token_size if (pooling or info.pooling) == "tokens" else info.vector_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self._engine_loop.core.info.vocab_size

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of items that the model takes."""
        return self._engine_loop.core.info.modalities

    @property
    def can_generate(self) -> bool:
        """False if the checkpoint has no head that writes text."""
        return self._engine_loop.core.info.can_generate

    @property
    def num_labels(self) -> int:
        """Number of classes of `classify`; 0 if the checkpoint has no classification head."""
        return self._engine_loop.core.info.num_labels

    @property
    def labels_tokens(self) -> bool:
        """True if these are classes of tokens (`...ForTokenClassification`), not of prompts."""
        return self._engine_loop.core.info.labels_tokens

    @property
    def stats(self) -> EngineStats:
        """Counters of sequences, blocks, caches and preemptions, at most 50 ms old while requests are computed."""
        return self._engine_loop.stats

    @property
    def mm_cache_stats(self) -> CacheStats:
        """Statistics of the cache of processed items."""
        return self._inputs.media.stats

    def _chat_options(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments `render` and `request` of `InputProcessor.parse_chat` from the options of `chat`."""
        options = read_chat_options(options, self.config.max_template_chars)
        given = options.pop("chat_template", None)
        template = self._template if isinstance(given, str | None) and not given else request_template(given)
        if template is None:
            how = "pass chat_template= or give a rendered prompt"
            if self.speech:
                how = "this model transcribes speech: call transcribe, or give a rendered prompt"
            raise InputError(f"the checkpoint has no chat template; {how}")
        request = {name: options.pop(name) for name in REQUEST_KEYS if name in options}
        variables = options.pop("chat_template_kwargs", None) or {}
        return {**variables, **options, "template": template, "isolated": template != self._template}, request

    def _handle(
        self,
        prompt: Any,
        params: SamplingParams,
        chat: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> RequestHandle:
        """Make a request. `chat`: the render and request options of a conversation; None for a prompt."""
        if self.config.parts == "encoder":
            raise InputError('this engine has only the encoder; call encode_media, or load the model without parts="encoder"')
        inputs, reserve = self._inputs, self._reserve(params)
        prepare = partial(inputs.parse, prompt) if chat is None else partial(inputs.parse_chat, prompt, *chat)
        handle = RequestHandle(partial(prepare, reserve), params, priority, request_id)
        handle.has_files, handle.salt = chat is not None and holds_files(prompt), find_salt(prompt if chat is None else chat[1])
        return handle

    def _reserve(self, params: SamplingParams) -> int:
        """Return how many tokens `fit="context"` leaves for the answer: max_tokens, at most a quarter of the context."""
        return min(params.max_tokens or self.max_model_len, max(1, self.max_model_len // 4))

    def _answers(
        self, handles: Iterable[RequestHandle], count: int, use_tqdm: ShowProgress, on_error: str
    ) -> list[RequestOutput]:
        check_classes(on_error=on_error)
        if not isinstance(on_error, str) or on_error not in ("return", "raise"):
            raise InputError(f'on_error={short_repr(on_error)} must be "return" or "raise"', param="on_error")
        outputs: dict[int, RequestOutput] = {}
        with closing(self._serve(handles, count, use_tqdm)) as results:
            for index, output in results:
                if output.error is not None and on_error == "raise":
                    number = f"prompt {index}: " if count > 1 else ""
                    raise replace(output.error, message=f"{number}{output.error}").exception()
                outputs[index] = output
        answers = [outputs[index] for index in sorted(outputs)]
        warn_of_failures([answer.error for answer in answers])
        return answers

    def _params(self, given: Params, count: int) -> Sequence[SamplingParams]:
        """Return one copy per prompt, so that later changes by the caller have no effect."""
        check_classes(sampling_params=given)
        if given is None or isinstance(given, SamplingParams):
            return [(self.default_params if given is None else given).clone()] * count
        given = builtin_list(given, "sampling_params") if isinstance(given, list | tuple) else given
        with reading(given, "sampling_params"):
            valid = isinstance(given, list | tuple) and all(isinstance(entry, SamplingParams) for entry in given)
        if not valid:
            raise InputError(f"sampling_params must be a SamplingParams or a list of them, not {typed(given)}")
        if len(given) != count:
            raise InputError(f"{len(given)} sampling_params for {count} prompts; give one, or one per prompt")
        copies = {id(entry): entry for entry in given}
        copies = {key: entry.clone() for key, entry in releasing_gil(copies.items())}
        return [copies[id(entry)] for entry in given]


def _media_settings(config: EngineConfig, files: ModelFiles, core: CoreInfo) -> MultiModalSettings:
    return MultiModalSettings(
        config.media,
        config.limit_mm_per_prompt,
        files.fingerprint,
        core.row_bytes,
        getattr(torch, core.dtype),
        config.trust_uuid,
        config.mm_processor_cache_bytes,
        max_uuids=config.max_uuids,
        kernels=config.kernels,
        device=None if config.media_device == "cpu" else MediaDevice(config.torch_media_device),
        encodes=config.parts != "decoder",
    )
