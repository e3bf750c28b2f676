"""The messages of the kubelet's PodResources API, encoded by the library protobuf."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

# k8s.io/kubelet/pkg/apis/podresources/v1/api.proto, as far as it says which device a pod has; `*` is "repeated".
API = {
    "ListPodResourcesResponse": {1: "*PodResources pod_resources"},
    "PodResources": {
        1: "string name",
        2: "string namespace",
        3: "*ContainerResources containers",
        4: "*int64 cpu_ids",
        5: "*ContainerMemory memory",
    },
    "ContainerResources": {
        1: "string name",
        2: "*ContainerDevices devices",
        3: "*int64 cpu_ids",
        4: "*ContainerMemory memory",
        5: "*DynamicResource dynamic_resources",
    },
    "ContainerMemory": {1: "string memory_type", 2: "uint64 size"},
    "ContainerDevices": {1: "string resource_name", 2: "*string device_ids"},
    "DynamicResource": {2: "string claim_name", 3: "string claim_namespace", 4: "*ClaimResource claim_resources"},
    "ClaimResource": {
        1: "*CDIDevice cdi_devices",
        2: "string driver_name",
        3: "string pool_name",
        4: "string device_name",
    },
    "CDIDevice": {1: "string name"},
}


def _response_class() -> Any:
    field_types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="api.proto", package="v1", syntax="proto3")
    for name, fields in API.items():
        message = file.message_type.add(name=name)
        for number, declared in fields.items():
            kind, field_name = declared.lstrip("*").split()
            field = message.field.add(name=field_name, number=number, label=3 if declared.startswith("*") else 1)
            if kind in API:
                field.type, field.type_name = field_types.TYPE_MESSAGE, f".v1.{kind}"
            else:
                field.type = getattr(field_types, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))


Response = _response_class()


def encoded(*pods: dict[str, Any]) -> bytes:
    message: bytes = json_format.ParseDict({"pod_resources": pods}, Response()).SerializeToString()
    return message


def pod(name: str, *ids: str, namespace: str = "team") -> dict[str, Any]:
    """A pod with devices from a device plugin, and with all other fields that the kubelet gives for a container."""
    container = {
        "name": "main",
        "devices": [{"resource_name": "example.com/vf", "device_ids": list(ids)}],
        "cpu_ids": [1, 300, 2**40],
        "memory": [{"memory_type": "hugepages-2Mi", "size": 2**50}],
    }
    return {"name": name, "namespace": namespace, "containers": [{"name": "idle"}, container]}


def claimant(name: str, **claimed: Any) -> dict[str, Any]:
    """A pod with a device from dynamic resource allocation."""
    claim = {"claim_name": "nic", "claim_namespace": "team", "claim_resources": [{"driver_name": "d", **claimed}]}
    return {"name": name, "namespace": "team", "containers": [{"name": "main", "dynamic_resources": [claim]}]}
