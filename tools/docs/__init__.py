"""Figures of the pages, the configuration reference, what works on a GPU, and the hooks of mkdocs."""
