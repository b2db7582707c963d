"""Ask about several images in one message: `python examples/several_images.py [--model DIR] [FILE ...]`.

It also prints the number of embeddings of each image. The shipped model was trained on single images and reads the last one.
Models that compare images:

| model | how they see images |
|---|---|
| Qwen/Qwen3-VL-2B-Instruct, mistralai/Mistral-Small-3.2-24B-Instruct-2506 | at their own resolution |
| HuggingFaceM4/idefics2-8b, HuggingFaceM4/Idefics3-8B-Llama3, openbmb/MiniCPM-V-4_5 | in slices |
| google/gemma-3-4b-it | at one size |
| OpenGVLab/InternVL3_5-2B-HF, microsoft/Phi-3.5-vision-instruct | in tiles |
| allenai/Molmo2-8B | answers may name points in each of them |
"""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams, SensoriumError
from shared import ASSETS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--question", default="Read the text.")
    parser.add_argument("images", nargs="*", type=Path, default=[ASSETS / "media" / f"line{i}.png" for i in (1, 2)])
    args = parser.parse_args()

    llm = LLM(args.model, limit_mm_per_prompt={"image": len(args.images)})
    content = [*({"type": "image", "image": path} for path in args.images), {"type": "text", "text": args.question}]
    (answer,) = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=64))
    if answer.error:
        raise SensoriumError(str(answer.error))
    for path, item in zip(args.images, answer.items, strict=True):
        print(f"{path}: {item.num_embeds} embeddings")
    print(answer.outputs[0].text)


if __name__ == "__main__":
    run(main)
