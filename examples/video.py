"""Ask about a video: `python examples/video.py [--model DIR] [--video FILE] [--fps N]`.

The shipped model names a shape, its color and its direction. Models that understand videos:

| model | what to know |
|---|---|
| Qwen/Qwen3-VL-2B-Instruct, zai-org/GLM-4.1V-9B-Thinking | frames in pairs, with their times |
| google/gemma-4-12B-it, openbmb/MiniCPM-V-4_5, allenai/Molmo2-8B, moonshotai/Kimi-K2.5 | frames with their times |
| HuggingFaceTB/SmolVLM2-2.2B-Instruct, llava-hf/llava-onevision-qwen2-0.5b-ov-hf, AIDC-AI/Ovis2.5-2B | small models |
| Kwai-Keye/Keye-VL-1_5-8B | slow and fast frames (`frame_types` of `mm_processor_kwargs`) |
"""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams, SensoriumError
from shared import ASSETS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
