"""The eight orientations of videos, from the boxes of MP4 and Matroska, compared with FFmpeg's autorotation."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media.image import decode_image
from sensorium.mm.media.orientation import as_stored, has_swapped_sides, upright
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import decode_video, probe_video
from sensorium.mm.media.video_orientation import orientation_of_matrix

MATRICES = {  # a, b, c, d -> EXIF orientation, and the letters of the picture as it is shown
    (1, 0, 0, 1): (1, "RG/BW"),
    (-1, 0, 0, 1): (2, "GR/WB"),
    (-1, 0, 0, -1): (3, "WB/GR"),
    (1, 0, 0, -1): (4, "BW/RG"),
    (0, 1, 1, 0): (5, "RB/GW"),
    (0, 1, -1, 0): (6, "BR/WG"),
    (0, -1, -1, 0): (7, "WG/BR"),
    (0, -1, 1, 0): (8, "GW/RB"),
}
COLORS = {"R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255), "W": (255, 255, 255)}
FIRST = FrameSampling(num_frames=1)


def picture(letters: str = "RG/BW", height: int = 48, width: int = 64) -> np.ndarray:
    rows = [[np.full((height // 2, width // 2, 3), COLORS[one], np.uint8) for one in row] for row in letters.split("/")]
    return np.concatenate([np.concatenate(row, 1) for row in rows])


def letters_of(pixels: np.ndarray) -> str:
    height, width = pixels.shape[:2]
    names = {tuple(value > 127 for value in color): name for name, color in COLORS.items()}
    rows = [[pixels[y, x] for x in (width // 4, 3 * width // 4)] for y in (height // 4, 3 * height // 4)]
    return "/".join("".join(names[tuple(bool(value > 127) for value in pixel)] for pixel in row) for row in rows)


@cache
def clip(matrix: tuple[int, ...], container: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream("libx264", rate=10, options={"crf": "4"})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        if not hasattr(stream, "set_display_matrix"):
            pytest.skip("this PyAV writes no display matrix")
        a, b, c, d = (value << 16 for value in matrix)
        stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
        for _ in range(2):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture())))
        output.mux(stream.encode())
    return buffer.getvalue()


def with_movie_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    place = data.index(b"mvhd") + 4 + 36
    a, b, c, d = (value << 16 for value in matrix)
    return data[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[place + 36 :]


def shown(data: bytes, backend: str = "pyav") -> np.ndarray:
    policy = MediaPolicy(video_backend=backend)
    pixels = decode_video(data, FIRST, policy).frames[0].numpy()
    assert probe_video(data, FIRST, policy).size == pixels.shape[:2]
    return pixels


@pytest.mark.parametrize("backend", ["pyav", "opencv"])
@pytest.mark.parametrize("container", ["mp4", "mov", "matroska"])
@pytest.mark.parametrize("matrix", MATRICES)
def test_every_orientation(matrix: tuple[int, ...], container: str, backend: str) -> None:
    orientation, expected = MATRICES[matrix]
    pixels = shown(clip(matrix, container), backend)
    assert letters_of(pixels) == expected
    assert pixels.shape[:2] == ((64, 48) if has_swapped_sides(orientation) else (48, 64))
    stored = shown(clip((1, 0, 0, 1), container), backend)
    assert np.array_equal(as_stored(pixels, orientation), stored)
    assert np.array_equal(upright(stored, orientation), pixels)


@pytest.mark.parametrize("matrix", MATRICES)
def test_the_orientation_of_a_picture_with_the_same_number_is_the_same(matrix: tuple[int, ...]) -> None:
    orientation, expected = MATRICES[matrix]
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(picture()).save(file, "PNG", exif=exif)
    pixels = decode_image(file.getvalue(), MediaPolicy()).numpy()
    assert np.array_equal(pixels, upright(picture(), orientation))
    assert letters_of(pixels) == expected


@pytest.mark.parametrize(("movie", "expected"), [((0, 1, -1, 0), "BR/WG"), ((-1, 0, 0, 1), "GR/WB")])
def test_the_matrix_of_the_movie_follows_that_of_the_track(movie: tuple[int, int, int, int], expected: str) -> None:
    assert letters_of(shown(with_movie_matrix(clip((1, 0, 0, 1), "mp4"), movie))) == expected
    turned_back = with_movie_matrix(clip((0, -1, 1, 0), "mp4"), (0, 1, -1, 0))
    assert letters_of(shown(turned_back)) == "RG/BW"


@pytest.mark.parametrize(
    ("matrix", "orientation"),
    [
        ((2.0, 0.0, 0.0, -3.0), 4),  # scaled
        ((0.0, 0.5, 2.0, 0.0), 5),
        ((0.9999, 0.01, -0.01, 0.9999), 1),  # 0.6 degrees
        ((0.01, 0.9999, 0.9999, -0.01), 5),
        ((0.7, 0.7, -0.7, 0.7), 1),  # 45 degrees
        ((0.0, 0.0, 0.0, 0.0), 1),
        ((1.0, 0.0, 0.0, 0.0), 1),
        ((float("nan"), 1.0, 1.0, float("nan")), 1),
    ],
)
def test_matrices_that_are_no_plain_turns(matrix: tuple[float, float, float, float], orientation: int) -> None:
    assert orientation_of_matrix(matrix) == orientation


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the program ffmpeg")
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_frames_are_those_of_ffmpeg(container: str, tmp_path: Path) -> None:
    files = {matrix: clip(matrix, container) for matrix in MATRICES}
    if container == "mp4":
        files |= {(9, *matrix): with_movie_matrix(data, (0, -1, -1, 0)) for matrix, data in files.items()}
    for data in files.values():
        (tmp_path / "clip").write_bytes(data)
        command = ["ffmpeg", "-v", "error", "-i", tmp_path / "clip", "-frames:v", "1", "-f", "image2pipe", "-c:v", "ppm", "-"]
        done = subprocess.run(command, check=True, capture_output=True, timeout=60)
        expected = np.asarray(Image.open(io.BytesIO(done.stdout)))
        for backend in ("pyav", "opencv"):
            pixels = shown(data, backend)
            assert pixels.shape == expected.shape
            assert letters_of(pixels) == letters_of(expected)
