"""Notes on the families of `mm/registry.py`, for docs/models.md."""

from __future__ import annotations

from dataclasses import dataclass


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
    "bagel": FamilyNote(
        "understanding with BAGEL-7B-MoT: images at native resolution, resized as in its app, to 512 to 1,024 pixels a side, "
        "then at most 980; the tokens of an image see each other and have one position; the publisher's files, in "
        "which sections of the config are files of their own",
        "no generation of images; its weights are not read",
    ),
    "bert": FamilyNote(
        "text encoders for `embed` (mean or CLS pooling, as 1_Pooling/config.json says), `classify`, and classes of tokens "
        '(`encode(..., pooling_task="token_classify")`); `score` of pairs with cross-encoders; learned positions, rotary ones '
        "(Nomic, GTE) or a bias of scores (MPNet); the Hub's layout and the publishers'",
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
        "SigLIP on tiles that keep most of an image's area and shape, with a thumbnail; the number of each image as text; "
        "videos as frames of one tile, each after its number and seconds; any text stack",
        "at most ten videos per prompt; no RADIO tower",
    ),
    "ernie4_5_vl": FamilyNote(
        "frames merged in pairs, separate experts for images and videos, timestamps drawn onto frames",
        "aspect ratio up to 200:1",
    ),
    "fun_asr_nano": FamilyNote(
        "`transcribe`, with words to expect as `context`; SenseVoice's encoder over frames stacked every 60 ms; transformers' "
        "checkpoint with a token per 60 ms, or the publisher's for vLLM with one per 480 ms",
        "122 s per audio item; no CTC head (times of words); features without dither",
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
        "`transcribe`; images as squares of 768 pixels in 256 rows through MobileNetV5, audio of up to 30 s in 188 rows "
        "through a conformer; several residual streams, per-layer inputs, shared KV caches"
    ),
    "gemma4": FamilyNote(
        "images and frames at their own aspect ratio within 70 to 1,120 rows, averages of 3 x 3 patches; times before frames; "
        "audio of up to 30 s through a conformer with attention to the last 12 rows; per-layer inputs, shared KV caches"
    ),
    "gemma4_unified": FamilyNote(
        "Gemma 4 12B: no encoders; squares of 48 pixels and 40 ms of samples are projected to rows; `transcribe`; sizes, times "
        "and options as in Gemma 4",
        "30 s per audio item",
    ),
    "glm4v": FamilyNote(
        "timestamps between frames as text, rotary positions on half of each head; norms before and after each sublayer, or "
        "a mixture of experts; GLM-OCR with its own tower; `load_mtp` for GLM-4.5V and GLM-OCR",
        other_tests="tests/models/families/test_mtp.py (multi-token prediction)",
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
        '(`frame_types`, given or "auto": by the similarity of frames)',
        "aspect ratio up to 200:1; 1.5: all frames are slow unless `frame_types` is given",
        "tests/processors/families/test_keye.py",
    ),
    "kimi_audio": FamilyNote(
        "Kimi-Audio: `transcribe`; Whisper's encoder (the checkpoint's folder `whisper-large-v3`), rows stacked by four; "
        "two streams of tokens, summed; text output only",
        "10 minutes per audio item; without the codes of GLM-4-Voice's tokenizer, which the publisher adds to the rows",
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
        "one or several encoder layers of CLIP or SigLIP; grids of tiles with newline rows; pooled videos; Tarsier; "
        "MinerU 2.0 (`output.elements` with text and tables)"
    ),
    "midashenglm": FamilyNote(
        "`transcribe`; mel bands of 64 in patches of 40 ms, which attend within 10 s; rows joined by five",
        "20 minutes per audio item",
    ),
    "minicpmv": FamilyNote(
        "a whole image and slices of it, each at its own size; rows merged in squares within the tower (4.6, 4.7), or a "
        "resampler (2.6, 4 and 4.5, in their publisher's layout); times of frames, several of which make one (4.5); MiniCPM-o "
        "2.6 and 4.5 with audio, `transcribe` (English, Chinese), text output only; MiniCPM-OCR; a canvas of "
        "positions (4.7)",
        "2.6 to 4.5: views up to 1.25 times the patches of a square one; 30 minutes per audio item; MiniCPM-OCR: "
        "sizes of small images do not depend on their letters (`small_image_upsize`); 4.7: no precomputed embeddings",
    ),
    "mllama": FamilyNote(
        "tiles of the best canvas, which some layers of the decoder cross-attend to; prompts without an image skip them",
        "one image per prompt; every image takes the rows of as many tiles as config.json allows",
    ),
    "modernbert": FamilyNote(
        "text encoder with rotary positions and sliding windows, for `embed`, `classify`, classes of tokens "
        '(`encode(..., pooling_task="token_classify")`), and `score` of pairs',
        "vectors and classes only; heads of other tasks are not used",
        "tests/models/families/test_bert.py, tests/models/families/test_classification.py",
        use="retrieval",
    ),
    "molmo2": FamilyNote(
        "a small view and overlapping crops of an image, frames with their times; attention pooling of patches; the tokens of "
        "all pictures see each other; points, also in several images and in videos; the Hub's layout and the publisher's",
        "images, or one video, per prompt; at most 8 crops; the last frame of a video is used where the JSON says so, and no "
        "frame twice",
    ),
    "molmo": FamilyNote(
        "Molmo-7B-D, Molmo-7B-O and MolmoE-1B: a small view and overlapping crops of an image, padded, each patch marked if it "
        "is padding; attention pooling of patches; points",
        "images only, before the text; at most 12 crops",
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
        "images at their own resolution; videos with the number and time of each frame as text; `video_pruning_rate` of "
        "config.json or `hf_overrides` drops the rows of videos that change least (efficient video sampling); any text stack",
        "no sound, no frames joined in pairs; an image's patches do not depend on the other images of the prompt",
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
        "`transcribe`: FastConformer with a CTC head or a transducer (TDT, RNN-T), greedy; times of words from the rows",
        "60 s per audio item; at most `max_symbols_per_step` tokens per row; a step decodes at most 64 rows (5 s) of a window",
        "tests/models/families/test_parakeet.py, tests/models/families/test_parakeet_transducer.py",
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
        "images, videos and audio together; DeepStack, experts; `speak` answers in text and speech; also the captioner (audio "
        "without text)",
        "40 minutes per audio item",
        "tests/pipelines/test_speak_qwen3.py",
    ),
    "qwen3_vl": FamilyNote(
        "DeepStack, interleaved M-RoPE, timestamps as text, experts, gated delta nets (Qwen3.5); `embed` and `score`; "
        "`load_mtp` for Qwen3.5",
        "2048 frames per video; aspect ratio up to 200:1",
        "tests/pipelines/test_rank.py (vectors and scores), tests/models/families/test_mtp.py (multi-token prediction)",
    ),
    "step3_vl": FamilyNote(
        "Step3 and Step3-VL-10B: square windows of an image, then the whole image (`enable_patch`); two convolutions after the "
        "encoder; Step3's decoder expands queries from a low rank to all heads, which share one key and value head, and has "
        "experts; `Step3VL10BForCausalLM` is the name of the publisher's class of Step3-VL-10B, "
        "`StepVLForConditionalGeneration` of vLLM's"
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
        "and `reward`; voyage-4-nano (bidirectional); `load_mtp` for DeepSeek V3, GLM-4.5 and Qwen3-Next",
        other_tests="tests/models/families/test_mtp.py (multi-token prediction)",
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
