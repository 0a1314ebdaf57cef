"""Loads modules when they are first needed, but never while the process forks.

A forked process has one thread only. If another thread was importing a module, nobody finishes that import in the
child, and whoever needs the module there waits for ever. So a fork waits for the lock `_late`, which `load` holds.
"""

import os
from importlib import import_module
from threading import RLock
from typing import Any

_late = RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_late.acquire, after_in_parent=_late.release, after_in_child=_late.release)


def load(name: str) -> Any:
    """Import a module of the package, such as "ops.attention"."""
    with _late:
        return import_module(f"clearhead.{name}")
