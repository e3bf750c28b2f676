"""The documentation site: what MkDocs fills into the pages of docs/ from the code. `make docs` builds it."""
