"""Planning: from sample lengths to packs, steps and ranks. Pure functions over numpy arrays, no I/O, no torch.

``plan_epoch(table, config, epoch)`` is the entry point. ``docs/packing.md`` explains how it works and its guarantees.
In reading order: ``plan/`` (epochs of steps of packs), ``bins/one_limit.py`` and ``bins/two_limits.py`` (samples into
packs), ``patterns/`` (few ways to fill a pack, used often, and lower bounds).
"""

from vlmdata.packing.config import Blend, Change, PlanConfig, Stage, config_differences
from vlmdata.packing.cost import CostModel, cost_model
from vlmdata.packing.plan.blend import DatasetShare, passes_per_epoch, realised_shares
from vlmdata.packing.plan.epoch import EMPTY_PACK, EpochPlan, Pack, check_limits, plan_epoch
from vlmdata.packing.plan.report import Balance, PlanReport, measure_balance, report_plan
from vlmdata.packing.plan.run import RunPlans
from vlmdata.packing.table import SampleTable, concatenate_tables, table_from_columns

__all__ = [
    "EMPTY_PACK",
    "Balance",
    "Blend",
    "Change",
    "CostModel",
    "DatasetShare",
    "EpochPlan",
    "Pack",
    "PlanConfig",
    "PlanReport",
    "RunPlans",
    "SampleTable",
    "Stage",
    "check_limits",
    "concatenate_tables",
    "config_differences",
    "cost_model",
    "measure_balance",
    "passes_per_epoch",
    "plan_epoch",
    "realised_shares",
    "report_plan",
    "table_from_columns",
]
