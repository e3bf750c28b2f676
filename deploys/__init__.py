"""Other deploys of the operator than deploy.py; pyinfra reads them by their paths."""
