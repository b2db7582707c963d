"""Print an answer while it is generated: `python examples/streaming.py [--model DIR] [--image FILE]`."""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams, SensoriumError
from shared import ASSETS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--image", type=Path, default=ASSETS / "media" / "receipt2.png")
    args = parser.parse_args()

    llm = LLM(args.model)
    content = [{"type": "image", "image": args.image}, {"type": "text", "text": "Read the receipt."}]
    shown = 0
    for output in llm.stream([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=96)):
        if output.error:
            raise SensoriumError(str(output.error))
        text = output.outputs[0].text  # all of it so far
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()


if __name__ == "__main__":
    run(main)
