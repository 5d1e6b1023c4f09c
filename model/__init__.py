"""Qwen3.5-VL and Qwen3-VL on megatron-core: the bundled model and trainer."""

if __name__ != "vlmdata.model":
    raise ImportError("this folder is the package vlmdata.model: import it by that name")
