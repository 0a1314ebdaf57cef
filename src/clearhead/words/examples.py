"""What stands below the help of each command, in English and in Chinese: examples, files, exit codes."""

BELOW: dict[str, tuple[str, str]] = {
    "": (
        """install more:
  pip install "clearhead[hf]"      explain and view with models of Transformers
  pip install "clearhead[view]"    clearhead view

clearhead COMMAND --help shows a command's options and examples
""",
        """另外安装：
  pip install "clearhead[hf]"      explain 和 view 可用 Transformers 的模型
  pip install "clearhead[view]"    clearhead view

clearhead COMMAND --help 显示该命令的选项和示例
""",
    ),
    "explain": (
        """examples:
  clearhead explain "humpty dumpty sat on"
  clearhead explain "twinkle twinkle little star" --layer 0 --token little
  clearhead explain "mary had a little" --cut "little>mary" --layer 0
  clearhead explain "humpty dumpty sat on" --cut "on>sat@0.3" --off 1.2,1.5
  clearhead explain "mary had a little" --why
  clearhead explain "mary had a little" --why lamb --against dog
  clearhead explain "mary had a little" --why --html why.html
  clearhead explain "humpty dumpty" --generate 8
  clearhead explain "jack and jill" --lang zh
  clearhead explain "humpty dumpty sat on" --html page.html
  clearhead explain "Attention is all" --model ./gpt2 --json attention.json
  clearhead explain "Attention is all" --model Qwen/Qwen3-0.6B
  clearhead explain --file book.txt --html book.html --model ./gpt2
  clearhead explain --file book.txt --html book.html --windows
  clearhead explain --file book.txt --html book.html \\
      --exact 3.5,7.0 --dtype bfloat16

edits: the text is run without and with them, several of each together
  --cut "on>sat"       the query on no longer sees the key sat, in every layer
                       and head, or in those of --layer and --head
  --cut "on>sat@0.3"   in head 3 of layer 0; @0 all of layer 0, @.3 head 3 of
                       every layer, @0.3,1.5 two heads
  --cut ">0:2"         no query sees the first two tokens; --cut "3>0,sat" names
                       tokens by position and by word
  --boost "sat=2"      2 is added to the logits of the key sat, for every query;
                       also "on>sat=2@0.3"; a negative number makes its
                       weight smaller
  --off 0.3            the output of head 3 of layer 0 becomes 0; 0 is a layer
words are whole words of the text; sat#2 is the second sat, sat#all all of them;
negative positions count from the end: --cut="-1>0"
--layer and --head also choose the head to show; default: the edited one whose
output moved furthest

models other than GPT-2 directories need PyTorch and Transformers:
  pip install "clearhead[hf]"
""",
        """示例：
  clearhead explain "humpty dumpty sat on"
  clearhead explain "twinkle twinkle little star" --layer 0 --token little
  clearhead explain "mary had a little" --cut "little>mary" --layer 0
  clearhead explain "humpty dumpty sat on" --cut "on>sat@0.3" --off 1.2,1.5
  clearhead explain "mary had a little" --why
  clearhead explain "mary had a little" --why lamb --against dog
  clearhead explain "mary had a little" --why --html why.html
  clearhead explain "humpty dumpty" --generate 8
  clearhead explain "jack and jill" --lang zh
  clearhead explain "humpty dumpty sat on" --html page.html
  clearhead explain "Attention is all" --model ./gpt2 --json attention.json
  clearhead explain "Attention is all" --model Qwen/Qwen3-0.6B
  clearhead explain --file book.txt --html book.html --model ./gpt2
  clearhead explain --file book.txt --html book.html --windows
  clearhead explain --file book.txt --html book.html \\
      --exact 3.5,7.0 --dtype bfloat16

改动：文本在改动前后各运行一次；每种改动都可以写几个
  --cut "on>sat"       查询 on 不再看得到键 sat，在每一层的每个头中，
                       或只在 --layer 和 --head 指定的层和头中
  --cut "on>sat@0.3"   只在第 0 层第 3 个头中；@0 是第 0 层全部的头，
                       @.3 是每一层的第 3 个头，@0.3,1.5 是两个头
  --cut ">0:2"         任何查询都看不到前两个词元；如 --cut "3>0,sat"，
                       词元可以写位置，也可以写词
  --boost "sat=2"      对每个查询，给键 sat 的 logit 加 2；也可写
                       "on>sat=2@0.3"；小于 0 时它得到的更少
  --off 0.3            第 0 层第 3 个头的输出变为 0；只写 0 表示整层
词须是文本中完整的词；sat#2 是第二个，sat#all 是全部；
负的位置从末尾数起：--cut="-1>0"
--layer 和 --head 也决定显示哪个头；默认：改动涉及的头中，
输出变化最大的那个

GPT-2 目录以外的模型需要 PyTorch 和 Transformers：
  pip install "clearhead[hf]"
""",
    ),
    "shapes": (
        """examples:
  clearhead shapes
  clearhead shapes n=12 d_model=512 h=8
  clearhead shapes n=12 m=9 d_model=512 h=8 h_kv=2
  clearhead shapes B n=1024 d_k=64

sizes, each NAME=NUMBER, or NAME alone for a symbol:
  n        queries                     m        keys of another sequence
  d_model  the width of X              h        heads
  d_k      the width of a query        d_v      the width of a value
  B        texts in a batch            h_kv     key heads, shared by queries
d_k is d_model/h and d_v is d_k where they are not given; a size without a
number stays a symbol

in Python, shapes of your own: ch.shapes(("n", 64), ("m", 64), ("m", "d_v"))
""",
        """示例：
  clearhead shapes
  clearhead shapes n=12 d_model=512 h=8
  clearhead shapes n=12 m=9 d_model=512 h=8 h_kv=2
  clearhead shapes B n=1024 d_k=64

尺寸写成 NAME=NUMBER；只写 NAME，就保留为符号：
  n        查询数                      m        另一个序列的键数
  d_model  X 的宽度                    h        头数
  d_k      查询的宽度                  d_v      值的宽度
  B        批次中的文本数              h_kv     键头数，由查询头共用
没有给出时，d_k 为 d_model/h，d_v 等于 d_k；没有给数的尺寸保留为符号

在 Python 中可用自己的形状：ch.shapes(("n", 64), ("m", 64), ("m", "d_v"))
""",
    ),
    "scale": (
        """examples:
  clearhead scale
  clearhead scale --widths 8,64,512 --keys 100
  clearhead scale --json scale.json
  clearhead scale --html scale.html

random queries and keys of each width d_k: the variance of q·k, and the largest
weight a of the softmax with its derivative a(1-a), with and without 1/√d_k
the page has a slider over d_k (1, 2, 4 … 256, or those of --widths)

in Python: from clearhead.textbook.why_scale import why_scale, saturation
""",
        """示例：
  clearhead scale
  clearhead scale --widths 8,64,512 --keys 100
  clearhead scale --json scale.json
  clearhead scale --html scale.html

对每个宽度 d_k 取随机的查询和键，列出 q·k 的方差、softmax 的最大权重 a
及其导数 a(1-a)，乘与不乘 1/√d_k 各一次
网页上有一个 d_k 的滑块（1、2、4 … 256，或 --widths 的各个值）

在 Python 中：from clearhead.textbook.why_scale import why_scale, saturation
""",
    ),
    "learn": (
        """examples:
  clearhead learn
  clearhead learn --step 47
  clearhead learn --html learn.html
  clearhead learn --json learn.json

a very small model learned four nursery rhymes, and all of its weights were
recorded at 42 steps: the loss, and at one step W_Q, W_K and W_V, what the last
token of "humpty dumpty sat on a" attends to, and what comes next

in a checkout of the sources, training/record.py records another run
""",
        """示例：
  clearhead learn
  clearhead learn --step 47
  clearhead learn --html learn.html
  clearhead learn --json learn.json

一个很小的模型学了四首童谣，训练中记录了 42 步的全部权重：显示损失，
以及某一步的 W_Q、W_K、W_V，"humpty dumpty sat on a" 的最后一个词元
关注什么、下一个词元是什么

在源码目录中，training/record.py 可以记录另一次训练
""",
    ),
    "trace": (
        """examples:
  clearhead trace example.json
  clearhead trace layer.npz --head 3 --query 7
  clearhead trace layer.npz --num-heads 1,8
  clearhead trace layer.npz --json steps.json --html page.html

a file holds q, k, v (or x, w_q, w_k, w_v, w_o, num_heads; or weights and v),
any score rules, the names of the tokens, and, if you want them checked, values
that you claim for scores, scaled, weights or output, and of a layer also for Q,
K, V, heads and H, the heads joined:
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]],
   "scores": [[6.5, 10], [2, 3.5]], "tokens": ["hello", "world"]}
  {"weights": [0.15, 0.25, 0.55, 0.05], "v": [[1], [2], [3], [4]]}
where source_tokens names the keys, tokens names the queries only

exit code: 0 every claim is right, 1 a claim is wrong, 2 bad input
""",
        """示例：
  clearhead trace example.json
  clearhead trace layer.npz --head 3 --query 7
  clearhead trace layer.npz --num-heads 1,8
  clearhead trace layer.npz --json steps.json --html page.html

文件中有 q、k、v（或 x、w_q、w_k、w_v、w_o、num_heads；或 weights 和 v），
可以有得分规则和词元的名字；想核对哪些结果，就写上它们：scores、scaled、
weights 或 output；对一层还可以写 Q、K、V、heads 和 H（拼接后的各头）：
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]],
   "scores": [[6.5, 10], [2, 3.5]], "tokens": ["hello", "world"]}
  {"weights": [0.15, 0.25, 0.55, 0.05], "v": [[1], [2], [3], [4]]}
若由 source_tokens 给出键的名字，则 tokens 是查询的名字

退出码：0 全部正确，1 有结果是错的，2 输入有误
""",
    ),
    "diagnose": (
        """examples:
  clearhead diagnose case.npz
  clearhead diagnose case.safetensors --lang zh
  clearhead diagnose case.json --json -

a file holds q, k, v (or x, w_q, w_k, w_v, w_o, num_heads; or weights and v),
any score rules, and as theirs what your code gave for them; if that is not the
output, its stage says which step it is: weights, scores, scaled or masked:
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]],
   "theirs": [[3.5, 11], [1.5, 5.5]], "stage": "scores"}
np.savez("case.npz", q=q, k=k, v=v, theirs=out, causal=True) writes one from
Python

exit code: 0 yours is right, 1 a mistake was found, 2 bad input, 3 no known
mistake explains it
""",
        """示例：
  clearhead diagnose case.npz
  clearhead diagnose case.safetensors --lang zh
  clearhead diagnose case.json --json -

文件中有 q、k、v（或 x、w_q、w_k、w_v、w_o、num_heads；或 weights 和 v），
可以有得分规则；theirs 是您的代码给出的结果。如果那不是输出，用 stage
说明是哪一步：weights、scores、scaled 或 masked：
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]],
   "theirs": [[3.5, 11], [1.5, 5.5]], "stage": "scores"}
在 Python 中用 np.savez("case.npz", q=q, k=k, v=v, theirs=out, causal=True)
写出文件

退出码：0 您的结果正确，1 找到了错误，2 输入有误，3 没有已知的错误能解释
""",
    ),
    "view": (
        """examples:
  clearhead view seen.safetensors
  clearhead view ./gpt2 --text-file book.txt

a file is what seen.save("seen.safetensors") wrote in Python; the address is for
this machine alone, and works until Ctrl-C

the server needs Starlette and Uvicorn:
  pip install "clearhead[view]"
""",
        """示例：
  clearhead view seen.safetensors
  clearhead view ./gpt2 --text-file book.txt

文件由 Python 中的 seen.save("seen.safetensors") 写出；地址只在本机有效，
按 Ctrl-C 结束

服务器需要 Starlette 和 Uvicorn：
  pip install "clearhead[view]"
""",
    ),
    "bench": (
        """examples:
  clearhead bench
  clearhead bench --threads 1

to time clearhead in turn with PyTorch's backends, ONNX Runtime and JAX, or on a
GPU, run in a checkout of the sources:
  python -m benchmarks --help
""",
        """示例：
  clearhead bench
  clearhead bench --threads 1

与 PyTorch 的各个后端、ONNX Runtime 和 JAX 的对比，以及 GPU 上的测速，
要在源码目录中运行：
  python -m benchmarks --help
""",
    ),
    "info": (
        """examples:
  clearhead info
  clearhead info --json
""",
        """示例：
  clearhead info
  clearhead info --json
""",
    ),
}
