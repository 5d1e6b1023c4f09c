"""Offline preprocessing: from source rows to a dataset directory."""

if __name__ != "vlmdata.preprocess":
    raise ImportError("this folder is the package vlmdata.preprocess: import it by that name")
