"""The architecture: imports go down, modules and calls are short, heavy packages load late, names are documented."""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
import clearhead as ch
from clearhead import engines
from clearhead.core.problem import Rules
from clearhead.core.statistics import Asked
from clearhead.diagnosing.verdict import Diagnosis
from clearhead.engines import native
from clearhead.explaining.head_steps import HeadSteps
from clearhead.textbook.trace import TokenTrace, Trace
from clearhead.watching.seen import Seen
from programs import python

PACKAGE = Path(clearhead.__file__).parent
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
TREE = README.partition("\nsrc/clearhead/\n")[2].partition("\nnative/")[0]
ORDER = re.findall(
    r"(?<![\w/])(\w+)(?:/|\.py)(?=[ \n]|$)", re.sub(r"(?m)(?<=\S)  .*$|^ {6,}.*$", "", TREE)
)  # lowest first
FLOOR = {name: floor for floor, name in enumerate(ORDER)}
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
INNER = sorted(set(MODULES) - {"__init__"})
LIGHT = {"clearhead", "numpy", "ml_dtypes"}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> set[str]:
    """The package's modules that this one imports, anywhere in it."""
    result = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        result |= {inner for name in names if (inner := _module_in(name)) and inner != module}
    return result


def _module_in(name: str) -> str | None:
    """The module of a dotted name: engines.base for clearhead.engines.base.Engine; none for the package's own."""
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


def test_every_module_has_a_floor_and_imports_go_down_only():
    unplaced = {module for module in INNER if module.split(".")[0] not in FLOOR}
    assert not unplaced, "on no floor: place them in README's tree"
    upward = [(module, x) for module in INNER for x in imports_of(module) if floor_of(x) > floor_of(module)]
    assert not upward, "modules and what they import from a floor above"


def test_there_are_no_import_cycles():
    tuple(TopologicalSorter({module: imports_of(module) for module in MODULES if module != "__init__"}).static_order())


def test_engines_import_the_core_and_not_each_other():
    for module in INNER:
        if module.startswith("engines.") and module != "engines.__init__":
            for imported in imports_of(module):
                shared = imported.startswith("engines.") and imported.split(".")[-1] not in engines.NAMES
                below = floor_of(imported) < FLOOR["engines"]
                assert below or (shared and imported != "engines.__init__"), f"{module} imports {imported}"


def test_modules_and_functions_are_short():
    for module, path in MODULES.items():
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 400, f"{module} has {lines} lines"
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 80, f"{module}.{node.name} has {length} lines"


PUBLIC_UNDERSCORES = {
    "_fields": "of named tuples",
    "_asdict": "of named tuples",
    "_replace": "of named tuples",
    "_make": "of named tuples",
    "_C": "PyTorch's compiled part: what functorch and autograd are doing has no public name",
    "_functorch": "in torch._C, as above",
    "_disabled_torch_function_impl": "in torch._C: operations of a subclass of Tensor give plain tensors",
    "_is_any_autocast_enabled": "in torch._C: does autocast cast on some device?",
    "_len_torch_dispatch_stack": "in torch._C: is a mode of PyTorch's dispatcher about?",
    "_dynamo_marked_constant": "what torch.compiler.assume_constant_result sets, without loading the compiler",
    "_fused_sdp_choice": "of torch: which of its operators scaled_dot_product_attention would call",
    "_current_graph_task_id": "in torch._C, as above",
    "_will_engine_execute_node": "in torch._C: does a backward pass come to this node?",
    "_get_tracing_state": "in torch._C, as above",
    "_current_level": "of torch.autograd.forward_ad: is a dual number about?",
    "_version": "of tensors: was it written to in place?",
    "_attn_implementation": "of Transformers' configurations: which attention runs",
    "_supports_sdpa": "of Transformers' models: do all of its classes take bool masks?",
    "_original_attn_impl": "of Transformers' batching manager: the attention that the model gets back at the end",
}


def private_names_of_others(tree: ast.Module) -> set[str]:
    """Names with an underscore that a module imports from other modules or reads from their objects."""
    local = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (local if ours else used).add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            local.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead."):
            used |= {alias.name for alias in node.names}
    return {name for name in used - local if name.startswith("_") and not name.endswith("__")}


def test_no_module_reads_private_names_of_another_module():
    for module in MODULES:
        result = private_names_of_others(tree_of(module)) - set(PUBLIC_UNDERSCORES)
        assert not result, f"{module} reads {sorted(result)}, which other modules keep to themselves"


def test_the_table_of_types_names_those_that_rooms_share():
    text = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## The types\n")[2].partition("\n## ")[0].replace("\\", "")
    rows = [line.split(" | ")[:2] for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) <= 40
    named = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    for names, where in rows:
        trees = [tree_of(place.removesuffix(".py").replace("/", ".")) for place in where.split(", ")]
        classes = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
        assert classes >= set(re.findall(r"`(\w+)`", names)), where
    rooms: dict[str, set[str]] = {}
    for module in INNER:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ImportFrom) and (home := _module_in(node.module or "")) not in (None, "errors"):
                kinds = {each.name for each in tree_of(home).body if isinstance(each, ast.ClassDef)}
                for name in kinds.intersection(alias.name for alias in node.names):
                    rooms.setdefault(name, set()).update({module.split(".")[0]} - {home.split(".")[0]})
    assert {name for name, others in rooms.items() if len(others) > 2} <= named


def test_every_failure_can_be_replayed():
    """Random numbers come from a fixed seed or from one that a failing test shows (seeds.fresh)."""
    for path in Path(__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"default_rng\(\s*\)", text), f"{path.name} draws from a generator without a seed"


@pytest.mark.parametrize("name", clearhead.__all__)
def test_no_public_name_swallows_unknown_options(name: str):
    for option in inspect.signature(getattr(clearhead, name)).parameters.values():
        assert option.kind is not option.VAR_KEYWORD, option


def test_each_option_is_shown_with_its_default():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 8))
    shown = inspect.signature(clearhead.attention).parameters
    given: Any = {name: shown[name].default for name in Rules.__annotations__}
    assert np.array_equal(clearhead.attention(q, k, v, **given), clearhead.attention(q, k, v))
    shown = inspect.signature(clearhead.AttentionMatrix.observe).parameters
    given = {name: shown[name].default for name in Asked.__annotations__}
    seen = clearhead.AttentionMatrix(q, k).observe(v, **given)
    assert all(getattr(seen, name) is None for name in given)
    assert {"entropy", "top", "causes"} <= set(inspect.signature(clearhead.watch).parameters)


def loaded_by(statement: str) -> set[str]:
    """The third-party packages that this statement loads."""
    program = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    return {name.split(".")[0] for name in python(program).split()} - set(sys.stdlib_module_names)


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import clearhead") <= LIGHT


def test_attention_and_the_matrix_need_numpy_only():
    program = "x = np.eye(3); ch.attention(x, x, x); ch.AttentionMatrix(x, x).observe(x, top=1, received=True)"
    assert loaded_by(f"import clearhead as ch, numpy as np; {program}") <= LIGHT


def test_matrices_load_nothing_that_shows_them():
    program = "x = np.eye(3); A = ch.AttentionMatrix(x, x); A[0, 1], A.top(1), A.cut_effects(x, x).by_key(), repr(A)"
    loaded = python(f"import sys, clearhead as ch, numpy as np; {program}; print(*sys.modules)").split()
    assert "clearhead.ops.matrix" in loaded
    assert not [name for name in loaded if name.startswith(("clearhead.view", "clearhead.words", "clearhead.tables"))]


def test_the_import_is_quick():
    timed = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    ours, numpys = (min(float(python(timed.format(name))) for _ in range(3)) for name in ("clearhead", "numpy"))
    assert ours <= 3 * numpys


def test_public_names_are_sorted_and_found():
    assert list(clearhead.__all__) == sorted(clearhead.__all__)
    assert dir(clearhead) == sorted([*clearhead.__all__, "__version__", "nn", "testing", "torch"])
    with pytest.raises(AttributeError, match=r"^module 'clearhead' has no attribute 'atention'$"):
        clearhead.atention  # noqa: B018


def test_type_checkers_see_the_same_names():
    typed = [node for node in ast.walk(tree_of("__init__")) if isinstance(node, ast.ImportFrom)]
    seen = {
        a.name
        for node in typed
        if (node.module or "").startswith("clearhead.")
        for a in node.names
        if (a.asname or a.name) == a.name
    }
    assert seen == {"__version__", *clearhead.__all__}


def test_no_module_has_the_name_of_a_public_object():
    assert not set(clearhead.__all__) & {module.split(".")[0] for module in MODULES}


@pytest.mark.parametrize("name", clearhead.__all__)
def test_each_public_name_has_a_docstring_with_an_example(name: str):
    words = getattr(clearhead, name).__doc__
    assert words
    assert ">>>" in words, f"{name} has no example"


def described_here() -> dict[str, Any]:
    """Public functions and methods of the folders above engines/ and ops/, by name."""
    import clearhead.nn
    import clearhead.torch

    owners = [clearhead.nn.KVCache, clearhead.nn.MultiHeadAttention, Diagnosis, HeadSteps, Seen, TokenTrace, Trace]
    rooms = ("textbook", "diagnosing", "explaining", "watching", "changing")
    functions = {
        n: f
        for n in clearhead.__all__
        if inspect.isfunction(f := getattr(clearhead, n)) and f.__module__.split(".")[1] in rooms
    }
    functions["scaled_dot_product_attention"] = clearhead.torch.scaled_dot_product_attention
    methods = {f"{owner.__name__}.{name}": getattr(owner, name) for owner in owners for name in vars(owner)}
    return functions | {name: f for name, f in methods.items() if "._" not in name and callable(f)}


def test_a_docstring_names_the_errors_that_its_function_raises():
    """Every public function, and every other one that raises directly or through a check or reader that it calls."""
    for name, function in described_here().items():
        words, source = function.__doc__, inspect.getsource(function)
        assert words, f"{name} does not say what it does"
        if "raise " in source or "read_" in source or "whole_number(" in source or "." not in name:
            assert "Raise" in words, f"{name} does not say what it raises"
        if "." not in name:
            assert ">>>" in words, f"{name} has no example"


FOLDER = str(Path(ch.__file__).parent)
Q = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype(np.float32)
T = torch.from_numpy(Q)
A = ch.AttentionMatrix(Q, Q, causal=True)


def entered(call: Callable[[], Any]) -> tuple[set[str], set[CodeType]]:
    """The files and functions of the package that the third call like this enters."""
    functions: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        inner = frame.f_code.co_name.startswith("<")  # a comprehension, which later versions of Python do not enter
        if event == "call" and not inner and frame.f_code.co_filename.startswith(FOLDER):
            functions.add(frame.f_code)

    call(), call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {code.co_filename for code in functions}, functions


CALLS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "attention of arrays": (lambda: ch.attention(Q, Q, Q, causal=True), 8, 20),
    "attention of tensors": (lambda: ch.attention(T, T, T, causal=True), 12, 30),
    "A[0, 1, 3]": (lambda: A[0, 1, 3], 10, 30),
}


@pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")
@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_enters_few_files_and_functions(name: str):
    call, most_files, most_functions = CALLS[name]
    files, functions = entered(call)
    assert len(files) <= most_files, sorted(Path(file).name for file in files)
    assert len(functions) <= most_functions, sorted(code.co_qualname for code in functions)
