"""The spec of a node: its types, its parser and its JSON schema."""
