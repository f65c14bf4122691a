"""Decoding is counted and timed; what is decoded stays the same, and so do the functions after uninstall."""

import copy
import gc
import io
import itertools
import multiprocessing
import os
import sys
import tarfile
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from frostline.profiler.inside.decoder_keys import arguments_key, key_of
from frostline.profiler.inside.decodes import MODULES, Decodes

Image = pytest.importorskip("PIL.Image")
ImageFile = pytest.importorskip("PIL.ImageFile")


class Told(list):
    def __call__(self, what, key, start, seconds, size):
        assert seconds >= 0
        assert type(size) is int  # goes into JSON
        assert start > 0
        self.append((what, key))

    @property
    def keys(self):
        return [key for _, key in self]


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def decodes(told):
    decodes = Decodes(told)
    decodes.install_all()
    yield decodes
    decodes.uninstall()


def picture(path: Path, seed: int = 0, **options) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    av = pytest.importorskip("av")
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=10)
        stream.codec_context.gop_size = 6
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), i * 20, np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


# ---- PIL


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff", "bmp", "gif"])
def test_one_decode_per_image_and_the_same_pixels(tmp_path, told, suffix):
    path = picture(tmp_path / f"a.{suffix}")
    with Image.open(path) as image:
        plain = np.array(image)
    decodes = Decodes(told)
    decodes.install_all()
    try:
        with Image.open(path) as image:
            assert told == []  # lazily
            pixels = np.array(image)
            image.load()
            image.convert("L").resize((4, 4))
    finally:
        decodes.uninstall()
    assert np.array_equal(plain, pixels)
    status = path.stat()
    assert told == [("PIL.Image", f"{path}|{status.st_size}|{status.st_mtime_ns}")]


def test_an_image_that_is_never_loaded_is_no_decode(tmp_path, told, decodes):
    with Image.open(picture(tmp_path / "a.png")) as image:
        assert image.size == (60, 40)
    with Image.open(io.BytesIO((tmp_path / "a.png").read_bytes())) as image:
        image.verify()
    assert told == []


def test_keys_are_equal_for_the_same_file_and_differ_for_a_changed_one(tmp_path, told, decodes, monkeypatch):
    path = picture(tmp_path / "a.png")
    Image.open(path).load()
    monkeypatch.chdir(tmp_path)
    Image.open("a.png").load()
    with open(path, "rb") as file:
        Image.open(file).load()
    picture(path, seed=1)
    os.utime(path, ns=(1, 1))
    Image.open(path).load()
    same, relative, by_file, changed = told.keys
    assert same == relative == by_file != changed


def test_bytes_are_known_by_their_content(tmp_path, told, decodes):
    data = picture(tmp_path / "a.jpg").read_bytes()
    for content in (data, data, picture(tmp_path / "b.jpg", seed=1).read_bytes()):
        stream = io.BytesIO(content)
        stream.seek(7)
        Image.open(stream).load()
    first, again, other = told.keys
    assert first == again != other
    assert len(first) == 16


def test_members_of_an_archive_are_known_by_content_not_by_their_name(tmp_path, told, decodes):
    path = picture(tmp_path / "a.png")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(path, "a.png")
    with tarfile.open(tmp_path / "t.tar") as tar:
        Image.open(tar.extractfile("a.png")).load()
    assert told.keys == [key_of(path.read_bytes())]


def test_a_stream_that_cannot_seek_is_not_read(tmp_path):
    class Pipe(io.RawIOBase):
        def read(self, size=-1):
            raise AssertionError("read")

        def seekable(self):
            return False

    assert key_of(Pipe()) == ""
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, open(writing, "wb"):
        assert key_of(pipe) == ""


def test_the_position_of_a_file_stays(tmp_path):
    with io.BufferedReader(io.BytesIO(b"0123456789" * 1_000_000)) as stream:
        stream.seek(5)
        assert len(key_of(stream)) == 16
        assert stream.tell() == 5


@pytest.mark.parametrize("broken", [b"\x89PNG\r\n\x1a\n nothing", None])
def test_a_broken_image_raises_what_it_raised(tmp_path, told, broken):
    path = picture(tmp_path / "a.jpg", quality=95)
    path.write_bytes(broken if broken is not None else path.read_bytes()[:700])

    def error():
        with pytest.raises(OSError) as caught, Image.open(path) as image:  # noqa: PT011
            image.load()
        return type(caught.value), str(caught.value)

    plain = error()
    decodes = Decodes(told)
    decodes.install_all()
    try:
        assert error() == plain
    finally:
        decodes.uninstall()
    assert told == []


def test_open_imported_before_is_caught_when_it_loads(tmp_path, told):
    before = Image.open
    decodes = Decodes(told)
    decodes.install_all()
    path = picture(tmp_path / "a.png")
    before(path).load()
    before(io.BytesIO(path.read_bytes())).load()
    decodes.uninstall()
    assert told.keys == [key_of(path), key_of(path.read_bytes())]


def test_frames_of_one_file_are_different_inputs(tmp_path, told, decodes):
    frames = [Image.new("L", (8, 8), value) for value in (0, 90, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    told.clear()
    with Image.open(tmp_path / "a.gif") as film:
        for index in range(film.n_frames):
            film.seek(index)
            film.load()
    assert len(told) == len(set(told.keys)) == 3


def test_threads_decode_side_by_side(tmp_path, told, decodes):
    paths = [picture(tmp_path / f"{i}.webp", seed=i) for i in range(2)]

    def work(path):
        for _ in range(30):
            Image.open(path).load()

    threads = [threading.Thread(target=work, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told.keys) == sorted([key_of(path) for path in paths] * 30)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_wrappers_work_in_a_forked_child(tmp_path, told, decodes):
    path = picture(tmp_path / "a.png")
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def child():
        Image.open(path).load()
        sending.send(list(told))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiving.poll(20)
    assert receiving.recv() == [("PIL.Image", key_of(path))]
    process.join()
    assert told == []


def test_everything_is_as_it_was_after_uninstall(tmp_path, told):
    av = pytest.importorskip("av")
    places = [(Image, "open"), (ImageFile.ImageFile, "load"), (av, "open"), (av.container, "open")]
    places += [(av.codec.CodecContext, "decode")]
    before = [vars(owner)[name] for owner, name in places]
    decodes = Decodes(told)
    decodes.install_all()
    wrapped = [vars(owner)[name] for owner, name in places]
    decodes.install_all()
    assert [vars(owner)[name] for owner, name in places] == wrapped  # a second time does nothing
    for original, wrapper in zip(before, wrapped, strict=True):
        assert wrapper.__wrapped__ is original
        assert (wrapper.__name__, wrapper.__doc__) == (original.__name__, original.__doc__)
    kept = Image.open
    decodes.uninstall()
    assert all(vars(owner)[name] is old for (owner, name), old in zip(places, before, strict=True))
    kept(picture(tmp_path / "a.webp")).load()
    assert told == []
    assert all(vars(owner)[name] is old for (owner, name), old in zip(places, before, strict=True))


# ---- PyAV


def frames_of(container, **streams):
    return [frame.to_ndarray(format="rgb24") for frame in container.decode(**(streams or {"video": 0}))]


def test_a_clip_is_one_decode_and_the_same_frames(clip, told):
    av = pytest.importorskip("av")
    with av.open(str(clip)) as container:
        plain = frames_of(container)
    decodes = Decodes(told)
    decodes.install_all()
    try:
        for _ in range(2):
            with av.open(str(clip)) as container:
                container.streams.video[0].thread_type = "AUTO"
                assert container.streams.video[0].thread_type.name == "AUTO"
                assert isinstance(container, av.container.InputContainer)
                assert container.streams.video[0].container == container
                assert container.duration == 1_200_000
                frames = frames_of(container)
    finally:
        decodes.uninstall()
    assert all(np.array_equal(a, b) for a, b in zip(plain, frames, strict=True))
    assert len(told) == 2
    assert len(set(told)) == 1
    assert told[0][0] == "av"
    assert told[0][1].startswith(key_of(clip) + "#")


@pytest.mark.parametrize("way", ["packet", "stream", "codec context", "collected first"])
def test_demuxed_packets_count_once_with_the_time_of_their_decoding(clip, decodes, way, monkeypatch):
    av = pytest.importorskip("av")
    looks = itertools.count()
    for module in ("decodes", "decoder_video"):
        monkeypatch.setattr(f"frostline.profiler.inside.{module}.perf_counter", lambda: next(looks))
    times = []
    decodes._tell = lambda what, key, start, seconds, size: times.append(seconds)
    decoded = 0
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        packets = container.demux(stream)
        frames = 0
        for packet in list(packets) if way == "collected first" else packets:
            decoded += 1
            if way == "stream":
                frames += len(stream.decode(packet))
            elif way == "codec context":
                frames += len(stream.codec_context.decode(packet))
            else:
                frames += len(packet.decode())
    assert frames == 12
    assert len(times) == 1
    assert times[0] >= 2 * decoded  # by a clock that moves at each look: demuxing and decoding, a packet each


def test_a_container_cannot_be_copied_with_or_without_us(clip, decodes, told):
    av = pytest.importorskip("av")
    with av.open(str(clip)) as container, pytest.raises(TypeError, match="__reduce__"):
        copy.deepcopy(container)
    gc.collect()


def test_a_container_kept_open_is_told_clip_by_clip(clip, decodes, told):
    av = pytest.importorskip("av")
    container = av.open(str(clip))
    stream = container.streams.video[0]
    for seconds in (0, 0.7, 0):
        container.seek(int(seconds / stream.time_base), stream=stream)
        assert len(list(itertools.islice(container.decode(stream), 3))) == 3
    assert len(told) == 2  # the third is under way
    container.close()
    first, second, third = told.keys
    assert first == third != second


def test_an_unclosed_container_is_told_at_its_end(clip, decodes, told):
    av = pytest.importorskip("av")
    frames = av.open(str(clip)).decode(video=0)  # the generator keeps the container
    next(frames)
    gc.collect()
    assert told == []
    next(frames)
    del frames
    gc.collect()
    assert len(told) == 1
    assert told.keys[0].endswith(":2")


def test_a_container_that_only_shows_its_metadata_is_no_decode(clip, decodes, told):
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(clip.read_bytes())) as container:
        assert container.streams.video[0].frames == 12
        with pytest.raises(AttributeError):
            container.unknown = 1
    with pytest.raises(av.error.InvalidDataError):
        av.open(io.BytesIO(b"no video at all" * 100))
    assert told == []


def test_writing_is_left_alone(clip, decodes, told, tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(clip)) as source, av.open(str(tmp_path / "copy.mp4"), "w") as out:
        assert type(out) is av.container.OutputContainer
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    with av.open(str(tmp_path / "copy.mp4")) as container:
        assert len(frames_of(container)) == 12


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_the_parent_read_is_not_told_by_its_child(clip, decodes, told):
    av = pytest.importorskip("av")
    container = av.open(str(clip))
    next(container.decode(video=0))
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def child():
        decodes.flush()
        sending.send(list(told))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiving.poll(20)
    assert receiving.recv() == []
    process.join()
    decodes.flush()
    container.close()
    assert len(told) == 1


# ---- libraries that are not here, as fakes


@pytest.fixture
def fake(monkeypatch):
    def make(name: str, **contents) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


class Capture:
    def __init__(self, filename=None):
        self.left = 3

    def isOpened(self):
        return True

    def read(self):
        self.left -= 1
        return (self.left >= 0, np.zeros(2) if self.left >= 0 else None)

    def grab(self):
        return self.read()[0]

    def retrieve(self):
        return True, np.zeros(2)

    def set(self, prop, value):
        self.left = 3
        return True

    def release(self):
        self.left = 0


def test_opencv(fake, told, tmp_path):
    path = picture(tmp_path / "a.png")
    original = {"imread": lambda filename, flags=1: np.ones(3) if os.path.exists(filename) else None}
    original |= {"imdecode": lambda buf, flags: np.ones(3), "VideoCapture": Capture}
    cv2 = fake("cv2", **original)
    decodes = Decodes(told)
    decodes.install("cv2")
    assert cv2.imread(str(path)).shape == (3,)
    assert cv2.imread("missing.png") is None
    cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), 1)
    assert [what for what, _ in told] == ["cv2.imread", "cv2.imdecode"]
    assert told.keys[0] == key_of(path)
    assert told.keys[1].startswith(key_of(path.read_bytes()))
    told.clear()
    capture = cv2.VideoCapture(str(path))
    assert isinstance(capture, Capture)
    assert capture.isOpened()
    while capture.read()[0]:
        pass
    assert len(told) == 1
    capture.set(1, 0)
    assert capture.grab()
    assert capture.retrieve()[0]
    capture.release()
    capture.release()
    assert len(told) == 2
    assert cv2.VideoCapture.__name__ == "Capture"
    decodes.uninstall()
    assert all(vars(cv2)[name] is value for name, value in original.items())


class VideoReader:
    def __init__(self, uri, ctx=None):
        self.at = 0

    def __getitem__(self, index):
        return self.get_batch(index) if isinstance(index, slice) else self.next()

    def get_batch(self, indices):
        return torch.zeros(1)

    def next(self):
        return torch.zeros(1)

    def seek(self, pos):
        self.at = pos


def test_decord_readers(fake, told, clip):
    init = VideoReader.__init__
    fake("decord", VideoReader=VideoReader)
    decodes = Decodes(told)
    decodes.install("decord")
    for _ in range(2):
        reader = VideoReader(str(clip))
        reader.get_batch([0, 1])
        reader.get_batch(np.array([2, 3]))
        reader[0:4]
        reader.next()
        reader.next()
        reader.seek(5)
        reader.next()
    assert {what for what, _ in told} == {"decord.VideoReader"}
    assert len(told) == 12
    assert told[:6] == told[6:]
    assert len(set(told)) == 6
    decodes.uninstall()
    assert VideoReader.__init__ is init


def test_torchcodec_and_torchvision(fake, told, clip):
    class VideoDecoder:
        def __init__(self, source):
            self.source = source

        def get_frames_at(self, indices):
            if not indices:
                raise IndexError("none")
            return torch.zeros(len(indices))

    fake("torchcodec.decoders", VideoDecoder=VideoDecoder)
    fake("torchvision.io", read_image=lambda path: torch.ones(1), decode_jpeg=lambda input: torch.ones(2))
    decodes = Decodes(told)
    decodes.install_all()
    decoder = VideoDecoder(source=clip.read_bytes())
    assert decoder.get_frames_at([1, 2]).shape == (2,)
    with pytest.raises(IndexError, match="none"):
        decoder.get_frames_at([])
    sys.modules["torchvision.io"].read_image(str(clip))
    sys.modules["torchvision.io"].decode_jpeg(input=torch.frombuffer(bytearray(b"abc"), dtype=torch.uint8))
    decodes.uninstall()
    names = ["torchcodec.VideoDecoder", "torchvision.io.read_image", "torchvision.io.decode_jpeg"]
    assert [what for what, _ in told] == names
    assert told.keys[1:] == [key_of(clip), key_of(b"abc")]


# ---- preprocessing


def test_processors_and_what_they_open_are_both_told(fake, told, tmp_path):
    class BaseImageProcessor:
        def __init__(self, **kwargs):
            self.kwargs = kwargs

        def __call__(self, images, **kwargs):
            return self.preprocess(images, **kwargs)

        def preprocess(self, images, **kwargs):
            raise NotImplementedError

    fake("transformers.image_processing_utils", BaseImageProcessor=BaseImageProcessor)
    decodes = Decodes(told)
    decodes.install_all()

    class LateImageProcessor(BaseImageProcessor):  # defined after the wrapping, as models' classes are
        def preprocess(self, images, **kwargs):
            return np.array(images)

    own = LateImageProcessor.preprocess
    processor = LateImageProcessor()
    path = picture(tmp_path / "a.png")
    processor(Image.open(path))
    assert [what for what, _ in told] == ["PIL.Image", "transformers.LateImageProcessor"]
    told.clear()
    processor.preprocess(Image.open(path).convert("RGB"))
    processor(np.zeros((40, 60, 3)), size=4)
    processor(np.zeros((40, 60, 3)), size=5)
    processor(object())
    keys = [key for what, key in told if what == "transformers.LateImageProcessor"]
    assert len(set(keys)) == 4
    assert keys[-1] == ""
    decodes.uninstall()
    assert LateImageProcessor.preprocess is own


def test_a_real_image_processor(told, tmp_path):
    pytest.importorskip("transformers")
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = Image.open(picture(tmp_path / "a.png")).convert("RGB")
    processor = CLIPImageProcessorPil()
    plain = processor(image, return_tensors="pt")["pixel_values"]
    decodes = Decodes(told)
    decodes.install_all()
    try:
        again = CLIPImageProcessorPil()(image, return_tensors="pt")["pixel_values"]
        processor(image, return_tensors="pt")
    finally:
        decodes.uninstall()
    assert torch.equal(plain, again)
    assert [what for what, _ in told] == ["transformers.CLIPImageProcessorPil"] * 2
    assert len(set(told.keys)) == 1


def test_a_real_tokenizer(told):
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    decodes = Decodes(told)
    decodes.install_all()
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
        assert tokenizer("a b")["input_ids"] == [0, 1]
        tokenizer(["a b", "b"])
        tokenizer(text="a b")
        assert tokenizer.encode("a b") == [0, 1]
        tokenizer("a b")
    finally:
        decodes.uninstall()
    assert len(told) == 5
    assert told.keys[0] == told.keys[4] != told.keys[1]


# ---- keys


def test_arrays_and_tensors_are_told_apart_by_a_sample():
    big = np.random.default_rng(0).integers(0, 255, (480, 640, 3), dtype=np.uint8)
    other = 255 - big
    keys = [arguments_key([array], {}) for array in (big, big.copy(), other, big.transpose(2, 0, 1))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert arguments_key([torch.from_numpy(big)], {}) == keys[0]
    assert arguments_key([torch.zeros(2, device="meta")], {}) == ""
    assert arguments_key([object()], {}) == arguments_key([np.array([object()])], {}) == ""
    assert arguments_key([["ab", "c"]], {}) != arguments_key([["a", "bc"]], {})
    assert arguments_key([Path("a"), torch.float32, {"x": 1}], {}) != ""


def test_hashing_does_not_load_an_image(tmp_path):
    for suffix in ("png", "webp"):
        with Image.open(picture(tmp_path / f"a.{suffix}")) as image:
            assert arguments_key([image], {}) != ""
            assert image._im is None


def test_names_of_modules_are_strings():
    assert {"PIL.Image", "av", "cv2", "decord", "torchcodec.decoders", "torchvision.io"} <= set(MODULES)
    Decodes(Told()).install("not.imported")
