"""Ask about a video: `python examples/video.py [--model DIR] [--video FILE] [--fps N]`."""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams, SensoriumError
from shared import ASSETS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--video", type=Path, default=ASSETS / "media" / "clip.mp4")
    parser.add_argument("--fps", type=float, default=2.0, help="sampled frames per second")
    parser.add_argument("question", nargs="?", default="What happens in the clip?")
    args = parser.parse_args()

    llm = LLM(args.model, mm_processor_kwargs={"fps": args.fps})
    content = [{"type": "video", "video": args.video}, {"type": "text", "text": args.question}]
    (answer,) = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=64))
    if answer.error:
        raise SensoriumError(str(answer.error))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    run(main)
