"""Reads a checkpoint in a folder, as Hugging Face stores it: config.json, safetensors (or shards), tokenizer.json."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clearhead.core.array_files import mapped_tensors
from clearhead.core.axes import Array
from clearhead.core.files import json_of, read_bytes, read_text
from clearhead.errors import FileError, shown
from clearhead.models.families import (
    CONFIG,
    FAMILIES,
    OTHER_NAMES,
    Config,
    Family,
    NotInNumPyError,
    Rope,
    alibi_slopes,
    check_keys,
    of_parameters,
)
from clearhead.models.layer_sizes import Reader, layer_sizes
from clearhead.models.mlp import ACTIVATIONS
from clearhead.models.protocol import ids_in
from clearhead.models.tensors import renamed
from clearhead.models.weights import Stored

_MOST_TOKENIZER = 2**28  # bytes; the largest vocabularies take some 40 million
_MOST_LAYERS, _MOST_INPUT = 4096, 2**16  # layers, and the width of a layer's embedding of a token
BUFFERS = (".attn.bias", ".attention.bias", ".masked_bias", "rotary_emb.inv_freq")  # in older files; no weights
_SIZES = {"num_hidden_layers", "num_attention_heads", "hidden_size"}  # any file may use Llama's names for these
_TOKENIZERS = "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model", "tekken.json", "tokenizer.model"
_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja"]  # to download from the Hugging Face hub


def config_of(path: Path, data: Mapping[str, Any]) -> Config:
    """Read the decoder that a config.json describes. Raises FileError for missing, senseless or unknown entries."""
    kind = str(data.get("model_type"))
    name = OTHER_NAMES.get(kind, kind)
    if name not in FAMILIES:
        what = f"{path} is for model_type {kind!r}, which does not run in NumPy."
        raise NotInNumPyError(what, f'these do: {", ".join(FAMILIES)}. For others: pip install "clearhead[hf]"')
    family = FAMILIES[name]
    if "attn_config" in family.uses and isinstance(data.get("attn_config"), dict):
        data = {**data, **data["attn_config"], "model_type": kind}
    used = {*CONFIG["used"], family.epsilon, *family.keys.values(), *family.defaults, *family.uses}
    check_keys(f"{path}: ", data, used, {**CONFIG, "only": {**CONFIG["only"], **family.only}})
    kept = used - (family.keys.keys() - _SIZES)
    stated = {key: value for key, value in data.items() if key in kept and (value is not None or key in CONFIG["null"])}
    usual = {key: stated[theirs] for key, theirs in family.keys.items() if theirs in stated}
    if twice := [key for key, value in usual.items() if stated.get(key, value) != value]:
        raise NotInNumPyError(f"{path}: {twice[0]} and {family.keys[twice[0]]} mean the same, but differ.")
    rope = {"rope_parameters": _rope_parameters(path, data, family)}
    return described(path, {**family.defaults, **stated, **usual, **rope, **family.fixed}, name, family)


def check_layers(path: Path, layers: Any) -> None:
    """Raise FileError for more layers than any model has, before lists with one entry per layer fill the memory."""
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise FileError(f"{path}: it has {layers:,} layers: expected at most {_MOST_LAYERS:,}.")


def described(path: Path, data: Mapping[str, Any], name: str, family: Family) -> Config:
    """Read a decoder from a file's data under the keys of Llama's config.json, of which `family.keys` renames some.

    Raises FileError for missing or senseless entries.
    """
    if data.get("multi_query") and not data.get("new_decoder_architecture"):
        data = {**data, "num_key_value_heads": 1}  # Falcon's first files
    read = Reader(path, data, family.keys)
    layers, heads = read.whole("num_hidden_layers"), read.whole("num_attention_heads")
    d_model, positions = read.whole("hidden_size"), read.whole("max_position_embeddings")
    check_layers(path, layers)
    if "head_dim" not in data and d_model % heads:
        raise FileError(f"{path}: the width {d_model} is not a multiple of the {heads} heads.")
    windows = _windows(read, family, layers)
    sizes = layer_sizes(read, windows)
    experts = next((key for key in ("num_experts", "num_local_experts") if data.get(key)), None)
    if experts and not (read.whole("num_experts_per_tok") <= read.whole(experts) <= _MOST_LAYERS):
        raise FileError(f"{path}: {read.keys.get(experts, experts)} is {data[experts]}, which cannot be.")
    return Config(
        family=name,
        layers=layers,
        heads=heads,
        kv_heads=sizes[0].kv_heads,
        d_model=d_model,
        d_mlp=sizes[0].d_mlp,
        positions=positions,
        vocabulary=read.whole("vocab_size"),
        epsilon=read.number(family.epsilon, 1e-5 if family.centred else 1e-6, 0, 1),
        activation=_activation(read, name, family),
        centred=family.centred,
        gated=family.gated,
        tied=bool(data.get("tie_word_embeddings", False)),
        sizes=sizes,
        d_input=int(read.number("hidden_size_per_layer_input", 0, 0, _MOST_INPUT)),
        windows=windows,
        scale=read.number(
            "attention_multiplier", read.number("query_pre_attn_scalar", sizes[0].d_k, 1e-9) ** -0.5, 1e-9
        ),
        ropes=_ropes(read, family, windows, [size.d_k for size in sizes], positions),
        slopes=alibi_slopes(heads, read.number("alibi_bias_max", 8, 1e-9)) if "alibi_bias_max" in data else (),
        clip=read.maybe("clip_qkv"),
        softcap=read.maybe("attn_logit_softcapping"),
        logit_softcap=read.maybe("final_logit_softcapping"),
        embedding_scale=d_model**0.5 if family.by_width else read.number("embedding_multiplier", 1.0),
        added_scale=read.number("residual_multiplier", 1.0),
        logit_scale=read.number("logit_scale", 1 / read.number("logits_scaling", 1.0, 1e-9)),
        parallel=bool(data.get("use_parallel_residual", family.parallel)),
        normed_last=family.normed_last,
        experts=read.whole(experts) if experts else 0,
        chosen=read.whole("num_experts_per_tok") if experts else 0,
        d_expert=read.whole("moe_intermediate_size", data.get("intermediate_size")) if experts else 0,
        shares_sum=bool(data.get("norm_topk_prob", False)),
        limit=read.maybe("swiglu_limit"),
    )


def one_line(error: BaseException) -> str:
    """Return a library's error message on one line, or the name of its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def _activation(read: Reader, name: str, family: Family) -> str:
    made = read.data.get("hidden_act", family.activation)
    if made == "gelu" and name == "gemma":
        made = family.activation  # Gemma's files say gelu and mean its approximation by tanh
    if family.activation == "quick_gelu":
        made = family.activation  # gpt-oss's files say silu
    if not isinstance(made, str) or made not in ACTIVATIONS:
        key = read.keys.get("hidden_act", "hidden_act")
        raise NotInNumPyError(f"{read.path}: {key} {made!r} is unknown: expected one of {', '.join(ACTIVATIONS)}.")
    return made


def _windows(read: Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, or None: as `layer_types` lists them, or by a pattern."""
    data, kinds = read.data, {"full_attention": False, "sliding_attention": True}
    none = data.get("sliding_window") is None or data.get("use_sliding_window") is False
    window = None if none else read.whole("sliding_window")
    types, pattern = data.get("layer_types"), data.get("sliding_window_pattern")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
            raise NotInNumPyError(f"{read.path}: layer_types is {shown(types)}, which is not supported.")
        chosen = [kinds[kind] for kind in types]
    elif isinstance(pattern, list):
        chosen = pattern
    elif pattern is not None:  # every number-th layer has no window; 0: every layer has one
        number = read.whole("sliding_window_pattern") if pattern else 0
        chosen = [not number or (layer + 1) % number != 0 for layer in range(layers)]
    elif data.get("use_sliding_window"):  # Qwen2: the last layers have it
        chosen = [layer >= read.number("max_window_layers", 0) for layer in range(layers)]
    else:
        chosen = [family.windows[layer % len(family.windows)] for layer in range(layers)]
    chosen = [*chosen[:-1], False] if family.far_last else chosen
    if len(chosen) != layers or not all(isinstance(each, bool) for each in chosen):
        raise FileError(f"{read.path}: its pattern of windows is {shown(chosen)}: expected a truth value per layer.")
    return tuple(window if each else None for each in chosen)


def _ropes(
    read: Reader, family: Family, windows: Sequence[int | None], widths: Sequence[int], positions: int
) -> tuple[Rope | None, ...]:
    if family.learned is not None or "alibi_bias_max" in read.data:
        return (None,) * len(windows)
    stated = read.data["rope_parameters"]
    whole, local = (stated.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))

    @cache
    def rope(window: int | None, d_k: int) -> Rope:
        if window and "rope_local_base_freq" in read.data:
            return _rope(read, local, "rope_local_base_freq", d_k, positions)
        plain = local or {"rope_theta": family.defaults.get("rope_theta")}
        return _rope(read, plain if window and family.near_plain else whole, "rope_theta", d_k, positions)

    turns = read.data.get("no_rope_layers")
    if turns is None:
        far = not family.far_unturned or read.data.get("sliding_window") is None
        turns = [(far or window) and not family.unturned[i % len(family.unturned)] for i, window in enumerate(windows)]
    if not isinstance(turns, list) or len(turns) != len(windows):
        raise FileError(f"{read.path}: no_rope_layers is {shown(turns)}: expected one number for each layer.")
    return tuple(rope(*each) if turn else None for *each, turn in zip(windows, widths, turns, strict=True))


def _rope_parameters(path: Path, data: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the rotary parameters by kind of layer. Raises NotInNumPyError for those that are not supported."""
    said = {key: data.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
    stated, older = said.values()
    if stated and older and stated != older:
        raise NotInNumPyError(f"{path}: rope_parameters is {shown(stated)} and rope_scaling {shown(older)}.")
    by_layer = "rope_local_base_freq" in family.defaults or (family.near_plain and any(family.windows))
    if not by_layer or not stated:
        stated = {"full_attention": stated or older or family.defaults.get("rope_parameters", {})}
    rope = {key: each or {} for key, each in stated.items()} if isinstance(stated, dict) else {}
    known = {"full_attention", "sliding_attention"}
    if not all(isinstance(each, dict) for each in rope.values()) or not rope.keys() <= known:
        raise NotInNumPyError(f"{path}: rope_parameters is {shown(stated)}, which is not supported.")
    used = {*CONFIG["rope"], *family.defaults, *family.uses, *family.keys, *family.defaults.get("rope_parameters", {})}
    used -= {"type"} if by_layer else set()  # Gemma 3's class reads rope_type
    for each in rope.values():
        plain = by_layer and each.get("rope_type", "default") == "default"  # then Gemma 4's class ignores the share
        known = used - {"partial_rotary_factor"} if plain else used
        check_keys(f"{path}: its rotary positions: ", each, known, {**CONFIG, "harmless": (), "begins": ("_",)})
    return rope


def _rope(read: Reader, stated: Mapping[str, Any], key: str, d_k: int, positions: int) -> Rope:
    stated = {name: value for name, value in stated.items() if value is not None}
    share = stated.get("partial_rotary_factor", read.data.get("partial_rotary_factor", 1.0))
    share = 1.0 if stated.get("rope_type") == "proportional" else share
    bases = {key: stated.get("rope_theta", read.data.get(key, 10_000.0))}
    base = Reader(read.path, bases, read.keys).number(key, 10_000.0, 1.0)
    original = read.data.get("original_max_position_embeddings")
    parameters = {**stated, **({} if original is None else {"original_max_position_embeddings": original})}
    try:
        dims = read.whole("rotary_dim", int(d_k * float(share)))
        dims = read.whole("local_rotary_dim", dims) if key == "rope_local_base_freq" else dims
        if dims % 2 or dims > d_k:
            raise ValueError(f"{dims} of {d_k} dimensions are rotated")
        return of_parameters(parameters, base, dims, positions)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"{read.path}: its rotary positions cannot be read: {one_line(error)}."
        raise NotInNumPyError(what) from None


def stored(place: Path, config: Config, data: Mapping[str, Any]) -> dict[str, Stored]:
    """Map the weights of a folder, under GGUF's names; `data` is its config.json. Raises FileError."""
    arrays: dict[str, tuple[str, Array]] = {}
    for path in weight_files(place):
        for name, (kind, array) in mapped_tensors(path)[0].items():
            if name.endswith(BUFFERS):
                continue
            packed = kind == "U8" and name.endswith(("_blocks", "_scales"))  # gpt-oss
            if array is None or not (packed or kind in ("F64", "F32", "F16", "BF16")):
                raise NotInNumPyError(f"{path}: `{name}` is stored as {kind}, which is not supported.")
            if name in arrays:
                raise FileError(f"{place} holds `{name}` twice.")
            arrays[name] = kind, array
    result = renamed(arrays, config)
    stated = {**FAMILIES[config.family].defaults, **data}
    for key, parts in CONFIG["biases"].items():
        biases = [name for name in result if name.endswith(".bias") and name.split(".")[-2] in parts]
        without = key == "no_bias"
        if biases and stated.get(key) is without:
            raise NotInNumPyError(f"{place}: {key} is {shown(stated[key])}, but the weights have `{biases[0]}`.")
        read = key in FAMILIES[config.family].defaults and "token_embd.weight" in result
        if read and stated.get(key) is (not without) and not biases:
            raise FileError(f"{place}: {key} is {shown(stated[key])}, but the weights have none of these biases.")
    return result


def check_folder(place: Path) -> None:
    """Raise FileError for a folder with GGUF files instead of a config.json, or with an adapter."""
    if os.path.isfile(place / "adapter_config.json"):
        what = f"{place} has an adapter (such as LoRA), and adapters are not supported."
        raise FileError(what, "merge it with peft's PeftModel.merge_and_unload(), and save the merged model.")
    if (files := sorted(map(str, place.glob("*.gguf")))) and not os.path.isfile(place / "config.json"):
        raise FileError(f"{place} has GGUF files and no config.json.", f"name one of the files: {', '.join(files)}")


def weight_files(place: Path) -> list[Path]:
    """List a checkpoint's safetensors files, one or several shards. Raises FileError if there are none."""
    single, index = place / "model.safetensors", place / "model.safetensors.index.json"
    if os.path.isfile(single):
        return [single]
    if os.path.isfile(index):
        shards = json_of(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise FileError(f"{index} has no weight_map of tensor names to files.")
        return [place / Path(shard).name for shard in sorted(set(shards.values()))]
    pickles = [p.name for p in place.glob("*.bin")] + [p.name for p in place.glob("*.pt")]
    hint = "give the folder of a model, or a .gguf file."
    hint = f"{pickles[0]} is a pickle, which can run code: convert it to safetensors." if pickles else hint
    raise FileError(f"{place} has no model.safetensors.", hint)


def check_tokenizer(place: Path) -> bool:
    """Is there a tokenizer.json? Raises FileError if there is neither that nor GPT-2's two files."""
    if os.path.isfile(place / "tokenizer.json"):
        return True
    others = [name for name in _TOKENIZERS if os.path.isfile(place / name)]
    if not others:
        raise FileError(f"{place} has no tokenizer.json and no other tokenizer file.")
    kind = _json(place / "tokenizer_config.json").get("tokenizer_class")
    kind = str(kind or _json(place / "config.json").get("model_type", "gpt2"))
    if others[:2] == list(_TOKENIZERS[:2]) and kind.lower().startswith("gpt2"):
        return False
    raise NotInNumPyError(
        f"{place} has no tokenizer.json, and {others[-1]} of a {kind} tokenizer is not supported.",
        f"make one: transformers.AutoTokenizer.from_pretrained({str(place)!r}).save_pretrained({str(place)!r})",
    )


def tokenizer_of(place: Path) -> Any:
    """Read the tokenizer, and turn off the padding and truncation that tokenizer.json may ask for. Raises FileError."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    whole = check_tokenizer(place)
    data = _json(place / "tokenizer_config.json")
    try:
        if whole:
            tokenizer = Tokenizer.from_buffer(read_bytes(place / "tokenizer.json", _MOST_TOKENIZER))
        else:
            tokenizer = Tokenizer(models.BPE.from_file(str(place / "vocab.json"), str(place / "merges.txt")))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        _add_tokens(place, tokenizer, data)
    except FileError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise FileError(f"{place}: the tokenizer cannot be read: {error!s}.") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _add_tokens(place: Path, tokenizer: Any, data: Mapping[str, Any]) -> None:
    """Add the special tokens that stand in files beside tokenizer.json; they are matched before a text is split."""
    from tokenizers import AddedToken

    if data.get("split_special_tokens"):
        raise NotInNumPyError(f"{place}: split_special_tokens is true, which is not supported.")
    words = _special_words(place, data)
    more = data.get("extra_special_tokens") or data.get("additional_special_tokens") or ()
    special = [*words.values(), *map(_text, more.values() if isinstance(more, dict) else more)]
    if not os.path.isfile(place / "tokenizer.json"):
        special.append("<|endoftext|>")  # of GPT-2, which no file says
    if "added_tokens_decoder" in data:
        given = {int(number): AddedToken(**token) for number, token in data["added_tokens_decoder"].items()}
    else:
        made = _json(place / "added_tokens.json").items()
        given = {i: AddedToken(x, normalized=x not in special, special=x in special) for x, i in made}
    for number, token in sorted(given.items()):
        known = tokenizer.token_to_id(token.content)
        if (tokenizer.get_vocab_size() if known is None else known) != number:
            raise FileError(f"{place}: its token {token.content!r} should have the id {number}, but has {known}.")
        tokenizer.add_tokens([token])
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    found = [word for word in dict.fromkeys(special) if word in tokenizer.get_vocab() and word not in there]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in found])


def _json(path: Path) -> dict[str, Any]:
    return json_of(path) if os.path.isfile(path) else {}


def _text(word: Any) -> str:
    word = word.get("content") if isinstance(word, dict) else word
    return word if isinstance(word, str) else ""


def _special_words(place: Path, data: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by their names in templates, such as eos_token; older models keep them in a file."""
    older = {} if "added_tokens_decoder" in data else _json(place / "special_tokens_map.json")
    names = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    return {name: word for name in names if (word := _text({**data, **older}.get(name)))}


def chat_of(place: Path, tokenizer: Any) -> tuple[str | None, dict[str, str], frozenset[int]]:
    """Return a folder's chat template or None, the special tokens that it may write, and the ids that end a reply."""
    data, template = _json(place / "tokenizer_config.json"), place / "chat_template.jinja"
    words, stated = _special_words(place, data), data.get("chat_template")
    if os.path.isfile(template):
        stated = read_text(str(template))
    elif isinstance(stated, list):
        stated = {one.get("name"): one.get("template") for one in stated if isinstance(one, dict)}.get("default")
    ends = [_json(place / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    end = tokenizer.token_to_id(words["eos_token"]) if "eos_token" in words else None
    return stated if isinstance(stated, str) else None, words, ids_in(end, *ends)


def downloaded(name: str) -> Path:
    """Download a model from the Hugging Face hub, which has two seconds to answer, and return its folder."""
    from huggingface_hub import constants, snapshot_download

    tried = f"{name} is no folder here, it is not in the cache {constants.HF_HUB_CACHE} with config.json and"
    hint = "`clearhead models` lists the models on this machine; on huggingface.co a name is owner/name."
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, etag_timeout=2.0))
    except (OSError, ValueError) as error:  # no such model, or no network; no such name can be
        raise FileError(f"{tried} safetensors, and it cannot be downloaded: {one_line(error)}", hint) from None
