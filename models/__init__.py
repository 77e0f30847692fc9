"""Complete models and their entry points, built from what a user of tf_fusedrec can import.

This file imports nothing: models/serve.py must run where only TensorFlow is installed.
"""
