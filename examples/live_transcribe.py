"""Transcribe an audio file as if it were spoken now: `python examples/live_transcribe.py [--model DIR] [AUDIO]`.

Each pass over a window drafts the text of the previous pass, so most of its tokens are verified instead of decoded one by one.
"""

import argparse
import asyncio
from pathlib import Path

import soundfile
from sensorium import AsyncLLM, SensoriumError
from shared import ASSETS, run


async def play(path: Path, speed: float):
    """Yield blocks of 0.1 s, `speed` times as fast as they were spoken."""
    with soundfile.SoundFile(path) as file:
        while len(block := file.read(file.samplerate // 10, dtype="float32")):
            await asyncio.sleep(0.1 / speed)
            yield block


async def listen(args: argparse.Namespace) -> None:
    async with AsyncLLM(args.model) as engine:
        rate = soundfile.info(args.file).samplerate
        async for event in engine.stream_transcribe(play(args.file, args.speed), rate, language=args.language):
            if event.error:
                raise SensoriumError(str(event.error))
            if event.kind == "partial":
                print(f"  {event.text[: event.stable_upto]} | {event.text[event.stable_upto :]}")
            elif event.kind == "final":
                print(f"{event.start:6.2f} - {event.end:.2f} s, {event.lag:.2f} s behind: {event.text}")
        stats = engine.engine.stats
        drafted, accepted = (sum(getattr(one, name) for one in stats.drafts) for name in ("num_drafted", "num_accepted"))
        print(f"{stats.steps} steps; {accepted} of {drafted} drafted tokens were accepted, each of which saved one")


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(ASSETS / "tiny-asr"), help="the shipped model knows few words of synthetic speech"
    )
    parser.add_argument("--language", help="default: detected, if the model can")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times faster than real time")
    parser.add_argument("file", nargs="?", type=Path, default=min((ASSETS / "speech").glob("*.flac")))
    args = parser.parse_args()
    if args.speed <= 0:
        return [f"--speed {args.speed} must be above 0"]
    if not args.file.is_file():
        return [f"{args.file} cannot be read: there is no such file"]
    asyncio.run(listen(args))
    return []


if __name__ == "__main__":
    run(main)
