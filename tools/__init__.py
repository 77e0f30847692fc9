"""The programs of `make`: the environment's set-up, the wheel, other TensorFlow releases.

They need the standard library only, except docs/. setup.py needs object_cache.py.
"""
