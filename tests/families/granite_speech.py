"""Granite Speech and Granite Speech Plus in the parity suite, with blocks of 20 rows; also with an adapter for audio."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from family import AUDIO_SIZES, RATE, Family, make_media
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from safetensors.torch import load_file, save_file

HOP, WINDOW, BANDS = 160, 512, 24
CONTROLS = ["<|end_of_text|>", "<|audio|>"]
ADAPTER = {"peft_type": "LORA", "r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        spectrogram = {"sample_rate": RATE, "n_fft": WINDOW, "win_length": 400, "hop_length": HOP, "n_mels": BANDS}
        made = {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "feature_size": BANDS, "sampling_rate": RATE}
        made |= {"projector_window_size": 15, "projector_downsample_rate": 5, "melspec_kwargs": spectrogram}
        (folder / "preprocessor_config.json").write_text(json.dumps(made))


def build(seed, tie=False, heads=4, every=1, states=None, **text):
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|end_of_text|>", pad_token="<|end_of_text|>")
    encoder = {"input_dim": 2 * BANDS, "num_layers": 4, "hidden_dim": 64, "feedforward_mult": 2, "num_heads": heads}
    encoder |= {"output_dim": 12, "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 7}
    projector = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    projector |= {"encoder_hidden_size": 64 * (1 + len(states or ())), "cross_attention_frequency": every}
    kind = "GraniteSpeech" if states is None else "GraniteSpeechPlus"
    if states is not None:
        encoder["cat_hidden_layers"] = states
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3, "logits_scaling": 0.5}
    config = getattr(tf, f"{kind}Config")(
        encoder_config=encoder,
        projector_config={"model_type": "blip_2_qformer", **projector},
        text_config={"model_type": "granite", **text_config(words, tie, **(factors | text))},
        audio_token_index=words.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
        tie_word_embeddings=tie,
    )
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    sharpen_parts(model.model)
    first, usual = model.model.encoder.input_linear, spectrogram(make_media("audio", (RATE,), seed)).mean(0)
    first.weight.data.mul_(20)  # the suite's audio items resemble each other
    first.bias.data.sub_(first.weight.data @ usual)
    gen = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=gen) * 0.4 + (0.8 if "var" in name else -0.2))
    last = model.model.encoder.layers[-1].post_norm
    with torch.inference_mode():
        rows = model.model.encoder(spectrogram(make_media("audio", (RATE,), seed))[None]).last_hidden_state[0, :, -64:]
    last.bias.data.sub_(rows.mean(0)).mul_(2)
    last.weight.data.mul_(2)
    return model, Processor(tokenizer=words)


def sharpen_parts(model):
    """Scale attention up: otherwise it is flat, and the queries outweigh the rows that they attend to."""
    for name, value in model.named_parameters():
        if "encoder.layers" in name and ("to_q" in name or "rel_pos" in name):
            value.data.mul_(2)
        elif "qformer" in name and ("query.weight" in name or "key.weight" in name):
            value.data.mul_(4)
        elif "crossattention.output.dense.weight" in name:
            value.data.mul_(2)
    model.projector.linear.weight.data.mul_(4)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(tf, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def add_adapter(folder):
    """Write a LoRA adapter in peft's layout, with the module names of transformers 4."""
    gen, tensors = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTER["target_modules"]:
            stem = f"base_model.model.{module.replace('model.language_model.', 'language_model.model.')}"
            for letter, shape in (("A", (ADAPTER["r"], weight.shape[1])), ("B", (weight.shape[0], ADAPTER["r"]))):
                tensors[f"{stem}.lora_{letter}.weight"] = torch.randn(shape, generator=gen) / shape[1] ** 0.5
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))


def load_adapted(folder):
    """Load the oracle with the adapter, which is applied while `has_audio` is true."""
    model, processor = load(folder)
    stored, scale = load_file(folder / "adapter_model.safetensors"), ADAPTER["lora_alpha"] / ADAPTER["r"]

    def adding(down, up):
        return lambda _, given, made: made + given[0] @ down.T @ up.T * scale if model.has_audio else made

    for name, up in stored.items():
        stem, letter, _ = name.rpartition(".lora_B.")
        if letter:
            module = stem.removeprefix("base_model.model.").replace("language_model.model.", "model.language_model.")
            model.get_submodule(module).register_forward_hook(adding(stored[f"{stem}.lora_A.weight"], up))
    return model, processor


def run_adapted(model, inputs, answer, positions):
    model.has_audio = bool(inputs["audio"])
    return run(model, inputs, answer, positions)


def spectrogram(samples):
    """Return torchaudio's spectrogram with the published arguments; torchaudio is not installed everywhere."""
    from transformers.audio_utils import mel_filter_bank

    filters = torch.from_numpy(mel_filter_bank(WINDOW // 2 + 1, BANDS, 0.0, RATE / 2, RATE, norm=None, mel_scale="htk"))
    bell = torch.hann_window(400)
    waves = torch.stft(torch.from_numpy(samples), WINDOW, HOP, 400, bell, center=True, pad_mode="reflect", return_complex=True)
    bands = (waves.abs().square().T @ filters.float()).clip(min=1e-10).log10()
    bands = torch.maximum(bands, bands.max() - 8.0) / 4 + 1
    return bands[: len(bands) // 2 * 2].reshape(-1, 2 * BANDS)


def call(processor, text, data):
    audio = [spectrogram(samples) for samples in data.get("audio", ())]
    for rows in audio:
        text = text.replace("<|audio|>", "<|held|>" * (-(-len(rows) // 15) * 3), 1)
    ids = processor.tokenizer(text.replace("<|held|>", "<|audio|>"), return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "audio": audio}


def tensors(inputs, features):
    for feature, theirs in zip(features, inputs["audio"], strict=True):
        yield "input_features", feature.kwargs["input_features"].data, theirs


def run(model, inputs, answer, positions):
    """Encode each audio alone: in a batch, transformers pads the shorter ones with silence that is attended to."""
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        if inputs["audio"]:
            made = torch.cat(
                [model.get_audio_features(rows[None], return_dict=True).pooler_output[0] for rows in inputs["audio"]]
            )
            embeds[inputs["input_ids"] == model.config.audio_token_id] = made
        first = model(inputs_embeds=embeds, use_cache=True)
        if len(answer) < 2:
            return first.logits[0].float()
        tail = model.get_input_embeddings()(
            torch.tensor([answer[:-1]])
        )  # the class would replace a placeholder token in the answer
        rest = model(inputs_embeds=tail, past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


QFORMER = "model.projector.qformer."
SAME = [f"{QFORMER}encoder.layer.{i}.{kind}.attention.key.bias" for i in range(2) for kind in ("attention", "crossattention")]
FAINT = [
    "layernorm.bias",
    *(f"encoder.layer.0.attention.{name}.bias" for name in ("attention.query", "attention.value", "output.dense")),
    *(f"encoder.layer.0.crossattention.{name}.bias" for name in ("attention.query", "attention.value", "output.dense")),
    *(f"encoder.layer.1.attention.attention.{name}" for name in ("query.weight", "query.bias", "key.weight")),
]


PLAIN = Family(
    "granite_speech",
    build,
    placeholders={"audio": "<|audio|>"},
    sizes={"audio": [(30_000,), (9001,), (70_234,)]},
    grid={"audio": [*AUDIO_SIZES, (257,), (4799,), (4800,), (4801,), (64_000,)]},
    call=call,
    run=run,
    tensors=tensors,
    load=load,
    layouts={"transformers 5.19": [("language_model.model.", "language_model.model.model.")]},
    silent={
        **dict.fromkeys(SAME, "adds the same to all scores of a row"),
        **{QFORMER + name: "contributes little to three of hundreds of rows" for name in FAINT},
        "model.encoder.out.bias": "adds little to the rows of the middle layer",
    },
    variants={"tied": {"tie": True}, "wide heads, few cross-attentions": {"heads": 2, "every": 2}},
)

FAMILIES = [
    PLAIN,
    replace(PLAIN, name="granite_speech_adapter", finish=add_adapter, load=load_adapted, run=run_adapted, variants={}),
    replace(
        PLAIN,
        name="granite_speech_plus",
        build=partial(build, states=[3]),
        variants={"the last state alone": {"states": []}, "three earlier states": {"states": [0, 1, 2]}},
    ),
]
