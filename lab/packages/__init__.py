"""The contents of the lab's vendor repositories: one file for each package or set of packages, made from public sources."""
