"""Ernie-4.5-VL in the parity suite."""

import functools
import tempfile
from pathlib import Path

from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled, is_sliver
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from PIL import ImageFont

SPECIALS = {
    "eos": "</s>",
    "image": "<|IMAGE_PLACEHOLDER|>", "image_start": "<|IMAGE_START|>", "image_end": "<|IMAGE_END|>",
    "video": "<|VIDEO_PLACEHOLDER|>", "video_start": "<|VIDEO_START|>", "video_end": "<|VIDEO_END|>",
}  # fmt: skip
AREAS = {"image": (56 * 56, 140 * 140), "video": (56 * 56, 84 * 84)}


@functools.cache
def font():
    """Return Pillow's font under the file name that checkpoints use."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "Roboto-Regular.ttf"
    path.write_bytes(ImageFont.load_default(10).font_bytes)
    return folder, str(path)


def build(seed, tie=False, draw=True):
    ensure_torchvision()
    import transformers as tf

    named = {f"{name}_token": token for name, token in SPECIALS.items()}
    words = fast_tokenizer([*SPECIALS.values()], pad_token="</s>", extra_special_tokens=named, **named)
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(token) for name, token in SPECIALS.items() if name != "eos"}
    text = text_config(words, tie, num_hidden_layers=3)
    text |= {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": [48, 32], "moe_num_shared_experts": 1}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
    vision = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 96}
    config = tf.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=tie, **ids)
    model = tf.Ernie4_5_VLMoeForConditionalGeneration(config).eval()
    randomise(model, seed)
    for name, tensor in model.named_parameters():
        if name.endswith(".ln.weight"):  # `randomise` does not recognise these norms
            tensor.data += 1.0
    image, video = ({"shortest_edge": least, "longest_edge": most} for least, most in AREAS.values())
    return model, tf.Ernie4_5_VLMoeProcessor(
        image_processor=tf.Ernie4_5_VLMoeImageProcessor(size=image),
        tokenizer=words,
        video_processor=tf.Ernie4_5_VLMoeVideoProcessor(size=video, font=font()[1], draw_on_frames=draw),
    )


FAMILY = Family(
    "ernie4_5_vl",
    build,
    placeholders={m: "".join(SPECIALS[name] for name in (f"{m}_start", m, f"{m}_end")) for m in ("image", "video")},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)], "video": VIDEO_SIZES},
    refuses=is_sliver,
    ours=as_sampled,
    call=call_sampled,
    layouts={"as published": [("model.vision_model.", "vision_model.")]},
    variants={"tied": {"tie": True}, "times not drawn": {"draw": False}},
)
