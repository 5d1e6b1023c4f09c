"""The version of vlmdata, which manifests and pages record."""

__version__ = "0.2.0.dev0"
