"""The reader of protobuf's encoding, compared with the library protobuf."""

from typing import Any

import pytest
from google.protobuf import wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st

from agent.linux import grpc
from agent.linux.kubelet import POD
from tests.unit.linux.pod_resources import claimant, encoded


@given(
    st.lists(st.tuples(st.text(max_size=200), st.lists(st.text(), max_size=3), st.integers(0, 2**64 - 1)), max_size=3)
)
def test_strings_are_read_as_protobuf_wrote_them(pods: list[tuple[str, list[str], int]]) -> None:
    memory = [{"memory": [{"size": size}]} for _, _, size in pods]
    described = [
        {"name": name, "containers": [{"devices": [{"device_ids": ids}]}, extra]}
        for (name, ids, _), extra in zip(pods, memory, strict=True)
    ]
    wanted = [field for name, ids, _ in pods for field in [("name", name)] * bool(name) + [("id", i) for i in ids]]
    schema: grpc.Schema = {1: {1: "name", 3: {2: {2: "id"}}}}
    assert set(grpc.strings(encoded(*described), schema)) == set(wanted)


def test_a_device_that_a_kubelet_repeats_is_read_once() -> None:
    """A claim grew by its devices whenever the kubelet prepared it again, to a list of 17 MB (kubernetes 141335)."""
    listed = claimant("a", device_name="0000-3b-00-2")
    resources = listed["containers"][0]["dynamic_resources"][0]["claim_resources"]
    resources *= 10_000
    given = [("namespace", "team"), ("claimed", "0000-3b-00-2"), ("name", "a")]
    assert sorted(grpc.strings(encoded(listed), {1: POD})) == sorted(given)


@pytest.mark.parametrize("number", [wrappers_pb2.FloatValue(value=-1.1), wrappers_pb2.DoubleValue(value=-1.1)])
def test_numbers_of_a_fixed_length_are_skipped(number: Any) -> None:
    message = number.SerializeToString() + wrappers_pb2.StringValue(value="x").SerializeToString()
    assert list(grpc.strings(message, {1: "text"})) == [("text", "x")]


@given(st.binary())
def test_arbitrary_bytes_are_a_message_or_an_error(message: bytes) -> None:
    try:
        fields = list(grpc.strings(message, {1: {1: "name"}, 2: "text"}))
    except ValueError:
        return
    assert sum(len(text.encode()) for _, text in fields) < len(message) or not message
