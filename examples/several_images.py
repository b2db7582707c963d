"""Ask about several images with a hand-written prompt: `python examples/several_images.py [--model DIR] [FILE ...]`.

It also prints the number of embeddings of each image. The shipped model was trained on single images and reads the last one; a
larger model compares them.
"""

import argparse

from sensorium import LLM, SamplingParams, SensoriumError
from shared import ASSETS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--question", default="Read the text.")
    parser.add_argument("images", nargs="*", default=[str(ASSETS / "media" / f"line{i}.png") for i in (1, 2)])
    args = parser.parse_args()

    llm = LLM(args.model, limit_mm_per_prompt={"image": len(args.images)})
    placeholders = "<|vision_start|><|image_pad|><|vision_end|>" * len(args.images)
    prompt = f"<|im_start|>user\n{placeholders}{args.question}<|im_end|>\n<|im_start|>assistant\n"
    request = {"prompt": prompt, "multi_modal_data": {"image": args.images}}
    (answer,) = llm.generate(request, SamplingParams(temperature=0, max_tokens=64))
    if answer.error:
        raise SensoriumError(str(answer.error))
    for path, item in zip(args.images, answer.items, strict=True):
        print(f"{path}: {item.num_embeds} embeddings")
    print(answer.outputs[0].text)


if __name__ == "__main__":
    run(main)
