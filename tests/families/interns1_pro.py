"""Intern-S1-Pro in the parity suite.

transformers has no class for it; the oracle is its Qwen3-VL with experts, with the rotary positions and the router of the
published code.
"""

import functools
import json
import math

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled, run_oracle
from oracle import ensure_torchvision, fast_tokenizer, load_processor, randomise, text_config
from torch import nn
from torch.nn import functional as F

SPECIALS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION = {
    "depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64, "patch_size": 16,
    "num_position_embeddings": 36, "deepstack_visual_indexes": [],
}  # fmt: skip
AREAS = {"image": (64 * 64, 160 * 160), "video": (64 * 64 * 4, 96 * 96 * 8)}


class Mixed(nn.Module):
    """Cosines and sines, each a mixture of those of the frequencies that are kept: `[kv heads or 1, rows, head / 2]`."""

    def __init__(self, config):
        super().__init__()
        rope, self.half = config.rope_parameters, config.head_dim // 2
        self.base, least = rope["rope_theta"] ** (-1 / self.half), 2 * math.pi / config.max_position_embeddings
        self.count = rope["num_inv_freq"] or sum(self.base**i > least for i in range(self.half))
        several = (config.num_key_value_heads,) if rope["fope_sep_head"] else ()
        shape = (*several, self.count, self.count)
        self.cos_coef, self.sin_coef = (nn.Parameter(torch.zeros(shape)) for _ in range(2))

    def forward(self, x, position_ids):
        angles = position_ids[0, 0, :, None].float() * self.base ** torch.arange(self.count)
        mixed = (values @ coef for values, coef in ((angles.cos(), self.cos_coef), (angles.sin(), self.sin_coef)))
        return tuple(F.pad(part, (0, self.half - self.count), value=1.0) for part in mixed)


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class GroupRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.groups, self.chosen = config.router_n_groups, config.num_experts_per_tok
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))

    def forward(self, x):
        logits = x @ self.weight.T
        scores = logits.softmax(-1)
        each = self.chosen // self.groups
        weights, ids = scores.unflatten(-1, (self.groups, -1)).topk(each, -1)
        ids = ids + torch.arange(self.groups)[:, None] * (scores.shape[1] // self.groups)
        weights = weights.flatten(1)
        return logits, weights / weights.sum(-1, keepdim=True), ids.flatten(1)


@functools.cache
def oracle_class():
    ensure_torchvision()
    import transformers as tf
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as published

    class Attention(published.Qwen3VLMoeTextAttention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
            k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
            v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
            groups, kv_heads = self.num_key_value_groups, k.shape[1]
            cos, sin = (part.expand(kv_heads, -1, -1) for part in position_embeddings)
            q = turn(q, cos.repeat_interleave(groups, 0), sin.repeat_interleave(groups, 0))
            k, v = past_key_values.update(turn(k, cos, sin), v, self.layer_idx)
            k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
            attended = F.scaled_dot_product_attention(q, k, v, attention_mask)
            return self.o_proj(attended.transpose(1, 2).flatten(2)), None

    class InternS1Pro(tf.Qwen3VLMoeForConditionalGeneration):
        def __init__(self, config):
            super().__init__(config)
            text, model = config.text_config, self.model.language_model
            model.rotary_emb = Mixed(text)
            for number, layer in enumerate(model.layers):
                layer.self_attn = Attention(text, number)
                if hasattr(layer.mlp, "gate") and text.router_n_groups > 1:
                    layer.mlp.gate = GroupRouter(text)

    return InternS1Pro


def build(seed, tie=False, own=True, kept=None, groups=2, dense=(1,)):
    kind = oracle_class()
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = dict(zip(SPECIALS, words.convert_tokens_to_ids(SPECIALS), strict=True))
    text = text_config(words, tie, head_dim=16, num_hidden_layers=4, router_n_groups=groups, mlp_only_layers=list(dense))
    text |= {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 50000.0, "fope_sep_head": own, "num_inv_freq": kept}
    config = tf.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )
    model = kind(config).eval()
    randomise(model, seed)
    image, video = ({"shortest_edge": least, "longest_edge": most} for least, most in AREAS.values())
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    return model, tf.Qwen3VLProcessor(
        image_processor=tf.Qwen2VLImageProcessor(size=image, **half),
        tokenizer=words,
        video_processor=tf.Qwen3VLVideoProcessor(size=video, cap_pixels_per_frame=False, **half),
    )


def finish(folder):
    """Write the architecture, without the key of deepstack, which the published config lacks."""
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["deepstack_visual_indexes"]
    named = {"architectures": ["InternS1ProForConditionalGeneration"], "model_type": "interns1_pro"}
    (folder / "config.json").write_text(json.dumps(config | named))


def load(folder):
    kind = oracle_class()
    import transformers as tf

    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_vl_moe"}
    config["vision_config"]["deepstack_visual_indexes"] = []
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = tf.Qwen3VLMoeConfig.from_dict(config)
    return kind.from_pretrained(folder, config=config, dtype=torch.float32, **plain).eval(), load_processor(folder)


def run(model, inputs, answer, positions):
    """Run the oracle with positions of one axis."""
    count = inputs["input_ids"].shape[1] + len(answer)
    return run_oracle(model, inputs, answer, torch.arange(count).expand(3, -1))


def refuses(modality, size):
    return modality == "image" and max(size) > 200 * min(size)


FAMILY = Family(
    "interns1_pro",
    build,
    placeholders={m: f"<|vision_start|><|{m}_pad|><|vision_end|>" for m in ("image", "video")},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)], "video": [size for size in VIDEO_SIZES if size[0] > 1]},
    refuses=refuses,
    ours=as_sampled,
    call=call_sampled,
    run=run,
    finish=finish,
    load=load,
    oracle_positions=lambda model, inputs: None,
    variants={
        "tied": {"tie": True},
        "one mixture for all heads": {"own": False},
        "a number of frequencies": {"kept": 3},
        "no groups": {"groups": 1},
        "four groups": {"groups": 4, "dense": ()},
    },
)
