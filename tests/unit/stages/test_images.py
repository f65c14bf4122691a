"""`Image`: what comes out of every kind of file, and what is said about files that are none."""

from __future__ import annotations

import copy
import struct
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from frostline.errors import FrostlineError, UsageError
from frostline.stages import Image

pillow = pytest.importorskip("PIL.Image")


def picture(height: int = 40, width: int = 60) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: object, format: str = "png", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)  # type: ignore[attr-defined]
    return file.getvalue()


def test_a_lossless_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(pillow.fromarray(picture())))
    for given in (path, str(path), path.read_bytes()):
        out = Image()(given)
        assert out.dtype == torch.uint8
        assert out.is_contiguous()
        assert np.array_equal(out.permute(1, 2, 0).numpy(), picture())


@pytest.mark.parametrize(
    ("fit", "shape"), [("stretch", (32, 24)), ("cover", (32, 24)), ("contain", (32, 24))]
)
def test_the_size_is_met(fit: str, shape: tuple[int, int]) -> None:
    assert Image(size=shape, fit=fit)(encoded(pillow.fromarray(picture()))).shape == (3, *shape)


def test_shortest_keeps_proportions() -> None:
    assert Image(size=20, fit="shortest")(encoded(pillow.fromarray(picture()))).shape == (3, 20, 30)


def test_cover_keeps_the_middle_and_contain_adds_margins() -> None:
    stripes = np.zeros((10, 30, 3), np.uint8)
    stripes[:, 10:20] = 200
    file = encoded(pillow.fromarray(stripes))
    assert (Image(size=10, fit="cover", resample="nearest")(file) == 200).all()
    contained = Image(size=30, fit="contain", background=(9, 8, 7))(file)
    assert contained[:, 0, 0].tolist() == [9, 8, 7]
    assert contained[:, 15, 15].tolist() == [200, 200, 200]


def test_stretch_is_pillows_own_resize() -> None:
    image = pillow.fromarray(picture())
    want = np.asarray(image.resize((24, 32), pillow.Resampling.LANCZOS))
    got = Image(size=(32, 24), resample="lanczos")(encoded(image))
    assert np.array_equal(got.permute(1, 2, 0).numpy(), want)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["jpeg", "png", "tiff", "webp"])
def test_exif_orientation_is_applied(orientation: int, format: str) -> None:
    from PIL import ImageOps

    image = pillow.fromarray(np.kron(picture(3, 4), np.ones((16, 16, 1), np.uint8)))
    exif = pillow.Exif()
    exif[0x0112] = orientation
    file = encoded(image, format, exif=exif)
    with pillow.open(BytesIO(file)) as opened:
        want = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    assert np.array_equal(Image()(file).permute(1, 2, 0).numpy(), want)
    assert Image()(file).shape == ((3, 48, 64) if orientation < 5 else (3, 64, 48))


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.array([[0, 257, 0x7FFF, 0xFFFF]], np.uint16)
    for format in ("png", "tiff"):
        out = Image(mode="L")(encoded(pillow.fromarray(values), format))
        assert out.tolist() == [[[0, 1, 127, 255]]], format


def test_values_without_an_agreed_range_are_refused() -> None:
    floats = encoded(pillow.fromarray(np.ones((4, 4), np.float32)), "tiff")
    wide = encoded(pillow.fromarray(np.full((4, 4), 70_000, np.int32)), "tiff")
    for file in (floats, wide):
        with pytest.raises(UsageError, match=r"no agreed range|without an agreed range"):
            Image()(file)


def test_palette_cmyk_grey_and_one_bit_become_rgb() -> None:
    image = pillow.new("RGB", (8, 8), (200, 30, 30))
    for mode, format in (("P", "png"), ("CMYK", "tiff"), ("L", "png"), ("1", "png"), ("YCbCr", "jpeg")):
        out = Image()(encoded(image.convert(mode), format))
        assert out.shape == (3, 8, 8), mode
    assert Image()(encoded(image.convert("P")))[:, 0, 0].tolist() == pytest.approx([200, 30, 30], abs=30)


def test_transparent_pixels_show_the_background() -> None:
    clear = pillow.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert Image()(encoded(clear))[:, 0, 0].tolist() == [255, 255, 255]
    assert Image(background=(1, 2, 3))(encoded(clear))[:, 0, 0].tolist() == [1, 2, 3]
    assert Image(background=None)(encoded(clear))[:, 0, 0].tolist() == [10, 20, 30]
    assert Image(mode="RGBA")(encoded(clear))[:, 0, 0].tolist() == [10, 20, 30, 0]


def test_a_palettes_transparency_counts_also_in_bytes() -> None:
    image = pillow.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    for transparency in (1, bytes([255, 0])):
        file = encoded(image, "png", transparency=transparency)
        assert Image(background=(7, 7, 7))(file)[:, 0, 0].tolist() == [7, 7, 7]


def test_of_an_animation_the_first_frame() -> None:
    frames = [pillow.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    file = encoded(frames[0], "gif", save_all=True, append_images=frames[1:])
    assert Image()(file)[:, 4, 4].tolist() == [255, 0, 0]


def test_draft_changes_pixels_only_when_asked() -> None:
    large = pillow.fromarray(np.kron(picture(50, 80), np.ones((10, 10, 1), np.uint8)))
    file = encoded(large, "jpeg")
    plain, drafted = Image(size=32)(file), Image(size=32, draft=True)(file)
    assert plain.shape == drafted.shape
    assert not torch.equal(plain, drafted)
    assert (plain.float() - drafted.float()).abs().mean() < 12
    assert torch.equal(Image(size=32)(file), plain)


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header claims any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def test_a_huge_picture_is_refused_by_its_header() -> None:
    Image()(encoded(pillow.fromarray(picture())))  # imports what it imports
    tracemalloc.start()
    with pytest.raises(UsageError, match=r"9000x9000 is more than max_pixels=80,000,000.*raise max_pixels"):
        Image(max_pixels=80_000_000)(bomb(9_000, 9_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    with pytest.raises(UsageError, match="MAX_IMAGE_PIXELS"):
        Image(max_pixels=10**12)(bomb(100_000, 100_000))


def test_a_very_long_picture_takes_no_more_memory_than_it_has() -> None:
    line = encoded(pillow.new("RGB", (100_000, 1)))
    assert Image(size=64, fit="cover")(line).shape == (3, 64, 64)
    assert Image(size=64, fit="contain")(line).shape == (3, 64, 64)
    with pytest.raises(UsageError, match="no side may exceed"):
        Image(size=64, fit="shortest")(line)


def test_bad_files_say_what_and_where(tmp_path: Path) -> None:
    whole = encoded(pillow.fromarray(picture(200, 200)), "jpeg")
    cases = {
        "empty.jpg": (b"", "is empty"),
        "page.jpg": (b"<!doctype html><title>404</title>", "no image in a known format.*<!doctype html>"),
        "cut.jpg": (whole[: len(whole) // 2], "damaged or cut off"),
        "cut.png": (encoded(pillow.fromarray(picture(200, 200)))[:5000], "damaged or cut off"),
        "header.jpg": (whole[:20], "damaged|no image"),
        "eps.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image in a known format"),
    }
    for name, (content, expected) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"(?s)Cannot read the image .*{name}.*({expected})"):
            Image()(tmp_path / name)
    with pytest.raises(UsageError, match=r"gone\.jpg.*No such file"):
        Image()(tmp_path / "gone.jpg")
    with pytest.raises(UsageError, match="no regular file"):
        Image()(tmp_path)
    with pytest.raises(UsageError, match=r"0 bytes.*is empty"):
        Image()(b"")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of some damage before it fails
@pytest.mark.parametrize("format", ["jpeg", "png", "gif", "bmp", "webp", "tiff", "ppm"])
def test_damage_anywhere_gives_pixels_or_our_error(format: str) -> None:
    whole = encoded(pillow.fromarray(picture()), format)
    rng = np.random.default_rng(0)
    for _ in range(150):
        damaged = np.frombuffer(whole, np.uint8).copy()
        places = rng.integers(0, min(len(damaged), rng.choice([40, 10**9])), 3)
        damaged[places] = rng.integers(0, 256, 3)
        end = int(rng.integers(1, len(damaged))) if rng.random() < 0.3 else len(damaged)
        try:
            said = str(Image(max_pixels=10**6)(damaged[:end].tobytes()).dtype)
        except FrostlineError as error:
            said = str(error)
        assert said == "torch.uint8" or said.startswith("Cannot read the image")


def test_all_wrong_parameters_at_once() -> None:
    with pytest.raises(UsageError) as error:
        Image(size=0, fit="crop", mode="BGR", resample="cubic", background=(1, 2), max_pixels=0)  # type: ignore[arg-type]
    assert len(error.value.problems) == 6
    with pytest.raises(UsageError, match="draft=True needs a size"):
        Image(draft=True)
    for size in ((1, 2, 3), True, "224", (224, 0), 99_999):
        with pytest.raises(UsageError, match="size is"):
            Image(size=size)  # type: ignore[arg-type]


def test_it_can_be_sent_to_a_worker_and_shared_by_threads() -> None:
    stage = Image(size=16)
    assert copy.deepcopy(stage) == stage
    files = [encoded(pillow.fromarray(picture(30 + i, 40))) for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(stage, files), map(stage, files)))
