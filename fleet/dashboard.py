"""Prints a Grafana dashboard of the nodes' metrics (docs/metrics.md), as JSON to import or to provision.

$ .venv/bin/python -m fleet.dashboard > trackbed.json
"""

from __future__ import annotations

import sys

from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    FieldColor,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphDrawStyle, LegendDisplayMode, LegendPlacement, VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DataTransformerConfig,
    FieldColorModeId,
    Threshold,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CHOSEN = 'instance=~"$instance"'

GREEN, ORANGE, RED = "green", "orange", "red"
READY = {"1": ValueMappingResult(text="ready", color=GREEN), "0": ValueMappingResult(text="not ready", color=RED)}


def dashboard() -> str:
    """The dashboard's JSON."""
    built = (
        Dashboard("Trackbed")
        .uid("trackbed")
        .tags(["trackbed", "rdma"])
        .refresh("1m")
        .time("now-6h", "now")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            QueryVariable("instance")
            .label("Node")
            .datasource(SOURCE)
            .query("label_values(trackbed_ready, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    _fleet(built)
    _nodes(built)
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(built.build())
    return text


def _fleet(built: Dashboard) -> None:
    """The panels about all nodes."""
    # A node that does not answer has no trackbed_ready, and is not ready. One that answers may have other series named up, too.
    each = 'count by (instance) (up{job="trackbed"})'
    ready, nodes = f"avg(min by (instance) (trackbed_ready == bool 1) or 0 * {each})", f"count({each})"
    good_when_full = _thresholds((None, RED), (0.9, ORANGE), (1, GREEN))
    bad_when_any = _thresholds((None, GREEN), (1, RED))
    built.with_row(Row("The fleet"))
    built.with_panel(_number("Nodes that are ready", ready).unit("percentunit").thresholds(good_when_full))
    built.with_panel(_number("Nodes", nodes))
    for title, query in (
        ("Not ready", "count(trackbed_ready != 1)"),
        ("Report not fresh", "count(trackbed_report_fresh != 1)"),
        ("Newer spec waits", "count(trackbed_up_to_date == 0)"),
        ("Reporter does not answer", 'count(up{job="trackbed"} == 0)'),
    ):
        built.with_panel(_number(title, f"{query} or vector(0)").thresholds(bad_when_any))
    built.with_panel(_lines("Ready", ("sum(trackbed_ready == bool 1)", "ready"), (nodes, "nodes")).decimals(0))
    built.with_panel(
        _lines("Agents by version", ("count by (version) (trackbed_build_info)", "{{version}}")).decimals(0)
    )
    built.with_panel(_lines("Nodes by spec", ("count by (hash) (trackbed_spec_info)", "{{hash}}")).decimals(0))


def _nodes(built: Dashboard) -> None:
    """The panels about the chosen nodes."""
    built.with_row(Row("The chosen nodes"))
    was_not = f"trackbed_ready{{{CHOSEN}}} and on (instance) (min_over_time(trackbed_ready{{{CHOSEN}}}[$__range]) == 0)"
    built.with_panel(
        statetimeline.Panel()
        .title("Nodes that were not ready at times")
        .datasource(SOURCE)
        .with_target(_query(was_not, "{{instance}}"))
        .mappings([ValueMap(options=READY)])
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .show_value(VisibilityMode.NEVER)
        .no_value("all were ready all the time")
        .span(12)
        .height(9)
    )
    built.with_panel(
        table.Panel()
        .title("Conditions that are not True now")
        .datasource(SOURCE)
        .with_target(
            _query(f'trackbed_condition{{status!="True",{CHOSEN}}} == 1', "").instant().format(PromQueryFormat.TABLE)
        )
        .with_transformation(_columns("instance", "type", "status", "severity"))
        .no_value("all are True")
        .span(12)
        .height(9)
    )
    conditions = f'sum by (type) (trackbed_condition{{status!="True",{CHOSEN}}})'
    repairs = f"sum by (kind) (increase(trackbed_drift_repairs_total{{{CHOSEN}}}[$__rate_interval]))"
    suspects = f"sum by (program) (increase(trackbed_drift_suspects_total{{{CHOSEN}}}[$__rate_interval]))"
    outcomes = f'sum by (result) (trackbed_outcomes{{result!="applied",{CHOSEN}}})'
    heartbeat = f"time() - trackbed_heartbeat_timestamp_seconds{{{CHOSEN}}}"
    changes = f"changes(trackbed_generation{{{CHOSEN}}}[$__rate_interval])"
    built.with_panel(_lines("Conditions that are not True, by type", (f"{conditions} > 0", "{{type}}")).decimals(0))
    built.with_panel(
        _lines("Repairs of drift, by kind", (f"{repairs} > 0", "{{kind}}")).draw_style(GraphDrawStyle.BARS)
    )
    built.with_panel(
        _lines(
            "Repairs of drift while a program ran that sets such values", (f"{suspects} > 0", "{{program}}")
        ).draw_style(GraphDrawStyle.BARS)
    )
    built.with_panel(_lines("Changes that are not made", (f"{outcomes} > 0", "{{result}}")).decimals(0))
    chosen = f"{{{CHOSEN}}}"
    nics = (f"sum(trackbed_nic_ready{chosen})", "ready"), (f"count(trackbed_nic_ready{chosen})", "NICs")
    vfs = (f"sum(trackbed_nic_ready_vfs{chosen})", "ready"), (f"sum(trackbed_nic_vfs{chosen})", "VFs")
    links = f'sum by (state) (trackbed_nic_link{{state!="good",{CHOSEN}}})'
    built.with_panel(_lines("NICs that are ready", *nics).decimals(0))
    built.with_panel(_lines("VFs that are ready", *vfs).decimals(0))
    built.with_panel(_lines("Links that have flapped, by state", (f"{links} > 0", "{{state}}")).decimals(0))
    built.with_panel(_lines("Age of the heartbeat", (heartbeat, "{{instance}}")).unit("s"))
    built.with_panel(_lines("Changes of the report", (changes, "{{instance}}")).decimals(0))


def _query(expression: str, legend: str) -> Dataquery:
    return Dataquery().datasource(SOURCE).expr(expression).legend_format(legend)


def _number(title: str, expression: str) -> stat.Panel:
    return (
        stat.Panel().title(title).datasource(SOURCE).with_target(_query(expression, title).instant()).span(4).height(4)
    )


def _lines(title: str, *queries: tuple[str, str]) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .datasource(SOURCE)
        .min(0)
        .fill_opacity(10)
        .legend(
            VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
        )
        .span(8)
        .height(8)
    )
    for number, (expression, legend) in enumerate(queries):
        panel.with_target(_query(expression, legend).ref_id("AB"[number]))
    return panel


def _thresholds(*steps: tuple[float | None, str]) -> ThresholdsConfig:
    return ThresholdsConfig().steps([Threshold(value, colour) for value, colour in steps])


def _columns(*names: str) -> DataTransformerConfig:
    return DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(names)}})


if __name__ == "__main__":
    sys.stdout.write(dashboard() + "\n")
