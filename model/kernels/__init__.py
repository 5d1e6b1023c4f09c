"""Kernels of our own for CUDA; everything computes without them, too."""
