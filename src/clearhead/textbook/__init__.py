"""Attention step by step: the shapes, the trace of one call or one layer, and worked examples.

shapes         ch.shapes: every step's shape and cost, before anything is computed
costs          a layer's shapes and costs from its sizes; the costs of windows, blocks and segments
computed       reads and checks a layer's arrays and weights; differences
trace          ch.trace, ch.trace_layer
why_scale      why scores are divided by √d_k, in numbers
case_file      reads the files that hold worked examples
page           the document of the page that explains a trace
"""
