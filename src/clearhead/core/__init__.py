"""The definition of attention: axes, arrays, rules, the problem, visibility, statistics and the definition.

axes           the names of axes, and shapes as errors print them
arrays         arrays of any kind in, the same kind out; DeviceArray: a tensor in a GPU's memory
rule_values    reads and checks the value of each rule; rules: the table of all rules and of the axes of their values
problem        shapes and rules of one call, validated once; visibility: which query may attend to which key
statistics     the table of what can be observed; observations: reads and checks what a caller asks of a matrix
effects        the effects of single edges: their formulas, and the numbers per row that they need
definition     what attention is, over blocks of rows (block), in NumPy or PyTorch (namespace); state: log-sum-exps
room           checks that results fit in memory; files, array_files: atomic writing and checked reading of files
"""
