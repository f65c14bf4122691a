from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from frostline.errors import UsageError
from frostline.fingerprint import FileId, cache, content_of, file_id, files, tree_of


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_text_and_back(tmp_path: Path) -> None:
    path = _write(tmp_path / "a", os.urandom(200_000))
    for found in (file_id(path), file_id(path, full=True)):
        assert FileId.parse(found.text) == found
        assert found.differs(FileId.parse(found.text)) == []
    assert len(file_id(path).text.split()) == 3


@pytest.mark.parametrize("text", ["", "12", "a b c", "1 2 3 4 5 6"])
def test_broken_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no file identity"):
        FileId.parse(text)


def test_each_change_is_named(tmp_path: Path) -> None:
    data = bytearray(os.urandom(300_000))
    path = _write(tmp_path / "a", bytes(data))
    before = file_id(path, full=True)
    times = (before.mtime_ns, before.mtime_ns)

    data[150_000] ^= 1  # in the middle, with the old time: only the full hash can tell
    os.utime(_write(path, bytes(data)), ns=times)
    assert file_id(path).differs(FileId(before.size, before.mtime_ns, before.ends)) == []
    assert file_id(path, full=True).differs(before) == ["content"]

    data[-1] ^= 1
    os.utime(_write(path, bytes(data)), ns=times)
    assert file_id(path).differs(before) == ["ends"]

    os.utime(_write(path, bytes(data) + b"x"), ns=times)
    assert file_id(path).differs(before) == ["size", "ends"]


def test_a_touched_file_differs_in_time_unless_all_of_it_was_read(tmp_path: Path) -> None:
    path = _write(tmp_path / "a", b"x")
    quick, whole = file_id(path), file_id(path, full=True)
    os.utime(path, ns=(1, 1))
    assert quick.differs(file_id(path)) == ["mtime"]
    assert whole.differs(file_id(path, full=True)) == []


def test_empty_files_and_links(tmp_path: Path) -> None:
    path = _write(tmp_path / "a", b"")
    (tmp_path / "link").symlink_to(path)
    assert file_id(path, full=True) == file_id(tmp_path / "link", full=True)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        for ask in (file_id, content_of):
            with pytest.raises(UsageError, match="expected a file"):
                ask(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        file_id(tmp_path / "nothing")


def test_content_is_kept_by_identity_and_never_served_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(os.urandom(files._SMALL + 10))
    path = _write(tmp_path / "a", bytes(data))
    first, times = content_of(path), (os.stat(path).st_mtime_ns,) * 2
    with monkeypatch.context() as patch:
        patch.setattr(files, "_hash_all", lambda handle: pytest.fail("read again"))
        assert content_of(path) == first
    data[500] ^= 1
    os.utime(_write(path, bytes(data)), ns=times)  # same name, size, time and inode
    assert content_of(path) != first


def test_a_file_that_has_just_changed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_NS", 10**12)
    path = _write(tmp_path / "a", bytes(files._SMALL))
    content_of(path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}', None])
def test_a_damaged_cache_is_ignored_and_rebuilt(tmp_path: Path, cache: Path, damage: bytes | None) -> None:
    path = _write(tmp_path / "a", os.urandom(files._SMALL))
    right = content_of(path)
    [entry] = cache.rglob("*.json")
    if damage is None:  # still JSON, but another digest
        damage = json.dumps(json.loads(entry.read_text()) | {"value": "0" * 32}).encode()
    entry.write_bytes(damage)
    assert content_of(path) == right
    assert json.loads(entry.read_bytes())["value"] == right


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROSTLINE_CACHE", str(_write(tmp_path / "file", b"") / "below"))
    path = _write(tmp_path / "a", bytes(files._SMALL))
    assert content_of(path) == content_of(path)


def test_many_may_write_the_cache_at_once(cache: Path) -> None:
    from frostline.fingerprint.cache import keep, recall

    def work() -> None:
        for i in range(50):
            keep("test", "key", {"n": i})
            assert isinstance(recall("test", "key"), dict)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recall("test", "key") == {"n": 49}
    assert [path.name for path in cache.rglob(".new-*")] == []


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FROSTLINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_folder() == Path("/x/frostline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path("~/.cache/frostline").expanduser()


def test_folders_count_by_names_and_contents(tmp_path: Path) -> None:
    root = tmp_path / "root"
    _write(root / "a", b"1")
    _write(root / "sub" / "b", b"2")
    seen = [tree_of(root)]
    _write(root / "sub" / "b", b"3")
    seen.append(tree_of(root))
    (root / "a").rename(root / "c")
    seen.append(tree_of(root))
    _write(root / "d", b"")
    seen.append(tree_of(root))
    assert len(set(seen)) == 4
    (root).rename(tmp_path / "moved")
    assert tree_of(tmp_path / "moved") == seen[-1]
