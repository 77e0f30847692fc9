"""The programs of `make`: the environment's set-up, the launch of the main job, the wheel, other TensorFlow releases.

They need the standard library only, except docs/, launch_training.py and versions/answers.py.
"""
