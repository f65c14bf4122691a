from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frostline.errors import UsageError
from frostline.fingerprint import code_of
from frostline.fingerprint.code import examine

HELPERS = """
    import numpy as np
    SIZE = 256
    def deep(x):
        return x * 2
    def resize(x, size=SIZE):
        return np.clip(deep(x), 0, size)
    def unused(x):
        return x
"""
WORK = """
    import helpers
    def fn(x):
        return helpers.resize(x) + 1
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * 2", "return x*2  # twice"),
        ("def deep(x):", '\n\n    def deep( x ):\n        """Doubles.\n\n        A lot."""'),
        ("def unused(x):\n        return x", "def unused(x):\n        return x + 1"),
        ("SIZE = 256", "# the side\n    SIZE = 256\n    OTHER = 3"),
        ("def deep(x):", "def deep(x: float) -> float:"),
        ("(deep(x), 0, size)", "(\n            deep((x)),\n            0, size,\n        )"),
    ],
)
def test_comments_white_space_docstrings_and_strangers_do_not_count(
    code: Callable[..., str], old: str, new: str
) -> None:
    assert old in HELPERS
    assert code(work=WORK, helpers=HELPERS) == code(work=WORK, helpers=HELPERS.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * 2", "return x * 3"),  # two calls down, in an imported module
        ("return x * 2", "return x * 2.0"),
        ("return x * 2", "return x * True"),
        ("SIZE = 256", "SIZE = 255"),
        ("np.clip(deep(x), 0, size)", "np.clip(deep(x), 1, size)"),
        ("np.clip(deep(x), 0, size)", "np.maximum(deep(x), size)"),
        ("size=SIZE", "size=32"),
        ("def deep", "@staticmethod\n    def deep"),
        ("import numpy as np", "import numpy.ma as np"),
    ],
)
def test_code_two_calls_down_constants_and_defaults_count(
    code: Callable[..., str], old: str, new: str
) -> None:
    assert old in HELPERS
    assert code(work=WORK, helpers=HELPERS) != code(work=WORK, helpers=HELPERS.replace(old, new))


def test_the_changed_function_is_named(lab: Any) -> None:
    before = code_of(lab.load(work=WORK, helpers=HELPERS))
    after = code_of(lab.load(helpers=HELPERS.replace("x * 2", "x * 3")))
    assert set(before.functions) == {"work.fn", "helpers.resize", "helpers.deep"}
    changed = [name for name in before.functions if before.functions[name] != after.functions[name]]
    assert changed == ["helpers.deep"]
    assert before.libraries == {"numpy": np.__version__}
    assert "numpy.clip" in [found.path for found in before.references]


@pytest.mark.parametrize(
    "work",
    [
        "from helpers import resize\ndef fn(x):\n    return resize(x)",
        "def fn(x):\n    from helpers import resize as r\n    return r(x)",
        "def fn(x):\n    import helpers as h\n    return h.resize(x)",
        "import helpers\ndef fn(x):\n    return [helpers.resize(y) for y in x]",
        "import helpers\ndef fn(x):\n    def g(y):\n        return helpers.resize(y)\n    return g(x)",
        "import helpers\nTABLE = {'a': helpers.resize}\ndef fn(x):\n    return TABLE['a'](x)",
        "import helpers\ndef fn(x, f=helpers.resize):\n    return f(x)",
        "import helpers\ndef make(f):\n    return lambda x: f(x)\nfn = make(helpers.resize)",
        "import helpers, functools\nfn = functools.partial(helpers.resize, size=3)",
        "import helpers, functools\n@functools.lru_cache\ndef fn(x):\n    return helpers.resize(x)",
        "import helpers\nclass C:\n    def __call__(self, x):\n        return helpers.resize(x)\nfn = C()",
        "import helpers\nclass C:\n    def go(self, x):\n        return helpers.resize(x)\nfn = C().go",
        "import helpers\nclass B:\n    f = staticmethod(helpers.resize)\nclass C(B):\n"
        "    def __call__(self, x):\n        return self.f(x)\nfn = C()",
        "import helpers\nclass C:\n    @property\n    def f(self):\n        return helpers.resize\nfn = C",
        "import helpers\ndef fn(x, name='resize'):\n    return getattr(helpers, name)(x)",
        "import torch, helpers\n@torch.no_grad()\ndef fn(x):\n    return helpers.resize(x)",
        "import functools, helpers\ndef deco(f):\n    @functools.wraps(f)\n    def inner(x):\n"
        "        return f(x)\n    return inner\n@deco\ndef fn(x):\n    return helpers.resize(x)",
        "import functools, helpers\n@functools.singledispatch\ndef fn(x):\n    return x\n"
        "@fn.register\ndef _(x: int):\n    return helpers.resize(x)",
        "import helpers\nasync def fn(x):\n    return helpers.resize(x)",
    ],
)
def test_every_way_to_a_function_is_followed(code: Callable[..., str], work: str) -> None:
    first = code(work=work, helpers=HELPERS)
    assert first == code(work=work, helpers=HELPERS + "    # a remark\n")
    assert first != code(work=work, helpers=HELPERS.replace("x * 2", "x * 3"))


def test_a_library_imported_inside_a_function_is_not_loaded_and_loading_it_changes_nothing(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(lab.folder / "site-packages")
    library = lab.folder / "site-packages" / "fancylib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("from fancylib.inner import Model\n__version__ = '1.5'\n")
    (library / "inner.py").write_text("class Model:\n    def load(self): ...\n")
    lab.names.add("fancylib")
    fn = lab.load(
        work="def fn(x):\n    import fancylib.inner as inner\n    from fancylib import Model as M\n"
        "    return M.load(x), inner.Model"
    )
    before = code_of(fn)
    assert "fancylib" not in sys.modules
    __import__("fancylib.inner")
    after = code_of(fn)
    assert after.digest == before.digest
    assert "fancylib.inner.Model.load" in [found.path for found in after.references]
    assert after.libraries == before.libraries
    (library / "__init__.py").write_text("from fancylib.inner import Model\n__version__ = '1.6'\n")
    assert code_of(fn).libraries != before.libraries


def test_packages_with_relative_imports_inside_functions(code: Callable[..., str]) -> None:
    package = {
        "pack__in____init__": "",
        "pack__in__a": "def fn(x):\n    from .b import deep\n    return deep(x)",
        "work": "from pack.a import fn",
    }
    first = code(**package, pack__in__b="def deep(x):\n    return x")
    assert first != code(**package, pack__in__b="def deep(x):\n    return -x")


def test_closures_count_by_value(code: Callable[..., str]) -> None:
    work = "def make(n):\n    def fn(x):\n        return x + n\n    return fn\nfn = make({})"
    assert code(work=work.format(1)) == code(work=work.format("0 + 1"))
    assert len({code(work=work.format(n)) for n in ("1", "2", "1.0", "'1'")}) == 4


def test_lambdas_on_one_line_are_told_apart(lab: Any) -> None:
    lab.write(work="pair = (lambda x: x + 1, lambda x: x + 2, lambda x: x + 1)")
    one, two, again = (code_of(f).digest for f in lab.load("work:pair"))
    assert one == again != two


def test_other_lambdas_of_the_line_do_not_count(code: Callable[..., str]) -> None:
    assert code(work="fn, g = lambda x: x + 1, lambda x: 2") == code(
        work="fn, g = lambda x: x + 1, lambda x: 3"
    )


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("scale = 2", "scale = 3", False),
        ("return self.n", "return -self.n", False),
        ("return other", "return -other", False),
        ("n: int = 1", "n: int = 2", False),
        ("n: int = 1", "n: int = 1  # how many", True),
        ("class Base:", 'class Base:\n    """Below."""', True),
        ("frozen=True", "frozen=False", False),
    ],
)
def test_classes_count_with_bases_attributes_and_fields(
    code: Callable[..., str], old: str, new: str, same: bool
) -> None:
    work = (
        "from dataclasses import dataclass\nclass Base:\n    scale = 2\n    def helper(self, other):\n"
        "        return other\n@dataclass(frozen=True)\nclass Deep(Base):\n    n: int = 1\n"
        "    def __call__(self, x):\n        return self.n\nfn = Deep\n"
    )
    if old == "frozen=True":  # a frozen dataclass cannot change its base's kind; only the decorator differs
        work = work.replace("class Deep(Base)", "class Deep")
    assert old in work
    assert (code(work=work) == code(work=work.replace(old, new))) is same


def test_recursion_ends(code: Callable[..., str]) -> None:
    work = "def fn(n):\n    return other(n - 1) if n else 0\ndef other(n):\n    return fn(n) + {}"
    assert code(work=work.format(1)) != code(work=work.format(2))


def test_calls_may_be_nested_deeper_than_the_stack(code: Callable[..., str]) -> None:
    work = "\n".join(f"def f{i}(x):\n    return f{i + 1}(x)" for i in range(1500))
    work += "\ndef f1500(x):\n    return {}\nfn = f0"
    assert code(work=work.format("x")) != code(work=work.format("-x"))


def test_expressions_may_be_nested_deeply(code: Callable[..., str]) -> None:
    work = "def fn(x):\n    return " + " + ".join(f"x[{i}]" for i in range(600))
    assert code(work=work) != code(work=work.replace("x[0]", "x[1]"))


def test_text_is_not_taken_for_the_shape_of_the_code(code: Callable[..., str]) -> None:
    assert code(work="def fn(x):\n    return [' ]', x]") != code(work="def fn(x):\n    return [' ]', [x]]")
    assert code(work="def fn(x):\n    return ['a', 'b']") != code(work="def fn(x):\n    return ['a b']")


def test_enums_namedtuples_loggers_and_patterns_are_understood(code: Callable[..., str]) -> None:
    work = """
        import enum, logging, re, threading
        from collections import namedtuple
        from typing import NamedTuple
        log, lock = logging.getLogger(__name__), threading.Lock()
        class Kind(enum.Enum):
            A = 1
            B = 2
        Point = namedtuple("Point", "x y")
        class Other(NamedTuple):
            z: int = 3
        WORD = re.compile("a+")
        def fn(x):
            log.info("x")
            with lock:
                return Kind.A, Point(1, 2), Other(), WORD.match(x)
    """
    assert code(work=work) == code(work=work)
    for old, new in [("A = 1", "A = 3"), ('"a+"', '"b+"'), ("z: int = 3", "z: int = 4"), ('"x y"', '"x z"')]:
        assert code(work=work) != code(work=work.replace(old, new)), old


def test_fields_of_a_named_tuple_are_never_files(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run called as one of them, in the working directory, must not change what is frozen."""
    fn = lab.load(
        work="from typing import NamedTuple\nclass P(NamedTuple):\n    broken: bool\n"
        "def fn(x):\n    return P(x).broken"
    )
    monkeypatch.chdir(tmp_path)
    before = examine(fn, files="stage")[0].digest
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{}")
    assert examine(fn, files="stage")[0].digest == before


def test_a_global_that_the_function_sets_itself_does_not_count(lab: Any) -> None:
    fn = lab.load(work="net = None\ndef fn(x):\n    global net\n    net = net or [x]\n    return net")
    before = code_of(fn).digest
    fn(3)
    assert code_of(fn).digest == before


def test_global_arrays_tensors_and_networks_count_by_content(lab: Any) -> None:
    fn = lab.load(
        work="import numpy as np, torch\nmean = np.zeros(3)\nstd = torch.ones(3)\n"
        "net = torch.nn.Linear(2, 2)\ndef fn(x):\n    return net((x - mean) / std)"
    )
    seen = [code_of(fn).digest]
    for name in ("mean", "std"):
        fn.__globals__[name][0] = 7
        seen.append(code_of(fn).digest)
    fn.__globals__["net"].bias.data[0] += 1
    seen.append(code_of(fn).digest)
    assert len(set(seen)) == 4


def test_references_name_what_an_audit_looks_for(lab: Any) -> None:
    fn = lab.load(
        work="""
        import os, random, time, uuid, datetime as d
        from datetime import datetime
        from time import time as now
        import numpy as np
        import torch
        def fn(x):
            import secrets
            torch.initial_seed(), torch.utils.data.get_worker_info(), secrets.token_hex()
            datetime.now(), d.datetime.utcnow
            return time.time(), random.random(), np.random.rand(2), os.urandom(2), uuid.uuid4(), now()
        """
    )
    found = {r.path: r for r in code_of(fn).references}
    for path in [
        *(
            "time.time",
            "random.random",
            "numpy.random.rand",
            "os.urandom",
            "uuid.uuid4",
            "torch.initial_seed",
        ),
        *("datetime.datetime.now", "datetime.datetime.utcnow", "torch.utils.data.get_worker_info"),
        "secrets.token_hex",
    ]:
        assert path in found, sorted(found)
    assert any(r.container is time and r.name == "time" for r in code_of(fn).references)
    assert any(r.name == "now" and r.value is time.time for r in code_of(fn).references)


def test_global_generators_do_not_make_the_code_change(lab: Any) -> None:
    fn = lab.load(
        work="from random import random, shuffle\nfrom numpy.random import rand\ndef fn(x):\n"
        "    shuffle(x)\n    return random(), rand()"
    )
    before = code_of(fn).digest
    random.random(), np.random.rand()
    assert code_of(fn).digest == before


# --- what runs, and what the file says -----------------------------------------------------------------


def test_an_edit_after_the_import_is_never_taken_for_what_runs(lab: Any) -> None:
    old = lab.load(work="def fn(x):\n    return x + 1")
    (lab.folder / "work.py").write_text("def fn(x):\n    return x + 2222")
    with pytest.raises(UsageError, match="edited since it was imported"):
        code_of(old)


def test_the_old_text_is_used_while_it_is_known_and_the_new_one_in_a_new_process(lab: Any) -> None:
    old = lab.load(work="def fn(x):\n    return x + 1")
    before = code_of(old).digest
    (lab.folder / "work.py").write_text("def fn(x):\n    return x + 2222")
    assert code_of(old).digest == before
    show = "import work, frostline.fingerprint as f; print(f.code_of(work.fn).digest)"
    assert lab.run(show) == code_of(lab.load()).digest != before


def test_a_comment_added_after_the_import_moves_the_lines_and_nothing_else(lab: Any) -> None:
    text = "def other(x):\n    return 0\ndef fn(x):\n    '''Says.'''\n    return x + 1"
    before = code_of(lab.load(work=text)).digest
    lab.write(work=text)
    fn = lab.load()
    (lab.folder / "work.py").write_text("# one\n# two\n\n" + text.replace("Says", "Says more"))
    assert code_of(fn).digest == before


def test_functions_of_a_test_file_are_found_though_pytest_rewrites_them() -> None:
    def checked(x: int) -> int:
        assert x > 0
        return x

    assert any(name.endswith("checked") for name in code_of(checked).functions)


def test_all_that_has_no_source_is_said_at_once(lab: Any) -> None:
    space: dict[str, Any] = {"__name__": "nowhere"}
    exec("def a(x):\n    return b(x)\ndef b(x):\n    return x", space)
    with pytest.raises(UsageError, match="version="):
        code_of(space["a"])
    fn = lab.load(work="def fn(x):\n    return a(x) + b(x)\na = b = None")
    fn.__globals__.update(a=space["a"], b=space["b"])
    with pytest.raises(UsageError) as caught:
        code_of(fn)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("seed", ["0", "1", "77"])
def test_the_digest_is_the_same_in_every_process(lab: Any, seed: str) -> None:
    work = WORK + "    import torch\n    NAMES = {'a', 'b', 'c', ('d', 1)}\n    def g(x):\n"
    work += "        return fn(x), NAMES, {y for y in 'abc'}, x in {'q', 'r', 's'}\n"
    here = code_of(lab.load("work:g", work=work, helpers=HELPERS)).digest
    show = "import work, frostline.fingerprint as f; print(f.code_of(work.g).digest)"
    assert lab.run(show, PYTHONHASHSEED=seed) == here


def test_a_script_and_its_import_agree(lab: Any) -> None:
    lab.write(
        script=WORK + "    import frostline.fingerprint as f\n    print(f.code_of(fn).digest)",
        helpers=HELPERS,
    )
    assert lab.run(
        "import runpy; runpy.run_path('%s', run_name='__main__')" % (lab.folder / "script.py")
    ) == (lab.run("import script"))


def test_moving_a_function_to_another_module_keeps_its_digest(code: Callable[..., str]) -> None:
    body = "def deep(x):\n    return x * 2\n"
    here = code(work="from one import deep\ndef fn(x):\n    return deep(x)", one=body)
    assert here == code(work="from two import deep\ndef fn(x):\n    return deep(x)", two=body)


def test_library_objects_count_by_name() -> None:
    assert code_of(np.clip).digest != code_of(np.add).digest
    assert code_of(functools.partial(np.clip, 1)).digest == code_of(functools.partial(np.clip, 2)).digest
    assert code_of(Path.exists).functions == {}
