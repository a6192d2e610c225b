"""From what a person writes to what is to exist, to the byte: spec, rules, plan. Pure but for reading files."""

from egmctl.planning.capacity import check_capacity, check_plan_fits
from egmctl.planning.make import assumed_granularity, make_plan
from egmctl.planning.plan import Plan, PlanChunk, PlanNode, load_document, save_plan
from egmctl.planning.spec import MooncakeSpec, PoolSpec, Spec, load_spec, parse_node_list, parse_spec

__all__ = [
    "MooncakeSpec",
    "Plan",
    "PlanChunk",
    "PlanNode",
    "PoolSpec",
    "Spec",
    "assumed_granularity",
    "check_capacity",
    "check_plan_fits",
    "load_document",
    "load_spec",
    "make_plan",
    "parse_node_list",
    "parse_spec",
    "save_plan",
]
