"""The programs of `make`: the environment's set-up, the launch of the main job, the wheel, other TensorFlow releases.

They need the standard library only, except docs/ and launch_training.py. setup.py needs object_cache.py.
"""
