"""`Video`: which frames, at which times, from every kind of file, and what is said about the others."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from frostline.errors import MissingExtra, UsageError
from frostline.stages import Video, decoders, packets
from frostline.stages.video import spread

pytest.importorskip("av")
MakeClip = Callable[..., Path]


def numbers(frames: torch.Tensor) -> list[int]:
    """Which frames these are: `make_clip` paints frame i grey with 8·i, in its bottom right."""
    corner = frames[:, :, -frames.shape[2] // 3 :, -frames.shape[3] // 3 :]
    return [round(float(f.float().mean()) / 8) for f in corner]


def test_frames_reach_both_ends_of_the_clip(make_clip: MakeClip) -> None:
    frames, times = Video(frames=4, size=(24, 32))(make_clip())
    assert (frames.shape, frames.dtype, times.dtype) == ((4, 3, 24, 32), torch.uint8, torch.float64)
    assert numbers(frames) == [0, 10, 19, 29]
    assert times.tolist() == pytest.approx([0.0, 0.4, 0.76, 1.16])


def test_one_frame_is_the_middle_and_shares_narrow_the_span(make_clip: MakeClip) -> None:
    clip = make_clip()
    assert numbers(Video(frames=1)(clip)[0]) == [14]
    assert numbers(Video(frames=3, start=0.5, end=1.0)(clip)[0]) == [15, 22, 29]
    assert numbers(Video(frames=30)(clip)[0]) == list(range(30))


@pytest.mark.parametrize("name", ["v.mp4", "v.mkv", "v.mov"])
def test_a_variable_frame_rate_is_sampled_by_time(make_clip: MakeClip, name: str) -> None:
    stamps = [*range(0, 200, 10), 1000, 2000, 3000, 4000]  # 20 frames in 0.2 s, then one a second
    frames, times = Video(frames=5)(make_clip(name, stamps))
    assert numbers(frames) == [0, 20, 21, 22, 23]
    assert times.tolist() == pytest.approx([0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("b.mp4", {"bf": "3", "g": "30"}),
        ("short.mp4", {"bf": "3", "g": "5"}),
        ("open.mp4", {"bf": "2", "g": "6", "x264-params": "open-gop=1"}),
        ("b.ts", {"bf": "2", "g": "6"}),
        ("b.mkv", {"bf": "2", "g": "6"}),
        ("intra.mp4", {"g": "1"}),
    ],
)
@pytest.mark.parametrize("seek_frames", [-1, 0, 8, 10**9])
def test_seeking_changes_no_frame(
    make_clip: MakeClip, name: str, options: dict[str, str], seek_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "SEEK_FRAMES", seek_frames)
    frames, times = Video(frames=6)(make_clip(name, options=options))
    assert numbers(frames) == [0, 6, 12, 17, 23, 29]
    assert (times - times[0]).tolist() == pytest.approx([0.0, 0.24, 0.48, 0.68, 0.92, 1.16], abs=0.002)


def test_seeking_and_going_straight_through_give_the_same_bits(
    make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make_clip(options={"g": "4", "bf": "2"})
    straight = Video(frames=5)(clip)[0]
    monkeypatch.setattr(decoders, "SEEK_FRAMES", 0)
    assert torch.equal(Video(frames=5)(clip)[0], straight)


def test_seeking_is_used_where_it_pays(make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch) -> None:
    real, looked_at = packets.opened.__enter__, []

    def counted(self: object) -> object:
        container, stream = real(self)  # type: ignore[arg-type]
        decode = container.decode
        spy = SimpleNamespace(
            format=container.format,
            demux=container.demux,
            seek=container.seek,
            decode=lambda s: (looked_at.append(1) or f for f in decode(s)),
        )
        return spy, stream

    monkeypatch.setattr(packets.opened, "__enter__", counted)
    clip = make_clip(stamps=range(0, 4000, 40), options={"g": "20", "bf": "0"})
    Video(frames=2)(clip)
    assert len(looked_at) < 40  # of 100


@pytest.mark.parametrize("name", ["raw.h264", "old.avi"])
def test_files_without_time_stamps_are_counted(make_clip: MakeClip, name: str) -> None:
    codec = "libx264" if name == "raw.h264" else "mpeg4"
    clip = make_clip(name, codec=codec, options={"bf": "2"} if codec == "libx264" else {})
    frames, times = Video(frames=4)(clip)
    assert numbers(frames) == [0, 10, 19, 29]
    assert (np.diff(times.numpy()) > 0).all()


def test_a_stream_without_a_duration_in_its_header(make_clip: MakeClip) -> None:
    clip = make_clip("live.mkv", container={"live": "1"})
    frames, times = Video(frames=3, min_s=1.1, max_s=1.3)(clip)
    assert numbers(frames) == [0, 15, 29] or numbers(frames) == [0, 14, 29]
    assert times[-1] == pytest.approx(1.16)


def test_durations_outside_the_limits_are_refused(make_clip: MakeClip) -> None:
    clip = make_clip()  # 30 frames of 40 ms
    Video(frames=2, min_s=1.2 - 1e-6, max_s=1.2 + 1e-6)(clip)
    with pytest.raises(UsageError, match=r"clip\.mp4.*lasts 1\.200 s \(min_s=2.0, max_s=None\)"):
        Video(frames=2, min_s=2.0)(clip)
    with pytest.raises(UsageError, match=r"lasts 1\.200 s \(min_s=None, max_s=0.5\)"):
        Video(frames=2, max_s=0.5)(clip)


def test_too_few_frames_are_refused(make_clip: MakeClip) -> None:
    with pytest.raises(UsageError, match=r"it has 30 frames from 0% to 100%.*fewer than frames=31"):
        Video(frames=31)(make_clip())
    with pytest.raises(UsageError, match="it has 3 frames from 90% to 100% of its time, of 30"):
        Video(frames=5, start=0.9)(make_clip())


def test_bad_files_say_what_and_where(make_clip: MakeClip, tmp_path: Path) -> None:
    whole = make_clip("whole.mp4").read_bytes()
    fast = make_clip("fast.mp4", container={"movflags": "faststart"}).read_bytes()
    assert fast.index(b"moov") < fast.index(b"mdat"), "or it would not open at all"
    long = make_clip("long.mkv", range(0, 4000, 40)).read_bytes()
    cases = {
        "empty.mp4": (b"", "is empty"),
        "text.mp4": (b"not a video at all" * 50, "damaged, cut off or no video"),
        "cut.mp4": (whole[: len(whole) // 2], "damaged, cut off or no video"),
        "tail.mp4": (fast[:-300], "cut off or damaged"),
        "half.mkv": (long[: len(long) // 2], "cut off or damaged"),
    }
    for name, (content, expected) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"Cannot decode the video .*{name}.*({expected})"):
            Video(frames=2)(tmp_path / name)
    with pytest.raises(UsageError, match=r"gone\.mp4.*No such file"):
        Video(frames=2)(tmp_path / "gone.mp4")
    with pytest.raises(UsageError, match="no regular file"):
        Video(frames=2)(tmp_path)


def test_a_file_that_names_others_opens_none_of_them(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip(tmp_path / "other.mp4")
    playlist = tmp_path / "list.mp4"
    playlist.write_text("ffconcat version 1.0\nfile other.mp4\n")
    with pytest.raises(UsageError, match="no video"):
        Video(frames=2, size=16)(playlist)


def test_sound_alone_is_no_video(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "sound.wav"), "w") as out:
        stream = out.add_stream("pcm_s16le", rate=8000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        samples.sample_rate = 8000
        out.mux(stream.encode(samples))
        out.mux(stream.encode(None))
    with pytest.raises(UsageError, match="has no video stream"):
        Video(frames=1)(tmp_path / "sound.wav")


def test_damage_in_the_middle_never_passes_unseen_as_another_length(make_clip: MakeClip) -> None:
    clip = make_clip(options={"g": "30"})
    whole, rng = clip.read_bytes(), np.random.default_rng(0)
    for _ in range(30):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[rng.integers(0, len(damaged), 20)] ^= 0xFF
        clip.write_bytes(damaged.tobytes())
        try:
            frames, times = Video(frames=4)(clip)
            said = f"{len(frames)} frames, {len(times)} times"
        except UsageError as error:
            said = str(error)
        assert said == "4 frames, 4 times" or said.startswith("Cannot decode the video")


def test_rotation_and_fit(make_clip: MakeClip) -> None:
    target = decoders.Target("x", (32, 24), "stretch", "bicubic")
    import av

    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:24, :32] = 255  # top left
    plain = av.VideoFrame.from_ndarray(pixels, "rgb24")
    turned = SimpleNamespace(
        rotation=90, width=64, height=48, is_corrupt=False, reformat=plain.reformat, time=0.0,
        side_data=plain.side_data,
    )  # fmt: skip
    out = decoders._finished(turned, target)
    assert out.shape == (32, 24, 3)
    assert out[-4, 2].min() > 200  # counter-clockwise: now at the bottom left
    assert out[2, 2].max() < 50
    for fit, shape in (("cover", (40, 40)), ("contain", (40, 40)), ("shortest", (40, 53))):
        clip = Video(frames=2, size=40, fit=fit)(make_clip())[0]
        assert clip.shape[2:] == shape, fit
    assert Video(frames=2, size=40, fit="contain")(make_clip())[0][0, :, 0, 20].tolist() == [0, 0, 0]
    assert Video(frames=2, size=None)(make_clip())[0].shape == (2, 3, 48, 64)


@pytest.mark.parametrize(
    ("matrix", "corner"),
    [
        ((1, 0, 0, 1), (0, 0)),
        ((0, 1, -1, 0), (0, -1)),  # a telephone held upright
        ((-1, 0, 0, -1), (-1, -1)),
        ((0, -1, 1, 0), (-1, 0)),
        ((-1, 0, 0, 1), (0, -1)),  # a mirrored selfie, held across
        ((0, 1, 1, 0), (0, 0)),  # and upright
        ((1, 0, 0, -1), (-1, 0)),
        ((0, -1, -1, 0), (-1, -1)),
    ],
)
def test_frames_are_turned_and_mirrored_as_the_file_says(
    make_clip: MakeClip, matrix: tuple[int, int, int, int], corner: tuple[int, int]
) -> None:
    clip = make_clip()  # bright at its top left
    a, b, c, d = (value << 16 for value in matrix)
    content = bytearray(clip.read_bytes())
    at = content.index(b"tkhd") + 44  # x' = ax + cy, y' = bx + dy
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip.write_bytes(content)
    frames, _ = Video(frames=3, size=None)(clip)
    assert frames.shape[2:] == ((48, 64) if a else (64, 48))
    for frame in frames:
        bright = [(y, x) for y in (0, -1) for x in (0, -1) if frame[:, y, x].min() > 240]
        assert bright == [corner]


def test_one_thread_a_decoder_and_many_decoders_at_once(make_clip: MakeClip) -> None:
    clip = make_clip()
    with packets.opened(str(clip)) as (_, stream):
        assert stream.codec_context.thread_count == 1
    stage = Video(frames=5)
    want = stage(clip)[0]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(got, want) for got, _ in pool.map(stage, [clip] * 12))


def test_spread_is_ascending_different_and_inside() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        times = np.unique(np.round(rng.gamma(0.3, size=rng.integers(1, 40)).cumsum(), 6))
        n = int(rng.integers(1, len(times) + 1))
        chosen = spread(times, n, float(times[0]), float(times[-1]))
        assert (np.diff(chosen) > 0).all()
        assert chosen.min() >= 0
        assert chosen.max() < len(times)
        if n > 1:
            assert (chosen[0], chosen[-1]) == (0, len(times) - 1)


def test_all_wrong_parameters_at_once() -> None:
    with pytest.raises(UsageError) as error:
        Video(frames=0, size=-1, fit="x", resample="y", start=0.6, end=0.5, min_s=-1, backend="vlc")  # type: ignore[arg-type]
    assert len(error.value.problems) == 7
    with pytest.raises(UsageError, match="no clip is both"):
        Video(min_s=3, max_s=2)


def test_auto_is_settled_on_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Video(backend="auto") == Video(backend="pyav")
    monkeypatch.setattr("frostline.stages.video.find_spec", lambda name: name == "cv2" or None)
    assert Video(backend="auto").backend == "opencv"


@pytest.mark.parametrize("backend", ["pyav", "torchcodec", "opencv"])
def test_a_missing_library_names_its_extra(
    make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    clip = make_clip()
    for module in ("av", "torchcodec", "torchcodec.decoders", "cv2"):
        monkeypatch.setitem(sys.modules, module, None)
    extra = "video" if backend == "pyav" else backend
    with pytest.raises(MissingExtra, match=rf"pip install 'frostline\[{extra}\]'"):
        Video(frames=2, backend=backend)(clip)  # type: ignore[arg-type]


def test_torchcodec_gets_the_places_of_the_same_frames(
    make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make_clip()
    whole, stamps = Video(frames=30, size=None)(clip)

    class VideoDecoder:
        def __init__(self, path: str, **options: object) -> None:
            assert options == {"num_ffmpeg_threads": 1, "dimension_order": "NHWC", "seek_mode": "exact"}

        def get_frames_at(self, indices: list[int]) -> object:
            data = whole[indices].permute(0, 2, 3, 1).contiguous()
            return SimpleNamespace(data=data, pts_seconds=stamps[indices])

    fake = ModuleType("torchcodec.decoders")
    fake.VideoDecoder = VideoDecoder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", fake)
    frames, times = Video(frames=4, backend="torchcodec", size=32)(clip)
    assert numbers(frames) == [0, 10, 19, 29]
    assert torch.equal(times, Video(frames=4)(clip)[1])


class Capture:
    """As much of cv2.VideoCapture as is used: ten frames of 16x16, 0.1 s apart, blue by frame number."""

    def __init__(self, path: str, *_: object) -> None:
        self.at, self.opened = -1, Path(path).stat().st_size > 100

    def isOpened(self) -> bool:
        return self.opened

    def grab(self) -> bool:
        self.at += 1
        return self.at < 10

    def get(self, _: int) -> float:
        return 100.0 * self.at

    def retrieve(self) -> tuple[bool, np.ndarray]:
        return True, np.full((16, 16, 3), (10 * self.at, 0, 0), np.uint8)

    def release(self) -> None:
        self.opened = False


def test_opencv_gives_rgb_at_its_time_stamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(VideoCapture=Capture, CAP_FFMPEG=1, CAP_PROP_N_THREADS=2, CAP_PROP_POS_MSEC=3)
    monkeypatch.setitem(sys.modules, "cv2", fake)  # type: ignore[arg-type]
    (tmp_path / "a.mp4").write_bytes(bytes(200))
    frames, times = Video(frames=3, size=8, backend="opencv")(tmp_path / "a.mp4")
    assert frames[:, :, 0, 0].tolist() == [[0, 0, 0], [0, 0, 40], [0, 0, 90]]
    assert times.tolist() == pytest.approx([0.0, 0.4, 0.9])
    (tmp_path / "b.mp4").write_bytes(b"x")
    with pytest.raises(UsageError, match="OpenCV cannot open it"):
        Video(frames=3, backend="opencv")(tmp_path / "b.mp4")
