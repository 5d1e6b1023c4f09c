"""Trains Qwen3.5-VL and Qwen3-VL on packed batches: ``vlmdata train`` for a checkout."""

from vlmdata.train import app

if __name__ == "__main__":
    app()
