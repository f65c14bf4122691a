from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from frostline.errors import CheckpointError
from frostline.trainer import tensorfile


def of_every_kind() -> dict[str, Tensor]:
    torch.manual_seed(3)
    values = {str(d): torch.randint(0, 255, (7, d.itemsize), dtype=torch.uint8).view(d) for d in
              (*tensorfile.DTYPES.values(),) if d is not torch.bool}  # fmt: skip
    return values | {
        "flags": torch.rand(5) > 0.5,
        "0-dim": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "turned": torch.randn(4, 6).T,
        "strided": torch.randn(20)[::3],
        "one of many": torch.randn(1, 4)[:, 0],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "large": torch.randn(700_001),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        'odd "name" é/\n': torch.ones(1),
    }


def bits(tensor: Tensor) -> bytes:
    return bytes(
        tensor.detach()
        .resolve_conj()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
    )


def test_tensors_of_every_kind_come_back_bit_for_bit_in_memory_of_their_own(tmp_path: Path) -> None:
    given = of_every_kind()
    nbytes, digest = tensorfile.write(tmp_path / "f", given)
    data = (tmp_path / "f").read_bytes()
    assert (nbytes, digest) == (len(data), f"{xxhash.xxh3_64_intdigest(data):016x}")
    found = tensorfile.read(tmp_path / "f", check=digest)
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name
        assert found[name].untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, name
    os.unlink(tmp_path / "f")
    found["large"].add_(1)  # neither read-only nor a view of the file


def test_the_safetensors_library_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    given = of_every_kind()
    tensorfile.write(tmp_path / "ours", given)
    theirs = load_file(tmp_path / "ours")
    assert {name: bits(t) for name, t in theirs.items()} == {name: bits(t) for name, t in given.items()}
    save_file({n: t.detach().resolve_conj().contiguous() for n, t in given.items()}, tmp_path / "theirs")
    ours = tensorfile.read(tmp_path / "theirs")
    assert {name: bits(t) for name, t in ours.items()} == {name: bits(t) for name, t in given.items()}


def test_a_group_without_tensors_is_a_file_too(tmp_path: Path) -> None:
    _, digest = tensorfile.write(tmp_path / "f", {})
    assert tensorfile.read(tmp_path / "f", check=digest) == {}
    assert load_file(tmp_path / "f") == {}


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    _, digest = tensorfile.write(tmp_path / "f", {"a": torch.arange(64.0), "b": torch.arange(3)})
    data = bytearray((tmp_path / "f").read_bytes())
    for at in (9, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "g").write_bytes(changed)
        with pytest.raises(CheckpointError, match="g: "):
            tensorfile.read(tmp_path / "g", check=digest)


def planted(table: object, data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        (1 << 62).to_bytes(8, "little") + b"{}",
        planted([]),
        planted({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        planted({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}),
        planted({"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}),
        planted({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}),
        planted({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 7),
        planted({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 9),
        planted({"a": 3}),
        b"\x80\x02cos\nsystem\n",
    ],
)
def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match="f: "):
        tensorfile.read(tmp_path / "f")


def test_a_fifo_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    with pytest.raises(CheckpointError, match="not a regular file"):
        tensorfile.read(tmp_path / "f")


def test_tensors_that_the_format_cannot_hold_are_named() -> None:
    sparse = torch.eye(2).to_sparse()
    wrong = tensorfile.unfit({
        "ok": torch.ones(1), "sparse": sparse, "meta": torch.empty(1, device="meta"),
        "wide": torch.ones(1, dtype=torch.complex128),
    })  # fmt: skip
    assert [line.split(":")[0] for line in wrong] == ["sparse", "meta", "wide"]


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_written_as_they_are(tmp_path: Path) -> None:
    big = torch.randn(30_000_000, device="cuda")
    given = {"big": big, "turned": big[:6000].view(60, 100).T, "step": torch.tensor(3.0), "one": big[7]}
    _, digest = tensorfile.write(tmp_path / "f", given)
    found = tensorfile.read(tmp_path / "f", check=digest)
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in given.items())
