"""One operator of a model: its arithmetic and the bytes that it moves. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

BIAS = "b"
CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution"}
# On a GPU (cudnn's) all layers at once, on a CPU one layer in one direction.
RECURRENT = {"_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
# What cudnn multiplies, which has a setting of its own for numbers of 32 bits: tf32 where a device has it.
BY_CUDNN = CONVOLUTIONS | RECURRENT


@dataclass(frozen=True)
class Op:
    """One operator: a kernel, or a few."""

    name: str  # as torch calls it: convolution, addmm …
    flops: float
    read: int  # bytes
    written: int
    # Of a matrix product (rows, inner, columns), its batch being what the FLOPs are more than theirs;
    # of a convolution (samples, channels in, channels out, places written, places of the kernel, stride, groups);
    # of attention (heads of all samples, queries, keys, width of a head); of pooling (places of the kernel,);
    # of recurrent layers (steps, samples, numbers read, numbers of a gate, gates, layers, directions, numbers written);
    # of a batch norm (numbers of a channel, channels, places of an image); of a layer norm, a softmax, or rows of a
    # table (numbers of a row,); of a sum (numbers that become one,).
    shape: tuple[int, ...] = ()
    share: float = 1.0  # of its FLOPs that a kernel really does; half in attention that looks back only
    precision: str = ""  # of the numbers that it reads: fp32, bf16, fp16, fp64; "": none of them
    # How its tensors lie in memory. Of a product's two factors: n by rows, t by columns. Of what is element by element:
    # s, some are spread out or repeated; t, they are not in the same order. Of a sum: t, of numbers that are far apart.
    # Of a norm, a softmax or a convolution: an s or a t for each tensor that it has to put in a row first; of a
    # convolution, BIAS if it has one.
    layout: str = ""
    elements: int = 0  # of the largest tensor that it reads or writes
