"""Groups of an inventory that pyinfra would misread. tests/deploy/test_cli.py has some through pyinfra's command line."""

from typing import Any

import pytest

from tasks.common.inventory import fault_of

NO_ENTRY = "hosts: the entry of 'a' is not a name and a mapping"
NO_GROUP = "hosts: a tuple is a list of hosts and the group's data, as ([...], {...})"


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([("a", None)], NO_ENTRY),
        ([("a", "hunter2")], NO_ENTRY),
        ([("a",)], NO_ENTRY),
        (["a", ("", {})], "hosts: '' is not the name of a host"),
        (["a", ()], "hosts: () is not the name of a host"),
        (
            ["a", ("root@b:22", {})],
            "hosts: 'root@b:22' has a user; give the name of the host alone, and ssh_user in its data",
        ),
        (["a", 5], "hosts: 5 is not the name of a host"),
        (["a", ["b", {"_sudo_password": "hunter2"}]], "hosts: a list is not the name of a host"),
        ({"a": {"_sudo_password": "hunter2"}}, "hosts: it is a dict; a group of hosts is a list of names, or of"),
        ({"a", "b"}, "hosts: it is a set; "),
        ((name for name in "ab"), "hosts: it is a generator; "),
        (["a", ("a", {"x": 1}), "b", ("a", {"y": 2})], "hosts: it has two entries of 'a' with data, of which"),
        (("a", "b"), NO_GROUP),
        ((["a"], {}, {}), NO_GROUP),
    ],
)
def test_a_group_that_pyinfra_would_misread_is_named_with_its_fault(hosts: Any, message: str) -> None:
    fault = fault_of({"hosts": hosts})
    assert fault.startswith(message)
    assert "hunter2" not in fault


def test_a_group_all_has_the_hosts_of_each_group() -> None:
    groups: dict[str, Any] = {"hosts": ["a", ("b", {})], "all": (["a", "b"], {"x": 1})}
    assert fault_of(groups) == ""
    assert "all: it lacks 'b', which is in hosts" in fault_of({**groups, "all": ["a"]})
