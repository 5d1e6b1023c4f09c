"""Kernels of our own for CUDA, without which everything computes, too, and where compiled ones are kept."""
