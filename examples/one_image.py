"""Ask one question about one image: `python examples/one_image.py [--model DIR] [--image FILE] [QUESTION]`.

Any model of docs/models.md that takes images fits, such as Qwen/Qwen3-VL-2B-Instruct, google/gemma-3-4b-it,
OpenGVLab/InternVL3_5-2B-HF, HuggingFaceTB/SmolVLM2-2.2B-Instruct or mistralai/Mistral-Small-3.2-24B-Instruct-2506.
"""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams, SensoriumError
from shared import ASSETS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
