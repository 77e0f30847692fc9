"""Parts of the documentation besides docs/*.md: drawings, the configuration reference, the hooks of mkdocs."""
