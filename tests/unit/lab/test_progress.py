"""The lab's messages about a step that takes longer than usual, and about its Nodes."""

import pytest

from lab.cluster.commands import nodes_line
from lab.cluster.join import called
from lab.progress import usually


@pytest.mark.parametrize(
    ("seconds", "load", "said"),
    [
        (0, 9.0, ""),
        (230, 0.5, " (usually 230 s)"),
        (230, 2.9, " (usually 230 s)"),
        (230, 9.25, " (usually 230 s; this machine is busy: a load of 9.2 on 2 CPUs)"),
    ],
)
def test_a_step_says_what_is_usual_and_when_the_machine_is_busy(seconds: float, load: float, said: str) -> None:
    assert usually(seconds, load, 2) == said


def test_a_node_with_another_name_is_shown_with_its_machine() -> None:
    assert nodes_line({"node1": "node1", "10.0.2.12": "node2"}) == "Nodes node1, 10.0.2.12 (the lab's node2)"
    # So does the message of a Node that does not become ready.
    assert called("10.0.2.12", "node2") == "10.0.2.12 (the lab's node2)"
