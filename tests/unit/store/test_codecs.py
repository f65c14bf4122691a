from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import frostline as fl
from frostline.errors import FieldError
from frostline.store.building import Block, checked, encode_rows
from frostline.store.codecs import Error, as_bytes, decode, encode, from_bytes, to_tensor, torch_dtype
from frostline.store.container import DTYPES, itemsize

FLOATS = ("float16", "bfloat16", "float32", "float64")


def _bits(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of any bits at all: NaN with payloads, −0.0, infinities, denormals."""
    size = math.prod(shape) * itemsize(dtype)
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
    if dtype == "bool":
        data &= 1
    return from_bytes(data, dtype, shape)


@st.composite
def _finite_rows(draw: st.DrawFn) -> tuple[Tensor, str]:
    dtype = draw(st.sampled_from(FLOATS))
    shape = (draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 5)))
    x = _bits(draw, dtype, shape).nan_to_num()
    return x.clamp(-1e30, 1e30) if dtype == "float64" else x, dtype


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_raw_is_exact_for_any_bits(data: st.DataObject, dtype: str) -> None:
    shape = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 4)))
    x = data.draw(st.builds(lambda y: y, st.composite(_bits)(dtype, shape)))
    spec = fl.Field(shape[1:], dtype)
    parts = encode(x, spec, "x")
    assert bytes(as_bytes(decode(parts, spec))) == bytes(as_bytes(x))


@settings(max_examples=60)
@given(_finite_rows(), st.sampled_from(["float16", "bfloat16", "float32"]))
def test_a_cast_is_torchs_cast_or_refused(rows: tuple[Tensor, str], codec: str) -> None:
    x, dtype = rows
    if itemsize(codec) > itemsize(dtype):
        return
    spec = fl.Field(tuple(x.shape[1:]), dtype, codec)
    want = x.to(torch_dtype(codec))
    if bool(torch.isfinite(want).all()):
        assert torch.equal(decode(encode(x, spec, "x"), spec), want.to(x.dtype))
    else:
        with pytest.raises(FieldError, match="beyond that type's range"):
            encode(x, spec, "x", "k")


def test_a_cast_keeps_nan_and_infinity() -> None:
    spec = fl.Field((3,), "float32", "bfloat16")
    x = torch.tensor([[math.nan, math.inf, -math.inf]])
    y = decode(encode(x, spec, "x"), spec)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y[0, 1:], x[0, 1:])


@settings(max_examples=60)
@given(_finite_rows(), st.sampled_from(["int8/token", "int8/channel"]))
def test_int8_is_within_half_a_step(rows: tuple[Tensor, str], codec: str) -> None:
    x, dtype = rows
    spec = fl.Field(tuple(x.shape[1:]), dtype, codec)
    parts = encode(x, spec, "x")
    y = decode(parts, spec)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert bool(torch.isfinite(y).all())
    scales = parts["scales"].double()
    step = scales.unsqueeze(-1) if codec == "int8/token" else scales.unsqueeze(1)
    # rounding of the result in its own type, and scales so small that they are denormal themselves
    slack = y.double().abs() * float(torch.finfo(x.dtype).eps) + 1e-7 * step.abs() * 127 + 2e-43
    slack = slack + (1e-7 if dtype == "float16" else 0)
    assert bool(((x.double() - y.double()).abs() <= step / 2 + slack).all())


@pytest.mark.parametrize("codec", ["int8/token", "int8/channel"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_int8_refuses_what_it_cannot_hold(codec: str, bad: float) -> None:
    spec = fl.Field((2, 2), "float32", codec)
    with pytest.raises(FieldError, match=r"row 'k' holds NaN or infinity"):
        encode(torch.tensor([[[1.0, bad], [0.0, 1.0]]]), spec, "x", "k")


@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_int8_of_the_largest_numbers_is_finite(dtype: str) -> None:
    most = torch.finfo(torch_dtype(dtype)).max
    x = torch.tensor([[most, -most, most / 3]], dtype=torch_dtype(dtype))
    y = decode(encode(x, fl.Field((3,), dtype, "int8/token"), "x"), fl.Field((3,), dtype, "int8/token"))
    assert bool(torch.isfinite(y).all())
    assert float((x.double() - y.double()).abs().max()) <= most / 127


@settings(max_examples=60)
@given(
    _finite_rows(),
    st.sampled_from(["raw", "float16", "bfloat16", "int8/token", "int8/channel"]),
    st.booleans(),
)
def test_rows_are_the_same_bytes_however_they_are_batched(
    rows: tuple[Tensor, str], codec: str, ragged: bool
) -> None:
    x, dtype = rows
    x = x.clamp(-6e4, 6e4)
    shape = (None, *x.shape[2:]) if ragged else tuple(x.shape[1:])
    if codec in DTYPES and itemsize(codec) > itemsize(dtype):
        return
    spec = fl.Field(shape, dtype, codec)
    keys = [str(i) for i in range(len(x))]
    whole, single = Block("x", spec), Block("x", spec)
    whole.add(encode_rows("x", spec, keys, checked("x", spec, keys, x), sample=2))
    for i, key in enumerate(keys):
        single.add(encode_rows("x", spec, [key], checked("x", spec, [key], x[i : i + 1]), sample=int(i < 2)))
    as_bytes = [{k: b"".join(p.tobytes() for p in v) for k, v in b.pieces.items()} for b in (whole, single)]
    assert as_bytes[0] == as_bytes[1]
    assert whole.checksums.tolist() == single.checksums.tolist()
    assert whole.error == single.error


def test_the_measured_error_does_not_depend_on_threads() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).view(1, 200, 1000)
    spec = fl.Field((200, 1000), "float32", "int8/token")
    before, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(encode_rows("x", spec, ["k"], x, sample=1).errors[0])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_error_figures_are_those_of_the_definition() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).double()
    y = x + 0.01 * torch.randn(50, 64, generator=torch.Generator().manual_seed(2)).double()
    error = Error.of(x, y)
    cosines = torch.nn.functional.cosine_similarity(x, y).sort().values
    summary = error.summary()
    assert summary["max_abs"] == float((x - y).abs().max())
    assert summary["relative_l2"] == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-6)
    assert summary["cosine_min"] == pytest.approx(float(cosines[0]), abs=1e-9)
    # a quantile is good to one bin of 1 − cos: a factor of 10^(1/8)
    assert 1 - summary["cosine_median"] == pytest.approx(1 - float(cosines[25]), rel=0.34)
    twice = Error()
    twice.merge(error)
    twice.merge(error)
    assert (twice.rows, twice.max_abs) == (2, error.max_abs)
    assert twice.relative_l2 == pytest.approx(error.relative_l2)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_error_leaves_out_what_is_not_finite(odd: float) -> None:
    x = torch.tensor([[1.0, 2.0, odd], [1.0, 0.0, 0.0]])
    error = Error.of(x, x.to(torch.bfloat16))
    assert Error.parse(vars(error)) == error  # finite, as the manifest needs it
    assert error.max_abs == 0.0


@pytest.mark.parametrize(
    "change", [{"rows": -1}, {"rows": "3"}, {"max_abs": "1"}, {"bins": [1, 2]}, {"sum_value2": math.inf}]
)
def test_error_figures_from_a_file_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="encoding error"):
        Error.parse({**vars(Error()), **change})


@pytest.mark.parametrize(
    ("value", "field", "says"),
    [
        (torch.zeros(4), fl.Field((3,), "float32"), r"got float32 \[4\]"),
        (torch.zeros(3, dtype=torch.float64), fl.Field((3,), "float32"), r"got float64"),
        (torch.zeros(3, 5), fl.Field((None, 4), "float32"), r"got float32 \[3, 5\]"),
        (np.array(["a"]), fl.Field((1,), "float32"), "has no torch type"),
        (np.array([{}], dtype=object), fl.Field((1,), "float32"), "has no torch type"),
        ("text", fl.Field((), "float32"), "expected a tensor, array or number, got str"),
        ([1, "a"], fl.Field((2,), "float32"), "cannot be a float32 tensor"),
        (300, fl.Field((), "uint8"), "cannot be a uint8 tensor"),
        (7, fl.Field((), "str"), "expected str, got int"),
        ("a", fl.Field((), "bytes"), "expected bytes, got str"),
        ("\ud800", fl.Field((), "str"), "not valid Unicode"),
        (math.nan, fl.Field((), "json"), "not a JSON value"),
        ({1, 2}, fl.Field((), "json"), "not a JSON value"),
        ("\ud800", fl.Field((), "json"), "not a JSON value"),
    ],
)
def test_a_value_that_does_not_fit_says_row_field_and_why(value: Any, field: fl.Field, says: str) -> None:
    with pytest.raises(FieldError, match=says) as caught:
        to_tensor(value, field, "f", "the key")
    assert "'the key'" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=np.float32)[::-1].copy()[::-1].reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        torch.arange(6, dtype=torch.float32).view(3, 2).t().contiguous().view(2, 3).sort().values,
        [[0, 1, 2], [3, 4, 5]],
    ],
)
def test_arrays_of_any_layout_are_taken(value: Any) -> None:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    x = to_tensor(value, fl.Field((2, 3), "float32"), "x", "k")
    assert sorted(x.flatten().tolist()) == [0, 1, 2, 3, 4, 5]
    if isinstance(value, np.ndarray):
        batch = checked("x", fl.Field((3,), "float32"), ["a", "b"], value)
        assert torch.equal(batch, x)


@pytest.mark.parametrize("shape", [(), (1,), (None,)])
@pytest.mark.parametrize("codec", ["raw", "bfloat16"])
def test_one_number_with_a_stride_of_its_own(
    tmp_path: Path, shape: tuple[int | None, ...], codec: str
) -> None:
    """As `scores[:, 0]` of a chunk with one row has it: it counts as contiguous, whatever its stride."""
    x = torch.arange(6.0)[3::4]
    with fl.Store.create(tmp_path / "s", {"x": fl.Field(shape, "float32", codec=codec)}) as writer:
        writer.append_batch(["a"], {"x": x[None] if shape else x})
    assert fl.Store.open(tmp_path / "s")["a"]["x"].item() == 3.0


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3.7, "int64"), (-1, "uint8"), (-1, "uint64"), (2, "bool"), (0.5, "bool"),
        (70_000.0, "float16"), (-1e40, "float32"), (1 << 40, "float16"),
    ],
)  # fmt: skip
def test_a_number_that_its_type_cannot_hold_is_refused(value: Any, dtype: str) -> None:
    """torch would round, wrap, or make it True or infinite, and say nothing."""
    for some, shape in ((value, ()), ([1, value], (2,)), (((value,), (0,)), (2, 1))):
        with pytest.raises(FieldError, match=rf"Row 'k', field 'x': .*(hold|{dtype} tensor)"):
            to_tensor(some, fl.Field(shape, dtype), "x", "k")


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["bool", "int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64"]))
def test_whole_numbers_that_fit_come_back(data: st.DataObject, dtype: str) -> None:
    low, high = (0, 1) if dtype == "bool" else (torch.iinfo(torch_dtype(dtype)).min, 0)
    high = high or torch.iinfo(torch_dtype(dtype)).max
    values = data.draw(st.lists(st.integers(low, high), min_size=1, max_size=5))
    assert to_tensor(values, fl.Field((len(values),), dtype), "x", "k").tolist() == values


def test_numbers_that_are_not_finite_or_lose_digits_are_taken() -> None:
    values = [math.inf, -math.inf, 0.1, 1e-30]
    assert torch.equal(to_tensor(values, fl.Field((4,), "float16"), "x", "k"), torch.tensor(values).half())
    assert to_tensor(math.nan, fl.Field((), "bfloat16"), "x", "k").isnan()
