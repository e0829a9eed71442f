"""Atoll: adaptive training over low-bandwidth links."""
