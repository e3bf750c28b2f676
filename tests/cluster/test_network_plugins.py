"""The lab's images of the plugins that pods' networks need: those that the Go module proxy does not serve are left out."""

from pathlib import Path

import pytest

from lab.cluster import bundle, network_plugins


def test_plugins_that_cannot_be_built_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"GOPROXY": "off", "GOTOOLCHAIN": "local"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GOMODCACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "XDG_CACHE_HOME" / "trackbed").mkdir(parents=True)
    network_plugins.build()
    assert network_plugins.built() == ()
    assert network_plugins.images() == []
    printed = capfd.readouterr()
    for name in network_plugins.BUILDS:
        assert f"without {name}: " in printed.out + printed.err
    assert "GOPROXY=off" in printed.out + printed.err


def test_each_image_of_the_manifests_is_one_that_the_lab_writes() -> None:
    written = {image.reference for image in network_plugins.images()}
    references = {network_plugins.reference(name) for name in network_plugins.built()}
    sriov = {network_plugins.SRIOV_DEVICE_PLUGIN} if network_plugins.has_sriov_device_plugin() else set()
    assert written == references | sriov
    assert bundle.perftest().reference.endswith(f"/{bundle.PERFTEST}")
