"""The Triton kernels: rules.py computes the logits of a tile; rows.py and gradients.py are the passes.

The same source runs compiled and in Triton's interpreter (TRITON_INTERPRET=1, tensors in the CPU's memory). It has only
run in the interpreter, never on a GPU. The kernels keep logits in units of ln 2, since the hardware has exp2; results
are in nats.
"""

MOST_D = 256  # columns that the kernels hold
