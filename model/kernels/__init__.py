"""Optional CUDA kernels of this project, and the cache of compiled FlashAttention kernels."""
