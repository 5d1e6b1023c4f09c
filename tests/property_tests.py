"""The profiles of the property tests: ``repeatable`` for `make test`, ``explore`` for `make explore`."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

#: Draws the same examples on every machine, each time.
REPEATABLE = "repeatable"
#: Draws other examples each time; a seed repeats them.
EXPLORE = "explore"


def load_profiles() -> None:
    """Registers both profiles and loads the repeatable one; ``--hypothesis-profile`` loads another one later.

    There is no deadline in either: a first example pays for imports, and slow machines are no fault of the code. The
    repeatable one draws fewer examples: they are the same each time, and exploring draws as many as there is time for.
    """
    settings.register_profile(REPEATABLE, max_examples=40, deadline=None, derandomize=True, database=None)
    settings.register_profile(
        EXPLORE, max_examples=100, deadline=None, derandomize=False, database=None, print_blob=False
    )
    settings.load_profile(REPEATABLE)


def fix_constants() -> None:
    """Fixes the constants that hypothesis takes from our code and draws in place of random values.

    It has no setting for that. They depend on which modules are imported, and each edit changes them. So they are left
    out of the repeatable profile, and are those of the collected tests' imports in the other one.
    """
    found = providers._get_local_constants() if settings.get_current_profile_name() == EXPLORE else Constants()
    providers._get_local_constants = lambda: found
