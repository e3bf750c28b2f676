"""Network storage that is in use: mounts of network file systems, block devices of Ceph, NVMe over Fabrics, iSCSI and SRP.

How sysfs shows block devices of Ceph is taken from Documentation/ABI/testing/sysfs-bus-rbd, and how it shows iSCSI and SRP from
the kernel's source (drivers/scsi/scsi_transport_iscsi.c, iscsi_tcp.c, drivers/infiniband/ulp/iser/iscsi_iser.c,
drivers/infiniband/ulp/srp/ib_srp.c). How /proc shows BeeGFS is taken from the source of its client (ThinkParQ/beegfs on GitHub,
client_module/source/filesystem/ProcFsHelper.c). None of these was run.
"""

from __future__ import annotations

import errno
import ipaddress
import re
from collections.abc import Iterator

from attrs import frozen

from agent.hardware.sysfs import names_or_none, read_or
from agent.machine import Files

# nfs and ceph have their servers in the options or in the source (`10.0.0.1:/export`, `10.0.0.1:6789,10.0.0.2:6789:/`).
# With a name as the source, the kernel adds the server's address to the options (fs/nfs/super.c, fs/smb/client/cifsfs.c).
SERVER_OPTIONS = frozenset({"addr", "mountaddr", "ip"})
ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])|\[[0-9a-f:]+\]")
NVME_ENDS = ("host_iface", "host_traddr", "src_addr")
# The kernel shows a file system in user space as fuse.NAME (fs/fuse/inode.c), and no address if it was mounted by a name.
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "ceph", "cifs", "smb3", "lustre", "9p", "fuse.glusterfs"})

RBD = "/sys/bus/rbd/devices"
NVME = "/sys/class/nvme"
ISCSI_HOSTS = "/sys/class/iscsi_host"
ISCSI_CONNECTIONS = "/sys/class/iscsi_connection"
SCSI_HOSTS = "/sys/class/scsi_host"
BEEGFS = "/proc/fs/beegfs"


@frozen
class Storage:
    """What is in use, and the address of its server (empty: unknown).

    ``ends``: the netdev, the own addresses and the SCSI host that it is bound to. ``rdma``: it is reached by RDMA.
    """

    name: str
    server: str
    ends: frozenset[str] = frozenset()
    rdma: bool = False


def storage(files: Files) -> frozenset[Storage]:
    """All network storage in use."""
    return frozenset((*_mounts(files), *_beegfs(files), *_rbd(files), *_nvme(files), *_iscsi(files), *_srp(files)))


def _mounts(files: Files) -> Iterator[Storage]:
    # The source of a mount may be any text. The kernel escapes the blanks, tabs and line ends in it (mangle(),
    # fs/proc_namespace.c), but no other white space, at which str.split() and str.splitlines() would split it.
    for line in read_or(files, "/proc/1/mounts", "").split("\n"):
        match line.split(" "):
            case [source, point, kind, options, *_] if kind in NETWORK_FILE_SYSTEMS:
                for server in (*_addresses(f"{source} {options}"), *_server_options(options)):
                    # proto=rdma of NFS, rdma of SMB.
                    rdma = not {"proto=rdma", "rdma"}.isdisjoint(options.split(","))
                    yield Storage(f"{kind} on {point}", server, rdma=rdma)


def _server_options(options: str) -> Iterator[str]:
    for option in options.split(","):
        name, _, value = option.partition("=")
        if name in SERVER_OPTIONS:
            # A link-local address has the netdev behind it.
            yield from _bare(value.partition("%")[0])


def _beegfs(files: Files) -> Iterator[Storage]:
    """The servers to which a client of BeeGFS has connections. Its mount does not name them.

    Of each kind of connection to a server, one address is shown: ``Connections: TCP: 1 (10.0.0.1:8003); RDMA: 4 (...);``.
    """
    for client in names_or_none(files, BEEGFS):
        for servers in ("mgmt_nodes", "meta_nodes", "storage_nodes"):
            for line in read_or(files, f"{BEEGFS}/{client}/{servers}", "").split("\n"):
                for connections in line.partition("Connections: ")[2].split(";"):
                    for server in _addresses(connections):
                        yield Storage("beegfs", server, rdma=connections.lstrip().startswith("RDMA:"))


def _rbd(files: Files) -> Iterator[Storage]:
    for number in names_or_none(files, RBD):
        try:
            text = read_or(files, f"{RBD}/{number}/config_info", "")
        except PermissionError:
            continue  # only root may read it: behind the monitors' addresses it may have a key
        for server in _addresses(text.partition(" ")[0]):
            yield Storage(f"rbd{number}", server)


def _nvme(files: Files) -> Iterator[Storage]:
    for name in names_or_none(files, NVME):
        transport = read_or(files, f"{NVME}/{name}/transport", "")
        if transport in ("rdma", "tcp"):
            # nvmf_get_address(), drivers/nvme/host/fabrics.c
            text = read_or(files, f"{NVME}/{name}/address", "")
            fields = dict(field.strip().partition("=")[::2] for field in text.split(","))
            for server in _bare(fields.get("traddr", "")):
                ends = frozenset(fields[key] for key in NVME_ENDS if fields.get(key))
                yield Storage(name, server, ends, transport == "rdma")


def _iscsi(files: Files) -> Iterator[Storage]:
    """The sessions of iscsi_tcp, iser and cards with iSCSI of their own, each with the servers of its connections.

    While a connection is lost, its session is still in use, and only the configured address is known (persistent_address).
    The host of iser and of a card lies below the PCI function (iscsi_host_add), so its name is an end, too.
    """
    servers: dict[str, set[str]] = {}
    for connection in names_or_none(files, ISCSI_CONNECTIONS):
        # connection<session>:<number> (iscsi_alloc_conn)
        session = connection.replace("connection", "session").partition(":")[0]
        for file in ("address", "persistent_address"):
            servers.setdefault(session, set()).update(
                _bare(_if_connected(files, f"{ISCSI_CONNECTIONS}/{connection}/{file}"))
            )
    for host in names_or_none(files, ISCSI_HOSTS):
        netdev, own = (_if_connected(files, f"{ISCSI_HOSTS}/{host}/{file}") for file in ("netdev", "ipaddress"))
        ends = frozenset(filter(None, (host, netdev, *_bare(own))))
        rdma = read_or(files, f"{SCSI_HOSTS}/{host}/proc_name", "") == "iscsi_iser"
        for session in names_or_none(files, f"{ISCSI_HOSTS}/{host}/device"):
            for server in servers.get(session, ()):
                yield Storage(f"iscsi {session}", server, ends, rdma)


def _srp(files: Files) -> Iterator[Storage]:
    """The targets of SRP. A target's host lies below the PCI function (srp_add_target). Its server has a GID, and no route."""
    for host in names_or_none(files, SCSI_HOSTS):
        if read_or(files, f"{SCSI_HOSTS}/{host}/proc_name", "") == "ib_srp":
            yield Storage(f"srp {host}", "", frozenset({host}), rdma=True)


def _if_connected(files: Files, path: str) -> str:
    """The text of a file of iSCSI; empty if the driver does not have it, or the connection is lost."""
    try:
        return read_or(files, path, "")
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            return ""
        raise


def _bare(text: str) -> Iterator[str]:
    """The address in a text in which IPv6 has no brackets."""
    return _addresses(f"[{text}]" if ":" in text else text)


def _addresses(text: str) -> Iterator[str]:
    for match in ADDRESS.findall(text):
        try:
            yield str(ipaddress.ip_address(match.strip("[]")))
        except ValueError:
            continue
