"""Every decode is told with the bytes of its result; what has no size that is known is told with 0."""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frostline.profiler.inside.decoder_sizes import bytes_of, frames_bytes
from frostline.profiler.inside.decodes import Decodes
from frostline.profiler.inside.loaders import Loaders

Fake = Callable[..., types.ModuleType]
FRAME = 64 * 48 * 3


@pytest.fixture
def sizes() -> list[int]:
    return []


@pytest.fixture
def decodes(sizes: list[int]) -> Iterator[Decodes]:
    pytest.importorskip("PIL.Image")  # only what is imported by now is watched
    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install_all()
    yield decodes
    decodes.uninstall()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    def make(name: str, **contents: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


# ---- PIL


@pytest.mark.parametrize(
    ("mode", "suffix", "pixel"),
    [
        ("1", "png", 1), ("L", "png", 1), ("P", "png", 1), ("P", "gif", 1), ("LA", "png", 2),
        ("RGB", "jpg", 3), ("RGB", "webp", 3), ("RGBA", "png", 4), ("CMYK", "jpg", 4), ("I;16", "png", 2),
        ("I", "tiff", 4), ("F", "tiff", 4),
    ],
)  # fmt: skip
def test_an_image_by_its_mode(
    tmp_path: Path, decodes: Decodes, sizes: list[int], mode: str, suffix: str, pixel: int
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new(mode, (60, 40)).save(tmp_path / f"a.{suffix}")
    with image.open(tmp_path / f"a.{suffix}") as found:
        found.load()
        assert found.mode == mode
        assert np.asarray(found).nbytes == 60 * 40 * pixel
    assert sizes == [60 * 40 * pixel]


def test_an_image_that_is_reduced_while_it_is_read(
    tmp_path: Path, decodes: Decodes, sizes: list[int]
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 64)).save(tmp_path / "a.jpg")
    with image.open(tmp_path / "a.jpg") as found:
        found.draft("L", (16, 16))
        found.load()
    assert sizes == [16 * 16]


# ---- PyAV


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve frames of 64 × 48, and as much sound."""
    av = pytest.importorskip("av")
    path: Path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        sound = out.add_stream("aac", rate=16000, layout="mono")
        for i in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), i * 20, np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        heard = av.AudioFrame.from_ndarray(np.zeros((1, 19200), np.float32), format="fltp", layout="mono")
        heard.rate = 16000
        out.mux(sound.encode(heard))
        out.mux([*stream.encode(), *sound.encode()])
    return path


def test_all_frames_of_a_clip(clip: Path, decodes: Decodes, sizes: list[int]) -> None:
    av = pytest.importorskip("av")
    with av.open(str(clip)) as container:
        assert len(list(container.decode(video=0))) == 12
    assert sizes == [12 * FRAME]


def test_frames_that_were_asked_for_and_no_others(clip: Path, decodes: Decodes, sizes: list[int]) -> None:
    av = pytest.importorskip("av")
    with av.open(str(clip)) as container:
        for n in (3, 2):
            container.seek(0)
            list(itertools.islice(container.decode(video=0), n))
    assert sizes == [3 * FRAME, 2 * FRAME]


@pytest.mark.parametrize("way", ["packet", "stream", "codec context", "collected first"])
def test_frames_of_demuxed_packets(clip: Path, decodes: Decodes, sizes: list[int], way: str) -> None:
    av = pytest.importorskip("av")
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        packets = container.demux(stream)
        for packet in list(packets) if way == "collected first" else packets:
            decode = {"stream": stream.decode, "codec context": stream.codec_context.decode}.get(way)
            _ = decode(packet) if decode is not None else packet.decode()
    assert sizes == [12 * FRAME]


def test_sound_and_packets_that_nothing_decodes_have_no_size(
    clip: Path, decodes: Decodes, sizes: list[int]
) -> None:
    av = pytest.importorskip("av")
    with av.open(str(clip)) as container:
        list(container.decode(audio=0))
    with av.open(str(clip)) as container:
        list(container.demux(video=0))
    assert sizes == [0, 0]


# ---- libraries that are not here, as fakes


def test_opencv_images(fake: Fake, sizes: list[int]) -> None:
    class UMat:
        """Lies on a device."""

    cv2 = fake("cv2", imread=lambda f: np.ones((4, 5, 3), np.uint16), imdecode=lambda buf, flags: UMat())
    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install("cv2")
    cv2.imread("a.png")
    cv2.imdecode(np.zeros(3, np.uint8), 1)
    assert sizes == [120, 0]


class Capture:
    left = 3

    def __init__(self, filename: str) -> None:
        pass

    def read(self) -> tuple[bool, Any]:
        self.left -= 1
        return (True, np.zeros((4, 5, 3), np.uint8)) if self.left >= 0 else (False, None)

    def grab(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def retrieve(self) -> tuple[bool, Any]:
        return True, np.zeros((4, 5, 3), np.uint8)

    def release(self) -> None:
        pass


def test_opencv_videos_count_frames_that_are_handed_out(fake: Fake, sizes: list[int]) -> None:
    cv2 = fake("cv2", VideoCapture=Capture)
    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install("cv2")
    capture = cv2.VideoCapture("a.mp4")
    while capture.read()[0]:
        pass
    skipping = cv2.VideoCapture("a.mp4")
    assert skipping.grab()
    assert skipping.grab()
    assert skipping.retrieve()[0]
    skipping.release()
    assert sizes == [3 * 60, 60]


class OwnArray:
    """decord's: a shape, and numbers that would have to be copied."""

    shape, dtype = (2, 4, 5, 3), "uint8"

    def asnumpy(self) -> Any:
        raise AssertionError("copied")

    __array__ = asnumpy


def test_decord_by_its_shape(fake: Fake, sizes: list[int]) -> None:
    class VideoReader:
        def __init__(self, uri: str) -> None:
            pass

        def get_batch(self, indices: list[int]) -> Any:
            return OwnArray() if indices else torch.zeros(5, dtype=torch.uint8)  # after set_bridge("torch")

        def __getitem__(self, index: int) -> Any:
            return self.get_batch([index])

    fake("decord", VideoReader=VideoReader)
    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install("decord")
    reader = VideoReader("a.mp4")
    reader.get_batch([0, 1])
    reader.get_batch([])
    assert isinstance(reader[1], OwnArray)
    decodes.uninstall()
    assert sizes == [120, 5, 120]


def test_torchcodec_frames_and_batches(fake: Fake, sizes: list[int]) -> None:
    @dataclass
    class FrameBatch:
        data: torch.Tensor
        pts_seconds: torch.Tensor

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("iterated")

    class VideoDecoder:
        def __init__(self, source: str) -> None:
            pass

        def get_frames_at(self, indices: list[int]) -> FrameBatch:
            n = len(indices)
            return FrameBatch(torch.zeros(n, 3, 4, 5, dtype=torch.uint8), torch.zeros(n))

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(3, 4, 5, dtype=torch.uint8)

    fake("torchcodec.decoders", VideoDecoder=VideoDecoder)
    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install("torchcodec.decoders")
    decoder = VideoDecoder("a.mp4")
    decoder.get_frames_at([0, 1])
    assert decoder[0].shape == (3, 4, 5)
    decodes.uninstall()
    assert sizes == [120, 60]


def test_torchvision_videos_are_frames_and_sound(fake: Fake, sizes: list[int]) -> None:
    frames, sound = torch.zeros(2, 4, 5, 3, dtype=torch.uint8), torch.zeros(1, 10)
    io = fake("torchvision.io", read_video=lambda f: (frames, sound, {}), read_image=lambda path: frames[0])
    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install("torchvision.io")
    assert io.read_video("a.mp4")[0] is frames
    io.read_image("a.png")
    assert sizes == [120 + 40, 60]


# ---- preprocessing


def test_a_real_image_processor(sizes: list[int]) -> None:
    pytest.importorskip("transformers")
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install_all()
    try:
        processor, image = CLIPImageProcessorPil(), np.zeros((40, 60, 3), np.uint8)
        pixels = processor([image, image], return_tensors="pt")["pixel_values"]
        listed = processor([image, image])["pixel_values"]
    finally:
        decodes.uninstall()
    assert sizes == [pixels.nbytes, sum(each.nbytes for each in listed)]


def test_a_real_tokenizer(sizes: list[int]) -> None:
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    decodes = Decodes(lambda what, key, start, seconds, size: sizes.append(size))
    decodes.install_all()
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
        found = [tokenizer(["a b", "b a b"]), tokenizer(["a b"], return_tensors="pt")]
        assert tokenizer.encode("a b") == [0, 1]
    finally:
        decodes.uninstall()
    assert sizes == [8 * 5 * len(found[0]), 8 * 2 * len(found[1]), 16]


# ---- results of all kinds


@pytest.mark.parametrize("result", [None, object(), [], {}, [None, object()], np.array([object()]), {1, 2}])
def test_what_has_no_size_that_is_known(result: Any) -> None:
    assert bytes_of(result) == frames_bytes(result) == 0


def test_what_else_is_beside_arrays_counts_nothing() -> None:
    result = UserDict(pixels=[np.zeros(4), torch.zeros(3)], metadata=[object()], none=None)
    assert bytes_of(result) == 32 + 12


def test_tensors_of_other_kinds() -> None:
    assert bytes_of(torch.zeros(7, dtype=torch.bfloat16, device="meta")) == 14
    assert bytes_of(torch.zeros(4, 6)[:, ::2]) == 4 * 3 * 4


def test_an_array_on_a_stride_has_the_bytes_of_what_it_shows() -> None:
    assert bytes_of(np.zeros((4, 6), np.uint8)[:, ::2]) == 12


def test_of_long_lists_a_few_items_are_looked_at() -> None:
    class Rows(list[Any]):
        looked = 0

        def __getitem__(self, index: Any) -> Any:
            self.looked += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("all of it")

    rows = Rows([[0] * 7 for _ in range(100_000)])
    assert bytes_of(rows) == 100_000 * 7 * 8
    assert rows.looked < 200
    nested = [[[np.zeros(2)] * 50] * 50] * 50
    assert bytes_of(nested) == 50**3 * 16


def test_a_list_within_itself_has_an_end() -> None:
    endless: list[Any] = []
    endless += [endless, endless]
    assert bytes_of(endless) == 0


def test_a_decode_is_recorded_with_its_bytes(tmp_path: Path) -> None:
    loaders = Loaders(tmp_path)
    fields = ["PIL.Image", "a", 1.0, 0.5, bytes_of(np.zeros(3))]
    loaders.decoded(*fields)  # type: ignore[arg-type]
    assert json.loads(json.dumps(loaders.decodes)) == [fields]
