"""The model registry: architecture name -> model and ProcessingInfo classes, as strings that the engine resolves."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from .errors import ConfigError, short_repr

_log = logging.getLogger(__name__)


_PACKAGE = __name__.partition(".")[0]
_PLUGINS = "sensorium.plugins"  # entry point group
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Architecture:
    """Import paths, `"package.module:Class"`, of the model class and the ProcessingInfo class of an architecture."""

    model: str
    processing: str

    @property
    def family(self) -> str:
        return self.model.partition(":")[0].rpartition(".")[2]

    @property
    def takes_any_stack(self) -> bool:
        """True if the text config's model_type selects the decoder stack."""
        return self.family in _ANY_STACK

    @property
    def is_text_stack(self) -> bool:
        """True if config.json itself is the text config, and any decoder stack can run it."""
        return self.family == "text_only"


def native(family: str, model_class: str, info_class: str, folder: str = "families") -> Architecture:
    """Return the row of classes in `models/<folder>/<family>.py` and `processors/<folder>/<family>.py`."""
    paths = (("models", model_class), ("processors", info_class))
    return Architecture(*(f"{_PACKAGE}.{room}.{folder}.{family}:{name}" for room, name in paths))


@dataclass(frozen=True)
class FamilyNote:
    """Notes on a family for docs/models.md.

    Args:
        other_tests: tests besides the parity suite.
        use: "documents", "retrieval" or "tensors"; empty: the page groups the family by its inputs.
    """

    features: str
    limits: str = ""
    other_tests: str = ""
    use: str = ""


@dataclass(frozen=True)
class CheckpointLayout:
    """A publisher's own checkpoint layout.

    Args:
        reader: "module:function" that converts the publisher's config to `(kind, config in the Hub's layout)`.
        architectures: kind -> key of ARCHITECTURES.
    """

    reader: str
    architectures: Mapping[str, str]


_ANY_STACK = frozenset({
    "aria", "aya_vision", "eagle2_5_vl", "funaudiochat", "gemma3", "got_ocr2", "idefics2", "idefics3", "internvl", "kimi_k25",
    "lfm2_vl", "lighton_ocr", "llava", "minicpmv", "nemotron_vl", "ovis", "paligemma", "pixtral", "step3_vl", "text_only",
    "ultravox",
})  # fmt: skip
TEXT_PROCESSING = native("text_only", "TextModel", "TextProcessingInfo").processing
_TEXT_STACKS = (
    "Arcee", "Bamba", "Cohere", "Cohere2", "DeepseekV2", "DeepseekV3", "Dots1", "MiniMax", "MiniMaxM1", "MiniMaxM2",
    "MiniMaxText01", "Ernie4_5", "Ernie4_5_Moe", "Exaone4", "ExaoneMoe", "FalconH1", "Gemma", "Gemma2", "Gemma3", "Gemma3n",
    "Gemma4", "Glm", "Glm4", "Glm4Moe", "GptOss", "Granite", "GraniteMoe", "GraniteMoeShared", "GraniteMoeHybrid", "Helium",
    "HunYuanDenseV1", "HunYuanMoEV1", "InternLM3", "Lfm2", "Lfm2Moe", "Llama", "Llama4", "Mamba2", "Ministral3", "Mistral",
    "Mistral4", "Mixtral", "Nemotron", "NemotronH", "Olmo2", "Olmo3", "Olmoe", "OlmoHybrid", "Phi3", "Phimoe", "Qwen2",
    "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "SeedOss", "SmolLM3", "SolarOpen", "StableLm",
    "Starcoder2",
)  # fmt: skip
_PLAIN_STACKS = [stack for stack in _TEXT_STACKS if stack not in ("Gemma3", "Gemma3n", "Gemma4")]
"""Stacks whose name without `Text` is not that of a model with encoders."""
_ENCODER_PROCESSING = native("bert", "Bert", "BertProcessingInfo").processing
_BERTS = ("Bert", "Camembert", "DistilBert", "Gte", "MPNet", "New", "NomicBert", "Roberta", "XLMRoberta")

ARCHITECTURES: dict[str, Architecture] = {
    "AriaForConditionalGeneration": native("aria", "Aria", "AriaProcessingInfo"),
    "AyaVisionForConditionalGeneration": native("aya_vision", "AyaVision", "AyaVisionProcessingInfo"),
    "AudioFlamingo3ForConditionalGeneration": native("audioflamingo3", "AudioFlamingo3", "AudioFlamingo3ProcessingInfo"),
    "CanaryForConditionalGeneration": native("cohere_asr", "Canary", "CanaryProcessingInfo"),
    "CLIPModel": native("dual_encoder", "Clip", "ClipProcessingInfo"),
    "CohereAsrForConditionalGeneration": native("cohere_asr", "CohereAsr", "CohereAsrProcessingInfo"),
    "Cohere2VisionForConditionalGeneration": native("aya_vision", "Cohere2Vision", "Cohere2VisionProcessingInfo"),
    "ColModernVBertForRetrieval": native("colpali", "ColModernVBert", "ColModernVBertProcessingInfo"),
    "ColPali": native("colpali", "ColPali", "ColPaliProcessingInfo"),
    "ColPaliForRetrieval": native("colpali", "ColPali", "ColPaliProcessingInfo"),
    "ColQwen2": native("colpali", "ColQwen2", "ColQwenProcessingInfo"),
    "ColQwen2ForRetrieval": native("colpali", "ColQwen2", "ColQwenProcessingInfo"),
    "ColQwen2ForRetrieval/qwen2_5_vl": native("colpali", "ColQwen25", "ColQwenProcessingInfo"),
    "ColQwen2ForRetrieval/qwen2_5_vl_vision": native("colpali", "ColQwen25", "ColQwenProcessingInfo"),
    "ColQwen2_5": native("colpali", "ColQwen25", "ColQwenProcessingInfo"),
    "DeepseekOCR2ForCausalLM": native("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "DeepseekOCRForCausalLM": native("deepseek_ocr2", "DeepseekOcr", "DeepseekOcrProcessingInfo"),
    "DeepseekVLV2ForCausalLM": native("deepseek_vl2", "DeepseekVL2", "DeepseekVL2ProcessingInfo"),
    "DeepseekOcr2ForConditionalGeneration": native("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "DotsOCRForCausalLM": native("dots_ocr", "DotsOcr", "DotsOcrProcessingInfo"),
    "Eagle2_5_VLForConditionalGeneration": native("eagle2_5_vl", "EagleVL", "EagleVLProcessingInfo"),
    "Ernie4_5_VLMoeForConditionalGeneration": native("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Ernie4_5_VL_MoeForConditionalGeneration": native("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Gemma3ForConditionalGeneration": native("gemma3", "Gemma3", "Gemma3ProcessingInfo"),
    "Gemma3nForConditionalGeneration": native("gemma3n", "Gemma3n", "Gemma3nProcessingInfo"),
    "Gemma4ForConditionalGeneration": native("gemma4", "Gemma4", "Gemma4ProcessingInfo"),
    "Glm46VForConditionalGeneration": native("glm4v", "Glm4V", "Glm46VProcessingInfo"),
    "Glm4vMoeForConditionalGeneration": native("glm4v", "Glm4VMoe", "Glm4VProcessingInfo"),
    "Glm4vForConditionalGeneration": native("glm4v", "Glm4V", "Glm4VProcessingInfo"),
    "GlmAsrForConditionalGeneration": native("glmasr", "GlmAsr", "GlmAsrProcessingInfo"),
    "GlmOcrForConditionalGeneration": native("glm4v", "GlmOcr", "GlmOcrProcessingInfo"),
    "HunYuanVLForConditionalGeneration": native("hunyuan_vl", "HunYuanVL", "HunYuanVLProcessingInfo"),
    "Idefics2ForConditionalGeneration": native("idefics2", "Idefics2", "Idefics2ProcessingInfo"),
    "Idefics3ForConditionalGeneration": native("idefics3", "Idefics3", "Idefics3ProcessingInfo"),
    "FunAudioChatForConditionalGeneration": native("funaudiochat", "FunAudioChat", "FunAudioChatProcessingInfo"),
    "GOTQwenForCausalLM": native("got_ocr2", "GotOcr2", "GotProcessingInfo"),
    "GotOcr2ForConditionalGeneration": native("got_ocr2", "GotOcr2", "GotOcr2ProcessingInfo"),
    "GraniteDoclingForConditionalGeneration": native("granite_docling", "GraniteDocling", "GraniteDoclingProcessingInfo"),
    "GraniteSpeechForConditionalGeneration": native("granite_speech", "GraniteSpeech", "GraniteSpeechProcessingInfo"),
    "Granite4VisionForConditionalGeneration": native("granite4_vision", "Granite4Vision", "Granite4VisionProcessingInfo"),
    "InternS1ForConditionalGeneration": native("internvl", "InternVL", "InternVLProcessingInfo"),
    "InternVLChatModel": native("internvl", "InternVLChat", "InternVLChatProcessingInfo"),
    "InternVLForConditionalGeneration": native("internvl", "InternVL", "InternVLProcessingInfo"),
    "InternLM2ForCausalLM": native("text_only", "InternLM2", "TextProcessingInfo"),
    "JinaEmbeddingsV4Model": native("jina_v4", "JinaEmbeddingsV4", "JinaEmbeddingsV4ProcessingInfo"),
    "JinaVLForRanking": native("jina_reranker", "JinaReranker", "JinaRerankerProcessingInfo"),
    "JinaVLForSequenceClassification": native("jina_reranker", "JinaReranker", "JinaRerankerProcessingInfo"),
    "IsaacForConditionalGeneration": native("isaac", "Isaac", "IsaacProcessingInfo"),
    "KeyeForConditionalGeneration": native("keye", "KeyeVL", "KeyeProcessingInfo"),
    "KeyeVL1_5ForConditionalGeneration": native("keye", "KeyeVL15", "Keye15ProcessingInfo"),
    "KimiK25ForConditionalGeneration": native("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "KimiVLForConditionalGeneration": native("kimi_k25", "KimiVL", "KimiVLProcessingInfo"),
    "Kimi_K25ForConditionalGeneration": native("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "LightOnOcrForConditionalGeneration": native("lighton_ocr", "LightOnOcr", "LightOnOcrProcessingInfo"),
    "Lfm2VlForConditionalGeneration": native("lfm2_vl", "Lfm2VL", "Lfm2VLProcessingInfo"),
    "Llama4ForConditionalGeneration": native("llama4", "Llama4", "Llama4ProcessingInfo"),
    "Llama_Nemotron_Nano_VL": native("nemotron_vl", "LlamaNemotronVL", "LlamaNemotronVLProcessingInfo"),
    "LlavaForConditionalGeneration": native("llava", "Llava", "LlavaProcessingInfo"),
    "LlavaForConditionalGeneration/pixtral": native("pixtral", "Pixtral", "PixtralProcessingInfo"),
    "LlavaNextForConditionalGeneration": native("llava", "LlavaNext", "LlavaNextProcessingInfo"),
    "LlavaOnevisionForConditionalGeneration": native("llava", "LlavaOnevision", "LlavaOnevisionProcessingInfo"),
    "MiDashengLMModel": native("midashenglm", "MiDashengLM", "MiDashengLMProcessingInfo"),
    "MiniCPMO": native("minicpmv", "MiniCPMO", "MiniCPMOProcessingInfo"),
    "MiniCPMV": native("minicpmv", "MiniCPMV", "MiniCPMVProcessingInfo"),
    "MiniMaxVL01ForConditionalGeneration": native("llava", "MiniMaxVL", "MiniMaxVLProcessingInfo"),
    "MiniCPMV4_6ForConditionalGeneration": native("minicpmv", "MiniCPMV46", "MiniCPMV46ProcessingInfo"),
    "Mistral3Consolidated": native("pixtral", "Mistral3Consolidated", "MistralFormatProcessingInfo"),
    "Mistral3ForConditionalGeneration": native("pixtral", "Mistral3", "Mistral3ProcessingInfo"),
    "MistralConsolidated": native("text_only", "MistralText", "TextProcessingInfo"),
    "MllamaForConditionalGeneration": native("mllama", "Mllama", "MllamaProcessingInfo"),
    "Molmo2ForConditionalGeneration": native("molmo2", "Molmo2", "Molmo2ProcessingInfo"),
    "MolmoForCausalLM": native("molmo", "Molmo", "MolmoProcessingInfo"),
    "MoonshineForConditionalGeneration": native("moonshine", "Moonshine", "MoonshineProcessingInfo"),
    "MoonshineStreamingForConditionalGeneration": native("moonshine", "MoonshineStreaming", "MoonshineStreamingProcessingInfo"),
    "MusicFlamingoForConditionalGeneration": native("audioflamingo3", "MusicFlamingo", "AudioFlamingo3ProcessingInfo"),
    "NemotronH_Nano_VL_V2": native("nemotron_vl", "NemotronVL", "NemotronVLProcessingInfo"),
    "NemotronParseForConditionalGeneration": native("nemotron_parse", "NemotronParse", "NemotronParseProcessingInfo"),
    "Ovis": native("ovis", "Ovis", "OvisProcessingInfo"),
    "OvisForCausalLM": native("ovis", "Ovis", "OvisProcessingInfo"),
    "Ovis2ForConditionalGeneration": native("ovis", "Ovis2", "Ovis2ProcessingInfo"),
    "Ovis2_5": native("ovis", "Ovis25", "Ovis25ProcessingInfo"),
    "PaddleOCRVLForConditionalGeneration": native("paddleocr_vl", "PaddleOcrVL", "PaddleOcrVLProcessingInfo"),
    "ParakeetForCTC": native("parakeet", "ParakeetCtc", "ParakeetProcessingInfo"),
    "Phi3VForCausalLM": native("phi3_vision", "Phi3V", "Phi3VProcessingInfo"),
    "Phi4MMForCausalLM": native("phi4_multimodal", "Phi4Multimodal", "Phi4MMProcessingInfo"),
    "Phi4MultimodalForCausalLM": native("phi4_multimodal", "Phi4Multimodal", "Phi4MultimodalProcessingInfo"),
    "PaliGemmaForConditionalGeneration": native("paligemma", "PaliGemma", "PaliGemmaProcessingInfo"),
    "PixtralConsolidated": native("pixtral", "PixtralConsolidated", "MistralFormatProcessingInfo"),
    "QianfanOCRForConditionalGeneration": native("internvl", "QianfanOcr", "QianfanOcrProcessingInfo"),
    "Qwen2AudioForConditionalGeneration": native("qwen2_audio", "Qwen2Audio", "Qwen2AudioProcessingInfo"),
    "Qwen2VLForConditionalGeneration": native("qwen2_vl", "Qwen2VL", "Qwen2VLProcessingInfo"),
    "Qwen2_5OmniForConditionalGeneration": native("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5OmniModel": native("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5OmniThinkerForConditionalGeneration": native("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5_VLForConditionalGeneration": native("qwen2_vl", "Qwen25VL", "Qwen25VLProcessingInfo"),
    "Qwen3ASRForConditionalGeneration": native("qwen3_asr", "Qwen3ASR", "Qwen3ASRProcessingInfo"),
    "Qwen3OmniMoeForConditionalGeneration": native("qwen3_omni", "Qwen3Omni", "Qwen3OmniProcessingInfo"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": native("qwen3_omni", "Qwen3Omni", "Qwen3OmniProcessingInfo"),
    "Qwen3VLForConditionalGeneration": native("qwen3_vl", "Qwen3VL", "Qwen3VLProcessingInfo"),
    "Qwen3VLMoeForConditionalGeneration": native("qwen3_vl", "Qwen3VLMoe", "Qwen3VLProcessingInfo"),
    "Qwen3_5ForConditionalGeneration": native("qwen3_vl", "Qwen35", "Qwen35ProcessingInfo"),
    "Qwen3_5MoeForConditionalGeneration": native("qwen3_vl", "Qwen35Moe", "Qwen35ProcessingInfo"),
    "Siglip2Model": native("dual_encoder", "SiglipNaflex", "SiglipProcessingInfo"),
    "SiglipModel": native("dual_encoder", "Siglip", "SiglipProcessingInfo"),
    "SkyworkR1VChatModel": native("internvl", "InternVLChat", "InternVLChatProcessingInfo"),
    "SmolVLMForConditionalGeneration": native("idefics3", "Idefics3", "SmolVLMProcessingInfo"),
    "Step3VL10BForCausalLM": native("step3_vl", "StepVL", "Step3VLProcessingInfo"),
    "StepVLForConditionalGeneration": native("step3_vl", "StepVL", "Step3VLProcessingInfo"),
    "Terratorch": native("terratorch", "Terratorch", "RawTensorInfo"),
    "Tarsier2ForConditionalGeneration": native("qwen2_vl", "Qwen2VL", "Qwen2VLProcessingInfo"),
    "TarsierForConditionalGeneration": native("llava", "Llava", "TarsierProcessingInfo"),
    "TarsierForConditionalGeneration/qwen2_vl": native("qwen2_vl", "Qwen2VL", "Qwen2VLProcessingInfo"),
    "UltravoxModel": native("ultravox", "Ultravox", "UltravoxProcessingInfo"),
    "VoxtralConsolidated": native("voxtral", "VoxtralConsolidated", "VoxtralProcessingInfo"),
    "VoxtralForConditionalGeneration": native("voxtral", "Voxtral", "VoxtralProcessingInfo"),
    "VoxtralRealtimeForConditionalGeneration": native("voxtral_realtime", "VoxtralRealtime", "VoxtralRealtimeProcessingInfo"),
    "WhisperForConditionalGeneration": native("whisper", "Whisper", "WhisperProcessingInfo"),
    **{f"{stack}{task}": native("bert", "Bert", "BertProcessingInfo") for stack in _BERTS for task in ("Model", "ForMaskedLM")},
    "NewForTokenClassification": native("bert", "Bert", "BertProcessingInfo"),
    **{f"{stack}ForSequenceClassification": native("bert", "BertClassifier", "BertProcessingInfo") for stack in _BERTS},
    **{
        f"ModernBert{task}": Architecture(native("modernbert", name, "").model, _ENCODER_PROCESSING)
        for task, name in (
            ("Model", "ModernBert"),
            ("ForMaskedLM", "ModernBert"),
            ("ForSequenceClassification", "ModernBertClassifier"),
        )
    },
    **{f"{stack}ForCausalLM": native("text_only", "TextModel", "TextProcessingInfo") for stack in _TEXT_STACKS},
    **{f"{stack}Model": native("text_only", "TextModel", "TextProcessingInfo") for stack in _PLAIN_STACKS},
    "VoyageQwen3BidirectionalEmbedModel": Architecture(native("text_only", "Voyage", "").model, _ENCODER_PROCESSING),
    "Qwen2ForRewardModel": native("text_only", "RewardModel", "TextProcessingInfo"),
    "Qwen2ForProcessRewardModel": native("text_only", "RewardModel", "TextProcessingInfo"),
    **{
        f"{stack}ForSequenceClassification": native("text_only", "TextClassifier", "TextProcessingInfo")
        for stack in (*_PLAIN_STACKS, "Gemma3Text")
    },
}

NOTES: dict[str, FamilyNote] = {
    "aria": FamilyNote(
        "images at their own aspect ratio up to 980 pixels, or crops of them (`split_image`); learned queries read the rows; "
        "a decoder of experts"
    ),
    "audioflamingo3": FamilyNote(
        "`transcribe`; windows of 30 s, rows averaged in pairs; Music Flamingo rotates rows by their time",
        "10 minutes per audio item, Music Flamingo 20",
    ),
    "aya_vision": FamilyNote(
        "tiles by the best aspect ratio (Aya Vision) or least enlarged (Cohere2-Vision), a gated projector"
    ),
    "bert": FamilyNote(
        "text encoders for `embed` (mean or CLS pooling, as 1_Pooling/config.json says) and `classify`; `score` of pairs "
        "with cross-encoders; learned positions, rotary ones (Nomic, GTE) or a bias of scores (MPNet); the Hub's layout and "
        "the publishers'",
        "vectors and classes only; heads of other tasks are not used",
        "tests/models/families/test_bert.py, tests/models/families/test_classification.py",
        use="retrieval",
    ),
    "cohere_asr": FamilyNote(
        "`transcribe`: FastConformer and a decoder with cross-attention; Cohere's transcription models (transformers' names or "
        "the publisher's) and Canary, which also translates",
        "35 s (Cohere) or 40 s (Canary) per audio item of a prompt; the language must be given, or is English",
    ),
    "colpali": FamilyNote(
        "vectors of all tokens for late interaction: `embed` of pages and queries, `score` by MaxSim; ColPali, ColQwen2, "
        "ColQwen2.5 and ColModernVBERT; the Hub's layout and the publisher's",
        "vectors only; no videos",
        "tests/models/families/test_embedders.py",
        use="retrieval",
    ),
    "deepseek_ocr2": FamilyNote(
        "SAM features, then CLIP (DeepSeek-OCR) or a decoder with learned queries (DeepSeek-OCR 2); tiles by the best aspect "
        "ratio, the whole image padded to a square; the Hub's layout and the publisher's own",
        use="documents",
    ),
    "dots_ocr": FamilyNote("pages at native resolution; layout elements as JSON", "aspect ratio up to 200:1", use="documents"),
    "dual_encoder": FamilyNote(
        "`embed` of texts and images: CLIP, SigLIP, SigLIP 2 at a fixed size or with the image's aspect ratio (NaFlex); "
        "`score`: cosines, for SigLIP probabilities",
        "a prompt is a text or one image",
        "tests/models/families/test_embedders.py",
        use="retrieval",
    ),
    "deepseek_vl2": FamilyNote(
        "the whole image and tiles of the best size, padded; lines ended by a learned row; latent attention or not, experts; "
        "the publisher's layout"
    ),
    "eagle2_5_vl": FamilyNote(
        "SigLIP on tiles that keep most of an image's area and shape, with a thumbnail; the number of each image as text; any "
        "text stack",
        "no videos (give frames as images), no RADIO tower",
    ),
    "ernie4_5_vl": FamilyNote(
        "frames merged in pairs, separate experts for images and videos, timestamps drawn onto frames",
        "aspect ratio up to 200:1",
    ),
    "funaudiochat": FamilyNote(
        "Fun-Audio-Chat: `transcribe`; five tokens per second of audio; text output only",
        "30 s per audio item, or as the preprocessor says",
    ),
    "gemma3": FamilyNote(
        "bidirectional attention within an image, sliding windows in most layers, norms before and after each sublayer; "
        "pan and scan"
    ),
    "gemma3n": FamilyNote(
        "audio of up to 30 s in 188 rows through a conformer; several residual streams, per-layer inputs, shared KV caches",
        "no images",
    ),
    "gemma4": FamilyNote(
        "images and frames at their own aspect ratio within 70 to 1,120 rows, averages of 3 x 3 patches; times before frames; "
        "audio of up to 30 s through a conformer with attention to the last 12 rows; per-layer inputs, shared KV caches"
    ),
    "glm4v": FamilyNote(
        "timestamps between frames as text, rotary positions on half of each head; norms before and after each sublayer, or "
        "a mixture of experts; GLM-OCR with its own tower"
    ),
    "glmasr": FamilyNote("`transcribe`; rotary positions in the tower, rows stacked by four", "630 s per audio item"),
    "got_ocr2": FamilyNote(
        "pages as squares of one size, or cut into tiles with `crop_to_patches`; the Hub's layout and the publisher's own",
        use="documents",
    ),
    "granite4_vision": FamilyNote("query transformer outputs added after several layers (DeepStack); grids of tiles"),
    "granite_docling": FamilyNote(
        "pages in tiles with text tags, earlier states of the tower added to layers of the decoder (DeepStack)",
        "the coarse path only; Granite-Docling-258M is an Idefics3 model",
        use="documents",
    ),
    "phi3_vision": FamilyNote(
        "CLIP over padded tiles and the whole image, squares of patches in lines; Phi-3-vision, Phi-3.5-vision",
        "sequences up to the length of short rope factors (4,096 tokens)",
    ),
    "phi4_multimodal": FamilyNote(
        "SigLIP over padded tiles and the whole image, conformer, one adapter per modality (the image's if there is one), "
        "transcription; the publisher's layout (`phi4mm`) too",
        "sequences up to the length of short rope factors (4,096 tokens)",
        "`tests/models/families/test_phi4_multimodal.py`",
    ),
    "granite_speech": FamilyNote(
        "`transcribe`; conformer, query transformer over windows of rows; LoRA adapter for prompts with audio"
    ),
    "hunyuan_vl": FamilyNote(
        "pages at native resolution, a learned row after each line; positions of four axes; text config nested or at the top "
        "level",
        "aspect ratio up to 200:1; no precomputed embeddings",
    ),
    "idefics2": FamilyNote("an image as four quarters and as a whole, each at its own size; perceiver resampler"),
    "idefics3": FamilyNote("rows of tiles with text tags, pixel shuffle"),
    "isaac": FamilyNote(
        "images at native size within bounds on patches; M-RoPE that shifts only time; answers with points, boxes and polygons"
    ),
    "internvl": FamilyNote(
        "tiles by the best aspect ratio, thumbnail, pixel shuffle; the Hub's layout and the publisher's (InternLM2 too); "
        "Intern-S1, Skywork-R1V, Qianfan-OCR",
        "at most 12 tiles per image by default; no videos in the publisher's layout",
    ),
    "jina_reranker": FamilyNote(
        "jina-reranker-m0: `score` of documents, texts or images, for a query; Qwen2-VL with an MLP over the last token",
        "scores only; one image or text on each side, no videos",
        "tests/pipelines/test_jina_reranker.py",
        use="retrieval",
    ),
    "jina_v4": FamilyNote(
        'jina-embeddings-v4: `embed` of texts and images, one vector or `pooling="tokens"`; the adapter of a task is merged '
        'when the model is loaded (`hf_overrides={"task": "code"}`)',
        "vectors only; one task per engine",
        "tests/pipelines/test_jina_v4.py",
        use="retrieval",
    ),
    "keye": FamilyNote(
        "SigLIP with rotary positions, a Qwen3 decoder with M-RoPE; 1.5: a timestamp before each frame, slow and fast frames "
        "(`frame_types`)",
        "aspect ratio up to 200:1; 1.5: all frames are slow unless the caller says which are fast",
        "tests/processors/families/test_keye.py",
    ),
    "kimi_k25": FamilyNote(
        "images and timed chunks of videos in one stream, frames of a chunk averaged, latent attention, grouped experts; "
        "Kimi-VL: images only",
        "4 frames per chunk",
    ),
    "lfm2_vl": FamilyNote("small images at their own size, large ones as tiles and a thumbnail; layers with states"),
    "lighton_ocr": FamilyNote(
        "pages at native resolution; incomplete squares of merged patches are dropped; no break tokens", use="documents"
    ),
    "llama4": FamilyNote(
        "tiles of the best canvas, then the whole image; attention within chunks, layers without positions, experts with a "
        "shared one"
    ),
    "llava": FamilyNote(
        "one or several encoder layers of CLIP or SigLIP; grids of tiles with newline rows; pooled videos; Tarsier"
    ),
    "midashenglm": FamilyNote(
        "`transcribe`; mel bands of 64 in patches of 40 ms, which attend within 10 s; rows joined by five",
        "20 minutes per audio item",
    ),
    "minicpmv": FamilyNote(
        "a whole image and slices of it, each at its own size; rows merged in squares within the tower (4.6), or a resampler "
        "(2.6, 4 and 4.5, in their publisher's layout); times of frames, several of which make one (4.5); MiniCPM-o 2.6 "
        "and 4.5 with audio, text output only",
        "2.6 to 4.5: views up to 1.25 times the patches of a square one; 30 minutes per audio item",
    ),
    "mllama": FamilyNote(
        "tiles of the best canvas, which some layers of the decoder cross-attend to; prompts without an image skip them",
        "one image per prompt; every image takes the rows of as many tiles as config.json allows",
    ),
    "modernbert": FamilyNote(
        "text encoder with rotary positions and sliding windows, for `embed`, `classify`, and `score` of pairs",
        "vectors and classes only; heads of other tasks are not used",
        "tests/models/families/test_bert.py, tests/models/families/test_classification.py",
        use="retrieval",
    ),
    "molmo2": FamilyNote(
        "a small view and overlapping crops of an image, frames with their times; attention pooling of patches; the tokens of "
        "all pictures see each other; points, also in several images and in videos; the Hub's layout and the publisher's",
        "images, or one video, per prompt; at most 8 crops; frames are sampled as in transformers, without the last one",
    ),
    "molmo": FamilyNote(
        "Molmo-7B-D and 7B-O: a small view and overlapping crops of an image, padded, each patch marked if it is padding; "
        "attention pooling of patches; points",
        "images only, before the text; at most 12 crops; not MolmoE",
    ),
    "moonshine": FamilyNote(
        "`transcribe`; encoder-decoder: cross-attention; encodes waveforms, not spectrograms; also Moonshine Streaming",
        "30 s per audio item of a prompt",
    ),
    "nemotron_parse": FamilyNote(
        "RADIO on a padded page and a convolution over its rows, read by cross-attention; `output.elements` with boxes and "
        "classes of layout elements",
        "one image per prompt; no prediction of several tokens at once",
        use="documents",
    ),
    "nemotron_vl": FamilyNote(
        "RADIO, its learned rows before the patches of each tile; tiles or, if `vision_config.args` has `min_num_patches`, "
        "images at their own resolution; videos with the number and time of each frame as text; any text stack",
        "no sound, no frames joined in pairs; efficient video sampling is off, as by default in vLLM; an image's patches do "
        "not depend on the other images of the prompt",
    ),
    "ovis": FamilyNote(
        "the tower's rows as probabilities of visual words, whose embeddings are averaged; Ovis 1.6 and 2: the fewest "
        "tiles that cover an image, in the Hub's layout and the publisher's; Ovis2.5: images and videos at native resolution",
        "Ovis2.5: images, or one video, per prompt; without `max_pixels` in the preprocessor's JSON, images and frames have at "
        "most 1344 x 1792 pixels if the decoder's `hidden_size` is at most 2048 (2B), else 1792 x 1792 (9B)",
    ),
    "paddleocr_vl": FamilyNote(
        "pages at native resolution; text config nested or at the top level", "aspect ratio up to 200:1", use="documents"
    ),
    "paligemma": FamilyNote("images before the prompt, without placeholders; bidirectional attention in the prompt"),
    "parakeet": FamilyNote(
        "`transcribe` without a decoder: FastConformer with a CTC head, greedy; times of words from the rows",
        "60 s per audio item; English checkpoints; no transducers (TDT, RNN-T)",
        "tests/models/families/test_parakeet.py",
    ),
    "pixtral": FamilyNote(
        "2-D rotary tower, a token between rows of patches, patch merger; the Hub's layout and the publisher's own"
    ),
    "qwen2_5_omni": FamilyNote(
        "images, videos and audio together; timestamps as positions; `speak` answers in text and speech",
        "5 minutes per audio item",
        "tests/pipelines/test_speak.py",
    ),
    "qwen2_audio": FamilyNote("`transcribe`; Whisper's tower, rows averaged in pairs", "30 s per audio item"),
    "qwen2_vl": FamilyNote(
        "M-RoPE; Qwen2.5-VL: windows in the tower, seconds as positions; Tarsier2", "aspect ratio up to 200:1"
    ),
    "qwen3_asr": FamilyNote("`transcribe`; linear M-RoPE"),
    "qwen3_omni": FamilyNote(
        "images, videos and audio together; DeepStack, experts; text output only; also the captioner (audio without text)",
        "40 minutes per audio item",
    ),
    "qwen3_vl": FamilyNote(
        "DeepStack, interleaved M-RoPE, timestamps as text, experts, gated delta nets (Qwen3.5); `embed` and `score`",
        "2048 frames per video; aspect ratio up to 200:1",
        "tests/pipelines/test_rank.py (vectors and scores)",
    ),
    "step3_vl": FamilyNote(
        "Step3-VL-10B: square windows of an image, then the whole image (`enable_patch`); two convolutions after the encoder; "
        "`Step3VL10BForCausalLM` is the name of the publisher's class, `StepVLForConditionalGeneration` of vLLM's"
    ),
    "terratorch": FamilyNote(
        "named tensors in, one tensor out (`encode`), without text and tokenizer: Prithvi and other models of TerraTorch; "
        "needs the package terratorch",
        "weights as safetensors; memory of the network is estimated",
        "tests/models/test_raw_tensors.py",
        use="tensors",
    ),
    "text_only": FamilyNote(
        "decoders without an encoder, which take text only; `model_type` selects the decoder; `embed`, `score`, `classify` "
        "and `reward`; voyage-4-nano (bidirectional)"
    ),
    "ultravox": FamilyNote("rows stacked by eight, any decoder; tower and decoder may be in other repositories"),
    "voxtral": FamilyNote(
        "`transcribe`; windows of 30 s, padded with silence; prompts as mistral-common writes them; "
        "the Hub's layout and the publisher's own"
    ),
    "voxtral_realtime": FamilyNote(
        "`transcribe`; causal encoder with a window; encoder rows are added to the prompt and to generated tokens; "
        "the delay is that of config.json",
        "one audio item of 60 s per prompt",
    ),
    "whisper": FamilyNote(
        "`transcribe`; encoder-decoder: cross-attention, language and task tokens, timestamp rules",
        "30 s per audio item of a prompt",
        "tiny.en's real weights on real speech",
    ),
}


CHECKPOINT_LAYOUTS: dict[str, CheckpointLayout] = {
    "params.json": CheckpointLayout(
        f"{_PACKAGE}.models.consolidated:hub_config",
        {
            "images": "PixtralConsolidated",
            "merged images": "Mistral3Consolidated",
            "audio": "VoxtralConsolidated",
            "text": "MistralConsolidated",
        },
    )
}
"""Files that replace config.json in a publisher's own layout."""


MODEL_TYPES: Mapping[str, str] = {
    "colmodernvbert": "ColModernVBertForRetrieval",
    "deepseek_vl_v2": "DeepseekVLV2ForCausalLM",
}
"""Architectures of published configs that have a `model_type` only."""


def architectures_of(config: Mapping[str, Any]) -> list[str] | None:
    """Return the architecture of a config.json that has a `model_type` only; None if it is not in MODEL_TYPES."""
    kind = config.get("model_type")
    return [MODEL_TYPES[kind]] if isinstance(kind, str) and kind in MODEL_TYPES else None


_NATIVE = frozenset(ARCHITECTURES)


def register_model(architecture: str, *, model: str, processing: str) -> None:
    """Add an architecture of another package to the registry. Its classes are imported when a checkpoint asks for them.

    Args:
        architecture: the name in `architectures` of config.json.
        model: `"package.module:Class"` that implements `models.interface.Model`.
        processing: `"package.module:Class"` that implements `processors.interface.ProcessingInfo`.

    Raises:
        ConfigError: a path is not of that form, or the name has other classes already.
    """
    for param, value in (("architecture", architecture), ("model", model), ("processing", processing)):
        if not isinstance(value, str) or not (_PATH.fullmatch(value) if param != "architecture" else value):
            form = "a name" if param == "architecture" else "'package.module:Class'"
            raise ConfigError(f"register_model: {param} is {short_repr(value)}; give {form}", param=param)
    row = Architecture(model, processing)
    if ARCHITECTURES.setdefault(architecture, row) != row:
        taken = ARCHITECTURES[architecture]
        raise ConfigError(f"the architecture {architecture!r} is registered with {taken.model}", param="architecture")


def registered_models() -> dict[str, Architecture]:
    """Return the architectures of other packages."""
    return {name: row for name, row in ARCHITECTURES.items() if name not in _NATIVE}


def is_registered(architecture: str) -> bool:
    """Return True if the registry has the architecture, after loading plugins if it does not have it without them."""
    if architecture not in ARCHITECTURES:
        _load_plugins()
    return architecture in ARCHITECTURES


@cache
def _load_plugins() -> None:
    """Call the functions of installed packages' entry points. One that fails is logged and skipped."""
    from importlib.metadata import entry_points

    for plugin in entry_points(group=_PLUGINS):
        try:
            plugin.load()()
        except Exception:
            _log.exception("the plugin %s of the entry point group %s failed and is skipped", plugin.value, _PLUGINS)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_SPELLINGS = {_plain(name): name for name in _NATIVE}


def architecture_key(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the key of ARCHITECTURES: "Architecture/vision model type" if there is one, else the architecture.

    Publishers differ in case and underscores (LightOnOCR and LightOnOcr), which are not compared.
    """
    if architecture not in ARCHITECTURES:
        architecture = _SPELLINGS.get(_plain(architecture), architecture)
    name = f"{architecture}/{(config.get('vision_config') or {}).get('model_type')}"
    return name if name in ARCHITECTURES else architecture


_TASK = re.compile(r"For[A-Z]\w*$")  # ending shared by many architectures


def find_architecture(name: str) -> Architecture:
    """Return the entry of an architecture; ConfigError with the nearest known name if there is none."""
    if is_registered(name):
        return ARCHITECTURES[name]
    near = get_close_matches(_TASK.sub("", name), stems := {_TASK.sub("", known): known for known in ARCHITECTURES}, n=1)
    nearest = f"; the nearest name is {stems[near[0]]}" if near else ""
    raise ConfigError(f"no implementation of the architecture {name!r} here (docs/models.md lists those there are{nearest})")
