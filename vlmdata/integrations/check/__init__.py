"""Tests whether a model computes the samples of a pack as if each were alone (``vlmdata check-model``).

- :class:`Checked` is what a function of yours returns: a model with its own forward pass for packs.
- :func:`check` compares packs with their samples, and names what differs.
"""

from vlmdata.integrations.check.check import Result as Result
from vlmdata.integrations.check.check import check as check
from vlmdata.integrations.check.diagnose import Diagnosis as Diagnosis
from vlmdata.integrations.check.diagnose import Leak as Leak
from vlmdata.integrations.check.own import Checked as Checked
from vlmdata.integrations.check.packs import check_data as check_data
