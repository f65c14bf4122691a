"""How much memory there is to take."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from frostline.feed import memory


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def test_without_a_limit_it_is_what_the_host_has(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = psutil.virtual_memory()._replace(available=7 << 30)  # others take and give back meanwhile
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    assert memory.host_free_bytes() == 7 << 30
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5\n")
    assert memory.host_free_bytes() == 7 << 30


def test_a_container_may_take_less_and_page_cache_counts_as_free(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("10000\n")
    (cgroup / "memory.current").write_text("9000\n")
    assert memory.host_free_bytes() == 1000
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 300\nactive_file 40\ninactive_anon 9\n")
    assert memory.host_free_bytes() == 1340
    (cgroup / "memory.current").write_text("20000\n")
    assert memory.host_free_bytes() == 0


def test_a_device_without_memory_of_its_own_has_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 77)
    assert memory.device_free_bytes(torch.device("cpu")) == 77


def test_in_words() -> None:
    assert [memory.in_words(n) for n in (0, 999, 1000, 1.5e9, 2e15)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "1.5 GB",
        "2000.0 TB",
    ]
