"""Ask one question about one image: `python examples/one_image.py [--model DIR] [--image FILE] [QUESTION]`.

Any model of docs/models.md that takes images fits. Some of them, the small ones first:

| model | weights |
|---|---|
| LiquidAI/LFM2-VL-450M, HuggingFaceTB/SmolVLM2-500M-Video-Instruct, OpenGVLab/InternVL3_5-1B-HF | up to 1B |
| Qwen/Qwen3-VL-2B-Instruct, AIDC-AI/Ovis2-2B-hf, deepseek-ai/deepseek-vl2-tiny, microsoft/Phi-3.5-vision-instruct | 2 to 4B |
| google/gemma-3-4b-it, google/gemma-3n-E2B-it, openbmb/MiniCPM-V-4_5, HuggingFaceM4/idefics2-8b | 4 to 8B |
| allenai/Molmo-7B-D-0924, llava-hf/llava-v1.6-mistral-7b-hf, meta-llama/Llama-3.2-11B-Vision-Instruct | 7 to 11B |
| google/gemma-4-12B-it, moonshotai/Kimi-VL-A3B-Instruct, mistralai/Mistral-Small-3.2-24B-Instruct-2506 | larger |
"""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams, SensoriumError
from shared import ASSETS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--image", type=Path, default=ASSETS / "media" / "receipt1.png")
    parser.add_argument("question", nargs="?", default="Read the receipt.")
    args = parser.parse_args()

    llm = LLM(args.model)
    content = [{"type": "image", "image": args.image}, {"type": "text", "text": args.question}]
    (answer,) = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=96))
    if answer.error:
        raise SensoriumError(str(answer.error))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    run(main)
