"""Implementations of the operations a forward pass needs."""
