"""What stands below the help of the commands that teach with numbers of their own."""

SHAPES = """examples:
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
"""
SCALE = """examples:
  clearhead scale
  clearhead scale --widths 8,64,512 --keys 100
  clearhead scale --json scale.json
  clearhead scale --html scale.html

random queries and keys of each width d_k: the variance of q·k, and the largest
weight a of the softmax with its derivative a(1-a), with and without 1/√d_k
the page has a slider over d_k (1, 2, 4 … 256, or those of --widths)

in Python: from clearhead.textbook.why_scale import why_scale, saturation
"""
LEARN = """examples:
  clearhead learn
  clearhead learn --step 47
  clearhead learn --html learn.html
  clearhead learn --json learn.json

a very small model learned four nursery rhymes, and all of its weights were
recorded at 42 steps: the loss, and at one step W_Q, W_K and W_V, what the last
token of "humpty dumpty sat on a" attends to, and what comes next

in a checkout of the sources, training/record.py records another run
"""
