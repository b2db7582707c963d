"""Answer a question aloud, also about audio: `python examples/speak.py "Who speaks?" talk.wav --out answer.wav`."""

import argparse
from pathlib import Path

import soundfile
from sensorium import LLM, SensoriumError
from shared import run

SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and visual "
    "inputs, as well as generating text and speech."
)
"""The system prompt with which the published models were trained to speak."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Who are you?")
    parser.add_argument("audio", nargs="?", type=Path)
    parser.add_argument(
        "--model", help="a folder, or a name such as Qwen/Qwen3-Omni-30B-A3B-Instruct (default: the folder Qwen2.5-Omni-3B)"
    )
    parser.add_argument("--voice", help="such as Chelsie or Ethan (default: the model's first)")
    parser.add_argument("--out", type=Path, default=Path("answer.wav"))
    args = parser.parse_args()
    model = args.model or "Qwen2.5-Omni-3B"
    if not args.model and not Path(model).is_dir():
        print("this model does not ship; give --model Qwen/Qwen2.5-Omni-3B to download it")
        return

    llm = LLM(model, load_talker=True)
    content = [{"type": "text", "text": args.question}]
    if args.audio:
        content.insert(0, {"type": "audio", "audio": args.audio})
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    with soundfile.SoundFile(args.out, "w", 24_000, channels=1) as file:
        for part in llm.stream_speak(messages, voice=args.voice):
            if part.error:
                raise SensoriumError(str(part.error))
            if not part.codes:
                print(part.text)
            file.write(part.samples.numpy())  # or play them: they come while the model makes the next ones


if __name__ == "__main__":
    run(main)
