"""Operations that torch's own code calls and users do not: forward mode's `prims`, the checks of anomaly mode and
of distributions."""

import torch

from lanewise._core.batch import BatchLevel
from lanewise._rules.batch.families import lane_rule, leading
from lanewise._torch_compat import current_graph_task_id

aten = torch.ops.aten
prims = torch.ops.prims

# Native forward mode takes torch's Python formulas where an operand has no tangent. They end in these, whose operands
# all have one shape.
leading(
    prims.abs.default,
    prims.add.default,
    prims.bitwise_not.default,
    prims.conj_physical.default,
    prims.convert_element_type.default,
    prims.cos.default,
    prims.div.default,
    prims.eq.default,
    prims.exp.default,
    prims.ge.default,
    prims.gt.default,
    prims.le.default,
    prims.log.default,
    prims.lt.default,
    prims.mul.default,
    prims.ne.default,
    prims.neg.default,
    prims.pow.default,
    prims.rsqrt.default,
    prims.sign.default,
    prims.sin.default,
    prims.sqrt.default,
    prims.sub.default,
    prims.tanh.default,
    prims.where.default,
)


@lane_rule(aten._is_any_true.default, raw=True)
def is_any_true(level: BatchLevel, x):
    """x [B, *S] bool -> [B]; in a backward under anomaly mode one answer for all lanes, as a loop stops at the first"""
    if current_graph_task_id() != -1 and torch.is_anomaly_check_nan_enabled():
        return level.adopt(level.below(torch.any, level.physical(x)))
    return level.wrap(level.below(torch.any, level.expanded(x).flatten(1), 1))


@lane_rule(aten._assert_async.default, aten._assert_async.msg, raw=True)
def assert_async(level: BatchLevel, x, *message):
    """x [B] bool; an error where it does not hold in every lane"""
    aten._assert_async.msg(level.physical(x).all(), *(message or ("Expected Tensor with all nonzero values",)))
