"""What `make` runs: the environment's set-up and the launch of the main job. Standard library only, but for docs/."""
