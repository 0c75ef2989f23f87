"""Kernels of a whole against those of its tuples."""

import json

import pytest

from farm.types.figure import Figure
from farm.types.verification import Launches, Verification
from farm.verdict.aggregate import aggregate
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import ReadingView, Whole
from farm.verdict.kernel_audit import audit_kernels
from farm.verdict.verdict import Verdict


def part(name, count):
    subject = TupleView(name, name, name, estimated_us=10.0)
    return CostLine.of_reading(subject, count, ReadingView(Figure(10.0)))


def seen(tuples, **kernels):
    launches = {name: Launches(count, time_us) for name, (count, time_us) in kernels.items()}
    return Verification(kernels=launches, tuple_kernels=tuples)


def test_the_same_kernels_as_often_explain_everything():
    found = seen({"a": {"gemm": 1}, "b": {"add": 2}}, gemm=(4, 80.0), add=(2, 20.0))
    audit = audit_kernels(found, [part("a", 4), part("b", 1)])
    assert audit.same
    assert audit.explained == 1.0
    assert (audit.time_us, audit.launches, audit.unknown_tuples) == (100.0, 6, 0)


def test_kernels_of_one_side_and_other_counts_are_named_and_do_not_explain():
    tuples = {"a": {"gemm": 1, "copy": 2}, "b": {"add": 3}}
    found = seen(tuples, winograd=(1, 50.0), gemm=(4, 40.0), add=(1, 10.0))
    audit = audit_kernels(found, [part("a", 3), part("b", 1), part("c", 2)])
    assert [kernel.name for kernel in audit.only_whole] == ["winograd"]
    assert [(kernel.name, kernel.tuples) for kernel in audit.only_tuples] == [("copy", 6)]
    assert [(kernel.name, kernel.whole, kernel.tuples) for kernel in audit.other_counts] == [
        ("gemm", 4, 3),
        ("add", 1, 3),
    ]
    assert audit.explained == pytest.approx(
        (0.75 * 40 + 10) / 100
    )  # more launches than there are explain no more
    assert audit.unknown_tuples == 1


def test_where_nobody_saw_kernels_there_is_no_audit():
    assert audit_kernels(Verification(), [part("a", 1)]) is None
    assert audit_kernels(seen({}, gemm=(1, 10.0)), [part("a", 1)]) is None
    assert audit_kernels(seen({"a": {"gemm": 1}}), [part("a", 1)]) is None


def test_the_verdict_says_that_other_kernels_run_and_keeps_which():
    verdict = aggregate(
        [part("a", 4)],
        [Whole("card", ReadingView(Figure(40.0)))],
        target=0.95,
        launch="graph",
        verification=seen({"a": {"gemm": 1}}, gemm=(4, 30.0), flash=(1, 10.0)),
    )
    assert verdict.outcome == "pass"
    assert any("75.0 %" in reason for reason in verdict.reasons)
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))).kernels == verdict.kernels
