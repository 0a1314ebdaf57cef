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
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import clearhead.torch
from clearhead.torch import activate, active, deactivate, explain
from composed import COMPOSED, by_math

DIRECT, FUSED, GRADIENT, FAST_PATH = "itself", "the fused operator, in", "gradient", "the fast path"
DIRECT_ALONE = "scaled_dot_product_attention itself"
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


def routes(by: str = "clearhead") -> str:
    return "\n".join(name.removeprefix(f"{by}: ") for name in explain() if name.startswith(by))


def with_gradients(call: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> list[Tensor]:
    """The output, and the gradients of every tensor that requires one."""
    output = call(*tensors, **options)
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    upstream = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def query_key_value(queries: int = 5, keys: int = 7, d_k: int = 4, d_v: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, queries, d_k), normal(2, 4, keys, d_k), normal(2, 4, keys, d_v)


def swapped(*shape: int) -> Tensor:
    return normal(*shape, grad=False).transpose(1, 2).requires_grad_()


def seen(*shape: int) -> Tensor:
    mask = torch.rand(*shape) < 0.6
    mask[..., 1, :] = False  # a query without keys
    return mask


CALLS: dict[str, Callable[[], tuple[tuple[Tensor | None, ...], dict[str, Any], str]]] = {
    "plain": lambda: (query_key_value(), {}, FUSED),
    "causal": lambda: (query_key_value(), {"is_causal": True}, FUSED),
    "causal, more queries": lambda: (query_key_value(9, 6), {"is_causal": True}, FUSED),
    "scale": lambda: (query_key_value(), {"scale": 0.3}, FUSED),
    "bool mask": lambda: ((*query_key_value(), seen(5, 7)), {}, FUSED),
    "bool mask for each head": lambda: ((*query_key_value(), seen(2, 4, 5, 7)), {}, FUSED),
    "float mask": lambda: ((*query_key_value(), normal(2, 1, 5, 7, grad=False)), {}, FUSED),
    "float mask with -inf": lambda: (
        (*query_key_value(), torch.where(seen(5, 7), 0.0, -torch.inf).double()),
        {},
        FUSED,
    ),
    "mask with a gradient": lambda: ((*query_key_value(), normal(4, 5, 7)), {}, DIRECT),
    "narrower values": lambda: (query_key_value(d_v=3), {}, DIRECT),
    "three axes": lambda: ((normal(3, 5, 4), normal(3, 7, 4), normal(3, 7, 4)), {"is_causal": True}, DIRECT),
    "two axes": lambda: ((normal(5, 4), normal(7, 4), normal(7, 4)), {}, DIRECT),
    "batch shared": lambda: ((normal(2, 4, 5, 4), normal(1, 4, 7, 4), normal(4, 7, 4)), {}, DIRECT),
    "grouped heads": lambda: ((normal(2, 4, 5, 4), *(normal(2, 2, 7, 4) for _ in "kv")), {"enable_gqa": True}, FUSED),
    "no keys": lambda: (query_key_value(keys=0), {}, DIRECT),
    "no queries": lambda: (query_key_value(queries=0), {}, DIRECT),
    "heads behind lengths": lambda: (tuple(swapped(2, n, 4, 4) for n in (5, 7, 7)), {}, FUSED),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_are_those_of_pytorch(name: str):
    tensors, options, through = CALLS[name]()
    theirs = with_gradients(F.scaled_dot_product_attention, *tensors, **options)
    with active():
        ours = with_gradients(F.scaled_dot_product_attention, *tensors, **options)
    assert through in routes()
    assert not routes("PyTorch")
    close(ours, theirs)
    with torch.no_grad(), active():
        output = F.scaled_dot_product_attention(*tensors, **options)  # type: ignore[arg-type]
    assert DIRECT in routes()
    close(output, theirs[0])
    if through == FUSED:
        assert output.stride() == ours[0].stride() == theirs[0].stride()


MODULES = ("nn.MultiheadAttention", "nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer", "nn.Transformer")


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_the_samples_of_pytorchs_own_modules(name: str, training: bool):  # noqa: FBT001
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
    assert DIRECT in routes()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("d_v", [pytest.param(1, marks=pytest.mark.gate), 2])  # PyTorch's fuses the second
@pytest.mark.parametrize("name", COMPOSED)
def test_torch_func_sees_clearheads_derivatives(name: str, d_v: int):
    tensors = normal(1, 1, 2, 2, grad=False), normal(1, 1, 3, 2, grad=False), normal(1, 1, 3, d_v, grad=False)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    theirs = COMPOSED[name](lambda *x: by_math(*x, mask), tensors)
    with active():
        ours = COMPOSED[name](lambda *x: F.scaled_dot_product_attention(*x, mask), tensors)
    close(ours, theirs)
    assert routes() == DIRECT_ALONE
    assert not routes("PyTorch")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torch_func_may_not_hand_over_is_pytorchs():
    q, k, v = (x.detach() for x in query_key_value())
    with active(), sdpa_kernel(SDPBackend.MATH):
        theirs = torch.func.jvp(lambda *x: by_math(*x, is_causal=True), (q, k, v), (q, k, v))
        close(torch.func.jvp(attend, (q, k, v), (q, k, v)), theirs)
    assert routes("PyTorch") == "traced, transformed or watched: what it becomes is counted where that runs"
    traced = torch.fx.experimental.proxy_tensor.make_fx(torch.func.grad(lambda q: attend(q, k, v).sum()))
    with active():
        code = traced(q).code
    assert "_scaled_dot_product_flash_attention_for_cpu" in code


def test_dropout_under_vmap_draws_as_vmap_says():
    x, eye = torch.zeros(3, 1, 6, 2), torch.eye(6)[None]
    with active():
        for randomness in ("different", "same"):
            call = lambda x: F.scaled_dot_product_attention(x, x, eye, dropout_p=0.5)  # noqa: E731
            result = torch.func.vmap(call, randomness=randomness)(x) != 0
            assert torch.equal(result[0], result[1]) == (randomness == "same")
            assert result.any()
            assert not result.all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gate)])
def test_compiled_code_follows_the_switch(backend: str):
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: attend(*x) * 2, backend=backend, fullgraph=True)
    leaves = query_key_value(7)
    theirs = with_gradients(compiled, *leaves)
    with active():
        close(with_gradients(compiled, *leaves), theirs)
        assert FUSED in routes()
        assert GRADIENT in routes()
        torch.compiler.reset()
        close(with_gradients(compiled, *leaves), theirs)  # compiled while active
        counts = explain()
    close(with_gradients(compiled, *leaves), theirs)
    assert explain() == counts


def test_the_choice_of_pytorchs_math_path_is_kept():
    q, k, v = query_key_value()
    with active(), sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), q)
    assert second.shape == q.shape
    assert routes("PyTorch") == "torch.nn.attention.sdpa_kernel leaves out FLASH_ATTENTION"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_pytorchs():
    nested = torch.nested.nested_tensor([torch.randn(2, n, 4) for n in (3, 5)])
    theirs = F.scaled_dot_product_attention(nested, nested, nested)
    with active():
        ours = F.scaled_dot_product_attention(nested, nested, nested)
    for a, b in zip(ours.unbind(), theirs.unbind(), strict=True):
        torch.testing.assert_close(a, b)
    assert routes("PyTorch") == "a nested tensor"


WRONG: dict[str, Callable[[], Any]] = {
    "integers": lambda: attend(*(torch.ones(1, 2, 3, 4, dtype=torch.int64),) * 3),
    "two dtypes": lambda: attend(normal(1, 2, 3, 4), normal(1, 2, 3, 4).float(), normal(1, 2, 3, 4)),
    "two widths": lambda: attend(normal(1, 2, 3, 4), normal(1, 2, 3, 5), normal(1, 2, 3, 5)),
    "one axis": lambda: attend(normal(4), normal(4), normal(4)),
    "batches": lambda: attend(normal(2, 2, 3, 4), normal(3, 2, 3, 4), normal(3, 2, 3, 4)),
    "mask": lambda: F.scaled_dot_product_attention(*(normal(1, 2, 3, 4),) * 3, attn_mask=normal(5, 7)),
    "a mask of another dtype": lambda: F.scaled_dot_product_attention(
        *(torch.randn(1, 2, 3, 4),) * 3, torch.randn(3, 3, dtype=torch.float16)
    ),
    "dropout": lambda: F.scaled_dot_product_attention(*(normal(1, 2, 3, 4),) * 3, dropout_p=2.0),
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
        assert routes("PyTorch") == "clearhead refuses it with a DtypeError"


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
    assert FUSED in routes() or GRADIENT in routes()


def test_checkpoints():
    leaves = query_key_value(7)
    theirs = with_gradients(attend, *leaves)
    with active():
        close(with_gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), *leaves), theirs)
    assert GRADIENT in routes()


def test_a_graph_may_cross_the_end_of_a_block():
    for tensors, options in ((query_key_value(7), {"is_causal": True}), ((*query_key_value(), seen(5, 7)), {})):
        theirs = with_gradients(F.scaled_dot_product_attention, *tensors, **options)
        close(with_gradients(_inside, *tensors, **options), theirs)
        output = F.scaled_dot_product_attention(*tensors, **options)
        upstream = torch.linspace(-1, 2, output.numel(), dtype=F64).reshape(output.shape)
        with active():
            close(list(torch.autograd.grad(output, tensors[:3], upstream)), theirs[1:])
        assert routes() == "the fused operator's gradient"


def _inside(*tensors: Tensor, **options: Any) -> Tensor:
    with active():
        return F.scaled_dot_product_attention(*tensors, **options)


def test_the_encoders_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=F64), 2).eval()
    x, padding = normal(2, 5, 8, grad=False), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=F64)
    encoder.use_nested_tensor = False
    for options in ({}, {"mask": causal}, {"src_key_padding_mask": padding}):
        with torch.no_grad():
            theirs = encoder(x, **options)
            with active():
                close(encoder(x, **options), theirs)
        assert FAST_PATH in routes()
        assert [*explain().values()] == [2]


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
def test_switching_while_other_threads_attend():
    """PyTorch's dispatcher crashes where it is changed while it is called."""
    program = """if True:
        import threading, time, torch, clearhead.torch
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
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.gate
def test_nothing_is_installed_on_import_or_left_behind():
    program = """if True:
        import torch, clearhead.torch
        def installed():
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            return has("aten::scaled_dot_product_attention", "AutogradCPU")
        before = installed()
        with clearhead.torch.active():
            inside = installed()
        print(before, inside, installed())
    """
    said = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "True", "False"]
    assert not said.stderr
