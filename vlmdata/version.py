"""The version of vlmdata, which manifests and pages record."""

__version__ = "0.1.0"
