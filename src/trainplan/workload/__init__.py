"""What is trained: the zoo, users' models, Hugging Face configs; their inputs, losses, optimizers and data.

`load.load(text)` is the way in. The values are in `workload.py`; reading data is `datasets.py` and `loader.py`.
"""
