"""Embeddings of texts, images and videos.

Sources: the published usage of Qwen3-VL-Embedding (the last token's hidden state of a conversation is the embedding), and
sentence-transformers (`processors.sentence_transformers`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..callers.errors import ErrorInfo, InputError, short_repr, typed
from ..callers.pacing import releasing_gil
from ..callers.plain import builtin_copy
from ..engine.frontend.arguments import check_ordered, is_token_ids
from ..engine.outputs import RequestOutput
from ..engine.pooling_params import PoolingParams
from ..mm.columns import column_values
from ..mm.parse import item_list, modality_of_path
from .message_parts import media_part
from .pooling import EmbeddingOutput, PooledResult, check_dimensions, failed_request, pooling_request, shorten
from .run import Task, answer
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine

_logger = logging.getLogger(__name__)
EMBED_INSTRUCTION = "Represent the user's input."
MEDIA = ("image", "video", "audio")
_PROMPT_KEYS = ("prompt", "prompt_token_ids")  # an input with one of these keys is an already rendered prompt


@dataclass(frozen=True, repr=False)
class Embedding(PooledResult):
    """The embedding of one input.

    Args:
        vector: float32 `[n]`, of length 1 unless the checkpoint or `normalize=False` says otherwise; `[tokens, n]` with the
            pooling "tokens"; None if there is an error.
        error: why there is no vector, or None.
        output: the request's output.
    """

    vector: Tensor | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)

    @property
    def outputs(self) -> EmbeddingOutput:
        """The vector or vectors as a list. Raises InputError if there is an error."""
        return EmbeddingOutput(self._checked(self.vector).tolist())


@dataclass(frozen=True)
class EmbedOptions:
    """Options of `embed`.

    Args:
        instruction: the system prompt, which says what the embeddings are for. Models of sentence-transformers for text read
            a text without a template; an instruction is put before it, as their `prompt` is. Without one, the checkpoint's
            `default_prompt_name` says what is put before it.
        dimensions: truncate the vectors to this length and normalise them again, for Matryoshka models (arXiv 2205.13147);
            None keeps the whole vectors.
        chat_template: replaces the checkpoint's, as in `LLM.chat`.
        pooling_params: as in vLLM; its `dimensions`, `normalize` and `pooling` are used, and the task "token_embed".
        cache_salt: requests with different salts share no cache; a prompt in `inputs` has its own.
        pooling: as in PoolingParams: "last", "cls", "mean" and others for one vector, "tokens" for a vector of each token;
            None: as the checkpoint says.
        prompt_name: takes the instruction from the prompts of config_sentence_transformers.json.
        truncate_prompt_tokens, truncation_side: as in PoolingParams. Without them, texts are cut as sentence-transformers does
            if the checkpoint is one of these, to `max_seq_length` of sentence_bert_config.json. `truncated` of a result tells.

    Raises:
        InputError: an option has a wrong type or value.
    """

    instruction: str = EMBED_INSTRUCTION
    dimensions: int | None = None
    chat_template: str | os.PathLike[str] | None = None
    pooling_params: PoolingParams | None = None
    cache_salt: str | None = None
    pooling: str | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def __post_init__(self) -> None:
        check_type("instruction", self.instruction, str)
        check_type("chat_template", self.chat_template, str, os.PathLike, type(None))
        check_type("pooling_params", self.pooling_params, PoolingParams, type(None))
        check_type("prompt_name", self.prompt_name, str, type(None))
        params = self.pooling_params
        if self.pooling is not None and params is not None and params.pooling not in (None, self.pooling):
            both = f"pooling={short_repr(self.pooling)} and pooling_params with pooling={short_repr(params.pooling)}"
            raise InputError(f"{both} contradict each other; leave one out", param="pooling")
        if self.prompt_name is not None and self.instruction != EMBED_INSTRUCTION:
            reason = "instruction and <<param>> both say what is put before a text; leave one out"
            raise InputError(reason, param="prompt_name")

    @property
    def params(self) -> PoolingParams:
        """The pooling parameters with these options."""
        params = PoolingParams() if self.pooling_params is None else replace(self.pooling_params, token_ids=(), task="embed")
        names = ("dimensions", "pooling", "truncate_prompt_tokens", "truncation_side")
        return replace(params, **{name: value for name in names if (value := getattr(self, name)) is not None})


@dataclass(frozen=True)
class InputForm:
    """How inputs become requests. `request`: options of `LLM.request`."""

    instruction: str
    pooling: PoolingParams
    request: Mapping[str, Any]


def embed_tasks(engine: Engine, inputs: object, options: EmbedOptions) -> list[Task[Embedding]]:
    """Return one task per input, in order; they run as one batch. An input that fails gives an Embedding with `error`.

    Args:
        inputs: one input, or several: a list, tuple or generator, a column of a table (pandas, polars, pyarrow), a string
            array. An input is a text (any str, even one that looks like a path), an image (Path, PIL image, pixels or
            `Media`), a mapping such as `{"text": ..., "image": ..., "video": ...}`, or a prompt of `generate` (a mapping or a
            list of token ids), which is used unchanged. Each key of the mapping has one value or a list, and a str for an
            image or video is a path or URL.

    Raises:
        InputError: `dimensions` is out of range, or the checkpoint has no prompt of this name. The task raises it if the
            checkpoint has no chat template.
    """
    params = options.params
    engine.inputs.text.truncation(params.truncate_prompt_tokens, params.truncation_side)
    check_dimensions(engine, params)
    instruction = options.instruction if options.prompt_name is None else _named_prompt(engine, options.prompt_name)
    form = InputForm(instruction, params, request_options(options.chat_template, options.cache_salt))
    listed = [inputs] if is_token_ids(inputs) else as_inputs(inputs)
    if path := next((item for item in releasing_gil(listed) if engine.takes_media and modality_of_path(item)), None):
        _logger.warning(
            "embed: %s is embedded as a text, but a file of this name exists; give a pathlib.Path to embed the file",
            short_repr(path),
        )
    return [partial(embed_item, engine, item, form) for item in listed]


def _named_prompt(engine: Engine, name: str) -> str:
    """Return one of the checkpoint's prompts. Raise InputError for a name that they do not have."""
    prompts: Mapping[str, str] = {} if engine.sentence_transformers is None else engine.sentence_transformers.prompts
    if name not in prompts:
        names = ", ".join(prompts) or "none"
        raise InputError(f"<<param=>>{short_repr(name)}: the checkpoint's prompts are {names}", param="prompt_name")
    return prompts[name]


async def embed_item(engine: Engine, item: Any, form: InputForm) -> Embedding:
    instruction, pooling, template = form.instruction, form.pooling, dict(form.request)
    try:
        prompt = item = builtin_copy(item, "inputs", "an input")
        if engine.embeds_text and isinstance(item, str):
            prompt, pooling = _text_prompt(engine, item, instruction, pooling)
            prompt = {"prompt": prompt, "cache_salt": template.pop("cache_salt", None)}
        elif is_token_ids(item):
            prompt = {"prompt_token_ids": item, "cache_salt": template.pop("cache_salt", None)}
        elif _is_prompt(item):
            prompt = {"cache_salt": template.pop("cache_salt", None), **item}
        else:
            plain = not engine.takes_instruction and instruction == EMBED_INSTRUCTION
            prompt = [*([] if plain else [message_of("system", instruction)]), message_of("user", content_parts(item))]
    except InputError as error:
        output = await answer(failed_request(error))
        return Embedding(None, output.error, output)
    output = await answer(pooling_request(engine, prompt, pooling, template))
    return Embedding(shorten(engine, output.pooled, pooling.dimensions, pooling.normalize), output.error, output)


def _text_prompt(engine: Engine, text: str, instruction: str, pooling: PoolingParams) -> tuple[str, PoolingParams]:
    """Return a text with the prompt before it, and the parameters with what sentence-transformers does to both."""
    settings = engine.sentence_transformers
    before = "" if instruction == EMBED_INSTRUCTION else instruction
    if settings is None:
        return before + text, pooling
    if instruction == EMBED_INSTRUCTION and settings.default_prompt is not None:
        before = settings.prompts[settings.default_prompt]
    if pooling.truncate_prompt_tokens is None:
        pooling = replace(pooling, truncate_prompt_tokens=-1)
    if before and not settings.include_prompt:
        tokenizer = engine.tokenizer
        ids = tokenizer.encode(before)
        ends = bool(ids) and tokenizer.is_special_token(ids[-1])
        pooling = replace(pooling, skip_tokens=len(ids) - ends)
    return before + text, pooling


def as_inputs(inputs: object) -> Sequence[object]:
    check_ordered(inputs, "inputs")
    if (column := column_values(inputs, "inputs")) is not None:
        return column
    if isinstance(inputs, list | tuple):
        return inputs
    return item_list("image", inputs)


def request_options(chat_template: str | os.PathLike[str] | None, cache_salt: str | None) -> dict[str, Any]:
    """Return options of `LLM.request`. None is left out, because rendered prompts take no such options."""
    options = {"chat_template": chat_template, "cache_salt": cache_salt}
    return {name: value for name, value in options.items() if value is not None}


def _is_prompt(item: object) -> bool:
    return isinstance(item, Mapping) and any(key in item for key in _PROMPT_KEYS)


def content_parts(item: object) -> list[dict[str, Any]]:
    """Return the content parts of one input, media first as the published models are trained."""
    if item is None or isinstance(item, int | float):
        what = "NaN, a missing value" if item is not None and item != item else typed(item)
        raise InputError(f"an input is {what}; give a text, an image or a mapping with text, image, video or audio")
    if not isinstance(item, Mapping):
        item = {"text": item} if isinstance(item, str) else {"image": item}
    for key in item:
        if key not in ("text", *MEDIA):
            raise InputError(f"an input has no key {short_repr(key)}; its keys are text, {', '.join(MEDIA)}")
    media = [media_part(name, value) for name in MEDIA for value in _values(name, item.get(name))]
    parts = media + [text_part(text) for text in _values("text", item.get("text")) if text != ""]
    if not parts:
        raise InputError("an input is empty; give a text, an image or a mapping with text, image, video or audio")
    return parts


def _values(key: str, value: object) -> Sequence[Any]:
    if value is None or (isinstance(value, str) and not value):
        return []
    return item_list(key, value)


def text_part(text: object) -> dict[str, Any]:
    return {"type": "text", "text": text}


def message_of(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content if isinstance(content, list) else [text_part(content)]}
