"""The unprivileged half of the agent: it publishes the report over HTTP and in Kubernetes. It never reads the machine.

HTTP reads the report file on each request. Kubernetes gets it later, so the reporter writes a file that says which generation
of the report is published there.
"""
