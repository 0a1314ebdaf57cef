"""Any Transformers decoder or encoder for `explain`: the model's own classes run the text, observed by `watch`.

Weights load from safetensors only, never from a pickle, and run in float32. Which modules attend, and what is W^O, is
known by their names. A config.json can ask for any size, and Transformers fills missing weights with random numbers: so
building stops at more parameters than the files can have, and missing weights are an error.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.files import json_of
from clearhead.core.room import check_room_for_file
from clearhead.core.rule_values import whole_number
from clearhead.errors import FileError, MissingExtraError, RuleError, ShapeError
from clearhead.models.families import Config
from clearhead.models.folder import check_layers, ids_in, one_line, weight_files
from clearhead.models.protocol import Attended, Each, ForwardPass, LayerRun, Slope, Variant, ids_of, in_short
from clearhead.models.tokenizer import Tokenizer
from clearhead.models.variants import attended, through_attention
from clearhead.watching.watch import watch

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "Wo", "wo", "o", "linear_out", "attention_out")
_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja"]
_SECONDS = 2.0  # in which the hub has to answer


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class HubModel:
    """A Transformers model and its tokenizer, with the same methods as `model.Model`."""

    name: str
    config: Config
    inner: Any
    tokenizer: Tokenizer

    __repr__ = in_short

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
        """The ids that the model puts after these, as `Model.generate`. Raises RuleError, ShapeError."""
        import torch
        from transformers import GenerationConfig

        if not self.inner.can_generate():
            raise RuleError(
                f"{self.name} predicts no next token, so it cannot continue the text.", "leave generate out."
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
    ) -> Iterator[tuple[int, int, Attended]]:
        """Derivatives of a number of the logits of some rows, by autograd, without those by the residual stream.

        See `Model.differentiated`.
        """
        import torch

        for place, variant in enumerate(variants):
            kept: list[tuple[Any, Any]] = []
            with torch.enable_grad(), _varied(self.inner, variant, kept):
                logits = self.inner(torch.tensor([list(ids)]), use_cache=False).logits[0, rows.start : rows.stop]
            by = torch.as_tensor(slope(logits.detach().float().numpy()), dtype=logits.dtype)
            grads = torch.autograd.grad(logits, [output for _, output in kept], by)
            for number in reversed(range(len(kept))):
                call, g = kept[number][0], grads[number][0].numpy()
                q, k, v = (x[0].detach().numpy() for x in (call.q, call.k, call.v))
                part = attended(q, k, v, _plain(call.whole_rules()), variant.gates)
                yield number, place, part._replace(g=g, by_gates=through_attention(part, g)[1])

    def again(self, run: ForwardPass, variants: Sequence[Variant], rows: range, each: Each = iter) -> Iterator[Array]:
        """The logits of some rows in each variant, a run of its own, (rows, vocabulary); `each` iterates over these."""
        import torch

        for variant in (variants[place] for place in each(range(len(variants)))):
            with torch.inference_mode(), _varied(self.inner, variant, None):
                read = [variant.ids.get(position, token) for position, token in enumerate(run.ids)]
                logits = self.inner(torch.tensor([read]), use_cache=False).logits[0, rows.start : rows.stop]
                yield logits.float().numpy()

    def run(self, ids: list[int] | str, each: Each = iter) -> ForwardPass:
        """The forward pass of a text or its ids: each attention layer, and logits (tokens, vocabulary) or None."""
        import torch

        ids = ids_of(self, ids)
        paths = dict(self.inner.named_modules())
        caught: dict[str, list[tuple[Array, Array]]] = {}
        options = {"use_cache": False} if self.inner.can_generate() else {}
        catching = _attention_caught(paths, caught, iter(each(range(self.config.layers))))
        with torch.inference_mode(), catching, watch(self.inner) as seen:
            out = self.inner(torch.tensor([ids]), **options)
        layers: list[LayerRun] = []
        for name in seen.layers:
            layer = seen.layer(name)
            if len(caught[layer.path]) < layer.call:
                raise ShapeError(
                    f"layer {name}: {layer.path} computes several attentions in one call, and explain shows one.",
                    "ch.watch shows each of them.",
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
    """A Transformers model that is loaded already, with its tokenizer. Raises FileError for a slow tokenizer."""
    config = inner.config.get_text_config()
    name = name or getattr(inner, "name_or_path", "") or type(inner).__name__
    if tokenizer is None:
        from transformers import AutoTokenizer

        hint = "give both, (model, tokenizer), as in ch.explain(text, (model, tokenizer))."
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise FileError(f"{name}: its tokenizer is not here: {one_line(error)}", hint) from error
    if not getattr(tokenizer, "is_fast", False):
        raise FileError(f"{name}: its tokenizer does not say where its tokens stand in the text.", "use a fast one.")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = Config(config.model_type, config.num_hidden_layers, heads, kv_heads, config.hidden_size, config.vocab_size)
    sizes = sizes._replace(shares_runs=False)  # each variant is a run of its own
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    ends = [tokenizer.eos_token_id, getattr(getattr(inner, "generation_config", None), "eos_token_id", None)]
    encoder = tokenizer.backend_tokenizer  # whose own class sets these two anew in each call
    encoder.no_padding()
    encoder.no_truncation()
    words = {key: str(word) for key, word in tokenizer.special_tokens_map.items()}
    texts = Tokenizer(name, encoder, _positions(inner), sizes.vocabulary, template, words, ids_in(*ends))
    return HubModel(name, sizes, inner, texts)


def _positions(inner: Any) -> int | None:
    """How many tokens the model takes; RoBERTa's positions start behind the one for padding."""
    counts = [getattr(inner.config.get_text_config(), "max_position_embeddings", None)]
    for path, module in inner.named_modules():
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            counts.append(module.num_embeddings - module.padding_idx - 1)
    return min((count for count in counts if count is not None), default=None)


def load(name: str, place: Path | None = None) -> HubModel:
    """A model in this place, a directory's name, or a name on the Hugging Face hub, from where it is downloaded.

    Raises FileError, MissingExtraError.
    """
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        what = f"{name} needs PyTorch and Transformers: there is no {' and no '.join(missing)}."
        raise MissingExtraError(what, "pip install 'clearhead[hf]'")
    place = place or (Path(name) if os.path.isdir(name) else _downloaded(name))
    weight_files(place)  # before anything is built
    try:
        inner, tokenizer = _loaded(name, place)
    except (FileError, MissingExtraError):
        raise
    except Exception as error:  # Transformers raises whatever a file that it does not expect leads to
        raise FileError(f"{name}: Transformers cannot load it: {one_line(error)}") from error
    return of_loaded(inner, tokenizer, name)


def _loaded(name: str, place: Path) -> tuple[Any, Any]:
    """Model and tokenizer, after their sizes were checked. No code from the model's directory runs."""
    import torch
    import transformers

    files: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    stated = json_of(place / "config.json")
    for each in (stated, stated.get("text_config")):
        check_layers(place / "config.json", each.get("num_hidden_layers") if isinstance(each, dict) else None)
    config = transformers.AutoConfig.from_pretrained(place, **files)
    if config.is_encoder_decoder:
        raise FileError(f"{name} is an encoder with a decoder: one text does not say what the decoder reads.")
    sized, kind = config, transformers.AutoModel
    if any(word.endswith(("ForCausalLM", "LMHeadModel")) for word in config.architectures or ()):
        kind = transformers.AutoModelForCausalLM
    elif any(word.endswith("ForConditionalGeneration") for word in config.architectures or ()):  # of pictures as well
        sized, kind = config.get_text_config(), transformers.AutoModelForImageTextToText
    for size in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if getattr(sized, size, None) is None:
            raise FileError(f"{name}: its config has no {size}: expected a model of text.")
    _check_sizes(place, lambda: kind.from_config(config))
    inner, info = kind.from_pretrained(
        place, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **files
    )
    lacking = sorted(key for key in info["missing_keys"] if "pooler" not in key)  # which stand behind all attention
    if lacking:  # they would be random numbers
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        hint = "do config.json and the weights belong together?"
        raise FileError(f"{name}: the weights lack {lacking[0]}{more}.", hint)
    return inner.eval(), transformers.AutoTokenizer.from_pretrained(place, **files)


def _downloaded(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    tried = f"{name} is not a directory here, the cache {constants.HF_HUB_CACHE} has no config.json with safetensors of"
    hint = "give --model the directory of a model, or owner/name as on huggingface.co."
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, etag_timeout=_SECONDS))
    except (OSError, ValueError) as error:  # no such model, or no network; no such name can be
        raise FileError(f"{tried} it, and it cannot be downloaded: {one_line(error)}", hint) from None


def _check_sizes(place: Path, build: Callable[[], Any]) -> None:
    """Refuse a model with more parameters than its files have, or than fit memory; it is built on the device meta.

    Building stops at the parameter that is too much, so that a config.json of a billion layers ends soon.
    """
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    stored, registered = sum(path.stat().st_size for path in weight_files(place)), 0

    def count(_module: Any, _name: str, parameter: Any) -> None:
        nonlocal registered
        registered += parameter.numel() if parameter is not None and parameter.is_meta else 0
        if registered > 4 * stored:  # a number has four bits at least, and what is tied is counted twice
            raise FileError(
                f"{place}: config.json makes a model of more than {4 * stored:,} parameters, but the weights have "
                f"{stored:,} bytes.",
                "do config.json and the weights belong together?",
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
    paths: dict[str, Any], caught: dict[str, list[tuple[Array, Array]]], progress: Iterator[int]
) -> Iterator[None]:
    """Inside, the input of each attention module and its output after W^O are added to `caught`, by its path."""
    hooks = []
    inputs: dict[str, Array] = {}
    for path in attention_modules(paths):

        def before(_: Any, args: Any, named: Any, path: str = path) -> None:
            inputs[path] = named.get("hidden_states", args[0] if args else None)[0].float().numpy()
            next(progress, None)

        def behind(_: Any, _args: Any, out: Any, path: str = path) -> None:
            output = out[0] if isinstance(out, tuple) else out
            caught.setdefault(path, []).append((inputs[path], output.reshape(-1, output.shape[-1]).float().numpy()))

        hooks.append(paths[path].register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(output_module(paths, path).register_forward_hook(behind))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _varied(inner: Any, variant: Variant, kept: list[tuple[Any, Any]] | None) -> Iterator[None]:
    """Inside, the model runs as the variant says; calls and what their heads give are added to `kept`, by layer.

    Its attention is ours: a block of `ch.change` without edits reads each call, and what it gives is replaced.
    """
    import torch

    from clearhead.hf import attending
    from clearhead.hf.changing import changed

    count = 0

    def varied(edit: Any, layer: Any, call: Any) -> Any:
        nonlocal count
        call = edit(layer, call)
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

    with changed(inner, (), None):
        block = attending.changers[inner]
        block.edited = partial(varied, block.edited)
        yield


def _plain(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules with arrays in place of tensors."""

    def plain(value: Any) -> Any:
        return value.detach().numpy() if hasattr(value, "detach") else value

    made = {name: plain(value) for name, value in rules.items() if value is not None}
    if "spans" in made:
        made["spans"] = tuple(map(plain, made["spans"]))
    return made


def attention_modules(paths: Mapping[str, Any]) -> list[str]:
    """The paths of the innermost attention modules; Transformers' classes say in their names that they attend."""

    def attends(module: Any) -> bool:
        return "Attention" in type(module).__name__

    return [path for path, module in paths.items() if attends(module) and not any(map(attends, module.children()))]


def output_module(paths: Mapping[str, Any], path: str) -> Any:
    """The module whose output is U: W^O inside the attention module, or beside it as in BERT; else the module."""
    children = dict(paths[path].named_children())
    inside = next((children[name] for name in _OUTPUTS if name in children), None)
    beside = paths.get(path.rpartition(".")[0] + ".output.dense")
    return inside if inside is not None else beside if beside is not None else paths[path]
