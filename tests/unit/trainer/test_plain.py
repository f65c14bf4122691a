from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from frostline.errors import CheckpointError
from frostline.trainer.plain import Plain, whole

VALUES = {
    "none": None, "yes": True, "n": 1 << 200, "x": 0.1 + 0.2,
    "tiny": 5e-324, "minus zero": -0.0, "inf": -math.inf,
    "text": "é\n", "list": [1, [2.5, (3, ())]], "keys": {1: "one", (2, 3): "pair", None: 0}, "empty": {},
    "mark": {"$tensor": "not a tensor"}, "several": {"$tuple": [], "other": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_of_python_come_back_through_json(name: str) -> None:
    plain = Plain(tensors=False)
    text = json.dumps(plain.of(VALUES[name], "v"), allow_nan=False)
    back = whole(json.loads(text), {})
    assert plain.problems == []
    assert back == VALUES[name]
    assert repr(back) == repr(VALUES[name])


def test_nan_numpy_numbers_arrays_and_tensors_come_back() -> None:
    plain = Plain()
    given = {
        "nan": math.nan, "np": np.float32(0.5), "i": np.int64(3), "a": np.arange(3, dtype=np.uint32),
        "t": torch.ones(2), "deep": [{"t": torch.zeros(1)}], 1: torch.tensor(1), "1": torch.tensor(2),
    }  # fmt: skip
    back = whole(json.loads(json.dumps(plain.of(given, "v"))), plain.tensors)
    assert math.isnan(back["nan"])
    assert (back["np"], back["i"], back["a"].dtype, back["a"].tolist()) == (0.5, 3, np.uint32, [0, 1, 2])
    assert torch.equal(back["t"], given["t"])
    assert torch.equal(back["deep"][0]["t"], torch.zeros(1))
    assert (back[1].item(), back["1"].item()) == (1, 2)


def test_all_that_cannot_be_kept_is_named() -> None:
    plain = Plain(tensors=False)
    plain.of({"a": object(), "b": [{1}, torch.ones(1)], "c": b"x"}, "state")
    with pytest.raises(CheckpointError) as caught:
        plain.refuse("No:")
    assert [p.split(":")[0] for p in caught.value.problems] == [
        "state/a",
        "state/b/0",
        "state/b/1",
        "state/c",
    ]


def test_a_tensor_that_is_not_there_and_an_unknown_mark_are_errors() -> None:
    with pytest.raises(CheckpointError, match="names a tensor 'x'"):
        whole({"$tensor": "x"}, {})
    with pytest.raises(CheckpointError, match=r"the kind '\$later'"):
        whole({"$later": 1}, {})
