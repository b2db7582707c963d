"""VideoLLaMA3 in the parity suite."""

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled, is_sliver
from oracle import build_processor, ensure_torchvision, randomise, sharpen, text_config, token_ids

VISION = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 14,
}  # fmt: skip


def build(seed, tie=False, text="qwen2", **vision):
    ensure_torchvision()
    import transformers as tf

    ids, words = token_ids(), build_processor("qwen2_5_vl").tokenizer
    config = tf.VideoLlama3Config(
        text_config={"model_type": text, **text_config(words, tie)},
        vision_config=VISION | vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=tie,
    )
    model = tf.VideoLlama3ForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_model)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    images = tf.VideoLlama3ImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112})
    videos = tf.VideoLlama3VideoProcessor(size={"shortest_edge": 28 * 56, "longest_edge": 4 * 84 * 84})
    return model, tf.VideoLlama3Processor(images, words, videos)


def partly_still(video):
    """Return a video whose odd frames repeat the upper half of the one before; every fourth frame repeats it whole."""
    frames, half = video.copy(), video.shape[1] // 2
    for number in range(1, len(frames), 2):
        rows = slice(None) if number % 4 == 3 else slice(half)
        frames[number, rows] = frames[number - 1, rows]
    return frames


def ours(modality, media):
    return as_sampled(modality, partly_still(media) if modality == "video" else media)


def call(processor, text, data):
    return call_sampled(processor, text, {**data, "video": [partly_still(one) for one in data.get("video", ())]})


def tensors(inputs, features):
    """Compare patches; the oracle's videos have them in squares, ours row by row. Rows that are kept are a mask there."""
    parts = {name: [one.kwargs for one in features if one.modality == name] for name in ("image", "video")}
    for name in ("pixel_values", "image_grid_thw") if parts["image"] else ():
        yield name, torch.cat([one[name].data.flatten() for one in parts["image"]]), inputs[name].flatten()
    masks, squares = [], []
    for one in parts["video"]:
        t, h, w = one["video_grid_thw"].data.tolist()
        patches = one["pixel_values_videos"].data.view(t, h // 2, 2, w // 2, 2, -1)
        masks.append(torch.zeros(t * h * w // 4, dtype=torch.bool).index_fill_(0, one["kept_rows"].data, True))
        squares.append(patches.transpose(2, 3).flatten(0, 4))
    if parts["video"]:
        yield "pixel_values_videos", torch.cat(squares), inputs["pixel_values_videos"]
        yield "video_compression_mask", torch.cat(masks).int(), inputs["video_compression_mask"].int()


FAMILY = Family(
    "video_llama_3",
    build,
    placeholders={"image": "<|image_pad|>", "video": "<|video_pad|>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)], "video": VIDEO_SIZES},
    refuses=is_sliver,
    ours=ours,
    call=call,
    tensors=tensors,
    oracle_positions=lambda model, inputs: None,
    unfilled={"video": "its rows are planned for videos of which compression leaves one row in 16"},
    variants={"tied": {"tie": True}, "llama, wide heads": {"text": "llama", "num_attention_heads": 2}},
)
