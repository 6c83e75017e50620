"""Builds the image of the sandbox `docker`.

python -m areal_gym.sandbox.image               from the Dockerfile beside this module
python -m areal_gym.sandbox.image --from-host   from this interpreter, without a registry
"""
