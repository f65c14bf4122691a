from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from frostline.errors import StoreCorrupt
from frostline.store.container import DTYPES, PAGE, header, itemsize, parse


def _parse(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return parse(fd, path.name)
    finally:
        os.close(fd)


def _with_header(table: Any, body: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_what_is_written_is_read_by_safetensors_and_starts_on_a_page(tmp_path: Path) -> None:
    a, b = np.arange(5, dtype=np.int64), np.arange(12, dtype=np.float32).reshape(3, 4)
    start = header({"a": ("int64", (5,)), "b": ("float32", (3, 4))}, {"field": "b"}, on_page="b")
    entries = _parse(tmp_path / "f.safetensors", start + a.tobytes() + b.tobytes())
    assert entries["b"].start % PAGE == 0
    found = load_file(tmp_path / "f.safetensors")
    assert np.array_equal(found["a"], a)
    assert np.array_equal(found["b"], b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(tmp_path: Path, dtype: str) -> None:
    data = header({"v": (dtype, (2, 3))}, {}, on_page="v") + bytes(6 * itemsize(dtype))
    entry = _parse(tmp_path / "f", data)["v"]
    assert (entry.dtype, entry.shape, entry.stop - entry.start) == (dtype, (2, 3), 6 * itemsize(dtype))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        _with_header(b"not json"),
        _with_header(b"[" * 100_000),
        _with_header(b"\xff\xfe"),
        _with_header([1, 2]),
        _with_header({"v": 3}),
        _with_header({"v": {"dtype": "F32", "shape": [1]}}),
        _with_header({"v": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        _with_header({"v": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        _with_header({"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(4)),
        _with_header({"v": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}),
        _with_header({"v": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4)),
        _with_header({"v": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)),
        _with_header({"v": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}, bytes(4)),
        _with_header({"v": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, bytes(4)),
        _with_header({"v": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        _with_header({"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5)),
        _with_header(
            {
                "v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            bytes(12),
        ),
        _with_header(
            b'{"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"\0",
        ),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(StoreCorrupt, match=r"f\.bin"):
        _parse(tmp_path / "f.bin", data)
