"""Shipped specs and policies (TOML data only)."""
