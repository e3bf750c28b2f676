"""The report on a whole fleet, from Prometheus and from the record of the last deploy."""
