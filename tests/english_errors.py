"""English errors for the test of their Chinese: where they are raised, and which ones."""

# by explain, trace, diagnose, shapes, scale, learn and view
REACHED = """
cli.py arguments.py lessons.py report/*.py explaining/*.py textbook/*.py diagnosing/*.py changing/edits_text.py
changing/edits.py changing/places.py changing/applying.py core/files.py core/array_files.py core/room.py
core/problem.py core/rules.py core/rule_values.py core/spans.py core/arrays.py core/reference.py layers/saved.py
view/long.py
view/names.py view/page.py view/server.py
"""

# words that Chinese text keeps: arrays, rules, options, functions and packages
NAMES = """
batch bias biased bool boost by cap capped causal clearhead concat context convention cut dict dtype exact explain
fast float gelu generate heads inf int keys learn length list logit mask masked model nan ndarray numbers off on
output pickle queries relu reshape rhymes rotary safetensors sat scale scaled scores shape share silu sinks softcap
softmax source spans stage str tanh tempered theirs token tokens torch trace transformers value view weights widths
window zip
"""

NOT_REACHED = {
    "said where standard output cannot show Chinese": [
        "--lang zh needs Chinese characters, and the output's encoding, {}, has none.",
        "set PYTHONIOENCODING=utf-8, or leave --lang out.",
    ],
    "bench prints English only": [
        "{}: for the contests with other libraries, which are not installed but lie in the source checkout."
    ],
    "the command line gives text, whole numbers and names, never other objects": [
        "model is {}: expected a directory, a name or a loaded model.",
        "text is {}: expected a string.",
        "each is {}: expected what walks the layers.",
        "token is {}: expected a position or a word of the text.",
        "path is {}: expected the name of a file, as text.",
        "path is {}: no file can be called so.",
        "language is {}: expected 'en' or 'zh'.",
        "title is {}: expected a string.",
        "title is {}: expected a text.",
        "exact is {}: expected a list of (layer, head) pairs.",
        "{} is {}: expected a slice of whole numbers.",
        "{} is {}: expected a probability, 0 to 1.",
        "{} holds more than {} members: expected {}.",
        "seen is {}: expected what `with ch.watch(model) as seen` gave, or the path of its file.",
        'ch.like(seen), or ch.like("run.safetensors")',
        "edits is {}: expected an edit, or a list of edits.",
        "edits holds {}: expected edits.",
        "edits is empty: nothing would change.",
        "{} is {}: expected a slice of whole numbers that goes forward.",
        "{} is {}: expected a word of the text.",
        "{} has {} entries, and the text has {} tokens.",
        "heads is a dictionary of layers, and layers are given as well.",
        "give one of both.",
        "heads is empty: it chooses nothing.",
        "layers is empty: it chooses nothing.",
        "{} is empty: it chooses nothing.",
        "{} is all False: it chooses nothing.",
        "leave heads out for all.",
        "leave layers out for all.",
        "leave {} out for all.",
    ],
    "the command line has no such edits": [
        "at_least is {}: expected a number above 0 and below 1.",
        "ch.cut(keys=…) of all other keys makes it 1, of these keys 0.",
        "t is {}: expected a number above 0.",
        "t=1.5 makes weights flatter, 0.5 sharper.",
        "to is {}: expected 'zero' or 'mean'.",
    ],
    "the text of explain is always known, and another hint replaces this one": [
        "{} is the word {}, and {}.",
        "give positions, or tokenizer=…",
        "{}=slice({}, {}) waits until the model has generated it.",
    ],
    "explain keeps the residual stream": [
        "the run has no residual stream: only GPT-2 checkpoints, which run in NumPy, keep theirs."
    ],
    "shapes reads its sizes itself": [
        "{} is missing.",
        "give q, k and v, or x, w_q, w_k and w_v: arrays or shapes.",
        "{} is {}: expected an array, or its shape in whole numbers or symbols.",
        "{} is {}: expected a whole number from 1 up, or a symbol.",
    ],
    "trace says a file's geometry only where there are scores": [
        "the weights were given: there are no queries, keys and scores.",
        "ch.trace(q, k, v) starts with them.",
    ],
    "scale draws its numbers itself": [
        "{} holds NaN or infinity: expected finite numbers.",
        "{} has shape {}: expected a list of numbers.",
    ],
    "caught, and another error raised": ["{} does not broadcast to {}"],
    "what a file holds is no tensor of JAX or on a GPU, and no function is differentiated": [
        "{} carries a tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad): this call has no forward-mode "
        "derivative.",
        "clearhead.attention, AttentionMatrix.observe and A @ v have one.",
        "{} is on device {} but q is on device {}.",
        "{}.to({}) moves it.",
        "{} is a masked array, and a mask of its own is not read here.",
        "{}.data has the numbers; masked keys are mask=~{}.mask.any(-1)[..., None, :], True = may attend.",
        "{} is traced by JAX (jax.jit, jax.grad, jax.vmap): its numbers cannot be read while JAX traces.",
        "clearhead.jax.attention and clearhead.jax.observe can be traced; call all else outside, on plain arrays.",
        "{} is a {}: expected a PyTorch tensor.",
        "torch.jit.trace would record what comes of {} as a constant.",
        "torch.export.export records attention as an operator, and so does torch.compile.",
        "pad it (torch.nested.to_padded_tensor) and give kv_lengths and query_lengths, or join its parts and give "
        "query_segments and kv_segments.",
        "{} is a DTensor: expected a plain tensor.",
        "{}.to_local() is this rank's part; clearhead.distributed attends to sequences that lie in shards.",
        "{} is a masked tensor, and a mask of its own is not read here.",
        "{}.get_data() has the numbers; mask=… says who may attend to what, True = may attend.",
        "{} is inside torch.func (vmap, grad, vjp, jacrev): its numbers cannot be read there.",
        "clearhead.attention, AttentionMatrix.observe, A @ v and A.T @ g can be called there; all else outside.",
        "{} is on device {}: no engine here runs there.",
        "{}.cpu() moves it.",
        "{} requires grad, and nothing here keeps a graph for it.",
        "{}.detach(), or `with torch.no_grad():` around the call.",
        "{} holds many gradients at once (is_grads_batched=True, vectorize=True): one is expected.",
        "torch.func.vjp with torch.func.vmap, and torch.func.jacrev, compute many at once.",
        "{} is a {} whose numbers cannot be read: {}",
        "{} could not be read through DLPack: {}.",
        "is it in the CPU's memory?",
    ],
}

PARTS = [  # sentences that are put together, or said by argparse, json and the system, as they come out
    "argument --head: expected one argument",
    "argument --lang: invalid choice: 'fr' (choose from 'en', 'zh')",
    "argument --why: ignored explicit argument 'x'",
    "unrecognized arguments: --foo",
    "the following arguments are required: FILE",
    "ambiguous option: --w could match --why, --windows",
    "standard output: No space left on device.",
    "standard output cannot be written: No space left on device.",
    "standard input cannot be read: Input/output error.",
    "a.json cannot be read: Is a directory.",
    "a.json cannot be read: it has more than 7.0 GB.",
    "a/b cannot be written: Permission denied in a.b.",
    "a.json cannot be read: Operation not permitted.",
    "a/b cannot be written: Not a directory.",
    "a/b cannot be written: Read-only file system.",
    "a cannot be read: Bad file descriptor.",
    "a cannot be read: File name too long.",
    "a cannot be read: No such file or directory.",
    "'a\\x00' cannot be read: embedded null byte.",
    "port 80 cannot be used: Address already in use.",
    *(
        f"a.json is not valid JSON: {said}: line 1 column 2 (char 1)."
        for said in (
            *("Expecting value", "Expecting property name enclosed in double quotes", "Expecting ',' delimiter"),
            *("Expecting ':' delimiter", "Extra data", "Unterminated string starting at", "Invalid \\escape"),
            *("Invalid control character at", "Invalid \\uXXXX escape", "Illegal trailing comma before end of object"),
            "Illegal trailing comma before end of array",
        )
    ),
    "a.json is not valid JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; "
    "use sys.set_int_max_str_digits() to increase the limit.",
    "a.npz is not a readable .npz file: File is not a zip file.",
    *(
        f"a.safetensors is not a whole safetensors file: its header {said}."
        for said in (
            *("is not valid JSON: Extra data: line 1 column 2 (char 1)", "holds a list: expected a JSON object"),
            *("gives 'q' twice", "has lists or objects more than 64 levels deep"),
        )
    ),
    "a.json: its arrays would take 7.0 GB of memory, and 1.0 GB are free.",
    "./gpt2: its weights in float32 would take 7.0 GB of memory, and 1.0 GB are free.",
    "./bert: this model in float32 would take 7.0 GB of memory, and 1.0 GB are free.",
    "q in float64 would take 7.0 GB, and 1.0 GB are free.",
    "the queries and keys would take 7.0 GB, and 1.0 GB are free.",
    "every step of 1,000 weights in float64 would take 7.0 GB, and 1.0 GB are free.",
    "head 9 is outside 0..1: the file has 2 heads.",
    "head 9 is outside 0..0: the file has 1 head.",
    "batch 9 is outside 0..0: the file has 1 batch.",
    "batch 9 is outside 0..1: the file has 2 batch entries.",
    "query 9 is outside 0..0: the file has 1 query.",
    "query 9 is outside 0..1: the file has 2 queries.",
    "unknown size `nn`.",
    "unknown rule `num_heads`.",
    "unknown key in a.json: `casual`.",
    "Known: n, m.",
    "did you mean `n`? Known: n, m.",
    "layer 9 is outside 0..1: the model has 2 layers.",
    "head 9 is outside 0..1: the model has 2 heads.",
    *(
        f"x/y is not a directory here, the cache /z has no config.json with safetensors of it, and {why}"
        for why in (
            *("HF_HUB_OFFLINE does not allow downloading it.", "a.b cannot be reached to download it."),
            *("a.b has no such model, or only for its owner.", "it cannot be downloaded: 7"),
        )
    ),
    "./bert: the weights lack a.b.",
    "./bert: the weights lack a.b and 3 more.",
    "./bert is not a GPT-2 directory, and other models need PyTorch and Transformers: there is no torch and no "
    "transformers.",
    "TEXT is not UTF-8: character 3 is byte 0xe9.",
    "TEXT is not UTF-8: character 3 is a lone surrogate.",
    *(f"cut(queries=9, keys=9): its {name} are none of the text's 4 tokens." for name in ("queries", "keys")),
    "cut(keys=9): there is no layer 'a' in model rhymes.",
    "cut(keys=9): there is no head 9 in model rhymes, which has 8.",
    *(f"--cut 'x': expected {form}." for form in ("QUERIES>KEYS", "KEYS=NUMBER", "LAYER.HEAD", "LAYER.HEAD after @")),
    "--boost '=2': boost has no keys: expected those that get more.",
    "--off '-1': heads holds -1: expected a list of whole numbers from 0 up, or a dictionary of layer to such a list.",
    "--boost 'sat=inf': by is inf: expected a finite number.",
    "cut(keys='a'): keys is the word 'a', and the text has no such word.",
    "did you mean 'sat'? Words are found whole, and by upper and lower case.",
    "cut(keys='a'): keys is the word 'a', and the text has it 2 times.",
    "cut(keys='a#3'): keys is 'a#3', and the text has 'a' 2 times.",
    "cut(keys='a#3'): keys is 'a#3', and the text has 'a' once.",
    "a.safetensors is not a whole record of ch.watch: q has 1 axes: expected at least two.",
    "a.safetensors is not a whole record of ch.watch: two layers have one name",
    "exact=[('0', 0)] chooses (layer, head) pairs: about 7 fit; `clearhead view` serves any number.",
    "exact=[('0', 0)] chooses (layer, head) pairs: about 7 fit; dtype='bfloat16' halves it; `clearhead view` serves "
    "any number.",
    "a.pt holds objects other than tensors, numbers and texts, or is damaged: it is not opened (UnpicklingError).",
    "'q' has a header of version 3.0: expected plain numbers.",
    "b_q has shape (3,): expected one number per output column, (4,).",
    "tokens has 2 strings for 3 keys: expected one for each.",
    "tokens has 2 strings for 3 queries: expected one for each.",
    *(
        f"weights is (queries 2, keys 3) and v is (keys 2, d_v 2): {said}"
        for said in (
            *("expected as many axes, at least two.", "each of the 3 weights of a query needs a value."),
            "batches must be equal, and query heads a multiple of the values' kv_heads.",
        )
    ),
    "num_heads is 0: expected a whole number from 1 up.",
    "num_threads is 0: expected a whole number from 1 to 1,024.",
    "scale has shape (2,): expected a single number.",
    *(
        f"spans[0], the query labels, {said}"
        for said in (
            *("is float64: expected whole numbers.", "has shape (2,): expected (queries 3)."),
            "has shape (2,): expected (batch 1, queries 3), or (queries 3) for every batch alike.",
            "goes up to 3: the table has query_spans 2, so each must be below 2.",
        )
    ),
    *(
        f"spans[2], the table, {said}"
        for said in (
            *(
                "is bool: expected a float dtype.",
                "has shape (2,): expected (query_spans, key_spans), or one per head.",
            ),
            "holds NaN or +inf: expected finite numbers, or -inf, which forbids.",
            "has shape (3, 2), which does not broadcast to (heads 2, query_spans 3, key_spans 2).",
        )
    ),
    "scale is a ndarray of shape (2, 3): expected a number.",
    "scale is an Array of shape (2, 3): expected a number.",
]
