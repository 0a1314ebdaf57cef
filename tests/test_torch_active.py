"""PyTorch's own attention while clearhead is active, against PyTorch's own while it is not; all in float64."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import clearhead.torch
from clearhead.torch import activate, active, deactivate, explain

TRACED = {"PyTorch: traced, transformed or watched"}
F64 = torch.float64


@pytest.fixture(autouse=True)
def _inactive() -> Iterator[None]:
    yield
    deactivate()
    assert not is_active()


def is_active() -> bool:
    x, before = torch.ones(1, 1, 1, 2), explain()
    F.scaled_dot_product_attention(x, x, x)
    return explain() != before


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def normal(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=F64, requires_grad=grad)


def with_gradients(call: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> list[Tensor]:
    """The output, and the gradients of every tensor that requires one."""
    output = call(*tensors, **options)
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    upstream = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def query_key_value(queries: int = 5, keys: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, queries, 4), normal(2, 4, keys, 4), normal(2, 4, keys, 4)


def swapped(*shape: int) -> Tensor:
    return normal(*shape, grad=False).transpose(1, 2).requires_grad_()


def seen(*shape: int) -> Tensor:
    mask = torch.rand(*shape) < 0.6
    mask[..., 1, :] = False  # a query without keys
    return mask


CALLS: dict[str, Callable[[], tuple[tuple[Tensor | None, ...], dict[str, Any]]]] = {
    "causal": lambda: (query_key_value(), {"is_causal": True}),
    "bool mask": lambda: ((*query_key_value(), seen(5, 7)), {}),
    "float mask with -inf": lambda: ((*query_key_value(), torch.where(seen(5, 7), 0.0, -torch.inf).double()), {}),
    "mask with a gradient": lambda: ((*query_key_value(), normal(4, 5, 7)), {}),
    "three axes": lambda: ((normal(3, 5, 4), normal(3, 7, 4), normal(3, 7, 4)), {"is_causal": True}),
    "grouped heads": lambda: ((normal(2, 4, 5, 4), *(normal(2, 2, 7, 4) for _ in "kv")), {"enable_gqa": True}),
    "no keys": lambda: (query_key_value(keys=0), {}),
    "heads behind lengths": lambda: (tuple(swapped(2, n, 4, 4) for n in (5, 7, 7)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_are_those_of_pytorch(name: str):
    tensors, options = CALLS[name]()
    theirs = with_gradients(F.scaled_dot_product_attention, *tensors, **options)
    with active():
        ours = with_gradients(F.scaled_dot_product_attention, *tensors, **options)
        with torch.no_grad():
            output = F.scaled_dot_product_attention(*tensors, **options)  # type: ignore[arg-type]
    assert explain() == {"clearhead": 2}
    close(ours, theirs)
    close(output, theirs[0])
    assert not output.numel() or output.stride() == ours[0].stride() == theirs[0].stride()


MODULES = ("nn.MultiheadAttention", "nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer", "nn.Transformer")


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_the_samples_of_pytorchs_own_modules(name: str, training: bool, monkeypatch: pytest.MonkeyPatch):  # noqa: FBT001
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)  # which computes padding otherwise
    from torch.testing._internal.common_modules import module_db  # here, since each worker collects every file

    (info,) = (info for info in module_db if info.name == name)
    tried = 0
    for sample in info.module_inputs_func(info, "cpu", F64, requires_grad=False, training=training):
        made, inputs = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **{**made.kwargs, "dtype": F64}).train(training)
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        if inputs is None:
            continue
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                theirs = module(*inputs.args, **inputs.kwargs)
                with active():
                    ours = module(*inputs.args, **inputs.kwargs)
            close(_finite(ours), _finite(theirs))
            tried += 1
    assert tried


def _finite(result: Any) -> list[Tensor]:
    """Queries without keys are NaN where PyTorch stores the weights."""
    return [x.nan_to_num() for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def test_autocast_and_inference_mode():
    x = torch.randn(1, 2, 3, 4)
    with active(), torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
    with active(), torch.inference_mode():
        y = x.clone()
        torch.testing.assert_close(F.scaled_dot_product_attention(y, y, y), clearhead.attention(x, x, x))
    assert explain() == {"clearhead": 1}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gate)])
def test_what_is_traced_or_transformed_is_pytorchs(backend: str):
    torch.compiler.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    leaves = [normal(2, 1, 7, 4) for _ in "qkv"]  # one head: inductor then compiles no C++, which takes ten seconds
    theirs = with_gradients(compiled, *leaves)
    torch.compiler.reset()
    with active():
        close(with_gradients(compiled, *leaves), theirs)
        grad = torch.func.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))
        close(grad(*(x.detach() for x in leaves)), torch.autograd.grad(attend(*leaves).sum(), leaves))
        assert {*explain()} == {*TRACED, "clearhead"}
    close(with_gradients(compiled, *leaves), theirs)


def test_the_choice_of_pytorchs_math_path_is_kept():
    q, k, v = query_key_value()
    with active(), sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), q)
    assert second.shape == q.shape
    assert explain() == {"PyTorch: torch.nn.attention.sdpa_kernel leaves out FLASH_ATTENTION": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_pytorchs():
    nested = torch.nested.nested_tensor([torch.randn(2, n, 4) for n in (3, 5)])
    theirs = F.scaled_dot_product_attention(nested, nested, nested)
    with active():
        ours = F.scaled_dot_product_attention(nested, nested, nested)
    for a, b in zip(ours.unbind(), theirs.unbind(), strict=True):
        torch.testing.assert_close(a, b)


WRONG: dict[str, Callable[[], Any]] = {
    "integers": lambda: attend(*(torch.ones(1, 2, 3, 4, dtype=torch.int64),) * 3),
    "two dtypes": lambda: attend(normal(1, 2, 3, 4), normal(1, 2, 3, 4).float(), normal(1, 2, 3, 4)),
    "mask": lambda: F.scaled_dot_product_attention(*(normal(1, 2, 3, 4),) * 3, attn_mask=normal(5, 7)),
    "a mask of another dtype": lambda: F.scaled_dot_product_attention(
        *(torch.randn(1, 2, 3, 4),) * 3, torch.randn(3, 3, dtype=torch.float16)
    ),
    "another device": lambda: attend(normal(1, 2, 3, 4), normal(1, 2, 3, 4).to("meta"), normal(1, 2, 3, 4)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_have_pytorchs_errors(name: str):
    def raised() -> tuple[type[BaseException], str] | None:
        try:
            WRONG[name]()
        except Exception as error:
            return type(error), str(error)
        return None

    theirs = raised()
    assert theirs is not None
    with active():
        assert raised() == theirs
    if name == "a mask of another dtype":
        assert explain() == {"PyTorch: clearhead refuses it with a DtypeError": 1}


class Names(TorchDispatchMode):
    """The names of PyTorch's operators that run, as its own counters and tracers see them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_watches_operators_sees_those_of_pytorch():
    leaves = query_key_value(7)
    names = []
    for _ in range(2):
        with Names() as watching:
            with_gradients(attend, *leaves)
        names.append(watching.names)
        activate()
    assert names[0] == names[1]
    assert {*explain()} == TRACED


def test_checkpoints_and_graphs_that_cross_the_end_of_a_block():
    tensors, options = query_key_value(7), {"is_causal": True}
    theirs = with_gradients(attend, *tensors)
    with active():
        close(with_gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), *tensors), theirs)
    assert explain() == {"clearhead": 1}  # PyTorch ends the second run early
    close(with_gradients(_inside, *tensors, **options), theirs)


def _inside(*tensors: Tensor, **options: Any) -> Tensor:
    with active():
        return F.scaled_dot_product_attention(*tensors, **options)


def test_the_encoder_does_without_its_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=F64), 2).eval()
    x, padding = normal(2, 5, 8, grad=False), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=F64)
    encoder.use_nested_tensor = False
    for options in ({}, {"mask": causal}, {"src_key_padding_mask": padding}):
        with torch.no_grad():
            theirs = encoder(x, **options)
            with active():
                close(encoder(x, **options), theirs)
        assert explain() == {"clearhead": 2}
        assert torch.backends.mha.get_fastpath_enabled()


def test_activating_twice_and_blocks_in_blocks():
    activate()
    activate()
    with active():
        deactivate()
        assert is_active()  # the block lasts
    assert not is_active()
    with pytest.raises(ZeroDivisionError), active(), active():
        raise ZeroDivisionError
    assert not is_active()
    activate()
    with active():
        pass
    assert is_active()
    deactivate()
    deactivate()


def test_blocks_may_overlap_in_threads():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with active():
            entered.set()
            assert leave.wait(20)

    thread = threading.Thread(target=other)
    with active():
        thread.start()
        assert entered.wait(20)
    assert is_active()  # in the other thread's block
    leave.set()
    thread.join()
    assert not is_active()
    with active():
        assert not explain()  # counted anew


@pytest.mark.gate
def test_import_installs_nothing_and_threads_may_attend_while_switching():
    """PyTorch's dispatcher crashes where it is changed while it is called."""
    program = """if True:
        import sys, threading, time, torch, clearhead.torch
        assert "torch._dynamo" not in sys.modules  # PyTorch's compiler, which takes as long to import as PyTorch
        def installed():
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            return has("aten::scaled_dot_product_attention", "AutogradCPU")
        before = installed()
        with clearhead.torch.active():
            inside = installed()
        print(before, inside, installed())
        x, done = torch.ones(1, 1, 2, 2, requires_grad=True), time.monotonic() + 1
        def attend():
            while time.monotonic() < done:
                torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
        with clearhead.torch.active():
            threads = [threading.Thread(target=attend) for _ in range(3)]
            [thread.start() for thread in threads]
        while time.monotonic() < done:
            with clearhead.torch.active():
                pass
        [thread.join() for thread in threads]
    """
    said = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "True", "False"]
    assert not said.stderr
