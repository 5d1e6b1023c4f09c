"""Layers that model families share. A whole model is in ``model/families/NAME/model.py``; start reading there."""
