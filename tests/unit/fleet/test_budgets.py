"""Which PodDisruptionBudgets forbid that a NIC is taken from its pods: NoExecute asks none of them."""

from typing import Any

import pytest
from lightkube.models.core_v1 import PodCondition
from lightkube.models.meta_v1 import LabelSelector, LabelSelectorRequirement, ObjectMeta
from lightkube.models.policy_v1 import PodDisruptionBudgetSpec
from lightkube.resources.policy_v1 import PodDisruptionBudget

from fleet.eviction import forbidding
from tests.unit.fleet.nic_fleet import CLEAN, DONE, Fleet, budget, fleet
from tests.unit.fleet.test_maintenance import pod
from tests.unit.reporter.scripted import merged

__all__ = ["fleet"]


def test_a_budget_that_the_eviction_would_violate_is_named_before_anything_is_tainted(fleet: Fleet) -> None:
    fleet.dra.budgets = [budget(0, LabelSelector(matchLabels={"app": "job"})).to_dict()]
    said = "the PodDisruptionBudget ml/b allows 0 disruptions now, not that of ml/job"
    assert fleet.maintenance().run(["a"], 1) == {"a": ("undone", said)}
    assert (fleet.state(), fleet.dra.made) == (CLEAN, 0)
    # That of other pods does not matter.
    fleet.dra.budgets = [budget(0, LabelSelector(matchLabels={"app": "web"})).to_dict()]
    assert fleet.maintenance().run(["a"], 1) == DONE


def needs(operator: str, *values: str) -> LabelSelector:
    return LabelSelector(matchExpressions=[LabelSelectorRequirement("app", operator, list(values) or None)])


@pytest.mark.parametrize(
    ("one", "forbids"),
    [
        (budget(1, LabelSelector()), False),
        (budget(0, LabelSelector()), True),
        (budget(0, None), False),
        (budget(0, LabelSelector(), namespace="other"), False),
        (budget(5, LabelSelector(), generation=2), True),
        (budget(0, LabelSelector(matchLabels={"app": "other"})), False),
        (budget(0, needs("In", "job", "x")), True),
        (budget(0, needs("In", "x")), False),
        (budget(0, needs("NotIn", "job")), False),
        (budget(0, needs("NotIn", "x")), True),
        (budget(0, needs("Exists")), True),
        (budget(0, needs("DoesNotExist")), False),
        (PodDisruptionBudget(metadata=ObjectMeta(name="b", namespace="ml"), spec=PodDisruptionBudgetSpec()), False),
    ],
)
def test_a_budget_counts_the_pods_that_it_selects(one: PodDisruptionBudget, forbids: bool) -> None:
    assert bool(forbidding([one.to_dict()], [pod("job")])) == forbids


@pytest.mark.parametrize(
    ("phase", "healthy", "policy", "forbids"),
    [
        ("Running", 2, None, False),
        ("Running", 1, None, True),
        ("Running", 1, "IfHealthyBudget", True),
        ("Running", 1, "AlwaysAllow", False),
        ("Pending", 1, None, False),
        ("Failed", 1, None, False),
    ],
)
def test_a_budget_does_not_keep_a_pod_that_the_eviction_api_would_evict_without_it(
    phase: str, healthy: int, policy: str | None, forbids: bool
) -> None:
    """A pod that a bad NIC has made unready counts as a disruption already."""
    job, one = pod("job", phase=phase), budget(0, LabelSelector())
    assert job.status and one.status and one.spec
    job.status.conditions = [PodCondition("False", "Ready")]
    one.status.currentHealthy, one.status.desiredHealthy, one.spec.unhealthyPodEvictionPolicy = healthy, 2, policy
    assert bool(forbidding([one.to_dict()], [job])) == forbids


ODD = {"unhealthyPodEvictionPolicy": {"a": "policy of a later version"}}
OTHERS = {"matchLabels": {"app": "other"}}


@pytest.mark.parametrize(
    ("odd", "refused"),
    [
        # What no drain asks.
        ({"spec": {"minAvailable": [1]}, "status": {"disruptedPods": {"job": "10000-01-01T00:00:00Z"}}}, ""),
        (
            {"spec": ODD},
            "cannot be read (Expected `str | null`, got `object` - at `$.spec.unhealthyPodEvictionPolicy`)",
        ),
        ({"spec": {**ODD, "selector": OTHERS}}, ""),
        ({"spec": {"selector": {"matchLabels": "job"}}}, "cannot be read (Expected `object | null`, got `str`"),
        ({"spec": {"selector": {"matchLabels": "job"}}, "metadata": {"namespace": "other"}}, ""),
        (
            {
                "spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "Like"}]}},
                "status": {"disruptionsAllowed": 0},
            },
            "allows 0",
        ),
    ],
)
def test_a_budget_that_cannot_be_read_refuses_only_the_pods_that_it_may_select(
    fleet: Fleet, odd: dict[str, Any], refused: str
) -> None:
    fleet.dra.budgets = [merged(budget(1, LabelSelector()).to_dict(), odd)]
    result, why = fleet.maintenance().run(["a"], 1)["a"]
    assert (result, refused in why, "ml/job" in why) == ("undone" if refused else "done", True, bool(refused))
    assert fleet.dra.made == (0 if refused else 2)


def test_two_pods_of_one_budget_are_two_disruptions(fleet: Fleet) -> None:
    fleet.dra.users["pf"] = ["u-web"]
    fleet.dra.budgets = [budget(1, LabelSelector()).to_dict()]
    result, why = fleet.maintenance().run(["a"], 1)["a"]
    assert (result, "allows 1 disruptions now, not that of ml/job, ml/web" in why) == ("undone", True)
