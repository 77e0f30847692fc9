"""The package with other releases of TensorFlow and Python than .venv has: `make test-on`."""
