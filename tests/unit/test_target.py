"""TARGET: recipes, files and modules, and what is said when one is not there."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import frostline as fl
from frostline import target
from frostline.errors import FrostlineError, UsageError
from frostline.target import recipes, resolve

WORK = """
import frostline as fl

def double(x):
    return 2 * x

def workload(*, n: int = 3) -> fl.Workload:
    rows = [{"key": str(i), "x": i} for i in range(n)]
    return fl.Workload(fl.Pipeline(fl.Source.table(rows), fl.Stage("y", double, reads="x")), run=print)

def small(n: int = 1):
    return workload(n=n)

def named(): return fl.Workload(workload().data, run=print, name="mine")
def pipeline(): return workload().data
def nothing(): workload()
def ours(): raise fl.Store.open("no/such/store")
def theirs(): raise ZeroDivisionError("inside")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The current folder; what is imported here is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path, text: str = WORK) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def error(*words) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(*words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stem", "name"), [("my work (2)", "my_work__2_"), ("-try", "_-try"), ("größe", "größe")]
)
def test_a_file_may_be_called_what_no_folder_should(stem: str, name: str) -> None:
    assert resolve(write(Path(f"{stem}.py"))).name == name
    assert resolve(f"{stem}.py:small").workload.name == f"{name}.small"


# files


def test_a_file(folder: Path) -> None:
    write(folder / "h4_work.py")
    found = resolve("h4_work.py", ["n=5"])
    assert (found.name, found.workload.name, found.given) == ("h4_work", "h4_work", {"n": 5})
    assert len(found.workload.data.source) == 5
    assert [p.name for p in found.parameters] == ["n"]
    assert resolve("h4_work.py:small").name == "h4_work.small"
    assert resolve("h4_work.py:workload").name == "h4_work"
    assert resolve("h4_work.py:named").workload.name == "mine"


def test_a_file_elsewhere_imports_what_lies_beside_it(folder: Path) -> None:
    write(folder / "deep" / "h4_beside.py", "ROWS = [{'key': 'a'}]")
    text = "import frostline as fl\nfrom h4_beside import ROWS\n"
    text += "def workload(): return fl.Workload(fl.Pipeline(fl.Source.table(ROWS)), run=print)"
    place = write(folder / "deep" / "h4_user.py", text)
    assert list(resolve(place).workload.data.source.keys) == ["a"]
    assert sys.path[0] == str(folder / "deep")


def test_the_same_file_is_one_module(folder: Path) -> None:
    place = write(folder / "h4_twice.py")
    first, second = resolve("h4_twice.py"), resolve(place)
    assert first.function is second.function
    assert sys.modules["h4_twice"].workload is first.function


def test_a_worker_process_can_import_what_the_file_defines(folder: Path) -> None:
    write(folder / "lib" / "h4_worker.py")
    stage = resolve("lib/h4_worker.py").workload.data.stages[0]
    assert stage.fn.__module__ == "h4_worker"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(stage.fn, 4).result() == 8


def test_a_name_that_is_taken_is_refused(folder: Path) -> None:
    write(folder / "json.py")
    assert "another module of that name already is" in error("json.py")
    write(folder / "a" / "h4_same.py")
    write(folder / "b" / "h4_same.py")
    resolve("a/h4_same.py")
    message = error("b/h4_same.py")
    assert str(folder / "a" / "h4_same.py") in message
    assert "Rename" in message
    write(folder / "h4.dotted.py")
    assert "without dots" in error("h4.dotted.py")


def test_a_file_that_is_not_there(folder: Path) -> None:
    write(folder / "h4_work.py")
    assert "Did you mean h4_work.py?" in error("h4_wrok.py")
    assert "no folder nowhere" in error("nowhere/h4_work.py")
    (folder / "data").mkdir()
    assert "data is a folder" in error("./data")


def test_a_function_that_is_not_there(folder: Path) -> None:
    write(folder / "h4_work.py")
    assert "small is the nearest: give h4_work.py:small" in error("h4_work.py:smal")
    one = "import frostline as fl\ndef other(a) -> fl.Workload: ...\ndef free(): ...\n"
    write(folder / "h4_one.py", one)
    assert "other returns a Workload: give h4_one.py:other" in error("h4_one.py")
    write(folder / "h4_free.py", "def free(a=1): ...\ndef bound(a): ...\n")
    assert "free can be called as it is: give h4_free.py:free" in error("h4_free.py")
    write(folder / "h4_two.py", "def a(): ...\ndef b(): ...\n")
    assert "it has a, b" in error("h4_two.py")
    write(folder / "h4_none.py", "workload = 3")
    assert "is a int; expected a function" in error("h4_none.py")
    write(folder / "h4_empty.py", "")
    assert "Add one: def workload" in error("h4_empty.py")


@pytest.mark.parametrize("text", ["x = 1", "'the workload'  # workload", "for workloads in (): ..."])
def test_a_file_without_the_function_is_not_run(folder: Path, text: str) -> None:
    """It may be a script that trains for hours."""
    write(folder / "h4_script.py", f"open('ran', 'w')\n{text}")
    assert "h4_script.py has no function 'workload'" in error("h4_script.py")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    from h4_other import workload\nexcept ImportError: ...",
        "from h4_other import *",
        "from h4_other import small as workload",
        "exec('from h4_other import workload')",
        "globals()['workload'] = __import__('h4_other').workload",
        "def __getattr__(name):\n    import h4_other\n    return getattr(h4_other, name)",
        "def make():\n    global workload\n    from h4_other import workload\nmake()",
    ],
)
def test_a_function_may_come_from_anywhere(folder: Path, text: str) -> None:
    write(folder / "h4_other.py")
    write(folder / "h4_odd.py", text)
    assert resolve("h4_odd.py").name == "h4_odd"


def test_a_file_of_a_package_says_how_it_is_given(folder: Path) -> None:
    write(folder / "h4_pack" / "__init__.py", "")
    write(folder / "h4_pack" / "h4_inner.py", "from . import nothing\ndef workload(): ...")
    before = list(sys.path)
    assert "package.h4_inner:workload" in error("h4_pack/h4_inner.py")
    assert sys.path == before


# modules


def test_a_module(folder: Path) -> None:
    write(folder / "h4_pack2" / "__init__.py", "")
    write(folder / "h4_pack2" / "work.py")
    assert resolve("h4_pack2.work:workload").name == "h4_pack2.work"
    assert resolve("h4_pack2.work:small").name == "h4_pack2.work.small"


def test_a_module_that_is_not_there(folder: Path) -> None:
    write(folder / "h4_work.py")
    assert "Did you mean h4_work:workload?" in error("h4_wrok:workload")
    assert "no module 'h4_gone'" in error("h4_gone.deep:workload")
    assert "names no module" in error(":workload")


def test_an_import_that_fails_inside_keeps_its_error(folder: Path) -> None:
    write(folder / "h4_broken.py", "import h4_not_there\ndef workload(): ...")
    with pytest.raises(ModuleNotFoundError, match="h4_not_there"):
        resolve("h4_broken:workload")
    with pytest.raises(ModuleNotFoundError, match="h4_not_there"):
        resolve("h4_broken.py")
    write(folder / "h4_syntax.py", "def (:")
    with pytest.raises(SyntaxError):
        resolve("h4_syntax.py")


# what the function does


def test_the_functions_own_errors_pass_through(folder: Path) -> None:
    write(folder / "h4_work.py")
    with pytest.raises(FrostlineError, match="No store at"):
        resolve("h4_work.py:ours")
    with pytest.raises(ZeroDivisionError, match="inside"):
        resolve("h4_work.py:theirs")


def test_something_else_than_a_workload_is_refused(folder: Path) -> None:
    write(folder / "h4_work.py")
    assert "returned a Pipeline; expected a Workload" in error("h4_work.py:pipeline")
    assert "returned nothing" in error("h4_work.py:nothing")


def test_wrong_overrides(folder: Path) -> None:
    write(folder / "h4_work.py")
    assert "did you mean n?" in error("h4_work.py", ["nn=3"])


# recipes


@pytest.fixture
def installed(folder: Path, monkeypatch):
    write(folder / "h4_recipe.py")
    monkeypatch.syspath_prepend(str(folder))
    points = [
        EntryPoint("foveated", "h4_recipe:workload", target.GROUP),
        EntryPoint("broken", "h4_recipe_gone:workload", target.GROUP),
        EntryPoint("number", "sys:maxsize", target.GROUP),
    ]
    monkeypatch.setattr(target, "entry_points", lambda group: points if group == target.GROUP else [])


@pytest.mark.usefixtures("installed")
def test_recipes_are_found_by_name() -> None:
    assert [*recipes()] == ["broken", "foveated", "number"]
    found = resolve("foveated", ["n=2"])
    assert (found.name, found.workload.name, len(found.workload.data.source)) == ("foveated", "foveated", 2)
    assert isinstance(found.workload, fl.Workload)
    assert "is int, no function" in error("number")
    with pytest.raises(ModuleNotFoundError):
        resolve("broken")


@pytest.mark.usefixtures("installed")
def test_an_unknown_recipe() -> None:
    assert "Did you mean foveated? `frostline ls` lists the recipes" in error("foveatd")
    assert "Did you mean h4_recipe.py?" in error("h4_recipe")
    assert "Did you mean" not in error("zzz")


def test_an_installed_package_offers_recipes(folder: Path, monkeypatch) -> None:
    write(folder / "site" / "h4_offered.py")
    info = folder / "site" / "h4_offered-1.0.dist-info"
    write(info / "METADATA", "Metadata-Version: 2.1\nName: h4-offered\nVersion: 1.0\n")
    write(info / "entry_points.txt", f"[{target.GROUP}]\noffered = h4_offered:small\n")
    monkeypatch.syspath_prepend(str(folder / "site"))
    assert recipes()["offered"].value == "h4_offered:small"
    assert resolve("offered", ["n=4"]).name == "offered"
