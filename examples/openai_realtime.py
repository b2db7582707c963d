"""Transcribe speech over a WebSocket, through /v1/realtime: `python examples/openai_realtime.py [--url URL] [AUDIO]`.

It needs `pip install 'openai[realtime]'`.
"""

import base64
from pathlib import Path

import numpy as np
import soundfile
from openai import OpenAI
from shared import ASSETS, run, server_arguments, serving

RATE = 24_000  # of the audio that the API takes
KIND = "conversation.item.input_audio_transcription"


def read(path: Path) -> bytes:
    """Return a file as PCM of 16 bits at RATE."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    places = np.arange(len(samples) * RATE // rate) * rate / RATE
    mono = np.interp(places, np.arange(len(samples)), samples.mean(1))
    return (mono * 32767).astype("<i2").tobytes()


def main() -> list[str]:
    parser = server_arguments(__doc__, "tiny-asr")
    parser.add_argument("file", nargs="?", type=Path, default=min((ASSETS / "speech").glob("*.flac")))
    args = parser.parse_args()
    if not args.file.is_file():
        return [f"{args.file} cannot be read: there is no such file"]
    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        pcm = read(args.file)
        with client.realtime.connect(model=model) as connection:
            audio = {"input": {"turn_detection": None}}  # the whole file is one turn; without this, voice detection ends turns
            connection.session.update(session={"type": "transcription", "audio": audio})
            for start in range(0, len(pcm), RATE):
                connection.input_audio_buffer.append(audio=base64.b64encode(pcm[start : start + RATE]).decode())
            connection.input_audio_buffer.commit()
            for event in connection:
                if event.type in ("error", f"{KIND}.failed"):
                    return [event.error.message]
                if event.type == f"{KIND}.delta":
                    print(event.delta, end="", flush=True)
                if event.type == f"{KIND}.completed":
                    break
        print()
    return []


if __name__ == "__main__":
    run(main)
