"""Runs any Transformers decoder or encoder for `explain`: the model's own classes run the text, observed by `watch`.

Weights load from safetensors only, never from a pickle, and run in float32. The modules' names tell which ones attend,
and which one is W^O. A config.json can ask for any size, and Transformers fills missing weights with random numbers; so
building stops once there are more parameters than the files can hold, and missing weights are an error.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.files import json_of
from clearhead.core.room import check_room_for_file
from clearhead.core.rule_values import whole_number
from clearhead.errors import ClearheadError, FileError, RuleError, ShapeError, needing
from clearhead.models.families import Config
from clearhead.models.folder import BUFFERS, check_folder, check_layers, downloaded, one_line, weight_files
from clearhead.models.protocol import Attended, Each, ForwardPass, LayerRun, Slope, Variant, ids_in, ids_of, in_short
from clearhead.models.tokenizer import Tokenizer
from clearhead.models.variants import attended, through_attention
from clearhead.watching.naming import ModulePath
from clearhead.watching.seen import Seen
from clearhead.watching.watch import watch

_BATCHED = "query_segments", "kv_segments", "mask", "bias"  # rules that have a batch axis


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class HubModel:
    """A Transformers model and its tokenizer, with the same methods as `model.Model`."""

    name: str
    config: Config
    inner: Any
    tokenizer: Tokenizer
    attending: tuple[str, ...] = ()  # paths of the modules that attend, in the order of a run
    mixers: tuple[str, ...] = ()  # paths of other modules that mix tokens, such as a recurrent layer
    depth: int = 0  # layers, whether they attend or not

    __repr__ = in_short

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each layer that attends among all layers, as `ch.watch` names it."""
        made = [int(next(iter(ModulePath.of(path).numbers), 0)) for path in self.attending]
        return made if len(set(made)) == len(made) else range(len(made))  # one module may attend several times

    def projections(self, _layer: int) -> dict[str, Array]:
        """Empty: the model may rotate or normalise queries and keys between the projections and the scores."""
        return {}

    def generate(
        self,
        ids: list[int] | str,
        count: int,
        each: Each = iter,
        *,
        ends: bool = False,
        run: ForwardPass | None = None,  # noqa: ARG002
    ) -> list[int]:
        """Continue these ids, as `Model.generate` does. Raises RuleError, ShapeError."""
        import torch
        from transformers import GenerationConfig

        if not self.inner.can_generate():
            raise RuleError(
                f"{self.name} predicts no next token, so it cannot continue the text.", "leave out generate."
            )
        ids, count = ids_of(self, ids), whole_number("count", count, 0)
        self.tokenizer.fits(len(ids), count)
        prompt, steps = torch.tensor([ids]), iter(each(range(count)))
        streamer = SimpleNamespace(put=lambda _: next(steps, None), end=lambda: None)  # called for the prompt first
        stops = sorted(self.tokenizer.ends) if ends else None
        greedy = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=stops or None)
        usual, self.inner.generation_config = self.inner.generation_config, GenerationConfig()  # it may punish repeats
        try:
            with torch.inference_mode():
                options = {"attention_mask": torch.ones_like(prompt), "streamer": streamer}
                made: list[int] = self.inner.generate(prompt, generation_config=greedy, **options)[0].tolist()
        finally:
            self.inner.generation_config = usual
        made = made[len(ids) :]
        return made[:-1] if stops and made and made[-1] in stops else made

    def differentiated(
        self,
        ids: list[int],
        variants: Sequence[Variant],
        rows: range,
        slope: Slope,
        run: ForwardPass | None = None,  # noqa: ARG002  # autograd runs the model again
        each: Each = iter,
    ) -> Iterator[tuple[int, int, Attended]]:
        """Differentiate as `Model.differentiated` does, by autograd, but not by the residual stream.

        `slope` gives the derivative of the number by the logits of `rows`.
        """
        import torch

        for place, variant in zip(each(range(len(variants))), variants, strict=True):
            kept: list[tuple[Any, Any]] = []
            beside = bool(self.mixers) and variant.gates is not None
            logs = None if variant.gates is None else torch.tensor(variant.gates, requires_grad=True)
            with torch.enable_grad(), _varied(self, variant, kept, logs):
                logits = self.inner(torch.tensor([list(ids)]), use_cache=False).logits[0, rows.start : rows.stop]
            by = torch.as_tensor(slope(logits.detach().float().numpy()), dtype=logits.dtype)
            asked = [*(output for _, output in kept), *([logs] if beside else ())]
            grads = torch.autograd.grad(logits, asked, by, materialize_grads=True)  # a loop's last round may be unused
            for number in reversed(range(len(kept))):
                call, g = kept[number][0], grads[number][0].numpy()
                q, k, v = (x[0].detach().numpy() for x in (call.q, call.k, call.v))
                part = attended(q, k, v, _plain(call.whole_rules()), variant.gates)
                part = part._replace(g=g, by_gates=through_attention(part, g)[1])
                yield number, place, part if number or not beside else part._replace(beside=grads[-1].numpy())

    def again(self, run: ForwardPass, variants: Sequence[Variant], rows: range, each: Each = iter) -> Iterator[Array]:
        """Run each variant, and yield its logits in some rows, (rows, vocabulary); `each` iterates over variants."""
        import torch

        for variant in (variants[place] for place in each(range(len(variants)))):
            with torch.inference_mode(), _varied(self, variant):
                read = [*(variant.ids.get(position, token) for position, token in enumerate(run.ids))]
                read += [variant.ids[position] for position in range(len(read), rows.stop)]
                logits = self.inner(torch.tensor([read]), use_cache=False).logits[0, rows.start : rows.stop]
                yield logits.float().numpy()

    def run(self, ids: list[int] | str, each: Each = iter) -> ForwardPass:
        """Run a text or its ids: return every attention layer, and logits (tokens, vocabulary) or None."""
        import torch

        ids = ids_of(self, ids)
        caught: dict[str, list[tuple[Array, Array]]] = {}
        options = {"use_cache": False} if self.inner.can_generate() else {}
        catching = _attention_caught(self, caught, iter(each(range(self.config.layers))))
        with torch.inference_mode(), catching, _watched(self.inner) as seen:
            out = self.inner(torch.tensor([ids]), **options)
        layers: list[LayerRun] = []
        for name in seen.layers:
            layer = seen.layer(name)
            if len(caught[layer.path]) < layer.call:
                raise ShapeError(
                    f"layer {name}: {layer.path} attends several times in one call, and explain shows one of them.",
                    "with ch.watch(model) as seen: shows all of them.",
                )
            x, output = caught[layer.path][layer.call - 1]
            q, k, v = (part[0].numpy() for part in (layer.q, layer.k, layer.v))
            rules = _plain(layer.rules)
            rules.pop("query_offset", None)
            attended = np.asarray((layer.matrix() @ layer.v)[0])
            layers.append(LayerRun(x, q, k, v, attended, output, rules, biases=None))
        logits = getattr(out, "logits", None)
        return ForwardPass(layers, None if logits is None else logits[0].float().numpy(), ids=tuple(ids))


def of_loaded(inner: Any, tokenizer: Any = None, name: str = "") -> HubModel:
    """Wrap a Transformers model that is already loaded, and its tokenizer. Raises FileError for a slow tokenizer."""
    name = name or getattr(inner, "name_or_path", "") or type(inner).__name__
    if tokenizer is None:
        from transformers import AutoTokenizer

        hint = "give it as well: ch.explain(text, (model, tokenizer))"
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise FileError(f"{name}: its tokenizer cannot be loaded: {one_line(error)}", hint) from error
    if not getattr(tokenizer, "is_fast", False):
        raise FileError(f"{name}: its tokenizer gives no positions in the text.", "use a fast tokenizer.")
    sizes, attending, mixers = _looked_at(inner, name)
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    ends = [tokenizer.eos_token_id, getattr(getattr(inner, "generation_config", None), "eos_token_id", None)]
    encoder = tokenizer.backend_tokenizer  # its Transformers class sets these two again in each call
    encoder.no_padding()
    encoder.no_truncation()
    words = {key: str(word) for key, word in tokenizer.special_tokens_map.items()}
    texts = Tokenizer(name, encoder, _positions(inner), sizes.vocabulary, template, words, ids_in(*ends))
    depth = getattr(inner.config.get_text_config(), "num_hidden_layers", sizes.layers)
    return HubModel(name, sizes, inner, texts, attending, mixers, depth)


def _looked_at(inner: Any, name: str) -> tuple[Config, tuple[str, ...], tuple[str, ...]]:
    """Run one token to learn the model's sizes, and a HubModel's `attending` and `mixers`."""
    import torch

    config = inner.config.get_text_config()
    if config.is_encoder_decoder:
        raise FileError(f"{name} is an encoder-decoder: it reads two texts, and explain gives it one.")
    with torch.inference_mode(), _watched(inner) as seen:
        inner(torch.tensor([[0]]))
    layers = [seen.layer(one) for one in seen.layers]
    heads, kv_heads = max((layer.q.shape[1], layer.k.shape[1]) for layer in layers)  # a layer may have fewer
    sizes = Config(config.model_type, len(layers), heads, kv_heads, config.hidden_size, config.vocab_size)
    paths = tuple(layer.path for layer in layers), tuple(path for path, _ in seen.unseen)
    return sizes._replace(shares_runs=False), *paths  # each variant is a run of its own


def _positions(inner: Any) -> int | None:
    """Return how many tokens the model takes; RoBERTa's positions start after the one for padding."""
    counts = [getattr(inner.config.get_text_config(), "max_position_embeddings", None)]
    for path, module in inner.named_modules():
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            counts.append(module.num_embeddings - module.padding_idx - 1)
    return min((count for count in counts if count is not None), default=None)


def load(name: str, place: Path | None = None) -> HubModel:
    """Load a model from `place`, from the directory `name`, or by downloading `name` from the Hugging Face hub.

    Raises FileError, MissingExtraError.
    """
    place = place or (Path(name) if os.path.isdir(name) else downloaded(name))
    check_folder(place)  # before anything is built
    weight_files(place)
    try:
        return of_loaded(*_loaded(name, place), name)
    except ClearheadError:
        raise
    except Exception as error:  # Transformers may raise anything for an unexpected file
        raise FileError(f"{name}: Transformers cannot load it: {one_line(error)}") from error


def _loaded(name: str, place: Path) -> tuple[Any, Any]:
    """Load model and tokenizer after a check of their sizes. No code from the model's directory runs."""
    with needing("PyTorch and Transformers", name, "hf"):
        import torch
        import transformers

    files: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    stated = json_of(place / "config.json")
    for part in (stated, stated.get("text_config")):
        check_layers(place / "config.json", part.get("num_hidden_layers") if isinstance(part, dict) else None)
    if stated.get("auto_map") and stated.get("model_type") not in transformers.CONFIG_MAPPING:
        hint = "load it yourself with trust_remote_code=True, then ch.explain(text, (model, tokenizer))."
        raise FileError(f"{name} needs Python code from its folder (auto_map), which does not run here.", hint)
    config = transformers.AutoConfig.from_pretrained(place, **files)
    if config.is_encoder_decoder:
        raise FileError(f"{name} is an encoder-decoder: it reads two texts, and explain gives it one.")
    decodes = any(word.endswith(("ForCausalLM", "LMHeadModel")) for word in config.architectures or ())
    wraps = any(word.endswith("ForConditionalGeneration") for word in config.architectures or ())
    for size in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if getattr(config.get_text_config() if wraps else config, size, None) is None:
            raise FileError(f"{name}: its config has no {size}: expected a language model.")
    kind: Any = transformers.AutoModelForMultimodalLM if wraps else transformers.AutoModel
    kind = transformers.AutoModelForCausalLM if decodes else kind
    _check_sizes(place, lambda: kind.from_config(config))
    inner, info = kind.from_pretrained(
        place, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **files
    )
    lacking = sorted(key for key in info["missing_keys"] if "pooler" not in key)  # poolers come after all attention
    if lacking:  # they would be random numbers
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        hint = "are config.json and the weights of the same model?"
        raise FileError(f"{name}: the weights lack {lacking[0]}{more}.", hint)
    if decodes and (unused := sorted(key for key in info["unexpected_keys"] if not key.endswith(BUFFERS))):
        what = f"{name}: Transformers' {type(inner).__name__} does not use `{unused[0]}` ({len(unused)} such tensors)."
        raise FileError(what, "answers may be wrong without it: load the model yourself and give (model, tokenizer).")
    return inner.eval(), transformers.AutoTokenizer.from_pretrained(place, **files)


def _check_sizes(place: Path, build: Callable[[], Any]) -> None:
    """Refuse a model with more parameters than its files can hold, or than fit memory, by building it on device meta.

    Building stops at the first parameter too many, so that a config.json with a billion layers fails quickly.
    """
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    stored, registered = sum(path.stat().st_size for path in weight_files(place)), 0

    def count(_module: Any, _name: str, parameter: Any) -> None:
        nonlocal registered
        registered += parameter.numel() if parameter is not None and parameter.is_meta else 0
        if registered > 4 * stored:  # a number takes at least four bits, and tied weights are counted twice
            raise FileError(
                f"{place}: config.json describes more than {4 * stored:,} parameters, but the weights have "
                f"{stored:,} bytes.",
                "are config.json and the weights of the same model?",
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            built = build()
    finally:
        hook.remove()
    size = sum(4 * x.numel() for x in built.parameters()) + sum(x.numel() * x.element_size() for x in built.buffers())
    check_room_for_file(place, size, "this model in float32")


@contextmanager
def _attention_caught(
    model: HubModel, caught: dict[str, list[tuple[Array, Array]]], progress: Iterator[int]
) -> Iterator[None]:
    """Inside, add each attention module's input, and its output after W^O, to `caught` under its path."""
    from clearhead.hf.passes import output_module

    paths, inputs = dict(model.inner.named_modules()), dict[str, Array]()
    with ExitStack() as after:
        for path in dict.fromkeys(model.attending):

            def before(_: Any, args: Any, named: Any, path: str = path) -> None:
                inputs[path] = named.get("hidden_states", args[0] if args else None)[0].float().numpy()
                next(progress, None)

            def behind(_: Any, _args: Any, out: Any, path: str = path) -> None:
                output = out[0] if isinstance(out, tuple) else out
                caught.setdefault(path, []).append((inputs[path], output.reshape(-1, output.shape[-1]).float().numpy()))

            after.callback(paths[path].register_forward_pre_hook(before, with_kwargs=True).remove)
            after.callback(output_module(paths, path).register_forward_hook(behind).remove)
        yield


@contextmanager
def _watched(inner: Any) -> Iterator[Seen]:
    """Watch the model inside, without the warning about modules that are not attention, which each run would give."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was not seen", UserWarning)
        with watch(inner) as seen:
            yield seen


@contextmanager
def _varied(
    model: HubModel, variant: Variant, kept: list[tuple[Any, Any]] | None = None, logs: Any = None
) -> Iterator[None]:
    """Inside, the model runs as the variant; attention calls and their heads' outputs are added to `kept`, by layer.

    As in `ch.change`, each attention call is caught and its result replaced. Other modules that mix tokens read a gated
    token's input times α, and that of a hidden token times 0.

    logs   (tokens,) the gates' ln α as a tensor to be differentiated; None: the variant's
    """
    import torch

    from clearhead.hf import attending, passes

    count = 0

    def varied(_: Any, call: Any) -> Any:
        nonlocal count
        number, count = count, count + 1

        def finished(output: Any) -> Any:
            if variant.gates is not None or kept is not None:
                output = attended(call.q, call.k, call.v, call.whole_rules(), variant.gates).output
            if kept is not None:
                output = output if output.requires_grad else output.requires_grad_()
                kept.append((call, output))
            output = call.finish(output)
            chosen = [(head, x) for (layer, head), x in variant.added.items() if layer == number]
            for head, added in chosen:
                output = output.clone()
                output[0, head, variant.first : variant.first + len(added)] += torch.as_tensor(added)
            return output

        return replace(call, afterwards=(finished,))

    def read(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = named["hidden_states"] if "hidden_states" in named else args[0]
        x = x * shares.to(x.dtype)
        return (args, named | {"hidden_states": x}) if "hidden_states" in named else ((x, *args[1:]), named)

    class Varied(passes.Passes):
        registry = attending.changers
        already = "the model is inside ch.change.", "explain it outside."
        edited = staticmethod(varied)

    with ExitStack() as after:
        if variant.gates is not None:
            shares = torch.exp(torch.as_tensor(variant.gates) if logs is None else logs)[:, None]
            for path in model.mixers:
                module = model.inner.get_submodule(path)
                after.callback(module.register_forward_pre_hook(read, with_kwargs=True).remove)
        after.enter_context(Varied(model.inner).followed())
        yield


def _plain(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the rules of one text, with arrays in place of tensors."""

    def plain(value: Any) -> Any:
        return value.detach().numpy() if hasattr(value, "detach") else value

    made = {name: plain(value) for name, value in rules.items() if value is not None}
    if "spans" in made:
        made["spans"] = tuple(map(plain, made["spans"]))
    return made | {name: x[0] for name, x in made.items() if name in _BATCHED}
