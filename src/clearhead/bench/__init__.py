"""`clearhead bench`: is this installation correct, and how fast is it on this machine?

measure     interleaved timing: all contestants take turns in every round; medians, and ratios within a round
self_check  a few cases on every engine of this machine, and on PyTorch's own attention where it is installed
"""
