"""A model under one plan: its layout and assembly, state and gradients, steps, whole tensors, reports."""
