"""Complete models and their entry points, built from what a user of tf_fusedrec can import.

This file imports nothing: run_signature.py and serve/ must run where only TensorFlow is installed.
"""
