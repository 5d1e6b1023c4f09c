"""Layers that model families share. Whole models are in ``model/families/NAME/model.py``; start there."""
