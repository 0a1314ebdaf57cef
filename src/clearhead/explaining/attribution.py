"""Direct logit attribution, or the way from a text to one logit: what every part of the model adds to it, exactly.

The residual stream after the last layer is a sum of everything written to it: the embeddings, and each layer's
attention and MLP. The last norm divides by σ, a single number, and is otherwise linear; so is the product with the
token's row of the unembedding. With the run's σ, the parts add up to the logit. They say what each part wrote, not what
the logit would be without it: later parts read what earlier ones wrote, and σ would change.

Adding one number to every logit leaves all probabilities as they are, so only differences of logits mean something:
`against` subtracts one way from another, part by part.

Source: "direct logit attribution", Elhage et al., A Mathematical Framework for Transformer Circuits, 2021.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.digits import percent, rounded, significant
from clearhead.models.decoder import Decoder, split
from clearhead.models.mlp import chosen
from clearhead.models.model import Model
from clearhead.models.protocol import Choice, ForwardPass
from clearhead.textbook.page import capitalised
from clearhead.words import LANGUAGES, Language, say

_SIZES = {"attention": ("heads", "d_k"), "mlp": ("d_mlp",), "input": ("d_input",)}
PartKind = Literal["token", "position", "attention", "mlp", "input", "norm", "unembedding"]


class Norm(NamedTuple):
    """A norm on the way: the vector's length before and after it, and the σ by which it divides."""

    before: float
    after: float
    sigma: float
    centred: bool  # does it subtract the mean?


class WayPart(NamedTuple):
    """One part of the model; a Way lists them in the order in which a text goes through them.

    kind    token, position, embeddings; attention, mlp, or input (a layer's embedding of the token), of `layer`;
            norm (the last) and unembedding, which add their biases
    adds    what it adds to the logit; for attention also by head, `heads`, and what b^O adds, `bias`
    length  the length ‖x‖ of the vector that it writes to the residual stream; None for the last norm and unembedding
    sizes   heads and d_k of attention; d_mlp of an MLP; d_input; the vocabulary
    read    the norm through which it reads; for the last norm, that norm
    wrote   the norm that its output goes through before it is added, if any
    experts the experts of an MLP that computed the token, each with its share, the largest first
    """

    kind: PartKind
    layer: int | None
    adds: float
    length: float | None
    heads: tuple[float, ...] = ()
    bias: float = 0.0
    sizes: tuple[int, ...] = ()
    read: Norm | None = None
    wrote: Norm | None = None
    experts: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and words."""
        norms = {"read": self.read, "wrote": self.wrote}
        return {**self._asdict(), **{name: norm and norm._asdict() for name, norm in norms.items()}}


class Way(NamedTuple):
    """The parts that add up to the logit of `token` after the token at `position`."""

    position: int
    token: int
    text: str
    logit: float  # the model's, in float32
    parts: list[WayPart]  # they add up to the logit
    sigma: float  # of the last norm
    shape: tuple[int, int]  # the residual stream's tokens and d_model
    cap: float | None = None  # c, if the model's logit is c·tanh(logit/c)

    @property
    def sums(self) -> list[float]:
        """The logit after each part: the sum of all parts up to it."""
        return list(accumulate(part.adds for part in self.parts))

    @property
    def difference(self) -> float:
        """The difference between the parts' sum, in float64, and the model's logit."""
        return abs(self.sums[-1] - self.logit)

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and words."""
        parts = [part.to_json() for part in self.parts]
        return {**self._asdict(), "parts": parts, "sums": self.sums, "difference": self.difference}


def ways(model: Model, run: ForwardPass, position: int, choices: Sequence[Choice]) -> list[Way]:
    """Return what each part of the model adds to some tokens' logits after the token at `position`.

    O(layers·d_model·(heads·d_k + tokens)) time.

    >>> from clearhead.explaining.attribution import ways
    >>> from clearhead.models.model import load
    >>> from clearhead.models.protocol import next_tokens
    >>> model = load()
    >>> run = model.run("humpty dumpty sat on")
    >>> to_a, = ways(model, run, 3, next_tokens(model, run.logits[3], 1))
    >>> [part.kind for part in to_a.parts]
    ['token', 'position', 'attention', 'mlp', 'attention', 'mlp', 'norm', 'unembedding']
    >>> to_a.text, to_a.difference < 1e-4
    (' a', True)
    """
    decoder, config, weights = model.decoder, model.config, model.decoder.weights
    stream = [x[0].astype(np.float64) for x in run.stream(position)]
    rows = weights.rows(decoder.unembedding, [choice.id for choice in choices]).astype(np.float64)
    rows *= config.logit_scale  # (choices, d_model)
    last = _norm(decoder, "output_norm", stream[-1])
    assert last is not None
    norm, linear, shift = last
    made: list[list[WayPart]] = []  # by part and choice
    scales = [decoder.scale(number) for number in range(config.layers)]
    left = prod(scales)  # what later layers multiply the stream by

    def write(kind: PartKind, layer: int | None, vector: Array, *both: Array, **facts: Any) -> None:
        """Add what one part wrote to the stream; for attention, `both` are what the heads and the bias wrote."""
        adds, *split_up = (left * (rows @ linear(x).T) for x in (vector, *both))
        heads, bias = split_up or (np.zeros((len(rows), 0)), np.zeros(len(rows)))
        length = float(np.linalg.norm(vector))
        each = zip(adds.tolist(), heads.tolist(), bias.tolist(), strict=True)
        made.append([WayPart(kind, layer, x, length, tuple(some), rest, **facts) for x, some, rest in each])

    token = weights.rows("token_embd.weight", [run.ids[position]])[0] * config.embedding_scale
    write("token", None, token := decoder.normed("token_embd_norm", token).astype(np.float64))
    if "position_embd.weight" in weights:
        write("position", None, stream[0] - token)
    for number, (before, after) in enumerate(pairwise(stream)):
        (layer, place), name, size = run.attended(number, position), f"blk.{number}", config.sizes[number]
        output, left, end = layer.output[place].astype(np.float64), prod(scales[number:]), after / scales[number]
        out = split(weights[f"{name}.attn_output.weight"], size.d_k)  # (heads, d_model, d_v): W^O of each
        heads = (out.astype(np.float64) @ layer.heads[:, place, :, None])[..., 0]
        three, wrote = (
            (output, heads, output - heads.sum(axis=0)),
            _norm(decoder, f"{name}.post_attention_norm", output),
        )
        output, heads, bias = (config.added_scale * (x if wrote is None else wrote[1](x)) for x in three)
        sizes, read = (config.heads, size.d_k), _norm(decoder, f"{name}.attn_norm", before)
        facts = {"read": read and read[0], "wrote": wrote and wrote[0]}
        write("attention", number, output, heads, bias, sizes=sizes, **facts)
        middle = before + output
        source = before if config.parallel else middle
        read, wrote, row = _norm(decoder, f"{name}.ffn_norm", source), None, source[None].astype(np.float32)
        if f"{name}.post_ffw_norm.weight" in weights:
            wrote = _norm(decoder, f"{name}.post_ffw_norm", decoder.mlp(number, row)[0])
        more: dict[str, Any] = {"read": read and read[0], "wrote": wrote and wrote[0], "sizes": (size.d_mlp,)}
        if config.experts:
            experts, shares, _ = chosen(weights, config, number, decoder.normed(f"{name}.ffn_norm", row))
            took = tuple(zip(experts[0].tolist(), shares[0].tolist(), strict=True))
            more |= {"sizes": (config.d_expert,), "experts": took}
        own = np.zeros_like(end)  # written by the layer's embedding of the token
        if config.d_input:
            own = end - decoder.added(number, before[None].astype(np.float32), layer.output[[place]])[0]
        write("mlp", number, end - own - middle, **more)
        if config.d_input:
            write("input", number, own, sizes=(config.d_input,))
    bias_of = weights.get("output.bias")
    raw = decoder.logits(run.hidden[-1][position], capped=False)
    shape, result = (len(run.ids), rows.shape[1]), []
    for place, choice in enumerate(choices):
        by_norm = 0.0 if shift is None else float(rows[place] @ shift)
        own = 0.0 if bias_of is None else float(bias_of[choice.id]) * config.logit_scale
        parts = [part[place] for part in made]
        parts += [WayPart("norm", None, by_norm, None, read=norm)]
        parts += [WayPart("unembedding", None, own, None, sizes=(len(raw),))]
        logit = float(raw[choice.id])
        result.append(Way(position, choice.id, choice.text, logit, parts, norm.sigma, shape, config.logit_softcap))
    return result


def _norm(decoder: Decoder, name: str, x: Array) -> tuple[Norm, Callable[[Array], Array], Array | None] | None:
    """Describe a norm as it acted on one vector: the norm, its linear part, its bias; None if there is no such norm."""
    stated, centred = [decoder.weights.get(f"{name}.{kind}") for kind in ("weight", "bias")], decoder.config.centred
    if stated[0] is None:
        return None
    weight, bias = (None if array is None else array.astype(np.float64) for array in stated)

    def centre(vectors: Array) -> Array:
        return vectors - vectors.mean(-1, keepdims=True) if centred else vectors

    exact = x.astype(np.float64)
    sigma = float(np.sqrt(np.mean(centre(exact) ** 2) + decoder.config.epsilon))

    def linear(vectors: Array) -> Array:
        return np.asarray(weight * centre(vectors) / sigma)

    after = linear(exact) + (0 if bias is None else bias)
    return Norm(float(np.linalg.norm(exact)), float(np.linalg.norm(after)), sigma, centred), linear, bias


def against(first: Way, second: Way) -> Way:
    """Subtract one way from another of the same run and position, part by part; the logits are subtracted too."""
    parts = [
        part._replace(
            adds=part.adds - other.adds,
            bias=part.bias - other.bias,
            heads=tuple(a - b for a, b in zip(part.heads, other.heads, strict=True)),
        )
        for part, other in zip(first.parts, second.parts, strict=True)
    ]
    return first._replace(logit=first.logit - second.logit, parts=parts)


def experts_of(part: WayPart, language: Language, before: str = "") -> str:
    """Name the experts that computed the token, each with its share, after the text `before`; "" without experts."""
    each = ", ".join(f"{expert} ({percent(share)})" for expert, share in part.experts)
    return before + say(language, "way experts", experts=each) if each else ""


def part_name(part: WayPart, d_model: int, language: Language) -> str:
    """Name a part, with its sizes."""
    if part.kind == "norm":
        assert part.read is not None
        return say(language, "way norm", **_lengths(part.read, d_model))
    if part.kind == "unembedding":
        return say(language, "way unembedding", d_model=d_model, vocabulary=f"{part.sizes[0]:,}")
    alone = "" if part.sizes or part.kind not in _SIZES else " alone"
    sizes = dict(zip(_SIZES.get(part.kind, ()), part.sizes, strict=False))
    return say(language, f"way {part.kind}{alone}", d_model=d_model, **sizes)


def norm_name(norm: Norm, d_model: int, language: Language) -> str:
    """Name a norm, with the vector's length before and after it, and its σ."""
    return say(language, "way centred norm" if norm.centred else "way plain norm", **_lengths(norm, d_model))


def _lengths(norm: Norm, d_model: int) -> dict[str, object]:
    lengths = {name: significant(getattr(norm, name)) for name in ("before", "after", "sigma")}
    return {"d_model": d_model, **lengths}


def notes(way: Way, language: Language) -> list[str]:
    """Say how exact the sum is, what the numbers mean, and why some are 0."""
    exact = say(language, "way note", sigma=way.sigma, difference=way.difference)
    means = [say(language, f"way {key}") for key in ("lens", "meaning", "zero", "last")]
    cap = [] if way.cap is None else [say(language, "way cap", cap=significant(way.cap))]
    return [exact, *means, *cap]


def for_page(ways: Sequence[Way]) -> dict[str, Any] | None:
    """Return the numbers of all ways, and the words in both languages, in which the page fills the tokens' texts."""
    if not ways:
        return None
    return {
        "position": ways[0].position,
        "parts": [{"kind": part.kind, "layer": part.layer} for part in ways[0].parts],
        "choices": [
            {"id": way.token, "text": way.text, "logit": way.logit}  # the summands have two decimals
            | {name: rounded([getattr(part, name) for part in way.parts], 7) for name in ("adds", "heads", "bias")}
            for way in ways
        ],
        "words": {language: _words(ways[0], language) for language in LANGUAGES},
    }


def _words(way: Way, language: Language) -> dict[str, Any]:
    tokens, d_model = way.shape
    plain = ("adds", "sums", "of", "less", "nothing", "bias")
    between = {"next": "{next}", "other": "{other}", "token": "{token}"}
    layers = [part.layer for part in way.parts if part.layer is not None]
    return {
        **{name: say(language, f"way {name}") for name in plain},
        "title": say(language, "way title", **between),
        "minus": say(language, "way title minus", **between),
        "logit": say(language, "way logit", **between),
        "stream": say(language, "way stream", tokens=tokens, d_model=d_model, token="{token}"),
        "parts": [part_name(part, d_model, language) + experts_of(part, language, "; ") for part in way.parts],
        "norms": [  # before and after each layer's part, with the 0 that each adds
            [norm and say(language, "way norm zero", norm=norm_name(norm, d_model, language)) for norm in norms]
            for norms in ((None, None) if part.layer is None else (part.read, part.wrote) for part in way.parts)
        ],
        "layers": {layer: say(language, "way layer", layer=layer) for layer in layers},
        "notes": [capitalised(note, language) for note in notes(way, language)],
        "constant": capitalised(say(language, "way constant"), language),
    }
