"""Fun-Audio-Chat in the parity suite, with windows of 0.4 s.

The oracle is composed of transformers' Qwen2.5-Omni audio encoder and Qwen3, as the publisher's modelling file describes them.
"""

from functools import partial

import torch
from composed import ComposedModel, ComposedProcessor, expand_audio, load_composed, run_composed, text_positions
from family import AUDIO_SIZES, RATE, Family
from oracle import AUDIO_SPECIALS, fast_tokenizer, randomise, sharpen, text_config
from torch import nn
from torch.nn import functional as F

AUDIO, START, END = AUDIO_SPECIALS
SECONDS, PAD = 6, 3


class SpeechEncoder(nn.Module):
    """Groups of speech tokens, which are all padding, and of the encoder's rows."""

    def __init__(self, c):
        super().__init__()
        self.group, self.add, width = c["group_size"], c["continuous_features_mode"] == "add", c["output_dim"]
        self.embed_tokens = nn.Embedding(c["codebook_size"], width, c["pad_token_id"])
        self.output_matching = nn.Linear(width, width, bias=False)
        self.continual_output_matching = nn.Linear(width, width, bias=False)

    def forward(self, rows, count):
        kept = rows[: count * self.group]
        joined = F.pad(kept, (0, 0, 0, count * self.group - len(kept))).unflatten(0, (count, self.group)).mean(1)
        tokens = torch.full((count, self.group), PAD)
        speech = self.output_matching(self.embed_tokens(tokens).mean(1))
        return self.continual_output_matching(joined) + (speech if self.add else 0)


class Composed(ComposedModel):
    unsaved = ("continuous_audio_tower.positional_embedding",)

    def __init__(self, config):
        super().__init__(config)
        import transformers as tf
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

        audio = {key: value for key, value in config["audio_config"].items() if key != "model_type"}
        self.continuous_audio_tower = Qwen2_5OmniAudioEncoder._from_config(tf.Qwen2_5OmniAudioEncoderConfig(**audio))
        self.audio_tower = SpeechEncoder(audio)
        text = tf.Qwen3Config(**config["text_config"])
        self.language_model = tf.Qwen3ForCausalLM._from_config(text, attn_implementation="eager")

    @property
    def decoder(self):
        return self.language_model

    def encode(self, features, count):
        tower, length = self.continuous_audio_tower, torch.tensor([features.shape[1]])
        inner, _ = tower._get_feat_extract_output_lengths(length)
        return self.audio_tower(tower(features, feature_lens=length, aftercnn_lens=inner).last_hidden_state, count)


def build(seed, mode="add", group=5, mels=24):
    import transformers as tf

    words = fast_tokenizer(["<|endoftext|>", *AUDIO_SPECIALS], eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    audio = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": mels}
    audio |= {"n_window": 20, "max_source_positions": 100, "output_dim": 64, "group_size": group, "codebook_size": 11}
    audio |= {"model_type": "funaudiochat_audio_encoder", "pad_token_id": PAD, "continuous_features_mode": mode}
    config = {
        "architectures": ["FunAudioChatForConditionalGeneration"],
        "model_type": "funaudiochat",
        "audio_config": audio,
        "text_config": {"model_type": "qwen3", "head_dim": 16, **text_config(words)},
        "audio_token_index": words.convert_tokens_to_ids(AUDIO),
        "audio_token_id": words.convert_tokens_to_ids(AUDIO),
    }
    model = Composed(config).eval()
    randomise(model, seed)
    sharpen(model.continuous_audio_tower)
    extractor = tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=SECONDS)
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=extractor.to_dict())


def call(processor, text, data):
    import transformers as tf

    config, audio = processor.config["audio_config"], []
    extractor = tf.WhisperFeatureExtractor(**processor.preprocessor)
    for samples in data.get("audio", ()):
        made = extractor(samples, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt")
        frames = int(made["attention_mask"].sum())
        tokens = int(len(samples) / RATE * 25)
        audio.append((made["input_features"][0, :, :frames], -(-tokens // config["group_size"])))
    expanded = expand_audio(text, [rows for _, rows in audio], AUDIO_SPECIALS)
    return {"input_ids": torch.tensor([processor.tokenizer.encode(expanded, add_special_tokens=False)]), "audio": audio}


def tensors(inputs, features):
    for feature, (frames, rows) in zip(features, inputs["audio"], strict=True):
        yield "input_features", feature.kwargs["input_features"].data, frames.T
        yield "audio_rows", feature.kwargs["audio_rows"].data, torch.tensor(rows)


FAMILY = Family(
    "funaudiochat",
    build,
    placeholders={"audio": START + AUDIO + END},
    # the encoder gives 14, 32 and 25 rows to 15, 35 and 25 places, and 26 rows to 25 places
    sizes={"audio": [(9000,), (20_800,), (16_000,), (16_500,)]},
    grid={"audio": [*AUDIO_SIZES, (639,), (95_999,), (96_000,), (96_001,)]},
    refuses=lambda modality, size: size[0] < 640 or size[0] > SECONDS * RATE,
    call=call,
    run=run_composed,
    tensors=tensors,
    oracle_positions=text_positions,
    load=partial(load_composed, Composed),
    silent={"continuous_audio_tower.audio_bos_eos_token.": "the published model does not use it either"},
    variants={"rows replace tokens": {"mode": "replace"}, "groups of three": {"group": 3, "mels": 40}},
)
