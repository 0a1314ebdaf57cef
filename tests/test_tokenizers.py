"""Tokenizers of GGUF files against Hugging Face's definitions, and against sentencepiece itself, on drawn strings."""

import io
import json
import os
import re
import unicodedata
from functools import cache
from pathlib import Path
from random import Random

import pytest

gguf = pytest.importorskip("gguf", reason="GGUF files need gguf: pip install gguf")

from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402

from clearhead.errors import FileError  # noqa: E402
from clearhead.models import folder  # noqa: E402
from clearhead.models.gguf import read  # noqa: E402
from clearhead.models.tokens import ends_of, tokenizer_of  # noqa: E402
from seeds import fresh  # noqa: E402

BLOCKS = [  # first and last code point of what strings are drawn from
    (0x20, 0x7E), *((first, first + 0x7F) for first in (*range(0, 0x3100, 0x80), *range(0xF900, 0x10000, 0x80))),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x10400, 0x104AF), (0x1D400, 0x1D7FF), (0x1F1E6, 0x1FAFF), (0x20000, 0x2A6DF),
]  # fmt: skip
PIECES = [
    " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u200b", "\u2028", "0", "12", "1234567",
    "3.14", "٣٤٥", "½", "Ⅷ", "²", " the", "The", " zebra.", "\nzebra\n", "don't", "I'LL", "they're", "’s", "'S", "'ſ",
    "HTTPServer", "camelCase", "snake_case", "é", "e\u0301", "\u1112\u1161\u11ab", "한국어", "İ", "ß", "👩‍👩‍👧", "🇫🇷",
    "👍🏽", "❤️", "你好，", "东京", "2024年", "中文 text", "-->", "//", "/\n", "...", "!?\n", "http://x.y/z?q=1", "▁",
    "<0x41>", "Ġ", "ǅ",
]  # fmt: skip
SPECIAL = ["<|x|>", "<|end of it|>", "<tool>"]  # the last was added by users
CONTROL, USER = 3, 4

SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K = SHORT + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
DIGITS = {"type": "Digits", "individual_digits": True}


def split(expression, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": invert}


QWEN2 = split(CL100K.replace(r"\p{N}{1,3}", r"\p{N}"))
PUBLISHED = {  # the pre_tokenizer before its bytes, whether NFC comes first, and ignore_merges, of a tokenizer.json
    "gpt-2": (None, False, False),  # openai-community/gpt2
    "olmo": (None, True, False),  # EleutherAI/gpt-neox-20b, allenai/OLMo-7B
    "smollm": (DIGITS, False, False),  # HuggingFaceTB/SmolLM2-135M
    "starcoder": (DIGITS, False, False),  # bigcode/starcoder2-3b
    "refact": (DIGITS, False, False),  # smallcloudai/Refact-1_6B-fim
    "command-r": (DIGITS, True, False),  # CohereForAI/c4ai-command-r-v01
    "llama-bpe": (split(CL100K), False, True),  # meta-llama/Meta-Llama-3-8B
    "llama3": (split(CL100K), False, True),
    "llama-v3": (split(CL100K), False, True),
    "falcon3": (split(CL100K), False, True),  # tiiuae/Falcon3-1B-Base
    "pixtral": (split(CL100K), False, True),  # mistral-community/pixtral-12b
    "glm4": (split(CL100K), False, True),  # THUDM/GLM-4-9B-0414
    "dbrx": (split(CL100K, "Removed", True), False, False),  # databricks/dbrx-base, allenai/OLMo-2-1124-7B
    "smaug-bpe": (split(CL100K), False, False),  # abacusai/Smaug-Llama-3-70B-Instruct
    "qwen2": (QWEN2, True, False),  # Qwen/Qwen2.5-0.5B
    "stablelm2": (QWEN2, True, False),  # stabilityai/stablelm-2-zephyr-1_6b
    "tekken": (split(TEKKEN), False, True),  # mistralai/Mistral-Nemo-Instruct-2407
    "gpt-4o": (split(O200K, "Removed", True), False, False),  # openai's o200k, microsoft/Phi-4-mini-instruct
}
DISTINCT = [
    pytest.param(pre, 10_000, marks=pytest.mark.long)
    for pre in {str(each): pre for pre, each in PUBLISHED.items()}.values()
]


def drawn(count, special):
    """Strings of pieces, some of them repeated, of special tokens, prose, and characters of every block."""
    rng, strings, whole = Random(int(fresh().integers(2**32))), [], "\n".join(prose())
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 16)):
            kind, start = rng.randrange(10), rng.randrange(len(whole))
            first, last = BLOCKS[0] if kind < 2 else rng.choice(BLOCKS)
            letters = "".join(chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 5)))
            piece = rng.choice(PIECES) * rng.choice([1, 1, 1, 2, 5])
            parts.append(letters if kind < 4 else piece if kind < 8 else whole[start : start + 4 * kind])
            if special and kind == 7 and rng.random() < 0.4:
                parts[-1] = rng.choice(special)
        strings.append("".join(parts))
    return strings


@cache
def prose():
    """Lines of this project's documents, in English and Chinese."""
    root = Path(__file__).parent.parent
    return [line for name in ("README.md", "README.zh-CN.md") for line in (root / name).read_text("utf-8").splitlines()]


@cache
def vocabulary():
    """Words, and merges that go across every cut, so that each difference of the cuts changes ids."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = level
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=level.alphabet(), show_progress=False)
    trained.train_from_iterator([*prose(), *drawn(6000, ())], trainer)
    model = json.loads(trained.to_str())["model"]
    words = [*sorted(model["vocab"], key=model["vocab"].get), "Ġzebra", "zebra", *SPECIAL]  # no merges make these
    return words, [" ".join(pair) for pair in model["merges"]]


def loaded(place, kind, words, types, keys=None, **more):
    """The tokenizer of a GGUF file with these words."""
    writer = gguf.GGUFWriter(place / "words.gguf", "llama")
    for key, value in (keys or {}).items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(words)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return tokenizer_of(read(place / "words.gguf"), len(words))


def published(pre):
    """The tokenizer.json that the family publishes, with our vocabulary."""
    (words, merges), (cut, composed, ignored) = vocabulary(), PUBLISHED[pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    first = [{**level, "use_regex": True}] if cut is None else [cut, {**level, "use_regex": cut["type"] == "Digits"}]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    numbers = {word: number for number, word in enumerate(words)}
    added = [{"id": numbers[word], "content": word, "special": word != "<tool>", **flags} for word in SPECIAL]
    model = {"type": "BPE", "vocab": numbers, "merges": merges, "ignore_merges": ignored}
    whole = {"version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"} if composed else None}
    whole |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": first}, "post_processor": None}
    return Tokenizer.from_str(json.dumps(whole | {"decoder": {**level, "use_regex": True}, "model": model}))


@pytest.mark.parametrize(("pre", "count"), [*((pre, 250) for pre in PUBLISHED), *DISTINCT])
def test_byte_level_ids_are_those_of_the_published_tokenizer(tmp_path, pre, count):
    words, merges = vocabulary()
    types = [1] * (len(words) - 3) + [CONTROL, CONTROL, USER]
    more = {"tokenizer_pre": pre, "token_merges": merges, "add_bos_token": False}
    ours, theirs, texts = loaded(tmp_path, "gpt2", words, types, **more), published(pre), drawn(count, SPECIAL)
    ids = []
    for text, one, other in zip(texts, ours.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        ids.append(other.ids)
        assert one.ids == ids[-1], repr(text)
        assert one.offsets == other.offsets, repr(text)
    assert ours.decode_batch(ids, skip_special_tokens=False) == theirs.decode_batch(ids, skip_special_tokens=False)


def small(place, types=None, **more):
    """A tokenizer of GPT-2's kind with special tokens at its end, and their ids."""
    words, merges = vocabulary()
    words = [*words[:-3], "<|im_end|>", "<|b|>", "<|c|>"]
    kinds = [1] * (len(words) - 3) + (types or [CONTROL] * 3)
    more = {"tokenizer_pre": "gpt-2", "token_merges": merges, "add_bos_token": False} | more
    return loaded(place, "gpt2", words, kinds, **more), [len(words) - 3, len(words) - 2, len(words) - 1]


def test_a_cut_that_a_file_does_not_name_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="does not say how its tokenizer splits texts"):
        made, _ = small(tmp_path, tokenizer_pre="default")
    assert [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("a10000$$")] == ["a", "100", "00", "$$"]


def test_every_end_token_ends_a_reply_and_is_one_token(tmp_path):
    first, second, third = range(len(vocabulary()[0]) - 3, len(vocabulary()[0]))
    ends = {"eos_token_id": second, "eot_token_id": third}
    made, _ = small(tmp_path, types=[1, 1, 1], keys=ends)
    assert ends_of(read(tmp_path / "words.gguf")) == {first, second, third}  # the first is known by its text
    assert made.encode("<|im_end|><|b|><|c|>").ids == [first, second, third]
    made, _ = small(tmp_path, types=[1, 1, 1], keys={"eos_token_ids": [second, third], "added_tokens": ["<|c|>"]})
    assert ends_of(read(tmp_path / "words.gguf")) == {first, second, third}


@pytest.mark.parametrize("name", ["Phi 3 mini", "Phi-3-mini"])
def test_tokens_of_phi_3_strip_what_follows(tmp_path, name):
    made, (_, second, _) = small(tmp_path, name=name)
    stripped = made.encode("<|b|>\n the").ids == [second, *made.encode("the").ids]
    assert stripped == (name == "Phi-3-mini")


def folder_of(place, beside, *added, **config):
    """A folder with a tokenizer.json with these added tokens alone, and files beside it."""
    whole = json.loads(published("gpt-2").to_str())
    numbers, flags = whole["model"]["vocab"], dict.fromkeys(("single_word", "normalized", "lstrip"), False)
    tokens = [{"id": numbers[word], "content": word, "rstrip": True, "special": True, **flags} for word in added]
    (place / "tokenizer.json").write_text(json.dumps(whole | {"added_tokens": tokens}))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    for name, value in beside.items():
        (place / name).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("beside", "config"),
    [
        ({}, {"added_tokens_decoder": {"0": {"content": "!", "lstrip": True, "rstrip": True, "special": True}}}),
        ({}, {"eos_token": "<|x|>", "pad_token": "<tool>", "extra_special_tokens": ["<|end of it|>"]}),
        ({}, {"additional_special_tokens": ["<|x|>", "<tool>"]}),
        ({}, {"stripping": ["<|x|>"], "eos_token": "<|x|>", "pad_token": "<tool>"}),
        ({"special_tokens_map.json": {"eos_token": "<|x|>"}, "added_tokens.json": {"<tool>": None}}, {}),
    ],
    ids=range(5),
)
def test_added_tokens_of_a_folder_are_those_of_transformers(tmp_path, beside, config):
    transformers = pytest.importorskip("transformers", reason="it is compared with")
    ids = {word: number for number, word in enumerate(vocabulary()[0])}
    if "added_tokens.json" in beside:
        beside = beside | {"added_tokens.json": {word: ids[word] for word in beside["added_tokens.json"]}}
    folder_of(tmp_path, beside, *config.pop("stripping", ()), **config)
    ours, theirs = folder.tokenizer_of(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ["a <|x|> b<tool>c<|end of it|> d ! e", "<|x|><|x|>", *drawn(50, [*SPECIAL, " ! "])]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


def test_a_vocabulary_with_merges_keeps_its_special_tokens(tmp_path):
    words, merges = vocabulary()
    words = [*words, "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    assert folder.tokenizer_of(tmp_path).encode("a<|endoftext|>").ids[-1] == len(words) - 1
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(FileError, match=r"has no tokenizer\.json, and merges\.txt of a Qwen2Tokenizer tokenizer"):
        folder.tokenizer_of(tmp_path)


def in_llama_cpp():
    """The vocabularies with texts and their ids in llama.cpp's source, where CLEARHEAD_LLAMA_CPP says where it is."""
    place = os.environ.get("CLEARHEAD_LLAMA_CPP")
    return sorted(path.with_suffix("") for path in Path(place, "models").glob("*.gguf.inp")) if place else []


@pytest.mark.skipif(not in_llama_cpp(), reason="CLEARHEAD_LLAMA_CPP names no source of llama.cpp")
@pytest.mark.gate
def test_published_vocabularies_give_llama_cpps_ids():
    known = 0
    for path in in_llama_cpp():
        texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        ids = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
        file = read(path)
        try:
            made = tokenizer_of(file, len(file.metadata["tokenizer.ggml.tokens"]))
        except FileError:
            continue
        for text, line in zip(texts, ids, strict=False):
            if unicodedata.is_normalized("NFC", text):  # llama.cpp does not compose characters, as the models' do
                assert made.encode(text, add_special_tokens=False).ids == [int(each) for each in line.split()], path
        known += 1
    assert known >= 12


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("prefixed", [True, False])  # Llama 2 has a space before a text, Gemma has not
def test_sentencepiece_ids_are_those_of_sentencepiece(tmp_path, prefixed, count):
    sentencepiece = pytest.importorskip("sentencepiece", reason="it is compared with: pip install sentencepiece")
    trained, options = io.BytesIO(), {"model_type": "bpe", "byte_fallback": True, "character_coverage": 0.98}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
    options |= {"allow_whitespace_only_pieces": True, "user_defined_symbols": ["<tool>"], "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*prose() * 20, *drawn(300, ())]), model_writer=trained, vocab_size=4000,
        add_dummy_prefix=prefixed, **options,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    numbers = range(len(theirs))
    kinds = [(2, theirs.is_unknown), (CONTROL, theirs.is_control), (6, theirs.is_byte), (1, lambda _: True)]
    types = [next(kind for kind, holds in kinds if holds(number)) for number in numbers]
    words, special = [theirs.id_to_piece(number) for number in numbers], ["<s>", "</s>", "<tool>"]
    types[words.index("<tool>")] = USER
    more = {"token_scores": [theirs.get_score(number) for number in numbers], "add_space_prefix": prefixed}
    ours = loaded(tmp_path, "llama", words, types, bos_token_id=1, **more)
    differing = []
    for text in drawn(count, special):
        ids = [1]
        for part in re.split(f"({'|'.join(special)})", text):  # as Transformers does: a text between two is a text
            ids += [words.index(part)] if part in special else theirs.encode(part)
        if ours.encode(text).ids != ids:
            differing.append(text)
    assert not differing, (len(differing), differing[:20])
