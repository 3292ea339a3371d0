"""Serving on a GPU: which one, what is loaded onto it, and how batches pass through it."""
