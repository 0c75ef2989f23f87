"""Forward and backward of a module beside each other, from the calls of a stored training step."""

from farm.jobs.captures import capture_for
from farm.report.owners import owners
from farm.requests.partial_request import PartialRequest, complete
from farm.store import captures
from farm.types.figure import Figure
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import CallCost


def test_each_part_of_a_step_is_what_its_calls_take(database):
    partial = PartialRequest(model="squeezenet1_1", batch=1, input_size=32, step="training")
    request = complete(partial, "cpu", target=0.95)
    capture_id = capture_for(database, request, device_type="cpu", torch="2.13.0")
    with database.read() as session:
        counts = captures.counts(session, capture_id)
        cost = CallCost(Figure(2.0), Figure(3.0))
        tuples = [
            CostLine(TupleView(id_, "", ""), count, "measured", cost)
            for id_, count in counts.items()
        ]
        rows = owners(session, capture_id, tuples, "normal")
        assert sum(row.cost.calls for row in rows) == sum(counts.values())
        assert sum(row.cost.time_us for row in rows) == 2 * sum(counts.values())
        assert abs(sum(row.time_share for row in rows) - 1) < 1e-9
        by_part = {(row.owner, row.part): row for row in rows}
        assert by_part["Conv2d", "forward"].cost.calls == 26
        assert by_part["Conv2d", "backward"].cost.calls == 26
        assert by_part["", "optimizer"].cost.complete_mj == 3 * by_part["", "optimizer"].cost.calls
        without_first = owners(session, capture_id, tuples[1:], "normal")
        assert any(row.cost.complete_us is None for row in without_first)
