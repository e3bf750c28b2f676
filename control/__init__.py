"""Commands of `trackbed` on the control host, beside those of a cluster (fleet/commands): each module in this folder is one."""
