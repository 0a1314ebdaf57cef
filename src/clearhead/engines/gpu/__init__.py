"""The Triton kernels: rules.py what a tile may see, rows.py, columns.py and gradients.py the passes.

One logic serves the compiler and the interpreter (TRITON_INTERPRET=1, tensors in the CPU's memory). Logits are in
units of ln 2 inside, since the hardware has exp2; what leaves a kernel is natural.
"""
