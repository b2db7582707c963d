"""`LLM`: the synchronous interface of an engine."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from ..callers.errors import InputError, hint, short_repr
from ..callers.pacing import releasing_gil
from ..mm.cache import CacheStats
from ..mm.types import ItemPlan
from ..processors.text.tokenizer import Tokenizer
from .config import EngineConfig
from .core_info import CoreInfo
from .engine import Engine, Params, make_engine
from .errors import NotPicklable, warn_of_failures
from .frontend.adapters import AdapterChoice, AdapterInfo, as_adapters
from .frontend.arguments import (
    Messages,
    as_conversations,
    as_priorities,
    as_prompts,
    drop_vllm_arguments,
    unknown_argument,
)
from .frontend.prompts import read_prompt
from .frontend.request_handle import RequestHandle
from .frontend.serve import serve
from .frontend.weights import UpdateMode, WeightsSource
from .outputs import RequestOutput
from .progress import ShowProgress, make_progress
from .sampling_params import SamplingParams
from .session import LiveSession
from .setup.memory_plan import MemoryPlan
from .stats import EngineStats

if TYPE_CHECKING:
    from ..processors.interface import SupportsTranscription
    from .answer_report import AnswerReport
    from .engine_args import EngineArgs
    from .option_types import ChatOptions, LLMOptions, VllmArguments

_RPC_METHODS = ("load_weights", "update_weights", "reload_weights")
_GENERATE = ("prompts", "sampling_params", "use_tqdm", "priority", "on_error", "adapter")


class LLM(NotPicklable):
    """A loaded model.

    Args:
        model: path of a checkpoint's folder in the layout of the Hugging Face Hub, or a model's name there (ORG/NAME), which
            is downloaded unless the Hub's cache holds it. "tiny-vl" and "tiny-asr" are the shipped models.
        metrics: True or a prometheus_client.CollectorRegistry to export metrics, see `engine.frontend.metrics`.
        tracing: True or a TracerProvider to export OpenTelemetry spans: one per request, with one child per stage.
        chat_template: replaces the checkpoint's: Jinja source, or the path of a file (a text without braces is a path).
        options: further options of the engine. `engine.config.EngineConfig` documents all options.

    Attributes:
        default_params: sampling parameters of requests that give none.
        ocr_prompts: names of prompts that `ocr` takes as its question.
        speech: the model's interface for transcription, or None.
        engine: what `AsyncLLM`, live sessions and tasks share with this interface.

    Raises:
        ConfigError: an unknown or contradictory option, or an architecture that is not supported.
        CheckpointError: weights or tokenizer files are missing, surplus or unreadable.
        HubError: a model that is given by name cannot be downloaded; the code says why.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[LLMOptions]) -> None:
        self.engine = make_engine(model, options)

    def __repr__(self) -> str:
        return self.engine.describe(type(self).__name__)

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Return the synchronous interface of an engine."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an LLM from all options in one object."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: object = None,
        sampling_params: Params = None,
        use_tqdm: ShowProgress = True,
        priority: int | Sequence[int] = 0,
        on_error: str = "return",
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        **unused: Unpack[VllmArguments],
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
            adapter: name of a loaded adapter, or one or None (the base model) per prompt, with `enable_lora`. vLLM's
                lora_request is the same argument; a LoRARequest is loaded on first use.
            unused: vLLM's other arguments; None is the only value.

        Raises:
            InputError: `prompts`, `sampling_params` or `priority` has a wrong type or length.
        """
        lora_request = unused.pop("lora_request", None)
        if remaining := drop_vllm_arguments(unused):
            raise unknown_argument(next(iter(remaining)), _GENERATE)
        listed = as_prompts(prompts)
        all_params, priorities = self.engine.params(sampling_params, len(listed)), as_priorities(priority, len(listed))
        adapters = as_adapters(adapter, lora_request, len(listed))
        self.engine.adapters.check(adapters)
        handles: Iterable[RequestHandle] = (
            self.engine.handle(prompt, params, priority=number, adapter=chosen)
            for prompt, params, number, chosen in releasing_gil(zip(listed, all_params, priorities, adapters, strict=True))
        )
        if len(set(priorities)) > 1:
            handles = list(handles)  # which are then submitted by priority
        return self._answers(handles, len(listed), use_tqdm, on_error)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: ShowProgress = True,
        on_error: str = "return",
        **chat: Unpack[ChatOptions],
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
            on_error, adapter, lora_request: as in `generate`.
            mm_processor_kwargs, cache_salt, fit, truncate_prompt_tokens, truncation_side: as in a prompt of `generate`.

        Raises:
            InputError: `messages` has a wrong type, an argument is unknown, or there is no chat template.
        """
        adapter, lora_request = chat.pop("adapter", None), chat.pop("lora_request", None)
        options = self.engine.chat_options(**drop_vllm_arguments(chat))
        conversations = as_conversations(messages)
        adapters = as_adapters(adapter, lora_request, len(conversations))
        self.engine.adapters.check(adapters)
        all_params = self.engine.params(sampling_params, len(conversations))
        handles = (
            self.engine.handle(messages, params, options, adapter=chosen)
            for messages, params, chosen in releasing_gil(zip(conversations, all_params, adapters, strict=True))
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
        return self.engine.media_request(prompt)

    def serve(
        self, handles: Sequence[RequestHandle], use_tqdm: ShowProgress = True
    ) -> Generator[tuple[int, RequestOutput], RequestHandle | Sequence[RequestHandle] | None, None]:
        """Yield (index, output) of each request when it finishes. Closing the generator aborts the rest.

        The caller may send further requests to the generator after an output; they get that output's index.
        """
        valid = isinstance(handles, Sequence) and all(isinstance(handle, RequestHandle) for handle in handles)
        if not valid:
            raise InputError(
                f"handles must be a list of what `request` returns, not {short_repr(handles)}",
                code="invalid_value",
                param="handles",
            )
        return self._serve(handles, len(handles), use_tqdm)

    def _serve(
        self, handles: Iterable[RequestHandle], count: int, use_tqdm: ShowProgress
    ) -> Generator[tuple[int, RequestOutput], RequestHandle | Sequence[RequestHandle] | None, None]:
        with make_progress(count, use_tqdm) as progress, closing(serve(self.engine.loop, handles)) as outputs:
            entry = next(outputs, None)
            while entry is not None:
                following = yield entry
                progress.update(int(following is None))
                entry = next(outputs, None) if following is None else outputs.send(following)

    def stream(
        self, prompt: object, sampling_params: SamplingParams | None = None, **chat: Unpack[ChatOptions]
    ) -> Iterator[RequestOutput]:
        """Answer one prompt or one conversation (a list of messages), and yield outputs as the answer grows.

        Each output holds all text so far, and later outputs remove none of it. Closing the generator aborts the request.

        Args:
            chat: with messages, the options of `chat`.
        """
        handle = self.request(prompt, sampling_params, **chat)
        return (output for _, output in serve(self.engine.loop, [handle], stream=True))

    def live(self, prompt: object, sampling_params: SamplingParams | None = None, **chat: Unpack[ChatOptions]) -> LiveSession:
        """Open a session whose tokens stay in the KV cache: `answer()`, then `append(more)`, and the next answer.

        Args:
            prompt, chat: see `stream`.

        Raises:
            InputError: `sampling_params.n` is above 1, or the prompt has an unknown form.
        """
        if not isinstance(prompt, list | tuple):
            read_prompt(prompt)
        return LiveSession(self.engine, self.request(prompt, sampling_params, **chat))

    def request(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        request_id: str | None = None,
        **chat: Unpack[ChatOptions],
    ) -> RequestHandle:
        """Make a request for one prompt or one conversation (a list of messages), for `serve` or `AsyncLLM.answer`.

        Raises:
            InputError: an argument has a wrong type or is unknown.
        """
        return self.engine.request(prompt, sampling_params, priority, request_id, **chat)

    def load_adapter(self, name: str, path: str | os.PathLike[str], pin: bool = False) -> AdapterInfo:
        """Read a LoRA adapter in peft's layout for requests with `adapter=name`. See docs/adapters.md.

        If the name is loaded already, running requests keep the old adapter and new ones get the new one.

        Args:
            path: its folder.
            pin: never unload it to make room for another one.

        Raises:
            ConfigError, CheckpointError: the adapter is not supported, or does not fit the model.
            InputError: the name or path has a wrong form, there is too little room, or the engine has no `enable_lora`.
        """
        return self.engine.adapters.load(name, path, pin)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. It is freed when the last request that uses it ends. Raise InputError for an unknown name."""
        self.engine.adapters.unload(name)

    def list_adapters(self) -> Sequence[AdapterInfo]:
        """Return the adapters that requests may choose, in the order of their names."""
        return self.engine.adapters.list()

    def pin_adapter(self, name: str, pinned: bool = True) -> None:
        """Never unload this adapter to make room for another one, or allow it again. Raise InputError for an unknown name."""
        self.engine.adapters.pin(name, pinned)

    def update_weights(self, weights: WeightsSource, mode: UpdateMode = "wait") -> int:
        """Replace weights of the checkpoint between two steps, empty all caches, and return the new `weights_version`.

        Weights that are not given stay as they are. The new ones are packed and quantised as those of the checkpoint were.
        Nothing changes if one does not fit. If memory runs out later, the version counts, the engine sleeps, and `wake_up`
        tries again. If its process dies, `weights_version` tells which weights the new process has. Adapters are read again. A
        sleeping engine wakes up.

        Args:
            weights: (name, tensor) pairs with names of the checkpoint or of transformers, a mapping, or the path of a
                safetensors file or of a folder with such files. A handle of shared memory, from `reduce_tensor` of
                `torch.multiprocessing.reductions`, may stand for a tensor. The tensors are copied to the host and kept there,
                also for a process of the engine that replaces a dead one.
            mode: "wait" until requests have ended, or "abort" them with the finish reason "abort"; new ones are refused
                meanwhile. "pause": requests stop between two steps and go on with the new weights, which compute the keys and
                values of all their tokens again. "restart": their answers begin again from the prompts, except those of
                sessions and those of which a caller has received a part; these go on as with "pause".

        Raises:
            CheckpointError: a name is unknown, or a tensor has another shape, NaN or infinity.
            InputError: live sessions are open and `mode` is "wait", or the model's weights cannot be updated: it is quantised
                in its checkpoint, has a merged adapter, or runs through transformers.
            EngineDeadError: the engine's process has died meanwhile.
        """
        return self.engine.update_weights(weights, mode)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Call a method as trainers call it in vLLM's workers. Return its result in a list, as of one worker.

        Args:
            method: "load_weights" or "update_weights" (`update_weights(*args, **kwargs)`), or "reload_weights", which does
                nothing, because `wake_up` reads the weights.
            timeout: has no effect.

        Raises:
            InputError: another method, or see `update_weights`.
        """
        if method not in _RPC_METHODS:
            raise InputError(f"<<param=>>{short_repr(method)} is unknown; {hint(str(method), _RPC_METHODS)}",
                             code="unknown_name", param="method", value=short_repr(method))  # fmt: skip
        return [None if method == "reload_weights" else self.update_weights(*args, **kwargs)]

    @property
    def weights_version(self) -> int:
        """Number of `update_weights` so far; 0: the weights are those of the checkpoint."""
        return self.engine.weights_version

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights, caches and buffers until `wake_up`. Do nothing if the engine sleeps already.

        The tokenizer, the cache of processed items, and encoder rows in `encoder_cache_dir` are kept.

        Args:
            level: 1 or 2 as in vLLM; both do the same here.

        Raises:
            InputError: requests are being served, live sessions are open, or the engine was closed.
        """
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Read the weights again, with empty caches. Do nothing if the engine is awake.

        Args:
            tags: "weights" and "kv_cache" as in vLLM; any of them wakes all.

        Raises:
            CheckpointError: the checkpoint was changed meanwhile, or cannot be read.
            InputError: there is too little memory, or the engine was closed.
        """
        self.engine.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        """Free all KV blocks that are kept for reuse. Return False if blocks of running sequences remain."""
        return self.engine.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Empty the cache of processed items."""
        self.engine.inputs.media.reset_cache()

    @property
    def asleep(self) -> bool:
        """True while requests are refused, from `sleep` to `wake_up`."""
        return self.engine.asleep

    @property
    def media_full(self) -> bool:
        """True while media of the requests take `max_total_bytes` of the media policy."""
        return self.engine.media_full

    def close(self) -> None:
        """End every request with an error, then end all threads and processes. Garbage collection of the LLM does the same."""
        self.engine.close()

    def __enter__(self) -> Self:
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
        return self.engine.plan(prompt, mm_processor_kwargs, cache_salt)

    @overload
    def explain(self, output: None = None) -> MemoryPlan: ...
    @overload
    def explain(self, output: RequestOutput) -> AnswerReport: ...
    def explain(self, output: RequestOutput | None = None) -> MemoryPlan | AnswerReport:
        """Return the maximum memory of this engine and the largest items it accepts. `print` shows a table.

        Args:
            output: an output of this engine. With it, return how it was made: tokens, seconds, and what was drafted and
                accepted, by proposer and position.

        Raises:
            InputError: `output` is no RequestOutput.
        """
        return self.engine.explain(output)

    @property
    def config(self) -> EngineConfig:
        """All options of the engine, with what "auto" stands for."""
        return self.engine.config

    @property
    def info(self) -> CoreInfo:
        """Facts about the loaded model: lengths, dtype, device, modalities, and what it can do."""
        return self.engine.info

    @property
    def default_params(self) -> SamplingParams:
        return self.engine.default_params

    @property
    def ocr_prompts(self) -> Sequence[str]:
        return self.engine.ocr_prompts

    @property
    def speech(self) -> SupportsTranscription | None:
        return self.engine.speech

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return self.engine.max_model_len

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self.info.hidden_size

    @property
    def pooling(self) -> str:
        """The `pooling` of `embed` if a call names none: "tokens" for late-interaction models."""
        return self.info.pooling

    @property
    def logit_scale(self) -> float | None:
        """Factor of the cosines of CLIP and SigLIP in their logits, else None."""
        return self.info.logit_scale

    @property
    def logit_bias(self) -> float | None:
        """Bias of SigLIP's logits, else None."""
        return self.info.logit_bias

    @property
    def stats(self) -> EngineStats:
        """Counters of sequences, blocks, caches and preemptions, at most 50 ms old while requests are computed."""
        return self.engine.stats

    @property
    def mm_cache_stats(self) -> CacheStats:
        """Statistics of the cache of processed items."""
        return self.engine.inputs.media.stats

    def _answers(
        self, handles: Iterable[RequestHandle], count: int, use_tqdm: ShowProgress, on_error: str
    ) -> list[RequestOutput]:
        if not isinstance(on_error, str) or on_error not in ("return", "raise"):
            raise InputError(
                f'<<param=>>{short_repr(on_error)} must be "return" or "raise"', code="invalid_value", param="on_error"
            )
        outputs: dict[int, RequestOutput] = {}
        with closing(self._serve(handles, count, use_tqdm)) as results:
            for index, output in results:
                if output.error is not None and on_error == "raise":
                    number = f"prompt {index}: " if count > 1 else ""
                    raise replace(output.error, text=f"{number}{output.error.text}").exception()
                outputs[index] = output
        answers = [outputs[index] for index in sorted(outputs)]
        warn_of_failures([answer.error for answer in answers])
        return answers
