"""Attention step by step: the shapes, the trace of one call or one layer, and worked examples.

shapes         ch.shapes: every step's shape and cost, before anything is computed
symbols        sizes as symbols: n, h·d_k, d_model/h; layer_shapes: a layer's shapes from its sizes
trace          ch.trace; trace_layer: ch.trace_layer; trace_weights: ch.trace_weights
heads          one head against several, side by side
why_scale      why scores are divided by √d_k, in numbers
case_file      reads the files that hold worked examples
page           the document of the page that explains a trace
"""
