"""Configurations for pods and nodes of accelerators, each planned: `docs/plans/`."""
