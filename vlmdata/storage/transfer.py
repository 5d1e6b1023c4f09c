"""Files from one store to another, without reading them where the stores can do without."""

from __future__ import annotations

import os
import shutil
from enum import StrEnum

from vlmdata.format.atomic import sync, temporary_path
from vlmdata.locations import file_system
from vlmdata.storage.base import Store
from vlmdata.storage.folder import Folder

_BUFFER_BYTES = 16 * 1024 * 1024


class How(StrEnum):
    """How a file was transferred."""

    LINKED = "hard links"
    IN_STORE = "copied within the object store"
    COPIED = "copied"


def transfer(source: Store, name: str, target: Store, to: str) -> How:
    """Gives a store a file of another one, over what stands there. The file must not be edited in place afterwards.

    Between folders of one file system it is a hard link, which takes no room. Within an object store the store copies
    it. Otherwise this machine does.

    Raises:
        OSError: If a folder has no such file, no room or no permission.
        ResourceError: The same of an object store.
    """
    if isinstance(source, Folder) and isinstance(target, Folder):
        if _linked(source, name, target, to):
            return How.LINKED
    elif _scheme(source) == _scheme(target):
        system, path = file_system(source.path(name))
        system.cp_file(path, file_system(target.path(to))[1])
        return How.IN_STORE
    with source.local(name) as folder, open(folder / name, "rb") as file, target.writing(to) as copy:
        shutil.copyfileobj(file, copy, _BUFFER_BYTES)
    return How.COPIED


def _linked(source: Folder, name: str, target: Folder, to: str) -> bool:
    path = target.directory / to
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source.directory / name), temporary)  # of a link, the file that it means
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        return False
    try:
        os.replace(temporary, path)  # does nothing where both are the same file
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _scheme(store: Store) -> str:
    return str(store).partition("://")[0] if "://" in str(store) else ""
