"""Linear layers whose matrix products have factors in 8 bits (the plan's `fp8`), with parameters in their own dtypes.

A recipe (`recipes.py`) says how each factor of a layer's three products is rounded; `rounding.py` rounds and multiplies
them, on GPUs by torch's kernels or those of torchao (`kernels.py`); `linear.py` is the layer, `left_out.py` says which
layers stay as they are, and why.
"""
