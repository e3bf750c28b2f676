"""Which selectors and entries with `each` are accepted, by the parser and by the schema, and how others are refused."""

from typing import Any

import pytest

from agent.spec.node import SpecError, from_mapping, parse, to_json

EACH = {"vendor": "15b3", "each": True}
NETWORK = {"network": "10.{rail}.0.0/16"}
STORAGE: dict[str, Any] = {"name": "storage", "select": {"pci": "0000:3b:00.0"}}


def entry(select: dict[str, Any], name: str = "rail{index}", **keys: Any) -> dict[str, Any]:
    return {"name": name, "select": select, **keys}


def node(*nics: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"node_name": "n1", "nics": list(nics), **more}


def exactly(number: int) -> dict[str, int]:
    return {"min": number, "max": number}


@pytest.mark.parametrize(
    "document",
    [
        node(entry({**EACH, "device": "1021", "min": 1, "max": 8})),
        node(entry({"driver": "mlx5_core", "each": True}, altnames=["rail{index}", "r{index}.fabric"])),
        node(
            entry({"serial": "MT1", "each": True}, name="port-{index}_a", vfs={"count": 2, "groups": [{"index": "1"}]})
        ),
        node(entry({**EACH, "without": ["storage"]}), STORAGE),
        node(entry({**EACH, "each": False}, name="rail")),
        node(entry({**EACH, "max": 4}, rdma={}), rdma={"at_least": 4}),
        node(entry(EACH), entry({"vendor": "8086", "each": True}, name="port{index}")),
        node(
            entry({**EACH, **exactly(8)}, rail=0, addresses=[NETWORK]),
            entry({"vendor": "8086", "each": True, **exactly(2)}, name="port{index}", rail=8, addresses=[NETWORK]),
            node_number=5,
        ),
        node(entry(EACH), entry({"pci": "0000:3b:00.0"}, name="rail64")),
    ],
)
def test_an_entry_with_each_is_read_back_as_it_was_written(document: dict[str, Any], validator: Any) -> None:
    spec = from_mapping(document)
    assert parse(to_json(spec)) == spec
    validator.validate(document)


@pytest.mark.parametrize("pci", ["0000:3b:00.0", "ffff:00:1f.7", "10002:01:00.0", "ffffffff:00:00.0"])
def test_a_domain_has_four_digits_or_more(pci: str, validator: Any) -> None:
    document = node(entry({"pci": pci}, name="rail0"))
    assert from_mapping(document).nics[0].select.pci == pci
    validator.validate(document)


@pytest.mark.parametrize("pci", ["00002:01:00.0", "123456789:00:00.0", "2:01:00.0", "0000:3b:20.0", "0000:3b:00.8"])
def test_an_address_that_the_kernel_does_not_write_is_refused(pci: str, validator: Any) -> None:
    document = node(entry({"pci": pci}, name="rail0"))
    with pytest.raises(SpecError, match=r"write it as 0000:3b:00\.0"):
        from_mapping(document)
    assert not validator.is_valid(document)


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (
            node(entry({"each": True})),
            "it selects nothing; give one of pci, mac, netdev, vendor, device, driver, serial",
        ),
        (node(entry({**EACH, "pci": "0000:3b:00.0"})), "each and pci: no two functions have the same pci"),
        (node(entry({**EACH, "mac": "02:00:00:00:00:01"})), "each and mac: "),
        (node(entry({**EACH, "netdev": "ens1"})), "each and netdev: "),
        (node(entry({"vendor": "15b3", "min": 2}, name="a")), "min needs each, which is not given"),
        (node(entry({"vendor": "15b3", "max": 2}, name="a")), "max needs each"),
        (node(entry({"vendor": "15b3", "without": ["storage"]}, name="a"), STORAGE), "without needs each"),
        (node(entry({**EACH, "max": 0})), "max: 0 is out of range; give 1 to 64 NICs"),
        (node(entry({**EACH, "min": 65})), "min: 65 is out of range"),
        (node(entry({**EACH, "each": "yes"})), '"yes" is not true or false'),
        (node(entry(EACH, name="rail")), "name: rail would be the name of each of several NICs; put {index} in"),
        (node(entry({"pci": "0000:3b:00.0"})), "name: {index} has a value only with select.each"),
        (node(entry(EACH, name="rail{index}{index}")), "'rail{index}{index}' is not valid; use letters"),
        (node(entry(EACH, name="{index}")), "'{index}' is not valid; use letters"),
        (node(entry(EACH, altnames=["r{index}", "fabric"])), "altnames[1]: fabric would be the name of each"),
    ],
)
def test_the_schema_refuses_contradictions_too(document: dict[str, Any], fault: str, validator: Any) -> None:
    with pytest.raises(SpecError) as caught:
        from_mapping(document)
    assert fault in str(caught.value)
    assert str(caught.value).startswith("spec.nics[0]")
    assert not validator.is_valid(document)


def group(**keys: str) -> dict[str, Any]:
    return {"count": 2, "groups": [{"index": "0"}, {"index": "1", **keys}]}


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (node(entry({**EACH, **exactly(5)}, rail=60)), "nics[0]: rail: 5 NICs from 60 on go to rail 64; lower rail"),
        (node(entry({**EACH, "max": 5}, rail=0)), "nics[0]: rail: give select.min and select.max, and the same number"),
        (
            node(entry({**EACH, **exactly(4)}, rail=0), {**STORAGE, "rail": 3}),
            "nics[0].rail (the first of 4) and nics[1].rail are both 3; give each rail of a node its own number",
        ),
        (
            node(entry({**EACH, **exactly(2)}, rail=0, addresses=["10.0.0.5/16"])),
            "nics[0].addresses[0] and nics[0].addresses[0] are both 10.0.0.5; give each its own, in a network with {rail}",
        ),
        (
            node(entry({**EACH, **exactly(8)}, rail=8, addresses=[{"network": "10.20{rail}.0.0/16"}]), node_number=5),
            "nics[0].addresses[0]: network: 10.2010.0.0/16 is no IP network",
        ),
        (
            node(entry({**EACH, **exactly(8)}, rail=0, addresses=[NETWORK])),
            "addresses[0].network needs node_number, which is not given",
        ),
        (node(entry(EACH, addresses=[NETWORK]), node_number=5), "nics[0].addresses needs nics[0].rail"),
        (node(entry({**EACH, "min": 3, "max": 2})), "nics[0].select: min 3 is above max 2; lower it"),
        (
            node(entry(EACH, vfs=group(mac="02:00:00:00:00:01"))),
            "nics[0]: vfs.groups[1].mac: one address cannot serve VFs of several NICs",
        ),
        (node(entry(EACH, vfs=group(port_guid="00:11:22:33:44:55:66:77"))), "vfs.groups[1].port_guid: one address"),
        (node(entry({**EACH, "without": ["rail0"]})), "nics[0].select.without: no entry without each is called rail0"),
        (
            node(entry({**EACH, "without": ["b{index}"]}), entry({"vendor": "8086", "each": True}, name="b{index}")),
            "nics[0].select: without: 'b{index}' is not valid",
        ),
        (
            node(entry(EACH), entry({"vendor": "8086"}, name="rail7")),
            "nics[0].name and nics[1].name: the name rail7 is given twice",
        ),
        (
            node(entry({**EACH, "max": 12}), entry({"vendor": "8086", "each": True}, name="rail1{index}")),
            "nics[0].name and nics[1].name: the name rail10 is given twice",
        ),
        (
            node(entry(EACH, altnames=["r{index}"]), entry({"netdev": "r3"}, name="a")),
            "nics[0].altnames[0] and nics[1].select.netdev: the netdev name r3 is given twice",
        ),
        (node(entry(EACH), entry(EACH, name="b{index}")), "nics[0].select and nics[1].select both mean vendor=15b3"),
        (node(entry(EACH), entry({"vendor": "15b3"}, name="b")), "nics[0].select and nics[1].select both mean"),
        (
            node(entry({**EACH, "max": 4}, rdma={}), rdma={"at_least": 5}),
            "rdma.at_least: 5 is more than the 4 NICs that have rdma",
        ),
    ],
)
def test_contradicting_keys_are_named(document: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_mapping(document)
    assert fault in str(caught.value)
    assert len(caught.value.faults) == 1
