"""The programs of `make`: the environment's set-up and the launch of the main job.

They need the standard library only, except docs/ and launch_training.py.
"""
