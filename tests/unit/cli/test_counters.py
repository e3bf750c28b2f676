"""`trackbed stat`: every vendor's counters under four names, and the rates computed from them."""

import pytest

from cli.commands.stat import rate_text
from cli.counters import Meter, NoDevice, Source, counters, read, sources
from tests.sim.kernel import Kernel

PF = "0000:3b:00.0"


def rdma(name: str, port: int = 1, **values: str) -> dict[str, str]:
    return {f"/sys/class/infiniband/{name}/ports/{port}/{path.replace('__', '/')}": v for path, v in values.items()}


def netdev(name: str) -> dict[str, str]:
    folder = f"/sys/class/net/{name}/statistics"
    return {f"{folder}/{field}": "7" for field in ("rx_bytes", "rx_packets", "tx_bytes", "tx_packets", "rx_errors")}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "counters__port_rcv_data": "10", "counters__port_rcv_packets": "2",
                "counters__port_xmit_data": "20", "counters__port_xmit_packets": "3",
            },
            {"rx_bytes": 40, "rx_packets": 2, "tx_bytes": 80, "tx_packets": 3},
        ),
        (
            {
                "hw_counters__hw_rx_bytes_cnt": "10", "hw_counters__hw_rx_packets_cnt": "2",
                "hw_counters__hw_tx_bytes_cnt": "20", "hw_counters__hw_tx_packets_cnt": "3",
            },
            {"rx_bytes": 10, "rx_packets": 2, "tx_bytes": 20, "tx_packets": 3},
        ),
        (
            {"hw_counters__rx_bytes_cnt": "10", "hw_counters__tx_packets_cnt": "3"},
            {"rx_bytes": 10, "tx_packets": 3},
        ),
        (
            {"hw_counters__ip4InOctets": "10", "hw_counters__ip6InOctets": "5", "hw_counters__ip4OutPkts": "1"},
            {"rx_bytes": 15},
        ),
        ({"hw_counters__sent_pkts": "3", "hw_counters__rcvd_pkts": "4"}, {"rx_packets": 4, "tx_packets": 3}),
        ({"counters__port_rcv_data": "N/A (no PMA)", "hw_counters__rx_bytes": "9"}, {"rx_bytes": 9}),
        ({"state": "4: ACTIVE"}, {}),
    ],
    ids=["infiniband and mlx5", "erdma, Alibaba's", "erdma, Linux's", "irdma", "rxe", "bnxt_re without a PMA", "siw"],
)  # fmt: skip
def test_every_vendors_counters_are_found(files: dict[str, str], expected: dict[str, int]) -> None:
    assert read(Kernel.with_files(rdma("dev0", 1, **files)).files, Source("dev0", 1)) == expected


def test_a_device_is_found_by_each_of_its_names() -> None:
    tree = Kernel.with_files(
        {
            **rdma("mlx5_0", counters__port_rcv_data="1", gid_attrs__ndevs__0="ens1"),
            **netdev("ens1"),
            **netdev("lo"),
            f"/sys/bus/pci/devices/{PF}/infiniband/mlx5_0/x": "",
            f"/sys/bus/pci/devices/{PF}/net/ens1/x": "",
        }
    ).files
    both = (Source("mlx5_0", 1), Source("ens1"))
    assert sources(tree, "mlx5_0") == sources(tree, "ens1") == sources(tree, PF) == sources(tree, None) == both
    assert sources(tree, "lo") == (Source("lo"),)
    with pytest.raises(NoDevice, match="mlx5_9 is not an RDMA device, netdev or PCI address here"):
        sources(tree, "mlx5_9")


def test_without_a_name_there_must_be_one_rdma_device() -> None:
    with pytest.raises(NoDevice, match="one of a, b"):
        sources(Kernel.with_files({**rdma("a", state="x"), **rdma("b", state="x")}).files, None)
    with pytest.raises(NoDevice, match="no RDMA device"):
        sources(Kernel.with_files(netdev("lo")).files, None)


def test_all_counters_by_their_own_names() -> None:
    files = rdma("dev0", counters__link_downed="1", hw_counters__lifespan="10", hw_counters__out_of_buffer="2")
    assert counters(Kernel.with_files(files).files, Source("dev0", 1)) == {"link_downed": 1, "out_of_buffer": 2}
    assert counters(Kernel.with_files(netdev("lo")).files, Source("lo"))["rx_errors"] == 7


def measured(*readings: tuple[float, int | None]) -> Meter:
    """A meter that has taken these values of a counter at these times; None: the device is gone."""
    meter = Meter(Source("lo"))
    for now, value in readings:
        meter.take({} if value is None else {"rx_bytes": value}, now)
    return meter


def test_rates_use_the_time_that_really_passed() -> None:
    meter = measured((10.0, 1000), (12.0, 5000), (13.0, 5000), (15.0, 8000))
    ((name, rate),) = meter.rates()
    assert name == "rx_bytes"
    assert (rate.now, rate.maximum, rate.average, rate.minimum, rate.total) == (1500, 2000, 1400, 0, 7000)
    assert meter.elapsed == 5.0


@pytest.mark.parametrize(
    ("readings", "rates"),
    [
        ([(0.0, 5)], []),
        ([(0.0, 5000), (1.0, 100), (2.0, 300)], [(200, 200)]),
        ([(0.0, 0), (1.0, 100), (2.0, None)], [(0, 100)]),
    ],
    ids=["one reading", "a reset is no negative rate", "a device that is gone has no traffic"],
)
def test_a_rate_needs_two_readings_that_follow_each_other(
    readings: list[tuple[float, int | None]], rates: list[tuple[int, int]]
) -> None:
    assert [(rate.now, rate.total) for _, rate in measured(*readings).rates()] == rates


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (0.0, "rx_bytes", "0 B/s"),
        (999.4, "rx_bytes", "999 B/s"),
        (1000.0, "rx_bytes", "0.98 KiB/s"),
        (1024.0**2 * 9.996, "tx_bytes", "10.0 MiB/s"),
        (46.5 * 1024**3, "tx_bytes", "46.5 GiB/s"),
        (5.0 * 1024**6, "tx_bytes", "5120 PiB/s"),
        (999.6, "rx_packets", "1.00 k/s"),
        (12_345_678.0, "tx_packets", "12.3 M/s"),
    ],
)
def test_bytes_have_binary_prefixes_and_packets_decimal_ones(value: float, name: str, text: str) -> None:
    assert rate_text(value, name) == text
