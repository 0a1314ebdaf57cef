"""What clearhead.jax refuses: by clearhead's own errors, while JAX traces wherever that is possible."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clearhead.errors import ClearheadError, DerivativeError, DtypeError, EngineError, RuleError, ShapeError
from clearhead.jax import attention, observe

X, LABELS = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32), np.arange(4)


def total(q: Any, **rules: Any) -> Any:
    return attention(q, X, X, **rules).sum()


def of_slopes(slopes: Any) -> Any:
    return total(X, alibi_slopes=slopes)


AGAIN = r"attention has no such derivative in JAX: (.|\n)*hint: jax\.jvp of jax\.grad, jax\.grad of"
REFUSED: dict[str, tuple[Callable[[], Any], type[ClearheadError], str]] = {
    "jvp of jvp": (lambda: jax.jvp(lambda x: jax.jvp(total, (x,), (x,))[1], (X,), (X,)), DerivativeError, AGAIN),
    "grad of jvp": (lambda: jax.jit(jax.grad(lambda x: jax.jvp(total, (x,), (X,))[1]))(X), DerivativeError, AGAIN),
    "jacfwd of jacfwd": (lambda: jax.jacfwd(jax.jacfwd(total))(X), DerivativeError, AGAIN),
    "jacrev of hessian": (lambda: jax.jacrev(jax.hessian(total))(X), DerivativeError, AGAIN),
    "jvp by slopes": (lambda: jax.jvp(of_slopes, (X[0, 0, :2],), (X[0, 0, :2],)), RuleError, "alibi_slopes"),
    "slopes": (lambda: jax.grad(of_slopes)(X[0, 0, :2]), RuleError, "alibi_slopes is differentiated"),
    "a traced scale": (lambda: jax.jit(lambda x: total(X, scale=x))(1.0), RuleError, "scale is traced by JAX"),
    "a traced flag": (lambda: jax.jit(lambda x: total(X, causal=x))(True), RuleError, "causal is traced by JAX"),
    "label": (lambda: jax.jit(lambda x: observe(X, X, groups=(x, x)))(LABELS), DtypeError, "query_groups is traced by"),
    "a wrong width": (lambda: jax.jit(total)(X[..., :2]), ShapeError, "q has d_k 2 but k has d_k 3"),
    "a wrong width of k": (lambda: jax.grad(lambda k: attention(X, k, X).sum())(X[..., :2]), ShapeError, "q has d_k"),
    "a wrong mask": (lambda: jax.jit(lambda x: total(X, mask=x))(X[0, :3] > 0), ShapeError, "mask has shape"),
    "numbers as a mask": (lambda: jax.jit(lambda x: total(X, mask=x))(X[0]), DtypeError, "mask is float32"),
    "whole numbers": (lambda: jax.jit(attention)(*[np.arange(6).reshape(2, 3)] * 3), DtypeError, "q is int32"),
    "two dtypes": (lambda: jax.jit(total)(X.astype(np.float16)), DtypeError, "k is float32 but q is float16"),
    "no offset": (lambda: jax.jit(lambda x: total(x, causal=True))(X[:, :3]), RuleError, "causal and window need"),
    "a known length": (lambda: jax.jit(lambda x: total(x, kv_lengths=9))(X), RuleError, "kv_lengths is"),
    "a length, outside of jit": (lambda: total(X, kv_lengths=jnp.array(9)), RuleError, "kv_lengths is"),
    "a list": (lambda: attention(X.tolist(), X, X), DtypeError, "q is a list"),
    "no values": (lambda: attention(X, X, None), DtypeError, "v is a NoneType"),
    "an unknown rule": (lambda: attention(X, X, X, entropy=True), ClearheadError, "unknown rule `entropy`"),  # type: ignore[call-arg]
    "an unknown statistic": (lambda: observe(X, X, mass=True), ClearheadError, "unknown statistic `mass`"),  # type: ignore[call-arg]
    "no slice": (lambda: observe(X, X, queries=3), ClearheadError, "queries is 3: expected a slice"),  # type: ignore[arg-type]
    "an unknown engine": (lambda: attention(X, X, X, engine="cuda"), ClearheadError, "unknown engine `cuda`"),
    "another device": (
        lambda: jax.jit(total).trace(X).lower(lowering_platforms=("cuda",)), EngineError, "clearhead.jax computes on"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("refused", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_clearheads_own(refused: Callable[[], Any], error: type[ClearheadError], words: str):
    with pytest.raises(error, match=f"^{words}"):
        refused()


def test_what_is_not_differentiated_may_carry_what_has_no_derivative():
    slopes = np.ones(2, np.float32)
    result = jax.jit(jax.grad(lambda q, slopes: total(q, alibi_slopes=slopes)))(X, slopes)
    np.testing.assert_array_equal(result, jax.grad(lambda q: total(q, alibi_slopes=slopes))(X))
    value, slope = jax.jvp(lambda x: total(jax.lax.stop_gradient(x)) * x.sum(), (X,), (X,))
    assert value == slope


def test_a_wrong_traced_value_is_named_when_the_program_runs():
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lengths is"):
        jax.block_until_ready(jax.jit(lambda n: total(X, kv_lengths=n))(9))
