"""Print a transcript while it is made, through /v1/audio/transcriptions: `python examples/openai_transcription.py [AUDIO]`."""

from pathlib import Path

from openai import OpenAI
from shared import ASSETS, run, server_arguments, serving


def main() -> list[str]:
    parser = server_arguments(__doc__, "tiny-asr")
    parser.add_argument("file", nargs="?", type=Path, default=min((ASSETS / "speech").glob("*.flac")))
    args = parser.parse_args()
    if not args.file.is_file():
        return [f"{args.file} cannot be read: there is no such file"]
    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        for event in client.audio.transcriptions.create(model=model, file=args.file, stream=True):
            if event.type == "transcript.text.delta":
                print(event.delta, end="", flush=True)
        print()
    return []


if __name__ == "__main__":
    run(main)
