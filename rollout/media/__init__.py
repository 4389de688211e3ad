"""Pictures and sounds: from files and rows of data to arrays for a tower and tokens for the
decoder.

Needs numpy only, until data has pictures that are not arrays (Pillow) or sounds that are not WAV
files (soundfile). Neither jax nor torch is imported. Video is refused.
"""
