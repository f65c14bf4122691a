"""Whose code a module is."""

from __future__ import annotations

from pathlib import Path

import pytest

from frostline.fingerprint import origin


@pytest.mark.parametrize(("record", "kind"), [(True, "library"), (False, "own")])
def test_a_wheel_unpacked_into_a_folder_of_the_path_is_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bool, kind: str
) -> None:
    """Its compiled parts have no source to go by, and its version says what it is."""
    (tmp_path / "fl_vendored").mkdir()
    (tmp_path / "fl_vendored" / "__init__.py").write_text("")
    about = tmp_path / "fl_vendored-2.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-vendored\nVersion: 2.1\n")
    if record:
        (about / "RECORD").write_text("fl_vendored/__init__.py,,\nfl_vendored-2.1.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    origin._distributions.cache_clear()
    assert origin.kind_of("fl_vendored") == kind
    if record:
        assert origin.version_of("fl_vendored") == ("fl-vendored", "2.1")
    origin._distributions.cache_clear()
