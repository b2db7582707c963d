"""Find things in an image: `python examples/boxes.py [--model DIR] [--image FILE] [QUESTION]`.

The shipped model does not locate things. Models that do, and a question that they were trained on:

| model | question |
|---|---|
| Qwen/Qwen2.5-VL-3B-Instruct, Qwen/Qwen3-VL-2B-Instruct | Locate every cup, and return the boxes as JSON. |
| google/paligemma2-3b-mix-448 | detect cup |
| allenai/Molmo-7B-D-0924, allenai/Molmo2-8B | Point to every cup. |
| PerceptronAI/Isaac-0.1 | `<hint>BOX</hint>` and a question |
| nvidia/NVIDIA-Nemotron-Parse-v1.1 | the prompt of its model card |
| rednote-hilab/dots.ocr | the layout prompt of its model card |
| ibm-granite/granite-docling-258M | Convert this page to docling. |
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
    (answer,) = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=512))
    if answer.error:
        raise SensoriumError(str(answer.error))
    print(answer.outputs[0].text)
    for element in answer.elements:
        print(element.label, element.box or element.points, element.text)


if __name__ == "__main__":
    run(main)
