"""A model becomes a chain of blocks, without being rewritten.

export.py       model and batch → one graph of operators
refuse.py       what such a graph would get wrong, noticed while forward runs
tensors.py      what a model holds, by name
shape.py        shapes as functions of the number of samples
cuts.py         what flows through the graph, and where it may be cut
chain.py        where it is cut: blocks of the size of a layer
captured.py     the result: blocks, crossings, parameters
code.py         operators → a Python function
stage.py        consecutive blocks as a module that runs
materialise.py  the initial values of some tensors, without the others
verify.py       the chain held against the model itself
"""
