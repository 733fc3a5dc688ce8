"""trainplan: the fastest way to train your model on your machines that fits, predicted, explained and run."""
