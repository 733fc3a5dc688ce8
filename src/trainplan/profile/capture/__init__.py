"""A model becomes a chain of blocks, without being rewritten.

In the order in which a model passes through the files:

| file             | what it does                                                                       |
|------------------|------------------------------------------------------------------------------------|
| `export.py`      | traces the model on a batch: one graph of operators (`exported.py`)                |
| `refuse.py`      | watches forward meanwhile for what such a graph would get wrong                     |
| `state.py`       | finds Python state that forward changes from call to call                          |
| `tidy.py`        | makes the graph plain; `regions.py` does it for no_grad and autocast                |
| `cuts.py`        | finds what flows through the graph, and where it may be cut                         |
| `outputs.py`     | finds which parts of the output the loss reads                                     |
| `chain.py`       | decides where it is cut: blocks of the size of a layer                             |
| `captured.py`    | the result: blocks, crossings, parameters; start reading here                       |
| `stage.py`       | consecutive blocks as a module that runs; `code.py` prints its functions            |
| `tokens.py`      | finds where the tokens of a sequence are (`token_rules.py`: operator by operator)   |
| `sliced.py`      | blocks on a slice of their sequences, with keys and values carried                  |
| `materialise.py` | initial values of some tensors, without the others                                 |
| `verify.py`      | holds the chain against the model itself                                           |

`where.py` says where in the user's code an operator is, `tensors.py` lists what a model holds, `shape.py` has shapes as
functions of the number of samples.
"""
