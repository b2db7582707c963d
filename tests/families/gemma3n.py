"""Gemma 3n in the parity suite. The oracle's encoder of images, which needs timm, is composed."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from family import AUDIO_SIZES, IMAGE_SIZES, Family, run_oracle
from mobilenet import BLOCKS, MobileNet
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

NAMED = {"boi_token": "<boi>", "boa_token": "<boa>", "eoi_token": "<eoi>", "image_token": "<image_soft_token>"}
NAMED |= {"eoa_token": "<eoa>", "audio_token": "<audio_soft_token>"}
ROWS, IMAGE_ROWS, TOKENS = 10, 3, 4  # rows of an audio item, and along a side of an image; tokens of a modality
SIDE, STEM = 96, 16  # of an image in pixels; channels before the first stage


class Tower(torch.nn.Module):
    """The composed encoder in the place of transformers' wrapper around timm."""

    def __init__(self, config):
        super().__init__()
        args = config.model_args
        self.timm_model = MobileNet(args["block_args"], args["msfa_output_resolution"], args["stem_size"], config.hidden_size)

    def forward(self, pixel_values, **options):
        return SimpleNamespace(last_hidden_state=self.timm_model(pixel_values))


@contextmanager
def composed_vision():
    """Build the class with the composed encoder of images."""
    ensure_torchvision()
    from transformers.models.gemma3n import modeling_gemma3n as module

    build = module.AutoModel.from_config

    def from_config(config, **more):
        return Tower(config) if config.model_type == "gemma3n_vision" else build(config, **more)

    with mock.patch.object(module.AutoModel, "from_config", from_config):
        yield


def processor_of(words, images, extractor):
    import transformers as tf

    return tf.Gemma3nProcessor(extractor, images, words, audio_seq_length=ROWS, image_seq_length=IMAGE_ROWS**2)


def build(seed, tie=False, hearing=None, **text):
    ensure_torchvision()
    import transformers as tf

    last = ["<eoi>", "<image_soft_token>", "<i2>", "<i3>", "<eoa>", "<audio_soft_token>", "<a2>", "<a3>"]
    words = fast_tokenizer(["<bos>", "<eos>", "<boi>", "<boa>"], eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")
    words.add_tokens([tf.AddedToken("\n" * count, normalized=False) for count in range(2, 7)])
    words.add_tokens([tf.AddedToken(name, special=True, normalized=False) for name in last], special_tokens=True)
    words._set_model_specific_special_tokens(NAMED)
    first = words.convert_tokens_to_ids("<eoi>")
    sizes = {
        "head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 20, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": first, "pad_token_id": 0, "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0],
        "final_logit_softcapping": 8.0,
    }  # fmt: skip
    audio = {
        "hidden_size": 48, "vocab_size": TOKENS, "vocab_offset": first + TOKENS, "input_feat_size": 24,
        "conf_num_attention_heads": 4, "conf_num_hidden_layers": 3, "sscp_conv_channel_size": [24, 6],
        **(hearing or {}),
    }  # fmt: skip
    vision = {
        "hidden_size": 2048, "vocab_size": TOKENS, "vocab_offset": first, "model_type": "gemma3n_vision",
        "model_args": {"block_args": BLOCKS, "msfa_output_resolution": IMAGE_ROWS, "stem_size": STEM},
        "pretrained_cfg": {"input_size": [3, SIDE, SIDE]},
    }  # fmt: skip
    config = tf.Gemma3nConfig(
        text_config=tf.Gemma3nTextConfig(**text_config(words, tie, **{**sizes, **text})),
        vision_config=vision,
        audio_config=tf.Gemma3nAudioConfig(**audio),
        audio_soft_tokens_per_image=ROWS,
        vision_soft_tokens_per_image=IMAGE_ROWS**2,
        boi_token_id=words.convert_tokens_to_ids("<boi>"),
        boa_token_id=words.convert_tokens_to_ids("<boa>"),
        tie_word_embeddings=tie,
        eoi_token_id=words.convert_tokens_to_ids("<eoi>"),
        image_token_id=words.convert_tokens_to_ids("<image_soft_token>"),
        eoa_token_id=words.convert_tokens_to_ids("<eoa>"),
        audio_token_id=words.convert_tokens_to_ids("<audio_soft_token>"),
    )
    with composed_vision():
        model = tf.Gemma3nForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data.mul_(0.4)  # scores are not scaled by the width of a head
        elif ".bn" in name:
            parameter.data.add_(1)
        elif name.endswith(("query.proj.weight", "key.proj.weight")):
            parameter.data.mul_(3)  # as `sharpen`
    images = tf.SiglipImageProcessor(size={"height": SIDE, "width": SIDE}, resample=2, do_normalize=False)
    return model, processor_of(words, images, tf.Gemma3nAudioFeatureExtractor(feature_size=24))


def load(folder):
    import transformers as tf

    with composed_vision():
        model = tf.Gemma3nForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    images, extractor = tf.SiglipImageProcessor.from_pretrained(folder), tf.Gemma3nAudioFeatureExtractor.from_pretrained(folder)
    return model.eval(), processor_of(words, images, extractor)


def call(processor, text, data):
    """Process each audio alone: in a batch, the class pads the shorter ones with silence that it encodes."""
    made = [processor.feature_extractor([samples], return_tensors="pt") for samples in data.get("audio", ())]
    found = dict(processor(text=[text], images=data.get("image"), audio=data.get("audio"), return_tensors="pt"))
    kept = {name: found[name] for name in ("input_ids", "pixel_values") if name in found}
    return kept | {"audio": [(one["input_features"], one["input_features_mask"].bool()) for one in made]}


def prompt(placeholders, seed):
    """Write a prompt with a token from the table of images."""
    return f"def f{seed}(x):<eoi> " + " and ".join(placeholders) + " return it" + " + x" * (seed % 5)


def tensors(inputs, features):
    ordered = sorted(features, key=lambda one: one.range.offset)
    heard, seen = ([one for one in ordered if name in one.kwargs] for name in ("input_features", "pixel_values"))
    for feature, (theirs, mask) in zip(heard, inputs["audio"], strict=True):
        assert mask.all()
        yield "input_features", feature.kwargs["input_features"].data, theirs[0]
    for feature, theirs in zip(seen, inputs.get("pixel_values", ()), strict=True):
        patches = feature.kwargs["pixel_values"].data.view(IMAGE_ROWS, IMAGE_ROWS, 3, SIDE // IMAGE_ROWS, -1)
        yield "pixel_values", patches.permute(2, 0, 3, 1, 4).reshape(theirs.shape), theirs


def run(model, inputs, answer, positions):
    items = inputs["audio"]
    if not items:
        return run_oracle(model, inputs, answer, positions)
    with torch.inference_mode():
        found = [model.model.get_audio_features(features, ~mask, return_dict=True).pooler_output[0] for features, mask in items]
    longest = max(map(len, found))
    rows = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, longest - len(one))) for one in found])
    mask = torch.stack([torch.arange(longest) >= len(one) for one in found])
    encoded = SimpleNamespace(pooler_output=rows, audio_mel_mask=mask)
    with mock.patch.object(model.model, "get_audio_features", return_value=encoded):
        return run_oracle(model, {**inputs, "input_features": rows, "input_features_mask": ~mask}, answer, positions)


HEARING = {  # values of the encoder of audio that the published checkpoints do not have
    "later rows": {"conf_attention_context_right": 5},
    "later rows alone": {
        "conf_attention_context_right": 3, "conf_attention_context_left": 1, "conf_attention_chunk_size": 6,
    },
    "convolutions": {
        "sscp_conv_kernel_size": [[4, 3], [2, 4]], "sscp_conv_stride_size": [[2, 1], [3, 2]],
        "sscp_conv_channel_size": [10, 6], "conf_num_attention_heads": 16, "conf_conv_kernel_size": 4,
    },
}  # fmt: skip
FAMILY = Family(
    "gemma3n",
    build,
    placeholders={"image": "<image_soft_token>", "audio": "<audio_soft_token>"},
    sizes={"image": [(90, 130), (60, 60), (150, 40)], "audio": [(20_000,), (12_001,), (24_234,)]},
    grid={"image": IMAGE_SIZES, "audio": [size for size in AUDIO_SIZES if size[0] <= 100_000]},
    refuses=lambda modality, size: modality == "audio" and not 512 < size[0] <= 26_112,  # longer audio has more rows than ROWS
    prompt=prompt,
    call=call,
    run=run,
    tensors=tensors,
    tensor_tolerance=1e-4,
    half=(0.15, 0.02),  # with images, transformers' own class is off by 0.08 to 0.15 in bfloat16: many convolutions in a row
    load=load,
    variants={"tied": {"tie": True}} | {name: {"hearing": values} for name, values in HEARING.items()},
    fullest={"audio": [(25_600,)]},
)
