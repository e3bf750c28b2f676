"""What the lab's vendor repositories hold: one file a package, or a set of them, each made from public sources."""
