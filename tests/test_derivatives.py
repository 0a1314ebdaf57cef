"""The derivatives of a GPT-2 in NumPy: against finite differences, and against PyTorch's on the same weights."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.changing.edits import cut
from clearhead.errors import FileError, RuleError, SelectionError
from clearhead.explaining.derivatives import derivatives, difference, target_of
from clearhead.explaining.rerun import Edge
from clearhead.models.decoder import Decoder
from clearhead.models.folder import config_of
from clearhead.models.functions import ACTIVATIONS, NormWeights
from clearhead.models.model import Model, load
from clearhead.models.protocol import ForwardPass, Variant
from clearhead.models.variants import again as run_again
from clearhead.models.weights import Weights
from dense_gpt2 import gpt2_weights, in_float64, random_peer, with_gpt2_weights
from programs import peak_of, python
from seeds import fresh

STEP = 1e-5
KEYS = {  # of config.json
    "layers": "n_layer", "heads": "n_head", "d_model": "n_embd", "d_mlp": "n_inner", "positions": "n_positions",
    "vocabulary": "vocab_size", "activation": "activation_function", "tied": "tie_word_embeddings",
}  # fmt: skip
SMOOTH = sorted({*ACTIVATIONS} - {"relu"})  # which has a corner, where finite differences fail
shipped = cache(load)


def several(times):
    """Run a test so many times, each with fresh numbers."""
    return pytest.mark.parametrize("trial", range(times))


def drawn(rng, dtype=np.float64, activation=None, **sizes):
    """A random GPT-2 of random sizes, with weights large enough that attention is far from uniform."""
    heads, d_k = int(rng.integers(1, 4)), int(rng.integers(4, 9))
    data = {"model_type": "gpt2", "n_layer": int(rng.integers(1, 4)), "n_head": heads, "n_embd": heads * d_k}
    data |= {"n_inner": 11, "n_positions": 40, "vocab_size": 23}
    data["activation_function"] = activation or str(rng.choice(sorted(ACTIVATIONS)))
    flags = ("tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    data |= {name: bool(rng.integers(2)) for name in flags}
    data |= {KEYS.get(name, name): value for name, value in sizes.items()}
    config = config_of(Path("config.json"), data)
    d, mlp, weights = config.d_model, config.d_mlp, {}
    shapes = {f"attn.w_{p}": (d, d) for p in "qkv"} | {"attn.c_proj.weight": (d, d)}
    shapes |= {"mlp.c_fc.weight": (d, mlp), "mlp.c_proj.weight": (mlp, d)}
    linear = {f"h.{layer}.{name}": shape for layer in range(config.layers) for name, shape in shapes.items()}
    norms = [f"h.{layer}.{norm}" for layer in range(config.layers) for norm in ("ln_1", "ln_2")]

    def add(name, *shape, size=1.0, mean=0.0):
        weights[name] = (mean + size * rng.standard_normal(shape)).astype(dtype)

    add("wte.weight", config.vocabulary, d)
    add("wpe.weight", config.positions, d)
    for name, (rows, columns) in linear.items():
        add(name, rows, columns, size=rows**-0.5)
        add(name.replace(".weight", ".bias").replace(".w_", ".b_"), columns, size=0.3)
    for name in (*norms, "ln_f"):
        add(f"{name}.weight", d, size=0.2, mean=1.0)
        add(f"{name}.bias", d, size=0.2)
    weights["lm_head.weight"] = weights["wte.weight"]
    if not config.tied:
        add("lm_head.weight", config.vocabulary, d)
    return with_gpt2_weights(Model("random", Decoder(config, Weights({}, 0)), None), weights)


def z_of(model, ids, target, edits=()):
    return difference(model, model.run(ids, edits=edits).hidden[-1][target.position], target)


def with_added(model, name, x):
    """The same model with x added to one of its weights."""
    weights = gpt2_weights(model)
    return with_gpt2_weights(model, weights | {name: weights[name] + x})


def slope_of(function):
    """The derivative at 0 of a function of one number, by differences of fourth order."""
    near, far = (function(step) - function(-step) for step in (STEP, 2 * STEP))
    return (8 * near - far) / (12 * STEP)


def drawn_edits(rng, model, n):
    """Edits of every kind that has a derivative, in random layers and heads."""

    def where():
        heads = [int(rng.integers(model.config.heads))] if rng.integers(2) else None
        return {"layers": [int(rng.integers(model.config.layers))], "heads": heads}

    def places():
        key = int(rng.integers(n))
        return {"keys": (key,), "queries": (int(rng.integers(key, n)),)}

    made = [
        ch.cut(**places(), **where()),
        ch.cut(keys=(0,), **where()),  # the first row is left without a key
        ch.boost(**places(), by=float(rng.normal(0, 2)), **where()),
        ch.tempered(float(rng.uniform(0.5, 2)), **where()),
        ch.scaled(float(rng.normal()), **where()),
        ch.off(**where()),
    ]
    return tuple(made[i] for i in rng.permutation(len(made))[: rng.integers(1, 5)])


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_each_activation_has_the_slope_of_its_finite_differences(name):
    x = fresh().normal(0, 3, 200)
    x = np.where(np.abs(x) < 1e-3, 1.0, x)  # relu has a corner at 0
    expected = slope_of(lambda step: ACTIVATIONS[name].value(x + step))
    np.testing.assert_allclose(ACTIVATIONS[name].slope(x), expected, rtol=1e-7, atol=1e-8)


@several(5)
@pytest.mark.parametrize("centred", [True, False])
def test_a_norm_has_the_derivative_of_its_finite_differences(trial, centred):
    rng = fresh()
    tokens, d, epsilon = int(rng.integers(1, 5)), int(rng.integers(2, 20)), float(rng.choice([1e-12, 1e-5, 0.3]))
    x, along, upstream = (rng.standard_normal((tokens, d)) for _ in range(3))
    x += 5 * np.arange(d)  # a deviation near 0 has no useful finite differences
    weight, bias = rng.standard_normal((2, d))
    norm = NormWeights(weight, bias, centred, epsilon)
    expected = slope_of(lambda step: (norm.value(x + step * along) * upstream).sum())
    result = (norm.backward(x, upstream) * along).sum()
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@several(12)
def test_every_derivative_of_a_run_with_edits_is_that_of_its_finite_differences(trial):
    """By the embeddings; by each b_V, which moves outputs by the sum of their weights; by each head's factor."""
    rng = fresh()
    model = drawn(rng, activation=str(rng.choice(SMOOTH)))
    n = int(rng.integers(2, 10))
    ids = rng.integers(0, model.config.vocabulary, n).tolist()
    edits = drawn_edits(rng, model, n) if rng.integers(4) else ()
    run = model.run(ids, edits=edits)
    target = target_of(run, position=int(rng.integers(n)))
    result = derivatives(model, run, target)
    largest = max(float(np.abs(x).max()) for x in (result.embeddings, *(layer.g for layer in result.layers)))

    def check(derivative, moved):
        np.testing.assert_allclose(derivative, slope_of(moved), rtol=1e-6, atol=1e-7 * max(1.0, largest))

    def moved_by(name, along):
        return lambda step: z_of(with_added(model, name, step * along), ids, target, edits)

    along = rng.standard_normal(gpt2_weights(model)["wpe.weight"].shape)
    check((result.embeddings * along[:n]).sum(), moved_by("wpe.weight", along))
    for number, (layer, ran) in enumerate(zip(result.layers, run.layers, strict=True)):
        along = rng.standard_normal((model.config.heads, 1, layer.g.shape[-1]))
        mass = ch.AttentionMatrix(ran.q, ran.k, **ran.rules) @ np.ones(n)  # 0 for a row that sees nothing
        check((layer.g * along * mass[..., None]).sum(), moved_by(f"h.{number}.attn.b_v", along.ravel()))
        head = int(rng.integers(model.config.heads))
        place = {"layers": [number], "heads": [head]}
        check(
            result.heads()[number, head],
            lambda step, place=place: z_of(model, ids, target, (*edits, ch.scaled(1 + step, **place))),
        )


OPTIONS = [
    {},
    {"activation_function": "gelu", "n_inner": 24},
    {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
    {"scale_attn_weights": False, "tie_word_embeddings": False},
    {"activation_function": "silu"},
]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float64", one) for one in OPTIONS]
    + [("float32", one) for one in OPTIONS if one.get("activation_function") != "relu"],  # rounding may turn a corner
)
def test_all_derivatives_are_those_of_pytorch_on_the_same_weights(tmp_path, dtype, options):
    rng = fresh()
    layers, heads, n = (int(rng.integers(low, high)) for low, high in ((1, 4), (1, 5), (1, 25)))
    peer = random_peer(tmp_path, rng, n_layer=layers, n_head=heads, n_embd=8 * heads, **options)
    model = load(tmp_path)
    model = in_float64(model) if dtype == "float64" else model
    ids = rng.integers(0, 2400, n).tolist()
    run = model.run(ids)
    target = target_of(run, position=int(rng.integers(n)))
    result = derivatives(model, run, target)

    peer, joined = peer.double(), []  # float64 is the truth of both

    def keep(_, args):
        args[0].retain_grad()
        joined.append(args[0])

    for block in peer.transformer.h:
        block.attn.c_proj.register_forward_pre_hook(keep)
    embeddings = peer.transformer.wte.weight[torch.tensor([ids])].detach().requires_grad_()
    logits = peer(inputs_embeds=embeddings, use_cache=False).logits[0, target.position]
    z = logits[target.token] - logits[target.against]
    z.backward()
    exact = dtype == "float64"
    assert result.z == pytest.approx(z.item(), rel=1e-9 if exact else 1e-3, abs=1e-9 if exact else 1e-3)
    pairs = [(result.embeddings, embeddings.grad[0])]
    pairs += [(layer.g.swapaxes(0, 1), x.grad[0]) for layer, x in zip(result.layers, joined, strict=True)]
    whole = [(x.grad[0] * x.detach()[0]).reshape(n, heads, 8).sum(-1) for x in joined]
    pairs += [(layer.whole.T, x) for layer, x in zip(result.layers, whole, strict=True)]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        far = np.abs(ours.reshape(theirs.shape) - theirs.numpy()).max()
        assert far <= (1e-10 if exact else 2e-3) * max(1e-3, theirs.abs().max().item())
    if exact:  # both runs give z of the likeliest token against the second likeliest
        assert [target.token, target.against] == logits.topk(2).indices.tolist()


@several(5)
def test_g_with_the_layers_q_k_and_v_gives_the_causes_of_an_edge(trial):
    """What later matrices of causes are made of: cutting an edge whose effect is small changes z by e_ij."""
    rng = fresh()
    model = drawn(rng, activation=str(rng.choice(SMOOTH)))
    for layer in range(model.config.layers):  # so that z is linear in what heads put out
        name = f"h.{layer}.attn.c_proj.weight"
        model = with_added(model, name, (1e-6 - 1) * gpt2_weights(model)[name])
    n = int(rng.integers(2, 10))
    run = model.run(rng.integers(0, model.config.vocabulary, n).tolist())
    target = target_of(run, position=int(rng.integers(n)))
    for number, (layer, ran) in enumerate(zip(derivatives(model, run, target).layers, run.layers, strict=True)):
        a = ch.AttentionMatrix(ran.q, ran.k, **ran.rules)[...]
        t = np.einsum("hic,hjc->hij", layer.g, ran.v)
        whole = layer.whole[..., None]
        np.testing.assert_allclose((a * t).sum(-1), layer.whole, atol=1e-12)
        without = np.stack([np.where(np.arange(n) == j, 0, a) for j in range(n)])  # each key gone, and renormalised
        left = without.sum(-1)
        after = (without * t).sum(-1) / np.where(left > 0, left, 1)
        e = np.moveaxis(after, 0, -1) - whole
        edges = [Edge(number, *map(int, place)) for place in np.argwhere(a > 0)]
        again = cut_again(model, run, target, edges)
        np.testing.assert_allclose(again, [e[edge[1:]] for edge in edges], rtol=0, atol=1e-3 * np.abs(e).max() + 1e-12)


def cut_again(model, run, target, edges):
    """What the lead changes by when each edge alone is cut and its row normalised anew, float64 (edges,)."""
    last = target.position
    cuts = [cut(queries=edge.query, keys=edge.key, layers=[edge.layer], heads=[edge.head]) for edge in edges]
    variants = [Variant((*run.edits, one), first=edge.query) for one, edge in zip(cuts, edges, strict=True)]
    made = run_again(model.decoder, run, [each for each in variants if each.first <= last], range(last, last + 1))
    leads = iter([difference(model, rows[0], target) for rows in made])
    before = difference(model, run.hidden[-1][last], target)
    return np.array([next(leads) - before if edge.query <= last else 0.0 for edge in edges])


@several(8)
@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-10), ("float32", 2e-4)])
def test_cutting_again_is_the_whole_model_run_with_that_edge_cut(trial, dtype, near):
    rng = fresh()
    model = drawn(rng, dtype)
    n = int(rng.integers(2, 12))
    edits = drawn_edits(rng, model, n) if rng.integers(2) else ()
    ids = rng.integers(0, model.config.vocabulary, n).tolist()
    run = model.run(ids, edits=edits)
    target = target_of(run, position=int(rng.integers(n)))
    high = model.config.layers, model.config.heads, n, n
    edges = [Edge(*map(int, rng.integers(0, high))) for _ in range(8)]
    cuts = [ch.cut(queries=query, keys=key, layers=[layer], heads=[head]) for layer, head, query, key in edges]
    expected = [z_of(model, ids, target, (*edits, cut)) - z_of(model, ids, target, edits) for cut in cuts]
    np.testing.assert_allclose(cut_again(model, run, target, edges), expected, rtol=near, atol=near)


def test_the_target_is_the_likeliest_token_against_the_next_or_what_is_asked_for():
    model = shipped()
    run = model.run([t.id for t in model.tokens("humpty dumpty sat on")])
    order = np.argsort(-run.logits[-1]).tolist()
    assert target_of(run) == (3, order[0], order[1])
    assert target_of(run, token=order[7]) == (3, order[7], order[0])
    assert target_of(run, against=order[0]) == (3, order[1], order[0])
    assert target_of(run, order[4], order[9], position=1) == (1, order[4], order[9])
    z = derivatives(model, run, target_of(run)).z
    assert z == pytest.approx(float(run.logits[-1, order[0]] - run.logits[-1, order[1]]), abs=1e-4)
    assert derivatives(model, run, target_of(run, order[1], order[0])).z == -z


def test_derivatives_of_the_shipped_model_say_which_head_brings_the_wall():
    """Turning off the head that brings the most lowers z more than the mean head does: the numbers mean something."""
    model = shipped()
    ids = [t.id for t in model.tokens("humpty dumpty sat on a")]
    run = model.run(ids)
    target = target_of(run)
    assert model.text(target.token) == " wall"
    brought = derivatives(model, run, target).heads()
    assert brought.shape == (2, 8)
    off = [
        [z_of(model, ids, target) - z_of(model, ids, target, (ch.off(layers=[i], heads=[j]),)) for j in range(8)]
        for i in range(2)
    ]
    assert off[brought.argmax() // 8][brought.argmax() % 8] > np.mean(off)


def test_what_has_no_derivative_is_refused_by_name():
    rng = fresh()
    model = drawn(rng)
    run = model.run([1, 2, 3])
    for edit in (ch.cut(keys=(1,), rest="first"), ch.off(to="mean")):
        again = model.run([1, 2, 3], edits=(edit,))
        with pytest.raises(RuleError, match=rf"^{edit.kind}\(.*no derivative is taken through this edit"):
            derivatives(model, again, target_of(again))
    with pytest.raises(RuleError, match="the run has no residual stream"):
        derivatives(model, ForwardPass(run.layers, run.logits), target_of(run))
    with pytest.raises(RuleError, match="the model gives no next token"):
        target_of(ForwardPass(run.layers, None))
    for wrong in ({"token": 23}, {"against": -24}, {"position": 3}):
        with pytest.raises(SelectionError, match=f"{next(iter(wrong))} .* is outside"):
            target_of(run, **wrong)
    with pytest.raises(SelectionError, match="token and against are both 4"):
        target_of(run, token=4, against=4)


def test_derivatives_that_are_not_finite_are_an_error():
    model = drawn(fresh())
    x = gpt2_weights(model)["h.0.attn.c_proj.weight"]
    huge = with_added(model, "h.0.attn.c_proj.weight", np.full_like(x, np.inf))
    run = model.run([1, 2, 3])
    with pytest.raises(FileError, match="its derivatives are NaN or infinite"):
        derivatives(huge, run, target_of(run))


def test_memory_grows_with_the_tokens_and_not_with_their_square():
    n = 2048
    model = drawn(fresh(), np.float32, layers=1, heads=1, d_model=4, d_mlp=4, positions=n)
    run = model.run([1] * n)
    peak = peak_of(lambda: derivatives(model, run, target_of(run)))
    assert peak < 4 * n * n / 4  # a matrix of float32 is 4·n·n bytes, and an engine works on tiles


def test_neither_pytorch_nor_transformers_is_loaded():
    program = (
        "import sys; from clearhead.explaining import derivatives as d; from clearhead.models import model\n"
        "model = model.load(); run = model.run([5, 6, 7])\n"
        "target = d.target_of(run); d.derivatives(model, run, target)\n"
        "import clearhead; clearhead.why('mary had a little', model)\n"
        "print(*({'torch', 'transformers', 'jax'} & set(sys.modules)))"
    )
    assert not python(program).split()
