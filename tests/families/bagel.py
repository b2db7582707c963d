"""BAGEL's understanding in the parity suite, composed of transformers' SigLIP encoder and Qwen3 with biases.

Source of what is around them: the publisher's modeling/bagel, data/transforms.py and data/data_utils.py. vLLM's class differs,
and the publisher decides: vLLM resizes every image to one square, gives the tokens of an image consecutive positions, does not
write the start and end token, and computes the connector's positions instead of reading them.
"""

import json
from types import SimpleNamespace

import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

PATCH, SIDE, LONGEST, SHORTEST, MOST = 8, 12, 96, 32, 7000
START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
GENERATION = {
    "language_model.model.norm_moe_gen.weight": (64,), "language_model.model.layers.0.mlp_moe_gen.up_proj.weight": (128, 64),
    "language_model.model.layers.0.self_attn.q_proj_moe_gen.bias": (64,), "latent_pos_embed.pos_embed": (16, 64),
    "llm2vae.bias": (16,), "vae2llm.weight": (64, 16), "time_embedder.mlp.0.weight": (64, 256),
}  # fmt: skip
"""Some of the tensors that generate images."""


class Tower(nn.Module):
    """SigLIP for one image `[h, w, patch * patch * 3]` of patches, whose channels come last."""

    def __init__(self, c):
        super().__init__()
        import transformers as tf
        from transformers.models.siglip.modeling_siglip import SiglipEncoder

        width = c["hidden_size"]
        shape = {key: c[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
        depth = c["num_hidden_layers"] - 1  # as in the published code
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Linear(3 * PATCH**2, width)
        self.embeddings.position_embedding = nn.Embedding(SIDE**2, width)
        self.encoder = SiglipEncoder(tf.SiglipVisionConfig(**shape, num_hidden_layers=depth, attn_implementation="eager"))
        self.post_layernorm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, patches, places):
        x = self.embeddings.patch_embedding(patches) + self.embeddings.position_embedding(places)
        return self.post_layernorm(self.encoder(inputs_embeds=x[None]).last_hidden_state)[0]


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, llm = config, config["llm_config"]
        self.vit_model, self.connector, self.vit_pos_embed = nn.Module(), nn.Module(), nn.Module()
        self.vit_model.vision_model = Tower(config["vit_config"])
        self.connector.fc1 = nn.Linear(config["vit_config"]["hidden_size"], llm["hidden_size"])
        self.connector.fc2 = nn.Linear(llm["hidden_size"], llm["hidden_size"])
        self.vit_pos_embed.pos_embed = nn.Parameter(torch.empty(SIDE**2, llm["hidden_size"]))
        dim = llm["hidden_size"] // llm["num_attention_heads"]
        own = {key: value for key, value in llm.items() if key != "model_type"}
        made = tf.Qwen3Config(**own, head_dim=dim, attention_bias=True)
        self.language_model = tf.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
        for layer in self.language_model.model.layers:
            layer.self_attn.o_proj.bias = None

    def forward(self, input_ids, patches=(), places=(), position_ids=None, mask=None, past_key_values=None):
        x = self.language_model.get_input_embeddings()(input_ids)
        if len(patches):
            rows = []
            for item, where in zip(patches, places, strict=True):
                hidden = F.gelu(self.connector.fc1(self.vit_model.vision_model(item, where)), approximate="tanh")
                rows.append(self.connector.fc2(hidden) + self.vit_pos_embed.pos_embed[where])
            x[input_ids == self.config["own"][PAD]] = torch.cat(rows)
        seen = None if mask is None else torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        return self.language_model(
            inputs_embeds=x, position_ids=position_ids, attention_mask=seen, past_key_values=past_key_values, use_cache=True
        )

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: torch.ones(shape) for name, shape in GENERATION.items()} | self.state_dict()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.words.save_pretrained(folder)
        made = {"size": {"longest_edge": LONGEST, "shortest_edge": SHORTEST}, "max_pixels": MOST}
        (folder / "preprocessor_config.json").write_text(json.dumps(made))


def build(seed):
    ensure_torchvision()
    marks = ("<|im_start|>", "<|im_end|>", START, END, PAD)
    words = fast_tokenizer(["<|endoftext|>", *marks], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    vision = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "patch_size": PATCH,
        "image_size": PATCH * SIDE, "num_channels": 3, "model_type": "siglip_vision_model",
    }  # fmt: skip
    config = {
        "architectures": ["BagelForConditionalGeneration"], "model_type": "bagel", "connector_act": "gelu_pytorch_tanh",
        "interpolate_pos": False, "vit_max_num_patch_per_side": SIDE, "visual_gen": True, "visual_und": True,
        "llm_config": {**text_config(words), "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        "vit_config": vision, "own": dict(zip(marks, words.convert_tokens_to_ids(marks), strict=True)),
    }  # fmt: skip
    model = Composed(config).eval()
    randomise(model, seed)
    sharpen(model.vit_model)
    return model, Processor(words=words)


def load(folder):
    import transformers as tf

    model = Composed(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor for name, tensor in stored.items() if name not in GENERATION})
    return model.eval(), Processor(words=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def resize(image, longest, shortest, stride, most):
    """Resize by the published rule."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as pixels

    def scaled(sides, scale):
        return [max(stride, int(round(round(side * scale) / stride) * stride)) for side in sides]

    sides = scaled(image.size, max(min(longest / max(image.size), 1.0), shortest / min(image.size)))
    if sides[0] * sides[1] > most:
        sides = scaled(sides, most / (sides[0] * sides[1]))
    if max(sides) > longest:
        sides = scaled(sides, longest / max(sides))
    return pixels.resize(image, sides[::-1], InterpolationMode.BICUBIC, antialias=True)


def prepare(image):
    """Return patches `[h * w, patch * patch * 3]` and their places in a table of positions.

    `interleave_inference` resizes for the autoencoder first, whether or not it reads the image.
    """
    from torchvision.transforms import functional as pixels

    resized = resize(resize(image, 1024, 512, 16, 14 * 14 * 9 * 1024), LONGEST, SHORTEST, PATCH, MOST)
    plane = pixels.normalize(pixels.to_tensor(resized), [0.5] * 3, [0.5] * 3)
    grid = plane.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).permute(1, 3, 2, 4, 0)
    places = torch.arange(grid.shape[0])[:, None] * SIDE + torch.arange(grid.shape[1])
    return grid.reshape(-1, 3 * PATCH**2), places.flatten()


def call(processor, text, data):
    """Pack a prompt as `prepare_prompts` and `prepare_vit_images` do: an image's tokens see each other, at one position."""
    items, own = [prepare(image) for image in data.get("image", ())], processor.words.convert_tokens_to_ids
    ids, positions, blocks, position = [], [], [], 0
    for number, part in enumerate(text.split(PAD)):
        if number:
            block = [own(START), *[own(PAD)] * len(items[number - 1][0]), own(END)]
            blocks.append((len(ids), len(ids) + len(block)))
            ids += block
            positions += [position] * len(block)
            position += 1
        words = processor.words(part)["input_ids"]
        ids += words
        positions += range(position, position + len(words))
        position += len(words)
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for first, last in blocks:
        mask[first:last, first:last] = True
    patches, places = zip(*items, strict=True) if items else ((), ())
    inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]), "mask": mask[None, None]}
    return {**inputs, "patches": patches, "places": places}


def run(model, inputs, answer, positions):
    with torch.inference_mode():
        first = model(**inputs)
        if len(answer) < 2:
            return first.logits[0].float()
        next_position = int(inputs["position_ids"].max()) + 1
        places = torch.arange(next_position, next_position + len(answer) - 1)[None]
        rest = model(torch.tensor([answer[:-1]]), position_ids=places, past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    for feature, patches in zip(ordered, inputs["patches"], strict=True):
        theirs = patches.unflatten(1, (PATCH**2, 3)).transpose(1, 2).flatten(1)
        yield "pixel_values", feature.kwargs["pixel_values"].data, theirs


def write_prompt(placeholders, seed):
    between = "<|im_start|>and<|im_end|>".join(placeholders)
    return f"<|im_start|>def f{seed}(x):<|im_end|>{between}<|im_start|>return it{' + x' * (seed % 5)}<|im_end|><|im_start|>"


KEYS = "a key bias adds the same to all scores of a query"
FAMILY = Family(
    "bagel",
    build,
    placeholders={"image": PAD},
    sizes={"image": [(90, 130), (60, 60), (40, 150), (131, 33)]},
    grid={"image": IMAGE_SIZES},
    prompt=write_prompt,
    call=call,
    run=run,
    tensors=tensors,
    oracle_positions=lambda model, inputs: inputs["position_ids"],
    prompt_attention="bidirectional_ranges",
    load=load,
    silent={f"vit_model.vision_model.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
)
