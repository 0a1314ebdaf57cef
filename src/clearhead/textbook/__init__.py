"""Attention step by step: the shapes, the trace of one call or one layer, and worked examples.

shapes         ch.shapes: every step's shape and cost, before anything is computed
trace          ch.trace; trace_layer: ch.trace_layer
case_file      reads the files that hold worked examples
page           the document of the page that explains a trace
"""
