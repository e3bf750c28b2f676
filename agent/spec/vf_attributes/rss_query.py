"""Whether a VF may ask for the table and the key of receive side scaling (RSS)."""

from agent.spec.vf_attributes import VfAttribute, switch

ATTRIBUTES = (
    VfAttribute(
        name="rss_query",
        type=bool,
        meaning="the VF may ask for the RSS table and key",
        order=50,
        netlink="IFLA_VF_RSS_QUERY_EN",
        read=switch,
        key="rss_query_en",
    ),
)
