"""Ask about a video and its audio track: `python examples/omni.py --model Qwen2.5-Omni-3B talk.mp4`."""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams, SensoriumError
from shared import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="a folder, or a name such as Qwen/Qwen2.5-Omni-3B (default: the folder Qwen2.5-Omni-3B)"
    )
    parser.add_argument("video", nargs="?", type=Path, default=Path("talk.mp4"))
    parser.add_argument("question", nargs="?", default="What happens, and what is said?")
    args = parser.parse_args()
    model = args.model or "Qwen2.5-Omni-3B"
    if not args.model and not Path(model).is_dir():
        print("this model does not ship; give --model Qwen/Qwen2.5-Omni-3B to download it")
        return

    llm = LLM(model, mm_processor_kwargs={"use_audio_in_video": True})
    content = [{"type": "video", "video": args.video}, {"type": "text", "text": args.question}]
    (answer,) = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=128))
    if answer.error:
        raise SensoriumError(str(answer.error))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    run(main)
