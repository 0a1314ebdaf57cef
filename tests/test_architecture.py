"""The house stands: imports go down only, parts stay small, what is heavy loads when used, names explain themselves."""

import ast
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Unpack

import pytest

import clearhead
from clearhead import engines
from clearhead.problem import Rules

PACKAGE = Path(clearhead.__file__).parent
FLOORS = tuple(
    floor.split()
    for floor in (  # from the ground up; a folder is one entry
        "errors axes device arrays values room threads files arrayfiles digits words picture notebook",
        "problem visibility merging observations operands",
        "reference",
        "engines",
        "glance view functional indexing matrix flow backward torch_autograd torch_op torch_graph cache torch",
        "nn watching distributed",
        "casefile steps story tracing layer claims diagnosing diagnosis model texts checkpoint hub explaining",
        "cli arguments __main__ report bench",
    )
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
LIGHT = {"clearhead", "numpy", "ml_dtypes"}


def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> set[str]:
    """The package's modules that this one imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {inner for name in names if (inner := _module_in(name)) and inner != module}
    return found


def _module_in(name: str) -> str | None:
    """clearhead.engines.base.Engine is in engines.base; what only the package itself holds is in no module."""
    parts = name.split(".")
    if parts[0] != "clearhead":
        return None
    for end in range(len(parts), 1, -1):
        inner = ".".join(parts[1:end])
        if inner in MODULES or f"{inner}.__init__" in MODULES:
            return inner if inner in MODULES else f"{inner}.__init__"
    return None


def floor_of(module: str) -> int:
    return FLOOR[module.split(".")[0]]


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"__init__"}))
def test_every_module_has_a_floor_and_imports_go_down_only(module: str):
    assert module.split(".")[0] in FLOOR, f"{module} is on no floor: place it in FLOORS of {Path(__file__).name}"
    for imported in imports_of(module):
        assert floor_of(imported) <= floor_of(module), f"{module} imports {imported}, which is on a floor above"


def test_no_module_imports_itself_by_a_way_round():
    tuple(TopologicalSorter({module: imports_of(module) for module in MODULES if module != "__init__"}).static_order())


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("engines.")))
def test_engines_know_words_and_meaning_only(module: str):
    for imported in imports_of(module):
        shared = floor_of(imported) == FLOOR["engines"] and imported.split(".")[-1] not in engines.NAMES
        above = imported == "engines.__init__"
        assert floor_of(imported) <= 1 or (shared and not above) or module == "engines.__init__", imported


@pytest.mark.parametrize("home", FLOORS[5])
def test_homes_in_frameworks_do_not_know_each_other(home: str):
    modules = [module for module in MODULES if module.split(".")[0] == home]
    assert modules
    for module in modules:
        strangers = {imported for imported in imports_of(module) if floor_of(imported) == 5} - set(modules)
        assert not strangers, f"{module} imports {strangers}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_parts_are_small(module: str):
    lines = MODULES[module].read_text(encoding="utf-8").count("\n")
    assert lines <= 400, f"{module} has {lines} lines"
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{module}.{node.name} has {length} lines"


def test_every_failure_can_be_replayed():
    """Numbers come from a seed that is written down or shown (seeds.fresh)."""
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("default_rng"):
                assert node.args, f"{path.name}:{node.lineno} draws from a generator without a seed"


@pytest.mark.parametrize("name", clearhead.__all__)
def test_no_public_name_swallows_unknown_options(name: str):
    for option in inspect.signature(getattr(clearhead, name)).parameters.values():
        assert option.kind is not option.VAR_KEYWORD or option.annotation == Unpack[Rules], option


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def loaded_by(statement: str) -> set[str]:
    """The packages that are not Python's own and that this statement loads."""
    program = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    return {name.split(".")[0] for name in run(program).split()} - set(sys.stdlib_module_names)


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import clearhead") <= LIGHT


def test_attention_and_the_matrix_need_numpy_only():
    program = "x = np.eye(3); ch.attention(x, x, x); ch.AttentionMatrix(x, x).observe(x, top=1, received=True)"
    assert loaded_by(f"import clearhead as ch, numpy as np; {program}") <= LIGHT


def test_the_import_is_quick():
    timed = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    ours, numpys = (min(float(run(timed.format(name))) for _ in range(3)) for name in ("clearhead", "numpy"))
    assert ours <= 3 * numpys


def test_public_names_are_sorted_and_found():
    assert list(clearhead.__all__) == sorted(clearhead.__all__)
    assert {*clearhead.__all__, "nn", "torch", "distributed"} <= set(dir(clearhead))
    with pytest.raises(AttributeError, match=r"^module 'clearhead' has no attribute 'atention'$"):
        clearhead.atention  # noqa: B018


def test_type_checkers_see_the_same_names():
    typed = [node for node in ast.walk(tree_of("__init__")) if isinstance(node, ast.ImportFrom)]
    seen = {a.name for node in typed if (node.module or "").startswith("clearhead.") for a in node.names}
    assert seen == set(clearhead.__all__)


def test_no_module_is_called_like_a_public_name():
    assert not set(clearhead.__all__) & {module.split(".")[0] for module in MODULES}


@pytest.mark.parametrize("name", clearhead.__all__)
def test_each_public_name_explains_itself_with_an_example(name: str):
    words = getattr(clearhead, name).__doc__
    assert words
    assert ">>>" in words, f"{name} has no example"
