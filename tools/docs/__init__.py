"""What the documentation is made of besides docs/*.md: drawings, the configuration reference, the hooks of mkdocs."""
