"""Watch: a run as people see it."""
