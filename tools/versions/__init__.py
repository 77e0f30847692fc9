"""The package with other releases of TensorFlow and Python than those of .venv: `make test-on`."""
