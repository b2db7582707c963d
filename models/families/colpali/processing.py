"""Input processing of models that embed each token: the published prompts for a page and for a query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....processors.bases.attention_rules import PREFIX_LM
from ....processors.bases.native import IMAGE_KWARGS
from ....processors.files import ProcessorFiles
from ....processors.retrieval import retrieval_template
from ..idefics3.processing import Idefics3ProcessingInfo
from ..paligemma.processing import PaliGemmaProcessingInfo
from ..qwen2_vl.processing import Qwen2VLProcessingInfo
from ..qwen3_vl.processing import Qwen3VLProcessingInfo

_QWEN_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
_BERT_PAGE = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_EXPANSION = 10  # tokens after a query whose vectors count, too (query augmentation)


class ColPaliProcessingInfo(PaliGemmaProcessingInfo):
    """ProcessingInfo of ColPali."""

    takes_instruction = False

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        settings = files.read_json("processor_config.json")
        query = settings.get("query_prefix") or ("Question: " if is_hub_layout(files) else "Query: ")
        page = "<image>" + (settings.get("visual_prompt_prefix") or "Describe the image.").removeprefix("<image><bos>")
        self.chat_template = retrieval_template(page, query, "<pad>" * _EXPANSION)


class ColQwenProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of ColQwen2 and ColQwen2.5."""

    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    takes_instruction = False
    placeholders = {"image": ("image_token_id", 151655)}

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        self.chat_template = _qwen_template(files)


class ColQwen3ProcessingInfo(Qwen3VLProcessingInfo):
    """ProcessingInfo of ColQwen3."""

    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    takes_instruction = False
    placeholders = {"image": ("image_token_id", 151655)}

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        self.chat_template = _qwen_template(files)


class NemotronColEmbedProcessingInfo(Qwen3VLProcessingInfo):
    """ProcessingInfo of Nemotron-ColEmbed-VL v2, whose prompts are turns of a chat."""

    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    takes_instruction = False
    placeholders = {"image": ("image_token_id", 151655)}
    prompt_attention = PREFIX_LM

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        settings = files.read_json("processor_config.json")
        query, page = (settings.get(f"{kind}_prefix", f"{kind}:") for kind in ("query", "passage"))
        start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        image = f"{start}<|vision_start|><|image_pad|><|vision_end|>{page + ' ' if page else ''}{end}"
        self.chat_template = retrieval_template(image, f"{start}Query: {query + ' ' if query else ''}", end)


def _qwen_template(files: ProcessorFiles) -> str:
    """Return the prompts of ColQwen, which processor_config.json may change."""
    settings = files.read_json("processor_config.json")
    page, query = settings.get("visual_prompt_prefix") or _QWEN_PAGE, settings.get("query_prefix") or "Query: "
    return retrieval_template(page, query, "<|endoftext|>" * _EXPANSION + ("\n" if is_hub_layout(files) else ""))


class ColModernVBertProcessingInfo(Idefics3ProcessingInfo):
    """ProcessingInfo of ColModernVBERT."""

    prompt_attention = PREFIX_LM
    takes_instruction = False
    placeholders = {"image": ("image_token_id", 50407)}

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        shuffle = files.config.get("pixel_shuffle_factor", 4)
        text, added = files.config.get("text_config") or {}, files.config.get("additional_vocab_size") or 0
        text = {**text, "vocab_size": text.get("vocab_size", 50368) + added}
        super().__init__(replace(files, config={**files.config, "scale_factor": shuffle, "text_config": text}), *kwargs)
        settings = files.read_json("processor_config.json")
        page = settings.get("visual_prompt_prefix") or _BERT_PAGE
        self.chat_template = retrieval_template(page, settings.get("query_prefix") or "", "<end_of_utterance>" * _EXPANSION)


def is_hub_layout(files: ProcessorFiles) -> bool:
    """Return True for a checkpoint of transformers' class, whose prompts differ from the publisher's."""
    return str(files.config.get("architectures")).endswith("ForRetrieval']")
